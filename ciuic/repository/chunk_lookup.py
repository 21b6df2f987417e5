"""Chunk lookup for readers: the index on disk, and packs that it does not cover, scanned into memory."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ciuic.errors import NotFound
from ciuic.repository import log
from ciuic.repository.index_database import NO_SNAPSHOTS, IndexDatabase
from ciuic.repository.model import ChunkLocation
from ciuic.repository.pack_directory import Packs


class ReaderFinder:
    """Chunk lookup of one reader. Without an index, the first lookup scans the packs."""

    def __init__(self, packs: Packs, index_path: str) -> None:
        self._packs = packs
        self._index_path = index_path
        self._index: IndexDatabase | None = None
        # Rows of packs that the index does not cover.
        self._extra: IndexDatabase | None = None
        # Size of each pack that was scanned into ``_extra``.
        self._scanned: dict[int, int] = {}
        self._opened = False

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return known copies, the best first."""
        found = self._in_index(chunk)
        if self._extra is not None:
            found += [location for location in self._extra.find(chunk) if location not in found]
        return found

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Return the copy to read first for each chunk that is known yet."""
        index = self._open()
        found: dict[bytes, ChunkLocation] = {}
        if index is not None:
            try:
                found = index.find_many(chunks)
            except sqlite3.Error as error:
                self._give_up(index, error)
        if self._extra is not None:
            found |= self._extra.find_many([chunk for chunk in chunks if chunk not in found])
        return found

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Search harder.

        What moved meanwhile, then uncovered packs, then lists of the failed packs, then all.
        """
        again = self.find(chunk)
        if any(location not in failed for location in again):
            # Prune moved it between the lookup and the read.
            return again
        # Packs that a writer has begun or extended since the index was written are the likeliest to have it.
        self._scan(self._uncovered())
        found = self.find(chunk)
        if any(location not in failed for location in found):
            return found
        # The lists of packs say where the chunk really is, if the index is wrong about a pack that it covers.
        # Where it names no pack at all, it may lack rows of any.
        suspects = {location.pack for location in failed}
        if not failed:
            suspects = set(self._packs.sizes())
        self._scan(suspects)
        return self.find(chunk)

    def close(self) -> None:
        """Close the index."""
        for index in (self._index, self._extra):
            if index is not None:
                index.close()
        self._index = self._extra = None

    def _in_index(self, chunk: bytes) -> list[ChunkLocation]:
        index = self._open()
        if index is None:
            return []
        try:
            return index.find(chunk)
        except sqlite3.Error as error:
            self._give_up(index, error)
            return []

    def _give_up(self, index: IndexDatabase, error: sqlite3.Error) -> None:
        log.warning("index_unreadable", error=str(error))
        index.close()
        self._index = None

    def _open(self) -> IndexDatabase | None:
        # Tried once: a reader goes on without an index that could not be opened.
        if not self._opened:
            self._opened = True
            try:
                self._index = IndexDatabase.open(self._index_path, "read")
            except sqlite3.Error:
                # Missing or unreadable: the packs themselves are enough.
                self._index = None
        return self._index

    def _uncovered(self) -> set[int]:
        """Return the packs that differ from what the index says."""
        known: dict[int, tuple[int, bool]] = {}
        if self._index is not None:
            try:
                known = self._index.packs()
            except sqlite3.Error:
                self._index.close()
                # `find` has logged it.
                self._index = None
        return {
            number
            for number, size in self._packs.sizes().items()
            if known.get(number, (-1, False))[0] != size
        }

    def _scan(self, numbers: set[int]) -> None:
        if self._extra is None:
            self._extra = IndexDatabase.memory()
        for number in sorted(numbers):
            try:
                size_bytes = self._packs.size(number)
                # A pack that has grown since is scanned again.
                if self._scanned.get(number) != size_bytes:
                    self._extra.add(number, size_bytes, False, self._packs.records(number))
                    self._scanned[number] = size_bytes
            except NotFound:
                # Removed meanwhile: what was live in it has been moved.
                continue


def known_without_snapshots(index_path: str) -> bool:
    """Return whether the index, if there is one, says that no snapshot is missing."""
    try:
        index = IndexDatabase.open(index_path, "read")
    except sqlite3.Error:
        # Not known counts as no: prune then refuses, and deletes nothing.
        return False
    try:
        return bool(index.fact(NO_SNAPSHOTS))
    except sqlite3.Error:
        return False
    finally:
        index.close()
