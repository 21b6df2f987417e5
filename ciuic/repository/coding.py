"""How somebody who knows what content is wants it stored, and that in time that nobody else needs.

Guarantees: the same content comes back whatever is chosen; what does not become smaller is stored as it is. While the `Pace` is
"patient" codecs run in threads of the scheduling class that gets what no other process wants of a processor (SCHED_IDLE), so that they take
none of it from a training. Who waits for them says when that has to end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.repository import packformat as pf
from ciuic.repository import planes
from ciuic.repository.ids import Bytes
from ciuic.types import ChunkId

Pace = Literal["patient", "soon", "now"]
"""When idle processors have done it; with all that this process may take; without codecs for what has none yet."""

MOST_BASES: Final = 4
"""Behind each other, that a writer lets a chunk have: each is read with it."""
_SAMPLE_BYTES: Final = 8 << 10
_SAMPLES: Final = 3
_WORTH: Final = 0.95
"""Share of the content's size below which planes are worth their time at every read."""
_WORTH_MORE: Final = 0.02
"""So much less must a dearer codec leave than a cheaper one."""


class Codec(NamedTuple):
    """What does not become smaller by it is stored as it is."""

    kind: Literal["raw", "zstd", "planes", "difference", "best"]
    """The last: planes, the difference if there is a base, zstd or nothing, as samples of the content show."""
    width: int = 0
    """Bytes of a number, for planes and differences: 2, 4 or 8."""
    base: ChunkId | None = None
    """For a difference: a chunk as long as the content."""
    read_base: Callable[[], Bytes | None] = lambda: None
    """What that holds, checked; None where it cannot be read. Called in whichever thread does the work."""
    told: Callable[[int], None] = lambda flags: None
    """Hears with which flags it was stored, in that thread."""


class Coded(NamedTuple):
    stored: Bytes
    flags: int
    base: ChunkId | Literal[b""] = b""


def code(data: Bytes, codec: Codec) -> Coded:
    """The content as this codec has it."""
    coded = _CODERS[codec.kind](data, codec)
    if len(coded.stored) >= len(data):
        coded = Coded(data, 0)
    codec.told(coded.flags)
    return coded


def _as_it_is(data: Bytes, codec: Codec) -> Coded:
    return Coded(data, 0)


def _zstd(data: Bytes, codec: Codec) -> Coded:
    return Coded(zstandard.ZstdCompressor(level=1).compress(data), pf.FLAG_ZSTD)


def _planes(data: Bytes, codec: Codec) -> Coded:
    return Coded(planes.encode(data, codec.width), pf.FLAG_PLANES)


def _difference(data: Bytes, codec: Codec, base: Bytes | None = None) -> Coded:
    base = base or codec.read_base()
    if base is None or codec.base is None:
        return _planes(data, codec)
    stored = planes.encode(data, codec.width, base)
    return Coded(stored, pf.FLAG_PLANES | pf.FLAG_DIFFERENCE, codec.base)


def _best(data: Bytes, codec: Codec) -> Coded:
    sample = _sample(data)
    if len(sample) < codec.width:
        return Coded(data, 0)
    best, plain = _as_it_is, len(zstandard.ZstdCompressor(level=1).compress(sample)) / len(sample)
    share = 1.0
    if plain < _WORTH:
        best, share = _zstd, plain
    by_planes = len(planes.encode(sample, codec.width)) / len(sample)
    if by_planes < min(_WORTH, share - _WORTH_MORE):
        best, share = _planes, by_planes
    base = codec.read_base()
    if base is not None:
        by_difference = len(planes.encode(sample, codec.width, _sample(base))) / len(sample)
        if by_difference < min(_WORTH, share - _WORTH_MORE):
            return _difference(data, codec, base)
    return best(data, codec)


_CODERS: Final[dict[str, Callable[[Bytes, Codec], Coded]]] = {
    "raw": _as_it_is,
    "zstd": _zstd,
    "planes": _planes,
    "difference": _difference,
    "best": _best,
}


def _sample(data: Bytes) -> Bytes:
    """Of three places, each a whole number of numbers; all of it where that is not much more."""
    size_bytes = len(data)
    if size_bytes <= 2 * _SAMPLES * _SAMPLE_BYTES:
        return data
    view = memoryview(data)
    starts = [size_bytes * part // (_SAMPLES + 1) // 8 * 8 for part in range(1, _SAMPLES + 1)]
    return b"".join(view[start : start + _SAMPLE_BYTES] for start in starts)


def threads(number: int, *, patient: bool) -> ThreadPoolExecutor:
    """To pack in."""
    begin = _step_behind_all if patient else None
    return ThreadPoolExecutor(number, "ciuic-pack", initializer=begin)


def _step_behind_all() -> None:
    """This thread, for ever: without privileges there is no way back."""
    with suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
