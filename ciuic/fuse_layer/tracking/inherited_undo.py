"""Take over the undo log of a worker that was killed, so that the epochs that it had sealed are captured as they were.

Everything that a sealed epoch needs is on disk: its sealed file, the log (a record is in it before the change
that it protects against), the old blocks and the hold links. Nothing changes through the mount between the
death and the successor's first request, because the kernel keeps the requests. Only memory had the changes of
the current epoch; its tracking has a gap then, and the next capture compares everything.

Guarantees: either the successor knows all that the log says about saved state as its predecessor knew it, or
nothing is taken over and the epochs are lost. The latter is the case of a log that is damaged before its last
record, that gave an epoch up, that is too long to be read while the job waits, or that needs a descriptor of
the dead worker (a directory that was moved since the cut).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.sealed_format import SealedHead, read_head
from ciuic.fuse_layer.tracking.changes import BlockSet
from ciuic.fuse_layer.undo_format import (
    AbandonedRecord,
    BlocksRecord,
    InodeRecord,
    NameRecord,
    SwappedRecord,
    UndoDamaged,
)

MAX_LOG_BYTES: Final = 4 << 20
"""Limit of a log that is read, in some 50 ms in which every request of the job waits. A longer one costs the
epochs, not the job."""
MAX_HELD: Final = 20_000
"""Limit of hold links, for the same reason: each is a name to be listed. Their space is not counted again: it
was the job's."""


@dataclass
class InheritedUndo:
    """Undo state of a predecessor, with which a successor goes on."""

    heads: list[SealedHead]
    """Heads of the sealed epochs, oldest first; at least one."""
    true_epoch: int
    """Epoch of new records: the newest that any record or sealed file has."""
    inodes: dict[int, int] = field(default_factory=dict)
    """Sizes at the cut of inodes that are saved for that epoch."""
    names: set[tuple[int, bytes]] = field(default_factory=set)
    blocks: dict[int, BlockSet] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    reborn: set[int] = field(default_factory=set)
    """Numbers of directories that were removed since the last cut: an inode with one was created since, and
    no epoch needs it."""
    log_bytes: int = 0
    """Length of the whole records of the log; a record behind them was cut short."""
    has_log: bool = False
    bytes_kept: int = 0


def read_undo(directory_fd: int, block_size: int) -> InheritedUndo | None:
    """Read the undo directory of a killed worker, and remove files without a record; return None where it cannot be taken over."""
    try:
        return _read(directory_fd, block_size)
    except (OSError, UndoDamaged, ValueError):
        return None


def _read(directory_fd: int, block_size: int) -> InheritedUndo | None:
    names = os.listdir(directory_fd)
    sealed = sorted(int(name[len("sealed-") :]) for name in names if _is_sealed(name))
    heads = [read_head(_path(directory_fd, undo_format.sealed_name(epoch))) for epoch in sealed]
    if not heads or len({head.session for head in heads}) > 1:
        return None
    if any(
        head.block_size != block_size or head.epoch != epoch
        for head, epoch in zip(heads, sealed, strict=True)
    ):
        return None
    records, log_bytes, has_log = _read_log(directory_fd)
    if not _can_be_inherited(records, sealed[0]):
        return None
    found = InheritedUndo(
        heads,
        true_epoch=max([sealed[-1], *(record.epoch for record in records)]),
        log_bytes=log_bytes,
        has_log=has_log,
    )
    for record in records:
        _take(found, record)
    found.held = {int(name) for name in _list_held(directory_fd)}
    if len(found.held) > MAX_HELD:
        return None
    found.bytes_kept = log_bytes + _tidy(directory_fd, names, records)
    return found


def _is_sealed(name: str) -> bool:
    return name.startswith("sealed-") and name[len("sealed-") :].isdigit()


def _path(directory_fd: int, name: str) -> str:
    return f"/proc/self/fd/{directory_fd}/{name}"


def _read_log(directory_fd: int) -> tuple[list[undo_format.Record], int, bool]:
    """Return the records, their length in bytes, and whether there is a log: without a change since the cut there is none."""
    try:
        fd = os.open(undo_format.LOG_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except FileNotFoundError:
        return [], 0, False
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_LOG_BYTES:
            raise UndoDamaged("the log is too long to be read while the job waits")
        records, size = undo_format.decode_log(file.read())
    return records, size, True


def _can_be_inherited(records: Iterable[undo_format.Record], oldest: int) -> bool:
    for record in records:
        # The epochs were given up before the worker died. No worker of this version writes swapped records.
        if isinstance(record, AbandonedRecord | SwappedRecord):
            return False
        # A directory that was moved is reached by a descriptor of the worker that is gone.
        if isinstance(record, NameRecord) and record.fd >= 0 and record.epoch >= oldest:
            return False
    return True


def _take(found: InheritedUndo, record: undo_format.Record) -> None:
    """Note what a record has saved. A thing that is saved for an older epoch alone has to be saved again."""
    if record.epoch != found.true_epoch:
        return
    if isinstance(record, InodeRecord):
        found.inodes[record.ino] = record.stat.size
    elif isinstance(record, NameRecord):
        found.names.add((record.dir_ino, record.name))
        if record.fd < 0 and record.ino and record.file_type << 12 == stat.S_IFDIR:
            found.reborn.add(record.ino)
    elif isinstance(record, BlocksRecord):
        found.blocks.setdefault(record.ino, BlockSet()).add_range(record.first_block, record.count)


def _list_held(directory_fd: int) -> list[str]:
    fd = os.open(
        undo_format.HOLD_DIR, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd
    )
    try:
        return os.listdir(fd)
    finally:
        os.close(fd)


def _tidy(directory_fd: int, names: Iterable[str], records: Iterable[undo_format.Record]) -> int:
    """Remove files of unfinished saves; return the bytes that the others take."""
    known = {undo_format.blocks_name(one.ino, one.epoch) for one in records if isinstance(one, BlocksRecord)}
    kept_bytes = 0
    for name in names:
        if name.startswith("blocks-") and name in known:
            kept_bytes += os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_blocks * 512
        elif name.startswith(("blocks-", "new-")) or name.endswith(".tmp"):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)
    return kept_bytes
