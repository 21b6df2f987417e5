"""What the trainer and its writer say to each other: one MessagePack message each, over a socket pair that keeps messages apart
(SOCK_SEQPACKET). Whatever is long stands in the arena, and the message says where.
"""

from __future__ import annotations

import array
import socket
from typing import Final

import msgspec

from ciuic.training.notices import Metadata
from ciuic.training.preservation import Keep
from ciuic.types import Pair
from ciuic.watch_client import Hello

MOST_BYTES: Final = 64 << 10
COMPRESSIONS: Final = ("auto", "none", "small")
"""What the user may ask for: codecs in time that nobody else needs; none at all; whatever they take."""


class Rules(msgspec.Struct, frozen=True, kw_only=True):
    """What the writer does of its own accord after a snapshot."""

    keep: tuple[Keep, ...] = ()
    """What stays; all of it if nothing says so."""


class Begin(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The first message of a trainer."""

    repository: str
    root: bytes
    """Path under which snapshots keep the state."""
    rules: Rules
    nice: int = 10
    services: tuple[Metadata, ...] = ()
    """Of clouds, to be asked for notices."""
    compression: str = "auto"
    """One of `COMPRESSIONS`."""
    watched: Hello | None = None
    """What a daemon is to know of the trainer; then its page comes with the message."""


class Attach(msgspec.Struct, tag=True, frozen=True):
    """An arena; its descriptor comes with the message. One of this number that was there before is let go."""

    arena: int


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """The files of the same instant were asked for, of the daemon. Its answer comes over a descriptor that comes with the message."""

    by_seconds: float = 0.0
    """On the monotonic clock: by then, or not at all."""
    problem: str = ""
    """Not empty: they could not be asked for, and there is no descriptor."""


class Save(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """An arena is filled, and is the writer's until it answers. With ``claim`` the descriptor of one comes with it."""

    number: int
    """Counts the saves of one trainer."""
    arena: int
    manifest_offset: int
    manifest_bytes: int
    """MessagePack of a `Manifest`."""
    commit: bool = True
    """False: its files are stored, for a snapshot that another process makes; the answers are `Part` messages and `Put`."""
    claim: bool = False
    asking: Asking | None = None


class Awaited(msgspec.Struct, tag=True, frozen=True):
    """The training stands still until this save is durable."""

    number: int
    at_once: bool = False
    """It is about to end: nothing but being durable counts."""


class End(msgspec.Struct, tag=True, frozen=True):
    """No more will come: finish and go."""


class File(msgspec.Struct, frozen=True, array_like=True):
    """A file of the snapshot: bytes of the arena."""

    path: str
    offset: int
    size_bytes: int
    width: int = 0
    """Bytes of a number, where most of it is numbers of one width."""


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the snapshot whose content is in the repository already."""

    path: str
    size_bytes: int
    content: bytes
    """As in `Entry`, with the next."""
    map_height: int


class Together(msgspec.Struct, frozen=True):
    """Of a snapshot that the writers of several ranks make (parts.py): rank 0's makes it of what it and the others have stored."""

    token: str
    """Of this snapshot; the same on all ranks."""
    rank: int
    world_size: int


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a snapshot but its content."""

    time_ns: int
    message: str
    tags: tuple[str, ...]
    hold_reason: str = ""
    """Not empty: it is held."""
    id: str = ""
    """Which it is to have, unless another has it; empty: any."""
    files: list[File]
    stored: list[StoredFile] = []
    """What other processes have put."""
    together: Together | None = None


class Saved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """The snapshot is durable; the arena is the trainer's again."""

    number: int
    id: str
    size_bytes: int
    new_bytes: int
    seconds: float
    """From the message to the commit."""
    waited_seconds: float = 0.0
    """Of these, for idle processors: it would have taken so much less had it been in a hurry."""
    pair: Pair | None = None
    """What became of the files that were asked for with it."""
    pair_note: str = ""
    """Something that the log should have of it."""


class NotSaved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """There is no such snapshot, and all earlier ones are as they were; the arena is the trainer's again."""

    number: int
    reason: str


class Part(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Some of the files that were put; more of these, or `Put`, will follow."""

    number: int
    files: list[StoredFile]


class Put(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """All files are stored and durable, and no snapshot has them; the arena is the trainer's again."""

    number: int
    new_bytes: int
    seconds: float


class Note(msgspec.Struct, tag=True, frozen=True):
    """Something that the trainer's log should have."""

    event: str
    text: str


class Measured(msgspec.Struct, tag=True, frozen=True):
    """The writer has tried how fast the repository takes data."""

    bytes_per_second: float
    """0: it could not be tried."""


class Notice(msgspec.Struct, tag=True, frozen=True):
    """The machine is about to be taken away, a service of the cloud says; followed by a signal (preemption.NOTIFIED)."""

    text: str
    seconds: float
    certain: bool


FromTrainer = Begin | Attach | Save | Awaited | End
FromWriter = Saved | NotSaved | Part | Put | Note | Notice | Measured
_TRAINERS: Final[msgspec.msgpack.Decoder[FromTrainer]] = msgspec.msgpack.Decoder(FromTrainer)
_WRITERS: Final[msgspec.msgpack.Decoder[FromWriter]] = msgspec.msgpack.Decoder(FromWriter)


def send(sock: socket.socket, message: FromTrainer | FromWriter, fds: tuple[int, ...] = ()) -> None:
    """OSError when nobody is there any more."""
    data = msgspec.msgpack.encode(message)
    if len(data) > MOST_BYTES:
        raise ValueError(f"a message of {len(data)} bytes")
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    sock.sendmsg([data], rights, socket.MSG_NOSIGNAL)


def receive_from_trainer(sock: socket.socket) -> tuple[FromTrainer, list[int]] | None:
    """The next message with its descriptors, or None when the other side is gone or talks nonsense."""
    got = _receive(sock)
    try:
        return None if got is None else (_TRAINERS.decode(got[0]), got[1])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def receive_from_writer(sock: socket.socket) -> FromWriter | None:
    """As `receive_from_trainer`."""
    got = _receive(sock)
    try:
        return None if got is None else _WRITERS.decode(got[0])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    try:
        data, fds, _, _ = socket.recv_fds(sock, MOST_BYTES, 4, socket.MSG_CMSG_CLOEXEC)
    except OSError:
        return None
    return (data, fds) if data else None
