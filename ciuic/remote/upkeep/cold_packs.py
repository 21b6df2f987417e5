"""Packs in cold storage classes: moved there by age and kind, by the rules of the configuration, and thawed for a restore.

Invariants of a move, which plans by the rules, says so in the log, copies tables and changes classes:

* Only data packs become cold. Logs, manifests, packs of trees and block maps, keys and remote.json never do, so that snapshots
  can be listed, shown and compared, and their structure verified, at once.
* A copy of a pack's table is below ``tables/`` before the pack becomes cold, so that an index can be made from the bucket alone.
* A pack becomes cold only if every snapshot that needs any of its chunks is as old, and of the kind, that the rule says.
  It never becomes warmer again by a rule; new snapshots may rely on it.
* A mover is a writer: which packs move is in its log before the first one does. A collection whose fence follows spares them, and a
  mover leaves out what a round before has condemned (`WriterLog.move`). So nothing that was deleted comes back by a late copy.
* An object keeps its name and its bytes when it moves within a store, so that readers find it all the time.

Killed at any request, the next move goes on; packs that a killed mover named are spared by collections until this host's next
run, or until its log is ended after 30 days.

A thaw finds the cold packs that a restore reads, asks the store once for each, and finds out which are ready. The store decides
what is ready; the job, kept on this host, says what to ask it. Asking again changes nothing, so that a job that is lost, or made
a second time by another host, costs requests and nothing else.

Guarantees of a thaw: a job is durable before the first request, and each pack is asked for until the store has said yes once;
killed anywhere, `continue_thaw` goes on. Nothing is changed but what the store charges. A pack is left out of the needs of a
selection only if each of its chunks that the selection has can be read from another pack.

References:
    docs/decisions/tiers.md; docs/remote-format.md, sections 2 and 6
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from ciuic.config import TierRule
from ciuic.errors import Damaged
from ciuic.maintenance.chunkset import NeededChunks
from ciuic.remote.documents import LiveManifest
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import (
    PackRef,
    pack_name,
    pack_prefix,
    parse_manifest,
    parse_pack,
    split_ref,
    table_name,
)
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, RemoteUnreachable, UntrustedStore
from ciuic.remote.objects.storage_classes import (
    ListedClass,
    ObjectClass,
    ObjectClasses,
    ThawSpeed,
    find_class,
)
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.reading.remote_snapshots import CommittedEntry, Manifests, RemoteSnapshots
from ciuic.remote.remote_index import RemoteIndex, cold_packs, list_packs
from ciuic.remote.upkeep.collect import operator_log
from ciuic.remote.upkeep.collection_round import LiveChunks, add_bases, live_chunks, live_groups
from ciuic.remote.writer_log import WriterLog
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.errors import UnsupportedFormat
from ciuic.repository.lookup import Located, resolve
from ciuic.repository.record_files import read_note, write_note
from ciuic.system.state_home import state_home
from ciuic.types import FLAG_XATTRS_CHUNK, ChunkId, Entry, RootRecord, SnapshotId


class SpaceClasses:
    """`ObjectClasses` of the objects whose names begin with a prefix, which is left out of them."""

    def __init__(self, classes: ObjectClasses, prefix: str) -> None:
        self._classes = classes
        self._prefix = prefix

    @property
    def scheme(self) -> str:
        """Scheme of the remote's URL."""
        return self._classes.scheme

    def list(self, prefix: str) -> Iterator[ListedClass]:
        """Yield name and storage class."""
        for found in self._classes.list(self._prefix + prefix):
            yield found._replace(name=found.name[len(self._prefix) :])

    def look(self, name: str) -> ObjectClass:
        """Return the class of an object."""
        return self._classes.look(self._prefix + name)

    def change(self, name: str, storage_class: str) -> None:
        """Move an object to another class."""
        self._classes.change(self._prefix + name, storage_class)

    def thaw(self, name: str, speed: ThawSpeed, days: int) -> None:
        """Ask for an archived object."""
        self._classes.thaw(self._prefix + name, speed, days)


def prefix_of(opened: ReadableRemote, reader: SpaceReader) -> str:
    """Return what precedes the names of a space in those of its remote: nothing for the remote itself."""
    below = reader.space.objects.url[len(opened.remote.objects.url) :].strip("/")
    return f"{below}/" if below else ""


def classes_of_spaces(
    opened: ReadableRemote, classes: ObjectClasses
) -> list[tuple[SpaceReader, ObjectClasses]]:
    """Return each space of a remote with its storage classes."""
    return [(reader, SpaceClasses(classes, prefix_of(opened, reader))) for reader in opened.readers]


_JOB_SUFFIX: Final = ".thaw"

PackState = Literal["wanted", "asked", "ready"]


class ThawJob(msgspec.Struct, kw_only=True):
    """Thaw of what some snapshots need."""

    id: str
    """16 hexadecimal digits."""
    url: str
    """URL of the remote."""
    snapshots: tuple[str, ...]
    paths: tuple[str, ...] = ()
    """Absolute paths, for people; none for everything."""
    speed: ThawSpeed
    days: int
    created_ns: int
    size_bytes: int
    """Bytes of all packs."""
    packs: dict[str, PackState]
    """State of each pack, by the space's prefix and the name of the object."""
    ready_by_ns: int | None = None
    """Time by which the store's documentation lets everything be ready; None if nothing has to be waited for."""
    polled_ns: int = 0
    """Time at which the store was asked last."""

    @property
    def waiting(self) -> list[str]:
        """Packs that are not ready."""
        return sorted(name for name, state in self.packs.items() if state != "ready")

    @property
    def unasked(self) -> list[str]:
        """Packs that were not asked for yet."""
        return sorted(name for name, state in self.packs.items() if state == "wanted")

    @property
    def is_ready(self) -> bool:
        """True if everything can be read."""
        return not self.waiting


class ThawJobs:
    """Jobs in a directory of this host.

    Args:
        path: The directory; made when the first job is stored.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def store(self, job: ThawJob) -> None:
        """Store a job in place of its earlier state; durable on return.

        Raises:
            OSError: the disk refuses.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_note(str(self.path), f"{job.id}{_JOB_SUFFIX}", job, durable=True)

    def all(self) -> list[ThawJob]:
        """Return all jobs, the oldest first; files that are none are passed over."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        jobs = [
            job
            for name in names
            if name.endswith(_JOB_SUFFIX) and (job := read_note(str(self.path), name, ThawJob)) is not None
        ]
        return sorted(jobs, key=lambda job: (job.created_ns, job.id))

    def remove(self, job: ThawJob) -> None:
        """Remove the note of a job; nothing is asked of the store."""
        (self.path / f"{job.id}{_JOB_SUFFIX}").unlink(missing_ok=True)


def jobs_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the jobs of this user lie."""
    return state_home("thaw", environ)


_ASKING_THREADS: Final = 8
# Packs after which the job is stored: a kill has at most so many asked for twice.
_ASKED_BATCH: Final = 64
_HOUR_NS: Final = 3600 * 10**9


def begin_thaw(
    jobs: ThawJobs,
    classes: ObjectClasses,
    *,
    url: str,
    snapshots: Sequence[str],
    paths: Sequence[str],
    packs: Mapping[str, int],
    speed: ThawSpeed,
    days: int,
    now_ns: int,
) -> ThawJob:
    """Make a job, ask for its packs, and return it; durable before the store is asked.

    Args:
        jobs: Jobs of this host.
        classes: Storage classes of the remote.
        url: URL of the remote.
        snapshots: Snapshots that are thawed.
        paths: Paths of them; none for everything.
        packs: Size of each cold pack that they need, by its name.
        speed: Speed of the thaw.
        days: Days for which the thawed copies stay.
        now_ns: Time now.

    Raises:
        RemoteUnreachable, RemoteRefused: the store does not answer or allow it; `continue_thaw` goes on.
    """
    job = ThawJob(
        id=os.urandom(8).hex(),
        url=url,
        snapshots=tuple(snapshots),
        paths=tuple(paths),
        speed=speed,
        days=days,
        created_ns=now_ns,
        size_bytes=sum(packs.values()),
        packs=dict.fromkeys(packs, "wanted"),
    )
    jobs.store(job)
    return continue_thaw(jobs, classes, job, now_ns=now_ns)


def continue_thaw(jobs: ThawJobs, classes: ObjectClasses, job: ThawJob, *, now_ns: int) -> ThawJob:
    """Ask for what was not asked for, find out what is ready, and return the job as it is now.

    Raises:
        RemoteUnreachable, RemoteRefused: the store does not answer or allow it.
    """
    packs = dict(job.packs)
    ready_by_ns = job.ready_by_ns
    waiting = job.waiting

    def settle(name: str) -> tuple[PackState, float]:
        """Return the new state of a pack and the hours for which to wait, 0 where that is known."""
        try:
            seen = classes.look(name)
            if seen.state == "archived":
                classes.thaw(name, job.speed, job.days)
        except NoSuchObject:
            # A collection has copied what was needed, or the pack is lost: a restore says which.
            return "ready", 0
        if seen.state == "ready":
            return "ready", 0
        return "asked", _hours_of(classes, seen, job.speed)

    for start in range(0, len(waiting), _ASKED_BATCH):
        names = waiting[start : start + _ASKED_BATCH]
        with ThreadPoolExecutor(_ASKING_THREADS) as pool:
            for name, (state, hours) in zip(names, pool.map(settle, names), strict=True):
                if state == "asked" and packs[name] == "wanted":
                    ready_by_ns = max(ready_by_ns or 0, now_ns + int(hours * _HOUR_NS))
                packs[name] = state
        job.packs, job.ready_by_ns, job.polled_ns = packs, ready_by_ns, now_ns
        jobs.store(job)
    return job


def wait_until_ready(
    jobs: ThawJobs,
    classes: ObjectClasses,
    job: ThawJob,
    *,
    now_ns: Callable[[], int],
    sleep: Callable[[float], None],
    poll_seconds: float,
    between: Callable[[ThawJob], None] = lambda job: None,
) -> ThawJob:
    """Return the job when everything can be read. A store that does not answer is asked again later.

    Raises:
        RemoteRefused, UntrustedStore: the store does not allow it, or is another one; `continue_thaw` goes on.
    """
    while not job.is_ready:
        between(job)
        sleep(poll_seconds)
        try:
            job = continue_thaw(jobs, classes, job, now_ns=now_ns())
        except UntrustedStore:
            raise
        except RemoteUnreachable:
            continue
    return job


def _hours_of(classes: ObjectClasses, seen: ObjectClass, speed: ThawSpeed) -> float:
    """Return the hours that the store's documentation gives for a thaw; those of the slowest where it has not this speed."""
    hours = find_class(classes.scheme, seen.name).thaw_hours
    return hours.get(speed) or max(hours.values(), default=0.0)


_READING_THREADS: Final = 16


class ColdPack(NamedTuple):
    """Cold pack that a selection needs."""

    ref: PackRef
    size_bytes: int

    @property
    def name(self) -> str:
        """Name of the pack's object in the remote."""
        return pack_name(self.ref)


def cold_needs(
    repository: RemoteRepository, selected: Sequence[Located], *, thorough: bool = False
) -> list[ColdPack]:
    """Return the packs that these files and directories need and that are not thawed, sorted. One LIST where nothing is cold.

    Of content that no table has, all packs whose tables cannot be read: they may be archived, and the copies of their tables lost.

    Args:
        repository: Repository of a remote.
        selected: Files and directories.
        thorough: Ask the store for one byte of each pack that is needed, and not of those alone that have a copy of their table.

    Raises:
        Damaged: a tree cannot be read.
        RemoteUnreachable: the store did not answer for too long.
    """
    reader = repository.reader
    cold = set(cold_packs(reader.space.objects))
    if not cold and not thorough:
        return []
    # A warm copy costs nothing to read, and is there at once.
    reader.lookup.avoid(cold)
    # Readers take the first copy that they come upon; whether there is another takes the tables of all packs.
    reader.lookup.refresh()
    listed = list_packs(reader.space.objects)

    def listed_packs(refs: Iterable[PackRef]) -> list[ColdPack]:
        return [ColdPack(ref, listed[ref].size_bytes) for ref in sorted(refs) if ref in listed]

    copies = {
        frozenset(reader.lookup.ref(location.pack) for location in reader.lookup.find(chunk))
        for chunk in _with_bases(repository, _chunks(repository, selected))
    }
    asked = set().union(*copies) if thorough else set()
    archived = unreadable_now(reader, listed_packs(asked))
    cold.update(pack.ref for pack in archived)
    tableless = reader.lookup.unreadable().keys()
    # Of several cold copies a reader takes the first: all are thawed.
    needed = set().union(*(refs or tableless for refs in copies if refs <= cold))
    archived += unreadable_now(reader, listed_packs(needed - asked))
    return sorted(pack for pack in archived if pack.ref in needed)


def unreadable_now(reader: SpaceReader, packs: Sequence[ColdPack]) -> list[ColdPack]:
    """Return those of these packs that cannot be read before they are thawed: a request of one byte for each."""

    def is_archived(pack: ColdPack) -> bool:
        try:
            reader.space.objects.get_ranges(pack.name, [(0, 1)])
        except ArchivedObject:
            return True
        except NoSuchObject:
            # Damage, which the restore reports with the names of the files.
            return False
        return False

    with ThreadPoolExecutor(_READING_THREADS) as pool:
        return [pack for pack, archived in zip(packs, pool.map(is_archived, packs), strict=True) if archived]


def _with_bases(repository: RemoteRepository, chunks: Iterable[ChunkId]) -> Iterator[ChunkId]:
    seen: set[ChunkId] = set()
    for chunk in chunks:
        stack = [chunk]
        while stack:
            one = stack.pop()
            if one in seen:
                continue
            seen.add(one)
            yield one
            # Any copy may be the one that is read.
            stack += [ChunkId(found.base) for found in repository.reader.lookup.find(one) if found.base]


def _chunks(repository: RemoteRepository, selected: Sequence[Located]) -> Iterator[ChunkId]:
    """Yield the chunks of content below these; what cannot be resolved is left to the restore, which names it."""
    seen: set[bytes] = set()
    for source in selected:
        stack = [(source.root, source.entry)]
        while stack:
            root, entry = stack.pop()
            yield from _own_chunks(repository, root, entry)
            if entry.is_dir and entry.content and entry.content not in seen:
                seen.add(entry.content)
                stack += [(root, child) for child in repository.trees.entries(entry.content)]


def _own_chunks(repository: RemoteRepository, root: RootRecord, entry: Entry) -> Iterator[ChunkId]:
    try:
        full = resolve(repository, root, entry)
    except Damaged:
        return
    if full.flags & FLAG_XATTRS_CHUNK and full.xattrs:
        yield ChunkId(full.xattrs[0][1])
    if full.is_file and full.content:
        blocks = blocks_of(full.size_bytes, repository.block_size)
        for _, chunk in repository.block_maps.ids(full.content, full.map_height, blocks):
            yield chunk


_FILES_JOB: Final = "files"
"""Job in the names of manifests of snapshots of files; every other one is that of a training."""


class AgedSnapshot(NamedTuple):
    """Facts of a snapshot that rules look at."""

    manifest: str
    """Name of its manifest."""
    host: str
    job: str
    time_ns: int
    """Time of its cut by the clock of its host."""


def old_snapshots(rule: TierRule, snapshots: Sequence[AgedSnapshot], now_ns: int) -> set[str]:
    """Return the manifests of the snapshots that the rule lets become cold.

    Args:
        rule: The rule.
        snapshots: All snapshots that exist.
        now_ns: Time now.
    """
    since_ns = now_ns - rule.after_seconds * 10**9
    lines: dict[tuple[str, str], list[AgedSnapshot]] = {}
    for snapshot in snapshots:
        lines.setdefault((snapshot.host, snapshot.job), []).append(snapshot)
    old: set[str] = set()
    for (_, job), line in lines.items():
        if rule.kind != "all" and (rule.kind == "files") != (job == _FILES_JOB):
            continue
        line.sort(key=lambda snapshot: (snapshot.time_ns, snapshot.manifest), reverse=True)
        old.update(one.manifest for one in line[rule.keep_newest :] if one.time_ns <= since_ns)
    return old


def cold_targets(
    index: RemoteIndex,
    live: LiveChunks,
    warm: Sequence[LiveChunks],
    rules: Sequence[TierRule],
    *,
    scheme: str,
) -> dict[PackRef, TierRule]:
    """Return the rule for each data pack that may become cold: the one with the coldest class.

    A pack without any live chunk is left to the collection.

    Args:
        index: Index of the remote.
        live: Chunks that snapshots need, bases included.
        warm: For each rule, the chunks that other snapshots than its old ones need, bases included.
        rules: The rules.
        scheme: Scheme of the remote's URL.
    """
    needed: set[int] = set()
    # Bit n of a pack's number: rule n keeps it warm.
    kept_warm: dict[int, int] = {}
    for chunk, copies in live_groups(index, live):
        bits = sum(1 << at for at, chunks in enumerate(warm) if chunk in chunks)
        for copy in copies:
            needed.add(copy.pack)
            kept_warm[copy.pack] = kept_warm.get(copy.pack, 0) | bits
    coldest = sorted(
        range(len(rules)), key=lambda at: find_class(scheme, rules[at].storage_class).coldness, reverse=True
    )
    targets: dict[PackRef, TierRule] = {}
    for number in needed:
        ref = index.ref(number)
        allowed = [at for at in coldest if not kept_warm[number] >> at & 1]
        if allowed and split_ref(ref)[0] == "data":
            targets[ref] = rules[allowed[0]]
    return targets


def colder(
    targets: Mapping[PackRef, TierRule], classes: Mapping[PackRef, str], *, scheme: str
) -> dict[PackRef, str]:
    """Return the new class of each pack that is to move: to a colder class than it has, and not out of an archive.

    Args:
        targets: Rule for each pack that may become cold.
        classes: Storage class that each pack has now; empty for the default one. Packs that are left out are not there.
        scheme: Scheme of the remote's URL.
    """
    moves: dict[PackRef, str] = {}
    for ref, rule in targets.items():
        if ref not in classes:
            continue
        has = find_class(scheme, classes[ref])
        # What is archived cannot be copied before it is thawed, which costs more than it saves.
        if not has.is_archive and has.coldness < find_class(scheme, rule.storage_class).coldness:
            moves[ref] = rule.storage_class.upper()
    return moves


_BATCH_PACKS: Final = 256
"""Packs that one entry of the log names: an entry for each would double the requests, and all in one would keep more from
collections than moves."""
_THREADS: Final = 8

_MarkLive = Callable[[Mapping[str, LiveManifest]], NeededChunks]


class PlannedMoves(NamedTuple):
    """Moves in one space of a remote."""

    space: str
    """Id of the remote, or of the repository whose space it is."""
    moves: dict[PackRef, str]
    """New class of each pack that moves, or would."""
    sizes: dict[PackRef, int]
    """Bytes of each."""
    skipped: dict[PackRef, str]
    """Packs that were to move and did not, with the reason."""
    tableless: tuple[PackRef, ...]
    """Archived or thawed packs that stay where they are, and whose copies of tables are lost."""

    @property
    def bytes(self) -> int:
        """Bytes of all moved packs."""
        return sum(self.sizes.get(ref, 0) for ref in self.moves)


class _Mover:
    """Mover of the packs of one space. Used by one thread.

    Args:
        reader: Reader of the space.
        classes: Storage classes of the space's objects.
        log: This host's log for operators.
        logs: Reader of all logs.
        index: Index of the space that follows the log's rounds.
        mark: Function that finds the chunks of snapshots.
    """

    def __init__(
        self,
        reader: SpaceReader,
        classes: ObjectClasses,
        *,
        log: WriterLog,
        logs: LogReader,
        index: RemoteIndex,
        mark: _MarkLive,
    ) -> None:
        self._reader = reader
        self._objects = reader.space.objects
        self._sealer = reader.space.sealer
        self._classes = classes
        self._log = log
        self._logs = logs
        self._index = index
        self._mark = mark

    def run(self, rules: Sequence[TierRule], now_ns: int, *, dry_run: bool = False) -> PlannedMoves:
        """Apply the rules; what moved is durable on return.

        Args:
            rules: The rules.
            now_ns: Time now.
            dry_run: Only read, and return what would move.

        Raises:
            UsageError: the store has no such class.
            Damaged: a log, a round, a manifest or a tree cannot be read; nothing was moved.
            RemoteUnreachable: another call goes on.
        """
        # UsageError for a storage class that stores of this scheme do not have.
        for rule in rules:
            find_class(self._classes.scheme, rule.storage_class)
        if dry_run:
            self._log.rounds.refresh()
        else:
            # Before anything is listed: what is condemned later has a fence in this log.
            self._log.hello()
        self._index.follow(self._log.rounds)
        planned = self._plan(rules, now_ns)
        if dry_run:
            return planned
        skipped: dict[PackRef, str] = {}
        refs = sorted(planned.moves)
        for start in range(0, len(refs), _BATCH_PACKS):
            skipped |= self._move_batch(refs[start : start + _BATCH_PACKS], planned.moves)
        own = self._logs.logs.get(self._log.writer)
        # Also what an earlier run named before it was killed.
        if refs or (own is not None and own.moving):
            self._log.move((), checked=self._log.rounds.version)
        with ThreadPoolExecutor(_THREADS) as pool:
            # What is archived has none until it is thawed.
            for _ in pool.map(self._copy_table, planned.tableless):
                pass
        moved = {ref: name for ref, name in planned.moves.items() if ref not in skipped}
        return planned._replace(moves=moved, skipped=skipped)

    def _plan(self, rules: Sequence[TierRule], now_ns: int) -> PlannedMoves:
        self._logs.refresh()
        self._index.refresh(self._objects, self._sealer)
        snapshots = self._logs.live()
        aged = self._aged(snapshots)
        live = self._chunks(snapshots)
        warm: list[LiveChunks] = []
        for rule in rules:
            old = old_snapshots(rule, aged, now_ns)
            warm.append(self._chunks({name: one for name, one in snapshots.items() if name not in old}))
        targets = cold_targets(self._index, live, warm, rules, scheme=self._classes.scheme)
        condemned = self._log.rounds.condemned
        targets = {ref: rule for ref, rule in targets.items() if ref not in condemned}
        # Without a candidate the store is not asked.
        classes = self._class_of_packs() if targets else {}
        scheme = self._classes.scheme
        warm_or_cold = {ref: one.storage_class for ref, one in classes.items() if not one.is_thawed}
        moves = colder(targets, warm_or_cold, scheme=scheme)
        tableless = {
            ref
            for ref in targets.keys() & classes.keys()
            # Stored in a class that is read at once, or moved there by the store, packs never had copies, which say that they are cold.
            if classes[ref].is_thawed or find_class(scheme, classes[ref].storage_class).is_archive
        }
        if tableless:
            tableless -= cold_packs(self._objects).keys()
        # By a listing: the index does not have the size of a pack that it learned of from a log.
        listed = list_packs(self._objects) if moves else {}
        sizes = {ref: info.size_bytes for ref, info in listed.items() if ref in moves}
        return PlannedMoves(self._reader.space.id, moves, sizes, {}, tuple(sorted(tableless)))

    def _aged(self, snapshots: Mapping[str, LiveManifest]) -> list[AgedSnapshot]:
        manifests = Manifests(self._reader.space, self._reader.cache)
        found = RemoteSnapshots({name: CommittedEntry(live, manifests) for name, live in snapshots.items()})
        aged = []
        for name in snapshots:
            labels = parse_manifest(name)
            host, job = ("", "") if labels is None else (labels.host, labels.job)
            aged.append(AgedSnapshot(name, host, job, found.load(SnapshotId(name)).time_ns))
        return aged

    def _chunks(self, snapshots: Mapping[str, LiveManifest]) -> NeededChunks:
        needed = self._mark(snapshots)
        add_bases(self._index, needed)
        return needed

    def _class_of_packs(self) -> dict[PackRef, ListedClass]:
        return {
            ref: found
            for found in self._classes.list(pack_prefix("data"))
            if (ref := parse_pack(found.name)) is not None
        }

    def _move_batch(self, refs: Sequence[PackRef], moves: Mapping[PackRef, str]) -> dict[PackRef, str]:
        """Move these packs; return those that did not move, with the reason."""
        skipped: dict[PackRef, str] = {}
        while True:
            checked = self._log.rounds.version
            # Not `RemoteIndex.follow`, after which the rounds no longer say what those that ended have deleted.
            condemned = self._log.rounds.condemned
            skipped |= {ref: "a collection deletes it" for ref in refs if ref in condemned}
            chosen = [ref for ref in refs if ref not in skipped]
            if not chosen or self._log.move(chosen, checked=checked):
                break
        with ThreadPoolExecutor(_THREADS) as pool:
            for ref, problem in zip(
                chosen, pool.map(lambda ref: self._move(ref, moves[ref]), chosen), strict=True
            ):
                if problem:
                    skipped[ref] = problem
        return skipped

    def _move(self, ref: PackRef, storage_class: str) -> str:
        """Move a pack; return why it did not move, or nothing."""
        # Read from the pack each time: a copy that is there may be another user's.
        if problem := self._copy_table(ref):
            return problem
        try:
            self._reader.retry.call(lambda: self._classes.change(pack_name(ref), storage_class))
        except NoSuchObject:
            return "it is not there any more"
        except ArchivedObject:
            return "it is archived already"
        return ""

    def _copy_table(self, ref: PackRef) -> str:
        """Store a copy of a pack's table; return why there is none, or nothing."""
        try:
            copy = RemotePackReader(self._sealer, ref).copy_of_table(self._objects)
            self._objects.put(table_name(ref), [copy])
        except NoSuchObject:
            return "it is not there any more"
        except ArchivedObject:
            return "it is archived already"
        except (Damaged, UnsupportedFormat) as error:
            return error.message
        return ""


@contextmanager
def _open_mover(
    reader: SpaceReader, classes: ObjectClasses, *, host: str, between: Callable[[], None] = lambda: None
) -> Iterator[_Mover]:
    """Provide a mover of a space, with an index of its own in the cache.

    Args:
        reader: Reader of the space.
        classes: Storage classes of the space's objects.
        host: Name of this host, for people.
        between: Called often.
    """
    space = reader.space
    with reader.cache.index_path() as path:
        index = RemoteIndex.open(path)
        try:
            yield _Mover(
                reader,
                classes,
                log=operator_log(reader, host, index),
                logs=LogReader(
                    space.objects, space.sealer, cache_path=str(reader.cache.path / "operator.logs")
                ),
                index=index,
                mark=live_chunks(reader, between=between),
            )
        finally:
            index.close()


def apply_rules(
    readers: Iterable[tuple[SpaceReader, ObjectClasses]],
    rules: Sequence[TierRule],
    now_ns: int,
    *,
    host: str,
    dry_run: bool = False,
    between: Callable[[], None] = lambda: None,
) -> list[PlannedMoves]:
    """Apply the rules in all spaces of a remote; see `_Mover.run`."""
    results = []
    for reader, classes in readers:
        with _open_mover(reader, classes, host=host, between=between) as mover:
            results.append(mover.run(rules, now_ns, dry_run=dry_run))
    return results
