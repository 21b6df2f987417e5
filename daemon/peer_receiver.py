"""The process that owns a socket of strangers: `python -m ciuic.daemon.peer_receiver CHANNEL OPTIONS`.

It binds and accepts, asks the kernel who calls, and passes messages to the daemon and answers back; the daemon never holds a stranger's
connection nor anything that was queued on one (ciuic.peer_socket has the reasons). Guarantees:

* credentials first: no descriptor is received of a caller whom the daemon has not admitted;
* this process receives and closes no descriptor of a stranger either: for each connection that has some, a helper (peer_helper.py) is
  forked that holds nothing else. One that does not end costs its user this socket for as long as it lives and some minutes more;
* a silent connection is hung up on, and limits hold for each user (peer_places.py);
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
from collections.abc import Callable
from pathlib import Path
from typing import Final, Literal

import msgspec

from ciuic import peer_socket, privileges
from ciuic.daemon.peer_helpers import Helpers
from ciuic.daemon.peer_messages import (
    MAX_MESSAGE_BYTES,
    Admit,
    Answer,
    Arrived,
    Beat,
    FromReceiver,
    Known,
    Ready,
    ReceiverOptions,
    Said,
    decode_from_daemon,
    encode,
)
from ciuic.daemon.peer_places import Place, Places
from ciuic.peer_socket import Caller, Queued
from ciuic.seccomp_profiles import limit_receiver

BEAT_SECONDS: Final = 1.0
ANSWER_SECONDS: Final = 60.0
"""The daemon answers within seconds, or has lost the question."""
EXIT_RETIRED: Final = 3
"""Too many connections wait that cannot be closed safely: a successor begins anew."""
_CHANNEL_BUFFER_BYTES: Final = 4 << 20
"""The daemon may stand still for some time (a debugger, a stop signal); what it was asked waits here."""
_ACCEPTS_AT_ONCE: Final = 64
"""Between two looks at everything else."""


class Connection:
    """One stranger. ``state`` says what the connection waits for."""

    def __init__(self, number: int, sock: socket.socket, caller: Caller, deadline: float) -> None:
        self.number = number
        self.sock = sock
        self.caller = caller
        self.deadline = deadline
        """Of the monotonic clock."""
        self.state: Literal["admission", "message", "helper", "answer", "end"] = "message"

    @property
    def silent(self) -> bool:
        return self.state in ("admission", "message")


class Receiver:
    """The process's only object. ``run`` returns the exit status."""

    def __init__(self, channel: socket.socket, options: ReceiverOptions) -> None:
        self._channel = channel
        self._options = options
        self._selector = selectors.DefaultSelector()
        self._places = Places(options.max_connections, options.max_connections_of_a_user)
        self._connections: dict[int, Connection] = {}
        self._counts: Counter[int] = Counter()
        self._numbers = 0
        self._outgoing: deque[bytes] = deque()
        self._helpers = Helpers(self._selector, channel, options, tell=self._tell, done=self._received)
        self._accept_again_at = 0.0

    def run(self, listener: socket.socket) -> int:
        self._listener = listener
        self._selector.register(listener, selectors.EVENT_READ, self._accept)
        self._selector.register(self._channel, selectors.EVENT_READ, self._hear_daemon)
        self._tell(Ready())
        next_beat = time.monotonic()
        while True:
            for key, mask in self._selector.select(0.2):
                ready: Callable[[int], bool] = key.data
                if not ready(mask):
                    return 0
            now = time.monotonic()
            if now >= next_beat:
                next_beat = now + BEAT_SECONDS
                if not self._outgoing:  # a daemon that stands still need not read how long it did
                    self._tell(Beat(len(self._connections)))
            self._hang_up_on_the_silent(now)
            self._helpers.look(now)
            if self._helpers.too_many_unclosed:
                return EXIT_RETIRED

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
            self._outgoing.clear()  # the daemon has gone, which the next read says too
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
            if isinstance(message, Known):
                self._places.known = frozenset(message.uids)
                continue
            connection = self._connections.get(message.number)
            if connection is not None:
                self._carry_out(connection, message)

    def _carry_out(self, connection: Connection, message: Admit | Answer) -> None:
        if isinstance(message, Admit):
            self._admit(connection, message)
        else:
            self._answer(connection, message)

    def _admit(self, connection: Connection, message: Admit) -> None:
        if connection.state != "admission":
            return
        if message.refusal:
            self._finish(connection, message.refusal)
            return
        # Linux 6.16 and later: only now may it send descriptors; its first attempts have failed.
        peer_socket.allow_descriptors(connection.sock, allowed=True)
        connection.state = "message"
        self._listen_to(connection)

    def _answer(self, connection: Connection, message: Answer) -> None:
        if connection.state not in ("answer", "helper"):  # the helper told the daemon, and has not ended yet
            return
        if not message.keep:
            self._finish(connection, message.data)
        elif _sent(connection.sock, message.data):
            connection.state = "end"
            self._listen_to(connection)
        else:
            self._drop(connection)

    # -- strangers

    def _accept(self, mask: int) -> bool:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock = peer_socket.accept(self._listener)
            except BlockingIOError:
                break
            except OSError:  # out of descriptors or memory, which passes
                self._selector.unregister(self._listener)
                self._accept_again_at = time.monotonic() + BEAT_SECONDS
                break
            try:
                caller = peer_socket.caller_of(sock)
            except OSError:
                self._helpers.close(self._next_number(), sock, Caller(-1, frozenset()))
                continue
            self._take_on(sock, caller)
        return True

    def _take_on(self, sock: socket.socket, caller: Caller) -> None:
        number = self._next_number()
        refused = self._places.is_one_too_many(caller.uid, self._counts)
        if not refused and self._places.is_full(self._counts):
            places = (Place(one.number, one.caller.uid, one.silent) for one in self._connections.values())
            victim = self._places.victim(caller.uid, self._counts, places)
            refused = victim is None
            if victim is not None:
                self._drop(self._connections[victim])
        if refused:
            self._helpers.close(number, sock, caller)
            return
        connection = Connection(number, sock, caller, time.monotonic() + self._options.silent_seconds)
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

    def _listen_to(self, connection: Connection) -> None:
        self._selector.register(connection.sock, selectors.EVENT_READ, lambda mask: self._hear(connection))

    def _hear(self, connection: Connection) -> bool:
        """Something has come from a stranger, or its end."""
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
            connection.deadline = float("inf")
            self._helpers.receive(connection.number, connection.sock, connection.caller)
        else:
            self._drop(connection)
        return True

    def _expect_answer(self, connection: Connection) -> None:
        connection.state = "answer"
        connection.deadline = time.monotonic() + ANSWER_SECONDS

    def _say(self, connection: Connection, data: bytes, trouble: str = "") -> None:
        uid, groups = connection.caller
        self._tell(Said(number=connection.number, uid=uid, groups=tuple(groups), data=data, trouble=trouble))

    def _received(self, number: int, trouble: str) -> None:
        """A helper is done with this connection: the daemon has its message now, or there is ``trouble``."""
        connection = self._connections.get(number)
        if connection is None or connection.state != "helper":
            return
        self._expect_answer(connection)
        if trouble:
            self._say(connection, b"", trouble)

    # -- ends

    def _finish(self, connection: Connection, last_words: bytes) -> None:
        _sent(connection.sock, last_words)
        self._drop(connection)

    def _drop(self, connection: Connection) -> None:
        del self._connections[connection.number]
        self._counts[connection.caller.uid] -= 1
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


def _sent(sock: socket.socket, data: bytes) -> bool:
    try:
        sock.send(data, socket.MSG_NOSIGNAL | socket.MSG_DONTWAIT)
    except OSError:  # it has gone, or does not read
        return False
    return True


def main(arguments: list[str]) -> int:
    """The process."""
    signal.signal(
        signal.SIGINT, signal.SIG_IGN
    )  # a terminal's ^C is for the daemon, which then ends this process
    channel = socket.socket(fileno=int(arguments[0]))
    options = msgspec.json.decode(arguments[1], type=ReceiverOptions)
    channel.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _CHANNEL_BUFFER_BYTES)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    listener = peer_socket.listen(Path(options.path), mode=0o666)
    privileges.limit_receiver()
    limit_receiver()  # where there are no filters `doctor` and the workers' log say so
    return Receiver(channel, options).run(listener)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
