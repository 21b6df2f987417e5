"""Take up the undo log of a worker that was killed, so that the epochs that it had sealed are captured as they were.

What a sealed epoch needs is on disk: its sealed file, the log (a record is in it before the change that it protects against), the old
blocks and the hold links. Nothing changes through the mount between the death and the successor's first request, because the kernel keeps
the requests. Memory alone had what the current epoch changed; its tracking has a gap then, and the next capture compares everything.

Guarantees: either everything that the log says is known to the successor as its predecessor knew it, as far as saving goes, or nothing
is taken up and the epochs are lost: a log that ends in more than a torn record, that gave an epoch up, that is too long to be read while
the job waits, or that needs a descriptor of the dead worker (a directory that was moved since the cut).
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from ciuic.fuse_layer import undo_format
from ciuic.fuse_layer.blockset import BlockSet
from ciuic.fuse_layer.sealed_format import SealedHead, read_head
from ciuic.fuse_layer.undo_format import (
    AbandonedRecord,
    BlocksRecord,
    InodeRecord,
    NameRecord,
    SwappedRecord,
    UndoDamaged,
)

MAX_LOG_BYTES: Final = 4 << 20
"""Read and decoded in some 50 ms, in which every request of the job waits. A longer log costs the exact instant, not the job."""
MAX_HELD: Final = 20_000
"""Hold links, for the same reason: each is a name to be listed. The space that they keep is not counted again: it was the job's."""


@dataclass
class InheritedUndo:
    """What a successor goes on with."""

    heads: list[SealedHead]
    """Of the sealed epochs, oldest first; at least one."""
    true_epoch: int
    """New records get this number: the newest that any record or sealed file has."""
    inodes: dict[int, int] = field(default_factory=dict)
    """Saved in that epoch: inode → its size then."""
    names: set[tuple[int, bytes]] = field(default_factory=set)
    blocks: dict[int, BlockSet] = field(default_factory=dict)
    held: set[int] = field(default_factory=set)
    reborn: set[int] = field(default_factory=set)
    """Numbers of directories that were removed since the last cut: what has one now was created since, and no epoch needs it."""
    log_bytes: int = 0
    """Whole records of the log; what follows was cut short."""
    has_log: bool = False
    bytes_kept: int = 0


def read_undo(directory_fd: int, block_size: int) -> InheritedUndo | None:
    """Read what a killed worker left in its undo directory, and remove what belongs to no record; None where it cannot be gone on with."""
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
    """Records, bytes of whole records, and whether there is a log: an epoch that nothing was changed since has none."""
    try:
        fd = os.open(undo_format.LOG_NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory_fd)
    except FileNotFoundError:
        return [], 0, False
    with os.fdopen(fd, "rb") as file:
        if os.fstat(fd).st_size > MAX_LOG_BYTES:
            raise UndoDamaged("too long to be read while the job waits")
        records, size = undo_format.decode_log(file.read())
    return records, size, True


def _can_be_inherited(records: Iterable[undo_format.Record], oldest: int) -> bool:
    for record in records:
        if isinstance(record, AbandonedRecord | SwappedRecord):
            return False
        # A directory that was moved is reached by a descriptor of the worker that is gone.
        if isinstance(record, NameRecord) and record.fd >= 0 and record.epoch >= oldest:
            return False
    return True


def _take(found: InheritedUndo, record: undo_format.Record) -> None:
    """Remember that it is saved; what was saved for an older epoch alone is to be saved again."""
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
    """Remove files of saves that were not finished; return the bytes that the others take."""
    known = {undo_format.blocks_name(one.ino, one.epoch) for one in records if isinstance(one, BlocksRecord)}
    kept_bytes = 0
    for name in names:
        if name.startswith("blocks-") and name in known:
            kept_bytes += os.stat(name, dir_fd=directory_fd, follow_symlinks=False).st_blocks * 512
        elif name.startswith(("blocks-", "new-")) or name.endswith(".tmp"):
            with suppress(FileNotFoundError):
                os.unlink(name, dir_fd=directory_fd)
    return kept_bytes
