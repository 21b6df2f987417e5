"""Block maps: which chunk is block i of a file. A radix tree of fixed fan-out 1024; holes take no space at
any level.

A map is (content, map_height) as in Entry: height 0 and b"" is a file without data (all hole, or empty);
height 0 otherwise is the id of the only block; a node of height h covers 1024**h blocks. The height depends
on the number of blocks alone, and a node on the blocks below it alone, so equal contents have equal maps.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import zip_longest

from ciuic.repository.errors import DamagedTree
from ciuic.repository.trees import ChunkSource
from ciuic.types import CHUNK_ID_BYTES, HOLE, ChunkId, MapRef

FANOUT = 1024
MAX_HEIGHT = 6
"""1024**6 blocks are more than a file can have."""
_MAGIC = b"CBM"
_HEAD_BYTES = 4
_Ref = tuple[ChunkId, int]
"""A node and its height; of height 0: a block."""


def blocks_of(size_bytes: int, block_size: int) -> int:
    """Number of blocks of a file: the last one may be short."""
    return -(-size_bytes // block_size)


def height_for(n_blocks: int) -> int:
    """Height of the map of a file of so many blocks."""
    height, capacity = 0, 1
    while capacity < n_blocks:
        height += 1
        capacity *= FANOUT
    return height


def encode_map_node(height: int, ids: Sequence[ChunkId]) -> bytes:
    """A node: its height and its ids, trailing holes left out. Not for all holes (that is HOLE itself)."""
    count = len(ids)
    while count and ids[count - 1] == HOLE:
        count -= 1
    return _MAGIC + bytes([height]) + b"".join(ids[:count])


def decode_map_node(chunk: ChunkId, data: bytes, height: int) -> list[ChunkId]:
    """The ids in a node; DamagedTree unless it is one of this height."""
    count, rest = divmod(len(data) - _HEAD_BYTES, CHUNK_ID_BYTES)
    if data[:3] != _MAGIC or rest or not 0 < count <= FANOUT:
        raise DamagedTree(chunk, "it is not a node of a block map")
    if data[3] != height:
        raise DamagedTree(chunk, f"it is a block map node of height {data[3]}, not {height}")
    ids = [ChunkId(data[at : at + CHUNK_ID_BYTES]) for at in range(_HEAD_BYTES, len(data), CHUNK_ID_BYTES)]
    if ids[-1] == HOLE:
        raise DamagedTree(chunk, "a block map node ends in a hole")
    return ids


class BlockMaps:
    """Block maps of one repository. All methods raise MissingChunk, DamagedChunk or DamagedTree."""

    def __init__(self, chunks: ChunkSource) -> None:
        self._chunks = chunks
        self._last: tuple[ChunkId, list[ChunkId]] = (HOLE, [])

    def node(self, chunk: ChunkId, height: int) -> list[ChunkId]:
        """The ids in one node, trailing holes left out."""
        if height == 1 and self._last[0] == chunk:
            return self._last[1]
        ids = decode_map_node(chunk, self._chunks.get(chunk), height)
        if height == 1:  # restore and verify ask block by block
            self._last = (chunk, ids)
        return ids

    def ids(
        self, content: bytes, map_height: int, n_blocks: int, start: int = 0, stop: int | None = None
    ) -> Iterator[tuple[int, ChunkId]]:
        """(block number, chunk id) for start ≤ number < stop, ascending; holes left out."""
        end = n_blocks if stop is None else min(stop, n_blocks)
        return self._below(_root_id(content, map_height), map_height, 0, start, end)

    def get(self, content: bytes, map_height: int, n_blocks: int, index: int) -> ChunkId:
        """The chunk id of one block; HOLE where there is none."""
        return next((id_ for _, id_ in self.ids(content, map_height, n_blocks, index, index + 1)), HOLE)

    def diff(self, old: MapRef, new: MapRef, n_blocks: int) -> Iterator[tuple[int, ChunkId, ChunkId]]:
        """(block, old id, new id) where they differ below n_blocks; equal nodes are not read."""
        height = max(old.map_height, new.map_height)
        left = (_root_id(old.content, old.map_height), old.map_height)
        right = (_root_id(new.content, new.map_height), new.map_height)
        return self._diff(left, right, height, 0, n_blocks)

    def nodes(self, content: bytes, map_height: int) -> Iterator[ChunkId]:
        """Ids of the map's own chunks (not of the blocks), parents first. Reads all but the lowest level."""
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
        skip = max(0, (start - first) // span)
        for at in range(skip, min(len(ids), -(-(end - first) // span))):
            if height > 1:
                yield from self._below(ids[at], height - 1, first + at * span, start, end)
            elif ids[at] != HOLE and first + at >= start:
                yield first + at, ids[at]

    def children(self, ref: _Ref, height: int) -> list[_Ref]:
        """What is in a node seen as one of this height: a lower one is the only child of a node that was not
        stored.
        """
        node, own = ref
        if node == HOLE:
            return []
        if own < height:
            return [ref]
        return [(child, own - 1) for child in self.node(node, own)]

    def _diff(
        self, old: _Ref, new: _Ref, height: int, first: int, end: int
    ) -> Iterator[tuple[int, ChunkId, ChunkId]]:
        if first >= end or old == new or old[0] == new[0] == HOLE:
            return
        if height == 0:
            yield first, old[0], new[0]
            return
        span = FANOUT ** (height - 1)
        none = (HOLE, height - 1)
        pairs = zip_longest(self.children(old, height), self.children(new, height), fillvalue=none)
        for at, (left, right) in enumerate(pairs):
            yield from self._diff(left, right, height - 1, first + at * span, end)


def update_block_map(
    maps: BlockMaps,
    put: Callable[[bytes], ChunkId],
    base: MapRef,
    n_blocks: int,
    changes: Mapping[int, ChunkId],
) -> MapRef:
    """The map ``base`` with these blocks replaced, cut or grown to ``n_blocks``. Touches only nodes on the
    way.
    """
    keys = sorted(changes)
    if keys and not 0 <= keys[0] <= keys[-1] < n_blocks:
        raise ValueError(f"blocks {keys[0]} to {keys[-1]} do not lie in a file of {n_blocks} blocks")
    for key in keys:
        if len(changes[key]) != CHUNK_ID_BYTES:
            raise ValueError(f"the id of block {key} has not 16 bytes")
    height = height_for(n_blocks)
    node, own = _root_id(base.content, base.map_height), base.map_height
    while own > height and node != HOLE:
        node, own = maps.node(node, own)[0], own - 1
    update = _MapUpdate(maps, put, n_blocks, keys, changes)
    root = update.node((node, min(own, height)), height, 0, 0, len(keys)) if n_blocks else HOLE
    return MapRef(b"", 0) if root == HOLE else MapRef(root, height)


class _MapUpdate:
    """One change of one map: what stays the same on the way down."""

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
        """The new id of the node of this height at block ``first``, where ``keys[low:high]`` fall into it."""
        cut = first + FANOUT**height > self._n_blocks
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
        if all(id_ == HOLE for id_ in ids):
            return HOLE
        return self._put(encode_map_node(height, ids))

    def _to_visit(
        self, children: Sequence[_Ref], height: int, first: int, low: int, high: int, count: int
    ) -> Iterator[tuple[int, int]]:
        """(child number, end of its keys), ascending: children with keys, of another height, or reaching past
        the end.
        """
        span = FANOUT ** (height - 1)
        special = {0} if children and children[0][1] != height - 1 else set()
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
