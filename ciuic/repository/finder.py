"""Where chunks are, for readers: the index on disk, and what it does not know, scanned into memory when it
matters.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence

from ciuic.errors import NotFound
from ciuic.repository import log
from ciuic.repository.index import NO_SNAPSHOTS, Index
from ciuic.repository.model import ChunkLocation
from ciuic.repository.packs import Packs


class ReaderFinder:
    """Needs no index at all: then the first question scans the packs."""

    def __init__(self, packs: Packs, index_path: str) -> None:
        self._packs = packs
        self._index_path = index_path
        self._index: Index | None = None
        self._extra: Index | None = None
        self._scanned: dict[int, int] = {}
        """Size of each pack that was scanned into ``_extra``."""
        self._opened = False

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        found = self._in_index(chunk)
        if self._extra is not None:
            found += [location for location in self._extra.find(chunk) if location not in found]
        return found

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """The copy of each that is to be read first; without those of which none is known yet."""
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
        """First what moved meanwhile, then packs the index does not cover, then the failed packs' own lists,
        then all.
        """
        again = self.find(chunk)
        if any(location not in failed for location in again):
            return again  # garbage collection moved it between the question and the read
        self._scan(self._uncovered())
        found = self.find(chunk)
        if any(location not in failed for location in found):
            return found
        suspects = {location.pack for location in failed}
        if not failed:
            suspects = set(self._packs.sizes())
        self._scan(suspects)
        return self.find(chunk)

    def close(self) -> None:
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

    def _give_up(self, index: Index, error: sqlite3.Error) -> None:
        log.warning("index_unreadable", error=str(error))
        index.close()
        self._index = None

    def _open(self) -> Index | None:
        if not self._opened:
            self._opened = True
            try:
                self._index = Index.open(self._index_path, "read")
            except sqlite3.Error:
                self._index = None  # missing or unreadable: the packs themselves will do
        return self._index

    def _uncovered(self) -> set[int]:
        """Packs that are not as the index has them."""
        known: dict[int, tuple[int, bool]] = {}
        if self._index is not None:
            try:
                known = self._index.packs()
            except sqlite3.Error:
                self._index.close()
                self._index = None  # `find` said so already
        return {
            number
            for number, size in self._packs.sizes().items()
            if known.get(number, (-1, False))[0] != size
        }

    def _scan(self, numbers: set[int]) -> None:
        if self._extra is None:
            self._extra = Index.memory()
        for number in sorted(numbers):
            try:
                size_bytes = self._packs.size(number)
                if self._scanned.get(number) != size_bytes:
                    self._extra.add(number, size_bytes, False, self._packs.records(number))
                    self._scanned[number] = size_bytes
            except NotFound:
                continue  # removed meanwhile: what was live in it is elsewhere by now


def known_without_snapshots(index_path: str) -> bool:
    """Whether the index says that no snapshot is missing where there is none; False without an index."""
    try:
        index = Index.open(index_path, "read")
    except sqlite3.Error:
        return False
    try:
        return bool(index.fact(NO_SNAPSHOTS))
    except sqlite3.Error:
        return False
    finally:
        index.close()
