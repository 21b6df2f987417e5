"""Tests of sets of changed blocks: runs that are missing, found without visiting each block, and folded epochs."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.tracking.changes import BlockSet, ChangeSet, InodeChange

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
