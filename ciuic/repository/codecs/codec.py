"""Codecs chosen by a caller that knows its content, run in processor time that no other process needs.

Guarantees: the same content comes back whatever is chosen; content that does not become smaller is stored as
it is. While the `Pace` is "patient", codecs run in threads of the scheduling class that only gets idle
processor time (SCHED_IDLE): they take next to nothing from a training that leaves a processor idle. The
caller that waits for them decides when that ends (docs/decisions/idle-codecs.md).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.repository.codecs import byte_planes
from ciuic.repository.codecs.byte_planes import Widening
from ciuic.repository.format import pack_format as pf
from ciuic.repository.identity import Bytes
from ciuic.types import ChunkId

Pace = Literal["patient", "soon", "now"]
"""When codecs run: "patient" in idle processor time alone, "soon" with all processors of this process, "now"
not at all for content that is not coded yet."""

MAX_WRITTEN_BASE_DEPTH: Final = 4
"""Longest chain of bases that a writer gives a chunk: each base is read with the chunk."""
# Samples that "best" tries: 24 KiB of a block of 256 KiB.
_SAMPLE_BYTES: Final = 8 << 10
_SAMPLES: Final = 3
# Largest share of its size at which content is worth coding: planes cost time at every read.
_MAX_CODED_SHARE: Final = 0.95
# Share by which a more expensive codec must be smaller than a cheaper one.
_MIN_GAIN_SHARE: Final = 0.02


Kind = Literal["raw", "zstd", "planes", "difference", "twin"]
"""Form in which content is stored."""
_FLAGS: Final[dict[Kind, int]] = {
    "raw": 0,
    "zstd": pf.FLAG_ZSTD,
    "planes": pf.FLAG_PLANES,
    "difference": pf.FLAG_PLANES | pf.FLAG_DIFFERENCE,
    "twin": pf.FLAG_PLANES | pf.FLAG_DIFFERENCE,
}


class TwinBase(NamedTuple):
    """Chunk of 2-byte numbers that the content's 4-byte numbers were rounded to."""

    base: ChunkId
    widening: Widening
    read: Callable[[], Bytes | None] = lambda: None
    """Return the content, like `Codec.read_base`."""


class Codec(NamedTuple):
    """Instruction how to store content; content that does not become smaller is stored as it is."""

    kind: Kind | Literal["best"]
    """Kind to store; "best" is whichever leaves least in samples of the content. A difference whose base is
    missing becomes one from the twin, and that one planes if the twin is missing."""
    width: int = 0
    """Bytes of a number, for planes and differences: 2, 4 or 8."""
    base: ChunkId | None = None
    """Base of a difference: a chunk as long as the content."""
    read_base: Callable[[], Bytes | None] = lambda: None
    """Return the checked content of the base; None if it cannot be read. Called in the thread that does the
    work."""
    told: Callable[[Kind], None] = lambda kind: None
    """Called with how the content was stored, in that thread."""
    twin: TwinBase | None = None
    """Twin, for a width of 4."""


class Coded(NamedTuple):
    """Coded content."""

    stored: Bytes
    kind: Kind
    base: ChunkId | Literal[b""] = b""

    @property
    def flags(self) -> int:
        """Flags of the record."""
        return _FLAGS[self.kind]


def code(data: Bytes, codec: Codec) -> Coded:
    """Return the content coded with this codec."""
    coded = _CODERS[codec.kind](data, codec)
    # Not smaller: as it is, the content is cheaper to read.
    if len(coded.stored) >= len(data):
        coded = Coded(data, "raw")
    codec.told(coded.kind)
    return coded


def _raw(data: Bytes, codec: Codec) -> Coded:
    return Coded(data, "raw")


def _zstd(data: Bytes, codec: Codec) -> Coded:
    return Coded(zstandard.ZstdCompressor(level=1).compress(data), "zstd")


def _planes(data: Bytes, codec: Codec) -> Coded:
    return Coded(byte_planes.encode(data, codec.width), "planes")


def _difference(data: Bytes, codec: Codec, base: Bytes | None = None) -> Coded:
    base = base or codec.read_base()
    if base is None or codec.base is None:
        return _twin(data, codec)
    return Coded(byte_planes.encode(data, codec.width, base), "difference", codec.base)


def _twin(data: Bytes, codec: Codec, base: Bytes | None = None) -> Coded:
    base = base or (codec.twin and codec.twin.read())
    if base is None or codec.twin is None:
        return _planes(data, codec)
    widening = codec.twin.widening
    stored = byte_planes.encode_beside(data, byte_planes.wide_base(base, widening, len(data)), widening)
    # Decoding takes less time than encoding, so each result is checked.
    if byte_planes.decode(stored, len(data), base) != data:
        return _planes(data, codec)
    return Coded(stored, "twin", codec.twin.base)


def _best(data: Bytes, codec: Codec) -> Coded:
    sample = _sample(data)
    if len(sample) < codec.width:
        return Coded(data, "raw")
    best: Callable[[Bytes, Codec], Coded]
    best, plain = _raw, len(zstandard.ZstdCompressor(level=1).compress(sample)) / len(sample)
    share = 1.0
    # From the cheapest to the most expensive: each must beat the best so far by a margin.
    if plain < _MAX_CODED_SHARE:
        best, share = _zstd, plain
    by_planes = len(byte_planes.encode(sample, codec.width)) / len(sample)
    if by_planes < min(_MAX_CODED_SHARE, share - _MIN_GAIN_SHARE):
        best, share = _planes, by_planes
    twin = codec.twin and codec.twin.read()
    if twin is not None and codec.twin is not None:
        wide = byte_planes.wide_base(twin, codec.twin.widening, len(data))
        beside = byte_planes.encode_beside(sample, _sample(wide), codec.twin.widening)
        by_twin = len(beside) / len(sample)
        if by_twin < min(_MAX_CODED_SHARE, share - _MIN_GAIN_SHARE):
            best, share = partial(_twin, base=twin), by_twin
    base = codec.read_base()
    if base is not None:
        by_difference = len(byte_planes.encode(sample, codec.width, _sample(base))) / len(sample)
        if by_difference < min(_MAX_CODED_SHARE, share - _MIN_GAIN_SHARE):
            return _difference(data, codec, base)
    return best(data, codec)


_CODERS: Final[dict[str, Callable[[Bytes, Codec], Coded]]] = {
    "raw": _raw,
    "zstd": _zstd,
    "planes": _planes,
    "difference": _difference,
    "twin": _twin,
    "best": _best,
}


def _sample(data: Bytes) -> Bytes:
    """Return three samples, each of whole numbers; all of the data where that is not much more."""
    size_bytes = len(data)
    if size_bytes <= 2 * _SAMPLES * _SAMPLE_BYTES:
        return data
    view = memoryview(data)
    # Multiples of 8, so that samples begin with a whole number of every width.
    starts = [size_bytes * part // (_SAMPLES + 1) // 8 * 8 for part in range(1, _SAMPLES + 1)]
    return b"".join(view[start : start + _SAMPLE_BYTES] for start in starts)


def threads(number: int, *, patient: bool) -> ThreadPoolExecutor:
    """Return a pool of threads to pack in."""
    # Patient threads have a pool of their own: a thread cannot leave the idle class without privileges.
    begin = _enter_idle_class if patient else None
    return ThreadPoolExecutor(number, "ciuic-pack", initializer=begin)


def _enter_idle_class() -> None:
    """Move this thread into the idle class, for ever: without privileges there is no way back."""
    # Where a filter of system calls refuses it, the threads keep the process's priority, and code all the same.
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
