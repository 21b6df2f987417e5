"""Block maps.

The chunk of each block of a file, as a radix tree of fan-out 1024 in which holes take no space. A map is
(content, map_height) as in Entry: height 0 and b"" is a file without data (all hole, or empty); height 0
otherwise is the id of the only block; a node of height h covers 1024**h blocks. The height depends on the
number of blocks alone, and a node on the blocks below it alone, so equal contents have equal maps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence

from ciuic.repository.directory_trees import ChunkSource
from ciuic.repository.errors import DamagedTree
from ciuic.types import CHUNK_ID_BYTES, HOLE, ChunkId, MapRef

# A leaf of 16 KiB covers 256 MiB of a file with blocks of 256 KiB.
FANOUT = 1024
MAX_HEIGHT = 6
"""Limit of the height: 1024**6 blocks are more than a file can have."""
_MAGIC = b"CBM"
_HEAD_BYTES = 4
# Node and its height; a block has height 0.
_Ref = tuple[ChunkId, int]


def blocks_of(size_bytes: int, block_size: int) -> int:
    """Return the number of blocks of a file; the last one may be short."""
    return -(-size_bytes // block_size)


def _height_for(n_blocks: int) -> int:
    """Return the height of the map of a file with this many blocks."""
    height, capacity = 0, 1
    while capacity < n_blocks:
        height += 1
        capacity *= FANOUT
    return height


def encode_map_node(height: int, ids: Sequence[ChunkId]) -> bytes:
    """Return a node: its height and its ids without trailing holes. All holes are HOLE itself, not a node."""
    count = len(ids)
    # Left out, so that growing a file by a hole changes no node.
    while count and ids[count - 1] == HOLE:
        count -= 1
    return _MAGIC + bytes([height]) + b"".join(ids[:count])


def decode_map_node(chunk: ChunkId, data: bytes, height: int) -> list[ChunkId]:
    """Return the ids in a node. DamagedTree unless it is one of this height."""
    count, rest = divmod(len(data) - _HEAD_BYTES, CHUNK_ID_BYTES)
    if data[:3] != _MAGIC or rest or not 0 < count <= FANOUT:
        raise DamagedTree(chunk, "it is not a node of a block map")
    if data[3] != height:
        raise DamagedTree(chunk, f"it is a block map node of height {data[3]}, not {height}")
    ids = [ChunkId(data[at : at + CHUNK_ID_BYTES]) for at in range(_HEAD_BYTES, len(data), CHUNK_ID_BYTES)]
    # Two encodings of one map would have two ids.
    if ids[-1] == HOLE:
        raise DamagedTree(chunk, "a block map node ends in a hole")
    return ids


class BlockMaps:
    """Block maps of one repository. All methods raise MissingChunk, DamagedChunk or DamagedTree."""

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        self._last: tuple[ChunkId, list[ChunkId]] = (HOLE, [])

    def node(self, chunk: ChunkId, height: int) -> list[ChunkId]:
        """Return the ids in one node, without trailing holes."""
        if height == 1 and self._last[0] == chunk:
            return self._last[1]
        ids = decode_map_node(chunk, self._chunks.get(chunk), height)
        # The last leaf is cached, because restore and verify ask block by block.
        if height == 1:
            self._last = (chunk, ids)
        return ids

    def ids(
        self, content: bytes, map_height: int, n_blocks: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, ChunkId]]:
        """Yield (block number, chunk id) for start ≤ number < stop, ascending, without holes."""
        end = n_blocks if stop is None else min(stop, n_blocks)
        return self._below(_root_id(content, map_height), map_height, 0, start, end)

    def get(self, content: bytes, map_height: int, n_blocks: int, index: int) -> ChunkId:
        """Return the chunk id of one block; HOLE where there is none."""
        return next((id_ for _, id_ in self.ids(content, map_height, n_blocks, index, index + 1)), HOLE)

    def nodes(self, content: bytes, map_height: int) -> Iterator[ChunkId]:
        """Yield ids of the map's own chunks (not of the blocks), parents first.

        Reads all but the lowest level.
        """
        root = _root_id(content, map_height)
        if root != HOLE and map_height:
            yield from self._nodes(root, map_height)

    def _nodes(self, node: ChunkId, height: int) -> Iterator[ChunkId]:
        yield node
        if height > 1:
            for child in self.node(node, height):
                if child != HOLE:
                    yield from self._nodes(child, height - 1)

    def _below(
        self, node: ChunkId, height: int, first: int, start: int, end: int
    ) -> Iterator[tuple[int, ChunkId]]:
        if node == HOLE or first >= end:
            return
        if height == 0:
            if first >= start:
                yield first, node
            return
        span = FANOUT ** (height - 1)
        ids = self.node(node, height)
        # Children that end before `start` are passed over unread: a range of a file of 1 TiB reads one node
        # of each level.
        skip = max(0, (start - first) // span)
        for at in range(skip, min(len(ids), -(-(end - first) // span))):
            if height > 1:
                yield from self._below(ids[at], height - 1, first + at * span, start, end)
            elif ids[at] != HOLE and first + at >= start:
                yield first + at, ids[at]

    def children(self, ref: _Ref, height: int) -> list[_Ref]:
        """Return the children of a node seen as one of this height.

        A lower node is the only child of a node that was not stored.
        """
        node, own = ref
        if node == HOLE:
            return []
        if own < height:
            return [ref]
        return [(child, own - 1) for child in self.node(node, own)]


def update_block_map(
    maps: BlockMaps,
    put: Callable[[bytes], ChunkId],
    base: MapRef,
    n_blocks: int,
    changes: Mapping[int, ChunkId],
) -> MapRef:
    """Return the map ``base`` with these blocks replaced, cut or grown to ``n_blocks``.

    Reads and writes only the nodes on the way to what changes. ValueError for a block outside of the file.
    """
    keys = sorted(changes)
    if keys and not 0 <= keys[0] <= keys[-1] < n_blocks:
        raise ValueError(f"blocks {keys[0]} to {keys[-1]} do not lie in a file of {n_blocks} blocks")
    for key in keys:
        if len(changes[key]) != CHUNK_ID_BYTES:
            raise ValueError(f"the id of block {key} must have 16 bytes, got {len(changes[key])}")
    height = _height_for(n_blocks)
    node, own = _root_id(base.content, base.map_height), base.map_height
    # The file is shorter now: the blocks that stay are below the first child.
    while own > height and node != HOLE:
        node, own = maps.node(node, own)[0], own - 1
    update = _MapUpdate(maps, put, n_blocks, keys, changes)
    root = update.node((node, min(own, height)), height, 0, 0, len(keys)) if n_blocks else HOLE
    return MapRef(b"", 0) if root == HOLE else MapRef(root, height)


class _MapUpdate:
    """Update of one map, with the arguments that stay the same on the way down."""

    def __init__(
        self,
        maps: BlockMaps,
        put: Callable[[bytes], ChunkId],
        n_blocks: int,
        keys: Sequence[int],
        changes: Mapping[int, ChunkId],
    ) -> None:
        self._maps = maps
        self._put = put
        self._n_blocks = n_blocks
        self._keys = keys
        self._changes = changes

    def node(self, old: _Ref, height: int, first: int, low: int, high: int) -> ChunkId:
        """Return the new id of the node at block ``first``, which contains the changes ``keys[low:high]``."""
        cut = first + FANOUT**height > self._n_blocks
        # Nothing below changes or is cut: the old node stays.
        if low == high and (old[0] == HOLE or (old[1] == height and not cut)):
            return old[0]
        if height == 0:
            return self._changes[first] if low < high else old[0]
        span = FANOUT ** (height - 1)
        count = min(FANOUT, -(-(self._n_blocks - first) // span))
        children = self._maps.children(old, height)[:count]
        ids = [child for child, _ in children]
        for at, upto in self._to_visit(children, height, first, low, high, count):
            child = children[at] if at < len(children) else (HOLE, height - 1)
            ids.extend([HOLE] * (at + 1 - len(ids)))
            ids[at] = self.node(child, height - 1, first + at * span, low, upto)
            low = upto
        # A subtree without data is HOLE itself, at every level.
        if all(id_ == HOLE for id_ in ids):
            return HOLE
        return self._put(encode_map_node(height, ids))

    def _to_visit(
        self, children: Sequence[_Ref], height: int, first: int, low: int, high: int, count: int
    ) -> Iterator[tuple[int, int]]:
        """Yield (child number, end of its keys) of the children to visit, ascending.

        These have keys, another height, or reach past the end of the file.
        """
        span = FANOUT ** (height - 1)
        # The only child of a node that was not stored has to become a node of the right height.
        special = {0} if children and children[0][1] != height - 1 else set()
        # The last child may reach beyond the end of the file, and is cut.
        if count == len(children):
            special.add(count - 1)
        numbers = {(self._keys[at] - first) // span for at in range(low, high)}
        for number in sorted(numbers | special):
            low = bisect_left(self._keys, first + (number + 1) * span, low, high)
            yield number, low


def _root_id(content: bytes, map_height: int) -> ChunkId:
    if not 0 <= map_height <= MAX_HEIGHT:
        raise DamagedTree(ChunkId(content), f"a block map cannot have height {map_height}")
    if len(content) not in (0, CHUNK_ID_BYTES):
        raise DamagedTree(ChunkId(content), "a block map id must have 16 bytes")
    return ChunkId(content) if content else HOLE
