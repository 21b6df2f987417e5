"""Everything a snapshot refers to, each chunk once: the mark phase of garbage collection and the structure of
verify.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple, Protocol

from ciuic.errors import Damaged
from ciuic.repository.blockmaps import FANOUT, blocks_of
from ciuic.types import FLAG_XATTRS_CHUNK, HOLE, ChunkId, Entry, Snapshot

if TYPE_CHECKING:
    from ciuic.repository.repository import Repository

OnDamage = Callable[["Reached", Damaged], None]


class Reached(NamedTuple):
    """A chunk, what it is, and whose it is."""

    id: ChunkId
    kind: str
    """tree | links | map | xattrs | data"""
    path: bytes
    """Absolute path of the file or directory at which it was first reached; b"" when paths were not asked
    for.

    What stands in the link table (files with several names) has the path `<root>#<inode number>`.
    """
    entry: Entry | None
    """The file whose block, map or xattrs it is, or the directory whose tree it is; None in a link table's
    nodes.
    """
    block: int = -1
    """Block number of a data chunk, first block of a map node, else -1."""


class Seen(Protocol):
    """What the walker asks of a set."""

    def __contains__(self, chunk: object, /) -> bool: ...
    def add(self, chunk: ChunkId, /) -> None: ...


class Walker:
    """Walks snapshots, skipping what is in ``seen`` (shared between snapshots: an unchanged subtree costs one
    lookup).

    ``seen`` holds every kind of chunk unless ``seen_data`` is given, which then holds the data chunks. They are
    nearly all there are, and collection keeps them in a set that takes less memory and may claim, rightly for its
    purpose, to have seen one that it has not.
    """

    def __init__(
        self, repository: Repository, *, seen: Seen | None = None, seen_data: Seen | None = None
    ) -> None:
        self.repository = repository
        self.seen: Seen = set() if seen is None else seen
        self.seen_data: Seen = self.seen if seen_data is None else seen_data

    def walk(
        self, snapshot: Snapshot, *, paths: bool = False, on_damage: OnDamage | None = None
    ) -> Iterator[Reached]:
        """Each chunk not yet seen, parents first; nodes are read, data is not.

        A node that cannot be read: with ``on_damage`` it is told and the walk goes on without what is below;
        else MissingChunk, DamagedChunk or DamagedTree is raised, and ``seen`` must not be used any further,
        because what is below that node was not walked.
        """
        for root in snapshot.roots:
            walk = _Walk(self, paths, on_damage)
            yield from walk.attributes(root.entry, root.path)
            if root.links:
                yield from walk.tree(ChunkId(root.links), root.path, None, links=True)
            if root.entry.content:
                yield from walk.tree(ChunkId(root.entry.content), root.path, root.entry, links=False)


class _Walk:
    """One root. Directories wait on a stack, not in recursion: paths may be thousands of components deep."""

    def __init__(self, walker: Walker, paths: bool, on_damage: OnDamage | None) -> None:
        self._trees = walker.repository.trees
        self._maps = walker.repository.block_maps
        self._block_size = walker.repository.block_size
        self._seen = walker.seen
        self._seen_data = walker.seen_data
        self._paths = paths
        self._on_damage = on_damage

    def tree(self, tree: ChunkId, path: bytes, directory: Entry | None, *, links: bool) -> Iterator[Reached]:
        """Everything from this tree down."""
        stack: list[tuple[ChunkId, bytes, Entry | None]] = [(tree, path, directory)]
        while stack:
            id_, path, directory = stack.pop()
            if id_ in self._seen:
                continue
            self._seen.add(id_)
            reached = Reached(id_, "links" if links else "tree", path if self._paths else b"", directory)
            yield reached
            try:
                node = self._trees.node(id_, links=links)
            except Damaged as error:
                self._damaged(reached, error)
                continue
            stack.extend((ref.id, path, directory) for ref in reversed(node.refs))
            for entry in node.entries:
                # Most of what is read again has been seen: it should cost one look-up and no more.
                if entry.flags & FLAG_XATTRS_CHUNK:
                    yield from self.attributes(entry, self._place(path, entry, links))
                content = ChunkId(entry.content)
                if not content:
                    continue
                if entry.is_dir:
                    if content not in self._seen:
                        stack.append((content, self._place(path, entry, links), entry))
                elif entry.is_file and content not in (self._seen if entry.map_height else self._seen_data):
                    yield from self._content(entry, self._place(path, entry, links))

    def attributes(self, entry: Entry, path: bytes) -> Iterator[Reached]:
        """The chunk of its extended attributes, if it has one."""
        if entry.flags & FLAG_XATTRS_CHUNK and entry.xattrs:
            yield from self._once(Reached(ChunkId(entry.xattrs[0][1]), "xattrs", path, entry))

    def _content(self, entry: Entry, path: bytes) -> Iterator[Reached]:
        height = entry.map_height
        if height == 0:
            yield from self._once(Reached(ChunkId(entry.content), "data", path, entry, 0))
            return
        end = blocks_of(entry.size_bytes, self._block_size)
        stack = [(ChunkId(entry.content), height, 0)]
        while stack:
            id_, height, first = stack.pop()
            if id_ in self._seen:
                continue
            self._seen.add(id_)
            reached = Reached(id_, "map", path if self._paths else b"", entry, first)
            yield reached
            try:
                ids = self._maps.node(id_, height)
            except Damaged as error:
                self._damaged(reached, error)
                continue
            span = FANOUT ** (height - 1)
            for at, child in enumerate(ids):
                block = first + at * span
                if child == HOLE or block >= end:
                    continue
                if height == 1:
                    yield from self._once(Reached(child, "data", path, entry, block))
                else:
                    stack.append((child, height - 1, block))

    def _once(self, reached: Reached) -> Iterator[Reached]:
        seen = self._seen_data if reached.kind == "data" else self._seen
        if reached.id not in seen:
            seen.add(reached.id)
            yield reached if self._paths else reached._replace(path=b"")

    def _place(self, path: bytes, entry: Entry, links: bool) -> bytes:
        if not self._paths:
            return b""
        if links:
            return b"%s#%d" % (path, int.from_bytes(entry.name, "big"))
        return path.rstrip(b"/") + b"/" + entry.name

    def _damaged(self, reached: Reached, error: Damaged) -> None:
        if self._on_damage is None:
            raise error
        self._on_damage(reached, error)
