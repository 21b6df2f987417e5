"""Chunks of the writer: what is stored already is not stored again, what is buffered can be read back.

Chunks are packed (compression.py) and segments written (appender.py) in other threads; the position of each
depends on the order of the calls alone. Memory: the content that waits to be packed, the segment that is
being filled and two that are being written, plus one small entry for each chunk that is written and not yet
synced (bounded by SYNC_BYTES and SYNC_RECORDS).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ciuic.repository.codecs.compression import Content, Job, PackedChunk, Packer
from ciuic.repository.disk.operations import Disk
from ciuic.repository.format import pack_format as pf
from ciuic.repository.identity import Identity
from ciuic.repository.ids import Bytes
from ciuic.repository.index.writer_index import WriterIndex
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord
from ciuic.repository.packs.chunk_reader import ChunkReader, location_of, read_base, unpack
from ciuic.repository.packs.pack_directory import Packs
from ciuic.repository.writing.appender import Appender
from ciuic.repository.writing.delta_bases import Bases, BufferedChunk
from ciuic.repository.writing.recovery import Tail
from ciuic.types import ChunkId

SYNC_BYTES = 256 << 20
SYNC_RECORDS = 1 << 15
"""Limits of what may be written and not synced: they bound memory, and what an interrupted first capture has
to repeat."""
# Limit of content that waits to be packed or is being packed.
_PENDING_BYTES = 16 << 20
# Content handed over to one thread at once.
_GROUP_BYTES = 2 << 20


class _Pending(NamedTuple):
    """Chunks being packed, in the order in which they will be appended."""

    chunks: list[tuple[ChunkId, int]]
    """(id, bytes of content)."""
    kind: PackKind
    size_bytes: int
    packed: Job


class Extent(NamedTuple):
    """Extent of the packs, to tell apart what is stored later."""

    last_number: int
    """Highest number that a pack has had."""
    ends: dict[int, int]
    """Number → end in bytes, of the packs that are being appended to."""


class ChunkStore:
    """Store that appends and finds chunks. Also the lookup for the writer's own reads."""

    def __init__(
        self,
        disk: Disk,
        packs: Packs,
        index: WriterIndex,
        identity: Identity,
        tails: dict[PackKind, Tail],
        *,
        pack_bytes: int | None = None,
        before_planes: Callable[[], None] = lambda: None,
    ) -> None:
        """Open the store; ``before_planes`` is called before a record of format 2 is written."""
        self.packs = packs
        self.index = index
        self.identity = identity
        self.id_of: Callable[[Bytes], ChunkId] = identity.chunk_id
        """Function that returns the id of this content, stored or not."""
        # Chunks not yet written.
        self._buffered: dict[bytes, BufferedChunk] = {}
        # Written and not yet durable, so the index does not have them.
        self._written: dict[bytes, ChunkLocation] = {}
        # Packs whose records the index has, because sealing has made them durable.
        self._sealed: set[int] = set()
        # Numbers are never used again: a reader may still have a deleted pack of that number open.
        self._last_number: int = max([index.last_pack(), *(() if index.all_seen else packs.numbers())])
        self.packer = Packer()
        self._before_planes = before_planes
        self._pending: deque[_Pending] = deque()
        self._pending_bytes = 0
        self._reader = ChunkReader(packs, self, identity)
        self._bases = Bases(packs, self._buffered_chunk, self.find, identity)
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
        """Return how far the packs reach now. Call it when everything is durable."""
        ends = {appender.number: appender.end for appender in self.appenders.values() if appender.number}
        return Extent(self._last_number, ends)

    def put(self, data: Bytes, kind: PackKind) -> ChunkId:
        """Store the content unless it is there, and return its id.

        Raises:
            ValueError: the content is larger than 16 MiB.
            OSError: the disk failed.
        """
        if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
            raise ValueError(
                f"a chunk must have at most {pf.MAX_CHUNK_BYTES} bytes, got {memoryview(data).nbytes}"
            )
        chunk = self.id_of(data)
        # A copy that is marked damaged does not count: the content is stored again.
        if chunk in self._buffered or chunk in self._written or self.index.good_among((chunk,)):
            return chunk
        content = Content(data)
        if self._pending or self.packer.worth_a_thread(content):
            self._pack_new({chunk: content}, kind)
        else:
            # No copy when it is bytes.
            content = Content(bytes(data))
            self._append(chunk, len(content.data), self.packer.pack(content, kind), kind)
        return chunk

    def put_all(self, contents: Sequence[Content], kind: PackKind) -> list[ChunkId]:
        """Store what is missing and return all ids.

        Raises:
            ValueError: a content is larger than 16 MiB.
            OSError: the disk failed, perhaps while earlier chunks were written.
        """
        for data, *_ in contents:
            if memoryview(data).nbytes > pf.MAX_CHUNK_BYTES:
                raise ValueError(
                    f"a chunk must have at most {pf.MAX_CHUNK_BYTES} bytes, got {memoryview(data).nbytes}"
                )
        id_of = self.id_of
        ids = [id_of(content.data) for content in contents]
        new = {
            id_: content
            for id_, content in zip(ids, contents, strict=True)
            if id_ not in self._buffered and id_ not in self._written
        }
        if new:
            # One query for the whole run, not one for each block.
            for id_ in self.index.good_among(list(new)):
                del new[ChunkId(id_)]
            self._pack_new(new, kind)
        return ids

    def append(self, record: PackRecord, stored: Bytes, kind: PackKind) -> None:
        """Store these bytes even if the chunk is there already.

        ``record`` says how they were stored elsewhere.
        """
        self._settle_packing()
        packed = PackedChunk(stored, record.flags, pf.checksum(stored), None, record.base)
        self._append(record.id, record.raw_bytes, packed, kind)

    def _buffered_chunk(self, chunk: ChunkId) -> BufferedChunk | None:
        return self._buffered.get(chunk)

    def _pack_new(self, new: dict[ChunkId, Content], kind: PackKind) -> None:
        """Pack and append chunks, none of which is there."""
        group: list[tuple[ChunkId, Content]] = []
        group_bytes = 0
        kept_bytes = sum(len(content.data) for content in new.values())
        for chunk, given in new.items():
            size_bytes = len(given.data)
            codec = given.codec and self._bases.found(chunk, size_bytes, given.codec)
            content = given._replace(data=_stable(given.data, kept_bytes), codec=codec)
            # Before it is packed: equal content that is put meanwhile is found, and trees can refer to it.
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
        # In the order of the calls, so that positions in packs do not depend on which thread is first.
        while self._pending and (
            self._pending_bytes + size_bytes > _PENDING_BYTES or self._pending[0].packed.done()
        ):
            self._settle_packed()
        chunks = [(chunk, len(content.data)) for chunk, content in group]
        packed = self.packer.begin([content for _, content in group], kind)
        self._pending.append(_Pending(chunks, kind, size_bytes, packed))
        self._pending_bytes += size_bytes

    def _settle_packing(self) -> None:
        """Pass everything that was put to its appender."""
        while self._pending:
            self._settle_packed()

    def _settle_packed(self) -> None:
        """Append the group that was handed over first."""
        pending = self._pending[0]
        # Taken off the queue afterwards: if this raises, it raises again, and nothing after it can be
        # committed.
        all_packed = pending.packed.result()
        self._pending.popleft()
        self._pending_bytes -= pending.size_bytes
        for (chunk, raw_bytes), packed in zip(pending.chunks, all_packed, strict=True):
            self._append(chunk, raw_bytes, packed, pending.kind)

    def _append(self, chunk: ChunkId, raw_bytes: int, packed: PackedChunk, kind: PackKind) -> None:
        if packed.flags & pf.FLAG_PLANES:
            # The format of the configuration is raised, durably, before the first record that an earlier
            # ciuic cannot read.
            self._before_planes()
        self._buffered[chunk] = BufferedChunk(packed.stored, raw_bytes, packed.flags, packed.base)
        appender = self.appenders[kind]
        self._note_written(appender.append(chunk, raw_bytes, packed))
        if appender.unsynced_bytes >= SYNC_BYTES or appender.unsynced_records >= SYNC_RECORDS:
            self._sync()

    def get(self, chunk: ChunkId) -> bytes:
        """Return the content, also of a buffered chunk.

        Raises:
            MissingChunk: no pack has the chunk.
            DamagedChunk: no copy of it is good.
        """
        held = self._buffered.get(chunk)
        if held is not None:
            stored, raw_bytes, flags, base, _ = held
            # Until it is packed, the content is here as it is, and `base` only the one that it may get.
            content = read_base(base if flags & pf.FLAG_DIFFERENCE else b"", self.get)
            return unpack(bytes(stored), raw_bytes, flags, base=content)
        return self._reader.get(chunk)

    def has(self, chunk: ChunkId) -> bool:
        """Return whether the chunk is buffered or stored."""
        return chunk in self._buffered or bool(self.find(chunk))

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        """Return known copies, the best first."""
        written = self._written.get(chunk)
        return ([written] if written else []) + self.index.find(chunk)

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        """Search harder, after `find` gave nothing good."""
        return self.index.search(chunk, failed)

    def sync(self) -> None:
        """Make everything stored durable.

        Raises:
            OSError: the disk failed.
        """
        self._settle_packing()
        self._sync()

    def close(self) -> None:
        """Stop all threads and close the packs; what is buffered is dropped."""
        # The packer first: its threads read bases.
        self.packer.close()
        self._bases.close()
        self._pending.clear()
        for appender in self.appenders.values():
            appender.close()
        self._buffered.clear()

    def _sync(self) -> None:
        """Make everything that the appenders have durable."""
        for appender in self.appenders.values():
            self._note_written(appender.flush())
            appender.sync()

    def _note_written(self, records: list[tuple[int, PackRecord]]) -> None:
        for number, record in records:
            self._buffered.pop(record.id, None)
            # Sealing has told the index before this is reached.
            if number not in self._sealed:
                self._written[record.id] = location_of(number, record)

    def _new_number(self) -> int:
        self._last_number += 1
        # Recorded before the pack exists, so that a crash cannot lead to a second pack of this number.
        self.index.set_last_pack(self._last_number)
        return self._last_number

    def _durable(self, number: int, size_bytes: int, sealed: bool, records: list[PackRecord]) -> None:
        self.index.add(number, size_bytes, sealed, records)
        if sealed:
            self._sealed.add(number)
        for record in records:
            self._written.pop(record.id, None)


def _unpacked(content: Content) -> BufferedChunk:
    """Return the buffered chunk, with the base that it may get."""
    codec = content.codec
    bases = [base for base in (codec.base, codec.twin and codec.twin.base) if base] if codec else []
    return BufferedChunk(
        content.data, len(content.data), 0, bases[0] if bases else b"", undecided=len(bases) > 1
    )


def _stable(data: Bytes, kept_bytes: int) -> Bytes:
    """Return content that cannot change while it waits.

    A view of immutable bytes is kept as it is, unless most of those bytes would be kept for a small part.
    """
    if isinstance(data, bytes):
        return data
    if isinstance(data, memoryview) and isinstance(data.obj, bytes) and 2 * kept_bytes >= len(data.obj):
        return data
    return bytes(data)
