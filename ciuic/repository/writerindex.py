"""The index as a writer keeps it: brought into line with the packs when it opens, and never a reason to fail.

When SQLite cannot write (a full disk), what is new is kept in memory and what is gone is remembered as gone;
the next writer sees from the sizes of the packs what is missing and adds it.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Callable, Iterable, Sequence

from ciuic.errors import NotFound
from ciuic.repository import log
from ciuic.repository.catalogue import Catalogue
from ciuic.repository.chunks import location_of
from ciuic.repository.index import DAMAGED, NO_SNAPSHOTS, Index, discard
from ciuic.repository.model import ChunkLocation, PackRecord, SnapshotInfo
from ciuic.repository.packs import Packs
from ciuic.types import ChunkId


class WriterIndex:
    """Finder for the writer."""

    def __init__(self, packs: Packs, path: str) -> None:
        self._packs = packs
        self._path = path
        self._dropped: set[int] = set()
        """Packs of which what the index on disk says does not count: they are gone, or it could not be told."""
        self._memory: Index | None = None
        self._corrupt = False
        self._lacking = False
        """Whether something failed: then the file does not say all that it should."""
        self.all_seen = False
        """Whether no pack had to be looked at but those that may still grow."""
        self._disk = self._open()

    def _open(self) -> Index | None:
        for mode in ("write", "read"):
            try:
                return Index.open(self._path, "write" if mode == "write" else "read")
            except (sqlite3.Error, OSError) as error:
                log.warning("index_not_opened", mode=mode, error=str(error))
        return None

    def covered(self) -> dict[int, tuple[int, bool]]:
        """Number → (bytes covered, sealed), of packs not dropped. An index found corrupt is emptied."""
        found: dict[int, tuple[int, bool]] = {}
        if self._disk is not None:
            try:
                facts = self._disk.packs()
                found.update((number, facts[number]) for number in facts.keys() - self._dropped)
            except sqlite3.Error as error:
                self._failed("index_unreadable", error)
        if self._memory is not None:
            found.update(self._memory.packs())
        if self._corrupt:
            self.clear()
            found.clear()
        return found

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        found: list[ChunkLocation] = []
        if self._disk is not None:
            try:
                found = self._disk.find(chunk)
            except sqlite3.Error as error:
                self._failed("index_unreadable", error)
        if self._dropped:
            found = [location for location in found if location.pack not in self._dropped]
        if self._memory is not None:
            found = self._memory.find(chunk) + found
            found.sort(key=lambda location: bool(location.flags & DAMAGED))
        return found

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """The own lists of the packs whose copies failed: the index may lie."""
        found = self.find(chunk)
        for number in {location.pack for location in failed}:
            try:
                records = self._packs.records(number)
            except NotFound:
                continue  # said by the failed copy
            found += [location_of(number, record) for record in records if record.id == chunk]
        return found

    def good_among(self, chunks: Sequence[bytes]) -> set[bytes]:
        """Those of which some copy is there that was not found damaged."""
        good: set[bytes] = set()
        if self._disk is not None:
            try:
                good.update(id_ for id_, pack in self._disk.good_among(chunks) if pack not in self._dropped)
            except sqlite3.Error as error:
                self._failed("index_unreadable", error)
        if self._memory is not None:
            good.update(id_ for id_, _ in self._memory.good_among(chunks))
        return good

    def resting_on(self, chunks: Sequence[ChunkId]) -> set[ChunkId]:
        """Chunks of which a copy is stored as a difference from one of these, or from one that is."""
        found: set[bytes] = set()
        layer: set[bytes] = set(chunks)
        while layer:
            above: set[bytes] = set()
            for index in (self._disk, self._memory):
                if index is not None:
                    try:
                        above |= index.resting_on(list(layer))
                    except sqlite3.Error as error:
                        self._failed("index_unreadable", error)
            layer = above - found
            found |= above
        return {ChunkId(chunk) for chunk in found}

    def add(
        self,
        number: int,
        size_bytes: int,
        sealed: bool,
        records: Sequence[PackRecord],
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        """Only for records that are durable."""

        def change(index: Index) -> None:
            index.add(number, size_bytes, sealed, records, damaged)

        if not self._try("index_not_extended", change):
            if self._memory is None:
                self._memory = Index.memory()
            change(self._memory)

    def drop(self, number: int, records: Sequence[PackRecord] | None) -> None:
        # Where something was dropped before, rows of it may have stayed that are not among these records.
        known = None if number in self._dropped else records
        self._dropped.add(number)
        self._try("index_not_reduced", lambda index: index.drop(number, known))
        if self._memory is not None:
            self._memory.drop(number, None)

    def cut(
        self, number: int, size_bytes: int, gone: Sequence[PackRecord], kept: Sequence[PackRecord]
    ) -> None:
        """The pack ends there now, unsealed: what is ``gone`` is no longer in it, what is ``kept`` is."""
        in_memory = self._memory is not None and number in self._memory.packs()
        whole = (
            not in_memory
            and number not in self._dropped
            and self._try("index_not_reduced", lambda index: index.cut(number, size_bytes, gone))
        )
        if not whole:
            # From here on what the file says of this pack counts for nothing: neither what is gone nor what is kept.
            self._dropped.add(number)
            self._memory = self._memory or Index.memory()
            self._memory.drop(number, None)
            self._memory.add(number, size_bytes, False, kept)

    def drop_rows(self, number: int) -> None:
        """Forgets what is said of a pack that is there but is not what the index says."""
        self._try("index_not_reduced", lambda index: index.drop(number, None))

    def mark(self, chunk: ChunkId, location: ChunkLocation, damaged: bool) -> None:
        self._try("damage_not_marked", lambda index: index.mark(chunk, location, damaged))
        if self._memory is not None:
            self._memory.mark(chunk, location, damaged)

    def catalogue_put(self, infos: Iterable[tuple[SnapshotInfo, str]]) -> None:
        rows = list(infos)
        self._try("catalogue_not_extended", lambda index: Catalogue(index).put(rows))

    def catalogue_remove(self, ids: Iterable[str]) -> None:
        gone = list(ids)
        self._try("catalogue_not_reduced", lambda index: Catalogue(index).remove(gone))

    def catalogued(self) -> dict[str, str]:
        """Id → signature of its marks, as the catalogue has it."""
        if self._disk is None:
            return {}
        try:
            return dict(self._disk.db.execute("SELECT id, signature FROM snapshots").fetchall())
        except sqlite3.Error as error:
            self._failed("catalogue_unreadable", error)
            return {}

    def catalogue_infos(self) -> list[SnapshotInfo]:
        """What the catalogue knows of each snapshot; nothing when it cannot be read."""
        if self._disk is None:
            return []
        try:
            return [info for info, _ in Catalogue(self._disk).rows()]
        except (sqlite3.Error, ValueError, TypeError) as error:
            log.warning("catalogue_unreadable", error=str(error))
            return []

    def unsealed(self) -> dict[int, int]:
        """Number → bytes covered, of the packs that may still grow; nothing when it cannot be read."""
        try:
            return self._disk.unsealed() if self._disk is not None else {}
        except sqlite3.Error as error:
            self._failed("index_unreadable", error)
            return {}

    def last_pack(self) -> int:
        """The highest pack number that this index remembers."""
        return self._fact("last_pack")

    def seen_ns(self, name: str) -> int:
        """One of the facts PACKS_SEEN and its like; 0 where the directory has to be looked at."""
        return 0 if self._lacking else self._fact(name)

    def set_seen(self, name: str, changed_ns: int) -> None:
        """Says so, unless something could not be written into the index."""
        if changed_ns and not self._lacking and self._fact(name) != changed_ns:
            self._try("index_not_extended", lambda index: index.set_fact(name, changed_ns))

    def set_no_snapshots(self, *, holds: bool) -> None:
        """Keep the fact NO_SNAPSHOTS. One that could not be written, or was lost, only makes prune more careful."""
        if bool(self._fact(NO_SNAPSHOTS)) != holds:
            self._try("index_not_extended", lambda index: index.set_fact(NO_SNAPSHOTS, int(holds)))

    @property
    def has_no_snapshots(self) -> bool:
        """The fact NO_SNAPSHOTS."""
        return bool(self._fact(NO_SNAPSHOTS))

    def _fact(self, name: str) -> int:
        if self._disk is None:
            return 0
        try:
            return self._disk.fact(name)
        except sqlite3.Error as error:
            self._failed("index_unreadable", error)
            return 0

    def set_last_pack(self, number: int) -> None:
        self._try("index_not_extended", lambda index: index.set_fact("last_pack", number))

    def damaged(self) -> list[tuple[ChunkId, int, int]]:
        """(chunk, pack, offset) of the copies marked damaged. Reads the whole table."""
        if self._disk is None:
            return []
        try:
            query = "SELECT id, pack, offset FROM chunks WHERE flags & ?"
            return self._disk.db.execute(query, (DAMAGED,)).fetchall()
        except sqlite3.Error as error:
            self._failed("index_unreadable", error)
            return []

    def clear(self) -> None:
        """Empties the index, making a new file if the old one will not do."""
        self._dropped.clear()
        self._memory = None
        self._lacking = False
        if self._corrupt or not self._try("index_not_cleared", lambda index: index.clear()):
            if self._disk is not None:
                self._disk.close()
            discard(self._path)
            self._disk = self._open()
            self._corrupt = False

    def close(self) -> None:
        for index in (self._disk, self._memory):
            if index is not None:
                index.close()
        self._disk = self._memory = None
        if self._corrupt:  # the next writer makes it anew, and readers do without meanwhile
            discard(self._path)

    def _try(self, event: str, change: Callable[[Index], object]) -> bool:
        if self._disk is None:
            self._lacking = True
            return False
        try:
            change(self._disk)
            return True
        except sqlite3.Error as error:
            self._failed(event, error)
            return False

    def _failed(self, event: str, error: sqlite3.Error) -> None:
        log.warning(event, error=str(error))
        self._lacking = True
        # A full disk or a locked file pass; a malformed image does not.
        if isinstance(error, sqlite3.DatabaseError) and not isinstance(error, sqlite3.OperationalError):
            self._corrupt = True
