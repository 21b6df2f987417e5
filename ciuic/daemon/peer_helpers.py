"""Helper processes of a receiver (peer_receiver.py), each forked to receive or close the descriptors of one caller.

Guarantees: a helper holds no descriptor of other connections, so that a descriptor that does not close delays
no other caller; it hands the daemon only a pidfd and sealed pages, which close at once whatever the sender
does. Everything else closes when the process ends, which may be never: then the process stays in state D
until the sender's file system is gone, and the receiver counts it against the sender.

The pool runs one helper at a time for each user, so that a user's descriptors that do not close delay that
user alone; a helper that cannot be killed is reported to the daemon once, and its user is refused as long as
it lives and `_REFUSED_SECONDS` more. So a user never has more than one process in state D through a socket;
all users together have no more than `_MAX_HUNG`.
"""

from __future__ import annotations

import array
import fcntl
import gc
import os
import select
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final, Literal, NamedTuple, NoReturn

from ciuic.daemon.peer_messages import Hung, ReceiverOptions, Said, encode
from ciuic.protocol.heartbeat_page import check_page
from ciuic.protocol.peer_socket import Caller, is_safe_to_close
from ciuic.protocol.watch_client import MAX_FDS
from ciuic.system import processes

# Time limit for a forked process to close inherited descriptors, which takes less than a millisecond unless
# the host is overloaded.
_READY_MS: Final = 2000
# A helper that cannot deliver in this time ends, and its caller gets an error.
_DELIVER_MS: Final = 3000
# Lowest descriptor number that is used; 0 to 2 are /dev/null and the log.
_FIRST_FD: Final = 3
_NO_TRAINER: Final = "the message is not that of a trainer"
# Helpers that work at once. Each takes milliseconds unless a descriptor does not close.
_MAX_RUNNING: Final = 16
# Helpers of all users that hang. With so many, descriptors are received from root alone until some have
# ended.
_MAX_HUNG: Final = 32
# Connections of users with a hung helper that are kept open because nothing can close them safely.
_MAX_UNCLOSED: Final = 512
# Time after SIGKILL from which on a process that has not ended counts as hung, in an uninterruptible wait.
_HUNG_SECONDS: Final = 2.0
# Time after the end of a hung helper for which its user is still refused.
_REFUSED_SECONDS: Final = 600.0
# Pause after a failed fork: a lack of memory or processes passes.
_FORK_AGAIN_SECONDS: Final = 1.0
_REFUSED: Final = "descriptors that this user sent earlier do not close, so no others are taken"
_FAILED: Final = "the message could not be received in time"


class _HelperProcess(NamedTuple):
    """A forked helper, which does not touch the connection before `go` is closed."""

    pid: int
    pidfd: int
    go: socket.socket

    def start(self) -> None:
        """Let the helper begin."""
        self.go.close()


def _fork_helper(
    task: Literal["receive", "close"],
    connection: socket.socket,
    channel: socket.socket,
    number: int,
    caller: Caller,
    max_message_bytes: int,
) -> _HelperProcess | None:
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
        return _HelperProcess(pid, pidfd, ours)
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
        said = Said(number=number, uid=caller.uid, groups=tuple(caller.groups), data=b"", trouble=_NO_TRAINER)
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


class _Job(NamedTuple):
    task: Literal["receive", "close"]
    number: int
    sock: socket.socket
    caller: Caller


class _Running:
    def __init__(self, job: _Job, helper: _HelperProcess, deadline: float) -> None:
        self.job = job
        self.helper = helper
        self.deadline = deadline
        self.killed = False
        self.hung = False


class HelperPool:
    """Helpers of one receiver."""

    def __init__(
        self,
        selector: selectors.BaseSelector,
        channel: socket.socket,
        options: ReceiverOptions,
        *,
        tell: Callable[[Hung], None],
        done: Callable[[int, str], None],
    ) -> None:
        """Prepare to fork helpers.

        Args:
            selector: event loop of the receiver, which watches the helpers' pidfds.
            channel: socket to the daemon.
            options: options of the receiver.
            tell: sends the daemon a message about a hung helper.
            done: called for each `receive` that ended, with the number of the connection and the error;
                empty: none.
        """
        self._selector = selector
        self._channel = channel
        self._options = options
        self._tell = tell
        self._done = done
        # Jobs that wait, by user.
        self._waiting: dict[int, deque[_Job]] = {}
        # Running helper of each user; a hung one stays here, and keeps its user's next job from being
        # started.
        self._running: dict[int, _Running] = {}
        self._refused_until: dict[int, float] = {}
        self._fork_at = 0.0

    @property
    def too_many_unclosed(self) -> bool:
        """True if more than `_MAX_UNCLOSED` jobs wait."""
        return sum(len(jobs) for jobs in self._waiting.values()) > _MAX_UNCLOSED

    def receive(self, number: int, sock: socket.socket, caller: Caller) -> None:
        """Have a helper receive the next message, which has descriptors, and hand it to the daemon.

        `sock` stays the caller's.
        """
        self._add(_Job("receive", number, sock, caller))

    def close(self, number: int, sock: socket.socket, caller: Caller) -> None:
        """Close a connection: at once where no descriptor is queued on it that may block, else by a helper."""
        if is_safe_to_close(sock):
            sock.close()
        else:
            self._add(_Job("close", number, sock, caller))

    def look(self, now: float) -> None:
        """Kill helpers that exceed their time, report those that do not end, and start waiting jobs."""
        for uid, running in self._running.items():
            if running.hung or now < running.deadline:
                continue
            if not running.killed:
                running.killed = True
                running.deadline = now + _HUNG_SECONDS
                signal.pidfd_send_signal(running.helper.pidfd, signal.SIGKILL)
                continue
            running.hung = True
            self._tell(Hung(uid, running.helper.pid))
            if running.job.task == "receive":
                self._done(running.job.number, _FAILED)
        # A copy: starting the last job of a user removes the user.
        for uid in list(self._waiting):
            self._start_next(uid, now)

    def _add(self, job: _Job) -> None:
        self._waiting.setdefault(job.caller.uid, deque()).append(job)
        self._start_next(job.caller.uid, time.monotonic())

    def _start_next(self, uid: int, now: float) -> None:
        jobs = self._waiting.get(uid)
        if not jobs:
            self._waiting.pop(uid, None)
            return
        if self._is_refused(uid, now):
            refused = [job for job in jobs if job.task == "receive"]
            self._waiting[uid] = deque(job for job in jobs if job.task == "close")
            for job in refused:
                self._done(job.number, _REFUSED)
            if uid in self._running:
                return
        at_work = sum(not one.hung for one in self._running.values())
        if uid in self._running or at_work >= _MAX_RUNNING or now < self._fork_at or not self._waiting[uid]:
            return
        self._start(self._waiting[uid].popleft(), now)

    def _is_refused(self, uid: int, now: float) -> bool:
        if self._refused_until.get(uid, now) > now:
            return True
        self._refused_until.pop(uid, None)
        hung = sum(one.hung for one in self._running.values())
        return (uid in self._running and self._running[uid].hung) or (uid != 0 and hung >= _MAX_HUNG)

    def _start(self, job: _Job, now: float) -> None:
        try:
            helper = _fork_helper(
                job.task, job.sock, self._channel, job.number, job.caller, self._options.max_message_bytes
            )
        except OSError:
            helper = None
        if helper is None:
            # Back to the front, so that the jobs stay in order.
            self._waiting[job.caller.uid].appendleft(job)
            self._fork_at = now + _FORK_AGAIN_SECONDS
            return
        if job.task == "close":
            # Does not block, because it is not the last close: the helper still has the connection open.
            job.sock.close()
        helper.start()
        self._running[job.caller.uid] = _Running(job, helper, now + self._options.receive_seconds)
        self._selector.register(helper.pidfd, selectors.EVENT_READ, lambda mask: self._ended(job.caller.uid))

    def _ended(self, uid: int) -> bool:
        running = self._running.pop(uid)
        self._selector.unregister(running.helper.pidfd)
        os.close(running.helper.pidfd)
        # Does not wait: the pidfd is readable, so the process has ended.
        _, status = os.waitpid(running.helper.pid, 0)
        if running.hung:
            self._refused_until[uid] = time.monotonic() + _REFUSED_SECONDS
        elif running.job.task == "receive":
            self._done(running.job.number, "" if status == 0 else _FAILED)
        self._start_next(uid, time.monotonic())
        return True
