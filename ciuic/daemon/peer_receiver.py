"""Receiver process, which owns a socket for unprivileged callers: `python -m ciuic.daemon.peer_receiver CHANNEL OPTIONS`.

It binds and accepts, reads the kernel's credentials of each caller, and passes messages to the daemon and
answers back; the daemon never holds a caller's connection nor anything that was queued on one
(ciuic.protocol.peer_socket has the reasons). Guarantees:

* credentials first: no descriptor is received from a caller that the daemon has not admitted;
* this process receives and closes no descriptor of a caller either: for each connection that has some, a
  helper is forked that holds nothing else, so that a descriptor that does not close delays no other caller;
* a helper hands the daemon only a pidfd and sealed pages, which close at once whatever the sender does. Everything
  else closes when the helper ends, which may be never: then it stays in state D until the sender's file system is
  gone, and is counted against the sender;
* a silent connection is closed;
* one user never keeps another out, however many connections it opens; while all connections are in use, users
  that are known to the daemon (root, owners of roots, users with a watched trainer) have precedence over
  others;
* it ends with the channel: with the daemon, or when the daemon replaces it.

There is one helper at a time for each user, so that a user's descriptors that do not close delay that user alone;
a helper that cannot be killed is reported to the daemon once, and its user is refused as long as it lives and
`_REFUSED_SECONDS` more. So a user never has more than one process in state D through a socket; all users together
have no more than `_MAX_HUNG`.
"""

from __future__ import annotations

import fcntl
import gc
import os
import resource
import select
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple, NoReturn

import msgspec

from ciuic.daemon.peer_messages import (
    MAX_MESSAGE_BYTES,
    Admit,
    AnswerCaller,
    Arrived,
    Beat,
    FromDaemon,
    FromReceiver,
    Hung,
    KnownUsers,
    Ready,
    ReceiverOptions,
    Said,
)
from ciuic.protocol import peer_socket
from ciuic.protocol.heartbeat_page import check_page
from ciuic.protocol.peer_socket import Caller, Queued, is_safe_to_close
from ciuic.protocol.watch_client import MAX_FDS
from ciuic.structs import decode_json, decode_msgpack
from ciuic.system import privileges, processes
from ciuic.system.poll import readable
from ciuic.system.syscall_profiles import limit_receiver
from ciuic.system.unix_sockets import receive, rights

# Time limit for a forked process to close inherited descriptors, which takes less than a millisecond unless
# the host is overloaded.
_READY_SECONDS: Final = 2.0
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
    return readable(go.fileno(), _READY_SECONDS) and go.recv(1) == b"r"


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
    # With SO_PASSCRED on, which distinguishes an empty message from the end, credentials would take the room
    # of the descriptors.
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 0)
    data, fds, flags = receive(connection, max_message_bytes, MAX_FDS, socket.MSG_DONTWAIT)
    said = Said(number=number, uid=caller.uid, groups=tuple(caller.groups), data=data)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC) or not is_harmless(fds):
        said = Said(number=number, uid=caller.uid, groups=tuple(caller.groups), data=b"", trouble=_NO_TRAINER)
        fds = []
    poll = select.poll()
    poll.register(channel, select.POLLOUT)
    poll.poll(_DELIVER_MS)
    # MSG_NOSIGNAL: an error and no SIGPIPE where the daemon has gone.
    channel.sendmsg([msgspec.msgpack.encode(said)], rights(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)


def is_harmless(fds: Sequence[int]) -> bool:
    """Return whether these are a pidfd and pages, by calls that reach no file system of the sender."""
    try:
        processes.pid_of(fds[0])
        for page in fds[1:]:
            check_page(page)  # checks seals first, which only memory files of the kernel have
    except (IndexError, ValueError, OSError):
        return False
    return True


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


class _HelperPool:
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


_ROOT = 0
_BEAT_SECONDS: Final = 1.0
# Longest wait for an answer of the daemon, which comes within seconds or not at all.
_ANSWER_SECONDS: Final = 60.0
# Exit status when too many connections wait that cannot be closed safely: a successor begins anew.
_EXIT_RETIRED: Final = 3
# Send buffer of the channel: the daemon may stand still for some time (a debugger, a stop signal), and
# messages wait here.
_CHANNEL_BUFFER_BYTES: Final = 4 << 20
# Groups of a caller that go to the daemon. A user who may map a range of groups into a user namespace can be
# in 65536 of them, which are five bytes each, and no message to the daemon could hold them. With so many, 20
# of MAX_MESSAGE_BYTES' 64 KiB are groups, and 32 KiB the caller's message.
MAX_GROUPS: Final = 4096
# Connections that are accepted before other events are handled.
_ACCEPTS_AT_ONCE: Final = 64


class OpenConnection(NamedTuple):
    """Connection, as far as the choice depends on it."""

    number: int
    """Number that ascends with the time of arrival."""
    uid: int
    silent: bool
    """True if no message has come on it, so that no request is lost when it is closed."""


class ConnectionLimits:
    """Limits of one socket."""

    def __init__(self, max_connections: int, max_of_a_user: int) -> None:
        self._max_connections = max_connections
        self._max_of_a_user = max_of_a_user
        self.known: frozenset[int] = frozenset()
        """Users with precedence."""

    def is_one_too_many(self, uid: int, counts: Counter[int]) -> bool:
        """Return whether this user has as many connections as one may have. Root has no limit of its own."""
        return uid != _ROOT and counts[uid] >= self._max_of_a_user

    def victim(self, uid: int, counts: Counter[int], places: Iterable[OpenConnection]) -> int | None:
        """Return the number of the silent connection to close for a new one of `uid` on a full socket.

        Return None where there is none.

        It belongs to a user that is not known, where `uid` is known, or else to one that has more connections
        than `uid` would have. Of these it is the oldest of the user with the most connections.
        """
        rank = self._rank(uid)
        # Of users with the same precedence the other one has to have more than `uid` with its new connection:
        # otherwise two users would close each other's connections for ever.
        candidates = [
            place
            for place in places
            if place.silent
            and (
                self._rank(place.uid) > rank
                or (self._rank(place.uid) == rank and counts[place.uid] > counts[uid] + 1)
            )
        ]
        if not candidates:
            return None
        chosen = max(candidates, key=lambda place: (self._rank(place.uid), counts[place.uid], -place.number))
        return chosen.number

    def is_full(self, counts: Counter[int]) -> bool:
        """Return whether all connections are in use."""
        return counts.total() >= self._max_connections

    def _rank(self, uid: int) -> int:
        """Return the precedence of a user: 0 root, 1 known users, 2 others."""
        return 0 if uid == _ROOT else 1 if uid in self.known else 2


class _PeerConnection:
    """Connection of one caller. `state` says what it waits for."""

    def __init__(self, number: int, sock: socket.socket, caller: Caller, deadline: float) -> None:
        self.number = number
        self.sock = sock
        self.caller = caller
        self.deadline = deadline
        """Time on the monotonic clock at which it is closed."""
        self.state: Literal["admission", "message", "helper", "answer", "end"] = "message"

    @property
    def silent(self) -> bool:
        """True if no message has come yet."""
        return self.state in ("admission", "message")


class Receiver:
    """State of the process: its socket, connections and helpers."""

    def __init__(self, channel: socket.socket, options: ReceiverOptions) -> None:
        self._channel = channel
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._limits = ConnectionLimits(options.max_connections, options.max_connections_of_a_user)
        self._connections: dict[int, _PeerConnection] = {}
        self._counts: Counter[int] = Counter()
        self._numbers = 0
        self._outgoing: deque[bytes] = deque()
        self._helpers = _HelperPool(self._selector, channel, options, tell=self._tell, done=self._received)
        self._accept_again_at = 0.0

    def run(self, listener: socket.socket) -> int:
        """Serve until the channel ends, and return the exit status."""
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._channel, selectors.EVENT_READ, self._hear_daemon)
        self._tell(Ready())
        next_beat = time.monotonic()
        while True:
            # Deadlines of connections and helpers are looked at five times a second.
            for key, mask in self._selector.select(0.2):
                ready: Callable[[int], bool] = key.data
                if not ready(mask):
                    return 0
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + _BEAT_SECONDS
                # Heartbeats do not pile up for a daemon that stands still.
                if not self._outgoing:
                    self._tell(Beat(len(self._connections)))
            # Hang up on those that are silent.
            for connection in list(self._connections.values()):
                if connection.deadline <= now and connection.state != "end":
                    self._drop(connection)
            if self._accept_again_at and now >= self._accept_again_at:
                self._accept_again_at = 0.0
                self._selector.register(self._listener, selectors.EVENT_READ, self._accept)
            self._helpers.look(now)
            if self._helpers.too_many_unclosed:
                return _EXIT_RETIRED

    # -- the daemon

    def _tell(self, message: FromReceiver) -> None:
        self._outgoing.append(msgspec.msgpack.encode(message))
        self._send()

    def _send(self) -> None:
        events = selectors.EVENT_READ
        try:
            while self._outgoing:
                self._channel.send(self._outgoing[0], socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
                self._outgoing.popleft()
        except BlockingIOError:
            events |= selectors.EVENT_WRITE
        except OSError:
            self._outgoing.clear()  # the daemon has gone, which the next read shows too
        if self._selector.get_key(self._channel).events != events:
            self._selector.modify(self._channel, events, self._hear_daemon)

    def _hear_daemon(self, mask: int) -> bool:
        if mask & selectors.EVENT_WRITE:
            self._send()
        while True:
            try:
                data = self._channel.recv(MAX_MESSAGE_BYTES, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            message: FromDaemon = decode_msgpack(data, FromDaemon)
            if isinstance(message, KnownUsers):
                self._limits.known = frozenset(message.uids)
                continue
            connection = self._connections.get(message.number)
            if connection is not None:
                self._carry_out(connection, message)

    def _carry_out(self, connection: _PeerConnection, message: Admit | AnswerCaller) -> None:
        if isinstance(message, Admit):
            self._admit(connection, message)
        else:
            self._answer(connection, message)

    def _admit(self, connection: _PeerConnection, message: Admit) -> None:
        if connection.state != "admission":
            return
        if message.refusal:
            self._finish(connection, message.refusal)
            return
        # From Linux 6.16 on the kernel refuses descriptors until here.
        peer_socket.allow_descriptors(connection.sock, allowed=True)
        connection.state = "message"
        self._listen_to(connection)

    def _answer(self, connection: _PeerConnection, message: AnswerCaller) -> None:
        # In state "helper" the helper has handed the message to the daemon and has not ended yet.
        if connection.state not in ("answer", "helper"):
            return
        if not message.keep:
            self._finish(connection, message.data)
        elif _sent(connection.sock, message.data):
            connection.state = "end"
            self._listen_to(connection)
        else:
            self._drop(connection)

    # -- callers

    def _accept(self, mask: int) -> bool:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock = peer_socket.accept(self._listener)
            except BlockingIOError:
                break
            except OSError:  # out of descriptors or memory, which passes: accept again after a pause
                # Level-triggered: the listener would stay readable and the loop would spin.
                self._selector.unregister(self._listener)
                self._accept_again_at = time.monotonic() + _BEAT_SECONDS
                break
            try:
                caller = peer_socket.caller_of(sock)
            except OSError:
                # Its user is not known: all such connections count as one user's.
                self._helpers.close(self._next_number(), sock, Caller(-1, frozenset()))
                continue
            self._take_on(sock, limited(caller))
        return True

    def _take_on(self, sock: socket.socket, caller: Caller) -> None:
        number = self._next_number()
        refused = self._limits.is_one_too_many(caller.uid, self._counts)
        if not refused and self._limits.is_full(self._counts):
            places = (
                OpenConnection(one.number, one.caller.uid, one.silent) for one in self._connections.values()
            )
            victim = self._limits.victim(caller.uid, self._counts, places)
            refused = victim is None
            if victim is not None:
                self._drop(self._connections[victim])
        if refused:
            self._helpers.close(number, sock, caller)
            return
        connection = _PeerConnection(number, sock, caller, time.monotonic() + self._options.silent_seconds)
        self._connections[number] = connection
        self._counts[caller.uid] += 1
        if self._options.takes_descriptors:
            connection.state = "admission"
            self._tell(Arrived(number, caller.uid, tuple(caller.groups)))
        else:
            self._listen_to(connection)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _listen_to(self, connection: _PeerConnection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ, lambda mask: self._hear(connection))

    def _hear(self, connection: _PeerConnection) -> bool:
        """Handle what came on a connection: a message, descriptors, or the end."""
        try:
            found = peer_socket.queued(connection.sock)
        except OSError:
            found = Queued.END
        if found is Queued.NOTHING:
            return True
        self._selector.unregister(connection.sock)
        if connection.state == "end" or found is Queued.END:
            self._drop(connection)
        elif found is Queued.MESSAGE:
            try:
                data = connection.sock.recv(self._options.max_message_bytes, socket.MSG_DONTWAIT)
            except OSError:
                self._drop(connection)
                return True
            self._expect_answer(connection)
            self._say(connection, data)
        elif self._options.takes_descriptors:
            connection.state = "helper"
            # The helper has a deadline of its own.
            connection.deadline = float("inf")
            self._helpers.receive(connection.number, connection.sock, connection.caller)
        else:
            self._drop(connection)
        return True

    def _expect_answer(self, connection: _PeerConnection) -> None:
        connection.state = "answer"
        connection.deadline = time.monotonic() + _ANSWER_SECONDS

    def _say(self, connection: _PeerConnection, data: bytes, trouble: str = "") -> None:
        uid, groups = connection.caller
        self._tell(Said(number=connection.number, uid=uid, groups=tuple(groups), data=data, trouble=trouble))

    def _received(self, number: int, trouble: str) -> None:
        """Handle the end of a helper.

        The daemon has the message of this connection now, or there is `trouble`.
        """
        connection = self._connections.get(number)
        if connection is None or connection.state != "helper":
            return
        self._expect_answer(connection)
        if trouble:
            self._say(connection, b"", trouble)

    # -- ends

    def _finish(self, connection: _PeerConnection, last_words: bytes) -> None:
        _sent(connection.sock, last_words)
        self._drop(connection)

    def _drop(self, connection: _PeerConnection) -> None:
        del self._connections[connection.number]
        self._counts[connection.caller.uid] -= 1
        # Users without a connection are forgotten: in a container they are created at no cost.
        if not self._counts[connection.caller.uid]:
            del self._counts[connection.caller.uid]
        if connection.sock in self._selector.get_map():
            self._selector.unregister(connection.sock)
        self._helpers.close(connection.number, connection.sock, connection.caller)


def limited(caller: Caller) -> Caller:
    """Return the caller without groups if it has more than `MAX_GROUPS`; it may do less then, never more."""
    return caller if len(caller.groups) <= MAX_GROUPS else Caller(caller.uid, frozenset())


def _sent(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except OSError:  # it has gone, or does not read
        return False
    return True


def main(arguments: list[str]) -> int:
    """Run the process and return its exit status."""
    # A terminal's Ctrl-C is for the daemon, which then ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = socket.socket(fileno=int(arguments[0]))
    options = decode_json(arguments[1], ReceiverOptions)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHANNEL_BUFFER_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    # Bound before privileges are dropped: the runtime directory belongs to root.
    listener = peer_socket.listen(Path(options.path), mode=0o666)
    privileges.limit_receiver()
    limit_receiver()  # a missing filter of system calls is reported by `ciuic doctor` and in the workers' log
    return Receiver(channel, options).run(listener)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
