"""The tables that a predecessor's journal describes: read from its records, and from their archive on demand.

Invariant: applying the records of the files in the order of their numbers to what the archive holds gives the
tables as they were when the worker ended. A last record that was cut short was never told to the kernel, and
is left out.

The archive has the content of files that were removed since; a successor finds a node in it by its id. It is an
SQLite database in the runtime directory (memory), because a worker may be killed in the middle of a change to
it: a transaction is there or not, and a successor finds a node among millions in microseconds without reading
the others. Nothing in it is synced; a machine that fails takes the session with it. The records of one file take
effect at once, together with the note that the file is in. A row says which worker of the session
(``generation``) was the last to write it, so that a worker can tell rows of its predecessors from rows that it
wrote itself, whose nodes it knows better.
"""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Final, Protocol

import msgspec

from ciuic.fuse_layer.journal import records as f
from ciuic.fuse_layer.journal.records import (
    INTENTS_KEPT,
    VERSION,
    ChangedInodes,
    ChangedNames,
    OpenedDirectory,
    OpenedFile,
    emptied_record,
    name_record,
    node_record,
    unlinked_record,
)
from ciuic.structs import decode_msgpack

_VERSIONS_READ: Final = (1, 2, 3, 4, VERSION)
"""Version 1 had no archive, version 2 no write-ahead records of names, version 3 did not say who opened a
file, version 4 not which changes of names were refused."""
_SLICE_RECORDS: Final = 256
"""Records between two pauses of `apply`."""
_ID: Final = slice(f.LENGTH.size + 1, f.LENGTH.size + 9)
"""Place of the node's id in a whole node record."""
_INO: Final = slice(f.LENGTH.size + 17, f.LENGTH.size + 25)
"""Place of the inode number in a whole node record."""
_SLICE_ROWS: Final = 128
_WAIT_SECONDS: Final = 5.0
# SQLite's log would keep its greatest length otherwise, in a directory that is memory.
_LOG_BYTES: Final = 4 << 20
_SCHEMA: Final = """
CREATE TABLE IF NOT EXISTS nodes (id INTEGER PRIMARY KEY, generation INTEGER NOT NULL, records BLOB NOT NULL, key BLOB);
CREATE INDEX IF NOT EXISTS odd ON nodes (key) WHERE key IS NOT NULL;
CREATE TABLE IF NOT EXISTS state (one INTEGER PRIMARY KEY, absorbed INTEGER NOT NULL, generation INTEGER NOT NULL, rest BLOB NOT NULL);
"""


class NodeFacts:
    """A node as the journal describes it."""

    __slots__ = ("aliases", "dev", "emptied", "gone", "id", "ino", "kind", "name")

    def __init__(self, node_id: int, dev: int, ino: int, kind: int, name: tuple[int, bytes] | None) -> None:
        self.id, self.dev, self.ino, self.kind = node_id, dev, ino, kind
        self.name = name
        """Parent id and name; None when no name is left."""
        self.aliases: set[tuple[int, bytes]] = set()
        self.gone = False
        """True if its last name is gone, so that only handles lead to it."""
        self.emptied: tuple[int, int, int] | None = None
        """Mode, owner and group of a directory that is gone."""

    @property
    def key(self) -> tuple[int, int]:
        """Device and inode number."""
        return self.dev, self.ino


class NodeRecords(Protocol):
    """Records of nodes that the newest files do not mention, by id."""

    def node(self, node_id: int) -> bytes | None:
        """Return the records of a node; None without any."""

    def odd(self, dev: int, ino: int) -> int | None:
        """Return the node of an inode whose number is not the node's id; None without one."""

    @property
    def last_id(self) -> int:
        """Greatest id of a node, removed ones included."""


class InheritedSession:
    """The tables that a predecessor left. A node is decoded from its records when it is asked for."""

    def __init__(self, archive: NodeRecords | None = None) -> None:
        self.archive = archive
        self.version = self.minor = self.flags = self.max_write_bytes = 0
        self.nodes: dict[int, bytes | NodeFacts] = {}
        """Nodes of the applied records, by id: encoded until they are asked for."""
        self.dropped: set[int] = set()
        """Ids of nodes that the kernel has forgotten, whatever the archive says."""
        self._odd: dict[tuple[int, int], int] = {}
        self.files: dict[int, OpenedFile] = {}
        self.directories: dict[int, OpenedDirectory] = {}
        self.listings: dict[int, list[bytes]] = {}
        self.removals: dict[int, int] = {}
        """Names that went from a directory, by its node, of directories that were opened."""
        self.removals_before: dict[int, int] = {}
        """Such names before a handle of the directory was opened, by handle."""
        self.intents: dict[int, int] = {}
        """Numbers that tell whether a request that must not be repeated was carried out, by its unique."""
        self.changes: dict[ChangedNames, ChangedInodes] = {}
        """Renames and removals that were begun, and whose outcome was not recorded."""
        self.lingering: set[int] = set()
        """Nodes that a mapping may be writing to although no handle is left (passthrough_writers.py)."""

    @property
    def last_handle(self) -> int:
        """Greatest handle that is open; 0 without any."""
        return max((*self.files, *self.directories), default=0)

    def removed_since_opened(self, handle: int) -> int | None:
        """Return the greatest number of names that may have gone from an open directory since; None where an older version opened it."""
        before, node_id = self.removals_before.get(handle), self.directories[handle].node
        if before is None:
            return None
        begun = sum(node_id in (names.parent, names.new_parent) for names in self.changes)
        return self.removals[node_id] - before + begun

    def note_removal(self, directory: int) -> None:
        """Count a name that has gone from a directory."""
        if directory in self.removals:
            self.removals[directory] += 1

    @property
    def understood(self) -> bool:
        """True if the records begin a session, in a version that this one reads."""
        return self.version in _VERSIONS_READ

    @property
    def last_node(self) -> int:
        """Greatest id of the nodes that are not found by their inode number, removed ones included."""
        archived = self.archive.last_id if self.archive is not None else 0
        return max(archived, *self._odd.values(), 0)

    def node(self, node_id: int) -> NodeFacts | None:
        """Return a node; None for one that the kernel did not remember."""
        known = self.nodes.get(node_id)
        if known is None:
            if self.archive is None or node_id in self.dropped:
                return None
            known = self.archive.node(node_id)
            if known is None:
                return None
        if isinstance(known, bytes):
            known = self.nodes[node_id] = _facts(known)
            if known.id != known.ino and not known.gone:
                # The worker that takes this file into the archive writes the row anew under its own
                # generation, and does not find it there any more.
                self.note_odd(known)
        return known

    def take(self, node_id: int) -> NodeFacts | None:
        """Return a node as ``node`` does, and forget it here: the caller keeps it."""
        found = self.node(node_id)
        self.nodes.pop(node_id, None)
        return found

    def odd(self, dev: int, ino: int) -> int | None:
        """Return the id of an inode's node where that is not its number; None without one."""
        node_id = self._odd.get((dev, ino))
        return self.archive.odd(dev, ino) if node_id is None and self.archive is not None else node_id

    def apply(self, data: bytes) -> Iterator[None]:
        """Apply the records of a file up to the first that was cut short; yield now and then, for a caller with other work."""
        begins, nodes, node_kind = f.LENGTH.size, self.nodes, f.NODE
        at, end, count = 0, len(data), 0
        while at + begins < end:
            (length,) = f.LENGTH.unpack_from(data, at)
            stop, kind = at + begins + length, data[at + begins]
            if not length or stop > end or kind > f.UNCHANGED:
                # Cut short: the worker was killed before it answered the kernel.
                return
            if kind == node_kind:
                # Most records. One is decoded when its node is asked for, because a successor serves before
                # it knows all.
                record = data[at:stop]
                node_id = int.from_bytes(record[_ID], "little")
                nodes[node_id] = record
                if record[_ID] != record[_INO]:
                    self.note_odd(_facts(record))
            else:
                _APPLY[kind](self, data[at + begins + 1 : stop])
            at, count = stop, count + 1
            if not count % _SLICE_RECORDS:
                yield

    def note_odd(self, node: NodeFacts) -> None:
        """Note a node that is not found by its inode number."""
        self._odd[node.key] = node.id


# -- reading ------------------------------------------------------------------------------------------


def _records_of(node: bytes | NodeFacts) -> bytes:
    """Return a node as records, the first of which is a whole node record."""
    if isinstance(node, bytes):
        return node
    parent, name = node.name if node.name is not None else (0, b"")
    group = node_record(node.id, node.dev, node.ino, parent, node.kind, name)
    for other, alias in node.aliases:
        group += name_record(node.id, other, alias, several=True)
    if node.gone:
        group += unlinked_record(node.id, 0, b"", gone=True)
    if node.emptied is not None:
        group += emptied_record(node.id, *node.emptied)
    return group


def _facts(records: bytes) -> NodeFacts:
    """Decode a node from its records."""
    (length,) = f.LENGTH.unpack_from(records)
    stop = f.LENGTH.size + length
    node_id, dev, ino, parent, kind = f.NODE_FIELDS.unpack_from(records, f.LENGTH.size + 1)
    name = (parent, records[f.LENGTH.size + 1 + f.NODE_FIELDS.size : stop]) if parent else None
    node = NodeFacts(node_id, dev, ino, kind, name)
    if stop < len(records):
        alone = InheritedSession()
        alone.nodes[node_id] = node
        for _ in alone.apply(records[stop:]):
            pass
    return node


def _apply_begin(found: InheritedSession, body: bytes) -> None:
    found.version, found.minor, found.flags, found.max_write_bytes = f.BEGIN_FIELDS.unpack_from(body)


def _apply_dropped(found: InheritedSession, body: bytes) -> None:
    (node_id,) = f.ONE.unpack_from(body)
    found.nodes.pop(node_id, None)
    found.dropped.add(node_id)


def _apply_name(found: InheritedSession, body: bytes) -> None:
    node_id, parent, several = f.NAME_FIELDS.unpack_from(body)
    node = found.node(node_id)
    if node is None:
        return
    name = (parent, body[f.NAME_FIELDS.size :])
    if several and node.name is not None:
        # Which of several names comes first may differ from the worker's table: it tells them again, also the first one here.
        if name != node.name:
            node.aliases.add(name)
    else:
        node.name, node.aliases, node.gone = name, set(), False


def _apply_renamed(found: InheritedSession, body: bytes) -> None:
    # The record of the rename itself settles the change that was announced.
    node_id, parent, new_parent, length = f.RENAMED_FIELDS.unpack_from(body)
    names = body[f.RENAMED_FIELDS.size :]
    found.changes.pop(ChangedNames(parent, names[:length], new_parent, names[length:]), None)
    found.note_removal(parent)
    node = found.node(node_id)
    if node is None:
        return
    if node.name == (parent, names[:length]):
        node.name = (new_parent, names[length:])
    else:
        node.aliases.discard((parent, names[:length]))
        node.aliases.add((new_parent, names[length:]))


def _apply_unlinked(found: InheritedSession, body: bytes) -> None:
    node_id, parent, gone = f.UNLINKED_FIELDS.unpack_from(body)
    found.changes.pop(ChangedNames(parent, body[f.UNLINKED_FIELDS.size :]), None)
    found.note_removal(parent)
    node = found.node(node_id)
    if node is None:
        return
    name = (parent, body[f.UNLINKED_FIELDS.size :])
    # A file that is gone keeps none of its names: a stale one hid the hidden link by which a successor finds
    # an open file.
    if gone:
        node.name, node.aliases = None, set()
    elif node.name == name:
        node.name = node.aliases.pop() if node.aliases else None
    else:
        node.aliases.discard(name)
    node.gone = bool(gone)


def _apply_emptied(found: InheritedSession, body: bytes) -> None:
    node_id, mode, uid, gid = f.EMPTIED_FIELDS.unpack_from(body)
    node = found.node(node_id)
    if node is not None:
        node.emptied = mode, uid, gid


def _apply_replaced(found: InheritedSession, body: bytes) -> None:
    node_id, dev, ino = f.REPLACED_FIELDS.unpack_from(body)
    node = found.node(node_id)
    if node is not None:
        node.dev, node.ino = dev, ino
        if node.id != node.ino:
            found.note_odd(node)


def _apply_changing(found: InheritedSession, body: bytes) -> None:
    names, inodes = f.decode_change(body)
    # Taken out first, so that the newest change is the last of the dictionary: core/names.py begins with that.
    found.changes.pop(names, None)
    found.changes[names] = inodes


def _apply_unchanged(found: InheritedSession, body: bytes) -> None:
    found.changes.pop(f.decode_change(body)[0], None)


def _user(body: bytes, at: int) -> int:
    return int(f.USER.unpack_from(body, at)[0]) if len(body) >= at + f.USER.size else 0


def _apply_opened(found: InheritedSession, body: bytes) -> None:
    opened = OpenedFile._make((*f.OPENED_FIELDS.unpack_from(body), _user(body, f.OPENED_FIELDS.size)))
    found.files[opened.handle] = opened


def _apply_dir_opened(found: InheritedSession, body: bytes) -> None:
    opened = OpenedDirectory._make((*f.TRIPLE.unpack_from(body), _user(body, f.TRIPLE.size)))
    found.directories[opened.handle] = opened
    found.removals_before[opened.handle] = found.removals.setdefault(opened.node, 0)


def _apply_dir_closed(found: InheritedSession, body: bytes) -> None:
    (handle,) = f.ONE.unpack_from(body)
    found.directories.pop(handle, None)
    found.listings.pop(handle, None)
    found.removals_before.pop(handle, None)


def _apply_listing(found: InheritedSession, body: bytes) -> None:
    (handle,) = f.ONE.unpack_from(body)
    names = body[f.ONE.size :]
    if names:
        found.listings[handle] = names.split(b"\0")
    else:
        # The journal had too many names to keep these.
        found.listings.pop(handle, None)


def _pop(table: Callable[[InheritedSession], dict[int, object]]) -> Callable[[InheritedSession, bytes], None]:
    def apply(found: InheritedSession, body: bytes) -> None:
        table(found).pop(f.ONE.unpack_from(body)[0], None)

    return apply


_APPLY: Final[dict[int, Callable[[InheritedSession, bytes], None]]] = {
    f.BEGIN: _apply_begin,
    f.NAME: _apply_name,
    f.RENAMED: _apply_renamed,
    f.UNLINKED: _apply_unlinked,
    f.DROPPED: _apply_dropped,
    f.REPLACED: _apply_replaced,
    f.EMPTIED: _apply_emptied,
    f.OPENED: _apply_opened,
    f.CLOSED: _pop(lambda found: found.files),  # type: ignore[arg-type,return-value]
    f.DIR_OPENED: _apply_dir_opened,
    f.DIR_CLOSED: _apply_dir_closed,
    f.LISTING: _apply_listing,
    f.INTENT: lambda found, body: found.intents.update([f.PAIR.unpack_from(body)]),
    f.LINGERS: lambda found, body: found.lingering.add(f.ONE.unpack_from(body)[0]),
    f.CHANGING: _apply_changing,
    f.UNCHANGED: _apply_unchanged,
    f.LINGERS_NOT: lambda found, body: found.lingering.discard(f.ONE.unpack_from(body)[0]),
}


class _Rest(msgspec.Struct, array_like=True):
    """All tables of a session but the nodes."""

    files: list[OpenedFile]
    directories: list[OpenedDirectory]
    listings: dict[int, list[bytes]]
    intents: dict[int, int]
    lingering: set[int]
    changes: list[tuple[ChangedNames, ChangedInodes]] = []
    removals: dict[int, int] = {}
    removals_before: dict[int, int] = {}


class JournalArchive:
    """Connection to the archive of a session. Not for several threads at once."""

    def __init__(self, path: Path, *, generation: int = 0) -> None:
        self.path = path
        # SQLite would create it with mode 0644, and its other files with the mode of this one: names of the root's files are in it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o600))
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
            rest = decode_msgpack(self._rest, _Rest)
            to.files = {opened.handle: opened for opened in rest.files}
            to.directories = {opened.handle: opened for opened in rest.directories}
            to.listings, to.intents, to.lingering = rest.listings, rest.intents, rest.lingering
            to.changes = dict(rest.changes)
            to.removals, to.removals_before = rest.removals, rest.removals_before

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
        opened = list(found.directories.values())
        rest = msgspec.msgpack.encode(
            _Rest(
                list(found.files.values()),
                opened,
                found.listings,
                found.intents,
                found.lingering,
                list(found.changes.items()),
                {one.node: found.removals[one.node] for one in opened if one.handle in found.removals_before},
                found.removals_before,
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
        records = _records_of(node)
        # Places in a whole node record (records.py): device from byte 13, inode number from byte 21.
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
