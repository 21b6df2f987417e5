"""Write a remote pack into one buffer, to be sent as one object.

References:
    docs/remote-format.md, section 5
"""

from __future__ import annotations

import mmap
from typing import Final

import xxhash

from ciuic.errors import UsageError
from ciuic.remote.format.names import pack_name
from ciuic.remote.format.pack import (
    HEADER_BYTES,
    MAX_PACK_BYTES,
    MAX_ROWS,
    ROW_BYTES,
    TRAILER_BYTES,
    PackLayout,
)
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.ids import Bytes
from ciuic.repository.model import PackRecord

DEFAULT_PACK_BYTES: Final = 64 << 20
"""Largest pack that uploaders write."""


class RemotePackWriter:
    """New pack. Not to be shared by threads.

    Each record is sealed once, straight into the buffer. A pack that could not be sent completely is sent
    again with the same bytes, or given up with its id: its offsets are nonces.

    Args:
        sealer: seals of the remote.
        ref: kind and id of the pack, from `names.new_pack_ref`; never one that was used before.
        capacity_bytes: size of the pack at most, table included. Ignored if ``buffer`` is given.
        buffer: buffer of an earlier writer whose pack was sent, to be used again.
    """

    def __init__(
        self,
        sealer: Sealer,
        ref: str,
        *,
        capacity_bytes: int = DEFAULT_PACK_BYTES,
        buffer: mmap.mmap | None = None,
    ) -> None:
        self.ref: Final = ref
        self.name: Final = pack_name(ref)
        self._layout = PackLayout(sealer, ref, self.name)
        self._seal = self._layout.seal
        # Memory is used only as far as the pack is filled; a bytearray is filled with zeros when it is made.
        self.buffer: Final = mmap.mmap(-1, capacity_bytes) if buffer is None else buffer
        if not HEADER_BYTES + TRAILER_BYTES < len(self.buffer) <= MAX_PACK_BYTES:
            raise ValueError(f"a pack must have at most {MAX_PACK_BYTES} bytes, got {len(self.buffer)}")
        self.buffer[:HEADER_BYTES] = self._layout.header
        self._view = memoryview(self.buffer)
        self._end = HEADER_BYTES
        self._records: list[PackRecord] = []
        self._finished = False

    @property
    def records(self) -> list[PackRecord]:
        """Records so far, with offsets in this pack."""
        return self._records

    @property
    def size_bytes(self) -> int:
        """Size of the pack as it is now, with its table."""
        if self._finished:
            return self._end
        return self._end + len(self._records) * ROW_BYTES + self._seal.tag_bytes + TRAILER_BYTES

    def fits(self, stored_bytes: int) -> bool:
        """Return whether a record of this length can be added."""
        more = stored_bytes + self._seal.tag_bytes + ROW_BYTES
        return len(self._records) < MAX_ROWS and self.size_bytes + more <= len(self.buffer)

    def add(self, record: PackRecord, stored: Bytes) -> PackRecord | None:
        """Seal a record into the pack and return it with its new offset; None if it does not fit.

        Args:
            record: record of a local pack; its offset there is ignored.
            stored: its stored bytes.

        Raises:
            ValueError: ``stored`` is not what the record says; the pack is as it was.
        """
        if self._finished:
            raise UsageError(f"{self.name} is finished: a record needs another pack")
        if len(stored) != record.stored_bytes or xxhash.xxh3_64_intdigest(stored) != record.checksum:
            raise ValueError(f"the stored bytes of chunk {record.id.hex()} do not match their record")
        if not self.fits(record.stored_bytes):
            return None
        offset = self._end
        end = offset + record.stored_bytes + self._seal.tag_bytes
        self._seal.seal_into(offset, stored, self._view[offset:end])
        placed = record._replace(offset=offset)
        self._records.append(placed)
        self._end = end
        return placed

    def finish(self) -> list[memoryview]:
        """Add table and trailer and return the whole pack as parts for `Objects.put`.

        The parts are views of `buffer`: they are valid until the buffer is used again.

        Raises:
            ValueError: the pack has no record.
        """
        if not self._records:
            raise ValueError(f"{self.name} has no record: an empty pack is not written")
        if not self._finished:
            tail = self._layout.encode_table(self._records, self._end)
            self._view[self._end : self._end + len(tail)] = tail
            self._end += len(tail)
            self._finished = True
        return [self._view[: self._end]]
