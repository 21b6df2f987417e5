"""The process that receives or closes descriptors of one stranger, and ends: forked by the receiver for one connection.

Guarantees: it holds nothing of other connections, so that a descriptor that does not close keeps nobody else waiting; what it hands to
the daemon is a pidfd and sealed pages, which close at once whatever the sender does. Everything else goes when the process ends, which
may be never: then the process stays in state D until the sender's file system is gone, and the receiver counts it against the sender.
"""

from __future__ import annotations

import array
import fcntl
import gc
import os
import select
import signal
import socket
from collections.abc import Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple, NoReturn

from ciuic import processes
from ciuic.daemon.peer_messages import Said, encode
from ciuic.peer_socket import Caller
from ciuic.watch_client import MOST_FDS
from ciuic.watch_page import check_page

_READY_MS: Final = 2000
"""A forked process closes what it inherited in less than a millisecond; this is for a machine that is overloaded."""
_DELIVER_MS: Final = 3000
_FIRST_FD: Final = 3
"""0 to 2 are /dev/null and the log."""
NO_TRAINER: Final = "the message is not that of a trainer"


class Helper(NamedTuple):
    """One that was forked. It does not touch the connection before ``go`` is closed."""

    pid: int
    pidfd: int
    go: socket.socket

    def start(self) -> None:
        self.go.close()


def fork_helper(
    task: Literal["receive", "close"],
    connection: socket.socket,
    channel: socket.socket,
    number: int,
    caller: Caller,
    max_message_bytes: int,
) -> Helper | None:
    """Fork a process that has let go of every other descriptor of ours; None where that did not work. OSError."""
    ours, theirs = socket.socketpair()
    try:
        pid = os.fork()
    except BaseException:
        ours.close()
        theirs.close()
        raise
    if pid == 0:
        _live(
            task, (connection.fileno(), channel.fileno(), theirs.fileno()), number, caller, max_message_bytes
        )
    theirs.close()
    pidfd = os.pidfd_open(pid)  # it is our child and was not waited for, so the number is its own
    # Until it has let go we close nothing: else its close of an inherited connection could be the last one, which may block.
    if _is_ready(ours):
        return Helper(pid, pidfd, ours)
    ours.close()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.waitpid(pid, 0)  # it has touched nothing of a stranger yet, so it ends
    os.close(pidfd)
    return None


def _is_ready(go: socket.socket) -> bool:
    poll = select.poll()
    poll.register(go, select.POLLIN)
    return bool(poll.poll(_READY_MS)) and go.recv(1) == b"r"


def _live(task: str, fds: Sequence[int], number: int, caller: Caller, max_message_bytes: int) -> NoReturn:
    """The process from its first moment to its end. Status 0: the daemon has the message."""
    status = 1
    gc.disable()  # a socket object of the parent's that is collected here would close whatever has its number now
    try:
        connection, channel, go = (socket.socket(fileno=fd) for fd in _keep_only(fds))
        go.send(b"r")
        go.recv(1)  # the end: our parent has done with the connection what it had to
        if task == "receive":
            _receive(connection, channel, number, caller, max_message_bytes)
        # One that hangs from here on must not hold the daemon's channel open: the daemon sees by its end that a receiver has ended.
        channel.close()
        connection.close()
        status = 0
    finally:
        os._exit(status)


def _keep_only(fds: Sequence[int]) -> range:
    """Move these descriptors to the lowest numbers and close all others."""
    above = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FD + len(fds)) for fd in fds]
    kept = range(_FIRST_FD, _FIRST_FD + len(fds))
    for fd, target in zip(above, kept, strict=True):
        os.dup2(fd, target, inheritable=False)
    # Not os.closerange: where the C library has no close_range(2) it makes a system call for each of a million numbers.
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= kept.stop:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    return kept


def _receive(
    connection: socket.socket, channel: socket.socket, number: int, caller: Caller, max_message_bytes: int
) -> None:
    """Receive one message and hand it to the daemon. What came with it closes when the process ends."""
    room = socket.CMSG_SPACE(MOST_FDS * array.array("i").itemsize)
    # The credentials that tell an empty message from the end would take the room of the descriptors.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    data, ancillary, flags, _ = connection.recvmsg(
        max_message_bytes, room, socket.MSG_CMSG_CLOEXEC | socket.MSG_DONTWAIT
    )
    fds = _descriptors(ancillary)
    said = Said(number=number, uid=caller.uid, groups=tuple(caller.groups), data=data)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not is_harmless(fds):
        said = Said(number=number, uid=caller.uid, groups=tuple(caller.groups), data=b"", trouble=NO_TRAINER)
        fds = []
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    poll.poll(_DELIVER_MS)
    socket.send_fds(channel, [encode(said)], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def is_harmless(fds: Sequence[int]) -> bool:
    """Return whether these are a pidfd and pages, by calls that ask no file system of the sender's."""
    try:
        processes.pid_of(fds[0])
        for page in fds[1:]:
            check_page(page)  # asks for its seals first, which only memory files of the kernel have
    except (IndexError, ValueError, OSError):
        return False
    return True


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
