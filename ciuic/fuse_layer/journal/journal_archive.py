"""The archive of a journal: the content of files that were removed since, in which a successor finds a node by its id.

It is an SQLite database in the runtime directory (memory), because a worker may be killed in the middle of a
change to it: a transaction is there or not, and a successor finds a node among millions in microseconds
without reading the others. Nothing in here is synced; a machine that fails takes the session with it.

Guarantees: the records of one file take effect at once, together with the note that the file is in. A row
says which worker of the session (``generation``) was the last to write it, so that a worker can tell rows of
its predecessors from rows that it wrote itself, whose nodes it knows better.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec

from ciuic.fuse_layer.journal.inherited_session import InheritedSession, NodeFacts, records_of
from ciuic.fuse_layer.journal.name_changes import ChangedInodes, ChangedNames
from ciuic.fuse_layer.journal.session_journal import INTENTS_KEPT, OpenedDirectory, OpenedFile

_SLICE_ROWS: Final = 128
_WAIT_SECONDS: Final = 5.0
# SQLite's log would keep its greatest length otherwise, in a directory that is memory.
_LOG_BYTES: Final = 4 << 20
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS nodes (id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, records BLOB NOT NULL, key BLOB);
CREATE INDEX IF NOT EXISTS odd ON nodes (key) WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY, absorbed INTEGER NOT NULL, generation INTEGER NOT NULL, rest BLOB NOT NULL);
"""


class _Rest(msgspec.Struct, array_like=True):
    """All tables of a session but the nodes."""

    files: list[OpenedFile]
    directories: list[OpenedDirectory]
    listings: dict[int, list[bytes]]
    intents: dict[int, int]
    lingering: set[int]
    changes: list[tuple[ChangedNames, ChangedInodes]] = []


class JournalArchive:
    """Connection to the archive of a session. Not for several threads at once."""

    def __init__(self, path: Path, *, generation: int = 0) -> None:
        self.path = path
        # SQLite would create it with mode 0644, and its other files with the mode of this one: names of the root's files are in it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        # Used by several threads, one at a time: a successor's nodes are read under the lock of the node
        # table.
        self._database = sqlite3.connect(
            path, timeout=_WAIT_SECONDS, isolation_level=None, check_same_thread=False
        )
        self._database.execute("PRAGMA journal_mode = WAL")
        # The database is in memory, and ends with the machine: there is nothing to sync for.
        self._database.execute("PRAGMA synchronous = OFF")
        self._database.execute(f"PRAGMA journal_size_limit = {_LOG_BYTES}")
        self._database.executescript(_SCHEMA)
        row = self._database.execute("SELECT absorbed, generation, rest FROM state").fetchone()
        found: tuple[int, int, bytes] = row if row is not None else (0, 0, b"")
        self.absorbed, written_by, self._rest = found
        """Number of the last file that is in."""
        self.generation = generation or written_by + 1
        """Number of the worker in the session: it reads rows of smaller generations, and writes its own."""
        odd = self._database.execute("SELECT 1 FROM nodes WHERE key IS NOT NULL LIMIT 1").fetchone()
        self._has_odd = odd is not None
        # Removed nodes, which have no key, count as well: a program may have one open, and the kernel would
        # take a new file with its id for the removed one.
        self._last_id: int = self._database.execute("SELECT max(id) FROM nodes").fetchone()[0] or 0

    def close(self) -> None:
        """Close the database; nothing is asked afterwards."""
        self._database.close()

    # -- for a successor ------------------------------------------------------------------------------

    @property
    def last_id(self) -> int:
        """Greatest id of a node when this was opened, removed ones included; 0 without any."""
        return self._last_id

    def node(self, node_id: int) -> bytes | None:
        """Return a node's records; None without any, or where this generation has written them itself."""
        if node_id >> 63:
            # An inode number that is no node's id, and no integer of SQLite's.
            return None
        row = self._database.execute(
            "SELECT records FROM nodes WHERE id = ? AND generation < ?", (node_id, self.generation)
        ).fetchone()
        return None if row is None else bytes(row[0])

    def odd(self, dev: int, ino: int) -> int | None:
        """Return the node of an inode whose number is not the node's id; None without one."""
        if not self._has_odd:
            return None
        row = self._database.execute(
            "SELECT id FROM nodes WHERE key = ? AND generation < ?", (_key(dev, ino), self.generation)
        ).fetchone()
        return None if row is None else int(row[0])

    def restore(self, to: InheritedSession) -> None:
        """Fill the tables of a session, all but the nodes."""
        if self._rest:
            rest = msgspec.msgpack.decode(self._rest, type=_Rest)
            to.files = {opened.handle: opened for opened in rest.files}
            to.directories = {opened.handle: opened for opened in rest.directories}
            to.listings, to.intents, to.lingering = rest.listings, rest.intents, rest.lingering
            to.changes = dict(rest.changes)

    # -- for a worker ---------------------------------------------------------------------------------

    def absorb(self, number: int, data: bytes) -> Iterator[None]:
        """Take in the records of a file; yield now and then, for a caller with other work."""
        found = InheritedSession(_All(self._database))
        self.restore(found)
        yield from found.apply(data)
        # Notes whose requests were answered long ago: dictionaries keep their order, the oldest first.
        for unique in list(islice(found.intents, max(0, len(found.intents) - INTENTS_KEPT))):
            del found.intents[unique]
        for names in list(islice(found.changes, max(0, len(found.changes) - INTENTS_KEPT))):
            del found.changes[names]
        rest = msgspec.msgpack.encode(
            _Rest(
                list(found.files.values()),
                list(found.directories.values()),
                found.listings,
                found.intents,
                found.lingering,
                list(found.changes.items()),
            )
        )
        database = self._database
        # One transaction for a file, with its number: a worker that is killed in the middle leaves the
        # archive as it was.
        database.execute("BEGIN IMMEDIATE")
        try:
            gone = iter([(node_id,) for node_id in found.dropped if node_id not in found.nodes])
            while some := list(islice(gone, _SLICE_ROWS)):
                database.executemany("DELETE FROM nodes WHERE id = ?", some)
                yield
            rows = (self._row(*item) for item in sorted(found.nodes.items(), key=lambda item: item[0]))
            while written := list(islice(rows, _SLICE_ROWS)):
                database.executemany("INSERT OR REPLACE INTO nodes VALUES (?, ?, ?, ?)", written)
                yield
            database.execute(
                "INSERT OR REPLACE INTO state VALUES (1, ?, ?, ?)", (number, self.generation, rest)
            )
            database.execute("COMMIT")
        except BaseException:
            database.execute("ROLLBACK")
            raise
        self.absorbed, self._rest = number, rest

    def _row(self, node_id: int, node: bytes | NodeFacts) -> tuple[int, int, bytes, bytes | None]:
        records = records_of(node)
        # Places in a whole node record (record_format.py): device from byte 13, inode number from byte 21.
        ino = int.from_bytes(records[21:29], "little")
        gone = isinstance(node, NodeFacts) and node.gone
        key = None if ino == node_id or gone else records[13:29]
        return node_id, self.generation, records, key


class _All:
    """Every row of the archive, of whatever generation."""

    last_id = 0

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database

    def node(self, node_id: int) -> bytes | None:
        row = self._database.execute("SELECT records FROM nodes WHERE id = ?", (node_id,)).fetchone()
        return None if row is None else bytes(row[0])

    def odd(self, dev: int, ino: int) -> int | None:
        return None


def _key(dev: int, ino: int) -> bytes:
    """Return the key of an inode, as it is in a node's record."""
    return dev.to_bytes(8, "little") + ino.to_bytes(8, "little")
