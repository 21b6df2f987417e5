"""Compression of chunks, on all processors.

A sample decides before the whole is tried; what compresses badly is stored as it is. A caller that knows its
content names a `Codec`. The result depends on content and codec alone, never on the order of threads. Only
work that takes longer than handing it over goes to another thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from contextlib import suppress
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.repository.codecs.codec import Codec, Pace, code, threads
from ciuic.repository.extent_sharing import StagedExtent
from ciuic.repository.format import pack_format as pf
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackKind
from ciuic.types import ChunkId

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
