"""Link table of a capture: one entry for each inode with several names, keyed by its number.

A tree entry that refers to the table (`Entry.link`) must find its inode there, so an inode leaves the table
only when its last reference is gone or has become an ordinary entry.
"""

from __future__ import annotations

import stat
from typing import Final

from ciuic.daemon.capture.view import PinnedInode
from ciuic.repository import Trees, Writer
from ciuic.system.spill import Spill
from ciuic.types import Entry, TreeRef

# Entries of the table that are written at once: with fewer, nodes are written several times.
_BATCH_ENTRIES: Final = 8192


def link_key(ino: int) -> bytes:
    """Return the name of an inode's entry in a link table."""
    return ino.to_bytes(8, "big")


def reference(name: bytes, inode: PinnedInode) -> Entry:
    """Return the tree entry of one of several names: name, type and number; the rest is in the table."""
    return Entry(name=name, mode=stat.S_IFMT(inode.stat.mode), ino=inode.ino, link=inode.ino)


class LinkTable:
    """The table that is built, over an older one (`start`) or from nothing (b"").

    `previous` looks in `older`, whether or not the new table starts from it.
    """

    def __init__(self, trees: Trees, writer: Writer, spill: Spill, *, older: bytes, start: bytes) -> None:
        self._trees = trees
        self._writer = writer
        self._older = older
        self._tree = TreeRef(id=start)  # type: ignore[arg-type]
        self._pending: dict[bytes, Entry | None] = {}
        # In a table that spills: a tree may have millions of hard-linked files.
        self._settled = spill.numbers()

    @property
    def has_older(self) -> bool:
        """True if there is an older table."""
        return bool(self._older)

    def previous(self, ino: int) -> Entry | None:
        """Return the inode's entry in the older table."""
        return self._trees.link(self._older, ino) if self._older else None

    def is_settled(self, ino: int) -> bool:
        """Return whether this capture has already decided on the inode's entry."""
        return ino in self._settled

    def keep(self, ino: int) -> None:
        """Keep the older table's entry."""
        self._settled.put(ino, b"")

    def put(self, entry: Entry) -> None:
        """Set the entry of an inode."""
        self._set(entry.ino, entry)

    def drop(self, ino: int) -> None:
        """Remove the entry of an inode to which no name refers any more."""
        self._set(ino, None)

    def finish(self) -> TreeRef:
        """Store the table and return its tree; id b"" when there are no hard links."""
        self._flush()
        return self._tree

    def _set(self, ino: int, entry: Entry | None) -> None:
        self._settled.put(ino, b"")
        self._pending[link_key(ino)] = entry
        if len(self._pending) >= _BATCH_ENTRIES:
            self._flush()

    def _flush(self) -> None:
        self._tree = self._writer.update_tree(self._tree.id, self._pending, links=True)
        self._pending = {}
