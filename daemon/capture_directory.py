"""A directory while a capture goes through it, and what all those on the way to it may hold in memory together.

Guarantee: the memory for a chain of directories is bounded by `MAX_NAMES_BYTES`, `MAX_PENDING_BYTES` and a few kilobytes for each
level, whatever names, entries and attributes its owner has put there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ciuic.daemon.capture_place import Place
from ciuic.daemon.capture_view import ListedNames, Thing
from ciuic.daemon.capture_visit import Visit
from ciuic.excludes import Scope
from ciuic.repository import Trees
from ciuic.types import Entry, TreeRef

BATCH_ENTRIES: Final = 8192
"""Entries of a directory that go into its tree at once: fewer mean that nodes are written several times."""
MAX_BATCH_BYTES: Final = 16 << 20
"""The same in bytes: a symbolic link's target takes up to 4 KiB."""
MAX_NAMES_BYTES: Final = 32 << 20
"""Names waiting to be visited, of all directories on the way together; more of them wait in a temporary file."""
MAX_PENDING_BYTES: Final = 32 << 20
"""Entries waiting to be written, of all directories on the way together."""
STREAMS_HELD: Final = 64
"""Levels that keep an open stream of older entries: each holds a node of about 64 entries. Usual trees have fewer levels."""
_ENTRY_OVERHEAD_BYTES: Final = 600
"""What an entry takes in memory beyond its names, target and attributes (measured: 540)."""


class OldEntries:
    """The older entries of a directory by name. `ascending`: asked for in byte order, they are read once, in passing."""

    def __init__(self, trees: Trees, tree: bytes, *, ascending: bool) -> None:
        self._trees = trees
        self._tree = tree
        self._ascending = ascending
        self._stream: Iterator[Entry] | None = None
        self._next: Entry | None = None

    def get(self, name: bytes) -> Entry | None:
        """The entry of that name."""
        if not self._tree:
            return None
        if not self._ascending:
            return self._trees.entry(self._tree, name)
        if self._stream is None:
            after = self._next.name if self._next is not None else b""
            self._stream = self._trees.entries(self._tree, after=after)
        while self._next is None or self._next.name < name:
            self._next = next(self._stream, None)
            if self._next is None:
                self._tree = b""
                return None
        return self._next if self._next.name == name else None

    def pause(self) -> None:
        """Let go of the nodes that are held; the next `get` reads them again."""
        self._stream = None


class Directory:
    """A directory being rebuilt."""

    __slots__ = (
        "attributes",
        "is_too_deep",
        "names",
        "old",
        "old_entries",
        "pending",
        "pending_bytes",
        "place",
        "scope",
        "thing",
        "tree",
        "visit",
    )

    def __init__(
        self, thing: Thing, place: Place, scope: Scope, visit: Visit, attributes: Entry, old: Entry | None
    ) -> None:
        self.thing = thing
        self.place = place
        self.scope = scope
        self.visit = visit
        self.attributes = attributes
        """Its entry, without what is below it."""
        self.old = old
        """The entry that the base has under the same path."""
        self.names: ListedNames
        self.old_entries: OldEntries
        self.tree: TreeRef
        self.pending: dict[bytes, Entry | None] = {}
        self.pending_bytes = 0
        self.is_too_deep = False
        """It was moved, and something in it lies below the limit now: everything in it is looked at."""

    def put(self, name: bytes, entry: Entry | None) -> None:
        """Note an entry (None: removed) for the next batch."""
        self.pending[name] = entry
        self.pending_bytes += _size_of(name, entry)

    @property
    def is_batch_full(self) -> bool:
        """Whether what is noted should be written."""
        return len(self.pending) >= BATCH_ENTRIES or self.pending_bytes >= MAX_BATCH_BYTES


def _size_of(name: bytes, entry: Entry | None) -> int:
    if entry is None:
        return len(name) + _ENTRY_OVERHEAD_BYTES // 4
    attributes = sum(len(key) + len(value) for key, value in entry.xattrs)
    return 2 * len(name) + len(entry.target) + attributes + _ENTRY_OVERHEAD_BYTES
