"""Chunks into packs of the remote, packs into the outbox, and stored packs into the index.

Guarantees: a chunk that was put is found by `has_many` from then on, so that no chunk is sent twice; the index learns of a
pack only when it is stored.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Collection
from typing import Final

from ciuic.remote.format.names import PackRef, new_pack_ref
from ciuic.remote.format.pack import ROW_BYTES
from ciuic.remote.format.pack_writer import RemotePackWriter
from ciuic.remote.index.remote_index import RemoteIndex
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.upload.local_copies import StoredBytes
from ciuic.remote.upload.outbox import ClosedPack, Outbox
from ciuic.remote.upload.pack_size import MAX_BYTES, PackSize
from ciuic.repository.format.pack_format import MAX_CHUNK_BYTES, checksum
from ciuic.repository.model import PackKind, PackRecord
from ciuic.types import ChunkId

# Tree nodes are small: a pack of them ends with its table at a mebibyte.
_MAX_RECORDS: Final = (1 << 20) // ROW_BYTES
# A pack ends with the chunk that reaches its size; that chunk and the table have room behind it.
_CAPACITY_BYTES: Final = MAX_BYTES + MAX_CHUNK_BYTES + (2 << 20)


class Packing:
    """Packs of one upload. For one thread."""

    def __init__(
        self,
        sealer: Sealer,
        index: RemoteIndex,
        outbox: Outbox,
        size: PackSize,
        stored: Callable[[ClosedPack], None],
    ) -> None:
        """Begin.

        Args:
            sealer: Seals of the remote.
            index: Index of the remote; gets each pack when it is stored.
            outbox: Sends packs.
            size: Size at which a pack is closed.
            stored: Called with each pack that was stored, in the thread that calls `put` and `finish`.
        """
        self._sealer = sealer
        self._index = index
        self._outbox = outbox
        self._size = size
        self._stored = stored
        self._writers: dict[PackKind, RemotePackWriter] = {}
        # Buffers of packs under way, and those that may be used again: fresh pages cost as much as a seal.
        self._buffers: dict[PackRef, mmap.mmap] = {}
        self._free: list[mmap.mmap] = []
        # Chunks that are not in the index yet, and the base of each.
        self._waiting: dict[bytes, bytes] = {}
        self.sent_bytes = 0
        """Bytes of the packs that were handed over."""

    def has_many(self, chunks: Collection[bytes]) -> set[bytes]:
        """Return those of the chunks that are on the remote, or on their way there."""
        # A chunk was put after its bases, and what was put stays in an index or here until the upload ends.
        here = {chunk for chunk in chunks if chunk in self._waiting}
        return here | self._index.has_many([chunk for chunk in chunks if chunk not in here])

    def put(self, chunk: StoredBytes, kind: PackKind) -> None:
        """Put a chunk into the pack of its kind, and send the pack when it is large enough.

        Raises:
            Stopped: the uploader was told to end.
        """
        writer = self._writers.get(kind)
        if writer is None:
            writer = self._writers[kind] = RemotePackWriter(
                self._sealer,
                new_pack_ref(kind),
                capacity_bytes=_CAPACITY_BYTES,
                buffer=self._free.pop() if self._free else None,
            )
        record = PackRecord(
            ChunkId(chunk.id),
            0,
            len(chunk.data),
            chunk.raw_bytes,
            chunk.flags,
            checksum(chunk.data),
            chunk.base,
        )
        if writer.add(record, chunk.data) is None:
            raise AssertionError("a pack that is not closed has room for a chunk")
        self._waiting[chunk.id] = chunk.base
        if writer.size_bytes >= self._size.size_bytes or len(writer.records) >= _MAX_RECORDS:
            self._close(kind)

    def finish(self) -> None:
        """Send what is left and return when everything is stored. Raises like `put`."""
        for kind in list(self._writers):
            self._close(kind)
        self._outbox.wait()
        self.settle()

    def settle(self) -> None:
        """Tell the index of packs that were stored since."""
        for pack in self._outbox.take_stored():
            self._free.append(self._buffers.pop(pack.ref))
            self._index.add(pack.ref, pack.size_bytes, list(pack.records))
            for record in pack.records:
                self._waiting.pop(record.id, None)
            self._stored(pack)

    def _close(self, kind: PackKind) -> None:
        writer = self._writers.pop(kind)
        pack = ClosedPack(PackRef(writer.ref), writer.finish(), writer.size_bytes, tuple(writer.records))
        self._buffers[pack.ref] = writer.buffer
        self._outbox.hand_over(pack)
        self.sent_bytes += pack.size_bytes
        self.settle()
