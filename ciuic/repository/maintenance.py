"""What garbage collection and check do to packs: rewrite, drop, mark, index anew. Under the writer's lock."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from ciuic.errors import NotFound
from ciuic.repository import packformat as pf
from ciuic.repository.chunks import (
    BadCopyError,
    location_of,
    read_base,
    read_copy,
    read_stored,
    unpack,
)
from ciuic.repository.errors import DamagedChunk, DamagedPack
from ciuic.repository.index import DAMAGED
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord, Shortened
from ciuic.repository.packs import Packs, Segment
from ciuic.types import ChunkId

if TYPE_CHECKING:
    from ciuic.repository.disk import Disk
    from ciuic.repository.store import ChunkStore, Extent

_COPYING_BYTES = 128 << 10
"""What a few copies may need besides themselves: a pack's header, a table, blocks that the file system counts."""


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
    _copy(store, number, kind, [record for record in records if is_live(record.id)])
    return drop_pack(disk, store, number, records) - (store.grown_bytes - size_before)


def shorten_pack(
    disk: Disk,
    store: ChunkStore,
    number: int,
    live: Container[ChunkId] | Callable[[ChunkId], bool],
    room_bytes: int,
) -> Shortened:
    """See Writer.shorten_pack."""
    is_live = live if callable(live) else live.__contains__
    release_pack(store, number)
    size_bytes, size_before = store.packs.size(number), store.grown_bytes
    segments = _sound_segments(store.packs, number)
    keep = len(segments)
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
    """All of them; DamagedPack unless they alone say what the pack holds: without its end it has no footer."""
    listed = strict_records(packs, number)
    segments = list(packs.scan(number))
    if [record for segment in segments for record in segment.records] != listed:
        raise DamagedPack(number, packs.footer_offset(number), "its footer lists what no segment holds")
    return segments


def _copying_costs(segment: Segment, is_live: Callable[[ChunkId], bool]) -> int:
    """The most that the copies of what is live in it take, in bytes."""
    stored = [record.stored_bytes for record in segment.records if is_live(record.id)]
    if not stored:
        return 0
    return sum(stored) + len(stored) * (pf.ALIGN_BYTES + 2 * pf.RECORD_BYTES) + _COPYING_BYTES


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


def give_back(disk: Disk, store: ChunkStore, before: Extent) -> int:
    """See Writer.give_back. The store has been closed."""
    freed_bytes = 0
    for number in sorted(store.packs.numbers()):
        if number > before.last_number:
            size_bytes = store.packs.size(number)
            records: list[PackRecord] | None = None  # then every row of the index is looked at
            with suppress(DamagedPack):
                records = strict_records(store.packs, number)
            store.index.drop(number, records)
            store.packs.forget(number)
            disk.remove_file(store.packs.path(number))
            freed_bytes += size_bytes
        elif number in before.ends:
            freed_bytes += _cut_back(disk, store, number, before.ends[number])
    return freed_bytes


def _cut_back(disk: Disk, store: ChunkStore, number: int, end: int) -> int:
    """Cut off what was appended to a pack since it ended there; bytes freed."""
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
    """Cut a pack to its first ``end`` bytes, which hold the records ``kept``; the index no longer has ``gone``."""
    # The index first: what it says of the rest would be believed by the next capture. A pack that is longer than the index says is
    # taken up again, and should a power cut take back what the index was told, the next writer must see that there is something to
    # look at.
    store.index.cut(number, end, gone, kept)
    disk.touch_dir(store.packs.directory)
    fd = disk.open_write(store.packs.path(number))
    try:
        disk.truncate(fd, end)
    finally:
        disk.close(fd)


def release_pack(store: ChunkStore, number: int) -> None:
    """Nothing is appended to this pack any more."""
    for appender in store.appenders.values():
        if appender.number == number:
            store.sync()
            appender.close_pack()


def mark_damaged(store: ChunkStore, chunks: Iterable[ChunkId]) -> list[ChunkId]:
    """See Writer.mark_damaged."""
    lost = []
    asked = list(dict.fromkeys(chunks))
    # What rests on them is damaged with them, or was and no longer is.
    for chunk in (*asked, *(store.index.resting_on(asked) - set(asked))):
        good = False
        for location in store.index.find(chunk):
            try:
                read_copy(store.packs, _plain(location), chunk, store.seed, store.get)
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
    """Appends good copies of those of which no other pack has one; durable on return."""
    wanted: dict[ChunkId, list[PackRecord]] = {}
    for record in records:
        if record.id in wanted:
            wanted[record.id].append(
                record
            )  # a damaged copy was healed in the same pack: one of them will do
        elif not _good_elsewhere(store, number, record.id):
            wanted[record.id] = [record]
    for record in (record for copies in wanted.values() for record in copies):
        with suppress(OSError):  # only advice
            store.packs.will_need(number, record.offset, record.stored_bytes)
    for copies in wanted.values():
        record, stored = _first_good(store, number, copies)
        store.append(record, stored, kind)
    store.sync()


def _first_good(store: ChunkStore, number: int, copies: list[PackRecord]) -> tuple[PackRecord, bytes]:
    """A copy whose bytes are right, the newest first; DamagedChunk where none are."""
    *newer, oldest = reversed(copies)
    for record in newer:
        with suppress(DamagedChunk):
            return record, _good_copy(store, number, record)
    return oldest, _good_copy(store, number, oldest)


def _good_elsewhere(store: ChunkStore, number: int, chunk: ChunkId) -> bool:
    for location in store.find(chunk):
        if location.pack != number:
            try:
                read_copy(store.packs, _plain(location), chunk, store.seed, store.get)
                return True
            except BadCopyError:
                continue
    return False


def _good_copy(store: ChunkStore, number: int, record: PackRecord) -> bytes:
    """Its stored bytes; DamagedChunk."""
    try:
        stored = read_stored(store.packs, location_of(number, record))
        # What is stored as it is need not be copied to be looked at.
        base = read_base(record.base, store.get)
        content = unpack(stored, record.raw_bytes, record.flags, base=base) if record.flags else stored
        if store.id_of(content) != record.id:
            raise BadCopyError("its bytes do not match its id")
    except (BadCopyError, NotFound) as error:
        raise DamagedChunk(record.id, number, record.offset, str(error)) from None
    return stored
