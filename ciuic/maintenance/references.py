"""Find the files of snapshots that refer to given chunks: the names affected by damage.

Guarantees: every reference to one of the chunks is found, with its block. Subtrees that refer to none of them are read once,
however many snapshots share them. What lies below a damaged node cannot be named and is reported as the node's own directory
or file. A snapshot that shows the same damaged subtrees again and again, as only a crafted one does (a few kilobytes can name
2**60 files), is followed up to MAX_REPEATS; `cut_short` reports it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final, NamedTuple

from ciuic.repository import Repository
from ciuic.repository.block_maps import FANOUT, blocks_of
from ciuic.repository.lookup import join
from ciuic.repository.tree_format import TreeNode
from ciuic.types import FLAG_XATTRS_CHUNK, HOLE, ChunkId, Entry, RootRecord, Snapshot

MAX_REPEATS: Final = 1 << 18
"""Limit of entries that are read again in one snapshot; a long path counts for several.

A thousand copies of a damaged directory of two hundred names are still named, and the names take less than 100 MB.
"""
# Each 128 bytes of a path count as one entry: the limit bounds the memory for names, too.
_PATH_BYTES = 128


class ChunkReference(NamedTuple):
    """A reference from a snapshot to one of the chunks."""

    kind: str
    """Kind of the chunk: tree, links, map, xattrs or data."""
    root: bytes
    path: bytes
    """Absolute path; `<root>#<inode>` for an inode of the link table that no readable directory names."""
    block: int
    """Block number of data, first block of a map; -1 for other kinds."""
    chunk: ChunkId


class _Frame:
    """A tree node on the stack of a descent."""

    def __init__(self, id_: ChunkId, children: Iterator[ChunkId], tainted: bool) -> None:
        self.id = id_
        self.children = children
        self.tainted = tainted


class ReferenceFinder:
    """Finds the references to ``bad`` chunks. Nodes that cannot be read must be among them."""

    def __init__(self, repository: Repository, bad: Collection[ChunkId]) -> None:
        self._trees = repository.trees
        self._maps = repository.block_maps
        self._block_size = repository.block_size
        self._bad = bad
        self._tainted: dict[ChunkId, bool] = {}
        self._tainted_maps: dict[tuple[bytes, int], bool] = {}
        self._looked_at: set[bytes] = set()
        self._repeats = 0

    @property
    def cut_short(self) -> bool:
        """True if the last snapshot has more references than were returned."""
        return self._repeats >= MAX_REPEATS

    def _may_descend(self, node: bytes, entries: int, path: bytes) -> bool:
        """Count a node that is read again in this snapshot; return whether to descend into it."""
        if node in self._looked_at:
            self._repeats += (1 + entries) * (1 + len(path) // _PATH_BYTES)
        self._looked_at.add(node)
        return not self.cut_short

    def forget(self) -> None:
        """Forget which nodes were found clean; must be called when ``bad`` has grown."""
        self._tainted.clear()
        self._tainted_maps.clear()

    def references(self, snapshot: Snapshot) -> Iterator[ChunkReference]:
        """Yield every reference in the snapshot; a directory's own before those below it."""
        # For each snapshot anew: that snapshots share a subtree is no repetition.
        self._looked_at.clear()
        self._repeats = 0
        for root in snapshot.roots:
            yield from self._entry(root, root.entry, root.path)
            yield from self._links(root)
            if root.entry.content:
                yield from self._tree(root, ChunkId(root.entry.content), root.path)

    def _tree(self, root: RootRecord, top: ChunkId, path: bytes) -> Iterator[ChunkReference]:
        # A stack instead of a recursion: trees may be thousands of levels deep.
        stack = [(top, path)]
        while stack:
            id_, path = stack.pop()
            if id_ in self._bad:
                yield ChunkReference("tree", root.path, path, -1, id_)
            # Subtrees without a bad chunk are not descended: their names are of no interest.
            if id_ in self._bad or not self._is_tainted(id_, links=False):
                continue
            node = self._trees.node(id_)
            if not self._may_descend(id_, len(node.entries), path):
                return
            stack.extend((ref.id, path) for ref in reversed(node.refs))
            for entry in node.entries:
                here = join(path, entry.name)
                yield from self._entry(root, entry, here)
                if entry.is_dir and entry.content:
                    stack.append((ChunkId(entry.content), here))

    def _links(self, root: RootRecord) -> Iterator[ChunkReference]:
        """Yield references in the link table, under each of the inode's names."""
        if not root.links or not self._is_tainted(ChunkId(root.links), links=True):
            return
        found: dict[int, list[ChunkReference]] = {}
        stack = [ChunkId(root.links)]
        while stack:
            id_ = stack.pop()
            if id_ in self._bad:
                yield ChunkReference("links", root.path, root.path, -1, id_)
            if id_ in self._bad or not self._is_tainted(id_, links=True):
                continue
            node = self._trees.node(id_, links=True)
            stack.extend(ref.id for ref in reversed(node.refs))
            for entry in node.entries:
                ino = int.from_bytes(entry.name, "big")
                places = list(self._entry(root, entry, b"%s#%d" % (root.path, ino)))
                if places:
                    found[ino] = places
        yield from self._under_each_name(root, found)

    def _under_each_name(
        self, root: RootRecord, found: dict[int, list[ChunkReference]]
    ) -> Iterator[ChunkReference]:
        # A second walk of the tree, only if the table has references: the table does not know the names of its inodes.
        # Unlike in `_tree` no subtree is skipped: any of them may have a name of such an inode.
        nameless = set(found)
        stack = [(ChunkId(root.entry.content), root.path)] if found and root.entry.content else []
        while stack:
            id_, path = stack.pop()
            if id_ in self._bad:
                continue
            node = self._trees.node(id_)
            if not self._may_descend(id_, len(node.entries), path):
                break
            stack.extend((ref.id, path) for ref in reversed(node.refs))
            for entry in node.entries:
                if entry.is_dir and entry.content:
                    stack.append((ChunkId(entry.content), join(path, entry.name)))
                for place in found.get(entry.link, ()) if entry.link else ():
                    nameless.discard(entry.link)
                    yield place._replace(path=join(path, entry.name))
        for ino in sorted(nameless):
            yield from found[ino]

    def _entry(self, root: RootRecord, entry: Entry, path: bytes) -> Iterator[ChunkReference]:
        """Yield the references of an entry's attributes and content."""
        if entry.flags & FLAG_XATTRS_CHUNK and entry.xattrs and entry.xattrs[0][1] in self._bad:
            yield ChunkReference("xattrs", root.path, path, -1, ChunkId(entry.xattrs[0][1]))
        if not entry.is_file or not entry.content:
            return
        if entry.map_height == 0:
            if entry.content in self._bad:
                yield ChunkReference("data", root.path, path, 0, ChunkId(entry.content))
        elif self._is_tainted_map(entry):
            for kind, block, chunk in self._in_map(entry, path):
                yield ChunkReference(kind, root.path, path, block, chunk)

    def _is_tainted_map(self, entry: Entry) -> bool:
        return self._is_tainted_map_node(ChunkId(entry.content), entry.map_height)

    def _is_tainted_map_node(self, node: ChunkId, height: int) -> bool:
        """Return whether this node, or anything below it, is bad. The recursion is at most 6 deep, the height of a map."""
        if node in self._bad or not height:
            return node in self._bad
        known = self._tainted_maps.get((node, height))
        if known is None:
            below = set(self._maps.node(node, height)) - {HOLE}
            known = any(self._is_tainted_map_node(child, height - 1) for child in below)
            self._tainted_maps[node, height] = known
        return known

    def _in_map(self, entry: Entry, path: bytes) -> Iterator[tuple[str, int, ChunkId]]:
        end = blocks_of(entry.size_bytes, self._block_size)
        stack = [(ChunkId(entry.content), entry.map_height, 0)]
        while stack:
            id_, height, first = stack.pop()
            if id_ in self._bad:
                yield ("map" if height else "data"), first, id_
                continue
            if not height or not self._is_tainted_map_node(id_, height):
                continue
            if not self._may_descend(id_, FANOUT, path):
                return
            span = FANOUT ** (height - 1)
            below = []
            for at, child in enumerate(self._maps.node(id_, height)):
                # Nearly all children are data chunks: only bad ones go on the stack.
                if child != HOLE and first + at * span < end and (height > 1 or child in self._bad):
                    below.append((child, height - 1, first + at * span))
            stack.extend(reversed(below))

    def _is_tainted(self, top: ChunkId, *, links: bool) -> bool:
        """Return whether this node, or anything below it, refers to a bad chunk."""
        if top in self._tainted:
            return self._tainted[top]
        stack = [self._open(top, links)]
        while stack:
            frame = stack[-1]
            child = next(frame.children, None)
            if child is None:
                self._tainted[frame.id] = frame.tainted
                stack.pop()
                if stack:
                    stack[-1].tainted |= frame.tainted
            elif child in self._tainted:
                frame.tainted |= self._tainted[child]
            else:
                # Provisional: a node that contains itself, as only a crafted one does, is found here and ends the descent.
                self._tainted[child] = False
                stack.append(self._open(child, links))
        return self._tainted[top]

    def _open(self, id_: ChunkId, links: bool) -> _Frame:
        if id_ in self._bad:
            return _Frame(id_, iter(()), True)
        node: TreeNode = self._trees.node(id_, links=links)
        tainted = any(self._is_tainted_entry(entry) for entry in node.entries)
        below = [ref.id for ref in node.refs]
        below += [ChunkId(entry.content) for entry in node.entries if entry.is_dir and entry.content]
        return _Frame(id_, iter(below), tainted)

    def _is_tainted_entry(self, entry: Entry) -> bool:
        if entry.flags & FLAG_XATTRS_CHUNK and entry.xattrs and entry.xattrs[0][1] in self._bad:
            return True
        if not entry.is_file or not entry.content:
            return False
        return entry.content in self._bad if entry.map_height == 0 else self._is_tainted_map(entry)
