"""What the daemon and a receiver process (peer_receiver.py) say to each other over their socketpair: MessagePack, one value a message.

Both ends are ours, so a message that cannot be decoded is a defect. Descriptors come with `Said` alone, and only ones that the receiver
has found to be harmless to close: one pidfd, and pages (ciuic.watch_page).
"""

from __future__ import annotations

from typing import Final

import msgspec

MAX_MESSAGE_BYTES: Final = 64 << 10
"""The longest message of a stranger has 32 KiB; the answer to a thousand ids has about as much."""


class Ready(msgspec.Struct, tag=True, frozen=True):
    """The receiver listens."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """The receiver is alive; once a second."""

    connections: int


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """A connection that waits for `Admit`."""

    number: int
    uid: int
    groups: tuple[int, ...]


class Said(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """One message of a stranger, which waits for `Answer`."""

    number: int
    uid: int
    groups: tuple[int, ...]
    data: bytes
    trouble: str = ""
    """Why the message cannot be served, for the caller to read; then ``data`` and descriptors are not there."""


class Hung(msgspec.Struct, tag=True, frozen=True):
    """A helper process cannot be ended, because a descriptor of this user does not close."""

    uid: int
    pid: int


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Whether to hear this connection. ``refusal``: not empty, it is sent and the connection closed."""

    number: int
    refusal: bytes = b""


class Answer(msgspec.Struct, tag=True, frozen=True):
    """What to send on this connection. ``keep``: leave it open until the peer closes it."""

    number: int
    data: bytes
    keep: bool = False


class Known(msgspec.Struct, tag=True, frozen=True):
    """Users whose connections go first where there is not room for all."""

    uids: tuple[int, ...]


FromReceiver = Ready | Beat | Arrived | Said | Hung
FromDaemon = Admit | Answer | Known
_FROM_RECEIVER: Final[msgspec.msgpack.Decoder[FromReceiver]] = msgspec.msgpack.Decoder(FromReceiver)
_FROM_DAEMON: Final[msgspec.msgpack.Decoder[FromDaemon]] = msgspec.msgpack.Decoder(FromDaemon)
_ENCODER: Final = msgspec.msgpack.Encoder()


class ReceiverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a receiver process is told on its command line, as JSON."""

    path: str
    """Of the socket."""
    max_message_bytes: int
    max_connections: int
    max_connections_of_a_user: int
    takes_descriptors: bool = False
    """Then each connection waits for `Admit` before it is heard. Else no descriptor is ever received."""
    silent_seconds: float = 5.0
    """How long a connection may say nothing."""
    receive_seconds: float = 5.0
    """How long a helper process may take to receive one message and close what came with it."""


def encode(message: FromReceiver | FromDaemon) -> bytes:
    return _ENCODER.encode(message)


def decode_from_receiver(data: bytes) -> FromReceiver:
    """msgspec.DecodeError."""
    return _FROM_RECEIVER.decode(data)


def decode_from_daemon(data: bytes) -> FromDaemon:
    """msgspec.DecodeError."""
    return _FROM_DAEMON.decode(data)
