"""Read trees: a directory's entries, or a link table, as a B+ tree of chunks keyed by name.

The shape of a tree depends on its entries alone, never on the order in which they came: equal trees have
equal ids. The empty tree is b"" (no chunk). Every node is checked when it is decoded: kind, order, names, and
that it is the child which its parent describes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import OrderedDict
from collections.abc import Iterator
from typing import Protocol

from ciuic.repository.errors import DamagedTree
from ciuic.repository.format.tree_format import NodeRef, TreeNode, decode_node, decode_xattrs, node_totals
from ciuic.system.xattrs import is_acl_duplicate
from ciuic.types import FLAG_XATTRS_CHUNK, ChunkId, Entry

# Limit of cached nodes in encoded bytes; decoded they take about ten times the memory. A node has 8 KiB on
# average, a crafted one as much as a chunk.
_CACHED_BYTES = 4 << 20


class ChunkSource(Protocol):
    """Source of chunks for trees and maps: the repository, or a writer with chunks not yet stored."""

    def get(self, chunk: ChunkId) -> bytes:
        """Return the checked content.

        Raises:
            MissingChunk: no pack has the chunk.
            DamagedChunk: no copy of it is good.
        """


class Trees:
    """Trees of one repository. All methods raise MissingChunk, DamagedChunk or DamagedTree."""

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        # Decoded nodes with their encoded size, the least recently used first.
        self._cache: OrderedDict[tuple[ChunkId, bool], tuple[TreeNode, int]] = OrderedDict()
        self._cached_bytes = 0

    def node(self, chunk: ChunkId, *, links: bool = False) -> TreeNode:
        """Return one decoded node; the last few hundred are cached."""
        # The kind is checked while decoding, so it is part of the key.
        key = (chunk, links)
        cached = self._cache.get(key)
        if cached is not None:
            self._cache.move_to_end(key)
            return cached[0]
        data = self._chunks.get(chunk)
        node = decode_node(chunk, data, links=links)
        self._cache[key] = node, len(data)
        self._cached_bytes += len(data)
        # The newest node stays however large it is, because its reader is about to use it.
        while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
            self._cached_bytes -= self._cache.popitem(last=False)[1][1]
        return node

    def child(self, parent: TreeNode, ref: NodeRef, *, links: bool = False) -> TreeNode:
        """Return the child that ``ref`` in ``parent`` names.

        DamagedTree if it differs from what the parent says.
        """
        node = self.node(ref.id, links=links)
        # Each was computed from the child when the parent was written. Checked, because lookups, totals and
        # diffs believe what the parent says without reading the child.
        if (
            node.level != parent.level - 1
            or node.last_name != ref.name
            or node_totals(node) != (ref.total_files, ref.total_bytes)
        ):
            raise DamagedTree(ref.id, "it is not the child that its parent describes")
        return node

    def entry(self, tree: bytes, name: bytes) -> Entry | None:
        """Return the entry of that name, or None."""
        return self._find(tree, name, links=False)

    def link(self, links: bytes, ino: int) -> Entry | None:
        """Return the link table's entry of that inode number, or None."""
        return self._find(links, ino.to_bytes(8, "big"), links=True)

    def entries(self, tree: bytes, *, after: bytes = b"") -> Iterator[Entry]:
        """Yield the entries after ``after``, in byte order of their names."""
        return self._entries(tree, after, links=False)

    def links(self, links: bytes) -> Iterator[Entry]:
        """Yield the entries of a link table in order of inode number (``name``, 8 bytes big-endian)."""
        return self._entries(links, b"", links=True)

    def xattrs(self, entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
        """Return the extended attributes, from the entry or from their chunk (FLAG_XATTRS_CHUNK).

        Those that older versions captured beside the ACLs which they duplicate are left out.
        """
        pairs = entry.xattrs
        if entry.flags & FLAG_XATTRS_CHUNK:
            chunk = ChunkId(pairs[0][1]) if pairs else ChunkId(b"")
            pairs = decode_xattrs(chunk, self._chunks.get(chunk))
        return tuple(pair for pair in pairs if not is_acl_duplicate(pair[0])) if pairs else pairs

    def diff(
        self, old: bytes, new: bytes, *, links: bool = False
    ) -> Iterator[tuple[Entry | None, Entry | None]]:
        """Yield pairs (old, new) of entries of one directory that differ, in name order.

        Equal nodes are not read.
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
            # Both are in name order, so the lower name is missing on the other side.
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

    def _below(self, node: TreeNode, after: bytes, links: bool) -> Iterator[Entry]:
        if node.level == 0:
            for entry in node.entries:
                if not after or entry.name > after:
                    yield entry
            return
        for ref in node.refs:
            if not after or ref.name > after:
                yield from self._below(self.child(node, ref, links=links), after, links)


class Lineage:
    """Trees on the way from a root down to a directory; DamagedTree for one that contains itself.

    No hashed tree can contain its own id, but somebody who knows the seed can make such a chunk (XXH3 is not
    cryptographic).
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
    """Cursor over a tree from left to right, which opens nodes only where it has to.

    The top of the stack is the next item.
    """

    def __init__(self, trees: Trees, tree: bytes, links: bool) -> None:
        self.trees = trees
        self.links = links
        self.stack: list[tuple[NodeRef | Entry, TreeNode]] = []
        if tree:
            self._push(trees.node(ChunkId(tree), links=links))

    def _push(self, node: TreeNode) -> None:
        if node.level:
            self.stack.extend((ref, node) for ref in reversed(node.refs))
        else:
            self.stack.extend((entry, node) for entry in reversed(node.entries))

    def level(self) -> int:
        """Return the height of the next item: 0 an entry, n a node of level n-1."""
        item, parent = self.stack[-1]
        return parent.level if isinstance(item, NodeRef) else 0

    def skip_equal(self, other: _Cursor) -> bool:
        """Skip the next item of both if it is the same subtree; open the higher one if it may contain one."""
        mine, theirs = self.stack[-1][0], other.stack[-1][0]
        if isinstance(mine, NodeRef) and isinstance(theirs, NodeRef):
            if mine.id == theirs.id:
                self.stack.pop()
                other.stack.pop()
                return True
            # The higher one is opened, because the lower one may be inside it.
            higher = self if self.level() >= other.level() else other
            higher.open()
            return True
        return False

    def open(self) -> None:
        """Replace the next node by its items."""
        item, parent = self.stack.pop()
        assert isinstance(item, NodeRef)
        self._push(self.trees.child(parent, item, links=self.links))

    def entry(self, other: _Cursor) -> Entry | None:
        """Return the next entry, opening nodes down to it; None at the end."""
        while self.stack and isinstance(self.stack[-1][0], NodeRef):
            self.open()
        item = self.stack[-1][0] if self.stack else None
        assert not isinstance(item, NodeRef)
        return item
