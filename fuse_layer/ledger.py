"""The ledger: what a successor needs to go on with a session whose worker was killed. Its records, and the tables they describe.

The kernel refers to nodes and handles by the numbers it was given, for as long as the mount lives; a new process has to
know what they mean. Every change to the tables of nodes and handles is therefore appended to a file in the runtime
directory (memory, which outlives the process and not the machine) before the kernel is told of it.

Invariants:

* Applying the records of the files in the order of their numbers to what the archive holds gives the tables as they were; a
  torn last record was never told to anybody.
* Files that are full are taken into the archive (ledger_archive.py) beside the work and removed, so that what a successor
  has to read before it serves is short however many nodes there are. It asks for nodes when it needs them.

Who writes it: ledger_writer.py.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple, Protocol

from ciuic.fuse_layer import kernel_protocol, name_changes
from ciuic.fuse_layer.name_changes import Inodes, Names

VERSION: Final = 5
_VERSIONS_READ: Final = (1, 2, 3, 4, VERSION)
"""Version 1 had no archive, version 2 no write-ahead records of names, version 3 did not say who opened what,
version 4 not which changes of names were refused."""
INTENTS_KEPT: Final = 1024
"""More than requests that can be in work at once."""
_SLICE_RECORDS: Final = 256

_LENGTH = struct.Struct("<I")
_KIND = struct.Struct("<B")
_BEGIN, _NODE, _NAME, _RENAMED, _UNLINKED, _DROPPED, _REPLACED = 1, 2, 3, 4, 5, 6, 7
_OPENED, _CLOSED, _DIR_OPENED, _DIR_CLOSED, _LISTING = 8, 9, 10, 11, 12
_INTENT, _LINGERS, _LINGERS_NOT, _CHANGING, _EMPTIED, _UNCHANGED = 13, 14, 15, 16, 17, 18

_BEGIN_FIELDS = struct.Struct("<IIQI")
"""version, minor, flags, max_write_bytes"""
_NODE_FIELDS = struct.Struct("<QQQQI")
"""id, dev, ino, parent (0: none), kind; name"""
_NAME_FIELDS = struct.Struct("<QQB")
"""id, parent, several; name"""
_RENAMED_FIELDS = struct.Struct("<QQQH")
"""id, parent, new parent, length of the old name; old name, new name"""
_UNLINKED_FIELDS = struct.Struct("<QQB")
"""id, parent, gone; name"""
_REPLACED_FIELDS = struct.Struct("<QQQ")
"""id, dev, ino"""
_OPENED_FIELDS = struct.Struct("<QQQIII")
"""handle, node, unique of the request, flags of the open, open_flags of the answer, backing id (0: none)"""
_EMPTIED_FIELDS = struct.Struct("<QIII")
"""id, mode, uid, gid"""
_USER = struct.Struct("<I")
"""Behind the fields of an open file or directory: who opened it. Records of older versions have it not."""
_PAIR = struct.Struct("<QQ")
_TRIPLE = struct.Struct("<QQQ")
_ONE = struct.Struct("<Q")


class Opened(NamedTuple):
    """An open file."""

    handle: int
    node: int
    unique: int
    """Of the request, without the mark of a resend."""
    flags: int
    """As the program gave them."""
    open_flags: int
    """As the kernel was answered."""
    backing_id: int
    uid: int = 0
    """Who opened it; 0 also where a predecessor did not say."""

    @property
    def unseen(self) -> bool:
        """Whether writes through it may reach the backing file past the worker (kernel_modes.py)."""
        if not self.open_flags & kernel_protocol.FOPEN_PASSTHROUGH:
            return False
        if self.open_flags & kernel_protocol.FOPEN_DIRECT_IO:
            return self.flags & os.O_ACCMODE == os.O_RDWR
        return self.flags & os.O_ACCMODE != os.O_RDONLY


class OpenedDirectory(NamedTuple):
    """An open directory."""

    handle: int
    node: int
    unique: int
    uid: int = 0
    """As of a file."""


class NodeFacts:
    """A node as the ledger knows it."""

    __slots__ = ("aliases", "dev", "emptied", "gone", "id", "ino", "kind", "name")

    def __init__(self, node_id: int, dev: int, ino: int, kind: int, name: tuple[int, bytes] | None) -> None:
        self.id, self.dev, self.ino, self.kind = node_id, dev, ino, kind
        self.name = name
        """(Parent id, name); None when no name is left."""
        self.aliases: set[tuple[int, bytes]] = set()
        self.gone = False
        """Its last name is gone; only handles lead to it."""
        self.emptied: tuple[int, int, int] | None = None
        """Mode, owner and group of a directory that is gone."""

    @property
    def key(self) -> tuple[int, int]:
        return self.dev, self.ino


class NodeRecords(Protocol):
    """Where nodes are that no record of the newest files speaks of (ledger_archive.py): their records, by id."""

    def node(self, node_id: int) -> bytes | None: ...
    def odd(self, dev: int, ino: int) -> int | None: ...
    @property
    def last_id(self) -> int: ...


class Inherited:
    """The tables that a predecessor left. Nodes are made of their records when somebody asks for them."""

    def __init__(self, archive: NodeRecords | None = None) -> None:
        self.archive = archive
        self.version = self.minor = self.flags = self.max_write_bytes = 0
        self.nodes: dict[int, bytes | NodeFacts] = {}
        """Those that the records applied speak of."""
        self.dropped: set[int] = set()
        """Those that are no longer, whatever the archive says."""
        self._odd: dict[tuple[int, int], int] = {}
        self.files: dict[int, Opened] = {}
        self.directories: dict[int, OpenedDirectory] = {}
        self.listings: dict[int, list[bytes]] = {}
        self.intents: dict[int, int] = {}
        """Unique of a request that cannot be repeated → a number that tells whether it was carried out."""
        self.changes: dict[Names, Inodes] = {}
        """Renames and removals that were begun, and whose outcome nobody noted."""
        self.lingering: set[int] = set()
        """Nodes that a mapping may be writing to although no handle is left (unseen.py)."""

    @property
    def last_handle(self) -> int:
        return max((*self.files, *self.directories), default=0)

    @property
    def understood(self) -> bool:
        """Whether a session was begun in it, in a version that this one reads."""
        return self.version in _VERSIONS_READ

    @property
    def last_node(self) -> int:
        """No node has a greater id, of those that are not found by their inode number. Removed ones count."""
        archived = self.archive.last_id if self.archive is not None else 0
        return max(archived, *self._odd.values(), 0)

    def node(self, node_id: int) -> NodeFacts | None:
        """None for what nobody remembers."""
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
                # A worker that takes this file into the archive writes the row anew, as its own, and no longer finds it there.
                self.note_odd(known)
        return known

    def take(self, node_id: int) -> NodeFacts | None:
        """As ``node``, for who keeps what it is told and asks once."""
        found = self.node(node_id)
        self.nodes.pop(node_id, None)
        return found

    def odd(self, dev: int, ino: int) -> int | None:
        """The id of the node that the inode had when the predecessor ended, if that is not its number."""
        node_id = self._odd.get((dev, ino))
        return self.archive.odd(dev, ino) if node_id is None and self.archive is not None else node_id

    def apply(self, data: bytes) -> Iterator[None]:
        """Applies the records of a file up to the first that is torn; stops now and then for who has other things to do."""
        begins, nodes = _LENGTH.size, self.nodes
        at, end, count = 0, len(data), 0
        while at + begins < end:
            (length,) = _LENGTH.unpack_from(data, at)
            stop, kind = at + begins + length, data[at + begins]
            if not length or stop > end or kind > _UNCHANGED:
                return  # torn: told to nobody
            if kind == _NODE:  # what most are: not taken apart before somebody wants to know
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
        """``node`` is not found by its inode number."""
        self._odd[node.key] = node.id


def _record(kind: int, fields: bytes, rest: bytes = b"") -> bytes:
    return _LENGTH.pack(1 + len(fields) + len(rest)) + _KIND.pack(kind) + fields + rest


def begin_record(minor: int, flags: int, max_write_bytes: int) -> bytes:
    """What was negotiated."""
    return _record(_BEGIN, _BEGIN_FIELDS.pack(VERSION, minor, flags, max_write_bytes))


def node_record(node_id: int, dev: int, ino: int, parent: int, kind: int, name: bytes) -> bytes:
    """A node, whatever was known of this id before. ``parent`` 0: it has no name."""
    return _record(_NODE, _NODE_FIELDS.pack(node_id, dev, ino, parent, kind), name)


def name_record(node_id: int, parent: int, name: bytes, *, several: bool) -> bytes:
    """A name that leads to the node: one more, or instead of all others."""
    return _record(_NAME, _NAME_FIELDS.pack(node_id, parent, several), name)


def renamed_record(node_id: int, parent: int, name: bytes, new_parent: int, new_name: bytes) -> bytes:
    fields = _RENAMED_FIELDS.pack(node_id, parent, new_parent, len(name))
    return _record(_RENAMED, fields, name + new_name)


def unlinked_record(node_id: int, parent: int, name: bytes, *, gone: bool) -> bytes:
    return _record(_UNLINKED, _UNLINKED_FIELDS.pack(node_id, parent, gone), name)


def emptied_record(node_id: int, mode: int, uid: int, gid: int) -> bytes:
    """A directory was removed that a program may have open, with what its attributes were."""
    return _record(_EMPTIED, _EMPTIED_FIELDS.pack(node_id, mode, uid, gid))


def dropped_record(node_id: int) -> bytes:
    return _record(_DROPPED, _ONE.pack(node_id))


def replaced_record(node_id: int, dev: int, ino: int) -> bytes:
    return _record(_REPLACED, _REPLACED_FIELDS.pack(node_id, dev, ino))


def opened_record(opened: Opened) -> bytes:
    return _record(_OPENED, _OPENED_FIELDS.pack(*opened[:-1]), _USER.pack(opened.uid))


def closed_record(handle: int) -> bytes:
    return _record(_CLOSED, _ONE.pack(handle))


def directory_opened_record(opened: OpenedDirectory) -> bytes:
    return _record(_DIR_OPENED, _TRIPLE.pack(*opened[:-1]), _USER.pack(opened.uid))


def directory_closed_record(handle: int) -> bytes:
    return _record(_DIR_CLOSED, _ONE.pack(handle))


def listing_record(handle: int, names: list[bytes]) -> bytes:
    return _record(_LISTING, _ONE.pack(handle), b"\0".join(names))


def intent_record(unique: int, number: int) -> bytes:
    """The request is about to be carried out, which repeated would be another thing; ``number`` is of what it changes."""
    return _record(_INTENT, _PAIR.pack(unique, number))


def changing_record(names: Names, inodes: Inodes) -> bytes:
    """Names are about to change; see name_changes.py."""
    return _record(_CHANGING, name_changes.encode(names, inodes))


def unchanged_record(names: Names) -> bytes:
    """The change of these names was refused, or its outcome is known."""
    return _record(_UNCHANGED, name_changes.encode(names, Inodes(0)))


def lingers_record(node_id: int, *, lingers: bool) -> bytes:
    """A mapping may go on writing to the node without a handle, or no longer."""
    return _record(_LINGERS if lingers else _LINGERS_NOT, _ONE.pack(node_id))


# -- reading ------------------------------------------------------------------------------------------

_ID: Final = slice(_LENGTH.size + 1, _LENGTH.size + 9)
_INO: Final = slice(_LENGTH.size + 17, _LENGTH.size + 25)
"""Of a whole node record."""


def records_of(node: bytes | NodeFacts) -> bytes:
    """Everything that is known of a node, as records of which the first is whole by itself."""
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
    """The other way round."""
    (length,) = _LENGTH.unpack_from(records)
    stop = _LENGTH.size + length
    node_id, dev, ino, parent, kind = _NODE_FIELDS.unpack_from(records, _LENGTH.size + 1)
    name = (parent, records[_LENGTH.size + 1 + _NODE_FIELDS.size : stop]) if parent else None
    node = NodeFacts(node_id, dev, ino, kind, name)
    if stop < len(records):
        alone = Inherited()
        alone.nodes[node_id] = node
        for _ in alone.apply(records[stop:]):
            pass
    return node


def _apply_begin(found: Inherited, body: bytes) -> None:
    found.version, found.minor, found.flags, found.max_write_bytes = _BEGIN_FIELDS.unpack_from(body)


def _apply_dropped(found: Inherited, body: bytes) -> None:
    (node_id,) = _ONE.unpack_from(body)
    found.nodes.pop(node_id, None)
    found.dropped.add(node_id)


def _apply_name(found: Inherited, body: bytes) -> None:
    node_id, parent, several = _NAME_FIELDS.unpack_from(body)
    node = found.node(node_id)
    if node is None:
        return
    name = (parent, body[_NAME_FIELDS.size :])
    if several and node.name is not None:
        node.aliases.add(name)
    else:
        node.name, node.aliases, node.gone = name, set(), False


def _apply_renamed(found: Inherited, body: bytes) -> None:
    node_id, parent, new_parent, length = _RENAMED_FIELDS.unpack_from(body)
    names = body[_RENAMED_FIELDS.size :]
    found.changes.pop(Names(parent, names[:length], new_parent, names[length:]), None)
    node = found.node(node_id)
    if node is None:
        return
    if node.name == (parent, names[:length]):
        node.name = (new_parent, names[length:])
    else:
        node.aliases.discard((parent, names[:length]))
        node.aliases.add((new_parent, names[length:]))


def _apply_unlinked(found: Inherited, body: bytes) -> None:
    node_id, parent, gone = _UNLINKED_FIELDS.unpack_from(body)
    found.changes.pop(Names(parent, body[_UNLINKED_FIELDS.size :]), None)
    node = found.node(node_id)
    if node is None:
        return
    name = (parent, body[_UNLINKED_FIELDS.size :])
    if gone:
        node.name, node.aliases = None, set()
    elif node.name == name:
        node.name = node.aliases.pop() if node.aliases else None
    else:
        node.aliases.discard(name)
    node.gone = bool(gone)


def _apply_emptied(found: Inherited, body: bytes) -> None:
    node_id, mode, uid, gid = _EMPTIED_FIELDS.unpack_from(body)
    node = found.node(node_id)
    if node is not None:
        node.emptied = mode, uid, gid


def _apply_replaced(found: Inherited, body: bytes) -> None:
    node_id, dev, ino = _REPLACED_FIELDS.unpack_from(body)
    node = found.node(node_id)
    if node is not None:
        node.dev, node.ino = dev, ino
        if node.id != node.ino:
            found.note_odd(node)


def _apply_changing(found: Inherited, body: bytes) -> None:
    names, inodes = name_changes.decode(body)
    found.changes.pop(names, None)  # the newest is the last
    found.changes[names] = inodes


def _apply_unchanged(found: Inherited, body: bytes) -> None:
    found.changes.pop(name_changes.decode(body)[0], None)


def _user(body: bytes, at: int) -> int:
    return int(_USER.unpack_from(body, at)[0]) if len(body) >= at + _USER.size else 0


def _apply_opened(found: Inherited, body: bytes) -> None:
    opened = Opened._make((*_OPENED_FIELDS.unpack_from(body), _user(body, _OPENED_FIELDS.size)))
    found.files[opened.handle] = opened


def _apply_dir_opened(found: Inherited, body: bytes) -> None:
    opened = OpenedDirectory._make((*_TRIPLE.unpack_from(body), _user(body, _TRIPLE.size)))
    found.directories[opened.handle] = opened


def _apply_dir_closed(found: Inherited, body: bytes) -> None:
    (handle,) = _ONE.unpack_from(body)
    found.directories.pop(handle, None)
    found.listings.pop(handle, None)


def _apply_listing(found: Inherited, body: bytes) -> None:
    (handle,) = _ONE.unpack_from(body)
    names = body[_ONE.size :]
    if names:
        found.listings[handle] = names.split(b"\0")
    else:  # too many were under way to keep them all
        found.listings.pop(handle, None)


def _pop(table: Callable[[Inherited], dict[int, object]]) -> Callable[[Inherited, bytes], None]:
    def apply(found: Inherited, body: bytes) -> None:
        table(found).pop(_ONE.unpack_from(body)[0], None)

    return apply


_APPLY: Final[dict[int, Callable[[Inherited, bytes], None]]] = {
    _BEGIN: _apply_begin,
    _NAME: _apply_name,
    _RENAMED: _apply_renamed,
    _UNLINKED: _apply_unlinked,
    _DROPPED: _apply_dropped,
    _REPLACED: _apply_replaced,
    _EMPTIED: _apply_emptied,
    _OPENED: _apply_opened,
    _CLOSED: _pop(lambda found: found.files),  # type: ignore[arg-type,return-value]
    _DIR_OPENED: _apply_dir_opened,
    _DIR_CLOSED: _apply_dir_closed,
    _LISTING: _apply_listing,
    _INTENT: lambda found, body: found.intents.update([_PAIR.unpack_from(body)]),
    _LINGERS: lambda found, body: found.lingering.add(_ONE.unpack_from(body)[0]),
    _CHANGING: _apply_changing,
    _UNCHANGED: _apply_unchanged,
    _LINGERS_NOT: lambda found, body: found.lingering.discard(_ONE.unpack_from(body)[0]),
}
