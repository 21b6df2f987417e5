"""Helper process that receives or closes the descriptors of one unprivileged caller.

Forked by the receiver for one connection.

Guarantees: it holds no descriptor of other connections, so that a descriptor that does not close delays no
other caller; it hands the daemon only a pidfd and sealed pages, which close at once whatever the sender does.
Everything else closes when the process ends, which may be never: then the process stays in state D until the
sender's file system is gone, and the receiver counts it against the sender.
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

from ciuic.daemon.peers.messages import Said, encode
from ciuic.protocol.heartbeat_page import check_page
from ciuic.protocol.peer_socket import Caller
from ciuic.protocol.watch_client import MAX_FDS
from ciuic.system import processes

# Time limit for a forked process to close inherited descriptors, which takes less than a millisecond unless
# the host is overloaded.
_READY_MS: Final = 2000
# A helper that cannot deliver in this time ends, and its caller gets an error.
_DELIVER_MS: Final = 3000
# Lowest descriptor number that is used; 0 to 2 are /dev/null and the log.
_FIRST_FD: Final = 3
NO_TRAINER: Final = "the message is not that of a trainer"


class HelperProcess(NamedTuple):
    """A forked helper, which does not touch the connection before `go` is closed."""

    pid: int
    pidfd: int
    go: socket.socket

    def start(self) -> None:
        """Let the helper begin."""
        self.go.close()


def fork_helper(
    task: Literal["receive", "close"],
    connection: socket.socket,
    channel: socket.socket,
    number: int,
    caller: Caller,
    max_message_bytes: int,
) -> HelperProcess | None:
    """Fork a helper that has closed every other descriptor of this process.

    Args:
        task: `receive` a message with descriptors, or `close` the connection.
        connection: connection of the caller.
        channel: socket to the daemon.
        number: number of the connection.
        caller: the kernel's credentials of the caller.
        max_message_bytes: longest message.

    Returns:
        The helper; None where it did not get ready in time.

    Raises:
        OSError: no process could be forked.
    """
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
    # The pid cannot be another process's: this child was not waited for.
    pidfd = os.pidfd_open(pid)
    # Until the helper has closed what it inherited, this process closes nothing: otherwise the helper's close
    # of an inherited connection could be the last one, which may block.
    if _is_ready(ours):
        return HelperProcess(pid, pidfd, ours)
    ours.close()
    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    # Does not block: the helper has received nothing yet, so the signal ends it.
    os.waitpid(pid, 0)
    os.close(pidfd)
    return None


def _is_ready(go: socket.socket) -> bool:
    poll = select.poll()
    poll.register(go, select.POLLIN)
    return bool(poll.poll(_READY_MS)) and go.recv(1) == b"r"


def _live(task: str, fds: Sequence[int], number: int, caller: Caller, max_message_bytes: int) -> NoReturn:
    """Run the helper process from the fork to its end.

    Exit status 0: the daemon has the message, or the connection is closed.
    """
    status = 1
    # A socket object of the parent that is collected here would close the descriptor that has its number now.
    gc.disable()
    try:
        connection, channel, go = (socket.socket(fileno=fd) for fd in _keep_only(fds))
        go.send(b"r")
        go.recv(1)  # end of the stream: the parent has finished with the connection
        if task == "receive":
            _receive(connection, channel, number, caller, max_message_bytes)
        # A helper that hangs from here on must not hold the daemon's channel open: its end tells the daemon
        # that a receiver has ended.
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
    # Not os.closerange, which makes a system call for each of a million numbers where the C library has no
    # close_range(2).
    for fd in map(int, os.listdir("/proc/self/fd")):
        if fd >= kept.stop:
            with suppress(OSError):  # the descriptor of the listing itself
                os.close(fd)
    return kept


def _receive(
    connection: socket.socket, channel: socket.socket, number: int, caller: Caller, max_message_bytes: int
) -> None:
    """Receive one message and hand it to the daemon. Its descriptors close when the process ends."""
    room = socket.CMSG_SPACE(MAX_FDS * array.array("i").itemsize)
    # With SO_PASSCRED on, which distinguishes an empty message from the end, credentials would take the room
    # of the descriptors.
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
    # MSG_NOSIGNAL: an error and no SIGPIPE where the daemon has gone.
    socket.send_fds(channel, [encode(said)], fds, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def is_harmless(fds: Sequence[int]) -> bool:
    """Return whether these are a pidfd and pages, by calls that reach no file system of the sender."""
    try:
        processes.pid_of(fds[0])
        for page in fds[1:]:
            check_page(page)  # checks seals first, which only memory files of the kernel have
    except (IndexError, ValueError, OSError):
        return False
    return True


def _descriptors(ancillary: list[tuple[int, int, bytes]]) -> list[int]:
    found = array.array("i")
    for level, kind, data in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            found.frombytes(data[: len(data) - len(data) % found.itemsize])
    return list(found)
