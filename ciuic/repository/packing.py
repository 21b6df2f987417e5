"""Whether and how content is compressed, and that on all processors.

A sample decides before the whole is tried; what compresses badly is kept as it is. Who knows more of the content says how
(`Codec`). What comes out depends on content and codec alone, never on who was first. Only what takes longer than handing it over goes to another thread.
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

from ciuic.repository import packformat as pf
from ciuic.repository.coding import Codec, Pace, code, threads
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackKind
from ciuic.repository.sharing import Place
from ciuic.types import ChunkId

_SAMPLE_BYTES: Final = 4096
_MIN_COMPRESS_BYTES: Final = 256
_WORTH: Final = 9, 10
"""Compressed data is kept below nine tenths: an optimizer's checkpoint yields 0.94, and is then paid for at
every read.
"""
_WORTH_INSTEAD_OF_SHARING: Final = 1, 2
"""What is shared takes no space while the file is there: only what yields half of it is compressed all the same."""
_ZSTD_LEVEL: Final = 1
_HAND_OVER_BYTES: Final = 64 << 10
"""Handing over takes some 50 us, compressing this much 100 to 200."""
_MOST_THREADS: Final = 8
_LOOK_EVERY_SECONDS: Final = 0.02
_ON_ITS_WAY_SECONDS: Final = 0.2
"""What has begun is done sooner than anew, unless its thread gets no processor."""


class Content(NamedTuple):
    """What is to be stored, and where it is staged, if anywhere."""

    data: Bytes
    place: Place | None = None
    codec: Codec | None = None
    """None: a sample decides between compressed and not."""


class Packed(NamedTuple):
    """Content as it is stored."""

    stored: Bytes
    flags: int
    checksum: int
    place: Place | None = None
    """Where the same bytes lie, so that their extents can be shared."""
    base: ChunkId | Literal[b""] = b""


class Packer:
    """Packs, here or in threads. `pack` may be called by any thread; the rest belongs to one."""

    def __init__(self) -> None:
        self._own = threading.local()
        self._threads: dict[bool, ThreadPoolExecutor] = {}
        """Those that are patient, and others."""
        self._processors = len(os.sched_getaffinity(0))
        self.pace: Callable[[], Pace] = lambda: "soon"
        """Of what has a codec. Asked often, by the thread that this belongs to."""
        self._now = False
        self.waited_seconds = 0.0
        """How long all else waited for codecs that are patient."""

    def worth_a_thread(self, content: Content) -> bool:
        """Also on one processor where it may wait for others to have no use for that."""
        patient = content.codec is not None and self.look() == "patient"
        return (self._processors > 1 or patient) and len(content.data) >= _HAND_OVER_BYTES

    def begin(self, contents: Sequence[Content], kind: PackKind) -> Job:
        """Packs them in a thread."""
        patient = any(content.codec for content in contents) and self.look() == "patient"
        pool = self._threads.get(patient)
        if pool is None:
            pool = self._threads[patient] = threads(min(self._processors, _MOST_THREADS), patient=patient)
        return Job(self, pool, contents, kind, patient=patient)

    def look(self) -> Pace:
        """The pace now."""
        pace = self.pace()
        self._now = pace == "now"
        return pace

    def pack(self, content: Content, kind: PackKind) -> Packed:
        """Compressed, or as it is where that is not worth it."""
        data, place, codec = content
        if codec is not None:
            return self._coded(data, place, codec)
        worth = _WORTH if place is None else _WORTH_INSTEAD_OF_SHARING
        if len(data) >= _MIN_COMPRESS_BYTES and (kind != "data" or self._promises(data, worth)):
            packed = self._compressor("whole", _ZSTD_LEVEL).compress(data)
            if _is_worth(len(packed), len(data), worth):
                return Packed(packed, pf.FLAG_ZSTD, pf.checksum(packed))
        return Packed(data, 0, pf.checksum(data), place)

    def _coded(self, data: Bytes, place: Place | None, codec: Codec) -> Packed:
        if self._now:
            codec = Codec("raw")
        coded = code(data, codec)
        checksum = pf.checksum(coded.stored)
        return Packed(coded.stored, coded.flags, checksum, None if coded.flags else place, coded.base)

    def close(self) -> None:
        """Waits for what is on its way, which is short."""
        for pool in self._threads.values():
            pool.shutdown(wait=True, cancel_futures=True)
        self._threads.clear()

    def _promises(self, content: Bytes, worth: tuple[int, int]) -> bool:
        """Whether a sample of it compresses."""
        size_bytes = len(content)
        if size_bytes <= 4 * _SAMPLE_BYTES:
            return True
        middle = size_bytes // 2
        sample = b"".join(
            (content[:_SAMPLE_BYTES], content[middle : middle + _SAMPLE_BYTES], content[-_SAMPLE_BYTES:])
        )
        return _is_worth(len(self._compressor("sample", 1).compress(sample)), len(sample), worth)

    def _compressor(self, name: str, level: int) -> zstandard.ZstdCompressor:
        """Of this thread: one is not for two at once."""
        found: zstandard.ZstdCompressor | None = getattr(self._own, name, None)
        if found is None:
            found = zstandard.ZstdCompressor(level=level)
            setattr(self._own, name, found)
        return found


def _is_worth(packed_bytes: int, raw_bytes: int, worth: tuple[int, int]) -> bool:
    return packed_bytes * worth[1] < raw_bytes * worth[0]


class Job:
    """Contents on their way through a thread."""

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
        self._given_up = False
        self._future = pool.submit(self._pack_all)

    def done(self) -> bool:
        return self._future.done()

    def result(self) -> list[Packed]:
        """Waits for it; for a thread that gets no processor only while it may be patient: then it is done here."""
        if not self._patient:
            return self._future.result()
        began = time.monotonic()
        try:
            while self._packer.look() == "patient":
                with suppress(TimedOut):
                    return self._future.result(_LOOK_EVERY_SECONDS)
        finally:
            self._packer.waited_seconds += time.monotonic() - began
        if not self._future.cancel():
            with suppress(TimedOut):
                return self._future.result(_ON_ITS_WAY_SECONDS)
        self._given_up = True
        return [self._packer.pack(content, self._kind) for content in self._contents]

    def _pack_all(self) -> list[Packed]:
        packed: list[Packed] = []
        for content in self._contents:
            if self._given_up:
                break
            packed.append(self._packer.pack(content, self._kind))
        return packed
