"""Walk everything a snapshot refers to, each chunk once, in a repository or a remote.

The mark phase of prune and of collections, the structure of a check, space of snapshots, uploads. Names of files are of no
concern here: ciuic.maintenance.references finds those of damaged chunks.
"""

from __future__ import annotations

import stat
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ciuic.errors import Damaged
from ciuic.repository.block_maps import FANOUT, blocks_of
from ciuic.types import FLAG_XATTRS_CHUNK, HOLE, ChunkId, Entry, Snapshot

if TYPE_CHECKING:
    from ciuic.repository.block_maps import BlockMaps
    from ciuic.repository.directory_trees import Trees


OnDamage = Callable[["Reached", Damaged], None]


class Reached(NamedTuple):
    """Chunk that a snapshot refers to, with its kind and the file it belongs to."""

    id: ChunkId
    kind: str
    """tree | links | map | xattrs | data."""
    entry: Entry | None
    """File whose block, map or xattrs it is, or directory whose tree it is; None in nodes of a link table."""
    block: int = -1
    """Block number of a data chunk, first block of a map node, else -1."""


class Seen(Protocol):
    """The operations that a walk needs of a set."""

    def __contains__(self, chunk: object, /) -> bool: ...
    def add(self, chunk: ChunkId, /) -> None:
        """Add a chunk."""


class TreeSource(Protocol):
    """The part of an open repository that a walk reads."""

    @property
    def trees(self) -> Trees:
        """Reader of directory trees."""

    @property
    def block_maps(self) -> BlockMaps:
        """Reader of block maps."""

    block_size: int


class Walker:
    """Walker over snapshots, which skips the chunks in ``seen``.

    ``seen`` is shared between snapshots: an unchanged subtree costs one lookup. It holds every kind of chunk
    unless ``seen_data`` is given, which then holds the data chunks. They are nearly all there are, and prune
    keeps them in a set that takes less memory and may claim, harmlessly there, to have seen one that it has
    not.
    """

    def __init__(
        self, repository: TreeSource, *, seen: Seen | None = None, seen_data: Seen | None = None
    ) -> None:
        self.repository = repository
        self.seen: Seen = set() if seen is None else seen
        self.seen_data: Seen = self.seen if seen_data is None else seen_data

    def walk(self, snapshot: Snapshot, *, on_damage: OnDamage | None = None) -> Iterator[Reached]:
        """Yield each chunk not yet seen, parents first; nodes are read, data is not.

        A node that cannot be read is passed to ``on_damage``, and the walk continues without what is below.
        Without ``on_damage`` the error is raised, and ``seen`` must not be used any further, because what is
        below that node was not walked.

        Raises:
            MissingChunk, DamagedChunk, DamagedTree: a node cannot be read, and ``on_damage`` is None.
        """
        for root in snapshot.roots:
            walk = _Walk(self, on_damage)
            yield from walk.attributes(root.entry)
            if root.links:
                yield from walk.tree(ChunkId(root.links), None, links=True)
            if root.entry.content:
                yield from walk.tree(ChunkId(root.entry.content), root.entry, links=False)

    def walk_content(self, file: Entry) -> Iterator[Reached]:
        """Yield each chunk of a regular file that was not yet seen; it is passed over by `walk` then.

        Raises:
            MissingChunk, DamagedChunk, DamagedTree: a node of its block map cannot be read.
        """
        content = ChunkId(file.content)
        if content and content not in (self.seen if file.map_height else self.seen_data):
            yield from _Walk(self, None).content(file)


class _Walk:
    """Walk of one root.

    Directories wait on a stack, not in recursion: paths may be thousands of components deep.
    """

    def __init__(self, walker: Walker, on_damage: OnDamage | None) -> None:
        self._trees = walker.repository.trees
        self._maps = walker.repository.block_maps
        self._block_size = walker.repository.block_size
        self._seen = walker.seen
        self._seen_data = walker.seen_data
        self._on_damage = on_damage

    def tree(self, tree: ChunkId, directory: Entry | None, *, links: bool) -> Iterator[Reached]:
        """Yield everything from this tree down."""
        stack: list[tuple[ChunkId, Entry | None]] = [(tree, directory)]
        while stack:
            id_, directory = stack.pop()
            if id_ in self._seen:
                continue
            # An id names content, so what is below is the same wherever the node occurs.
            self._seen.add(id_)
            reached = Reached(id_, "links" if links else "tree", directory)
            yield reached
            try:
                node = self._trees.node(id_, links=links)
            except Damaged as error:
                self._damaged(reached, error)
                continue
            # Reversed, because a stack returns the last one first: chunks come in name order.
            stack.extend((ref.id, directory) for ref in reversed(node.refs))
            for entry in node.entries:
                # Most of what is read again has been seen: it should cost one lookup and no more.
                if entry.flags & FLAG_XATTRS_CHUNK:
                    yield from self.attributes(entry)
                content = ChunkId(entry.content)
                if not content:
                    continue
                kind = stat.S_IFMT(entry.mode)
                if kind == stat.S_IFDIR:
                    if content not in self._seen:
                        stack.append((content, entry))
                elif kind != stat.S_IFREG:
                    continue
                elif entry.map_height:
                    if content not in self._seen:
                        yield from self.content(entry)
                # Nearly all files of most trees. As in `content`, without a generator for each.
                elif content not in self._seen_data:
                    self._seen_data.add(content)
                    yield Reached(content, "data", entry, 0)

    def attributes(self, entry: Entry) -> Iterator[Reached]:
        """Yield the chunk of the entry's extended attributes, if it has one."""
        if entry.flags & FLAG_XATTRS_CHUNK and entry.xattrs:
            id_ = ChunkId(entry.xattrs[0][1])
            if id_ not in self._seen:
                self._seen.add(id_)
                yield Reached(id_, "xattrs", entry)

    def content(self, entry: Entry) -> Iterator[Reached]:
        """Yield the chunks of a regular file with content."""
        height = entry.map_height
        if height == 0:
            id_ = ChunkId(entry.content)
            if id_ not in self._seen_data:
                self._seen_data.add(id_)
                yield Reached(id_, "data", entry, 0)
            return
        end = blocks_of(entry.size_bytes, self._block_size)
        stack = [(ChunkId(entry.content), height, 0)]
        while stack:
            id_, height, first = stack.pop()
            if id_ in self._seen:
                continue
            self._seen.add(id_)
            reached = Reached(id_, "map", entry, first)
            yield reached
            try:
                ids = self._maps.node(id_, height)
            except Damaged as error:
                self._damaged(reached, error)
                continue
            span = FANOUT ** (height - 1)
            for at, child in enumerate(ids):
                block = first + at * span
                # No restore reads beyond the end of the file.
                if child == HOLE or block >= end:
                    continue
                if height > 1:
                    stack.append((child, height - 1, block))
                elif child not in self._seen_data:
                    self._seen_data.add(child)
                    yield Reached(child, "data", entry, block)

    def _damaged(self, reached: Reached, error: Damaged) -> None:
        if self._on_damage is None:
            raise error
        self._on_damage(reached, error)
