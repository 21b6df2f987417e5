"""Protocol between the daemon and a receiver process (peer_receiver.py) on their socketpair.

MessagePack, one value a message.

Both ends are ciuic's, so a message that cannot be decoded is a defect. Only `Said` has descriptors, and only
such that the receiver has found to be harmless to close: one pidfd, and pages
(ciuic.protocol.heartbeat_page).
"""

from __future__ import annotations

from typing import Final

import msgspec

# Longest message. The longest of a caller has 32 KiB; the answer to a thousand ids has about as much.
MAX_MESSAGE_BYTES: Final = 64 << 10


class Ready(msgspec.Struct, tag=True, frozen=True):
    """Message: the receiver listens."""


class Beat(msgspec.Struct, tag=True, frozen=True):
    """Heartbeat of the receiver, once a second."""

    connections: int


class Arrived(msgspec.Struct, tag=True, frozen=True):
    """A connection that waits for `Admit`."""

    number: int
    uid: int
    groups: tuple[int, ...]


class Said(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A message of a caller, which waits for `AnswerCaller`."""

    number: int
    uid: int
    groups: tuple[int, ...]
    data: bytes
    trouble: str = ""
    """Error for the caller, when the message cannot be served; `data` and descriptors are missing then."""


class Hung(msgspec.Struct, tag=True, frozen=True):
    """Report of a helper process that cannot be killed, because a descriptor of this user does not close."""

    uid: int
    pid: int


class Admit(msgspec.Struct, tag=True, frozen=True):
    """Decision whether to serve a connection.

    A `refusal` that is not empty is sent, and the connection closed.
    """

    number: int
    refusal: bytes = b""


class AnswerCaller(msgspec.Struct, tag="Answer", frozen=True):
    """Answer to send on a connection. `keep`: leave it open until the peer closes it."""

    number: int
    data: bytes
    keep: bool = False


class KnownUsers(msgspec.Struct, tag="Known", frozen=True):
    """Users whose connections have precedence where there is not room for all."""

    uids: tuple[int, ...]


FromReceiver = Ready | Beat | Arrived | Said | Hung
FromDaemon = Admit | AnswerCaller | KnownUsers


class ReceiverOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of a receiver process, which are on its command line as JSON."""

    path: str
    """Path of the socket."""
    max_message_bytes: int
    max_connections: int
    max_connections_of_a_user: int
    takes_descriptors: bool = False
    """True if callers may send descriptors. Each connection waits for `Admit` then; without it no
    descriptor is ever received."""
    silent_seconds: float = 5.0
    """Longest time that a connection may be silent."""
    receive_seconds: float = 5.0
    """Longest time for a helper process to receive one message and close its descriptors."""
