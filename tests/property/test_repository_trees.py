"""Tests of trees and block maps against dictionaries: every way to the same content gives the same id."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.repository.block_maps import BlockMaps, update_block_map
from ciuic.repository.directory_trees import Trees, update_tree
from ciuic.repository.errors import DamagedTree
from ciuic.repository.identity import Identity
from ciuic.repository.tree_format import name_level
from ciuic.types import HOLE, ChunkId, Entry, MapRef, TreeRef

SEED = 7
chunk_id = Identity("xxh3-128", None, SEED).chunk_id


class MemoryChunks:
    """Chunks in a dictionary; counts what is read and written."""

    def __init__(self) -> None:
        self.stored: dict[ChunkId, bytes] = {}
        self.reads = 0
        self.writes = 0

    def get(self, chunk: ChunkId) -> bytes:
        self.reads += 1
        return self.stored[chunk]

    def put(self, data: bytes) -> ChunkId:
        id_ = chunk_id(data)
        self.writes += id_ not in self.stored
        self.stored[id_] = data
        return id_


def update(
    chunks: MemoryChunks, base: bytes, changes: Mapping[bytes, Entry | None], links: bool = False
) -> TreeRef:
    return update_tree(Trees(chunks), chunks.put, SEED, base, changes, links=links)


def file(name: bytes, size: int = 1) -> Entry:
    return Entry(name=name, mode=0o100644, size_bytes=size)


# Numbers below 3,000 give several levels; a name that ends a leaf is one in 64, so borders come and go.
_names = st.integers(0, 3000).map(lambda number: b"n%04d" % number)
_edits = st.dictionaries(_names, st.one_of(st.none(), st.integers(0, 5)), max_size=200)


def _blocks(low: int, high: int) -> st.SearchStrategy[dict[bytes, int | None]]:
    """Return a run of neighbours, so that whole leaves and whole inner nodes vanish."""
    return st.tuples(
        st.integers(low, high), st.integers(0, 1500), st.one_of(st.none(), st.integers(0, 5))
    ).map(lambda run: {b"n%04d" % number: run[2] for number in range(run[0], run[0] + run[1])})


@given(st.lists(st.one_of(_edits, _blocks(0, 3000)), max_size=6))
def test_updates_equal_a_tree_built_at_once(steps: list[dict[bytes, int | None]]) -> None:
    """A tree has the id, entries and totals of one built from its entries at once, however it came about."""
    chunks = MemoryChunks()
    model: dict[bytes, Entry] = {}
    ref = TreeRef(ChunkId(b""))
    for step in steps:
        changes = {name: None if size is None else file(name, size) for name, size in step.items()}
        before = dict(model)
        old = ref
        ref = update(chunks, ref.id, changes)
        for name, entry in changes.items():
            if entry is None:
                model.pop(name, None)
            else:
                model[name] = entry
        assert ref == update(MemoryChunks(), b"", model)
        trees = Trees(chunks)
        assert list(trees.entries(ref.id)) == [model[name] for name in sorted(model)]
        assert (ref.total_files, ref.total_bytes) == (
            len(model),
            sum(entry.size_bytes for entry in model.values()),
        )
        expected = [
            (before.get(name), model.get(name))
            for name in sorted(before.keys() | model.keys())
            if before.get(name) != model.get(name)
        ]
        assert list(trees.diff(old.id, ref.id)) == expected
        for name in list(changes)[:3]:
            assert trees.entry(ref.id, name) == model.get(name)


@given(st.sets(st.integers(0, 2**64 - 1), max_size=200))
def test_link_tables_hold_any_inode_number(numbers: set[int]) -> None:
    """A link table gives back every inode number in numeric order, NUL and slash bytes included."""
    chunks = MemoryChunks()
    entries = {n.to_bytes(8, "big"): file(n.to_bytes(8, "big"), n % 9) for n in numbers}
    ref = update(chunks, b"", entries, links=True)
    trees = Trees(chunks)
    assert [int.from_bytes(entry.name, "big") for entry in trees.links(ref.id)] == sorted(numbers)
    for number in list(numbers)[:5]:
        assert trees.link(ref.id, number) == entries[number.to_bytes(8, "big")]


def test_few_changes_in_a_large_directory_touch_few_nodes() -> None:
    """Changing 10 of 100,000 entries reads and writes some tens of nodes, not thousands."""
    chunks = MemoryChunks()
    entries = {b"f%06d" % number: file(b"f%06d" % number) for number in range(100_000)}
    base = update(chunks, b"", entries)
    chunks.reads = chunks.writes = 0
    update(
        chunks,
        base.id,
        {b"f%06d" % number: file(b"f%06d" % number, 2) for number in range(0, 100_000, 10_000)},
    )
    assert chunks.writes <= 10 * 4
    assert chunks.reads <= 10 * 6


@pytest.mark.parametrize("name", [b"", b".", b"..", b"a/b", b"a\0b"])
def test_impossible_names_are_refused_and_found(name: bytes) -> None:
    """A name that no file can have is refused when stored and found when decoded, and never restored."""
    chunks = MemoryChunks()
    with pytest.raises(ValueError, match="file name"):
        update(chunks, b"", {name: file(name)})
    from ciuic.repository.tree_format import encode_leaf

    forged = chunks.put(encode_leaf([file(name)], links=False))
    with pytest.raises(DamagedTree):
        list(Trees(chunks).entries(forged))


@given(st.binary(max_size=400))
def test_rubbish_is_not_a_tree_and_not_a_map(data: bytes) -> None:
    """Arbitrary bytes in the place of a node give DamagedTree, no other error."""
    chunks = MemoryChunks()
    for body in (data, b"CTd\0" + data, b"CTd\1" + data, b"CBM\1" + data):
        id_ = chunks.put(body)
        # A forged reference to a chunk that is not there raises KeyError.
        with suppress(DamagedTree, KeyError):
            list(Trees(chunks).entries(id_))
        with suppress(DamagedTree):
            list(BlockMaps(chunks).ids(id_, 1, 10))


def test_name_levels_thin_out_by_64() -> None:
    """Name levels thin out by 64: a name in 64 ends a leaf, so the mean node has about 64 entries."""
    ends = sum(name_level(b"%d" % number, SEED) > 0 for number in range(64 * 400))
    assert 300 < ends < 500


# Block maps

_block_ids = st.integers(0, 40).map(lambda n: HOLE if n == 0 else ChunkId(n.to_bytes(16, "big")))
_sizes = st.one_of(
    st.integers(0, 3), st.integers(1000, 1100), st.integers(2**20 - 2, 2**20 + 2), st.just(10**9)
)


@st.composite
def _map_steps(draw: st.DrawFn) -> list[tuple[int, dict[int, ChunkId]]]:
    steps = []
    for n_blocks in draw(st.lists(_sizes, min_size=1, max_size=5)):
        near = st.one_of(st.integers(0, 2000), st.integers(2**20 - 4, 2**20 + 4), st.just(n_blocks - 1))
        changes = draw(st.dictionaries(near, _block_ids, max_size=20)) if n_blocks else {}
        steps.append((n_blocks, {at: id_ for at, id_ in changes.items() if 0 <= at < n_blocks}))
    return steps


@given(_map_steps(), st.integers(0, 2**20), st.integers(0, 2**20))
def test_block_maps_equal_a_dictionary(
    steps: list[tuple[int, dict[int, ChunkId]]], start: int, length: int
) -> None:
    """A map that grows, shrinks and changes has the blocks of a dictionary, and the id of a fresh map."""
    chunks = MemoryChunks()
    maps = BlockMaps(chunks)
    model: dict[int, ChunkId] = {}
    ref = MapRef(b"", 0)
    for n_blocks, changes in steps:
        ref = update_block_map(maps, chunks.put, ref, n_blocks, changes)
        model.update(changes)
        model = {at: id_ for at, id_ in model.items() if at < n_blocks and id_ != HOLE}
        assert list(maps.ids(ref.content, ref.map_height, n_blocks)) == sorted(model.items())
        fresh = MemoryChunks()
        assert ref == update_block_map(BlockMaps(fresh), fresh.put, MapRef(b"", 0), n_blocks, model)
        part = [(at, id_) for at, id_ in sorted(model.items()) if start <= at < start + length]
        assert list(maps.ids(ref.content, ref.map_height, n_blocks, start, start + length)) == part
        assert set(maps.nodes(ref.content, ref.map_height)) <= chunks.stored.keys()


def test_one_block_of_a_tebibyte_rewrites_kilobytes() -> None:
    """Changing a block in a map of 4 Mi blocks (1 TiB of 256 KiB) writes a node a level: under 50 KiB."""
    chunks = MemoryChunks()
    n_blocks = 4 << 20
    base = MapRef(b"", 0)
    for first in range(0, n_blocks, n_blocks // 4):
        ids = {first + at: ChunkId((first + at + 1).to_bytes(16, "big")) for at in range(2048)}
        base = update_block_map(BlockMaps(chunks), chunks.put, base, n_blocks, ids)
    before = sum(map(len, chunks.stored.values()))
    update_block_map(BlockMaps(chunks), chunks.put, base, n_blocks, {5: ChunkId(bytes([9] * 16))})
    assert sum(map(len, chunks.stored.values())) - before < 50_000


def test_a_sparse_file_costs_nothing() -> None:
    """A file of 100 GiB that is one hole has no map at all."""
    chunks = MemoryChunks()
    assert update_block_map(BlockMaps(chunks), chunks.put, MapRef(b"", 0), 409_600, {}) == MapRef(b"", 0)
    assert not chunks.stored
