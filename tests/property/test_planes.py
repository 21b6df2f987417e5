"""Byte planes and differences: whatever goes in comes out, with NumPy and without, from the same stored bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.repository import lanes, planes
from ciuic.training import twins

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


_ODD = (
    0,
    1 << 31,
    0x7F800000,
    0xFF800000,
    0x7F800001,
    0xFFFFFFFF,
    1,
    0x7FFFFF,
    0x80000001,
    0x33000000,
    0x477FF000,
    0x3F808000,
)
"""Zeros, infinities, not numbers, subnormal ones, what is rounded to nothing, to infinity, and from the middle between two."""


def _beside(data: bytes, base: bytes, widening: planes.Widening) -> bytes:
    return planes.encode_beside(data, planes.wide_base(base, widening, len(data)), widening)


def _rounded(bits: int, kind: int) -> int:
    """To the nearest, of two the even one, of whatever: also infinity, what is no number, and what is nearly nothing."""
    return twins._as_bfloat16(bits) if kind == lanes.BFLOAT16 else twins._as_float16(bits)


@given(
    kind=st.sampled_from(lanes.HALVES),
    bits=st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(_ODD), max_size=40),
    changed=st.sets(st.integers(0, 39)),
    start=st.integers(-5, 45),
    rest=st.binary(max_size=3),
    more=st.binary(max_size=9),
)
def test_any_masters_come_back_from_their_twins(
    kind: int, bits: list[int], changed: set[int], start: int, rest: bytes, more: bytes
) -> None:
    """Whatever they are, whether all or some or none of them were rounded so, and wherever the twin begins and ends."""
    twin = [_rounded(one, kind) ^ (at in changed) * 0x5555 for at, one in enumerate(bits)]
    base = struct.pack(f"<{len(twin)}H", *twin) + more
    data = struct.pack(f"<{len(bits)}I", *bits) + rest
    widening = planes.Widening(kind, start)
    stored = _beside(data, base, widening)
    assert planes.decode(stored, len(data), base) == data
    with _without_numpy():
        assert _beside(data, base, widening) == stored
        assert planes.decode(stored, len(data), base) == data


@given(
    data=st.binary(max_size=100),
    base=st.binary(max_size=60),
    kind=st.sampled_from(lanes.HALVES),
    start=st.integers(-(2**31), 2**31 - 1),
)
def test_any_bytes_come_back_from_any_twin(data: bytes, base: bytes, kind: int, start: int) -> None:
    """Of whatever lengths."""
    stored = _beside(data, base, planes.Widening(kind, start))
    assert planes.decode(stored, len(data), base) == data


@given(stored=st.binary(max_size=80), size_bytes=st.integers(0, 64), kind=st.integers(0, 255))
def test_rubbish_beside_a_twin_is_refused_or_gives_content_of_that_length(
    stored: bytes, size_bytes: int, kind: int
) -> None:
    """Also without a base, and with one of another length."""
    for base in (None, b"", bytes(17), bytes(size_bytes)):
        for width in (2, 4):
            try:
                content = planes.decode(bytes([width, kind, 0, 0]) + stored, size_bytes, base)
            except ValueError:
                continue
            assert len(content) == size_bytes
            assert kind == 0 or (width == 4 and base is not None)


def test_every_half_is_the_float_that_it_is() -> None:
    """All of them, as the standard library and NumPy have them; what is no number stays as it is, but for its width."""
    wide = lanes.widened(struct.pack("<65536H", *range(1 << 16)), lanes.FLOAT16, 0, 1 << 16)
    for half, (bits,) in enumerate(struct.iter_unpack("<I", wide)):
        if half >> 10 & 31 == 31:
            assert bits == half >> 15 << 31 | 0xFF << 23 | (half & 1023) << 13
        else:
            assert struct.pack("<I", bits) == struct.pack("<f", *struct.unpack("<e", struct.pack("<H", half)))


def test_of_masters_beside_their_twin_half_is_left() -> None:
    """What rounding took: 16 bits of each, and hardly more."""
    drawn = random.Random(1)
    masters = struct.pack("<16384f", *(drawn.gauss(0, 0.02) for _ in range(16384)))
    twin = struct.pack(
        "<16384H", *(_rounded(one, lanes.BFLOAT16) for (one,) in struct.iter_unpack("<I", masters))
    )
    assert len(_beside(masters, twin, planes.Widening(lanes.BFLOAT16, 0))) < 0.502 * len(masters)


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
    drawn = random.Random(1)
    data = struct.pack("<4096f", *(drawn.gauss(0, 0.02) for _ in range(4096)))
    moved = struct.pack(
        "<4096f", *(value * (1 + drawn.gauss(0, 1e-4)) for value in struct.unpack("<4096f", data))
    )
    assert len(planes.encode(data, 4)) < 0.88 * len(data)
    assert len(planes.encode(moved, 4, data)) < 0.65 * len(data)
