"""Byte planes and differences: whatever goes in comes out, with NumPy and without, from the same stored bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.repository import lanes, planes

_WIDTHS = st.sampled_from(lanes.WIDTHS)
_WHOLE = st.integers(0, 12).flatmap(
    lambda count: st.tuples(*[st.binary(min_size=8 * count, max_size=8 * count)] * 2)
)


@contextmanager
def _without_numpy() -> Iterator[None]:
    real = lanes._numpy
    lanes._numpy = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        lanes._numpy = real


@given(data=st.binary(max_size=100), width=_WIDTHS)
def test_any_bytes_come_back_from_planes(data: bytes, width: int) -> None:
    """Of whatever length, a multiple of the width or not."""
    assert planes.decode(planes.encode(data, width), len(data)) == data


@given(
    width=_WIDTHS,
    chain=st.integers(0, 40).flatmap(
        lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=2, max_size=5)
    ),
)
def test_any_chain_of_differences_comes_back(width: int, chain: list[bytes]) -> None:
    """Each is stored as the difference from the one before, which is read first."""
    stored = [planes.encode(data, width, base) for base, data in pairwise(chain)]
    content = chain[0]
    for packed, data in zip(stored, chain[1:], strict=True):
        content = planes.decode(packed, len(data), content)
        assert content == data


@given(pair=_WHOLE, width=_WIDTHS)
def test_the_bytes_are_the_same_without_numpy(pair: tuple[bytes, bytes], width: int) -> None:
    """So that who has it and who has not share a repository."""
    pytest.importorskip("numpy", reason="there is nothing to compare with")
    data, base = pair

    def all_of() -> tuple[Any, ...]:
        changes = lanes.differences(data, base, width)
        turned = lanes.turned(data, width)
        back, undone = bytearray(turned), bytearray(changes)
        lanes.turn_back(back, width)
        lanes.undo(undone, base, width)
        together = lanes.joined([turned[at::width] for at in range(width)], width)
        return turned, back, changes, undone, together

    with_it = all_of()
    with _without_numpy():
        assert all_of() == with_it
    assert with_it[1] == with_it[3] == data
    assert with_it[4] == with_it[0]


@given(stored=st.binary(max_size=80), size_bytes=st.integers(0, 64), width=_WIDTHS)
def test_rubbish_is_refused_or_gives_content_of_the_length_that_was_asked_for(
    stored: bytes, size_bytes: int, width: int
) -> None:
    """Never another error, and never more than was asked for."""
    for head in (b"", bytes([width])):
        try:
            assert len(planes.decode(head + stored, size_bytes)) == size_bytes
        except ValueError:
            continue


def test_exponents_are_compressed_and_mantissas_are_not() -> None:
    """Which is what planes are for: random mantissas below an exponent that repeats."""
    import random
    import struct

    drawn = random.Random(1)
    data = struct.pack("<4096f", *(drawn.gauss(0, 0.02) for _ in range(4096)))
    moved = struct.pack(
        "<4096f", *(value * (1 + drawn.gauss(0, 1e-4)) for value in struct.unpack("<4096f", data))
    )
    assert len(planes.encode(data, 4)) < 0.88 * len(data)
    assert len(planes.encode(moved, 4, data)) < 0.65 * len(data)
