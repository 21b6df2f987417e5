"""What garbage collection and check do to packs: rewrite, drop, mark, index anew. Under the writer's lock."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from typing import TYPE_CHECKING

from ciuic.errors import NotFound
from ciuic.repository.chunks import BadCopyError, location_of, read_copy, read_stored
from ciuic.repository.errors import DamagedChunk, DamagedPack
from ciuic.repository.index import DAMAGED
from ciuic.repository.model import ChunkLocation, PackRecord
from ciuic.repository.packs import Packs
from ciuic.types import ChunkId

if TYPE_CHECKING:
    from ciuic.repository.disk import Disk
    from ciuic.repository.store import ChunkStore


def strict_records(packs: Packs, number: int) -> list[PackRecord]:
    """All that a pack holds, or DamagedPack: never a list that might lack something. NotFound."""
    try:
        records = packs.footer(number)
    except DamagedPack:
        records = None  # a scan that finds no damage is as good
    if records is None:
        records = []
        for segment in packs.scan(number):
            if segment.damage is not None:
                raise segment.damage
            records += segment.records
    return records


def rewrite_pack(
    disk: Disk,
    store: ChunkStore,
    number: int,
    live: Container[ChunkId] | Callable[[ChunkId], bool],
    *,
    salvage: bool,
) -> int:
    """See Writer.rewrite_pack."""
    is_live = live if callable(live) else live.__contains__
    release_pack(store, number)  # first: what is still buffered for this pack must be among its records
    records = store.packs.records(number) if salvage else strict_records(store.packs, number)
    kind = store.packs.kind(number)
    size_before = store.grown_bytes
    for record in records:
        if is_live(record.id) and not _good_elsewhere(store, number, record.id):
            stored, raw_bytes, flags = _good_copy(store, number, record)
            store.append(record.id, stored, raw_bytes, flags, kind)
    store.sync()
    return drop_pack(disk, store, number, records) - (store.grown_bytes - size_before)


def drop_pack(disk: Disk, store: ChunkStore, number: int, records: list[PackRecord] | None = None) -> int:
    """See Writer.drop_pack."""
    release_pack(store, number)
    size_bytes = store.packs.size(number)
    if records is None:
        try:
            records = store.packs.records(number)
        except DamagedPack:
            records = None
    # The index first: a row without a pack would make `put_chunk` believe that the content is there.
    store.index.drop(number, records)
    store.packs.forget(number)
    disk.remove_file(store.packs.path(number))
    return size_bytes


def release_pack(store: ChunkStore, number: int) -> None:
    """Nothing is appended to this pack any more."""
    for appender in store.appenders.values():
        if appender.number == number:
            store.sync()
            appender.close_pack()


def mark_damaged(store: ChunkStore, chunks: Iterable[ChunkId]) -> list[ChunkId]:
    """See Writer.mark_damaged."""
    lost = []
    for chunk in chunks:
        good = False
        for location in store.index.find(chunk):
            try:
                read_copy(store.packs, _plain(location), chunk, store.seed)
                bad = False
            except BadCopyError:
                bad = True
            if bad != bool(location.flags & DAMAGED):
                store.index.mark(chunk, location, bad)
            good = good or not bad
        if not good:
            lost.append(chunk)
    return lost


def _plain(location: ChunkLocation) -> ChunkLocation:
    return location._replace(flags=location.flags & ~DAMAGED)


def _good_elsewhere(store: ChunkStore, number: int, chunk: ChunkId) -> bool:
    for location in store.find(chunk):
        if location.pack != number:
            try:
                read_copy(store.packs, _plain(location), chunk, store.seed)
                return True
            except BadCopyError:
                continue
    return False


def _good_copy(store: ChunkStore, number: int, record: PackRecord) -> tuple[bytes, int, int]:
    """(stored bytes, raw length, flags); DamagedChunk."""
    location = location_of(number, record)
    try:
        read_copy(store.packs, location, record.id, store.seed)
        return read_stored(store.packs, location), record.raw_bytes, record.flags
    except (BadCopyError, NotFound) as error:
        raise DamagedChunk(record.id, number, record.offset, str(error)) from None
