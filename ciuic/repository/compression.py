"""The form in which chunks are stored: compressed if a sample says so, or coded as a caller says who knows the content.

A sample decides before the whole is tried; what compresses badly is stored as it is. A caller that knows its
content names a `Codec`. The result depends on content and codec alone, never on the order of threads. Only
work that takes longer than handing it over goes to another thread (`Packer`).

Guarantees: the same content comes back whatever is chosen; content that does not become smaller is stored as
it is. While the `Pace` is "patient", codecs run in threads of the scheduling class that only gets idle
processor time (SCHED_IDLE): they take next to nothing from a training that leaves a processor idle. The
caller that waits for them decides when that ends (docs/decisions/idle-codecs.md).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from contextlib import suppress
from functools import partial
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.repository import byte_planes
from ciuic.repository import pack_format as pf
from ciuic.repository.byte_planes import Widening
from ciuic.repository.extent_sharing import StagedExtent
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackKind
from ciuic.types import ChunkId

Pace = Literal["patient", "soon", "now"]
"""When codecs run: "patient" in idle processor time alone, "soon" with all processors of this process, "now"
not at all for content that is not coded yet."""

MAX_WRITTEN_BASE_DEPTH: Final = 4
"""Longest chain of bases that a writer gives a chunk: each base is read with the chunk."""
# Samples that "best" tries: 24 KiB of a block of 256 KiB.
_CODED_SAMPLE_BYTES: Final = 8 << 10
_CODED_SAMPLES: Final = 3
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
    on_coded: Callable[[Kind], None] = lambda kind: None
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
    codec.on_coded(coded.kind)
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
    if size_bytes <= 2 * _CODED_SAMPLES * _CODED_SAMPLE_BYTES:
        return data
    view = memoryview(data)
    # Multiples of 8, so that samples begin with a whole number of every width.
    starts = [size_bytes * part // (_CODED_SAMPLES + 1) // 8 * 8 for part in range(1, _CODED_SAMPLES + 1)]
    return b"".join(view[start : start + _CODED_SAMPLE_BYTES] for start in starts)


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


# Three of these, the ends and the middle, take 10 to 20 us and predict the ratio to 0.01.
_SAMPLE_BYTES: Final = 4096
_MIN_COMPRESS_BYTES: Final = 256
# Largest ratio at which data is stored compressed: an optimizer's checkpoint yields 0.94, and every read
# would pay for it (docs/decisions/compression.md).
_MAX_PACKED_RATIO: Final = 9, 10
# The same for content that could share extents, which takes no space while the file is there.
_MAX_PACKED_RATIO_IF_SHARED: Final = 1, 2
# Level 1 is faster than 3 and better on logs; weights are the same at every level from 1 on.
_ZSTD_LEVEL: Final = 1
# Size from which compression is handed to a thread: that takes some 50 us, compressing this much 100 to 200.
_HAND_OVER_BYTES: Final = 64 << 10
_MAX_THREADS: Final = 8
# Time between two looks at the pace.
_POLL_SECONDS: Final = 0.02
# How long to wait for a started job: it ends sooner than a new one would, unless its thread gets no
# processor.
_STARTED_JOB_SECONDS: Final = 0.2


class Content(NamedTuple):
    """Content to store, and where it is staged, if anywhere."""

    data: Bytes
    place: StagedExtent | None = None
    codec: Codec | None = None
    """Codec; None: a sample decides whether to compress."""


class PackedChunk(NamedTuple):
    """Content as it is stored."""

    stored: Bytes
    flags: int
    checksum: int
    place: StagedExtent | None = None
    """Position of the same bytes in the stage, so that their extents can be shared."""
    base: ChunkId | Literal[b""] = b""


class Packer:
    """Compressor of chunks, here or in threads.

    `pack` may be called by any thread; everything else belongs to one.
    """

    def __init__(self) -> None:
        self._local = threading.local()
        # Pools of patient threads (True) and of others.
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        # The processors that this process may use, not those of the machine.
        self._processors = len(os.sched_getaffinity(0))
        self.pace: Callable[[], Pace] = lambda: "soon"
        """Return the pace of content with a codec. Called often, by the thread that owns this object."""
        self._now = False
        self.waited_seconds = 0.0
        """Time for which everything else waited for patient codecs."""

    def worth_a_thread(self, content: Content) -> bool:
        """Return whether to hand the content over; with one processor, only if it may wait for idle time."""
        patient = content.codec is not None and self.look() == "patient"
        return (self._processors > 1 or patient) and len(content.data) >= _HAND_OVER_BYTES

    def begin(self, contents: Sequence[Content], kind: PackKind) -> Job:
        """Start packing in a thread."""
        patient = any(content.codec for content in contents) and self.look() == "patient"
        pool = self._threads.get(patient)
        if pool is None:
            pool = self._threads[patient] = threads(min(self._processors, _MAX_THREADS), patient=patient)
        return Job(self, pool, contents, kind, patient=patient)

    def look(self) -> Pace:
        """Return the current pace."""
        pace = self.pace()
        self._now = pace == "now"
        return pace

    def pack(self, content: Content, kind: PackKind) -> PackedChunk:
        """Return the content compressed, or as it is where that is not worth it."""
        data, place, codec = content
        if codec is not None:
            return self._coded(data, place, codec)
        worth = _MAX_PACKED_RATIO if place is None else _MAX_PACKED_RATIO_IF_SHARED
        # Trees and maps are tried without a sample: names and attributes compress (2,100 bytes to 318).
        if len(data) >= _MIN_COMPRESS_BYTES and (kind != "data" or self._sample_compresses(data, worth)):
            packed = self._compressor("whole", _ZSTD_LEVEL).compress(data)
            if _is_worth(len(packed), len(data), worth):
                return PackedChunk(packed, pf.FLAG_ZSTD, pf.checksum(packed))
        return PackedChunk(data, 0, pf.checksum(data), place)

    def _coded(self, data: Bytes, place: StagedExtent | None, codec: Codec) -> PackedChunk:
        if self._now:
            # There is no time left for codecs.
            codec = Codec("raw")
        coded = code(data, codec)
        checksum = pf.checksum(coded.stored)
        return PackedChunk(coded.stored, coded.flags, checksum, None if coded.flags else place, coded.base)

    def close(self) -> None:
        """Wait for running jobs, which are short."""
        for pool in self._threads.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._threads.clear()

    def _sample_compresses(self, content: Bytes, worth: tuple[int, int]) -> bool:
        """Return whether a sample of the content compresses."""
        size_bytes = len(content)
        # A sample would be most of it: the whole is tried at once.
        if size_bytes <= 4 * _SAMPLE_BYTES:
            return True
        middle = size_bytes // 2
        sample = b"".join(
            (content[:_SAMPLE_BYTES], content[middle : middle + _SAMPLE_BYTES], content[-_SAMPLE_BYTES:])
        )
        return _is_worth(len(self._compressor("sample", 1).compress(sample)), len(sample), worth)

    def _compressor(self, name: str, level: int) -> zstandard.ZstdCompressor:
        """Return the compressor of this thread, because a compressor is not thread-safe."""
        found: zstandard.ZstdCompressor | None = getattr(self._local, name, None)
        if found is None:
            found = zstandard.ZstdCompressor(level=level)
            setattr(self._local, name, found)
        return found


def _is_worth(packed_bytes: int, raw_bytes: int, worth: tuple[int, int]) -> bool:
    return packed_bytes * worth[1] < raw_bytes * worth[0]


class Job:
    """Contents being packed in a thread."""

    def __init__(
        self,
        packer: Packer,
        pool: ThreadPoolExecutor,
        contents: Sequence[Content],
        kind: PackKind,
        *,
        patient: bool,
    ) -> None:
        self._packer = packer
        self._contents = contents
        self._kind: PackKind = kind
        self._patient = patient
        # Tells the thread that the result is not wanted any more.
        self._given_up = False
        self._future = pool.submit(self._pack_all)

    def done(self) -> bool:
        """Return whether the result is there."""
        return self._future.done()

    def result(self) -> list[PackedChunk]:
        """Return the result, packing here if a patient thread got no processor until the pace changed."""
        if not self._patient:
            return self._future.result()
        began = time.monotonic()
        try:
            # Polled, because the pace may change while this waits.
            while self._packer.look() == "patient":
                with suppress(TimedOut):
                    return self._future.result(_POLL_SECONDS)
        finally:
            self._packer.waited_seconds += time.monotonic() - began
        # A job that has not started is cancelled, and packed below.
        if not self._future.cancel():
            with suppress(TimedOut):
                return self._future.result(_STARTED_JOB_SECONDS)
        # The thread is still running: it stops after its current chunk, and its result is dropped.
        self._given_up = True
        return [self._packer.pack(content, self._kind) for content in self._contents]

    def _pack_all(self) -> list[PackedChunk]:
        packed: list[PackedChunk] = []
        for content in self._contents:
            if self._given_up:
                break
            packed.append(self._packer.pack(content, self._kind))
        return packed
