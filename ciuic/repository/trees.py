"""Reading trees: a directory's entries, or a link table, as a B+ tree of chunks keyed by name.

The shape of a tree depends on its entries alone, never on the order in which they came: equal trees have
equal ids. The empty tree is b"" (no chunk). Every node is checked as it is decoded: kind, order, names, and
that it is the child which its parent describes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from ciuic.repository.errors import DamagedTree
from ciuic.repository.treeformat import Node, NodeRef, decode_node, decode_xattrs, node_totals
from ciuic.types import FLAG_XATTRS_CHUNK, ChunkId, Entry

_CACHED_BYTES = 4 << 20
"""Of encoded nodes that are kept decoded, which takes about ten times the memory. A node has 8 KiB on average, and a crafted
one as much as a chunk.
"""


class ChunkSource(Protocol):
    """What trees and maps read from: the repository, or a writer with what it has not stored yet."""

    def get(self, chunk: ChunkId) -> bytes:
        """The checked content; MissingChunk, DamagedChunk."""
        ...


class Trees:
    """Trees of one repository. All methods raise MissingChunk, DamagedChunk or DamagedTree."""

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        self._cache: OrderedDict[tuple[ChunkId, bool], tuple[Node, int]] = OrderedDict()
        self._cached_bytes = 0

    def node(self, chunk: ChunkId, *, links: bool = False) -> Node:
        """One decoded node; the last few hundred are kept."""
        key = (chunk, links)
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            return cached[0]
        data = self._chunks.get(chunk)
        node = decode_node(chunk, data, links=links)
        self._cache[key] = node, len(data)
        self._cached_bytes += len(data)
        while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        return node

    def child(self, parent: Node, ref: NodeRef, *, links: bool = False) -> Node:
        """The child that ``ref`` in ``parent`` names; DamagedTree if it is not what the parent says of it."""
        node = self.node(ref.id, links=links)
        if (
            node.level != parent.level - 1
            or node.last_name != ref.name
            or node_totals(node) != (ref.total_files, ref.total_bytes)
        ):
            raise DamagedTree(ref.id, "it is not the child that its parent describes")
        return node

    def entry(self, tree: bytes, name: bytes) -> Entry | None:
        """The entry of that name, or None."""
        return self._find(tree, name, links=False)

    def link(self, links: bytes, ino: int) -> Entry | None:
        """The link table's entry of that inode number, or None."""
        return self._find(links, ino.to_bytes(8, "big"), links=True)

    def entries(self, tree: bytes, *, after: bytes = b"") -> Iterator[Entry]:
        """All entries in byte order of their names, those behind ``after``."""
        return self._entries(tree, after, links=False)

    def links(self, links: bytes) -> Iterator[Entry]:
        """All entries of a link table in order of inode number (``name`` is it, 8 bytes big-endian)."""
        return self._entries(links, b"", links=True)

    def totals(self, tree: bytes, *, links: bool = False) -> tuple[int, int]:
        """(files, bytes) of everything below: one node is read."""
        return node_totals(self.node(ChunkId(tree), links=links)) if tree else (0, 0)

    def xattrs(self, entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
        """The extended attributes, wherever they stand (FLAG_XATTRS_CHUNK)."""
        if not entry.flags & FLAG_XATTRS_CHUNK:
            return entry.xattrs
        chunk = ChunkId(entry.xattrs[0][1]) if entry.xattrs else ChunkId(b"")
        return decode_xattrs(chunk, self._chunks.get(chunk))

    def nodes(self, tree: bytes, *, links: bool = False) -> Iterator[tuple[ChunkId, list[Entry]]]:
        """Every node with the entries in it (none for inner nodes), parents first; for verification and
        marking.
        """
        if not tree:
            return
        stack = [(ChunkId(tree), self.node(ChunkId(tree), links=links))]
        while stack:
            id_, node = stack.pop()
            yield id_, node.entries
            # Children are read one by one as they are reached, or the stack would hold a whole level.
            if node.level == 1:
                for ref in node.refs:
                    yield ref.id, self.child(node, ref, links=links).entries
            else:
                stack.extend((ref.id, self.child(node, ref, links=links)) for ref in reversed(node.refs))

    def diff(
        self, old: bytes, new: bytes, *, links: bool = False
    ) -> Iterator[tuple[Entry | None, Entry | None]]:
        """Pairs (old, new) of entries that differ, in name order; equal nodes are not read. One directory,
        not below.
        """
        if old == new:
            return
        left, right = _Cursor(self, old, links), _Cursor(self, new, links)
        while left.stack or right.stack:
            if left.stack and right.stack and left.skip_equal(right):
                continue
            mine, theirs = left.entry(right), right.entry(left)
            if mine is None and theirs is None:
                continue
            if theirs is None or (mine is not None and mine.name < theirs.name):
                left.stack.pop()
                yield mine, None
            elif mine is None or theirs.name < mine.name:
                right.stack.pop()
                yield None, theirs
            else:
                left.stack.pop()
                right.stack.pop()
                if mine != theirs:
                    yield mine, theirs

    def _find(self, tree: bytes, name: bytes, *, links: bool) -> Entry | None:
        if not tree:
            return None
        node = self.node(ChunkId(tree), links=links)
        while node.level:
            at = bisect_left(node.refs, name, key=lambda ref: ref.name)
            if at == len(node.refs):
                return None
            node = self.child(node, node.refs[at], links=links)
        at = bisect_left(node.entries, name, key=lambda entry: entry.name)
        if at < len(node.entries) and node.entries[at].name == name:
            return node.entries[at]
        return None

    def _entries(self, tree: bytes, after: bytes, *, links: bool) -> Iterator[Entry]:
        if not tree:
            return
        yield from self._below(self.node(ChunkId(tree), links=links), after, links)

    def _below(self, node: Node, after: bytes, links: bool) -> Iterator[Entry]:
        if node.level == 0:
            for entry in node.entries:
                if not after or entry.name > after:
                    yield entry
            return
        for ref in node.refs:
            if not after or ref.name > after:
                yield from self._below(self.child(node, ref, links=links), after, links)


class Lineage:
    """The trees on the way from a root down to a directory: DamagedTree for one that contains itself.

    No tree that was hashed can contain its own id, but whoever knows the seed can make such a chunk (XXH3 resists nobody).
    """

    def __init__(self) -> None:
        self._trees: list[bytes] = []
        self._known: set[bytes] = set()

    def enter(self, tree: bytes) -> None:
        """Go down into this tree."""
        if tree and tree in self._known:
            raise DamagedTree(ChunkId(tree), "the directory contains itself")
        self._trees.append(tree)
        self._known.add(tree)

    def leave(self) -> None:
        """Go up again, from the tree that was entered last."""
        self._known.discard(self._trees.pop())


class _Cursor:
    """A tree read from left to right, opened node by node only where it has to be. Top of the stack is what
    is next.
    """

    def __init__(self, trees: Trees, tree: bytes, links: bool) -> None:
        self.trees = trees
        self.links = links
        self.stack: list[tuple[NodeRef | Entry, Node]] = []
        if tree:
            self._push(trees.node(ChunkId(tree), links=links))

    def _push(self, node: Node) -> None:
        if node.level:
            self.stack.extend((ref, node) for ref in reversed(node.refs))
        else:
            self.stack.extend((entry, node) for entry in reversed(node.entries))

    def level(self) -> int:
        """Height of the next item: 0 an entry, n a node of level n-1."""
        item, parent = self.stack[-1]
        return parent.level if isinstance(item, NodeRef) else 0

    def skip_equal(self, other: _Cursor) -> bool:
        """Passes over what is next in both if it is the same subtree; opens the higher one if it may hide
        one.
        """
        mine, theirs = self.stack[-1][0], other.stack[-1][0]
        if isinstance(mine, NodeRef) and isinstance(theirs, NodeRef):
            if mine.id == theirs.id:
                self.stack.pop()
                other.stack.pop()
                return True
            higher = self if self.level() >= other.level() else other
            higher.open()
            return True
        return False

    def open(self) -> None:
        """Replaces the next node by what is in it."""
        item, parent = self.stack.pop()
        assert isinstance(item, NodeRef)
        self._push(self.trees.child(parent, item, links=self.links))

    def entry(self, other: _Cursor) -> Entry | None:
        """The next entry, opening nodes down to it; None at the end."""
        while self.stack and isinstance(self.stack[-1][0], NodeRef):
            self.open()
        item = self.stack[-1][0] if self.stack else None
        assert not isinstance(item, NodeRef)
        return item
