"""The ledger: what a successor needs to go on with a session whose worker was killed.

The kernel refers to nodes and handles by the numbers it was given, for as long as the mount lives; a new process has to
know what they mean. Every change to the tables of nodes and handles is therefore appended to a file in the runtime
directory (memory, which outlives the process and not the machine) before the kernel is told of it.

Invariants:

* Replaying the files in the order of their numbers gives the tables as they were; a torn last record was never told to
  anybody.
* A file that has grown beyond what is alive is followed by a new one: everything new goes there, everything alive is
  written there a few nodes at a time, and then the old file is removed. A record of a node is complete in itself, so it
  does not matter what the new file says of it before.
* No failure in here reaches the job: a ledger that cannot be written is given up, and with it survival.
"""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import structlog

from ciuic.fuse_layer import kernel_protocol

log = structlog.get_logger(__name__)

VERSION: Final = 1
REWRITE_FROM_BYTES: Final = 64 << 20
_SLICE_NODES: Final = 256
_SLICE_PAUSE_SECONDS: Final = 0.005

_LENGTH = struct.Struct("<I")
_KIND = struct.Struct("<B")
_BEGIN, _NODE, _NAME, _RENAMED, _UNLINKED, _DROPPED, _REPLACED = 1, 2, 3, 4, 5, 6, 7
_OPENED, _CLOSED, _DIR_OPENED, _DIR_CLOSED, _LISTING = 8, 9, 10, 11, 12
_INTENT, _LINGERS, _LINGERS_NOT = 13, 14, 15

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


class NodeFacts:
    """A node as the ledger knows it."""

    __slots__ = ("aliases", "dev", "gone", "id", "ino", "kind", "name")

    def __init__(self, node_id: int, dev: int, ino: int, kind: int, name: tuple[int, bytes] | None) -> None:
        self.id, self.dev, self.ino, self.kind = node_id, dev, ino, kind
        self.name = name
        """(Parent id, name); None when no name is left."""
        self.aliases: set[tuple[int, bytes]] = set()
        self.gone = False
        """Its last name is gone; only handles lead to it."""


class Inherited:
    """The tables that a predecessor left."""

    def __init__(self) -> None:
        self.minor = self.flags = self.max_write_bytes = 0
        self.nodes: dict[int, NodeFacts] = {}
        self.files: dict[int, Opened] = {}
        self.directories: dict[int, OpenedDirectory] = {}
        self.listings: dict[int, list[bytes]] = {}
        self.intents: dict[int, int] = {}
        """Unique of a request that cannot be repeated → a number that tells whether it was carried out."""
        self.lingering: set[int] = set()
        """Nodes that a mapping may be writing to although no handle is left (unseen.py)."""

    @property
    def last_handle(self) -> int:
        return max((*self.files, *self.directories), default=0)


class Ledger:
    """Appends to the files ``<base>.<number>``. Thread-safe; None in place of one means that nothing is written."""

    def __init__(self, base: Path, *, rewrite_from_bytes: int = REWRITE_FROM_BYTES) -> None:
        self._base = base
        self._limit = rewrite_from_bytes
        self._least = rewrite_from_bytes
        self._lock = threading.Lock()
        self._numbers = _numbers(base)
        self._fd = -1
        self._size = 0
        self._begin = b""
        self._alive: Callable[[], Iterable[bytes]] | None = None
        self._rewriting = False
        self.kept = True
        """Whether a successor could go on."""

    @property
    def rewriting(self) -> bool:
        """Whether a new file is being written beside the work."""
        return self._rewriting

    def begin(self, minor: int, flags: int, max_write_bytes: int) -> None:
        """Starts a new file for a session that was just negotiated, or taken over."""
        self._begin = _record(_BEGIN, _BEGIN_FIELDS.pack(VERSION, minor, flags, max_write_bytes))
        self._next_file()

    def rewrites_from(self, alive: Callable[[], Iterable[bytes]]) -> None:
        """``alive`` yields groups of records that together describe everything alive now; called in a thread of ours."""
        self._alive = alive

    def _next_file(self) -> None:
        number = (self._numbers[-1] if self._numbers else 0) + 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        fd = os.open(_path(self._base, number), flags, 0o600)
        os.write(fd, self._begin)
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
            self._fd, self._size = fd, len(self._begin)
            self._numbers.append(number)

    def drop_older(self) -> None:
        """Everything alive is in the newest file."""
        for number in self._numbers[:-1]:
            _path(self._base, number).unlink(missing_ok=True)
        del self._numbers[:-1]

    def remove(self) -> None:
        """The session ends; nobody will go on with it."""
        self.kept = False
        with self._lock:
            if self._fd >= 0:
                os.close(self._fd)
                self._fd = -1
        remove(self._base)

    # -- records --------------------------------------------------------------------------------------

    def append(self, record: bytes) -> None:
        """Write one or several records. Never raises."""
        try:
            with self._lock:
                if self._fd < 0:
                    return
                if os.write(self._fd, record) != len(record):
                    raise OSError("a record was cut short")
                self._size += len(record)
                full = self._size > self._limit and not self._rewriting and self._alive is not None
                if full:
                    self._rewriting = True
        except OSError as error:
            log.error("ledger_given_up", error=str(error))
            self.remove()
            return
        if full:
            threading.Thread(target=self._rewrite, name="ledger", daemon=True).start()

    def _rewrite(self) -> None:
        assert self._alive is not None
        try:
            self._next_file()
            written = 0
            for number, group in enumerate(self._alive()):
                self.append(group)
                written += len(group)
                if number % _SLICE_NODES == 0:
                    time.sleep(_SLICE_PAUSE_SECONDS)
            if self.kept:
                self.drop_older()
            self._limit = max(self._least, 2 * written)
        except OSError as error:
            log.error("ledger_given_up", error=str(error))
            self.remove()
        finally:
            self._rewriting = False


def _record(kind: int, fields: bytes, rest: bytes = b"") -> bytes:
    return _LENGTH.pack(1 + len(fields) + len(rest)) + _KIND.pack(kind) + fields + rest


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


def dropped_record(node_id: int) -> bytes:
    return _record(_DROPPED, _ONE.pack(node_id))


def replaced_record(node_id: int, dev: int, ino: int) -> bytes:
    return _record(_REPLACED, _REPLACED_FIELDS.pack(node_id, dev, ino))


def opened_record(opened: Opened) -> bytes:
    return _record(_OPENED, _OPENED_FIELDS.pack(*opened))


def closed_record(handle: int) -> bytes:
    return _record(_CLOSED, _ONE.pack(handle))


def directory_opened_record(opened: OpenedDirectory) -> bytes:
    return _record(_DIR_OPENED, _TRIPLE.pack(*opened))


def directory_closed_record(handle: int) -> bytes:
    return _record(_DIR_CLOSED, _ONE.pack(handle))


def listing_record(handle: int, names: list[bytes]) -> bytes:
    return _record(_LISTING, _ONE.pack(handle), b"\0".join(names))


def intent_record(unique: int, number: int) -> bytes:
    """The request is about to be carried out, which repeated would be another thing; ``number`` is of what it changes."""
    return _record(_INTENT, _PAIR.pack(unique, number))


def lingers_record(node_id: int, *, lingers: bool) -> bytes:
    """A mapping may go on writing to the node without a handle, or no longer."""
    return _record(_LINGERS if lingers else _LINGERS_NOT, _ONE.pack(node_id))


# -- reading ------------------------------------------------------------------------------------------


def replay(base: Path) -> Inherited | None:
    """The tables that the files of ``base`` describe; None when there is none that this version understands."""
    inherited, begun = Inherited(), False
    for number in _numbers(base):
        for kind, body in _records(_path(base, number).read_bytes()):
            if kind == _BEGIN:
                version, minor, flags, max_write = _BEGIN_FIELDS.unpack_from(body)
                if version != VERSION:
                    return None
                inherited.minor, inherited.flags, inherited.max_write_bytes = minor, flags, max_write
                begun = True
            else:
                _APPLY[kind](inherited, body)
    return inherited if begun else None


def remove(base: Path) -> None:
    """Removes the files of ``base``."""
    for number in _numbers(base):
        _path(base, number).unlink(missing_ok=True)


def _records(data: bytes) -> Iterator[tuple[int, bytes]]:
    at, end = 0, len(data)
    while at + _LENGTH.size <= end:
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if not length or at + length > end or data[at] > _LINGERS_NOT:
            return  # torn: told to nobody
        yield data[at], data[at + 1 : at + length]
        at += length


def _apply_node(found: Inherited, body: bytes) -> None:
    node_id, dev, ino, parent, kind = _NODE_FIELDS.unpack_from(body)
    name = (parent, body[_NODE_FIELDS.size :]) if parent else None
    found.nodes[node_id] = NodeFacts(node_id, dev, ino, kind, name)


def _apply_name(found: Inherited, body: bytes) -> None:
    node_id, parent, several = _NAME_FIELDS.unpack_from(body)
    node = found.nodes.get(node_id)
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
    node = found.nodes.get(node_id)
    if node is None:
        return
    if node.name == (parent, names[:length]):
        node.name = (new_parent, names[length:])
    else:
        node.aliases.discard((parent, names[:length]))
        node.aliases.add((new_parent, names[length:]))


def _apply_unlinked(found: Inherited, body: bytes) -> None:
    node_id, parent, gone = _UNLINKED_FIELDS.unpack_from(body)
    node = found.nodes.get(node_id)
    if node is None:
        return
    name = (parent, body[_UNLINKED_FIELDS.size :])
    if node.name == name:
        node.name = node.aliases.pop() if node.aliases else None
    else:
        node.aliases.discard(name)
    node.gone = bool(gone)


def _apply_replaced(found: Inherited, body: bytes) -> None:
    node_id, dev, ino = _REPLACED_FIELDS.unpack_from(body)
    node = found.nodes.get(node_id)
    if node is not None:
        node.dev, node.ino = dev, ino


def _apply_opened(found: Inherited, body: bytes) -> None:
    opened = Opened(*_OPENED_FIELDS.unpack_from(body))
    found.files[opened.handle] = opened


def _apply_dir_opened(found: Inherited, body: bytes) -> None:
    opened = OpenedDirectory(*_TRIPLE.unpack_from(body))
    found.directories[opened.handle] = opened


def _apply_dir_closed(found: Inherited, body: bytes) -> None:
    (handle,) = _ONE.unpack_from(body)
    found.directories.pop(handle, None)
    found.listings.pop(handle, None)


def _apply_listing(found: Inherited, body: bytes) -> None:
    (handle,) = _ONE.unpack_from(body)
    names = body[_ONE.size :]
    found.listings[handle] = names.split(b"\0") if names else []


def _pop(table: Callable[[Inherited], dict[int, object]]) -> Callable[[Inherited, bytes], None]:
    def apply(found: Inherited, body: bytes) -> None:
        table(found).pop(_ONE.unpack_from(body)[0], None)

    return apply


_APPLY: Final[dict[int, Callable[[Inherited, bytes], None]]] = {
    _NODE: _apply_node,
    _NAME: _apply_name,
    _RENAMED: _apply_renamed,
    _UNLINKED: _apply_unlinked,
    _DROPPED: _pop(lambda found: found.nodes),  # type: ignore[arg-type,return-value]
    _REPLACED: _apply_replaced,
    _OPENED: _apply_opened,
    _CLOSED: _pop(lambda found: found.files),  # type: ignore[arg-type,return-value]
    _DIR_OPENED: _apply_dir_opened,
    _DIR_CLOSED: _apply_dir_closed,
    _LISTING: _apply_listing,
    _INTENT: lambda found, body: found.intents.update([_PAIR.unpack_from(body)]),
    _LINGERS: lambda found, body: found.lingering.add(_ONE.unpack_from(body)[0]),
    _LINGERS_NOT: lambda found, body: found.lingering.discard(_ONE.unpack_from(body)[0]),
}


def _path(base: Path, number: int) -> Path:
    return base.with_name(f"{base.name}.{number}")


def _numbers(base: Path) -> list[int]:
    prefix = base.name + "."
    names = (entry.name[len(prefix) :] for entry in base.parent.glob("*") if entry.name.startswith(prefix))
    return sorted(int(name) for name in names if name.isdigit())
