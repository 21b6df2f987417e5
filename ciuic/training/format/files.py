"""Regular files of a training snapshot, read with their checksums; needs no writer and no lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from ciuic.errors import Damaged, NotFound
from ciuic.repository import Repository
from ciuic.repository.trees.block_maps import blocks_of
from ciuic.training.format.places import ReadFrom
from ciuic.training.util.documents import MAX_DOCUMENT_BYTES
from ciuic.types import ChunkId, Entry, SnapshotId

# Chunks that are read with one query: bases of differences are looked up together, not one by one.
# So many that the disk works on the later ones while the first are decoded.
CHUNKS_AT_ONCE: Final = 128
_ZEROS: Final = memoryview(bytes(1 << 20))
# More threads than that wait for each other at the interpreter lock between the calls that release it.
_MAX_READERS: Final = 4


def reader_count() -> int:
    """Return the number of threads to read a state with: the processors of this process, from 2 to 4."""
    # Threads beyond the processors cost time: a state of 500 MB in differences took 1.7 s of processor time
    # with four on two processors, and 1.2 s with two. With one processor a second thread waits for the disk.
    return max(2, min(_MAX_READERS, len(os.sched_getaffinity(0))))


class SnapshotRef(NamedTuple):
    """Repository and id of a snapshot, so that several threads can each open the repository."""

    path: ReadFrom
    id: str

    def files(self, repository: Repository) -> Files:
        """Return the files of the snapshot.

        Raises:
            NotFound: There is no such snapshot, or it holds no training state.
            Damaged: The snapshot cannot be read.
        """
        # In a remote an id that two hosts have stands behind the name of its host.
        id_ = SnapshotId.parse(self.id) if isinstance(self.path, str) else SnapshotId(self.id)
        snapshot = repository.snapshots.load(id_)
        # A training's snapshot has one root.
        return Files(repository, top_of(snapshot.roots[0].entry if snapshot.roots else None, self.id))


def top_of(entry: Entry | None, id_: str) -> Entry:
    """Return the directory that holds the state.

    Raises:
        NotFound: The snapshot holds no training state.
    """
    if entry is None:
        raise NotFound(f"{id_} holds no training state")
    return entry


class Files:
    """Regular files of a snapshot by path, read on demand."""

    def __init__(self, repository: Repository, top: Entry) -> None:
        """List the files of the directory and of its subdirectories, one level deep."""
        self._repository = repository
        self._entries: dict[str, Entry] = {}
        for entry in repository.trees.entries(top.content):
            name = os.fsdecode(entry.name)
            if not entry.is_dir:
                self._entries[name] = entry
                continue
            for inner in repository.trees.entries(entry.content):
                self._entries[f"{name}/{os.fsdecode(inner.name)}"] = inner

    def names(self) -> Iterator[str]:
        """Iterate over the paths, relative to the root of the snapshot."""
        return iter(self._entries)

    def entry(self, name: str) -> Entry:
        """Return the entry of a file.

        Raises:
            NotFound: There is no such file.
        """
        try:
            return self._entries[name]
        except KeyError:
            raise NotFound(f"there is no {name} in it, so it is no training state") from None

    @property
    def block_size(self) -> int:
        """Size of a block of the files in bytes."""
        return self._repository.block_size

    def read(self, name: str) -> bytearray:
        """Return the content of a document.

        Raises:
            NotFound: There is no such file.
            Damaged: The file is too large for a document, or cannot be read.
        """
        entry = self.entry(name)
        if entry.size_bytes > MAX_DOCUMENT_BYTES:
            raise Damaged(f"{name} must have at most {MAX_DOCUMENT_BYTES} bytes, got {entry.size_bytes}")
        room = bytearray(entry.size_bytes)
        read_file(self._repository, entry, memoryview(room))
        return room


def read_file(repository: Repository, entry: Entry, into: memoryview, first_block: int = 0) -> None:
    """Read and check the content of a regular file.

    Args:
        repository: Repository of the file.
        entry: The file.
        into: Destination; it ends at the end of a block or of the file, and what it holds is overwritten.
        first_block: Block of the file at which to begin.

    Raises:
        Damaged: A chunk cannot be read.
    """
    block_size = repository.block_size
    blocks = blocks_of(entry.size_bytes, block_size)
    stop = first_block + blocks_of(len(into), block_size)
    run: list[tuple[int, ChunkId]] = []
    hole_from = 0
    for index, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks, first_block, stop):
        at = index - first_block
        # Blocks that the map leaves out are holes, which read as zeros.
        _fill_zeros(into, hole_from * block_size, at * block_size)
        hole_from = at + 1
        run.append((at, chunk))
        if len(run) == CHUNKS_AT_ONCE:
            _read_run(repository, run, into)
            run = []
    _read_run(repository, run, into)
    _fill_zeros(into, hole_from * block_size, len(into))


def _fill_zeros(into: memoryview, start: int, stop: int) -> None:
    # In pieces: a hole may be as large as memory, and its zeros must not take as much again.
    while start < stop:
        end = min(stop, start + len(_ZEROS))
        into[start:end] = _ZEROS[: end - start]
        start = end


def _read_run(repository: Repository, run: list[tuple[int, ChunkId]], into: memoryview) -> None:
    block_size = repository.block_size
    rooms = [into[at * block_size : min((at + 1) * block_size, len(into))] for at, _ in run]
    # Read straight to their places; for those that cannot be read so, `chunks.get` finds a good copy or tells
    # what is wrong.
    for position in repository.into_memory.read([chunk for _, chunk in run], rooms):
        chunk, room = run[position][1], rooms[position]
        data = repository.chunks.get(chunk)
        if len(data) > len(room):
            raise Damaged(f"chunk {chunk.hex()} is longer than the block it stands for")
        # A chunk may be shorter than its block, the rest of which is zeros (docs/format.md, section 6).
        room[: len(data)] = data
        room[len(data) :] = bytes(len(room) - len(data))
