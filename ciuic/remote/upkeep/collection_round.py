"""Round of collection: delete the packs that no snapshot needs, beside uploaders that never stop.

Guarantee: a snapshot that some log commits and no log removes keeps a copy of each of its chunks, whatever uploaders and
other collectors do, wherever any of them stops or pauses. A collector also ends a round that another one began. It reads
snapshots only through a function that its caller brings (`MarkSnapshots`).

The order of the steps is the safety argument (docs/remote-format.md, section 8):

1. mark the chunks that snapshots refer to (`live_chunks`), and choose what is to be condemned (`Collector._choose`): needs no
   care, because step 4 decides;
2. create ``gc/<r>`` (`_begin`): from now on a writer that begins sees what is condemned;
3. then put a fence into every log (`_fence_logs`): a writer that goes on sees it before its next commit;
4. then list, mark again, and take out what is needed (`_decide`): every commit before a fence is seen. Of each
   needed chunk a copy that stays is read: one that has decayed in the store counts for nothing (`_KeptCopies`);
5. create ``gc/<r>.final``, whichever stands is valid; 6. delete just that; 7. create ``gc/<r>.done``.

A decision that another one has made is compared with the logs first, after the fences: whoever has a host's key may be able to
create objects of rounds. An honest one names nothing that is needed, whenever it is looked at. Any other is not carried out.

What was given up more suddenly than by a retention (`Brake`) counts as live here, and nowhere else.

A listing is not believed alone. Each one of logs must have the entry with which this collector began, logs are listed until
a listing brings none without a fence, and logs that commit nothing are no reason to delete everything.

A round whose ``.final`` cannot be read is not ended by a collection (`run` refuses): what it deletes, or a paused collector may
yet, is not known. `mend` begins the next round with the same list. After the fences of that one nobody relies on anything of
the list. What is needed of it is copied, and *all* of it is decided, which covers whatever the unreadable decision names; then the
damaged ``.final`` is replaced by this one.

What is needed of mostly dead packs is copied to new packs first, so that the old ones can go (`Repacker`).

References:
    docs/remote-format.md, section 8
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import groupby, islice
from operator import attrgetter
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

import msgspec

from ciuic.errors import Damaged, NotFound
from ciuic.maintenance.chunkset import NeededChunks
from ciuic.remote.documents import (
    MAX_MANIFESTS,
    MAX_PACKS,
    LiveManifest,
    LogFence,
    StoredRound,
    create_round,
    encode_round,
    object_digest,
    read_round,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import (
    InlinePool,
    LogReader,
    LostCommits,
    NothingCommitted,
    Rounds,
    UnloggedManifest,
    unlogged_manifests,
)
from ciuic.remote.object_names import (
    MANIFESTS_PREFIX,
    LogPosition,
    PackRef,
    RoundPart,
    log_entry_name,
    new_hex_id,
    new_pack_ref,
    pack_name,
    parse_manifest,
    round_name,
    split_ref,
    table_name,
)
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, ObjectInfo, Objects, RefusedBody
from ciuic.remote.pack import (
    ROW_BYTES,
    PackFiller,
    PackLimit,
    RemotePackReader,
    in_runs,
)
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry, Manifests, RemoteSnapshots, stored_manifest
from ciuic.remote.remote_index import ChunkCopy, RemoteIndex, cold_packs
from ciuic.remote.sealing.sealer import TAG_BYTES, Sealer
from ciuic.remote.upkeep.brake import Brake
from ciuic.remote.writer_log import LogUpkeep, WriterLog, append_to_log
from ciuic.repository.chunk_reader import MAX_READ_BASE_DEPTH
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.model import ChunkLocation, PackKind, PackRecord
from ciuic.repository.snapshot_format import decode_any_snapshot
from ciuic.types import ChunkId, SnapshotId
from ciuic.units import plural


class LiveChunks(Protocol):
    """Set of chunks that snapshots need. It may claim, harmlessly, to have one that it has not."""

    def __contains__(self, chunk: object, /) -> bool: ...

    def __len__(self) -> int: ...

    def add(self, chunk: ChunkId, /) -> None:
        """Add a chunk."""


MarkSnapshots = Callable[[Mapping[str, LiveManifest]], LiveChunks]
"""Function that returns a set with at least every chunk that these snapshots refer to; the caller may add to the set.

Its argument has snapshots by the names of their manifests. It raises Damaged or NotFound if a manifest or a tree cannot be
read; then nothing is collected.
"""


class PackUse(NamedTuple):
    """Needed part of a pack, in bytes of the pack: records with their rows in its table."""

    live_bytes: int = 0
    only_here_bytes: int = 0
    """Bytes of live chunks that have no copy in another pack."""


def add_bases(index: RemoteIndex, live: LiveChunks) -> None:
    """Add the bases of live chunks, from which a copy is stored as the difference, and their bases."""
    for _ in range(MAX_READ_BASE_DEPTH):
        added = False
        for chunk, base in index.bases():
            if chunk in live and base not in live:
                live.add(ChunkId(base))
                added = True
        if not added:
            return


def _measure_use(index: RemoteIndex, live: LiveChunks) -> dict[int, PackUse]:
    """Return how much of each pack is needed, by its number; packs without a live chunk are left out."""
    use: dict[int, PackUse] = {}
    for _, copies in live_groups(index, live):
        alone = len({copy.pack for copy in copies}) == 1
        for copy in copies:
            before = use.get(copy.pack, PackUse())
            # Without the row a pack of small tree nodes, all live, would seem mostly dead, and be copied again
            # and again.
            taken = copy.stored_bytes + TAG_BYTES + ROW_BYTES
            only_here = before.only_here_bytes + (taken if alone else 0)
            use[copy.pack] = PackUse(before.live_bytes + taken, only_here)
    return use


def _keep_needed(
    index: RemoteIndex, live: LiveChunks, condemned: Iterable[int], use: Mapping[int, PackUse] | None = None
) -> set[int]:
    """Return those condemned packs without which each live chunk still has a copy.

    Of several condemned packs with one chunk, the one with the most live bytes stays, as far as ``use`` says.
    """
    left = set(condemned)
    for _, copies in live_groups(index, live):
        if all(copy.pack in left for copy in copies):
            left.discard(
                max((copy.pack for copy in copies), key=lambda number: ((use or {}).get(number, ()), number))
            )
    return left


def _needed_in(index: RemoteIndex, live: LiveChunks, sources: Collection[int]) -> dict[int, set[bytes]]:
    """Return the chunks of each of these packs that have to be copied before all of these may go."""
    needed: dict[int, set[bytes]] = {number: set() for number in sources}
    for chunk, copies in live_groups(index, live):
        if all(copy.pack in needed for copy in copies):
            needed[copies[0].pack].add(chunk)
    return needed


def live_groups(index: RemoteIndex, live: LiveChunks) -> Iterator[tuple[bytes, list[ChunkCopy]]]:
    """Yield each live chunk with all its copies."""
    for chunk, copies in groupby(index.copies(), key=attrgetter("id")):
        if chunk in live:
            yield chunk, list(copies)


# Manifests that are read ahead of the walk: the cache keeps them until then.
_MANIFESTS_AHEAD: Final = 256
_MANIFEST_THREADS: Final = 16


def live_chunks(
    reader: SpaceReader, *, between: Callable[[], None] = lambda: None
) -> Callable[[Mapping[str, LiveManifest]], NeededChunks]:
    """Return a function for `Collector` that marks what snapshots of this space refer to.

    The function reads trees and block maps, and no data. Bases of differences are not among its result: the collector
    adds them from its index. It raises Damaged if anything cannot be read, and nothing may be collected then.

    Args:
        reader: Reader of the space.
        between: Called often.
    """

    def mark(snapshots: Mapping[str, LiveManifest]) -> NeededChunks:
        # Trees may have moved to new packs since the reader listed them, in a round of this very collection.
        reader.lookup.refresh()
        manifests = Manifests(reader.space, reader.cache)
        # By manifest, because ids of snapshots may occur twice.
        entries = {name: CommittedEntry(live, manifests) for name, live in snapshots.items()}
        found = RemoteSnapshots(entries)
        needed = NeededChunks()
        walker = needed.walker(RemoteRepository(reader, found))
        names = list(entries)
        for start in range(0, len(names), _MANIFESTS_AHEAD):
            some = names[start : start + _MANIFESTS_AHEAD]
            with ThreadPoolExecutor(_MANIFEST_THREADS) as pool:
                for _ in pool.map(lambda name: manifests.read(snapshots[name]), some):
                    between()
            for name in some:
                for _ in walker.walk(found.load(SnapshotId(name))):
                    between()
        return needed

    return mark


# Records that are read at once: a few MiB with blocks of 256 KiB.
_REPACKED_AT_ONCE = 32


class Repacker(PackFiller):
    """Writer of new packs from records of old ones. Records are verified, and sealed anew.

    Nothing is committed for a new pack: until a round condemns the old one both have the chunks, and any round that
    condemns either sees the other.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        *,
        limit: PackLimit | None = None,
        new_ref: Callable[[PackKind], PackRef] = new_pack_ref,
    ) -> None:
        super().__init__(objects, sealer, limit=limit, new_ref=new_ref)
        # Packs whose chunks are partly in a pack that was not sent yet.
        self._waiting: dict[PackKind, list[PackRef]] = {"data": [], "meta": []}
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
            self.send(kind)
            self.copied += self._waiting[kind]

    def _copy(self, ref: PackRef, kind: PackKind, chunks: Collection[bytes]) -> None:
        reader = RemotePackReader(self._sealer, ref)
        records = [record for record in reader.read_table(self._objects) if record.id in chunks]
        for start in range(0, len(records), _REPACKED_AT_ONCE):
            some = records[start : start + _REPACKED_AT_ONCE]
            for record, stored in zip(some, reader.read_records(self._objects, some), strict=True):
                self.add(kind, record, stored)
                self.bytes += record.stored_bytes


class _CountingRepacker(Repacker):
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


# Stored bytes of the records that one request asks for; each thread has as much in memory.
_READ_BYTES_AT_ONCE: Final = 4 << 20
_READING_THREADS: Final = 4
# Logs that get their fences at the same time.
_FENCING_THREADS: Final = 16
_KNOWN_AT_ONCE: Final = 10_000
_ELSEWHERE_HINT: Final = "thaw what is archived of them, or repair on a host whose repository has them: ciuic check --remote --repair"


class _Copy(NamedTuple):
    chunk: bytes
    pack: int


class _KeptCopies:
    """Copies in packs that stay, as far as they were read. For one thread.

    Args:
        objects: The remote.
        sealer: Its seals.
        index: Index of the remote, complete.
        trusted: Packs that this process has just written from verified records.
        threads: Packs that are read at the same time.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        index: RemoteIndex,
        trusted: Collection[PackRef] = (),
        threads: int = _READING_THREADS,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._index = index
        self._trusted = frozenset(trusted)
        self._threads = threads
        self._whole: dict[_Copy, bool] = {}
        self.read_bytes = 0
        """Stored bytes of the records that were read."""
        self.decayed: set[PackRef] = set()
        """Packs with a table or a record that could not be read; without archived ones, which nothing was read of."""
        self._archived: set[PackRef] = set()

    def keep_sound(self, live: LiveChunks, doomed: Collection[int]) -> set[int]:
        """Return those of the packs without which each live chunk has a whole copy.

        A chunk without one keeps all packs that have it: which of these copies is the best is not known.
        """
        left = set(doomed)
        needed = {
            chunk: {copy.pack for copy in copies}
            for chunk, copies in live_groups(self._index, live)
            if any(copy.pack in left for copy in copies)
        }
        for chunk in needed.keys() - self.whole_elsewhere(needed, left):
            left -= needed[chunk]
        return left

    def whole_elsewhere(self, chunks: Collection[bytes], without: Collection[int]) -> set[bytes]:
        """Return those of the chunks that can be read, bases included, from packs other than ``without``."""
        while True:
            chosen = self._choose(chunks, without)
            wanted: dict[int, set[bytes]] = {}
            for chunk, place in chosen.items():
                if _Copy(chunk, place.pack) not in self._whole:
                    wanted.setdefault(place.pack, set()).add(chunk)
            if wanted:
                self._read(wanted)
                continue
            usable = _usable(chosen)
            if usable == chosen.keys():
                return {chunk for chunk in chunks if chunk in usable}
            # Differences whose bases are found nowhere.
            for chunk in chosen.keys() - usable:
                self._whole[_Copy(chunk, chosen[chunk].pack)] = False

    def _choose(self, chunks: Collection[bytes], without: Collection[int]) -> dict[bytes, ChunkLocation]:
        """Return a copy of each of the chunks, and of each base of these, that may be whole."""
        chosen: dict[bytes, ChunkLocation] = {}
        seen: set[bytes] = set()
        todo = list(chunks)
        while todo:
            chunk = todo.pop()
            if chunk in seen:
                continue
            seen.add(chunk)
            places = [
                place
                for place in self._index.find(chunk)
                if place.pack not in without and self._whole.get(_Copy(chunk, place.pack), True)
            ]
            if places:
                # One that needs no other first.
                place = min(places, key=lambda place: (bool(place.base), place.pack))
                chosen[chunk] = place
                if place.base:
                    todo.append(place.base)
        return chosen

    def _read(self, wanted: dict[int, set[bytes]]) -> None:
        refs = {number: self._index.ref(number) for number in wanted}

        def read(number: int) -> dict[bytes, int]:
            return self._whole_records(refs[number], wanted[number])

        with ThreadPoolExecutor(self._threads) if self._threads > 1 else InlinePool() as pool:
            for number, whole in zip(wanted, pool.map(read, wanted), strict=True):
                self.read_bytes += sum(whole.values())
                if len(whole) < len(wanted[number]) and refs[number] not in self._archived:
                    self.decayed.add(refs[number])
                for chunk in wanted[number]:
                    self._whole[_Copy(chunk, number)] = chunk in whole

    def _whole_records(self, ref: PackRef, chunks: set[bytes]) -> dict[bytes, int]:
        """Return the stored bytes of those of these chunks whose records in a pack are whole."""
        if ref in self._trusted:
            return dict.fromkeys(chunks, 0)
        reader = RemotePackReader(self._sealer, ref)
        try:
            records = [record for record in reader.read_table(self._objects) if record.id in chunks]
        except ArchivedObject:
            self._archived.add(ref)
            return {}
        except (NoSuchObject, Damaged, UnsupportedFormat):
            return {}
        return {
            record.id: record.stored_bytes
            for some in in_runs(records, _READ_BYTES_AT_ONCE)
            for record in self._whole_of(reader, some)
        }

    def _whole_of(self, reader: RemotePackReader, records: list[PackRecord]) -> list[PackRecord]:
        try:
            for _ in reader.read_records(self._objects, records):
                pass
            return records
        # What cannot be read is not known to be whole, so the other copies stay.
        except ArchivedObject:
            self._archived.add(PackRef(reader.ref))
            return []
        except NoSuchObject:
            return []
        except Damaged:
            # Which one it is shows when each is read alone.
            half = len(records) // 2
            if not half:
                return []
            return self._whole_of(reader, records[:half]) + self._whole_of(reader, records[half:])


def _usable(chosen: dict[bytes, ChunkLocation]) -> set[bytes]:
    """Return the chunks whose copies rest, base after base, on one that needs no other."""
    usable = {chunk for chunk, place in chosen.items() if not place.base}
    while more := {chunk for chunk, place in chosen.items() if chunk not in usable and place.base in usable}:
        usable |= more
    return usable


# What a snapshot raises that cannot be read.
_UNREADABLE: Final = (Damaged, NotFound, UnsupportedFormat)
# Copies of a chunk that are tried, one after the other.
_MAX_TURNS: Final = 8

DEFAULT_YOUNG_NS: Final = 86_400 * 10**9
"""Age by the store's clock below which a pack or manifest is spared: one day. It saves uploads of running snapshots from
being done twice; nothing is unsafe without it."""
DEFAULT_REPACK_SHARE: Final = 0.25
"""Share of live bytes below which a pack is copied to new ones."""
DEFAULT_REPACK_BYTES: Final = 4 << 30
"""Limit of what one round copies."""


class CollectionPolicy(NamedTuple):
    """Rules for what is worth collecting; nothing here is needed for safety."""

    young_ns: int = DEFAULT_YOUNG_NS
    repack_share: float = DEFAULT_REPACK_SHARE
    repack_bytes: int = DEFAULT_REPACK_BYTES
    damaged: frozenset[PackRef] = frozenset()
    """Damaged packs. Nothing in them counts as a copy; they go, however young, unless a live chunk has no other."""
    cold: Mapping[PackRef, int] = MappingProxyType({})
    """Packs in a colder storage class or place, with the time of their move by the store's clock. They are never copied:
    reading them costs, or takes hours."""
    spare_cold_ns: int = 0
    """Time after its move in which a cold pack is not deleted: stores charge for a minimum duration."""


DEFAULT_POLICY: Final = CollectionPolicy()


class CollectionResult(NamedTuple):
    """Result of one call of `Collector.run`."""

    round: int
    """Number of the round that was ended; -1 if there was nothing to collect."""
    packs: tuple[PackRef, ...] = ()
    """Packs that the round deleted."""
    manifests: tuple[str, ...] = ()
    """Manifests that it deleted."""
    rescued: int = 0
    """Packs that were condemned and turned out to be needed."""
    repacked_bytes: int = 0
    unreadable: tuple[PackRef, ...] = ()
    """Packs whose tables cannot be read; they are never deleted."""
    decayed: tuple[PackRef, ...] = ()
    """Packs in which a chunk could not be read, for which another copy was to go and stays."""
    checked_bytes: int = 0
    """Stored bytes of the copies that were read because others were deleted."""
    freed_bytes: int = 0
    """Size of the packs that were still there."""


class CollectionPreview(NamedTuple):
    """Plan of a collection."""

    packs: tuple[PackRef, ...]
    manifests: tuple[str, ...]
    repacked_bytes: int
    unreadable: tuple[PackRef, ...]
    unfinished: bool
    """A round is under way, which the next collection ends first."""


def delete_condemned(objects: Objects, content: StoredRound) -> None:
    """Delete what the ``.final`` of a round names; any number of callers may, at any time after it stands."""
    # Manifests first, so that none is there without its chunks.
    objects.delete(content.manifests)
    objects.delete([pack_name(ref) for ref in content.condemned])
    # After the packs: a cold one without the copy of its table could not be read any more.
    cold = cold_packs(objects)
    objects.delete([table_name(ref) for ref in map(PackRef, content.condemned) if ref in cold])


def _is_replacement(rounds: Rounds) -> bool:
    """Return whether the last round is one in place of the one before."""
    return (
        rounds.last > rounds.finished
        and rounds.last not in rounds.damaged
        and rounds.content(rounds.last)[1].whole is True
    )


def _require_decisions(rounds: Rounds) -> None:
    """Raise DamagedRemote if a ``.final`` cannot be read, and no repair has begun a round in its place."""
    if rounds.damaged and not _is_replacement(rounds):
        raise next(iter(rounds.damaged.values()))


class Collector:
    """Collector of one remote. Used by one thread.

    Any error may be raised between two requests and leaves nothing that another call, of any collector, does not
    continue.

    Args:
        objects: The remote.
        sealer: Its seals.
        log: The collector's own log; its rounds are what this collector knows of rounds.
        reader: Reader of all logs.
        index: Index of the remote.
        mark: Function that finds the chunks of snapshots.
        brake: Holds what was given up at once; None: nothing.
        policy: What is worth collecting.
        upkeep: Upkeep of logs; None for the usual one.
        repacker: Maker of a `Repacker` for a round; None for the usual one.
        new_id: For tests.
        threads: Packs that are read at the same time.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        *,
        log: WriterLog,
        reader: LogReader,
        index: RemoteIndex,
        mark: MarkSnapshots,
        brake: Brake | None = None,
        policy: CollectionPolicy = DEFAULT_POLICY,
        upkeep: LogUpkeep | None = None,
        repacker: Callable[[], Repacker] | None = None,
        new_id: Callable[[], str] = new_hex_id,
        threads: int = 4,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._log = log
        self._reader = reader
        self._index = index
        self._mark = mark
        self._brake = brake
        self._policy = policy
        self._upkeep = upkeep or LogUpkeep(objects, sealer, reader)
        # One for all rounds: what the first one was refused is not tried again.
        limit = PackLimit()
        self._repacker = repacker or (lambda: Repacker(objects, sealer, limit=limit))
        self._new_id = new_id
        self._preview_ns: int | None = None
        self._threads = threads
        self._repacked_bytes = 0
        self._stored: list[ObjectInfo] = []
        self._young: list[UnloggedManifest] = []
        self._held: dict[str, LiveManifest] = {}
        # By manifest; None for one that cannot be read.
        self._gone: dict[str, LiveManifest | None] = {}
        self._unreadable: tuple[PackRef, ...] = ()
        self._is_all_known = True
        # Packs that were written by this collector: of records that were verified then.
        self._written: set[PackRef] = set()
        self._kept = self._kept_copies()

    def run(self) -> CollectionResult:
        """End the round that is under way, or do one.

        Raises:
            Damaged: a log, a round, a manifest or a tree cannot be read; nothing was deleted.
            LostCommits: the log that must have committed a manifest is gone or cut; nothing was deleted.
            NothingCommitted: there are packs, and no log says anything of a snapshot; nothing was deleted.
            RemoteUnreachable: another call continues. So it does after an incomplete listing.
        """
        rounds = self._hello()
        _require_decisions(rounds)
        if rounds.unfinished is None:
            proposal = self._choose()
            if not proposal.condemned and not proposal.manifests:
                self._tidy_logs()
                return CollectionResult(-1, unreadable=self._unreadable)
            self._begin(proposal)
            rounds.refresh()
        round_ = rounds.unfinished
        if round_ is None:
            # Another collector began and ended it in the meantime.
            return CollectionResult(-1, repacked_bytes=self._repacked_bytes, unreadable=self._unreadable)
        return self._end(round_)

    def mend(self) -> None:
        """End the rounds whose ``.final`` cannot be read by one in their place; durable on return.

        Raises:
            Damaged, LostCommits, NothingCommitted: as `run`, or something that is needed cannot be copied; nothing was deleted.
            RemoteUnreachable: another call continues.
        """
        rounds = self._hello()
        if rounds.last in rounds.damaged:
            _, content = rounds.content(rounds.last)
            self._begin(msgspec.structs.replace(content, nonce=self._new_id(), whole=True))
            rounds.refresh()
        if rounds.unfinished is not None and _is_replacement(rounds):
            self._end(rounds.unfinished)

    def _hello(self) -> Rounds:
        self._repacked_bytes = 0
        self._log.hello()
        self._reader.witness = LogPosition(self._log.writer, self._log.next_number - 1)
        self._index.follow(self._log.rounds)
        return self._log.rounds

    def _tidy_logs(self) -> None:
        stored = [info.name for info in self._objects.list(MANIFESTS_PREFIX)]
        self._upkeep.run(self._now_ns(), stored)

    def _kept_copies(self) -> _KeptCopies:
        return _KeptCopies(self._objects, self._sealer, self._index, self._written, threads=self._threads)

    def preview(self, now_ns: int) -> CollectionPreview:
        """Return what `run` would delete at this time; only reads.

        Raises:
            Damaged: a log, a round, a manifest or a tree cannot be read.
        """
        self._repacked_bytes = 0
        rounds = self._log.rounds
        rounds.refresh()
        self._index.follow(rounds)
        _require_decisions(rounds)
        repacker, self._repacker = self._repacker, lambda: _CountingRepacker(self._objects, self._sealer)
        self._preview_ns = now_ns
        try:
            proposal = self._choose()
        finally:
            self._repacker, self._preview_ns = repacker, None
        return CollectionPreview(
            tuple(PackRef(ref) for ref in proposal.condemned),
            proposal.manifests,
            self._repacked_bytes,
            self._unreadable,
            rounds.unfinished is not None,
        )

    def _begin(self, proposal: StoredRound) -> None:
        """Create the next round, unless another collector does; then its round stands.

        Where the store refuses the size of the round, it is begun with a part of what was proposed: another one has the rest.
        One in the place of others has all that they may have deleted, and is never cut.
        """
        round_ = self._log.rounds.last + 1
        while True:
            try:
                create_round(self._objects, self._sealer, round_, "begun", proposal)
                return
            except RefusedBody:
                if proposal.whole is True or len(proposal.condemned) + len(proposal.manifests) < 2:
                    raise
                proposal = msgspec.structs.replace(
                    proposal,
                    condemned=proposal.condemned[: -(-len(proposal.condemned) // 2)],
                    manifests=proposal.manifests[: len(proposal.manifests) // 2],
                )

    def _end(self, round_: int) -> CollectionResult:
        part, content = self._log.rounds.content(round_)
        condemned = len(content.condemned)
        self._kept = self._kept_copies()
        if part == "begun":
            self._fence_logs(round_)
            decided = self._decide_all(round_, content) if content.whole is True else self._decide(content)
            content = create_round(self._objects, self._sealer, round_, "final", decided)
            part = "begun" if content.nonce == decided.nonce else "final"
        if part == "final":
            self._require_honest(round_, content)
        if content.whole is True:
            self._end_replaced(round_, content)
        sizes = {pack.ref: pack.size_bytes for pack in self._index.packs()}
        delete_condemned(self._objects, content)
        self._tidy_logs()
        create_round(self._objects, self._sealer, round_, "done", StoredRound(nonce=self._new_id()))
        self._log.rounds.refresh()
        self._index.follow(self._log.rounds)
        packs = tuple(PackRef(ref) for ref in content.condemned)
        return CollectionResult(
            round_,
            packs,
            content.manifests,
            condemned - len(packs),
            self._repacked_bytes,
            self._unreadable,
            tuple(sorted(self._kept.decayed)),
            self._kept.read_bytes,
            sum(sizes.get(ref, 0) for ref in packs),
        )

    def _require_honest(self, round_: int, decision: StoredRound) -> None:
        """Raise DamagedRemote if the decision of another collector names what is needed, or what its round did not condemn."""
        # A forged round has none: a writer that does not know it may rely on its packs at any time.
        self._fence_logs(round_)
        begun = read_round(self._objects, self._sealer, round_, "begun")
        info = self._objects.info(round_name(round_))
        # Who decided saw the manifests that stood when the round began; the writers of later ones know the round, or meet its fence.
        live = self._list_and_mark(young_before=0 if info is None else info.modified_ns)
        packs = {
            number for ref in decision.condemned if (number := self._index.number(PackRef(ref))) is not None
        }
        if (self._reader.live().keys() | self._held.keys()).isdisjoint(decision.manifests) and not (
            set(decision.condemned) - set(begun.condemned)
            or set(decision.manifests) - set(begun.manifests)
            or any(all(copy.pack in packs for copy in copies) for _, copies in live_groups(self._index, live))
        ):
            return
        held = () if self._brake is None else self._brake.held
        approval = " ".join(f"--approve {one.repository}" for one in held)
        raise DamagedRemote(
            round_name(round_, "final"),
            "this decision of a collection deletes what snapshots need, or what was given up at once and is held; nothing was deleted",
            hint=(
                f"if a person approved that in another run: ciuic prune --remote {approval}; if nobody did, "
                if approval
                else ""
            )
            + "somebody with the key of a host has made it up: withdraw that key, see that no other collection runs, "
            "delete this object in the store, and collect again",
        )

    def _end_replaced(self, round_: int, content: StoredRound) -> None:
        """Give the rounds in whose place this one is its decision, and an end; before anything is deleted by it."""
        whole: bool | msgspec.UnsetType = True
        while whole is True and round_:
            round_ -= 1
            # Replaced, never deleted first: without it a collector would take the round for one that is undecided.
            self._put_unreadable(round_, "final", content)
            self._put_unreadable(round_, "done", StoredRound(nonce=self._new_id()))
            whole = read_round(self._objects, self._sealer, round_, "begun").whole

    def _put_unreadable(self, round_: int, part: RoundPart, content: StoredRound) -> None:
        try:
            read_round(self._objects, self._sealer, round_, part)
        except (NoSuchObject, DamagedRemote):
            data = encode_round(self._sealer, round_, part, content)
            self._objects.put(round_name(round_, part), [data])

    def _choose(self) -> StoredRound:
        """Return packs that are not needed, or whose needed chunks all have copies elsewhere; and manifests."""
        live = self._list_and_mark()
        use = _measure_use(self._index, live)
        young_since = self._now_ns() - self._policy.young_ns
        old = self._old_packs(young_since)
        unneeded = [number for number in old if not use.get(number, PackUse()).only_here_bytes]
        condemned = _keep_needed(self._index, live, unneeded, use)
        condemned |= self._repack(
            live,
            use,
            {
                n: size
                for n, size in old.items()
                if n not in condemned and self._index.ref(n) not in self._policy.cold
            },
            condemned,
        )
        refs = sorted(
            {
                *(self._index.ref(number) for number in condemned),
                *self._given_up(self._policy.damaged, live, self._found),
            }
        )
        manifests = self._unneeded_manifests(young_since)
        if refs or manifests:
            self._require_commits()
        return StoredRound(
            nonce=self._new_id(),
            condemned=tuple(refs[:MAX_PACKS]),
            manifests=tuple(manifests[:MAX_MANIFESTS]),
        )

    def _require_commits(self) -> None:
        """Raise NothingCommitted if no log commits a snapshot, nor says that there was one."""
        logs = self._reader.logs.values()
        if not any(summary.committed or summary.removed or summary.state >= 0 for summary in logs):
            raise NothingCommitted(self._objects.url, len(self._index.known))

    def _old_packs(self, young_since: int) -> dict[int, int]:
        """Return size by number of the packs that may be condemned."""
        moving = self._reader.moving()
        spared_since = self._now_ns() - self._policy.spare_cold_ns
        old: dict[int, int] = {}
        for pack in self._index.packs():
            number = self._index.number(pack.ref)
            is_young = pack.modified_ns >= young_since
            is_spared = self._policy.cold.get(pack.ref, spared_since) > spared_since
            if number is not None and not (is_young or is_spared or pack.ref in moving):
                old[number] = pack.size_bytes
        return old

    def _found(self, chunks: set[bytes]) -> set[bytes]:
        return {chunk for chunk in chunks if self._index.find(chunk)}

    def _given_up(
        self, damaged: Iterable[PackRef], live: LiveChunks, found: Callable[[set[bytes]], set[bytes]]
    ) -> set[PackRef]:
        """Return the damaged packs without which each live chunk has a copy."""
        given_up = set()
        for ref in damaged:
            try:
                records = RemotePackReader(self._sealer, ref).read_table(self._objects)
            except (NoSuchObject, ArchivedObject, UnsupportedFormat):
                continue
            except Damaged:
                # Nobody knows what it has: it stays while there is a live chunk of which no copy is known.
                if not self._is_all_known:
                    continue
                records = []
            needed: set[bytes] = {record.id for record in records if record.id in live}
            if found(needed) == needed:
                given_up.add(ref)
        return given_up

    def _repack(
        self, live: LiveChunks, use: dict[int, PackUse], sizes: dict[int, int], condemned: set[int]
    ) -> set[int]:
        """Copy what is needed of mostly dead packs; return the packs that may go for it."""
        sources: list[int] = []
        left_bytes = self._policy.repack_bytes
        # The emptiest first: they free most for what is copied.
        emptiest = sorted(
            sizes, key=lambda source: use.get(source, PackUse()).live_bytes / (sizes[source] or 1)
        )
        for number in emptiest:
            live_bytes = use.get(number, PackUse()).live_bytes
            left_bytes -= live_bytes
            if left_bytes < 0 or live_bytes >= self._policy.repack_share * sizes[number]:
                break
            sources.append(number)
        if not sources:
            return set()
        needed = _needed_in(self._index, live, {*sources, *condemned})
        repacker = self._repacker()
        repacker.copy_all({self._index.ref(number): needed[number] for number in sources})
        self._repacked_bytes = repacker.bytes
        self._written.update(repacker.written)
        self._index.learn(self._objects, self._sealer, repacker.written)
        return {copied for ref in repacker.copied if (copied := self._index.number(ref)) is not None}

    def _unneeded_manifests(self, young_since: int) -> list[str]:
        live = self._reader.live()
        return [
            info.name
            for info in self._stored
            if info.name not in live and info.name not in self._held and info.modified_ns < young_since
        ]

    def _fence_logs(self, round_: int) -> None:
        """Put a fence into every log that is there after the round began.

        Existing fences are ignored: anybody with the key of a host can have created them before the round began.
        """
        fenced: set[str] = set()
        self._reader.refresh()
        with ThreadPoolExecutor(_FENCING_THREADS) if self._threads > 1 else InlinePool() as pool:
            # A writer whose log was ended begins another one, and then sees the round.
            while bare := [
                writer
                for writer, summary in self._reader.logs.items()
                if writer not in fenced and not summary.retired
            ]:
                # Each log has its own order; one after the other, ten thousand would take a quarter of an hour.
                done = pool.map(lambda writer: self._fence(writer, round_), bare)
                fenced.update(writer for writer, is_done in zip(bare, done, strict=True) if is_done)
                # One listing may lack a whole log, of which nobody would hear.
                self._reader.refresh()

    def _fence(self, writer: str, round_: int) -> bool:
        """Put a fence into one log; False if that has to be read again first."""
        summary = self._reader.logs[writer]
        before = -1
        # Each failure means that the log went on; a writer makes one entry for each snapshot.
        while not summary.retired and summary.next != before:
            before = summary.next
            entry = LogFence(nonce=self._new_id(), round=round_)
            if append_to_log(self._objects, self._sealer, writer, summary, entry):
                return True
        return False

    def _decide(self, content: StoredRound) -> StoredRound:
        """Return what of the condemned may be deleted."""
        live = self._list_and_mark()
        self._require_commits()
        numbers = {
            number for ref in content.condemned if (number := self._index.number(PackRef(ref))) is not None
        }
        doomed = self._kept.keep_sound(live, _keep_needed(self._index, live, numbers))
        given_up = self._given_up(
            self._policy.damaged.intersection(map(PackRef, content.condemned)),
            live,
            lambda chunks: self._kept.whole_elsewhere(chunks, doomed),
        )
        snapshots = self._reader.live().keys() | self._held.keys()
        # Logs were read after the fences: what begins to move later is not condemned here (`WriterLog.move`).
        refs = {*(self._index.ref(number) for number in doomed), *given_up} - self._reader.moving()
        return StoredRound(
            nonce=self._new_id(),
            condemned=tuple(sorted(refs)),
            manifests=tuple(name for name in content.manifests if name not in snapshots),
        )

    def _decide_all(self, round_: int, content: StoredRound) -> StoredRound:
        """Copy what is needed of the condemned packs, and return all of them.

        But those that move, which a mover knew that no decision names (`WriterLog.move`).
        """
        condemned = frozenset(map(PackRef, content.condemned))
        for turn in range(_MAX_TURNS):
            live = self._list_and_mark()
            self._require_commits()
            doomed = condemned - self._reader.moving()
            numbers = {number for ref in doomed if (number := self._index.number(ref)) is not None}
            self._kept = self._kept_copies()
            needed = {
                chunk: [copy.pack for copy in copies if copy.pack in numbers]
                for chunk, copies in live_groups(self._index, live)
                if any(copy.pack in numbers for copy in copies)
            }
            lacking = needed.keys() - self._kept.whole_elsewhere(needed, numbers)
            if not lacking:
                if not self._is_all_known and not doomed.isdisjoint(self._unreadable):
                    raise DamagedRemote(
                        round_name(round_),
                        "it condemns packs whose tables cannot be read, and of a chunk that snapshots need no copy is known; "
                        "nothing was deleted",
                        hint=_ELSEWHERE_HINT,
                    )
                snapshots = self._reader.live().keys() | self._held.keys()
                return StoredRound(
                    nonce=self._new_id(),
                    condemned=tuple(sorted(doomed)),
                    manifests=tuple(name for name in content.manifests if name not in snapshots),
                    whole=True,
                )
            sources: dict[PackRef, set[bytes]] = {}
            for chunk in lacking:
                # Another copy each time: one may have decayed, or be deleted by a collector that was paused.
                number = needed[chunk][turn % len(needed[chunk])]
                sources.setdefault(self._index.ref(number), set()).add(chunk)
            repacker = self._repacker()
            repacker.copy_all(dict(sorted(sources.items())))
            self._repacked_bytes += repacker.bytes
            self._written.update(repacker.written)
        raise DamagedRemote(
            round_name(round_),
            f"{plural(len(lacking), 'chunk')} that snapshots need cannot be copied out of the packs that it condemns; nothing was deleted",
            hint=_ELSEWHERE_HINT,
        )

    def _list_and_mark(self, young_before: int | None = None) -> LiveChunks:
        """Read logs and packs as they are now, and return what snapshots refer to, bases included; arguments as of `_mark_all`."""
        while True:
            self._list()
            snapshots = self._reader.live()
            try:
                live = self._mark_all(snapshots, young_before)
            except (Damaged, NotFound):
                # A snapshot that was removed since may have been collected by another; any other is damaged.
                self._reader.refresh()
                if snapshots.keys() <= self._reader.live().keys():
                    raise
                continue
            # Before bases: those of differences that are stored in full elsewhere are needed no more.
            self._is_all_known = not (self._policy.damaged or self._unreadable) or self._has_all(live)
            add_bases(self._index, live)
            return live

    def _has_all(self, live: LiveChunks) -> bool:
        """Return whether a copy of every live chunk is known that can be read without packs whose tables cannot."""
        chunks = (chunk for chunk, _ in live_groups(self._index, live))
        known = 0
        while some := list(islice(chunks, _KNOWN_AT_ONCE)):
            known += len(self._index.has_many(some))
        return known >= len(live)

    def _mark_all(self, snapshots: Mapping[str, LiveManifest], young_before: int | None) -> LiveChunks:
        """Return what live and held snapshots refer to, and as far as it is there what manifests do that are about to be committed.

        The writer of the latter may be killed and its host lost. A repair, which cannot tell this from a log that was cut, commits
        them then. Those that were stored at the store's time ``young_before`` or later are left out.
        """
        # As damage of a live one: nothing is deleted that belongs to a held snapshot because a part of it cannot be read.
        snapshots = {**self._held, **snapshots}
        young: dict[str, LiveManifest] = {}
        later = {
            info.name
            for info in self._stored
            if young_before is not None and info.modified_ns >= young_before
        }
        for one in self._young:
            if one.name in later:
                continue
            with suppress(*_UNREADABLE):
                stored = decode_any_snapshot(one.manifest.snapshot)
                young[one.name] = LiveManifest(
                    stored.repository, stored.id, one.name, object_digest(one.data)
                )
        if young:
            with suppress(*_UNREADABLE):
                return self._mark({**young, **snapshots})
            # Only now one by one: each time all packs are listed.
            for name, live in list(young.items()):
                try:
                    self._mark({name: live})
                except _UNREADABLE:
                    del young[name]
            # Another collector may take what they refer to meanwhile.
            with suppress(*_UNREADABLE):
                return self._mark({**young, **snapshots})
        return self._mark(snapshots)

    def _list(self) -> None:
        # Before the logs: a manifest that is there already has the hello of its writer in them.
        self._stored = [info for info in self._objects.list(MANIFESTS_PREFIX) if parse_manifest(info.name)]
        self._reader.refresh()
        self._require_logs()
        # After the logs: the packs of every commit that was read are there.
        self._unreadable = tuple(self._index.refresh(self._objects, self._sealer).unreadable)
        self._index.drop(self._policy.damaged)
        if self._brake is not None:
            self._held = self._hold(self._brake)

    def _hold(self, brake: Brake) -> dict[str, LiveManifest]:
        """Return the snapshots that were given up, are stored, and count as live."""
        now_ns, live, removed = self._now_ns(), self._reader.live(), self._reader.removed()
        known = {*live, *(one.name for one in self._young)}
        # Also of those that no log removes: a sum can leave out what it does not want.
        gone = [
            info.name
            for info in self._stored
            if info.name not in known
            and (info.name in removed or info.modified_ns < now_ns - DEFAULT_YOUNG_NS)
        ]
        with ThreadPoolExecutor(_MANIFEST_THREADS) if self._threads > 1 else InlinePool() as pool:
            unread = [name for name in gone if name not in self._gone]
            self._gone |= zip(
                unread, pool.map(partial(stored_manifest, self._objects, self._sealer), unread), strict=True
            )
        return brake.hold(
            now_ns,
            {info.name: info.modified_ns for info in self._stored},
            live,
            {name: one for name in gone if (one := self._gone[name]) is not None},
        )

    def _require_logs(self) -> None:
        """Raise LostCommits if a log is gone, or cut, that must have committed a manifest."""
        young_since = self._now_ns() - self._policy.young_ns
        unlogged = unlogged_manifests(
            self._objects, self._sealer, self._stored, self._reader, young_since, with_young=True
        )
        self._young = [one for one in unlogged if one.is_young]
        if lost := [one for one in unlogged if not one.is_young]:
            raise LostCommits(lost[0].name, lost[0].reason, len(lost) - 1)

    def _now_ns(self) -> int:
        """Return the time of the store's clock when this collector said hello; in a preview, the caller's."""
        if self._preview_ns is not None:
            return self._preview_ns
        info = self._objects.info(log_entry_name(self._log.writer, self._log.next_number - 1))
        return 0 if info is None else info.modified_ns
