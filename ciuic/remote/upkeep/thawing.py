"""Thaw the cold packs that a restore reads: find them, ask the store once for each, and find out which are ready.

The store decides what is ready; the job, kept on this host, says what to ask it. Asking again changes nothing, so that a
job that is lost, or made a second time by another host, costs requests and nothing else.

Guarantees: a job is durable before the first request, and each pack is asked for until the store has said yes once; killed
anywhere, `continue_thaw` goes on. Nothing is changed but what the store charges. A pack is left out of the needs of a
selection only if each of its chunks that the selection has can be read from another pack.

References:
    docs/decisions/tiers.md
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from ciuic.errors import Damaged
from ciuic.remote.format.names import PackRef, pack_name
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, RemoteUnreachable
from ciuic.remote.objects.storage_classes import ObjectClass, ObjectClasses, ThawSpeed, find_class
from ciuic.remote.reading.remote_repository import RemoteRepository, SpaceReader
from ciuic.remote.remote_index import cold_packs, list_packs
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.lookup import Located, resolve
from ciuic.repository.notes import read_note, write_note
from ciuic.types import FLAG_XATTRS_CHUNK, ChunkId, Entry, RootRecord

_ROOT_DIRECTORY: Final = Path("/var/lib/ciuic/thaw")
"""Directory of the jobs of root, unless XDG_STATE_HOME says otherwise."""
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
        """Forget a job."""
        (self.path / f"{job.id}{_JOB_SUFFIX}").unlink(missing_ok=True)


def jobs_directory(environ: Mapping[str, str] | None = None) -> Path:
    """Return where the jobs of this user lie.

    It is ``$XDG_STATE_HOME/ciuic/thaw`` if that is set, else /var/lib/ciuic/thaw for root and ~/.local/state/ciuic/thaw
    for others.
    """
    variables = os.environ if environ is None else environ
    if (home := variables.get("XDG_STATE_HOME", "")).startswith("/"):
        return Path(home) / "ciuic" / "thaw"
    if os.geteuid() == 0:
        return _ROOT_DIRECTORY
    return Path(variables.get("HOME") or os.path.expanduser("~")) / ".local" / "state" / "ciuic" / "thaw"


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
    """Return the job when everything can be read. A store that does not answer is asked again later."""
    while not job.is_ready:
        between(job)
        sleep(poll_seconds)
        try:
            job = continue_thaw(jobs, classes, job, now_ns=now_ns())
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
        """Name of its object."""
        return pack_name(self.ref)


def cold_needs(repository: RemoteRepository, selected: Sequence[Located]) -> list[ColdPack]:
    """Return the cold packs that these files and directories need, sorted. One LIST where nothing is cold.

    Raises:
        Damaged: a tree cannot be read.
        RemoteUnreachable: the store did not answer for too long.
    """
    reader = repository.reader
    cold = cold_packs(reader.space.objects)
    if not cold:
        return []
    # A warm copy costs nothing to read, and is there at once.
    reader.lookup.avoid(cold)
    # Readers take the first copy that they come upon; whether there is another takes the tables of all packs.
    reader.lookup.refresh()
    listed = list_packs(reader.space.objects)
    wanted: set[PackRef] = set()
    for chunk in _with_bases(repository, _chunks(repository, selected)):
        refs = {reader.lookup.ref(location.pack) for location in reader.lookup.find(chunk)}
        if refs and refs <= cold.keys():
            # Of several cold copies a reader takes the first: all are thawed.
            wanted |= refs
    return [ColdPack(ref, listed[ref].size_bytes) for ref in sorted(wanted) if ref in listed]


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
