"""Chunks as the writer sees them: what is stored already is not stored again, what is buffered can be read
back.

Chunks are packed (packing.py) and segments written (appender.py) in other threads; where each comes to lie depends on the order
of the calls alone. Memory: what waits to be packed, the segment that is being filled and two that are being written, plus one
small entry for each chunk that is written and not yet synced (bounded by SYNC_BYTES and SYNC_RECORDS).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ciuic.repository import packformat as pf
from ciuic.repository.appender import Appender
from ciuic.repository.basing import Bases, Held
from ciuic.repository.chunks import ChunkReader, chunk_id, location_of, read_base, unpack
from ciuic.repository.disk import Disk
from ciuic.repository.ids import Bytes
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord
from ciuic.repository.packing import Content, Job, Packed, Packer
from ciuic.repository.packs import Packs
from ciuic.repository.recovery import Tail
from ciuic.repository.writerindex import WriterIndex
from ciuic.types import ChunkId

SYNC_BYTES = 256 << 20
SYNC_RECORDS = 1 << 15
"""So much may be written and not synced: it bounds memory, and what an interrupted first capture has to
repeat.
"""
_PENDING_BYTES = 16 << 20
"""So much content may wait for being packed or be on its way through."""
_GROUP_BYTES = 2 << 20
"""Handed over to one thread at once."""


class _Pending(NamedTuple):
    """Chunks that are being packed, in the order in which they will be appended."""

    chunks: list[tuple[ChunkId, int]]
    """(id, bytes of content)."""
    kind: PackKind
    size_bytes: int
    packed: Job


class Extent(NamedTuple):
    """How far the packs reach, so that what is stored later can be told from it."""

    last_number: int
    """The highest number that a pack has had."""
    ends: dict[int, int]
    """Number → end in bytes, of the packs that are being appended to."""


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
        before_planes: Callable[[], None] = lambda: None,
    ) -> None:
        """``before_planes``: called before a record of format 2 is written."""
        self.packs = packs
        self.index = index
        self.seed = seed
        self._buffered: dict[bytes, Held] = {}
        """What is not written yet."""
        self._written: dict[bytes, ChunkLocation] = {}
        self._sealed: set[int] = set()
        self._last_number: int = max([index.last_pack(), *(() if index.all_seen else packs.numbers())])
        self.packer = Packer()
        self._before_planes = before_planes
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._reader = ChunkReader(packs, self, seed)
        self._bases = Bases(packs, self._held, self.find, seed)
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

    def extent(self) -> Extent:
        """How far the packs reach now. Call it when all is durable."""
        ends = {appender.number: appender.end for appender in self.appenders.values() if appender.number}
        return Extent(self._last_number, ends)

    def id_of(self, data: Bytes) -> ChunkId:
        """The id of this content, stored or not."""
        return chunk_id(data, self.seed)

    def put(self, data: Bytes, kind: PackKind) -> ChunkId:
        """Stores unless there. ValueError over 16 MiB; OSError."""
        if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
            raise ValueError(f"a chunk of {memoryview(data).nbytes} bytes is too large")
        chunk = self.id_of(data)
        if chunk in self._buffered or chunk in self._written or self.index.good_among((chunk,)):
            return chunk
        content = Content(data)
        if self._pending or self.packer.worth_a_thread(content):
            self._take({chunk: content}, kind)
        else:
            content = Content(bytes(data))  # no copy when it is bytes
            self._append(chunk, len(content.data), self.packer.pack(content, kind), kind)
        return chunk

    def put_all(self, contents: Sequence[Content], kind: PackKind) -> list[ChunkId]:
        """Stores what is not there; the ids of all. ValueError over 16 MiB; OSError, also of what was put before."""
        for data, *_ in contents:
            if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
                raise ValueError(f"a chunk of {memoryview(data).nbytes} bytes is too large")
        ids = [self.id_of(content.data) for content in contents]
        new = {
            id_: content
            for id_, content in zip(ids, contents, strict=True)
            if id_ not in self._buffered and id_ not in self._written
        }
        if new:
            for id_ in self.index.good_among(list(new)):
                del new[ChunkId(id_)]
            self._take(new, kind)
        return ids

    def append(self, record: PackRecord, stored: Bytes, kind: PackKind) -> None:
        """Stores these bytes whether or not the chunk is there already. ``record``: as it was stored elsewhere."""
        self._settle_packing()
        packed = Packed(stored, record.flags, pf.checksum(stored), None, record.base)
        self._append(record.id, record.raw_bytes, packed, kind)

    def _held(self, chunk: ChunkId) -> Held | None:
        return self._buffered.get(chunk)

    def _take(self, new: dict[ChunkId, Content], kind: PackKind) -> None:
        """Packs and appends chunks of which none is there."""
        group: list[tuple[ChunkId, Content]] = []
        group_bytes = 0
        kept_bytes = sum(len(content.data) for content in new.values())
        for chunk, given in new.items():
            size_bytes = len(given.data)
            codec = given.codec and self._bases.found(chunk, size_bytes, given.codec)
            content = given._replace(data=_kept(given.data, kept_bytes), codec=codec)
            self._buffered[chunk] = _unpacked(content)
            if not self._pending and not group and not self.packer.worth_a_thread(content):
                self._append(chunk, size_bytes, self.packer.pack(content, kind), kind)
                continue
            group.append((chunk, content))
            group_bytes += size_bytes
            if group_bytes >= _GROUP_BYTES:
                self._hand_over(group, group_bytes, kind)
                group, group_bytes = [], 0
        if group:
            self._hand_over(group, group_bytes, kind)

    def _hand_over(self, group: list[tuple[ChunkId, Content]], size_bytes: int, kind: PackKind) -> None:
        while self._pending and (
            self._pending_bytes + size_bytes > _PENDING_BYTES or self._pending[0].packed.done()
        ):
            self._settle_packed()
        chunks = [(chunk, len(content.data)) for chunk, content in group]
        packed = self.packer.begin([content for _, content in group], kind)
        self._pending.append(_Pending(chunks, kind, size_bytes, packed))
        self._pending_bytes += size_bytes

    def _settle_packing(self) -> None:
        """Everything that was put is with its appender."""
        while self._pending:
            self._settle_packed()

    def _settle_packed(self) -> None:
        """Appends what was handed over first."""
        pending = self._pending[0]
        all_packed = (
            pending.packed.result()
        )  # if this raises, it raises again: nothing after it may be committed
        self._pending.popleft()
        self._pending_bytes -= pending.size_bytes
        for (chunk, raw_bytes), packed in zip(pending.chunks, all_packed, strict=True):
            self._append(chunk, raw_bytes, packed, pending.kind)

    def _append(self, chunk: ChunkId, raw_bytes: int, packed: Packed, kind: PackKind) -> None:
        if packed.flags & pf.FLAG_PLANES:
            self._before_planes()
        self._buffered[chunk] = Held(packed.stored, raw_bytes, packed.flags, packed.base)
        appender = self.appenders[kind]
        self._moved(appender.append(chunk, raw_bytes, packed))
        if appender.unsynced_bytes >= SYNC_BYTES or appender.unsynced_records >= SYNC_RECORDS:
            self._sync()

    def get(self, chunk: ChunkId) -> bytes:
        """The content, also of what is only buffered. MissingChunk, DamagedChunk."""
        held = self._buffered.get(chunk)
        if held is not None:
            stored, raw_bytes, flags, base, _ = held
            content = read_base(base if flags & pf.FLAG_DIFFERENCE else b"", self.get)
            return unpack(bytes(stored), raw_bytes, flags, base=content)
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
        self._settle_packing()
        self._sync()

    def close(self) -> None:
        self.packer.close()
        self._bases.close()
        self._pending.clear()
        for appender in self.appenders.values():
            appender.close()
        self._buffered.clear()

    def _sync(self) -> None:
        """What the appenders have is durable on return."""
        for appender in self.appenders.values():
            self._moved(appender.flush())
            appender.sync()

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


def _unpacked(content: Content) -> Held:
    """With the base that it may come to have."""
    codec = content.codec
    bases = [base for base in (codec.base, codec.twin and codec.twin.base) if base] if codec else []
    return Held(content.data, len(content.data), 0, bases[0] if bases else b"", undecided=len(bases) > 1)


def _kept(data: Bytes, kept_bytes: int) -> Bytes:
    """Content that stays as it is while it waits. A part of something that nobody can change is kept as such, unless most
    of that would be kept for the sake of a small part."""
    if isinstance(data, bytes):
        return data
    if isinstance(data, memoryview) and isinstance(data.obj, bytes) and 2 * kept_bytes >= len(data.obj):
        return data
    return bytes(data)
