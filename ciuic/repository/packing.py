"""Whether and how content is compressed, and that on all processors.

A sample decides before the whole is tried; what compresses badly is kept as it is. Who knows more of the content says how
(`Codec`). What comes out depends on content and codec alone, never on who was first. Only what takes longer than handing it over goes to another thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Final, Literal, NamedTuple

import zstandard

from ciuic.repository import packformat as pf
from ciuic.repository import planes
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
MOST_BASES: Final = 4
"""Behind each other, that a writer lets a chunk have: each is read with it."""
_WORTH_INSTEAD_OF_SHARING: Final = 1, 2
"""What is shared takes no space while the file is there: only what yields half of it is compressed all the same."""
_ZSTD_LEVEL: Final = 1
_HAND_OVER_BYTES: Final = 64 << 10
"""Handing over takes some 50 us, compressing this much 100 to 200."""
_MOST_THREADS: Final = 8


class Codec(NamedTuple):
    """How somebody who knows what the content is wants it stored. What does not make it smaller is stored as it is."""

    kind: Literal["raw", "zstd", "planes", "difference"]
    width: int = 0
    """Bytes of a number, for planes and differences: 2, 4 or 8."""
    base: ChunkId | None = None
    """For a difference: a chunk as long as the content."""
    base_data: Bytes = b""
    """What that holds."""


class Content(NamedTuple):
    """What is to be stored, and where it is staged, if anywhere."""

    data: Bytes
    place: Place | None = None
    codec: Codec | None = None
    """None: a sample decides between compressed and not."""

    @property
    def needs_new_format(self) -> bool:
        return self.codec is not None and self.codec.kind in ("planes", "difference")


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
        self._threads: ThreadPoolExecutor | None = None
        self._processors = len(os.sched_getaffinity(0))
        self._coding = threading.Lock()
        self.coding_seconds = 0.0
        """Of processor time that codecs have taken."""

    def worth_a_thread(self, size_bytes: int) -> bool:
        return self._processors > 1 and size_bytes >= _HAND_OVER_BYTES

    def begin(self, contents: Sequence[Content], kind: PackKind) -> Future[list[Packed]]:
        """Packs them in a thread."""
        if self._threads is None:
            self._threads = ThreadPoolExecutor(min(self._processors, _MOST_THREADS), "ciuic-pack")
        return self._threads.submit(self._pack_all, contents, kind)

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
        began = time.thread_time()
        stored, flags, base = data, 0, codec.base
        if codec.kind == "zstd":
            stored, flags = self._compressor("whole", _ZSTD_LEVEL).compress(data), pf.FLAG_ZSTD
        elif codec.kind == "planes":
            stored, flags = planes.encode(data, codec.width), pf.FLAG_PLANES
        elif codec.kind == "difference":
            stored = planes.encode(data, codec.width, codec.base_data)
            flags = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE
        with self._coding:
            self.coding_seconds += time.thread_time() - began
        if not flags or len(stored) >= len(data):
            return Packed(data, 0, pf.checksum(data), place)
        return Packed(stored, flags, pf.checksum(stored), None, (flags & pf.FLAG_DIFFERENCE and base) or b"")

    def close(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True, cancel_futures=True)
        self._threads = None

    def _pack_all(self, contents: Sequence[Content], kind: PackKind) -> list[Packed]:
        return [self.pack(content, kind) for content in contents]

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
