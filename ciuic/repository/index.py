"""The SQLite index: where each chunk lies, which packs that covers, and the catalogue of snapshots.

A cache: everything in it can be had from packs and snapshot files, and nothing in it is believed unseen (a
chunk's bytes are checked against its id, a snapshot's file must exist). A row is written only when the bytes
it points to are durable.
"""

from __future__ import annotations

import errno
import functools
import os
import sqlite3
from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Final, Literal
from urllib.parse import quote

from ciuic.repository.model import DIFFERENCE, ChunkLocation, PackRecord
from ciuic.repository.opening import open_to_write, who_else_writes
from ciuic.types import ChunkId

INDEX_NAME = "index.sqlite"
PACKS_SEEN: Final = "packs_seen_ns"
SNAPSHOTS_SEEN: Final = "snapshots_seen_ns"
MARKS_SEEN: Final = "marks_seen_ns"
"""Facts: the time of change (seen.py) that the directory had when the index said all that is in it."""

NO_SNAPSHOTS: Final = "no_snapshots"
"""Fact: 1 while there is no snapshot and none is missing, because none was ever made or the last one was removed on purpose."""

DAMAGED: Final = 1 << 31
"""In the flags of a row: the copy was read and found bad. Not a flag of the pack format."""

_MOST_PARAMETERS: Final = 512
"""Of one statement; SQLite before 3.32 takes 999."""
_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")
_SCHEMA_VERSION = 1
# Not there in an index that an earlier ciuic made: then there are no such copies either.
_BASES = """
CREATE TABLE IF NOT EXISTS bases (   -- of copies that are stored as a difference
  id      BLOB NOT NULL,
  pack    INTEGER NOT NULL,
  offset  INTEGER NOT NULL,
  base    BLOB NOT NULL,
  PRIMARY KEY (id, pack, offset)
) WITHOUT ROWID;
CREATE INDEX IF NOT EXISTS bases_by_base ON bases (base);
"""
_SCHEMA = f"""
CREATE TABLE packs (
  number  INTEGER PRIMARY KEY,
  size    INTEGER NOT NULL,   -- the rows below cover the file up to here
  sealed  INTEGER NOT NULL
);
CREATE TABLE chunks (
  id      BLOB NOT NULL,
  pack    INTEGER NOT NULL,
  offset  INTEGER NOT NULL,
  stored  INTEGER NOT NULL,
  raw     INTEGER NOT NULL,
  flags   INTEGER NOT NULL,
  PRIMARY KEY (id, pack, offset)   -- a chunk may have several copies: the newest good one is read
) WITHOUT ROWID;
CREATE TABLE snapshots (
  id TEXT PRIMARY KEY, time_ns INTEGER NOT NULL, size_bytes INTEGER NOT NULL, new_bytes INTEGER NOT NULL,
  files INTEGER NOT NULL, tags TEXT NOT NULL, message TEXT NOT NULL, parent TEXT NOT NULL, host TEXT NOT NULL,
  roots BLOB NOT NULL, held INTEGER NOT NULL, hold_reason TEXT NOT NULL,
  signature TEXT NOT NULL          -- of the marks file these values were read with
) WITHOUT ROWID;
CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
{_BASES}"""
_TABLES = ("packs", "chunks", "bases", "snapshots", "facts")


@functools.cache
def _good_among(count: int) -> str:
    return f"SELECT id, pack FROM chunks WHERE id IN ({','.join('?' * count)}) AND NOT flags & {DAMAGED}"


class ForeignIndexError(sqlite3.OperationalError):
    """The index is not opened, because somebody else may have made it. No damage: it is not needed."""


class Index:
    """One connection. Raises sqlite3.Error; who owns the index decides what that means."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.db = connection

    @classmethod
    def memory(cls) -> Index:
        """An empty one that lives in this process only."""
        index = cls(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        index.create()
        return index

    @classmethod
    def open(cls, path: str, mode: Literal["read", "write"]) -> Index:
        """The one on disk, made new by a writer where it is missing, unreadable or of another version."""
        return cls._open_write(path) if mode == "write" else cls._open_read(path)

    @classmethod
    def _open_read(cls, path: str) -> Index:
        if not os.path.exists(path):
            raise sqlite3.OperationalError("there is no index")
        # SQLite maps the -shm file of an index that is being written: its owner could cut it and end this process (SIGBUS), as
        # they could make any page or schema of it. Packs and snapshot files say all that the index does.
        if other := who_else_writes(os.path.dirname(path)) or who_else_writes(path):
            raise ForeignIndexError(f"it may have been made by somebody else: {other}")
        error: sqlite3.Error | None = None
        # On a read-only mount SQLite cannot make the files that share a WAL; nobody writes there, so it need
        # not.
        for option in ("mode=ro", "immutable=1"):
            db = sqlite3.connect(
                f"file:{quote(path)}?{option}", uri=True, check_same_thread=False, isolation_level=None
            )
            try:
                _distrust(db)
                if db.execute("PRAGMA user_version").fetchone()[0] != _SCHEMA_VERSION:
                    raise sqlite3.DatabaseError("the index has another version")
                db.execute("SELECT 1 FROM packs LIMIT 1").fetchone()
                return cls(db)
            except (sqlite3.Error, UnicodeDecodeError) as failure:
                error = _as_damage(failure)
                db.close()
        assert error is not None
        raise error

    @classmethod
    def _open_write(cls, path: str) -> Index:
        _discard_irregular(path)
        for attempt in (1, 2):
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            try:
                _distrust(db)
                db.execute("PRAGMA journal_mode=WAL")
                db.execute("PRAGMA synchronous=NORMAL")
                version = db.execute("PRAGMA user_version").fetchone()[0]
                index = cls(db)
                if version != _SCHEMA_VERSION:
                    index.clear()
                elif not db.execute("SELECT 1 FROM sqlite_master WHERE name='bases_by_base'").fetchone():
                    db.executescript(_BASES)
                os.chmod(path, 0o600)
                return index
            except (sqlite3.DatabaseError, UnicodeDecodeError) as failure:
                error = _as_damage(failure)
                db.close()
                # Corrupt or no database at all: it is a cache, so it goes. A full disk is another matter (the
                # caller's).
                if attempt == 2 or isinstance(error, sqlite3.OperationalError):
                    raise error from None
                discard(path)
        raise AssertionError("unreachable")

    def create(self) -> None:
        self.db.executescript(f"{_SCHEMA} PRAGMA user_version={_SCHEMA_VERSION};")

    def clear(self) -> None:
        """Empties it."""
        with Transaction(self.db):
            for table in _TABLES:
                self.db.execute(f"DROP TABLE IF EXISTS {table}")
            for statement in _SCHEMA.split(";"):
                if statement.strip():
                    self.db.execute(statement)
            self.db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """All copies, the one to read first in front: good before damaged, new before old."""
        rows = self.db.execute(
            "SELECT pack, offset, stored, raw, flags FROM chunks WHERE id=?", (chunk,)
        ).fetchall()
        found = [self._location(chunk, row) for row in rows]
        if len(found) > 1:
            found.sort(key=_preference)
        return found

    def _location(self, chunk: bytes, row: Sequence[int]) -> ChunkLocation:
        """``row``: pack, offset, stored, raw, flags."""
        pack, offset, stored, raw, flags = row
        if not flags & DIFFERENCE:
            return ChunkLocation(pack, offset, stored, raw, flags)
        query = "SELECT base FROM bases WHERE id=? AND pack=? AND offset=?"
        base = self.db.execute(query, (chunk, pack, offset)).fetchone()
        return ChunkLocation(pack, offset, stored, raw, flags, base[0] if base else b"")

    def resting_on(self, bases: Sequence[bytes]) -> set[bytes]:
        """Chunks of which a copy is stored as the difference from one of these."""
        found: set[bytes] = set()
        for base in bases:
            found.update(row[0] for row in self.db.execute("SELECT id FROM bases WHERE base=?", (base,)))
        return found

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """The copy to read first, of each that is there."""
        found: dict[bytes, ChunkLocation] = {}
        for start in range(0, len(chunks), _MOST_PARAMETERS):
            asked = tuple(chunks[start : start + _MOST_PARAMETERS])
            marks = ",".join("?" * len(asked))
            query = f"SELECT id, pack, offset, stored, raw, flags FROM chunks WHERE id IN ({marks})"
            for chunk, *row in self.db.execute(query, asked):
                location = self._location(chunk, row)
                other = found.get(chunk)
                if other is None or _preference(location) < _preference(other):
                    found[chunk] = location
        return found

    def copies_in(self, number: int, chunks: Sequence[bytes]) -> set[tuple[bytes, ChunkLocation]]:
        """Where it says that these lie in that pack; not whether they are damaged."""
        found = set()
        for start in range(0, len(chunks), _MOST_PARAMETERS):
            asked = tuple(chunks[start : start + _MOST_PARAMETERS])
            marks = ",".join("?" * len(asked))
            query = f"SELECT id, offset, stored, raw, flags & ~{DAMAGED} FROM chunks WHERE pack=? AND id IN ({marks})"
            for chunk, *row in self.db.execute(query, (number, *asked)):
                found.add((chunk, self._location(chunk, (number, *row))))
        return found

    def good_among(self, chunks: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """(chunk, pack) of every copy of these that was not found damaged."""
        found: list[tuple[bytes, int]] = []
        for start in range(0, len(chunks), _MOST_PARAMETERS):
            some = chunks[start : start + _MOST_PARAMETERS]
            found += self.db.execute(_good_among(len(some)), some)
        return found

    def packs(self) -> dict[int, tuple[int, bool]]:
        """Number → (bytes covered, sealed)."""
        return {
            number: (size, bool(sealed)) for number, size, sealed in self.db.execute("SELECT * FROM packs")
        }

    def unsealed(self) -> dict[int, int]:
        """Number → bytes covered, of the packs that may still grow."""
        return dict(self.db.execute("SELECT number, size FROM packs WHERE NOT sealed").fetchall())

    def add(
        self,
        number: int,
        size_bytes: int,
        sealed: bool,
        records: Iterable[PackRecord],
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        """Says that the pack, up to ``size_bytes``, holds these too. ``damaged``: offsets of bad ones."""
        records = list(records)
        bases = [(r.id, number, r.offset, r.base) for r in records if r.base]
        rows = (
            (
                r.id,
                number,
                r.offset,
                r.stored_bytes,
                r.raw_bytes,
                r.flags | (DAMAGED if r.offset in damaged else 0),
            )
            for r in records
        )
        with Transaction(self.db):
            self.db.executemany("INSERT OR REPLACE INTO chunks VALUES (?,?,?,?,?,?)", rows)
            self.db.executemany("INSERT OR REPLACE INTO bases VALUES (?,?,?,?)", bases)
            self.db.execute("INSERT OR REPLACE INTO packs VALUES (?,?,?)", (number, size_bytes, int(sealed)))

    def drop(self, number: int, records: Sequence[PackRecord] | None) -> None:
        """Forgets a pack; with its records only those rows are looked up, without them the whole table is
        read.
        """
        with Transaction(self.db):
            if records is None:
                self.db.execute("DELETE FROM chunks WHERE pack=?", (number,))
                self.db.execute("DELETE FROM bases WHERE pack=?", (number,))
            else:
                self._remove(number, records)
            self.db.execute("DELETE FROM packs WHERE number=?", (number,))
            self._packs_unseen()

    def cut(self, number: int, size_bytes: int, gone: Iterable[PackRecord]) -> None:
        """Says that the pack ends there now, unsealed, and holds none of these any more."""
        with Transaction(self.db):
            self._remove(number, gone)
            self.db.execute("INSERT OR REPLACE INTO packs VALUES (?,?,0)", (number, size_bytes))
            self._packs_unseen()

    def _packs_unseen(self) -> None:
        """What goes from the index first may stay in the file, if that comes to nothing: then it has to be looked at."""
        self.db.execute("DELETE FROM facts WHERE name=?", (PACKS_SEEN,))

    def _remove(self, number: int, records: Iterable[PackRecord]) -> None:
        keys = [(record.id, number, record.offset) for record in records]
        self.db.executemany("DELETE FROM chunks WHERE id=? AND pack=? AND offset=?", keys)
        self.db.executemany("DELETE FROM bases WHERE id=? AND pack=? AND offset=?", keys)

    def mark(self, chunk: ChunkId, location: ChunkLocation, damaged: bool) -> None:
        flags = (location.flags & ~DAMAGED) | (DAMAGED if damaged else 0)
        key = (flags, chunk, location.pack, location.offset)
        self.db.execute("UPDATE chunks SET flags=? WHERE id=? AND pack=? AND offset=?", key)

    def fact(self, name: str) -> int:
        row = self.db.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def set_fact(self, name: str, value: int) -> None:
        self.db.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, value))

    def close(self) -> None:
        self.db.close()


def _distrust(db: sqlite3.Connection) -> None:
    """Settings for a file that may be damaged or crafted (sqlite.org/security.html): no functions called by its schema, cells
    checked when a page is read, and nothing of it mapped into memory.
    """
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")
    db.execute("PRAGMA mmap_size=0")


def _as_damage(error: sqlite3.Error | UnicodeDecodeError) -> sqlite3.Error:
    """A damaged schema is named in SQLite's message, and may be no text."""
    if isinstance(error, UnicodeDecodeError):
        return sqlite3.DatabaseError("the schema is damaged")
    return error


def _preference(location: ChunkLocation) -> tuple[bool, int, int]:
    return bool(location.flags & DAMAGED), -location.pack, -location.offset


class Transaction:
    """BEGIN IMMEDIATE … COMMIT, or ROLLBACK when anything is raised."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        if kind is None:
            try:
                self._db.execute("COMMIT")
                return
            except sqlite3.Error:
                self._rollback()
                raise
        self._rollback()

    def _rollback(self) -> None:
        with suppress(sqlite3.Error):  # SQLite has rolled back by itself after a full disk or an I/O error
            self._db.execute("ROLLBACK")


def _discard_irregular(path: str) -> None:
    """Discard an index of which some file is a link or no file at all: SQLite would follow it, and write at its other end."""
    for suffix in _SUFFIXES:
        try:
            os.close(open_to_write(path + suffix, os.O_RDONLY))
        except FileNotFoundError:
            continue
        except OSError as error:
            if error.errno == errno.EINVAL:
                discard(path)
                return


def discard(path: str) -> None:
    """Deletes an index file with what belongs to it. Readers that have it open go on with what they have."""
    for suffix in _SUFFIXES:
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)
