"""Reading trees: a directory's entries, or a link table, as a B+ tree of chunks keyed by name.

The shape of a tree depends on its entries alone, never on the order in which they came: equal trees have
equal ids. The empty tree is b"" (no chunk). Every node is checked as it is decoded: order, names, totals.
"""

from __future__ import annotations

from collections.abc import Iterator

from ciuic.repository.chunks import ChunkReader
from ciuic.types import ChunkId, Entry

TREE_XATTRS_INLINE_BYTES = 1024


class Trees:
    """Trees of one repository. All methods raise MissingChunk, DamagedChunk or DamagedTree."""

    def __init__(self, chunks: ChunkReader) -> None:
        self._chunks = chunks

    def entry(self, tree: bytes, name: bytes) -> Entry | None:
        """The entry of that name, or None."""
        raise NotImplementedError

    def entries(self, tree: bytes, *, after: bytes = b"") -> Iterator[Entry]:
        """All entries in byte order of their names, those behind ``after``."""
        raise NotImplementedError

    def link(self, links: bytes, ino: int) -> Entry | None:
        """The link table's entry of that inode number, or None."""
        raise NotImplementedError

    def links(self, links: bytes) -> Iterator[Entry]:
        """All entries of a link table in order of inode number (``Entry.ino`` is it; ``name`` is the key)."""
        raise NotImplementedError

    def diff(
        self, old: bytes, new: bytes, *, links: bool = False
    ) -> Iterator[tuple[Entry | None, Entry | None]]:
        """Pairs (old, new) of entries that differ, in name order; equal nodes are not read. One directory,
        not below.
        """
        raise NotImplementedError

    def xattrs(self, entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
        """The extended attributes, wherever they stand (FLAG_XATTRS_CHUNK)."""
        raise NotImplementedError

    def nodes(self, tree: bytes, *, links: bool = False) -> Iterator[tuple[ChunkId, list[Entry]]]:
        """Every node with the entries in it (none for inner nodes), parents first; for verification and
        marking.
        """
        raise NotImplementedError
