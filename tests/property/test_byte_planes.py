"""Tests of byte planes and differences: they round-trip, with and without NumPy, from the same bytes."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ciuic.repository import byte_planes, byte_planes_math
from ciuic.training.writer import codecs

_WIDTHS = st.sampled_from(byte_planes_math.WIDTHS)
_WHOLE = st.integers(0, 12).flatmap(
    lambda count: st.tuples(*[st.binary(min_size=8 * count, max_size=8 * count)] * 2)
)


@contextmanager
def _without_numpy() -> Iterator[None]:
    real = byte_planes_math._numpy
    byte_planes_math._numpy = lambda: None  # type: ignore[assignment]
    try:
        yield
    finally:
        byte_planes_math._numpy = real


@given(data=st.binary(max_size=100), width=_WIDTHS)
def test_any_bytes_come_back_from_planes(data: bytes, width: int) -> None:
    """Bytes of any length, a multiple of the width or not, come back from planes."""
    assert byte_planes.decode(byte_planes.encode(data, width), len(data)) == data


@given(
    width=_WIDTHS,
    chain=st.integers(0, 40).flatmap(
        lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=2, max_size=5)
    ),
)
def test_any_chain_of_differences_comes_back(width: int, chain: list[bytes]) -> None:
    """Chunks stored each as the difference from the one before come back."""
    stored = [byte_planes.encode(data, width, base) for base, data in pairwise(chain)]
    content = chain[0]
    for packed, data in zip(stored, chain[1:], strict=True):
        content = byte_planes.decode(packed, len(data), content)
        assert content == data


_LINK = st.tuples(_WIDTHS, st.sampled_from((0, *byte_planes_math.HALVES)), st.integers(-5, 20))
"""How a chunk is stored: the width of its numbers, and where the kind is not 0, the twin it is relative to."""


@given(
    links=st.lists(_LINK, min_size=1, max_size=5),
    contents=st.integers(0, 40).flatmap(
        lambda n: st.lists(st.binary(min_size=n, max_size=n), min_size=6, max_size=6)
    ),
    has_base=st.booleans(),
)
def test_a_chain_is_decoded_as_its_chunks_are_one_by_one(
    links: list[tuple[int, int, int]], contents: list[bytes], has_base: bool
) -> None:
    """Chains of any widths, relative to twins or not, come out as when each chunk is decoded by itself."""
    base = contents[0] if has_base else None
    before, chain = base, []
    for (width, kind, start), data in zip(links, contents[1:], strict=False):
        if kind and before is not None:
            chain.append(_encoded(data, before, byte_planes.Widening(kind, start)))
        else:
            chain.append(byte_planes.encode(data, width, before))
        before = data
    for decode_in in (nullcontext, _without_numpy):
        with decode_in():
            room = memoryview(bytearray(len(contents[0])))
            assert byte_planes.decode_chain(chain, len(room), base, room) is room
            assert room == before


@given(pair=_WHOLE, width=_WIDTHS)
def test_the_bytes_are_the_same_without_numpy(pair: tuple[bytes, bytes], width: int) -> None:
    """Encoding with and without NumPy gives the same bytes, so such machines can share a repository."""
    pytest.importorskip("numpy", reason="there is nothing to compare with")
    data, base = pair

    def all_of() -> tuple[Any, ...]:
        planes = [bytes(plane) for plane in byte_planes_math.planes_of(data, width)]
        changes = [bytes(plane) for plane in byte_planes_math.planes_of_differences(data, base, width)]
        turned, undone = bytearray(len(data)), bytearray(len(data))
        byte_planes_math.join(planes, width, memoryview(turned))
        joined = bytes(turned)
        byte_planes_math.turn_back(memoryview(turned), width)
        byte_planes_math.turn(base, width, memoryview(undone))
        byte_planes_math.add_differences(changes, width, memoryview(undone))
        byte_planes_math.turn_back(memoryview(undone), width)
        return planes, changes, joined, turned, undone

    with_it = all_of()
    with _without_numpy():
        assert all_of() == with_it
    assert with_it[3] == with_it[4] == data


@given(
    width=_WIDTHS,
    pair=st.integers(0, 40).flatmap(lambda n: st.tuples(*[st.binary(min_size=n, max_size=n)] * 2)),
    has_base=st.booleans(),
    around=st.binary(min_size=4, max_size=4),
)
def test_content_is_decoded_into_given_memory_and_nowhere_else(
    width: int, pair: tuple[bytes, bytes], has_base: bool, around: bytes
) -> None:
    """Content is decoded into the caller's memory, at any alignment, and no byte beside it changes."""
    data, base = pair
    stored = byte_planes.encode(data, width, base if has_base else None)
    for decode_in in (nullcontext, _without_numpy):
        room = bytearray(around[:3] + bytes(len(data)) + around[3:])
        into = memoryview(room)[3 : 3 + len(data)]
        with decode_in():
            assert byte_planes.decode(stored, len(data), base if has_base else None, into) is into
        assert room == around[:3] + data + around[3:]


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
"""Zeros, infinities, NaNs, subnormals, values that round to zero or infinity, and ties."""


def _encoded(data: bytes, base: bytes, widening: byte_planes.Widening) -> bytes:
    return byte_planes.encode_beside(data, byte_planes.wide_base(base, widening, len(data)), widening)


def _rounded(bits: int, kind: int) -> int:
    """Round to nearest even, also infinities, NaNs and subnormals."""
    return codecs._as_bfloat16(bits) if kind == byte_planes_math.BFLOAT16 else codecs._as_float16(bits)


@given(
    kind=st.sampled_from(byte_planes_math.HALVES),
    bits=st.lists(st.integers(0, 2**32 - 1) | st.sampled_from(_ODD), max_size=40),
    changed=st.sets(st.integers(0, 39)),
    start=st.integers(-5, 45),
    rest=st.binary(max_size=3),
    more=st.binary(max_size=9),
)
def test_any_masters_come_back_from_their_twins(
    kind: int, bits: list[int], changed: set[int], start: int, rest: bytes, more: bytes
) -> None:
    """Masters come back from their twin, however many were rounded and wherever the twin begins and ends."""
    twin = [_rounded(one, kind) ^ (at in changed) * 0x5555 for at, one in enumerate(bits)]
    base = struct.pack(f"<{len(twin)}H", *twin) + more
    data = struct.pack(f"<{len(bits)}I", *bits) + rest
    widening = byte_planes.Widening(kind, start)
    stored = _encoded(data, base, widening)
    assert byte_planes.decode(stored, len(data), base) == data
    with _without_numpy():
        assert _encoded(data, base, widening) == stored
        assert byte_planes.decode(stored, len(data), base) == data


@given(
    data=st.binary(max_size=100),
    base=st.binary(max_size=60),
    kind=st.sampled_from(byte_planes_math.HALVES),
    start=st.integers(-(2**31), 2**31 - 1),
)
def test_any_bytes_come_back_from_any_twin(data: bytes, base: bytes, kind: int, start: int) -> None:
    """Bytes of any length come back when stored relative to a twin of any length."""
    stored = _encoded(data, base, byte_planes.Widening(kind, start))
    assert byte_planes.decode(stored, len(data), base) == data


@given(stored=st.binary(max_size=80), size_bytes=st.integers(0, 64), kind=st.integers(0, 255))
def test_garbage_relative_to_a_twin_is_refused_or_has_the_length(
    stored: bytes, size_bytes: int, kind: int
) -> None:
    """Rubbish stored relative to a twin, or to none, is refused or gives content of the requested length."""
    for base in (None, b"", bytes(17), bytes(size_bytes)):
        for width in (2, 4):
            try:
                content = byte_planes.decode(bytes([width, kind, 0, 0]) + stored, size_bytes, base)
            except ValueError:
                continue
            assert len(content) == size_bytes
            assert kind == 0 or (width == 4 and base is not None)


def test_every_half_is_the_float_that_it_is() -> None:
    """All half-precision values widen as in the standard library and NumPy; a NaN keeps its payload."""
    wide = byte_planes_math.widened(
        struct.pack("<65536H", *range(1 << 16)), byte_planes_math.FLOAT16, 0, 1 << 16
    )
    for half, (bits,) in enumerate(struct.iter_unpack("<I", wide)):
        if half >> 10 & 31 == 31:
            assert bits == half >> 15 << 31 | 0xFF << 23 | (half & 1023) << 13
        else:
            assert struct.pack("<I", bits) == struct.pack("<f", *struct.unpack("<e", struct.pack("<H", half)))


def test_masters_relative_to_their_twin_take_half_the_size() -> None:
    """Masters stored relative to their twin need hardly more than the 16 bits that rounding took."""
    drawn = random.Random(1)
    masters = struct.pack("<16384f", *(drawn.gauss(0, 0.02) for _ in range(16384)))
    twin = struct.pack(
        "<16384H", *(_rounded(one, byte_planes_math.BFLOAT16) for (one,) in struct.iter_unpack("<I", masters))
    )
    assert len(_encoded(masters, twin, byte_planes.Widening(byte_planes_math.BFLOAT16, 0))) < 0.502 * len(
        masters
    )


@given(stored=st.binary(max_size=80), size_bytes=st.integers(0, 64), width=_WIDTHS)
def test_rubbish_is_refused_or_has_the_requested_length(stored: bytes, size_bytes: int, width: int) -> None:
    """Rubbish is refused with the documented error or gives content of exactly the requested length."""
    for head in (b"", bytes([width])):
        try:
            assert len(byte_planes.decode(head + stored, size_bytes)) == size_bytes
        except ValueError:
            continue


def test_exponents_are_compressed_and_mantissas_are_not() -> None:
    """Planes let repeating exponents be compressed while random mantissas are stored as they are."""
    drawn = random.Random(1)
    data = struct.pack("<4096f", *(drawn.gauss(0, 0.02) for _ in range(4096)))
    moved = struct.pack(
        "<4096f", *(value * (1 + drawn.gauss(0, 1e-4)) for value in struct.unpack("<4096f", data))
    )
    assert len(byte_planes.encode(data, 4)) < 0.88 * len(data)
    assert len(byte_planes.encode(moved, 4, data)) < 0.65 * len(data)
