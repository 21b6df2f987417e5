"""The SQLite index: positions of chunks, the packs that it covers, and the catalogue of snapshots.

It is a cache: packs and snapshot files say everything in it, and nothing in it is believed unchecked (a
chunk's bytes are checked against its id, a snapshot's file must exist). A row is written only when the bytes
it points to are durable. The rows of the catalogue save opening every snapshot file for a list.

An unchanged directory is known by its ctime, which saves reading every pack and snapshot on open. Guarantee: a
time that `settled_ns` returned is not that of any later change, on a local file system whose clock is the
machine's and is not set back. A copy of the repository has other times, and is read completely once.
"""

from __future__ import annotations

import functools
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Final, Literal, NamedTuple
from urllib.parse import quote

from ciuic.repository.model import DIFFERENCE, ChunkLocation, PackRecord, SnapshotInfo
from ciuic.system.disk import who_else_writes
from ciuic.types import ChunkId, Snapshot, SnapshotId

INDEX_NAME = "index.sqlite"
PACKS_SEEN: Final = "packs_seen_ns"
SNAPSHOTS_SEEN: Final = "snapshots_seen_ns"
MARKS_SEEN: Final = "marks_seen_ns"
"""Facts: ctime (`settled_ns`) of the directory when the index had all that is in it."""

NO_SNAPSHOTS: Final = "no_snapshots"
"""Fact: 1 while there is no snapshot and none is missing, because none was ever made or the last was removed
on purpose."""

DAMAGED: Final = 1 << 31
"""Flag of a row: the copy was read and found bad. Not a flag of the pack format."""

# Limit of parameters in one statement; SQLite before 3.32 takes 999.
_MAX_PARAMETERS: Final = 512
_SUFFIXES: Final = ("", "-wal", "-shm", "-journal")
_SCHEMA_VERSION = 1
# Missing in an index of an earlier ciuic, which has no such copies either.
_BASES = (
    """CREATE TABLE IF NOT EXISTS bases (   -- of copies that are stored as a difference
  id      BLOB NOT NULL,
  pack    INTEGER NOT NULL,
  offset  INTEGER NOT NULL,
  base    BLOB NOT NULL,
  PRIMARY KEY (id, pack, offset)
) WITHOUT ROWID""",
    "CREATE INDEX IF NOT EXISTS bases_by_base ON bases (base)",
)


class _Column(NamedTuple):
    """A column of the catalogue: an attribute of `SnapshotInfo`, or the signature."""

    kind: str
    """Type and constraints in SQL."""
    stored: Callable[[Any], Any] | None = None
    """Makes the stored value of that of the attribute; None: it is stored as it is."""
    loaded: Callable[[Any], Any] | None = None
    """The other way round."""
    default: str = ""
    """SQL literal that stands for a later column in rows of an earlier ciuic. Must equal what `info_of` returns for the
    snapshots of these rows: check compares the two."""


# No tag contains it: a tag has no blanks, of which U+001F is one to Python.
_SEPARATOR = "\x1f"
_SIGNATURE: Final = "signature"
"""Column of what the marks file was with which the row was made; empty: there was none."""
_CATALOGUE: Final = {
    "id": _Column("TEXT PRIMARY KEY", str, SnapshotId),
    "time_ns": _Column("INTEGER NOT NULL"),
    "size_bytes": _Column("INTEGER NOT NULL"),
    "new_bytes": _Column("INTEGER NOT NULL"),
    "files": _Column("INTEGER NOT NULL"),
    "tags": _Column(
        "TEXT NOT NULL", _SEPARATOR.join, lambda tags: tuple(tags.split(_SEPARATOR)) if tags else ()
    ),
    "message": _Column("TEXT NOT NULL"),
    "parent": _Column("TEXT NOT NULL", str),
    "host": _Column("TEXT NOT NULL"),
    "roots": _Column("BLOB NOT NULL", b"\0".join, lambda roots: tuple(roots.split(b"\0")) if roots else ()),
    "held": _Column("INTEGER NOT NULL", int, bool),
    "hold_reason": _Column("TEXT NOT NULL"),
    _SIGNATURE: _Column("TEXT NOT NULL"),
    # No snapshot of an earlier ciuic has a place of its own, or is of a set.
    "placed_ns": _Column("INTEGER NOT NULL", default="0"),
    "set_id": _Column("TEXT NOT NULL", default="''"),
    "set_name": _Column("TEXT NOT NULL", default="''"),
}
_LOADED: Final = [(name, column.loaded) for name, column in _CATALOGUE.items() if column.loaded is not None]


def _definition(name: str) -> str:
    column = _CATALOGUE[name]
    return f"{name} {column.kind}" + (f" DEFAULT {column.default}" if column.default else "")


# WITHOUT ROWID: a row lies in the tree of its key alone. With blocks of 256 KiB a chunk takes 48 bytes
# (docs/decisions/block-size.md).
_SCHEMA = (
    """CREATE TABLE packs (
  number  INTEGER PRIMARY KEY,
  size    INTEGER NOT NULL,   -- the rows below cover the file up to here
  sealed  INTEGER NOT NULL
)""",
    """CREATE TABLE chunks (
  id      BLOB NOT NULL,
  pack    INTEGER NOT NULL,
  offset  INTEGER NOT NULL,
  stored  INTEGER NOT NULL,
  raw     INTEGER NOT NULL,
  flags   INTEGER NOT NULL,
  PRIMARY KEY (id, pack, offset)   -- a chunk may have several copies: the newest good one is read
) WITHOUT ROWID""",
    f"CREATE TABLE snapshots ({', '.join(map(_definition, _CATALOGUE))}) WITHOUT ROWID",
    "CREATE TABLE facts (name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID",
    *_BASES,
)
_TABLES = ("packs", "chunks", "bases", "snapshots", "facts")


@functools.cache
def _good_among(count: int) -> str:
    return f"SELECT id, pack FROM chunks WHERE id IN ({','.join('?' * count)}) AND NOT flags & {DAMAGED}"


class MissingIndexError(sqlite3.OperationalError):
    """There is no index on disk. No damage: readers do not need it, and the next writer makes it."""


class ForeignIndexError(sqlite3.OperationalError):
    """The index is not opened because another user may have made it. No damage: readers do not need it."""


class IndexDatabase:
    """Connection to the index. Raises sqlite3.Error; its owner decides what that means."""

    def __init__(self, connection: sqlite3.Connection) -> None:
        self.db = connection

    @classmethod
    def memory(cls) -> IndexDatabase:
        """Make an empty index that lives in this process only."""
        # isolation_level=None: otherwise sqlite3 begins transactions by itself, without the IMMEDIATE that
        # `Transaction` needs.
        index = cls(sqlite3.connect(":memory:", isolation_level=None, check_same_thread=False))
        index.create()
        return index

    @classmethod
    def open(cls, path: str, mode: Literal["read", "write"]) -> IndexDatabase:
        """Open the index on disk; a writer replaces one that is missing, unreadable or of another version."""
        return cls._open_write(path) if mode == "write" else cls._open_read(path)

    @classmethod
    def _open_read(cls, path: str) -> IndexDatabase:
        if not os.path.exists(path):
            raise MissingIndexError("there is no index")
        # SQLite would wait for a writer of a pipe. The next writer of the repository removes it.
        if not _is_regular(path):
            raise MissingIndexError("in the place of the index there is something else")
        # SQLite maps the -shm file of an index that is being written: its owner could truncate it and kill
        # this process (SIGBUS), and could craft any page or schema of it. Packs and snapshot files say all
        # that the index does.
        if other := who_else_writes(os.path.dirname(path)) or who_else_writes(path):
            raise ForeignIndexError(f"another user may have made it: {other}")
        error: sqlite3.Error | None = None
        # On a read-only mount SQLite cannot make the files that share a WAL; nobody writes there, so it need
        # not.
        for option in ("mode=ro", "immutable=1"):
            # Quoted, because a `?`, `#` or `%` in the path would be part of the URI's syntax.
            db = sqlite3.connect(
                f"file:{quote(path)}?{option}", uri=True, check_same_thread=False, isolation_level=None
            )
            try:
                _distrust(db)
                version = db.execute("PRAGMA user_version").fetchone()[0]
                if not version and db.execute("SELECT 1 FROM sqlite_master LIMIT 1").fetchone() is None:
                    # Made by a writer that the machine's end cut short before it had its tables.
                    db.close()
                    raise MissingIndexError("the index was not completed")
                if version != _SCHEMA_VERSION:
                    raise sqlite3.DatabaseError("the index has another version")
                # SQLite reads lazily: a table that cannot be read shows up here, where the packs can still
                # take its place.
                db.execute("SELECT 1 FROM packs LIMIT 1").fetchone()
                return cls(db)
            except MissingIndexError:
                raise
            except (sqlite3.Error, UnicodeDecodeError) as failure:
                error = _as_damage(failure)
                db.close()
        assert error is not None
        raise error

    @classmethod
    def _open_write(cls, path: str) -> IndexDatabase:
        _discard_irregular(path)
        for attempt in (1, 2):
            # 30 s for a reader that holds the file locked; other writers are excluded by the repository's
            # lock.
            db = sqlite3.connect(path, isolation_level=None, check_same_thread=False, timeout=30)
            try:
                _distrust(db)
                # WAL, so that readers go on while the writer commits.
                db.execute("PRAGMA journal_mode=WAL")
                # No fsync for each transaction: the index is a cache, and only its order against the packs
                # matters, which are synced first.
                db.execute("PRAGMA synchronous=NORMAL")
                version = db.execute("PRAGMA user_version").fetchone()[0]
                index = cls(db)
                # Of another version of ciuic: a cache, so it is emptied instead of converted.
                if version != _SCHEMA_VERSION:
                    index.clear()
                else:
                    index._add_what_is_newer()
                # Private like the rest of the repository: the catalogue has paths and messages of snapshots.
                os.chmod(path, 0o600)
                return index
            except (sqlite3.DatabaseError, UnicodeDecodeError) as failure:
                error = _as_damage(failure)
                db.close()
                # Corrupt or no database at all: it is a cache, so it is deleted. A full disk is left to the
                # caller.
                if attempt == 2 or isinstance(error, sqlite3.OperationalError):
                    raise error from None
                discard(path)
        raise AssertionError("unreachable")

    def _add_what_is_newer(self) -> None:
        """Add what an index of an earlier ciuic lacks; its rows stay."""
        if not self.db.execute("SELECT 1 FROM sqlite_master WHERE name='bases_by_base'").fetchone():
            for statement in _BASES:
                self.db.execute(statement)
        for name in _CATALOGUE.keys() - _catalogue_columns(self.db):
            self.db.execute(f"ALTER TABLE snapshots ADD COLUMN {_definition(name)}")

    def create(self) -> None:
        """Create the tables."""
        self._make_tables()

    def clear(self) -> None:
        """Delete everything in the index."""
        # In one transaction: other connections see the old index or an empty one.
        with Transaction(self.db):
            for table in _TABLES:
                self.db.execute(f"DROP TABLE IF EXISTS {table}")
            self._make_tables()

    def _make_tables(self) -> None:
        for statement in _SCHEMA:
            self.db.execute(statement)
        self.db.execute(f"PRAGMA user_version={_SCHEMA_VERSION}")

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return all copies in the order to read them: good before damaged, new before old."""
        rows = self.db.execute(
            "SELECT pack, offset, stored, raw, flags FROM chunks WHERE id=?", (chunk,)
        ).fetchall()
        found = [self._location(chunk, row) for row in rows]
        if len(found) > 1:
            found.sort(key=_preference)
        return found

    def _location(self, chunk: bytes, row: Sequence[int]) -> ChunkLocation:
        """Return the location in ``row``: pack, offset, stored, raw, flags."""
        pack, offset, stored, raw, flags = row
        if not flags & DIFFERENCE:
            return ChunkLocation(pack, offset, stored, raw, flags)
        query = "SELECT base FROM bases WHERE id=? AND pack=? AND offset=?"
        base = self.db.execute(query, (chunk, pack, offset)).fetchone()
        return ChunkLocation(pack, offset, stored, raw, flags, base[0] if base else b"")

    def dependents_of(self, bases: Sequence[bytes]) -> set[bytes]:
        """Return the chunks of which a copy is stored as the difference from one of these."""
        found: set[bytes] = set()
        for base in bases:
            found.update(row[0] for row in self.db.execute("SELECT id FROM bases WHERE base=?", (base,)))
        return found

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        """Return the copy to read first for each chunk that the index knows."""
        found: dict[bytes, ChunkLocation] = {}
        for start in range(0, len(chunks), _MAX_PARAMETERS):
            asked = tuple(chunks[start : start + _MAX_PARAMETERS])
            marks = ",".join("?" * len(asked))
            query = f"SELECT id, pack, offset, stored, raw, flags FROM chunks WHERE id IN ({marks})"
            for chunk, *row in self.db.execute(query, asked):
                location = self._location(chunk, row)
                other = found.get(chunk)
                if other is None or _preference(location) < _preference(other):
                    found[chunk] = location
        return found

    def copies_in(self, number: int, chunks: Sequence[bytes]) -> set[tuple[bytes, int, int, int, int, bytes]]:
        """Return what the index says of these chunks in that pack, damaged or not.

        Of each copy: id, offset, stored bytes, raw bytes, flags, base.
        """
        found: set[tuple[bytes, int, int, int, int, bytes]] = set()
        for start in range(0, len(chunks), _MAX_PARAMETERS):
            asked = tuple(chunks[start : start + _MAX_PARAMETERS])
            marks = ",".join("?" * len(asked))
            query = (
                f"SELECT id, offset, stored, raw, flags & ~{DAMAGED} FROM chunks "
                f"WHERE pack=? AND id IN ({marks})"
            )
            for chunk, offset, stored, raw, flags in self.db.execute(query, (number, *asked)):
                base = (
                    self._location(chunk, (number, offset, stored, raw, flags)).base
                    if flags & DIFFERENCE
                    else b""
                )
                found.add((chunk, offset, stored, raw, flags, base))
        return found

    def good_among(self, chunks: Sequence[bytes]) -> list[tuple[bytes, int]]:
        """Return (chunk, pack) of every copy of these that was not found damaged."""
        found: list[tuple[bytes, int]] = []
        for start in range(0, len(chunks), _MAX_PARAMETERS):
            some = chunks[start : start + _MAX_PARAMETERS]
            found += self.db.execute(_good_among(len(some)), some)
        return found

    def packs(self) -> dict[int, tuple[int, bool]]:
        """Return number → (bytes covered, sealed)."""
        return {
            number: (size, bool(sealed)) for number, size, sealed in self.db.execute("SELECT * FROM packs")
        }

    def unsealed(self) -> dict[int, int]:
        """Return number → bytes covered, for the packs that may still grow."""
        return dict(self.db.execute("SELECT number, size FROM packs WHERE NOT sealed").fetchall())

    def add(
        self,
        number: int,
        size_bytes: int,
        sealed: bool,
        records: Iterable[PackRecord],
        damaged: frozenset[int] = frozenset(),
    ) -> None:
        """Record that the pack, up to ``size_bytes``, also holds these; ``damaged``: offsets of bad ones."""
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
            # REPLACE, because a pack is indexed again after a crash, and a row may get or lose its mark of
            # damage.
            self.db.executemany("INSERT OR REPLACE INTO chunks VALUES (?,?,?,?,?,?)", rows)
            self.db.executemany("INSERT OR REPLACE INTO bases VALUES (?,?,?,?)", bases)
            self.db.execute("INSERT OR REPLACE INTO packs VALUES (?,?,?)", (number, size_bytes, int(sealed)))

    def drop(self, number: int, records: Sequence[PackRecord] | None) -> None:
        """Delete the rows of a pack; without its records the whole table is read."""
        with Transaction(self.db):
            if records is None:
                self.db.execute("DELETE FROM chunks WHERE pack=?", (number,))
                self.db.execute("DELETE FROM bases WHERE pack=?", (number,))
            else:
                self._remove(number, records)
            self.db.execute("DELETE FROM packs WHERE number=?", (number,))
            self._packs_unseen()

    def cut(self, number: int, size_bytes: int, gone: Iterable[PackRecord]) -> None:
        """Record that the pack ends at ``size_bytes`` now, unsealed, without the records ``gone``."""
        with Transaction(self.db):
            self._remove(number, gone)
            self.db.execute("INSERT OR REPLACE INTO packs VALUES (?,?,0)", (number, size_bytes))
            self._packs_unseen()

    def _packs_unseen(self) -> None:
        """Forget that packs/ was seen.

        If the deletion comes to nothing, the pack stays and has to be looked at.
        """
        self.db.execute("DELETE FROM facts WHERE name=?", (PACKS_SEEN,))

    def _remove(self, number: int, records: Iterable[PackRecord]) -> None:
        keys = [(record.id, number, record.offset) for record in records]
        self.db.executemany("DELETE FROM chunks WHERE id=? AND pack=? AND offset=?", keys)
        self.db.executemany("DELETE FROM bases WHERE id=? AND pack=? AND offset=?", keys)

    def mark(self, chunk: ChunkId, location: ChunkLocation, damaged: bool) -> None:
        """Set or clear the damage mark of one copy."""
        flags = (location.flags & ~DAMAGED) | (DAMAGED if damaged else 0)
        key = (flags, chunk, location.pack, location.offset)
        self.db.execute("UPDATE chunks SET flags=? WHERE id=? AND pack=? AND offset=?", key)

    def fact(self, name: str) -> int:
        """Return the value of a fact; 0 if it is unknown."""
        row = self.db.execute("SELECT value FROM facts WHERE name=?", (name,)).fetchone()
        return int(row[0]) if row else 0

    def set_fact(self, name: str, value: int) -> None:
        """Store a fact."""
        self.db.execute("INSERT OR REPLACE INTO facts VALUES (?,?)", (name, value))

    def close(self) -> None:
        """Close the connection."""
        self.db.close()


def _catalogue_columns(db: sqlite3.Connection) -> set[str]:
    """Return the columns of the catalogue; that of an earlier ciuic lacks some."""
    return {name for (name,) in db.execute("SELECT name FROM pragma_table_info('snapshots')")}


def _distrust(db: sqlite3.Connection) -> None:
    """Set up a connection to a file that may be damaged or crafted.

    References:
        sqlite.org/security.html
    """
    # Views, triggers and defaults of a crafted schema may call no functions with side effects.
    db.execute("PRAGMA trusted_schema=OFF")
    # A damaged page is an error when it is read, before its cells lead a query astray.
    db.execute("PRAGMA cell_size_check=ON")
    # A page of a mapped file that is truncated or cannot be read would kill this process (SIGBUS).
    db.execute("PRAGMA mmap_size=0")


def _as_damage(error: sqlite3.Error | UnicodeDecodeError) -> sqlite3.Error:
    """Return the error as a sqlite3.Error; SQLite's message names a damaged schema, and may not be UTF-8."""
    if isinstance(error, UnicodeDecodeError):
        return sqlite3.DatabaseError("the schema is damaged")
    return error


def _preference(location: ChunkLocation) -> tuple[bool, int, int]:
    # Newest first: prune moves live chunks to new packs and drops the old ones.
    return bool(location.flags & DAMAGED), -location.pack, -location.offset


class Transaction:
    """Context manager for BEGIN IMMEDIATE … COMMIT, or ROLLBACK when anything is raised."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        # IMMEDIATE takes the write lock at once: a read lock that is upgraded later can fail without a retry
        # (SQLITE_BUSY).
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
        # SQLite rolls back by itself after a full disk or an I/O error.
        with suppress(sqlite3.Error):
            self._db.execute("ROLLBACK")


def _discard_irregular(path: str) -> None:
    """Discard an index if one of its files is no regular file, or has a second name where others make names: SQLite would write there.

    None is opened: close(2) of any descriptor drops all POSIX locks of the process on a file (fcntl_locking(2)), those of another
    connection of this process too. The next process to open the index would then truncate the -shm file below their mapping (SIGBUS).
    """
    for suffix in _SUFFIXES:
        try:
            st = os.lstat(path + suffix)
        except OSError:
            # Missing; any other error is left to SQLite.
            continue
        if not stat.S_ISREG(st.st_mode) or (st.st_nlink > 1 and who_else_writes(os.path.dirname(path))):
            discard(path)
            return


def _is_regular(path: str) -> bool:
    """Return whether each file of an index that is there is a regular one, or a link to one."""
    for suffix in _SUFFIXES:
        with suppress(OSError):
            if not stat.S_ISREG(os.stat(path + suffix).st_mode):
                return False
    return True


def discard(path: str) -> None:
    """Delete an index file and its companions. Readers that have it open go on with what they have."""
    for suffix in _SUFFIXES:
        with suppress(FileNotFoundError):
            os.unlink(path + suffix)


# CLOCK_REALTIME_COARSE of clock_gettime(2): the clock of file systems, which moves by ticks of some
# milliseconds.
_REALTIME_COARSE: Final = 5
# Five waits of 2 ms cover a tick of 10 ms (100 Hz), the longest that kernels are built with.
_TICK_SECONDS: Final = 0.002
_MAX_TICKS: Final = 5


def changed_ns(directory: str) -> int:
    """Return when a name in the directory was last made, removed or replaced."""
    return os.stat(directory).st_ctime_ns


def settled_ns(directory: str, *, wait: bool) -> int:
    """Return `changed_ns` once every later change must have another time, else 0; waits at most 10 ms."""
    for left in range(_MAX_TICKS if wait else 0, -1, -1):
        found_ns = changed_ns(directory)
        # Within one tick of the file system's clock a later change would get the same ctime and pass unseen.
        if time.clock_gettime_ns(_REALTIME_COARSE) > found_ns:
            return found_ns
        if left:
            time.sleep(_TICK_SECONDS)
    return 0


class Catalogue:
    """Rows of one index. Raises sqlite3.Error."""

    def __init__(self, index: IndexDatabase) -> None:
        self._db = index.db

    def rows(self, *, newest: int = -1) -> list[tuple[SnapshotInfo, str]]:
        """Return each snapshot with the signature of the marks file that the row was made from.

        ``newest`` limits the rows to that many of the newest, in the order of `list`.
        """
        known = _catalogue_columns(self._db)
        columns = [name if name in known else column.default for name, column in _CATALOGUE.items()]
        placed = "placed_ns" if "placed_ns" in known else _CATALOGUE["placed_ns"].default
        # SQLite sorts and cuts, so that the newest snapshot does not cost a row for every other one.
        order = f" ORDER BY max({placed}, time_ns) DESC, id DESC LIMIT {newest}" if newest >= 0 else ""
        found = []
        for row in self._db.execute(f"SELECT {','.join(columns)} FROM snapshots{order}"):
            values = dict(zip(_CATALOGUE, row, strict=True))
            signature = values.pop(_SIGNATURE)
            for name, loaded in _LOADED:
                values[name] = loaded(values[name])
            found.append((SnapshotInfo(**values), signature))
        return found

    def put(self, infos: Iterable[tuple[SnapshotInfo, str]]) -> None:
        """Store rows."""
        with Transaction(self._db):
            self._db.executemany(
                # Replaced as a whole, because a row also has the marks.
                f"INSERT OR REPLACE INTO snapshots ({','.join(_CATALOGUE)}) VALUES ({','.join('?' * len(_CATALOGUE))})",
                (_row(info, signature) for info, signature in infos),
            )

    def remove(self, ids: Iterable[str]) -> None:
        """Delete rows."""
        with Transaction(self._db):
            self._db.executemany("DELETE FROM snapshots WHERE id=?", ((str(id_),) for id_ in ids))


def _row(info: SnapshotInfo, signature: str) -> list[Any]:
    values = [signature if name == _SIGNATURE else getattr(info, name) for name in _CATALOGUE]
    return [
        value if column.stored is None else column.stored(value)
        for value, column in zip(values, _CATALOGUE.values(), strict=True)
    ]


def info_of(snapshot: Snapshot) -> SnapshotInfo:
    """Return the line of `list` for a snapshot."""
    return SnapshotInfo(
        id=snapshot.id,
        time_ns=snapshot.time_ns,
        size_bytes=snapshot.size_bytes,
        new_bytes=snapshot.new_bytes,
        files=snapshot.files,
        tags=snapshot.tags,
        message=snapshot.message,
        parent=snapshot.parent,
        host=snapshot.host,
        roots=tuple(root.path for root in snapshot.roots),
        held=snapshot.held,
        hold_reason=snapshot.hold_reason,
        placed_ns=snapshot.placed_ns,
        set_id="" if snapshot.set_member is None else snapshot.set_member.id,
        set_name="" if snapshot.set_member is None else snapshot.set_member.name,
    )
