"""The regular files of a snapshot, read with their checksums. Needs no writer and no lock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Final, NamedTuple

from ciuic.errors import Damaged, NotFound
from ciuic.repository import Repository
from ciuic.repository.blockmaps import blocks_of
from ciuic.training.documents import MAX_DOCUMENT_BYTES
from ciuic.types import ChunkId, Entry, SnapshotId

_AT_ONCE: Final = 32
_ZEROS: Final = memoryview(bytes(1 << 20))


class Opened(NamedTuple):
    """A snapshot, for who opens its repository again in other threads."""

    path: str
    """Of the repository."""
    id: str

    def files(self, repository: Repository) -> Files:
        """NotFound; Damaged."""
        snapshot = repository.snapshots.load(SnapshotId.parse(self.id))
        return Files(repository, top_of(snapshot.roots[0].entry if snapshot.roots else None, self.id))


def top_of(entry: Entry | None, id_: str) -> Entry:
    """The directory that holds a state. NotFound."""
    if entry is None:
        raise NotFound(f"{id_} holds no training state")
    return entry


class Files:
    """The regular files of a snapshot by path, read on demand."""

    def __init__(self, repository: Repository, top: Entry) -> None:
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
        return iter(self._entries)

    def entry(self, name: str) -> Entry:
        try:
            return self._entries[name]
        except KeyError:
            raise NotFound(f"there is no {name} in it, so it is no training state") from None

    def read(self, name: str) -> bytearray:
        entry = self.entry(name)
        if entry.size_bytes > MAX_DOCUMENT_BYTES:
            raise Damaged(f"{name} has {entry.size_bytes} bytes, which no document has")
        room = bytearray(entry.size_bytes)
        read_file(self._repository, entry, memoryview(room))
        return room


def read_file(repository: Repository, entry: Entry, into: memoryview, first_block: int = 0) -> None:
    """The content of a regular file from a block on, checked, into memory that may hold anything; it ends with a block or with the
    file. Damaged."""
    block_size = repository.block_size
    blocks = blocks_of(entry.size_bytes, block_size)
    stop = first_block + blocks_of(len(into), block_size)
    run: list[tuple[int, ChunkId]] = []
    hole_from = 0
    for index, chunk in repository.block_maps.ids(entry.content, entry.map_height, blocks, first_block, stop):
        at = index - first_block
        _fill_zeros(into, hole_from * block_size, at * block_size)
        hole_from = at + 1
        run.append((at, chunk))
        if len(run) == _AT_ONCE:
            _read_run(repository, run, into)
            run = []
    _read_run(repository, run, into)
    _fill_zeros(into, hole_from * block_size, len(into))


def _fill_zeros(into: memoryview, start: int, stop: int) -> None:
    while start < stop:  # a hole may be as large as memory, and zeros for it are not to take as much again
        end = min(stop, start + len(_ZEROS))
        into[start:end] = _ZEROS[: end - start]
        start = end


def _read_run(repository: Repository, run: list[tuple[int, ChunkId]], into: memoryview) -> None:
    block_size = repository.block_size
    rooms = [into[at * block_size : min((at + 1) * block_size, len(into))] for at, _ in run]
    for position in repository.into_memory.read([chunk for _, chunk in run], rooms):
        chunk, room = run[position][1], rooms[position]
        data = repository.chunks.get(chunk)
        if len(data) > len(room):
            raise Damaged(f"chunk {chunk.hex()} is longer than the block it stands for")
        room[: len(data)] = data
        room[len(data) :] = bytes(len(room) - len(data))
