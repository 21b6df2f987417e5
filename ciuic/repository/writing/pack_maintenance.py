"""Maintenance of packs under the writer's lock: rewrite, shorten, drop, mark as damaged, and recode.

Guarantees: ids do not change, so snapshots and trees are not touched. What a pack loses and something still
needs is copied first, checked, and durable before the pack goes: a process that is killed leaves one copy or
both.

Recoding stores chunks again as differences or planes; each is decoded and compared before it is written. Which
copy a reader takes makes no difference: no chunk is in its own chain of bases, and no chain is longer than
`MAX_WRITTEN_BASE_DEPTH`, whichever copies are read (`Bases`). So a chunk on which such a chain rests
already becomes no difference any more: every fifth state of a sequence stays without a base.

A pack is recoded as a whole or not at all. What else it has is copied, so only packs that mostly have chunks
to be recoded are touched; a caller that seals a pack after what is to be recoded together
(`Writer.seal_packs`) makes such packs. Memory: the new copies of one pack; a caller that stops the work may
keep them for its next call (`begun`).
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Container, Iterable, Mapping, MutableMapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as TimedOut
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ciuic.errors import Damaged, NotFound
from ciuic.repository import pack_format as pf
from ciuic.repository.chunk_reader import BadCopyError, location_of, read_base, read_copy, read_stored, unpack
from ciuic.repository.compression import MAX_WRITTEN_BASE_DEPTH, Codec, Coded, Pace, code, threads
from ciuic.repository.errors import DamagedChunk, DamagedPack
from ciuic.repository.index_database import DAMAGED
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord, Shortened
from ciuic.repository.pack_directory import Packs, Segment
from ciuic.repository.writing.chunk_store import Bases, BufferedChunk
from ciuic.types import ChunkId

if TYPE_CHECKING:
    from ciuic.repository.writing.chunk_store import ChunkStore, Extent
    from ciuic.system.disk import Disk


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
    _release_pack(store, number)
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
    _release_pack(store, number)
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
    _release_pack(store, number)
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


def _release_pack(store: ChunkStore, number: int) -> None:
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
    return msgspec.structs.replace(location, flags=location.flags & ~DAMAGED)


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


# Share of a pack that must be recoded: the rest is copied.
_MIN_SHARE: Final = 0.5
# Largest share of its size at which a chunk is stored again.
_MAX_CODED_SHARE: Final = 0.95
_THREADS: Final = 2
# Time between two looks at the pace.
_POLL_SECONDS: Final = 0.02


class Recoded(NamedTuple):
    """Result of `Writer.recode`."""

    chunks: int = 0
    """Number of chunks that lie in a new form now."""
    freed_bytes: int = 0
    """Bytes by which the packs have shrunk."""
    stopped: bool = False
    """True if the pace ended the work: the same call does the rest."""
    left: Sequence[ChunkId] = ()
    """Chunks that lie as they are because their packs are mostly of others, or too small."""


Begun = MutableMapping[ChunkId, Coded | None]
"""Coded content by chunk, where the pace ended the work on its pack; None if it does not become smaller."""
_Waiting = deque[tuple[ChunkId, int, Future[Coded | None]]]
"""Chunks that are being coded, with their sizes."""


def recode(
    disk: Disk,
    store: ChunkStore,
    wanted: Mapping[ChunkId, Codec],
    pace: Callable[[], Pace],
    begun: Begun,
    min_pack_bytes: int,
) -> Recoded:
    """Recode chunks; see `Writer.recode`."""
    by_pack: dict[int, list[ChunkId]] = defaultdict(list)
    for chunk in wanted:
        for copy in store.find(chunk):
            # A copy that is coded already is left alone, and so is one that is marked as damaged.
            if not copy.flags:
                by_pack[copy.pack].append(chunk)
    chunks = freed_bytes = 0
    left: list[ChunkId] = []
    for number, plain in sorted(by_pack.items()):
        if not _mostly(store, number, plain, min_pack_bytes):
            left += plain
            continue
        coded = _code_all(store, {chunk: wanted[chunk] for chunk in plain}, pace, begun)
        if coded is None:
            return Recoded(chunks, freed_bytes, stopped=True)
        # A chain whose dependents the index has lost could become longer than readers follow.
        if not store.index.tells_all:
            break
        if coded and _mostly(store, number, list(coded)):
            freed_bytes += _replace(disk, store, number, coded)
            chunks += len(coded)
        for chunk in plain:
            begun.pop(chunk, None)
    return Recoded(chunks, freed_bytes, left=left)


class _NewCopy(NamedTuple):
    """Coded content; no stored bytes where a good coded copy lies in another pack."""

    raw_bytes: int
    coded: Coded | None


def _mostly(store: ChunkStore, number: int, chunks: Sequence[ChunkId], min_pack_bytes: int = 0) -> bool:
    """Return whether these chunks are most of the pack, which is one of data, sound and of some size."""
    try:
        if store.packs.kind(number) != "data":
            return False
        records = store.packs.strict_records(number)
    # A damaged pack is left to check and prune.
    except Damaged:
        return False
    ours = set(chunks)
    own_bytes = sum(record.stored_bytes for record in records if record.id in ours)
    all_bytes = sum(record.stored_bytes for record in records)
    return own_bytes >= _MIN_SHARE * all_bytes and all_bytes >= min_pack_bytes


def _replace(disk: Disk, store: ChunkStore, number: int, copies: Mapping[ChunkId, _NewCopy]) -> int:
    """Store the new copies, then let the pack go; return the bytes freed."""
    # First, so that nothing is appended to the pack that goes.
    _release_pack(store, number)
    size_before = store.grown_bytes
    for chunk, (raw_bytes, coded) in copies.items():
        if coded is not None:
            record = PackRecord(
                chunk, 0, len(coded.stored), raw_bytes, coded.flags, pf.checksum(coded.stored), coded.base
            )
            store.append(record, coded.stored, "data")
    # What is copied goes into another pack, of which it is most when it is to be recoded itself.
    store.sync()
    store.appenders["data"].seal(1)
    grown_bytes = store.grown_bytes - size_before
    # The rewrite syncs what was appended here with what it copies, before the pack goes.
    freed = rewrite_pack(disk, store, number, lambda chunk: chunk not in copies, salvage=False)
    return freed - grown_bytes


def _code_all(
    store: ChunkStore, wanted: Mapping[ChunkId, Codec], pace: Callable[[], Pace], begun: Begun
) -> dict[ChunkId, _NewCopy] | None:
    """Return the new copies of the chunks that become smaller; None if the pace ended the work."""
    found: dict[ChunkId, _NewCopy] = {}
    # What may get a base here, which the index does not know yet: its chain is not known.
    undecided = _Undecided()
    bases = Bases(store.packs, undecided.buffered, store.find, store.identity)
    waiting: _Waiting = deque()
    with ExitStack() as last:
        last.callback(bases.close)
        # After the pools: what they were at when the work ended counts too.
        last.callback(_keep_finished, waiting, begun)
        pools = _Pools()
        last.callback(pools.close)
        for chunk, codec in wanted.items():
            while len(waiting) >= 2 * _THREADS:
                if not _take(waiting, found, begun, pace):
                    return None
            if (now := pace()) == "now":
                return None
            copies = store.find(chunk)
            # The index has lost it since.
            if not copies:
                continue
            if _has_coded_copy(store, chunk):
                found[chunk] = _NewCopy(copies[0].raw_bytes, None)
                continue
            longest = MAX_WRITTEN_BASE_DEPTH - _height(store, chunk, undecided)
            usable = bases.found(chunk, copies[0].raw_bytes, codec, max_length=longest)
            undecided.add(chunk, usable)
            if chunk in begun and _rests_on_usable(begun[chunk], usable):
                _note(found, chunk, copies[0].raw_bytes, begun[chunk])
                continue
            try:
                content = store.get(chunk)
            # Nothing is stored instead of what cannot be read.
            except Damaged:
                continue
            waiting.append((chunk, len(content), pools.submit(content, usable, patient=now == "patient")))
        while waiting:
            if not _take(waiting, found, begun, pace):
                return None
    return found


def _take(waiting: _Waiting, found: dict[ChunkId, _NewCopy], begun: Begun, pace: Callable[[], Pace]) -> bool:
    """Wait for the oldest chunk; return False if the pace ended the work before."""
    chunk, raw_bytes, future = waiting[0]
    while pace() != "now":
        with suppress(TimedOut):
            begun[chunk] = future.result(_POLL_SECONDS)
            waiting.popleft()
            _note(found, chunk, raw_bytes, begun[chunk])
            return True
    return False


def _note(found: dict[ChunkId, _NewCopy], chunk: ChunkId, raw_bytes: int, coded: Coded | None) -> None:
    if coded is not None:
        found[chunk] = _NewCopy(raw_bytes, coded)


def _keep_finished(waiting: _Waiting, begun: Begun) -> None:
    """Keep what was coded and not taken."""
    for chunk, _, future in waiting:
        if future.done() and not future.cancelled() and future.exception() is None:
            begun[chunk] = future.result()


def _rests_on_usable(coded: Coded | None, usable: Codec) -> bool:
    """Return whether coded content may still be stored: its base may have gone since, or its chain grown."""
    return coded is None or coded.base in (b"", usable.base, usable.twin and usable.twin.base)


def _has_coded_copy(store: ChunkStore, chunk: ChunkId) -> bool:
    """Return whether a good copy is coded already: a process was killed before it let the old pack go."""
    for copy in store.find(chunk):
        if copy.flags and not copy.flags & DAMAGED:
            with suppress(BadCopyError):
                read_copy(store.packs, copy, chunk, store.identity, store.get)
                return True
    return False


def _height(store: ChunkStore, chunk: ChunkId, undecided: _Undecided) -> int:
    """Return the length of the longest chain of differences that rests on a chunk, in any copies."""
    layer = {chunk}
    for height in range(MAX_WRITTEN_BASE_DEPTH):
        layer = store.index.direct_dependents_of(layer) | undecided.dependents_of(layer)
        if not layer:
            return height
    return MAX_WRITTEN_BASE_DEPTH


class _Undecided:
    """Chunks that may get a base."""

    def __init__(self) -> None:
        self._chunks: set[ChunkId] = set()
        self._dependents: dict[ChunkId, set[ChunkId]] = defaultdict(set)

    def add(self, chunk: ChunkId, codec: Codec) -> None:
        for base in (codec.base, codec.twin and codec.twin.base):
            if base:
                self._chunks.add(chunk)
                # Either may be taken: the chunk counts as if it rested on both.
                self._dependents[base].add(chunk)

    def buffered(self, chunk: ChunkId) -> BufferedChunk | None:
        """Return a chunk that is no base for others."""
        return BufferedChunk(b"", 0, 0, b"", undecided=True) if chunk in self._chunks else None

    def dependents_of(self, chunks: set[ChunkId]) -> set[ChunkId]:
        return {above for chunk in chunks for above in self._dependents.get(chunk, ())}


class _Pools:
    """Threads that code: patient ones (True) and others."""

    def __init__(self) -> None:
        self._pools: dict[bool, ThreadPoolExecutor] = {}

    def submit(self, content: bytes, codec: Codec, *, patient: bool) -> Future[Coded | None]:
        if patient not in self._pools:
            self._pools[patient] = threads(_THREADS, patient=patient)
        return self._pools[patient].submit(_coded, content, codec)

    def close(self) -> None:
        """Wait for running jobs, which are short."""
        for pool in self._pools.values():
            pool.shutdown(wait=True, cancel_futures=True)


def _coded(content: bytes, codec: Codec) -> Coded | None:
    """Return content coded and decoded again; None if it does not become smaller."""
    base = codec.read_base() if codec.base else None
    coded = code(content, codec._replace(base=codec.base if base else None, read_base=lambda: base))
    if len(coded.stored) > _MAX_CODED_SHARE * len(content):
        return None
    if coded.kind == "twin":
        base = codec.twin.read() if codec.twin else None
    # The only copy goes when this one is there.
    if unpack(coded.stored, len(content), coded.flags, base=base if coded.base else None) != content:
        raise AssertionError(f"content coded as {coded.kind} does not come back")
    return coded
