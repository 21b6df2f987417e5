"""Size of packs: small while little is at stake, and by the rate."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.remote.uploader import FIRST_PACK_BYTES, LARGEST_PACK_BYTES, PackSize


@given(seconds=st.lists(st.floats(0.001, 60), max_size=200))
def test_a_pack_is_a_small_part_of_what_was_stored(seconds: list[float]) -> None:
    """A pack is at most a sixteenth of what is stored, or takes a quarter of a second: a kill loses no more."""
    size = PackSize()
    stored = 0
    for one in seconds:
        quarter = size.bytes_per_second / 4
        assert FIRST_PACK_BYTES <= size.size_bytes <= max(FIRST_PACK_BYTES, stored // 16, quarter)
        stored += size.size_bytes
        size.stored(size.size_bytes, one)


@pytest.mark.parametrize(
    ("bytes_per_second", "expected"),
    [(100 << 20, LARGEST_PACK_BYTES), (256 << 10, 2 << 20), (1 << 10, FIRST_PACK_BYTES)],
)
def test_a_pack_takes_about_eight_seconds(bytes_per_second: int, expected: int) -> None:
    """After much was stored at a steady rate of one connection, a pack takes eight seconds, within the limits."""
    size = PackSize()
    for _ in range(400):
        size.stored(size.size_bytes, size.size_bytes / bytes_per_second)
    assert size.size_bytes == pytest.approx(expected, rel=0.01)
