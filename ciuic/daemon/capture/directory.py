"""State of a directory during the walk of a capture, with bounded memory.

Guarantees: the memory for all directories from the root to the current one is bounded by `MAX_NAMES_BYTES`,
`MAX_PENDING_BYTES` and a few kilobytes for each level, whatever names, entries and attributes the owner of
the root has created.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from ciuic.daemon.capture.directory_path import DirectoryPath
from ciuic.daemon.capture.view import ListedNames, PinnedInode
from ciuic.daemon.capture.visit import Visit
from ciuic.excludes import Scope
from ciuic.repository import Trees
from ciuic.types import Entry, TreeRef

# Entries of a directory that are written into its tree at once: with fewer, nodes are written several times.
BATCH_ENTRIES: Final = 8192
# The same limit in bytes: the target of a symbolic link takes up to 4 KiB.
MAX_BATCH_BYTES: Final = 16 << 20
# Names that wait in memory to be visited, of all directories on the path together; further names wait in a
# temporary file.
MAX_NAMES_BYTES: Final = 32 << 20
# Entries that wait to be written, of all directories on the path together.
MAX_PENDING_BYTES: Final = 32 << 20
# Levels that keep an open stream of older entries: each holds a node of about 64 entries. Usual trees have
# fewer levels.
STREAMS_HELD: Final = 64
# Memory of an entry beyond its names, target and attributes (measured: 540).
_ENTRY_OVERHEAD_BYTES: Final = 600


class OldEntries:
    """Older entries of a directory, by name.

    With `ascending` they are asked for in byte order, and read in one pass.
    """

    def __init__(self, trees: Trees, tree: bytes, *, ascending: bool) -> None:
        self._trees = trees
        self._tree = tree
        self._ascending = ascending
        self._stream: Iterator[Entry] | None = None
        self._next: Entry | None = None

    def get(self, name: bytes) -> Entry | None:
        """Return the entry of this name; None where there is none."""
        if not self._tree:
            return None
        if not self._ascending:
            return self._trees.entry(self._tree, name)
        # After a pause the stream begins behind the entry that was read last.
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
        """Release the nodes in memory; the next `get` reads them again."""
        self._stream = None


class Directory:
    """A directory being rebuilt."""

    __slots__ = (
        "attributes",
        "inode",
        "is_too_deep",
        "names",
        "old",
        "old_entries",
        "pending",
        "pending_bytes",
        "place",
        "scope",
        "tree",
        "visit",
    )

    def __init__(
        self,
        inode: PinnedInode,
        place: DirectoryPath,
        scope: Scope,
        visit: Visit,
        attributes: Entry,
        old: Entry | None,
    ) -> None:
        self.inode = inode
        self.place = place
        self.scope = scope
        self.visit = visit
        self.attributes = attributes
        """New entry of the directory, without its tree."""
        self.old = old
        """Entry that the base has under the same path."""
        self.names: ListedNames
        self.old_entries: OldEntries
        self.tree: TreeRef
        self.pending: dict[bytes, Entry | None] = {}
        self.pending_bytes = 0
        self.is_too_deep = False
        """True if it was moved and a directory in it is deeper than the limit now, so that everything in
        it is visited."""

    def put(self, name: bytes, entry: Entry | None) -> None:
        """Note an entry (None: removed) for the next batch."""
        self.pending[name] = entry
        self.pending_bytes += _size_of(name, entry)

    @property
    def is_batch_full(self) -> bool:
        """True if the noted entries should be written."""
        return len(self.pending) >= BATCH_ENTRIES or self.pending_bytes >= MAX_BATCH_BYTES


def _size_of(name: bytes, entry: Entry | None) -> int:
    if entry is None:
        return len(name) + _ENTRY_OVERHEAD_BYTES // 4
    attributes = sum(len(key) + len(value) for key, value in entry.xattrs)
    return 2 * len(name) + len(entry.target) + attributes + _ENTRY_OVERHEAD_BYTES
