"""Merging of ranges."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote.objects.model import MAX_MERGED_BYTES, MERGE_GAP_BYTES, merge_ranges, slices_of

_RANGES = st.lists(st.tuples(st.integers(0, 1 << 26), st.integers(0, 1 << 25)), max_size=12)


@given(_RANGES)
def test_merged_ranges_cover_what_is_wanted_and_little_more(ranges: list[tuple[int, int]]) -> None:
    """Each range lies in one merged read; reads ascend, are not merged beyond the limit, and skip wide gaps."""
    merged = merge_ranges(ranges)
    wanted = [(at, length) for at, length in ranges if length]
    for at, length in wanted:
        assert any(start <= at and at + length <= start + size for start, size in merged)
    assert merged == sorted(merged)
    for start, size in merged:
        assert size <= MAX_MERGED_BYTES or (start, size) in wanted
        inside = sorted(
            (at, at + length) for at, length in wanted if start <= at and at + length <= start + size
        )
        reached = start
        for begin, end in inside:
            assert begin <= reached + MERGE_GAP_BYTES
            reached = max(reached, end)
        assert reached == start + size


@given(st.binary(max_size=2000), st.lists(st.tuples(st.integers(0, 2500), st.integers(0, 900)), max_size=8))
def test_slices_are_those_of_the_object(data: bytes, ranges: list[tuple[int, int]]) -> None:
    """The slices of merged reads are those of the object, also behind its end."""
    merged = merge_ranges(ranges)
    bodies = [memoryview(data)[at : at + length] for at, length in merged]
    assert [bytes(part) for part in slices_of(merged, bodies, ranges)] == [
        data[at : at + length] for at, length in ranges
    ]


def test_a_negative_range_is_refused() -> None:
    """A range before the object is a mistake of the caller."""
    with pytest.raises(ValueError, match="not a range"):
        merge_ranges([(-1, 5)])
