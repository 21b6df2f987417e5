"""Chunks as the writer sees them: what is stored already is not stored again, what is buffered can be read
back.

Memory: about the segment that is being filled, plus one small entry for each chunk that is written and not
yet synced (bounded by SYNC_BYTES and SYNC_RECORDS).
"""

from __future__ import annotations

import zstandard

from ciuic.repository import packformat as pf
from ciuic.repository.appender import Appender
from ciuic.repository.chunks import ChunkReader, chunk_id, location_of, unpack
from ciuic.repository.disk import Disk
from ciuic.repository.ids import Bytes
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord
from ciuic.repository.packs import Packs
from ciuic.repository.recovery import Tail
from ciuic.repository.writerindex import WriterIndex
from ciuic.types import ChunkId

SYNC_BYTES = 256 << 20
SYNC_RECORDS = 1 << 15
"""So much may be written and not synced: it bounds memory, and what an interrupted first capture has to
repeat.
"""
_SAMPLE_BYTES = 4096
_MIN_COMPRESS_BYTES = 256
_WORTH_NUMERATOR, _WORTH_DENOMINATOR = 9, 10
"""Compressed data is kept below nine tenths: an optimizer's checkpoint yields 0.94, and is then paid for at
every read.
"""
_ZSTD_LEVEL = 3


class ChunkStore:
    """Appends chunks and finds them. Also the Finder of the writer's own reads."""

    def __init__(
        self,
        disk: Disk,
        packs: Packs,
        index: WriterIndex,
        seed: int,
        tails: dict[PackKind, Tail],
        *,
        pack_bytes: int | None = None,
    ) -> None:
        self.packs = packs
        self.index = index
        self.seed = seed
        self._buffered: dict[bytes, tuple[Bytes, int, int]] = {}
        self._written: dict[bytes, ChunkLocation] = {}
        self._sealed: set[int] = set()
        self._last_number = max([index.last_pack(), *packs.numbers()])
        self._compressor = zstandard.ZstdCompressor(level=_ZSTD_LEVEL)
        self._sampler = zstandard.ZstdCompressor(level=1)
        self._reader = ChunkReader(packs, self, seed)
        self.appenders: dict[PackKind, Appender] = {
            kind: Appender(
                disk, packs, kind, tails.get(kind), self._new_number, self._durable, pack_bytes=pack_bytes
            )
            for kind in pf.KINDS
        }

    @property
    def grown_bytes(self) -> int:
        """Bytes by which the packs have grown since this store opened."""
        return sum(appender.grown_bytes for appender in self.appenders.values())

    def id_of(self, data: Bytes) -> ChunkId:
        """The id of this content, stored or not."""
        return chunk_id(data, self.seed)

    def put(self, data: Bytes, kind: PackKind) -> ChunkId:
        """Stores unless there. ValueError over 16 MiB; OSError."""
        if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {memoryview(data).nbytes} bytes is too large")
        chunk = self.id_of(data)
        if chunk in self._buffered or chunk in self._written or self.index.has_good(chunk):
            return chunk
        content = bytes(data)  # the caller may use its buffer again; no copy when it is bytes
        packed = self._compress(content, kind)
        if packed is None:
            self.append(chunk, content, len(content), 0, kind)
        else:
            self.append(chunk, packed, len(content), pf.FLAG_ZSTD, kind)
        return chunk

    def append(self, chunk: ChunkId, stored: Bytes, raw_bytes: int, flags: int, kind: PackKind) -> None:
        """Stores these bytes whether or not the chunk is there already."""
        self._buffered[chunk] = (stored, raw_bytes, flags)
        appender = self.appenders[kind]
        self._moved(appender.append(chunk, stored, raw_bytes, flags))
        if appender.unsynced_bytes >= SYNC_BYTES or appender.unsynced_records >= SYNC_RECORDS:
            self.sync()

    def get(self, chunk: ChunkId) -> bytes:
        """The content, also of what is only buffered. MissingChunk, DamagedChunk."""
        held = self._buffered.get(chunk)
        if held is not None:
            return unpack(bytes(held[0]), held[1], held[2])
        return self._reader.get(chunk)

    def has(self, chunk: ChunkId) -> bool:
        return chunk in self._buffered or bool(self.find(chunk))

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        written = self._written.get(chunk)
        return ([written] if written else []) + self.index.find(chunk)

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        return self.index.search(chunk, failed)

    def sync(self) -> None:
        """Everything stored is durable on return. OSError."""
        for appender in self.appenders.values():
            self._moved(appender.flush())
            appender.sync()

    def close(self) -> None:
        for appender in self.appenders.values():
            appender.close()
        self._buffered.clear()

    def _compress(self, content: bytes, kind: PackKind) -> bytes | None:
        """Compressed content, or None where that is not worth it: a sample decides before the whole is tried."""
        size_bytes = len(content)
        if size_bytes < _MIN_COMPRESS_BYTES:
            return None
        if kind == "data" and size_bytes > 4 * _SAMPLE_BYTES:
            middle = size_bytes // 2
            sample = (
                content[:_SAMPLE_BYTES] + content[middle : middle + _SAMPLE_BYTES] + content[-_SAMPLE_BYTES:]
            )
            if not _worth(len(self._sampler.compress(sample)), len(sample)):
                return None
        packed = self._compressor.compress(content)
        return packed if _worth(len(packed), size_bytes) else None

    def _moved(self, records: list[tuple[int, PackRecord]]) -> None:
        for number, record in records:
            self._buffered.pop(record.id, None)
            if number not in self._sealed:  # sealing tells the index before this is reached
                self._written[record.id] = location_of(number, record)

    def _new_number(self) -> int:
        self._last_number += 1
        self.index.set_last_pack(self._last_number)
        return self._last_number

    def _durable(self, number: int, size_bytes: int, sealed: bool, records: list[PackRecord]) -> None:
        self.index.add(number, size_bytes, sealed, records)
        if sealed:
            self._sealed.add(number)
        for record in records:
            self._written.pop(record.id, None)


def _worth(packed_bytes: int, raw_bytes: int) -> bool:
    return packed_bytes * _WORTH_DENOMINATOR < raw_bytes * _WORTH_NUMERATOR
