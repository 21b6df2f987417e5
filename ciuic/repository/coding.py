"""How somebody who knows what content is wants it stored, and that in time that nobody else needs.

Guarantees: the same content comes back whatever is chosen; what does not become smaller is stored as it is. While the `Pace` is
"patient" codecs run in threads of the scheduling class that gets what no other process wants of a processor (SCHED_IDLE): they take next to
nothing from a training that leaves one idle (docs/decisions/idle-codecs.md). Who waits for them says when that has to end.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.repository import packformat as pf
from ciuic.repository import planes
from ciuic.repository.ids import Bytes
from ciuic.repository.planes import Widening
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


Kind = Literal["raw", "zstd", "planes", "difference", "twin"]
"""How content is stored."""
_FLAGS: Final[dict[Kind, int]] = {
    "raw": 0,
    "zstd": pf.FLAG_ZSTD,
    "planes": pf.FLAG_PLANES,
    "difference": pf.FLAG_PLANES | pf.FLAG_DIFFERENCE,
    "twin": pf.FLAG_PLANES | pf.FLAG_DIFFERENCE,
}


class Twin(NamedTuple):
    """A chunk of numbers of 2 bytes, to which those of the content, of 4 bytes, were rounded."""

    base: ChunkId
    widening: Widening
    read: Callable[[], Bytes | None] = lambda: None
    """As `Codec.read_base`."""


class Codec(NamedTuple):
    """What does not become smaller by it is stored as it is."""

    kind: Kind | Literal["best"]
    """The last: whichever of the others leaves least, as samples of the content show. A difference from what is not there is one from the
    twin, and that from what is not there planes."""
    width: int = 0
    """Bytes of a number, for planes and differences: 2, 4 or 8."""
    base: ChunkId | None = None
    """For a difference: a chunk as long as the content."""
    read_base: Callable[[], Bytes | None] = lambda: None
    """What that holds, checked; None where it cannot be read. Called in whichever thread does the work."""
    told: Callable[[Kind], None] = lambda kind: None
    """Hears how it was stored, in that thread."""
    twin: Twin | None = None
    """For a width of 4."""


class Coded(NamedTuple):
    stored: Bytes
    kind: Kind
    base: ChunkId | Literal[b""] = b""

    @property
    def flags(self) -> int:
        return _FLAGS[self.kind]


def code(data: Bytes, codec: Codec) -> Coded:
    """The content as this codec has it."""
    coded = _CODERS[codec.kind](data, codec)
    if len(coded.stored) >= len(data):
        coded = Coded(data, "raw")
    codec.told(coded.kind)
    return coded


def _as_it_is(data: Bytes, codec: Codec) -> Coded:
    return Coded(data, "raw")


def _zstd(data: Bytes, codec: Codec) -> Coded:
    return Coded(zstandard.ZstdCompressor(level=1).compress(data), "zstd")


def _planes(data: Bytes, codec: Codec) -> Coded:
    return Coded(planes.encode(data, codec.width), "planes")


def _difference(data: Bytes, codec: Codec, base: Bytes | None = None) -> Coded:
    base = base or codec.read_base()
    if base is None or codec.base is None:
        return _twin(data, codec)
    return Coded(planes.encode(data, codec.width, base), "difference", codec.base)


def _twin(data: Bytes, codec: Codec, base: Bytes | None = None) -> Coded:
    base = base or (codec.twin and codec.twin.read())
    if base is None or codec.twin is None:
        return _planes(data, codec)
    widening = codec.twin.widening
    stored = planes.encode_beside(data, planes.wide_base(base, widening, len(data)), widening)
    # Takes less time than encoding: there is no reason to go without.
    if planes.decode(stored, len(data), base) != data:
        return _planes(data, codec)
    return Coded(stored, "twin", codec.twin.base)


def _best(data: Bytes, codec: Codec) -> Coded:
    sample = _sample(data)
    if len(sample) < codec.width:
        return Coded(data, "raw")
    best: Callable[[Bytes, Codec], Coded]
    best, plain = _as_it_is, len(zstandard.ZstdCompressor(level=1).compress(sample)) / len(sample)
    share = 1.0
    if plain < _WORTH:
        best, share = _zstd, plain
    by_planes = len(planes.encode(sample, codec.width)) / len(sample)
    if by_planes < min(_WORTH, share - _WORTH_MORE):
        best, share = _planes, by_planes
    twin = codec.twin and codec.twin.read()
    if twin is not None and codec.twin is not None:
        wide = planes.wide_base(twin, codec.twin.widening, len(data))
        beside = planes.encode_beside(sample, _sample(wide), codec.twin.widening)
        by_twin = len(beside) / len(sample)
        if by_twin < min(_WORTH, share - _WORTH_MORE):
            best, share = partial(_twin, base=twin), by_twin
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
    "twin": _twin,
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
