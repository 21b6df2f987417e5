"""Receiver process, which owns a socket for unprivileged callers.

`python -m ciuic.daemon.peer_receiver CHANNEL OPTIONS`.

It binds and accepts, reads the kernel's credentials of each caller, and passes messages to the daemon and
answers back; the daemon never holds a caller's connection nor anything that was queued on one
(ciuic.protocol.peer_socket has the reasons). Guarantees:

* credentials first: no descriptor is received from a caller that the daemon has not admitted;
* this process receives and closes no descriptor of a caller either: for each connection that has some, a
  helper (peer_helpers.py) is forked that holds nothing else. A helper that does not end costs its user this
  socket as long as it lives and some minutes more;
* a silent connection is closed;
* one user never keeps another out, however many connections it opens; while all connections are in use, users
  that are known to the daemon (root, owners of roots, users with a watched trainer) have precedence over
  others;
* it ends with the channel: with the daemon, or when the daemon replaces it.
"""

from __future__ import annotations

import resource
import selectors
import signal
import socket
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from ciuic.daemon.peer_helpers import HelperPool
from ciuic.daemon.peer_messages import (
    MAX_MESSAGE_BYTES,
    Admit,
    AnswerCaller,
    Arrived,
    Beat,
    FromReceiver,
    KnownUsers,
    Ready,
    ReceiverOptions,
    Said,
    decode_from_daemon,
    encode,
)
from ciuic.protocol import peer_socket
from ciuic.protocol.peer_socket import Caller, Queued
from ciuic.system.sandbox import privileges
from ciuic.system.sandbox.profiles import limit_receiver

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
        self._helpers = HelperPool(self._selector, channel, options, tell=self._tell, done=self._received)
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
            self._hang_up_on_the_silent(now)
            self._helpers.look(now)
            if self._helpers.too_many_unclosed:
                return _EXIT_RETIRED

    # -- the daemon

    def _tell(self, message: FromReceiver) -> None:
        self._outgoing.append(encode(message))
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
            message = decode_from_daemon(data)
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

    def _hang_up_on_the_silent(self, now: float) -> None:
        for connection in list(self._connections.values()):
            if connection.deadline <= now and connection.state != "end":
                self._drop(connection)
        if self._accept_again_at and now >= self._accept_again_at:
            self._accept_again_at = 0.0
            self._selector.register(self._listener, selectors.EVENT_READ, self._accept)


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
    options = msgspec.json.decode(arguments[1], type=ReceiverOptions)
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
