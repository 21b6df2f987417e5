"""Tests of compact sets of chunks and of changed blocks: nothing is forgotten, and missing runs are found."""

from __future__ import annotations

import itertools
import random

from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.tracking.changes import BlockSet, ChangeSet, InodeChange
from ciuic.maintenance.chunkset import ChunkSet
from ciuic.types import ChunkId


@given(
    st.lists(st.binary(min_size=16, max_size=16), max_size=200), st.lists(st.binary(min_size=16, max_size=16))
)
def test_a_chunkset_holds_exactly_what_was_added(added: list[bytes], lookups: list[bytes]) -> None:
    """The set holds exactly what was added, up to ids that share their first eight bytes."""
    chunks = ChunkSet()
    for chunk in added:
        chunks.add(ChunkId(chunk))
    starts = {chunk[:8] for chunk in added}
    assert all(chunk in chunks for chunk in added)
    zero_and_one = {bytes(8), (1).to_bytes(8, "little")}
    for chunk in lookups:
        shared = chunk[:8] in starts or (chunk[:8] in zero_and_one and starts & zero_and_one)
        assert (chunk in chunks) == bool(shared)


def test_growth_keeps_everything() -> None:
    """Through many growths every id stays, none is invented, and memory stays near 16 bytes an id."""
    source = random.Random(1)
    ids = [ChunkId(source.randbytes(16)) for _ in range(50_000)]
    chunks = ChunkSet()
    for chunk in ids:
        chunks.add(chunk)
        chunks.add(chunk)
    assert len(chunks) == len(ids)
    assert all(chunk in chunks for chunk in ids)
    assert not any(source.randbytes(16) in chunks for _ in range(50_000))
    assert len(chunks._slots) * 8 <= len(ids) * 16


def test_ids_at_the_end_of_the_table_wrap_round() -> None:
    """Ids that hash to the end of the table wrap round and are still found."""
    chunks = ChunkSet()
    ids = [ChunkId(((1 << 64) - 1 - n).to_bytes(8, "little") + bytes(8)) for n in range(300)]
    for chunk in ids:
        chunks.add(chunk)
    assert all(chunk in chunks for chunk in ids)
    assert ChunkId(bytes(16)) not in chunks


RANGES = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 150)), max_size=8)


@given(ranges=RANGES, first=st.integers(0, 500), count=st.integers(0, 500))
def test_missing_runs_are_maximal_and_exactly_the_missing_blocks(
    ranges: list[tuple[int, int]], first: int, count: int
) -> None:
    """Missing runs are ordered, apart from each other, and together all blocks of the range not in it."""
    held = BlockSet()
    for start, length in ranges:
        held.add_range(start, length)
    runs = held.missing_runs(first, count)
    assert [block for start, length in runs for block in range(start, start + length)] == [
        block for block in range(first, first + count) if block not in held
    ]
    for (start, length), (following, _) in itertools.pairwise(runs):
        assert length > 0
        assert following > start + length


def test_a_file_that_one_of_two_folded_epochs_changed_wholly_is_wholly_changed() -> None:
    """A file that was rewritten in an epoch that is given up, and of which a block changed since, is read as a whole."""
    older, later = ChangeSet(since=0, complete=True), ChangeSet(since=1, complete=True)
    older.changes[5], later.changes[5] = InodeChange(), InodeChange()
    older.changes[5].whole, later.changes[5].blocks = True, BlockSet()
    later.fold_older(older)
    assert (later.changes[5].whole, later.changes[5].blocks) == (True, None)


def test_a_range_of_exabytes_is_looked_at_at_once() -> None:
    """Everything beyond the last block held is returned as one run, however long, without a search."""
    held = BlockSet()
    held.add_range(3, 5)
    assert held.missing_runs(0, 1 << 45) == [(0, 3), (8, (1 << 45) - 8)]
