"""Index of a remote: which pack has which chunk, kept on this host and rebuilt from the bucket alone.

Guarantee: what it says is stored was in a pack of the bucket when that was last listed, and no round that this process
has read condemned it since.

The index is an SQLite file, as that of a repository is. With twenty million chunks in 80,000 packs it opens in
0.6 s, a lookup takes 5 to 8 µs of processor time, and the process stays below 70 MiB: pages come through a cache of 2 MiB,
and nothing is mapped. A sorted table of 16 bytes a chunk would take five times that memory for lookups that are no
faster in Python, and every upload would have to merge it, durably, by code of our own.

A chunk that is stored as a difference is stored only if its base is: a lookup for "may a snapshot rely on it?"
(`RemoteIndex.has_many`) follows bases.

The index names packs by numbers. A number is never used again, so that rows of chunks may stay behind for a while when
their pack is gone. Packs that were moved to a colder storage class or place are those whose tables have copies below
``tables/`` (`cold_packs`).
"""

from __future__ import annotations

import sqlite3
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from typing import Final, NamedTuple, Protocol, TypeVar

from ciuic.errors import CiuicError, Damaged
from ciuic.remote.object_names import PACKS_PREFIX, TABLES_PREFIX, PackRef, parse_pack, parse_table, split_ref
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, ObjectInfo, Objects
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.chunk_reader import MAX_READ_BASE_DEPTH
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.index_database import IndexDatabase, Transaction
from ciuic.repository.model import DIFFERENCE, ChunkLocation, PackRecord


class _PackNumbers(Mapping[PackRef, int]):
    """Number of each pack. Raises sqlite3.Error."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database

    def __getitem__(self, ref: PackRef) -> int:
        row = self._db.execute("SELECT number FROM remote_packs WHERE ref=?", (ref,)).fetchone()
        if row is None:
            raise KeyError(ref)
        number: int = row[0]
        return number

    def __len__(self) -> int:
        (count,) = self._db.execute("SELECT COUNT(*) FROM remote_packs").fetchone()
        return int(count)

    def __iter__(self) -> Iterator[PackRef]:
        return (PackRef(ref) for (ref,) in self._db.execute("SELECT ref FROM remote_packs").fetchall())


class PackRefs(Mapping[int, PackRef]):
    """Reference of each pack; keeps those that were asked for. Raises sqlite3.Error, and ValueError for a decayed one."""

    def __init__(self, database: sqlite3.Connection) -> None:
        self._db = database
        self._kept: dict[int, PackRef] = {}

    def __getitem__(self, number: int) -> PackRef:
        kept = self._kept.get(number)
        if kept is not None:
            return kept
        row = self._db.execute("SELECT ref FROM remote_packs WHERE number=?", (number,)).fetchone()
        if row is None:
            raise KeyError(number)
        return self._keep(number, row[0])

    def __len__(self) -> int:
        return len(self.all())

    def __iter__(self) -> Iterator[int]:
        return iter(self.all())

    def all(self) -> Mapping[int, PackRef]:
        """Return all of them, for a walk over every chunk."""
        for number, ref in self._db.execute("SELECT number, ref FROM remote_packs"):
            if number not in self._kept:
                self._keep(number, ref)
        return self._kept

    def forget(self, number: int) -> None:
        """Forget a pack that was dropped."""
        self._kept.pop(number, None)

    def _keep(self, number: int, ref: str) -> PackRef:
        # Checked here, because the reference becomes the name of an object.
        split_ref(ref)
        self._kept[number] = PackRef(ref)
        return self._kept[number]


_VERSION: Final = 1
_VERSION_FACT: Final = "remote_index_version"
_FINISHED_FACT: Final = "remote_rounds_finished"
_LEFT_BEHIND_FACT: Final = "remote_rows_left_behind"
_LOST_FACT: Final = "remote_packs_lost"
_SCHEMA: Final = """
DROP TABLE IF EXISTS remote_packs;
CREATE TABLE remote_packs (
  number      INTEGER PRIMARY KEY AUTOINCREMENT,   -- AUTOINCREMENT: never one that was used
  ref         TEXT NOT NULL UNIQUE,
  size        INTEGER NOT NULL,
  modified_ns INTEGER NOT NULL,                    -- by the store's clock
  records     INTEGER NOT NULL
);
DROP TABLE IF EXISTS unsorted_chunks;
CREATE TABLE unsorted_chunks (
  id BLOB NOT NULL, pack INTEGER NOT NULL, offset INTEGER NOT NULL,
  stored INTEGER NOT NULL, raw INTEGER NOT NULL, flags INTEGER NOT NULL
);
"""
# Of a later version than the other tables.
_UNREADABLE_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS unreadable_packs (
  ref TEXT PRIMARY KEY, size INTEGER NOT NULL, modified_ns INTEGER NOT NULL, reason TEXT NOT NULL
);
"""


class RemotePack(NamedTuple):
    """Pack of the remote whose table the index has."""

    ref: PackRef
    size_bytes: int
    modified_ns: int
    """Time of its upload by the store's clock."""
    records: int


class PackTables:
    """Packs in one index. Raises sqlite3.Error."""

    def __init__(self, index: IndexDatabase) -> None:
        self._index = index
        self._db = index.db
        if index.fact(_VERSION_FACT) != _VERSION:
            # New, or emptied because of its version: then rows of packs without their chunks would lie.
            self._db.executescript(_SCHEMA)
            index.clear()
            index.set_fact(_VERSION_FACT, _VERSION)
        self._db.executescript(_UNREADABLE_SCHEMA)
        # Left behind by a process that was killed while it filled the index.
        self.sort()
        self.refs: Final = PackRefs(self._db)
        self.numbers: Final = _PackNumbers(self._db)

    @property
    def rounds_finished(self) -> int | None:
        """Last round whose deletions the index has; None if it was never complete."""
        found = self._index.fact(_FINISHED_FACT)
        # 0 is what an unknown fact is read as.
        return found - 2 if found else None

    def set_rounds_finished(self, round_: int) -> None:
        """Store `rounds_finished`; -1 for no round."""
        self._index.set_fact(_FINISHED_FACT, round_ + 2)

    @property
    def lost(self) -> int | None:
        """Packs that were lost since `set_lost` said 0; None if it never did."""
        found = self._index.fact(_LOST_FACT)
        return found - 1 if found else None

    def set_lost(self, number: int) -> None:
        """Set `lost` to this number of packs."""
        self._index.set_fact(_LOST_FACT, number + 1)

    def all(self) -> list[RemotePack]:
        """Return every pack that the index knows, with its size and number of records."""
        rows = self._db.execute("SELECT ref, size, modified_ns, records FROM remote_packs")
        return [
            RemotePack(PackRef(ref), size, modified_ns, records) for ref, size, modified_ns, records in rows
        ]

    def sizes(self) -> dict[PackRef, int]:
        """Return the size of every pack in bytes, as it was listed or stored."""
        return dict(self._db.execute("SELECT ref, size FROM remote_packs"))

    def add(self, packs: Iterable[tuple[RemotePack, list[PackRecord]]], *, unsorted: bool = False) -> None:
        """Add packs with their chunks, all or none.

        With ``unsorted`` the chunks are found only after `sort`, which must follow before anything else. Ids come at
        random: rows that are put into the table of twenty million in batches of 200,000 would write each of its
        pages a hundred times.
        """
        rows: list[tuple[bytes, int, int, int, int, int]] = []
        bases: list[tuple[bytes, int, int, bytes]] = []
        with Transaction(self._db):
            for pack, records in packs:
                if pack.ref in self.numbers:
                    continue
                number = self._insert(pack)
                rows += ((r.id, number, r.offset, r.stored_bytes, r.raw_bytes, r.flags) for r in records)
                bases += ((r.id, number, r.offset, r.base) for r in records if r.base)
            if not unsorted:
                # In the order of the table, so that each of its pages is visited once.
                rows.sort()
            table = "unsorted_chunks" if unsorted else "chunks"
            self._db.executemany(f"INSERT OR REPLACE INTO {table} VALUES (?,?,?,?,?,?)", rows)
            self._db.executemany("INSERT OR REPLACE INTO bases VALUES (?,?,?,?)", bases)

    def unreadable(self, listed: Mapping[PackRef, ObjectInfo]) -> dict[PackRef, str]:
        """Return the packs of a listing of all that could not be read as they are, with the reason; forget others."""
        known = {}
        for ref, size_bytes, modified_ns, reason in self._db.execute(
            "SELECT * FROM unreadable_packs"
        ).fetchall():
            info = listed.get(ref)
            if info is not None and (info.size_bytes, info.modified_ns) == (size_bytes, modified_ns):
                known[PackRef(ref)] = reason
            else:
                self._db.execute("DELETE FROM unreadable_packs WHERE ref=?", (ref,))
        return known

    def note_unreadable(self, found: Mapping[PackRef, str], listed: Mapping[PackRef, ObjectInfo]) -> None:
        """Note packs that could not be read."""
        rows = [
            (ref, listed[ref].size_bytes, listed[ref].modified_ns, reason) for ref, reason in found.items()
        ]
        self._db.executemany("INSERT OR REPLACE INTO unreadable_packs VALUES (?,?,?,?)", rows)

    def sort(self) -> None:
        """Put chunks that were added unsorted where they are found."""
        if self._db.execute("SELECT 1 FROM unsorted_chunks LIMIT 1").fetchone():
            with Transaction(self._db):
                self._db.execute(
                    "INSERT OR REPLACE INTO chunks SELECT * FROM unsorted_chunks ORDER BY id, pack, offset"
                )
                self._db.execute("DELETE FROM unsorted_chunks")

    def _insert(self, pack: RemotePack) -> int:
        cursor = self._db.execute(
            "INSERT INTO remote_packs (ref, size, modified_ns, records) VALUES (?,?,?,?)", pack
        )
        assert cursor.lastrowid is not None
        return cursor.lastrowid

    def drop(self, refs: Iterable[PackRef]) -> None:
        """Forget packs. Their rows of chunks stay until there are many, because they lie in the order of ids."""
        gone = {ref: number for ref in refs if (number := self.numbers.get(ref)) is not None}
        if not gone:
            return
        left_behind = self._index.fact(_LEFT_BEHIND_FACT)
        with Transaction(self._db):
            for ref in gone:
                row = self._db.execute("SELECT records FROM remote_packs WHERE ref=?", (ref,)).fetchone()
                left_behind += row[0] if row else 0
                self._db.execute("DELETE FROM remote_packs WHERE ref=?", (ref,))
            self._index.set_fact(_LEFT_BEHIND_FACT, left_behind)
        for number in gone.values():
            self.refs.forget(number)
        (known,) = self._db.execute("SELECT COALESCE(SUM(records), 0) FROM remote_packs").fetchone()
        if left_behind > known // 3:
            # Delete the rows of forgotten packs, which reads the whole table.
            with Transaction(self._db):
                self._index.set_fact(_LEFT_BEHIND_FACT, 0)
                for table in ("chunks", "bases"):
                    self._db.execute(
                        f"DELETE FROM {table} WHERE pack NOT IN (SELECT number FROM remote_packs)"
                    )


# Packs from which parts of the names are listed side by side.
_MANY_LISTED_PACKS: Final = 8000
_LISTING_THREADS: Final = 16
# Where parts begin. Names are random, and so parts are alike; each costs up to a page more than the names in it.
_PARTS: Final = tuple(f"{PACKS_PREFIX}{kind}/{digit:x}" for kind in ("data", "meta") for digit in range(16))


def list_packs(objects: Objects, *, many: int = _MANY_LISTED_PACKS) -> dict[PackRef, ObjectInfo]:
    """Return every pack that was there before the call; others may be missing.

    Args:
        objects: Store of a remote, or of a space in it.
        many: Packs from which parts are listed side by side.

    Raises:
        RemoteUnreachable: the store does not answer.
    """
    found = dict(islice(_list_part(objects, ""), many))
    if len(found) < many:
        return found
    last = next(reversed(found.values())).name
    begins = [last, *(part for part in _PARTS if part > last)]
    with ThreadPoolExecutor(_LISTING_THREADS, thread_name_prefix="list") as pool:
        for some in pool.map(
            lambda begin, end: dict(_list_part(objects, begin, end)), begins, [*begins[1:], ""]
        ):
            found.update(some)
    return found


def _list_part(objects: Objects, after: str, end: str = "") -> Iterator[tuple[PackRef, ObjectInfo]]:
    """Yield the packs after a name and before another one; empty for none."""
    for info in objects.list(PACKS_PREFIX, after=after):
        # Also by parts of names `end` is before all that follow: nothing is between it and the first name that begins with it.
        if end and info.name >= end:
            return
        if (ref := parse_pack(info.name)) is not None:
            yield ref, info


def cold_packs(objects: Objects) -> dict[PackRef, int]:
    """Return the packs that are cold, or were about to become so, with the time of the copy by the store's clock. One LIST."""
    return {
        ref: info.modified_ns
        for info in objects.list(TABLES_PREFIX)
        if (ref := parse_table(info.name)) is not None
    }


def packs_lacking(sizes: Mapping[PackRef, int], listed: Mapping[PackRef, ObjectInfo]) -> list[PackRef]:
    """Return the packs that a listing lacks, or has with another size; a size of 0 is unknown."""
    return [
        ref
        for ref, size_bytes in sizes.items()
        if (info := listed.get(ref)) is None or size_bytes not in (0, info.size_bytes)
    ]


# SQLite before 3.32 takes 999 parameters.
_MAX_PARAMETERS: Final = 512
# Rows of one transaction: 200,000 take about 60 MiB while they are sorted.
_BATCH_RECORDS: Final = 200_000
# New packs from which the table of chunks is filled in one go.
_MANY_NEW_PACKS: Final = 4000
# Tables that are read ahead of what is stored, for each thread.
_AHEAD: Final = 4


class CondemnedPacks(Protocol):
    """Part of `ciuic.remote.log_reader.Rounds` that the index uses."""

    @property
    def condemned(self) -> frozenset[PackRef]:
        """Packs that count as not stored."""

    @property
    def deleted(self) -> frozenset[PackRef]:
        """Packs that finished rounds deleted."""

    @property
    def finished(self) -> int:
        """Last round that was finished."""

    def forget(self) -> None:
        """Stop counting what finished rounds deleted."""


class IndexRefresh(NamedTuple):
    """Result of `RemoteIndex.refresh` and `RemoteIndex.learn`."""

    added: int
    dropped: int
    unreadable: dict[PackRef, str]
    """Packs whose table cannot be read, with the reason: nothing in them counts as stored."""


class ChunkCopy(NamedTuple):
    """Copy of a chunk, for a walk over all of them."""

    id: bytes
    pack: int
    """Number of the pack in this index; see `RemoteIndex.ref`."""
    stored_bytes: int
    flags: int


class RemoteIndex:
    """Index of one remote. Used by one thread at a time. Methods raise sqlite3.Error.

    Locations name packs by numbers of this index; `ref` turns a number into the pack's reference. The numbers of
    packs that are dropped are not used again.
    """

    def __init__(self, database: IndexDatabase, *, threads: int = 16) -> None:
        self._database = database
        self._threads = threads
        self._packs = PackTables(database)
        self._rounds: CondemnedPacks | None = None

    @classmethod
    def open(cls, path: str | None, *, threads: int = 16) -> RemoteIndex:
        """Open the index at ``path``, made if need be, or an empty one in memory.

        Args:
            path: Local file for this remote alone, in a directory of the caller's own.
            threads: Tables of packs that are read at the same time.
        """
        database = IndexDatabase.memory() if path is None else IndexDatabase.open(path, "write")
        try:
            return cls(database, threads=threads)
        except BaseException:
            database.close()
            raise

    def close(self) -> None:
        """Close the index."""
        self._database.close()

    @property
    def rounds_finished(self) -> int | None:
        """Last round whose deletions the index has, for ``Rounds(known=…)``; None if it was never complete."""
        return self._packs.rounds_finished

    def follow(self, rounds: CondemnedPacks) -> None:
        """Drop what finished rounds deleted; from now on what ``rounds`` condemns counts as not stored.

        Called after ``rounds`` was read, and again at any later time.
        """
        self._rounds = rounds
        known = self._packs.rounds_finished
        # An index that was never complete may lack what the rounds before said; `refresh` makes it complete.
        if known is not None and rounds.finished > known:
            self._packs.drop(rounds.deleted)
            self._packs.set_rounds_finished(rounds.finished)
            rounds.forget()

    def refresh(self, objects: Objects, sealer: Sealer, *, believes: bool = False) -> IndexRefresh:
        """Compare the index with the packs that are there: LIST, and read the tables of new ones.

        With ``believes`` the table of a pack that was found to be damaged is not read again while size and time of the pack are the
        same. For who stores content again that lies in such a pack, and loses nothing where it could be read today.

        Raises:
            RemoteUnreachable: the index has what was read so far.
        """
        # Of rounds that were read before the listing, which therefore lacks what they deleted.
        finished = self.rounds_known
        listed, dropped = self.drop_missing(objects)
        known = self._packs.unreadable(listed) if believes else {}
        there = self._packs.sizes()
        new = [ref for ref in listed if ref not in there and ref not in known]
        failed = self._add(objects, sealer, new, listed)
        unreadable = {ref: error.message for ref, error in failed.items()}
        # What is archived, or of a later version, may be read next time.
        damaged = {ref: error.message for ref, error in failed.items() if isinstance(error, Damaged)}
        self._packs.note_unreadable(damaged, listed)
        # Only now: an index that lacks packs is made complete by the next refresh.
        self.mark_complete(finished)
        return IndexRefresh(len(new) - len(unreadable), dropped, {**known, **unreadable})

    @property
    def known(self) -> Collection[PackRef]:
        """Packs whose tables the index has."""
        return self._packs.numbers

    @property
    def rounds_known(self) -> int:
        """Last finished round of those that the index follows, for `mark_complete`; -1 for none."""
        return -1 if self._rounds is None else self._rounds.finished

    def drop_missing(self, objects: Objects) -> tuple[dict[PackRef, ObjectInfo], int]:
        """List the packs that are there, and drop others, and those of another size; return the listing, and how many were dropped."""
        listed = list_packs(objects)
        gone = packs_lacking(self._packs.sizes(), listed)
        condemned: Collection[PackRef] = () if self._rounds is None else self._rounds.condemned
        lost = sum(ref not in condemned for ref in gone)
        if lost and self._packs.lost is not None:
            self._packs.set_lost(self._packs.lost + lost)
        self._packs.drop(gone)
        return listed, len(gone)

    @property
    def lost(self) -> int | None:
        """Packs that went without a round since `mark_whole`, as listings showed; None if it was never called for this index."""
        return self._packs.lost

    def mark_whole(self) -> None:
        """Note that the snapshots which this host counts as stored have all their chunks in packs of this index."""
        self._packs.set_lost(0)

    def drop(self, refs: Iterable[PackRef]) -> None:
        """Forget packs until the next `refresh`, which finds them again if they are there."""
        self._packs.drop(refs)

    def learn(
        self,
        objects: Objects,
        sealer: Sealer,
        refs: Iterable[PackRef],
        listed: Mapping[PackRef, ObjectInfo] | None = None,
    ) -> IndexRefresh:
        """Read the tables of packs that a log or a listing names. Those that are gone are left out."""
        new = [ref for ref in dict.fromkeys(refs) if ref not in self._packs.numbers]
        before = len(self._packs.numbers)
        failed = self._add(objects, sealer, new, listed or {})
        unreadable = {ref: error.message for ref, error in failed.items()}
        return IndexRefresh(len(self._packs.numbers) - before, 0, unreadable)

    def reread(self, objects: Objects, sealer: Sealer, refs: Iterable[PackRef]) -> IndexRefresh:
        """Read the tables of these packs again: what the index says of them turned out to be wrong."""
        chosen = list(refs)
        self._packs.drop(chosen)
        return self.learn(objects, sealer, chosen)

    def add(self, ref: PackRef, size_bytes: int, records: list[PackRecord]) -> None:
        """Add a pack that this process has just stored, with the records of its table."""
        self._packs.add([(RemotePack(ref, size_bytes, 0, len(records)), records)])

    def mark_complete(self, rounds_finished: int) -> None:
        """Note that the index has all packs that were there after this round had ended; -1 for no round."""
        known = self._packs.rounds_finished
        self._packs.set_rounds_finished(rounds_finished if known is None else max(known, rounds_finished))

    def has_many(self, chunks: Collection[bytes]) -> set[bytes]:
        """Return those of these chunks that a snapshot may rely on.

        A copy in a condemned pack does not count, nor a difference whose base does not.
        """
        return self._stored(chunks, MAX_READ_BASE_DEPTH)

    def _stored(self, chunks: Collection[bytes], bases_left: int) -> set[bytes]:
        usable = self._usable_numbers()
        found: set[bytes] = set()
        # Chunks of which every usable copy is a difference, and the bases of these copies.
        differences: dict[bytes, list[bytes]] = {}
        for some in _batches(list(chunks)):
            differences_here: set[bytes] = set()
            marks = ",".join("?" * len(some))
            query = f"SELECT id, pack, flags FROM chunks WHERE id IN ({marks})"
            for chunk, number, flags in self._database.db.execute(query, some):
                if usable(number):
                    (differences_here if flags & DIFFERENCE else found).add(chunk)
            for chunk in differences_here - found:
                differences[chunk] = [
                    location.base for location in self._database.find(chunk) if usable(location.pack)
                ]
        if differences and bases_left:
            bases = self._stored({base for some in differences.values() for base in some}, bases_left - 1)
            found.update(chunk for chunk, of in differences.items() if not bases.isdisjoint(of))
        return found

    def _usable_numbers(self) -> Callable[[int], bool]:
        refs = self._packs.refs
        condemned: Collection[PackRef] = () if self._rounds is None else self._rounds.condemned
        return lambda number: (ref := refs.get(number)) is not None and ref not in condemned

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return the copies in packs that are there, the best first, those in condemned packs last."""
        found = [location for location in self._database.find(chunk) if location.pack in self._packs.refs]
        if len(found) > 1:
            usable = self._usable_numbers()
            found.sort(key=lambda location: not usable(location.pack))
        return found

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Return the same as `find`: what the bucket has beyond it takes a `refresh`."""
        return self.find(chunk)

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Return the copy to read first for each chunk that the index knows."""
        found = self._database.find_many(chunks)
        usable = self._usable_numbers()
        for chunk in [chunk for chunk, location in found.items() if not usable(location.pack)]:
            del found[chunk]
            if others := self.find(chunk):
                found[chunk] = others[0]
        return found

    def ref(self, number: int) -> PackRef:
        """Return the pack with this number. KeyError if it was dropped."""
        return self._packs.refs[number]

    def number(self, ref: PackRef) -> int | None:
        """Return the number of a pack, or None for one that the index does not have."""
        return self._packs.numbers.get(ref)

    def sizes(self) -> dict[PackRef, int]:
        """Return the size in bytes of every pack whose table the index has."""
        return self._packs.sizes()

    def packs(self) -> list[RemotePack]:
        """Return every pack whose table the index has."""
        return self._packs.all()

    def copies(self) -> Iterator[ChunkCopy]:
        """Yield every copy of every chunk in packs that are there; copies of one chunk follow one another."""
        refs = self._packs.refs.all()
        rows = self._database.db.execute("SELECT id, pack, stored, flags FROM chunks ORDER BY id")
        return (ChunkCopy(*row) for row in rows if row[1] in refs)

    def bases(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield (chunk, base) for every copy that is stored as a difference in a pack that is there."""
        refs = self._packs.refs.all()
        rows = self._database.db.execute("SELECT id, base, pack FROM bases")
        return ((chunk, base) for chunk, base, number in rows if number in refs)

    def _add(
        self, objects: Objects, sealer: Sealer, refs: list[PackRef], listed: Mapping[PackRef, ObjectInfo]
    ) -> dict[PackRef, CiuicError]:
        """Read the tables of these packs and add them; return those that cannot be read."""
        unreadable: dict[PackRef, CiuicError] = {}

        batch: list[tuple[RemotePack, list[PackRecord]]] = []
        waiting = 0
        many = len(refs) > _MANY_NEW_PACKS
        for ref, records in read_tables(objects, sealer, refs, listed, self._threads):
            if isinstance(records, CiuicError):
                unreadable[ref] = records
            elif records is not None:
                info = listed.get(ref) or ObjectInfo("", 0, 0)
                batch.append((RemotePack(ref, info.size_bytes, info.modified_ns, len(records)), records))
                waiting += len(records)
            if waiting >= _BATCH_RECORDS:
                self._packs.add(batch, unsorted=many)
                batch, waiting = [], 0
        self._packs.add(batch, unsorted=many)
        self._packs.sort()
        return unreadable


_Key = TypeVar("_Key")
_Result = TypeVar("_Result")


def read_tables(
    objects: Objects,
    sealer: Sealer,
    refs: Collection[PackRef],
    listed: Mapping[PackRef, ObjectInfo],
    threads: int,
) -> Iterator[tuple[PackRef, list[PackRecord] | CiuicError | None]]:
    """Yield each pack with the records in its table, the error by which that cannot be read, or None for a pack that is gone.

    Args:
        objects: Store of a remote, or of a space in it.
        sealer: Its seals.
        refs: The packs.
        listed: What is known of their sizes.
        threads: Tables that are read at once.
    """

    def read(ref: PackRef) -> list[PackRecord] | CiuicError | None:
        size_bytes = listed[ref].size_bytes if ref in listed else 0
        try:
            return RemotePackReader(sealer, ref).read_table(objects, size_bytes)
        except NoSuchObject:
            return None
        except (Damaged, UnsupportedFormat, ArchivedObject) as error:
            return error

    # Tables wait in memory: no more of them than keep the threads busy.
    yield from read_ahead(read, refs, threads, _AHEAD * threads)


def read_ahead(
    read: Callable[[_Key], _Result], keys: Collection[_Key], threads: int, waiting: int
) -> Iterator[tuple[_Key, _Result]]:
    """Yield each key with the result of ``read``, which runs in threads ahead of the caller; up to ``waiting`` results wait for it."""
    if threads <= 1 or len(keys) <= 1:
        for key in keys:
            yield key, read(key)
        return
    pool = ThreadPoolExecutor(threads)
    pending: deque[tuple[_Key, Future[_Result]]] = deque()
    try:
        for key in keys:
            pending.append((key, pool.submit(read, key)))
            if len(pending) > waiting:
                done, result = pending.popleft()
                yield done, result.result()
        for done, result in pending:
            yield done, result.result()
    finally:
        # Not waited for: where a store hangs, an interruption would wait for minutes of repeated requests.
        pool.shutdown(wait=False, cancel_futures=True)


def _batches(chunks: list[bytes]) -> Iterator[list[bytes]]:
    for start in range(0, len(chunks), _MAX_PARAMETERS):
        yield chunks[start : start + _MAX_PARAMETERS]
