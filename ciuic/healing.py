"""Lost blocks stored anew from the live files they came from.

Guarantees: a block is believed only when its id, computed by the writer, is the lost one; every place of every readable
snapshot is tried, under each name of a file that has several, and damage in one place hides no other. Opens nothing but
regular files and follows no link. Leaves to ciuic.check: which chunks are lost, and telling.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator

from ciuic.blame import Blame
from ciuic.errors import Damaged
from ciuic.repository import Repository, Walker, Writer
from ciuic.repository.walk import Reached
from ciuic.types import ChunkId, Snapshot


def heal_from_live_files(
    repository: Repository, writer: Writer, lost: Collection[ChunkId]
) -> Iterator[tuple[ChunkId, bytes]]:
    """Each chunk that was stored anew, with the live file it was found in. Durable when the writer has flushed."""
    left = set(lost)
    for id_ in repository.snapshots.ids():  # newest first: its paths are the likeliest to be there still
        if not left:
            return
        try:
            snapshot = repository.snapshots.load(id_)
        except Damaged:
            continue  # check has named it; other snapshots may lead to the blocks as well
        for chunk, path, offset, length in list(_places(repository, snapshot, left)):
            data = _live_block(path, offset, length) if chunk in left else None
            if data is not None and writer.chunk_id(data) == chunk:
                writer.put_chunk(data)
                left.discard(chunk)
                yield chunk, path


def _places(
    repository: Repository, snapshot: Snapshot, lost: Collection[ChunkId]
) -> Iterator[tuple[ChunkId, bytes, int, int]]:
    """(chunk, absolute path, offset, length) of every block of the snapshot that is lost."""
    bad = set(lost)
    lengths: dict[ChunkId, int] = {}
    block_size = repository.block_size

    def unreadable(reached: Reached, _error: Damaged) -> None:
        bad.add(reached.id)  # what is below cannot be named; all the rest can

    for reached in Walker(repository).walk(snapshot, on_damage=unreadable):
        if reached.kind == "data" and reached.id in lost and reached.entry is not None:
            lengths[reached.id] = min(block_size, reached.entry.size_bytes - reached.block * block_size)
    if not lengths:
        return
    for place in Blame(repository, bad).places(snapshot):
        if place.kind == "data" and place.chunk in lengths:
            yield place.chunk, place.path, place.block * block_size, lengths[place.chunk]


def _live_block(path: bytes, offset: int, length: int) -> bytes | None:
    """The block as the live file has it now; None where there is no such file or it is too short."""
    try:
        # O_NONBLOCK: what was a file may be a fifo today, and opening that would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY)
    except (OSError, ValueError):
        return None  # gone, not readable, no possible path: then it cannot help, and nothing is lost by it
    try:
        data = os.pread(descriptor, length, offset) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    except OSError:
        return None
    finally:
        os.close(descriptor)
    return data if len(data) == length and length > 0 else None
