"""Update trees, reading and writing only the nodes on the way to what changes.

The old tree is read as a stream of items. Where nothing changes and the builder is at a border, whole old
nodes are reused; where a border vanished, the neighbours are opened until the borders of old and new meet
again (tree_format says where borders are). So the result is the tree that would be built from scratch.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence

import msgspec

from ciuic.repository.format.tree_format import (
    MAX_ENTRY_BYTES,
    NodeRef,
    TreeNode,
    encode_inner,
    encode_leaf,
    entry_problem,
    name_level,
    node_totals,
)
from ciuic.repository.trees.tree_reader import Trees
from ciuic.types import ChunkId, Entry, TreeRef

_Put = Callable[[bytes], ChunkId]


class TreeBuilder:
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
        builder = TreeBuilder(put, seed, links)
        for name in names:
            entry = changes[name]
            if entry is not None:
                builder.add(entry)
        return _root(trees, builder.finish(), links)
    root = trees.node(ChunkId(base), links=links)
    if not names:
        return TreeRef(ChunkId(base), *node_totals(root))
    builder = TreeBuilder(put, seed, links)
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
    builder: TreeBuilder,
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
    builder: TreeBuilder,
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


def _add(builder: TreeBuilder, entry: Entry | None) -> None:
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
