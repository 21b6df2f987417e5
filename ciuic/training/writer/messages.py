"""Messages between a trainer and its writer process: MessagePack over a SOCK_SEQPACKET socket pair.

Long content stands in the arena, and the message says where. Both processes run the same version: the trainer
starts the writer.
"""

from __future__ import annotations

import signal
import socket
from typing import Final

import msgspec

from ciuic.protocol.watch_client import Hello
from ciuic.structs import decode_msgpack
from ciuic.system.cloud_notices import MetadataService
from ciuic.system.poll import receive_queued
from ciuic.system.unix_sockets import receive, rights
from ciuic.training.remote.uploads import UploadOrder
from ciuic.training.rules import Keep
from ciuic.types import Pair, SetMember

# Long content goes through the arena, so that a message always fits into the buffer of the socket.
SENT_TO_ALL: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that terminals and schedulers send to all processes of a job. The trainer answers them, and the writer ignores them: Slurm's
``--signal=USR1@120`` killed the writer of the very snapshot that it asked for. They are blocked when the writer is started, until
it ignores them.
"""
MAX_MESSAGE_BYTES: Final = 64 << 10
COMPRESSIONS: Final = ("auto", "none", "small")
"""Values of the option ``compression``; ``auto`` runs codecs in idle processor time, on states before the newest.

``none`` uses no codecs, ``small`` runs them at each save for as long as they take.
"""


class RetentionRules(msgspec.Struct, frozen=True, kw_only=True):
    """Rules that the writer applies after a snapshot."""

    keep: tuple[Keep, ...] = ()
    """Rules that keep snapshots; without any, all are kept."""


class Begin(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """First message of a trainer."""

    repository: str
    root: bytes
    """Path under which snapshots keep the state."""
    rules: RetentionRules
    nice: int = 10
    services: tuple[MetadataService, ...] = ()
    """Metadata services of clouds to poll for notices."""
    compression: str = "auto"
    """One of `COMPRESSIONS`."""
    watched: Hello | None = None
    """Registration of the trainer with a daemon.

    If set, the trainer's pidfd and heartbeat page come with the message.
    """
    uploads: tuple[UploadOrder, ...] = ()
    """Remotes to which the writer has snapshots uploaded."""


class Attach(msgspec.Struct, tag=True, frozen=True):
    """A new arena, whose descriptor comes with the message.

    The writer drops an earlier arena of this number.
    """

    arena: int


class Asking(msgspec.Struct, frozen=True, kw_only=True):
    """Request to the daemon for a snapshot of the files of the same instant.

    The daemon answers over a descriptor that comes with the message.
    """

    by_seconds: float = 0.0
    """Deadline of the answer on the monotonic clock."""
    problem: str = ""
    """Why the daemon could not be asked; if not empty there is no descriptor."""


class SaveRequest(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """A filled arena to make a snapshot of; it belongs to the writer until the writer answers."""

    number: int
    """Number of the save, counted per trainer."""
    arena: int
    manifest_offset: int
    manifest_bytes: int
    """MessagePack of a `Manifest`."""
    commit: bool = True
    """False: only store the files, for a snapshot that another process makes.

    The answers are `StoredFiles` messages and `Put`.
    """
    claim: bool = False
    """True if the descriptor of a shared write claim comes with the message."""
    asking: Asking | None = None


class Awaited(msgspec.Struct, tag=True, frozen=True):
    """Notice that the training stands still until this save is durable."""

    number: int
    at_once: bool = False
    """True if the training is about to end, so that the writer should skip everything but storing."""


class Finish(msgspec.Struct, tag=True, frozen=True):
    """Last message of a trainer: finish what was given, and exit."""

    failed: bool = False
    """True if the trainer ends by an error, as it does when another rank is gone."""


# `array_like`, because a manifest has one of these for each of thousands of tensors.
class ManifestFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the snapshot whose content stands in the arena."""

    path: str
    offset: int
    size_bytes: int
    width: int = 0
    """Bytes per number, where most of the file is numbers of one width; otherwise 0."""


class StoredFile(msgspec.Struct, frozen=True, array_like=True):
    """A file of the snapshot whose content is in the repository already.

    `content` and `map_height` are those of its `Entry`.
    """

    path: str
    size_bytes: int
    content: bytes
    map_height: int


class JointSave(msgspec.Struct, frozen=True):
    """A snapshot made by the writers of the ranks that save in one directory (rank_parts.py).

    Each writer stores the part of its rank; the writer of the first rank makes the snapshot when all parts are
    stored.
    """

    token: str
    """Name of this save, the same on all ranks, whatever their directories."""
    rank: int
    ranks: tuple[int, ...]
    """Ranks of the directory, the first of which makes the snapshot."""


class Manifest(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a snapshot except its content."""

    time_ns: int
    message: str
    tags: tuple[str, ...]
    hold_reason: str = ""
    """Reason to hold the snapshot; empty: it is not held."""
    id: str = ""
    """Id that the snapshot is to have, unless another has it; empty: any."""
    files: list[ManifestFile]
    stored: list[StoredFile] = []
    """Files that other processes have stored."""
    joint_save: JointSave | None = None
    """The save of all ranks that this snapshot is part of; None: it is this process's alone."""
    set_member: SetMember | None = None
    """Place among the snapshots that all directories of the ranks make; None: there is one directory."""


class Saved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer: the snapshot is durable, and the arena belongs to the trainer again."""

    number: int
    id: str
    size_bytes: int
    new_bytes: int
    seconds: float
    """Time from the request to the commit."""
    waited_seconds: float = 0.0
    """Part of `seconds` spent waiting for idle processors, which a save in a hurry would not take."""
    pair: Pair | None = None
    """Result of the snapshot of the files that was asked for together with this one."""
    pair_note: str = ""
    """Note about that snapshot for the log of the trainer."""


class NotSaved(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer: the save failed, earlier snapshots are unaffected, the arena is the trainer's again."""

    number: int
    reason: str


class StoredFiles(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer to a save without commit: some of the stored files.

    More of these messages follow, then `Put`.
    """

    number: int
    files: list[StoredFile]


class Put(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Answer to a save without commit: all files are durable, the arena is the trainer's again.

    No snapshot refers to the files yet.
    """

    number: int
    new_bytes: int
    seconds: float


class Note(msgspec.Struct, tag=True, frozen=True):
    """Text for the log of the trainer."""

    event: str
    text: str


class Measured(msgspec.Struct, tag=True, frozen=True):
    """Write speed of the repository, measured at the start of the writer."""

    bytes_per_second: float
    """Durable bytes per second; 0: it could not be measured."""


class PreemptionNotice(msgspec.Struct, tag=True, frozen=True):
    """Notice of a cloud that the machine is going away; the signal `preemption.NOTIFIED` follows it."""

    text: str
    seconds: float
    """Time until the machine goes."""
    certain: bool
    """False: the end has only become more likely."""


FromTrainer = Begin | Attach | SaveRequest | Awaited | Finish
FromWriter = Saved | NotSaved | StoredFiles | Put | Note | PreemptionNotice | Measured


def send(sock: socket.socket, message: FromTrainer | FromWriter, fds: tuple[int, ...] = ()) -> None:
    """Send a message with descriptors.

    Raises:
        OSError: The other process is gone.
        ValueError: The message is too long.
    """
    data = msgspec.msgpack.encode(message)
    if len(data) > MAX_MESSAGE_BYTES:
        raise ValueError(f"a message must have at most {MAX_MESSAGE_BYTES} bytes, got {len(data)}")
    # MSG_NOSIGNAL: a writer that has died must not end the training by SIGPIPE.
    sock.sendmsg([data], rights(fds), socket.MSG_NOSIGNAL)


def receive_from_trainer(sock: socket.socket) -> tuple[FromTrainer, list[int]] | None:
    """Receive the next message with its descriptors.

    The result is None if the trainer is gone or the message cannot be decoded.
    """
    # A message that cannot be decoded ends the conversation: what follows it could not be trusted either.
    got = _receive(sock)
    try:
        return None if got is None else (decode_msgpack(got[0], FromTrainer), got[1])
    except msgspec.DecodeError:
        return None


def receive_from_writer(sock: socket.socket) -> FromWriter | None:
    """Receive the next message; None if the writer is gone or the message cannot be decoded."""
    got = _receive(sock)
    try:
        return None if got is None else decode_msgpack(got[0], FromWriter)
    except msgspec.DecodeError:
        return None


def _receive(sock: socket.socket) -> tuple[bytes, list[int]] | None:
    try:
        # No message has more than two descriptors.
        data, fds, _ = receive_queued(lambda: receive(sock, MAX_MESSAGE_BYTES, 4))
    except OSError:
        return None
    return (data, fds) if data else None
