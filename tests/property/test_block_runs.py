"""Tests of runs of blocks missing in a set, which are found without visiting each block."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from ciuic.fuse_layer.tracking.changes import BlockSet

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


def test_a_range_of_exabytes_is_looked_at_at_once() -> None:
    """Everything beyond the last block held is returned as one run, however long, without a search."""
    held = BlockSet()
    held.add_range(3, 5)
    assert held.missing_runs(0, 1 << 45) == [(0, 3), (8, (1 << 45) - 8)]
