"""Store lost blocks anew from the live files that they came from.

Guarantees: a block is accepted only when its id, computed by the writer, is the lost one. Every reference of every readable
snapshot is tried, under each name of a file that has several, and damage to one hides no other. Only regular files are opened,
and no link is followed. ciuic.maintenance.check finds the lost chunks and reports the result.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator

from ciuic.errors import Damaged
from ciuic.maintenance.references import ReferenceFinder
from ciuic.repository import Repository, Walker, Writer
from ciuic.repository.checking.walk import Reached
from ciuic.types import ChunkId, Snapshot


def heal_from_live_files(
    repository: Repository, writer: Writer, lost: Collection[ChunkId]
) -> Iterator[tuple[ChunkId, bytes]]:
    """Yield each chunk that was stored anew, with the path of its live file. Durable when the writer has flushed."""
    left = set(lost)
    # Newest first: the paths of the newest snapshot are the most likely to exist still.
    for id_ in repository.snapshots.ids():
        if not left:
            return
        try:
            snapshot = repository.snapshots.load(id_)
        except Damaged:
            # The check has reported it; other snapshots may lead to the same blocks.
            continue
        for chunk, path, offset, length in list(_places(repository, snapshot, left)):
            data = _live_block(path, offset, length) if chunk in left else None
            # The file may have changed since the snapshot: the id decides.
            if data is not None and writer.chunk_id(data) == chunk:
                writer.put_chunk(data)
                left.discard(chunk)
                yield chunk, path


def _places(
    repository: Repository, snapshot: Snapshot, lost: Collection[ChunkId]
) -> Iterator[tuple[ChunkId, bytes, int, int]]:
    """Yield (chunk, absolute path, offset, length) for every lost block of the snapshot."""
    bad = set(lost)
    lengths: dict[ChunkId, int] = {}
    block_size = repository.block_size

    def unreadable(reached: Reached, _error: Damaged) -> None:
        # Names below a damaged node cannot be found; all others can.
        bad.add(reached.id)

    for reached in Walker(repository).walk(snapshot, on_damage=unreadable):
        if reached.kind == "data" and reached.id in lost and reached.entry is not None:
            # The last block of a file is shorter than the others.
            lengths[reached.id] = min(block_size, reached.entry.size_bytes - reached.block * block_size)
    if not lengths:
        return
    for place in ReferenceFinder(repository, bad).references(snapshot):
        if place.kind == "data" and place.chunk in lengths:
            yield place.chunk, place.path, place.block * block_size, lengths[place.chunk]


def _live_block(path: bytes, offset: int, length: int) -> bytes | None:
    """Return the block as the live file has it now; None if there is no such file or it is too short."""
    try:
        # O_NONBLOCK: the file may have become a FIFO, and opening that would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        # Removed, not readable, or no possible path (ValueError: a null byte).
        return None
    try:
        data = os.pread(descriptor, length, offset) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data if len(data) == length and length > 0 else None
