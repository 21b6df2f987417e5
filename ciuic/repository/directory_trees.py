"""Trees: a directory's entries, or a link table, as a B+ tree of chunks keyed by name; read and updated.

The shape of a tree depends on its entries alone, never on the order in which they came: equal trees have
equal ids. The empty tree is b"" (no chunk). Every node is checked when it is decoded: kind, order, names, and
that it is the child which its parent describes.

An update reads and writes only the nodes on the way to what changes. The old tree is read as a stream of items.
Where nothing changes and the builder is at a border, whole old nodes are reused; where a border vanished, the
neighbours are opened until the borders of old and new meet again (tree_format says where borders are). So the
result is the tree that would be built from scratch.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import msgspec

from ciuic.repository.errors import DamagedTree
from ciuic.repository.tree_format import (
    MAX_ENTRY_BYTES,
    NodeRef,
    TreeNode,
    decode_node,
    decode_xattrs,
    encode_inner,
    encode_leaf,
    entry_problem,
    name_level,
    node_totals,
)
from ciuic.system.disk import is_acl_duplicate
from ciuic.types import FLAG_XATTRS_CHUNK, ChunkId, Entry, TreeRef

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


_Put = Callable[[bytes], ChunkId]


class _TreeBuilder:
    """Builder of nodes from items in ascending order; writes each node when its border is reached."""

    def __init__(self, put: _Put, seed: int, links: bool) -> None:
        self._put = put
        self._seed = seed
        self._links = links
        self._entries: list[Entry] = []
        # Children that wait for the border of their node, of level 1, 2, ….
        self._levels: list[list[NodeRef]] = []
        # True for each level 1, 2, … of which a node has been written.
        self._written: list[bool] = []

    def at_border(self, level: int) -> bool:
        """Return whether a whole node of this level could come next."""
        return not self._entries and not any(self._levels[:level])

    def is_border(self, name: bytes, level: int) -> bool:
        """Return whether this name ends a node of this level."""
        return name_level(name, self._seed) > level

    def add(self, entry: Entry) -> None:
        """Add an entry."""
        self._entries.append(entry)
        if self.is_border(entry.name, 0):
            self._flush_leaf()

    def add_node(self, ref: NodeRef, level: int) -> None:
        """Add a whole node of this level; only at its border."""
        while len(self._levels) <= level:
            self._levels.append([])
            self._written.append(False)
        self._levels[level].append(ref)
        if self.is_border(ref.name, level + 1):
            self._flush(level + 1)

    def finish(self) -> NodeRef | None:
        """Return the root, the lowest node that has everything below it; None when nothing was added."""
        if self._entries:
            self._flush_leaf()
        level = 0
        while level < len(self._levels):
            waiting = self._levels[level]
            # A single node with nothing above it is the root; otherwise it needs a parent.
            above = any(self._levels[level + 1 :]) or self._written[level]
            if not above and len(waiting) == 1:
                return waiting[0]
            if waiting:
                self._flush(level + 1)
            level += 1
        return None

    def _flush_leaf(self) -> None:
        entries, self._entries = self._entries, []
        node = TreeNode(0, entries, [])
        id_ = self._put(encode_leaf(entries, self._links))
        self.add_node(NodeRef(entries[-1].name, id_, *node_totals(node)), 0)

    def _flush(self, level: int) -> None:
        refs = self._levels[level - 1]
        self._levels[level - 1] = []
        self._written[level - 1] = True
        node = TreeNode(level, [], refs)
        id_ = self._put(encode_inner(level, refs, self._links))
        self.add_node(NodeRef(refs[-1].name, id_, *node_totals(node)), level)


def update_tree(
    trees: Trees, put: _Put, seed: int, base: bytes, changes: Mapping[bytes, Entry | None], *, links: bool
) -> TreeRef:
    """Return the tree ``base`` with these names set or removed.

    ValueError for what cannot stand in a tree.
    """
    names = sorted(changes)
    for name in names:
        _check_change(name, changes[name], links)
    if not base:
        builder = _TreeBuilder(put, seed, links)
        for name in names:
            entry = changes[name]
            if entry is not None:
                builder.add(entry)
        return _root(trees, builder.finish(), links)
    root = trees.node(ChunkId(base), links=links)
    if not names:
        return TreeRef(ChunkId(base), *node_totals(root))
    builder = _TreeBuilder(put, seed, links)
    _feed(trees, builder, root, names, changes, links)
    return _root(trees, builder.finish(), links)


def _check_change(name: bytes, entry: Entry | None, links: bool) -> None:
    if entry is None:
        return
    if entry.name != name:
        raise ValueError(f"the entry for {name!r} is named {entry.name!r}")
    problem = entry_problem(entry, links)
    if problem:
        raise ValueError(problem)
    # A cheap upper estimate first: encoding every entry twice would be most of the cost of an update.
    long = len(entry.target) + sum(len(key) + len(value) for key, value in entry.xattrs)
    if long > MAX_ENTRY_BYTES // 2 and len(msgspec.msgpack.encode(entry)) > MAX_ENTRY_BYTES:
        raise ValueError(
            f"the entry {name!r} must have at most {MAX_ENTRY_BYTES} bytes: put its extended attributes into a chunk"
        )


def _feed(
    trees: Trees,
    builder: _TreeBuilder,
    node: TreeNode,
    names: Sequence[bytes],
    changes: Mapping[bytes, Entry | None],
    links: bool,
) -> None:
    """Feed the builder with what is below an old node, with these changes.

    The changes are all that fall into the node or, at the end, after it.
    """
    if node.level == 0:
        _merge(builder, node.entries, names, changes)
        return
    done = 0
    for ref in node.refs:
        last = ref is node.refs[-1]
        # Names after the last old one belong to the last child.
        upto = len(names) if last else bisect_right(names, ref.name, done)
        level = node.level - 1
        # No change in this old node, and the new tree has borders at both of its ends: reused unread.
        if upto == done and builder.at_border(level) and builder.is_border(ref.name, level):
            builder.add_node(ref, level)
        else:
            _feed(trees, builder, trees.child(node, ref, links=links), names[done:upto], changes, links)
        done = upto


def _merge(
    builder: _TreeBuilder,
    entries: Sequence[Entry],
    names: Sequence[bytes],
    changes: Mapping[bytes, Entry | None],
) -> None:
    at = 0
    for entry in entries:
        while at < len(names) and names[at] < entry.name:
            _add(builder, changes[names[at]])
            at += 1
        if at < len(names) and names[at] == entry.name:
            _add(builder, changes[names[at]])
            at += 1
        else:
            builder.add(entry)
    for name in names[at:]:
        _add(builder, changes[name])


def _add(builder: _TreeBuilder, entry: Entry | None) -> None:
    if entry is not None:
        builder.add(entry)


def _root(trees: Trees, root: NodeRef | None, links: bool) -> TreeRef:
    """Return the root, going down while it has a single child.

    Deletions can leave such a chain of old nodes on top.
    """
    if root is None:
        return TreeRef(ChunkId(b""))
    id_ = root.id
    node = trees.node(id_, links=links)
    # A root with one child would give the same entries a second id.
    while node.level and len(node.refs) == 1:
        id_ = node.refs[0].id
        node = trees.child(node, node.refs[0], links=links)
    return TreeRef(id_, root.total_files, root.total_bytes)
