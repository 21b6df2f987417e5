"""Pool of the helper processes (helper_process.py) of one receiver.

Which connection gets one, and handling of helpers that hang.

Guarantees: one helper at a time for each user, so that a user's descriptors that do not close delay that user
alone; a helper that cannot be killed is reported to the daemon once, and its user is refused as long as it
lives and `REFUSED_SECONDS` more. So a user never has more than one process in state D through a socket; all
users together have no more than `MAX_HUNG`.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Final, Literal, NamedTuple, Protocol

from ciuic.daemon.peers.helper_process import HelperProcess, fork_helper
from ciuic.daemon.peers.messages import Hung, ReceiverOptions
from ciuic.protocol.peer_socket import Caller, is_safe_to_close

# Helpers that work at once. Each takes milliseconds unless a descriptor does not close.
MAX_RUNNING: Final = 16
# Helpers of all users that hang. With so many, descriptors are received from root alone until some have
# ended.
MAX_HUNG: Final = 32
# Connections of users with a hung helper that are kept open because nothing can close them safely.
MAX_UNCLOSED: Final = 512
# Time after SIGKILL from which on a process that has not ended counts as hung, in an uninterruptible wait.
HUNG_SECONDS: Final = 2.0
# Time after the end of a hung helper for which its user is still refused.
REFUSED_SECONDS: Final = 600.0
# Pause after a failed fork: a lack of memory or processes passes.
FORK_AGAIN_SECONDS: Final = 1.0
REFUSED: Final = "descriptors that this user sent earlier do not close, so no others are taken"
FAILED: Final = "the message could not be received in time"


class _Tell(Protocol):
    def __call__(self, message: Hung, /) -> None: ...


class _Job(NamedTuple):
    task: Literal["receive", "close"]
    number: int
    sock: socket.socket
    caller: Caller


class _Running:
    def __init__(self, job: _Job, helper: HelperProcess, deadline: float) -> None:
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
        tell: _Tell,
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
        """True if more than `MAX_UNCLOSED` jobs wait."""
        return sum(len(jobs) for jobs in self._waiting.values()) > MAX_UNCLOSED

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
                running.deadline = now + HUNG_SECONDS
                signal.pidfd_send_signal(running.helper.pidfd, signal.SIGKILL)
                continue
            running.hung = True
            self._tell(Hung(uid, running.helper.pid))
            if running.job.task == "receive":
                self._done(running.job.number, FAILED)
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
                self._done(job.number, REFUSED)
            if uid in self._running:
                return
        at_work = sum(not one.hung for one in self._running.values())
        if uid in self._running or at_work >= MAX_RUNNING or now < self._fork_at or not self._waiting[uid]:
            return
        self._start(self._waiting[uid].popleft(), now)

    def _is_refused(self, uid: int, now: float) -> bool:
        if self._refused_until.get(uid, now) > now:
            return True
        self._refused_until.pop(uid, None)
        hung = sum(one.hung for one in self._running.values())
        return (uid in self._running and self._running[uid].hung) or (uid != 0 and hung >= MAX_HUNG)

    def _start(self, job: _Job, now: float) -> None:
        try:
            helper = fork_helper(
                job.task, job.sock, self._channel, job.number, job.caller, self._options.max_message_bytes
            )
        except OSError:
            helper = None
        if helper is None:
            # Back to the front, so that the jobs stay in order.
            self._waiting[job.caller.uid].appendleft(job)
            self._fork_at = now + FORK_AGAIN_SECONDS
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
            self._refused_until[uid] = time.monotonic() + REFUSED_SECONDS
        elif running.job.task == "receive":
            self._done(running.job.number, "" if status == 0 else FAILED)
        self._start_next(uid, time.monotonic())
        return True
