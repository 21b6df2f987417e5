"""Copy what is needed of mostly dead packs to new packs, so that the old ones can go."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from ciuic.errors import Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.names import PackRef, new_pack_ref, split_ref
from ciuic.remote.format.pack_reader import RemotePackReader
from ciuic.remote.format.pack_writer import DEFAULT_PACK_BYTES, RemotePackWriter
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.model import PackKind

# Records that are read at once: a few MiB with blocks of 256 KiB.
_RECORDS_AT_ONCE = 32


class Repacker:
    """Writer of new packs from records of old ones. Records are verified, and sealed anew.

    Nothing is committed for a new pack: until a round condemns the old one both have the chunks, and any round that
    condemns either sees the other.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        *,
        pack_bytes: int = DEFAULT_PACK_BYTES,
        new_ref: Callable[[PackKind], PackRef] = new_pack_ref,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._pack_bytes = pack_bytes
        self._new_ref = new_ref
        self._open: dict[PackKind, RemotePackWriter] = {}
        # Packs whose chunks are partly in a pack that was not sent yet.
        self._waiting: dict[PackKind, list[PackRef]] = {"data": [], "meta": []}
        self.written: list[PackRef] = []
        """New packs, stored."""
        self.copied: list[PackRef] = []
        """Old packs whose needed chunks are all in new packs that are stored."""
        self.bytes = 0
        """Stored bytes that were copied."""

    def copy_all(self, needed: Mapping[PackRef, Collection[bytes]]) -> None:
        """Copy these chunks of these packs. A pack that is gone or damaged is left as it is."""
        for ref, chunks in needed.items():
            kind = split_ref(ref)[0]
            try:
                self._copy(ref, kind, chunks)
            except (NoSuchObject, ArchivedObject, Damaged):
                continue
            self._waiting[kind].append(ref)
        for kind in ("data", "meta"):
            self._send(kind)
            self.copied += self._waiting[kind]

    def _copy(self, ref: PackRef, kind: PackKind, chunks: Collection[bytes]) -> None:
        reader = RemotePackReader(self._sealer, ref)
        records = [record for record in reader.read_table(self._objects) if record.id in chunks]
        for start in range(0, len(records), _RECORDS_AT_ONCE):
            some = records[start : start + _RECORDS_AT_ONCE]
            for record, stored in zip(some, reader.read_records(self._objects, some), strict=True):
                if not self._writer(kind).fits(record.stored_bytes):
                    self._send(kind)
                if self._writer(kind).add(record, stored) is None:
                    raise DamagedRemote(reader.name, "it has a record that is larger than a pack")
                self.bytes += record.stored_bytes

    def _writer(self, kind: PackKind) -> RemotePackWriter:
        if kind not in self._open:
            self._open[kind] = RemotePackWriter(
                self._sealer, self._new_ref(kind), capacity_bytes=self._pack_bytes
            )
        return self._open[kind]

    def _send(self, kind: PackKind) -> None:
        writer = self._open.pop(kind, None)
        if writer is not None and writer.records:
            self._objects.put(writer.name, writer.finish())
            self.written.append(PackRef(writer.ref))


class CountingRepacker(Repacker):
    """Repacker that writes nothing, and counts what it would copy."""

    def copy_all(self, needed: Mapping[PackRef, Collection[bytes]]) -> None:
        """Count these chunks of these packs; a pack whose table cannot be read is left out."""
        for ref, chunks in needed.items():
            try:
                records = RemotePackReader(self._sealer, ref).read_table(self._objects)
            except (NoSuchObject, ArchivedObject, Damaged):
                continue
            self.bytes += sum(record.stored_bytes for record in records if record.id in chunks)
            self.copied.append(ref)
