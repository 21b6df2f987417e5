"""Maintenance of packs under the writer's lock, for prune and check: rewrite, shorten, drop, mark."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ciuic.errors import NotFound
from ciuic.repository.errors import DamagedChunk, DamagedPack
from ciuic.repository.format import pack_format as pf
from ciuic.repository.index.database import DAMAGED
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord, Shortened
from ciuic.repository.packs.chunk_reader import (
    BadCopyError,
    location_of,
    read_base,
    read_copy,
    read_stored,
    unpack,
)
from ciuic.repository.packs.pack_directory import Packs, Segment
from ciuic.types import ChunkId

if TYPE_CHECKING:
    from ciuic.repository.disk.operations import Disk
    from ciuic.repository.writing.chunk_store import ChunkStore, Extent

# Bytes that a few copies may need besides themselves: a pack's header, a table, blocks that the file system
# counts.
_COPYING_BYTES = 128 << 10


def rewrite_pack(
    disk: Disk,
    store: ChunkStore,
    number: int,
    live: Container[ChunkId] | Callable[[ChunkId], bool],
    *,
    salvage: bool,
) -> int:
    """Rewrite a pack; see `Writer.rewrite_pack`."""
    is_live = live if callable(live) else live.__contains__
    # First, because what is still buffered for this pack must be among its records.
    release_pack(store, number)
    records = store.packs.records(number) if salvage else store.packs.strict_records(number)
    kind = store.packs.kind(number)
    size_before = store.grown_bytes
    # The copies are durable before the pack goes: a power cut leaves both, and either will do.
    _copy(store, number, kind, [record for record in records if is_live(record.id)])
    return drop_pack(disk, store, number, records) - (store.grown_bytes - size_before)


def shorten_pack(
    disk: Disk,
    store: ChunkStore,
    number: int,
    live: Container[ChunkId] | Callable[[ChunkId], bool],
    room_bytes: int,
) -> Shortened:
    """Shorten a pack; see `Writer.shorten_pack`."""
    is_live = live if callable(live) else live.__contains__
    release_pack(store, number)
    size_bytes, size_before = store.packs.size(number), store.grown_bytes
    segments = _sound_segments(store.packs, number)
    keep = len(segments)
    # From the end on, so that what is left is a pack like any other at every moment.
    while keep and (cost := _copying_costs(segments[keep - 1], is_live)) <= room_bytes:
        room_bytes -= cost
        keep -= 1
    if keep == len(segments):
        return Shortened(0, size_bytes)
    kind = store.packs.kind(number)
    gone = [record for segment in segments[keep:] for record in segment.records]
    _copy(store, number, kind, [record for record in gone if is_live(record.id)])
    if not keep:
        return Shortened(drop_pack(disk, store, number, gone) - (store.grown_bytes - size_before), 0)
    end = segments[keep - 1].end
    kept = [record for segment in segments[:keep] for record in segment.records]
    _truncate(disk, store, number, end, gone, kept)
    return Shortened(size_bytes - end - (store.grown_bytes - size_before), end)


def _sound_segments(packs: Packs, number: int) -> list[Segment]:
    """Return the segments.

    DamagedPack unless they list all that the footer does, which is about to be cut off.
    """
    listed = packs.strict_records(number)
    segments = list(packs.scan(number))
    if [record for segment in segments for record in segment.records] != listed:
        raise DamagedPack(number, packs.footer_offset(number), "its footer lists records that no segment has")
    return segments


def _copying_costs(segment: Segment, is_live: Callable[[ChunkId], bool]) -> int:
    """Return the most bytes that copies of the live chunks in a segment take."""
    stored = [record.stored_bytes for record in segment.records if is_live(record.id)]
    if not stored:
        return 0
    # Each copy may be aligned, and have a record of its base beside its own.
    return sum(stored) + len(stored) * (pf.ALIGN_BYTES + 2 * pf.RECORD_BYTES) + _COPYING_BYTES


def drop_pack(disk: Disk, store: ChunkStore, number: int, records: list[PackRecord] | None = None) -> int:
    """Drop a pack; see `Writer.drop_pack`."""
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


def give_back(disk: Disk, store: ChunkStore, before: Extent) -> int:
    """Remove what was stored since ``before``; see `Writer.give_back`. The store has been closed."""
    freed_bytes = 0
    for number in sorted(store.packs.numbers()):
        # Begun since then: nothing committed is in it.
        if number > before.last_number:
            size_bytes = store.packs.size(number)
            # None: the index reads its whole table.
            records: list[PackRecord] | None = None
            with suppress(DamagedPack):
                records = store.packs.strict_records(number)
            store.index.drop(number, records)
            store.packs.forget(number)
            disk.remove_file(store.packs.path(number))
            freed_bytes += size_bytes
        elif number in before.ends:
            freed_bytes += _cut_back(disk, store, number, before.ends[number])
    return freed_bytes


def _cut_back(disk: Disk, store: ChunkStore, number: int, end: int) -> int:
    """Cut off what was appended to a pack after ``end``; return the bytes freed."""
    size_bytes = store.packs.size(number)
    if size_bytes <= end:
        return 0
    kept: list[PackRecord] = []
    gone: list[PackRecord] = []
    for segment in store.packs.scan(number):
        (kept if segment.end <= end else gone).extend(segment.records)
    _truncate(disk, store, number, end, gone, kept)
    store.packs.forget(number)
    return size_bytes - end


def _truncate(
    disk: Disk, store: ChunkStore, number: int, end: int, gone: list[PackRecord], kept: list[PackRecord]
) -> None:
    """Cut a pack to its first ``end`` bytes, after removing ``gone`` from the index; ``kept`` stays."""
    # The index first: the next capture would believe what it says of the rest. A pack that is longer than the
    # index says is indexed again; and if a power cut takes back what the index was told, the new mtime tells
    # the next writer to look.
    store.index.cut(number, end, gone, kept)
    disk.touch_dir(store.packs.directory)
    fd = disk.open_write(store.packs.path(number))
    try:
        disk.truncate(fd, end)
    finally:
        disk.close(fd)


def release_pack(store: ChunkStore, number: int) -> None:
    """Append nothing more to this pack."""
    for appender in store.appenders.values():
        if appender.number == number:
            # Records of this pack may be buffered, or written and not yet synced.
            store.sync()
            appender.close_pack()


def mark_damaged(store: ChunkStore, chunks: Iterable[ChunkId]) -> list[ChunkId]:
    """Read all copies and mark the bad ones; see `Writer.mark_damaged`."""
    lost = []
    asked = list(dict.fromkeys(chunks))
    # Differences from these chunks are damaged with them, or were and are not any more.
    for chunk in (*asked, *(store.index.dependents_of(asked) - set(asked))):
        good = False
        for location in store.index.find(chunk):
            try:
                read_copy(store.packs, _plain(location), chunk, store.identity, store.get)
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


def _copy(store: ChunkStore, number: int, kind: PackKind, records: list[PackRecord]) -> None:
    """Append good copies of the records that no other pack has; durable on return."""
    wanted: dict[ChunkId, list[PackRecord]] = {}
    for record in records:
        if record.id in wanted:
            # A damaged copy was stored again in the same pack: one of them is enough.
            wanted[record.id].append(record)
        elif not _good_elsewhere(store, number, record.id):
            wanted[record.id] = [record]
    # All are announced before the first is read, so that the disk works ahead.
    for record in (record for copies in wanted.values() for record in copies):
        # Only advice.
        with suppress(OSError):
            store.packs.will_need(number, record.offset, record.stored_bytes)
    for copies in wanted.values():
        record, stored = _first_good(store, number, copies)
        store.append(record, stored, kind)
    # Durable before the caller drops the pack that they come from.
    store.sync()


def _first_good(store: ChunkStore, number: int, copies: list[PackRecord]) -> tuple[PackRecord, bytes]:
    """Return a copy whose bytes are right, the newest first. DamagedChunk if there is none."""
    *newer, oldest = reversed(copies)
    for record in newer:
        with suppress(DamagedChunk):
            return record, _good_copy(store, number, record)
    return oldest, _good_copy(store, number, oldest)


def _good_elsewhere(store: ChunkStore, number: int, chunk: ChunkId) -> bool:
    for location in store.find(chunk):
        if location.pack != number:
            try:
                read_copy(store.packs, _plain(location), chunk, store.identity, store.get)
                return True
            except BadCopyError:
                continue
    return False


def _good_copy(store: ChunkStore, number: int, record: PackRecord) -> bytes:
    """Return the stored bytes of a record, checked.

    Raises:
        DamagedChunk: no copy of it is good.
    """
    try:
        stored = read_stored(store.packs, location_of(number, record))
        # Content that is stored as it is can be checked without a copy.
        base = read_base(record.base, store.get)
        content = unpack(stored, record.raw_bytes, record.flags, base=base) if record.flags else stored
        if store.id_of(content) != record.id:
            raise BadCopyError("its bytes do not match its id")
    except (BadCopyError, NotFound) as error:
        raise DamagedChunk(record.id, number, record.offset, str(error)) from None
    return stored
