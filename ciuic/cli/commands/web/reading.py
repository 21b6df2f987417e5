"""Answers from a repository or remote for the pages, by a few threads, each of which has it open: a `Repository` is for one thread.

Guarantees: nothing is written. Of a directory no more names are read than a page shows, of a file no more bytes than a preview does; names
are bytes, and text for a page is of printable characters, whatever is in a snapshot.
"""

from __future__ import annotations

import itertools
import posixpath
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple, TypeVar
from urllib.parse import quote_from_bytes

import click
import trio

from ciuic.cli.commands.pick import answers
from ciuic.cli.commands.pick.answers import Version
from ciuic.cli.commands.pick.reader import Place
from ciuic.cli.commands.web.jobs import FoundRow, FoundRows
from ciuic.cli.shared.contents import as_recorded, roots_below
from ciuic.cli.shared.session import Session
from ciuic.errors import CiuicError, Damaged, NotFound, Unreachable, UsageError
from ciuic.history import FoundPath, GlobMatcher, PathVersion, Timeline, search, timelines, versions
from ciuic.printable import one_line
from ciuic.protocol.last_drill import LastDrill, read_drills
from ciuic.repository import Repository, SnapshotInfo
from ciuic.repository.lookup import Located, find, is_within, normalise, resolve
from ciuic.types import Entry, Snapshot, SnapshotId, is_safety, order_of
from ciuic.units import plural
from ciuic.verdicts.records import DatedCheckpoint, VerdictRecords, age_of, newest_of
from ciuic.verdicts.sources import SnapshotFile

if TYPE_CHECKING:
    from ciuic.remote.host_status import HostProblem, ReadStatus

MAX_NAMES: Final = 500
"""Names of a directory on one page."""
MAX_VERSIONS: Final = 200
PIECE_BYTES: Final = 1 << 20
_THREADS: Final = 3
_MAX_WAITING: Final = 256
_MAX_LOOKED_BACK: Final = 200
"""Snapshots in which the last good checkpoint is looked for."""
_MAX_DAMAGE: Final = 20
_STATUSES_SECONDS: Final = 30.0
_MAX_IMAGE_BYTES: Final = 8 << 20
_IMAGES: Final = {
    b"\x89PNG\r\n\x1a\n": "image/png",
    b"\xff\xd8\xff": "image/jpeg",
    b"GIF87a": "image/gif",
    b"GIF89a": "image/gif",
}
_T = TypeVar("_T")


class Readers:
    """Threads that answer questions about the snapshots.

    A question whose asker has gone is not begun. Threads are daemon threads: one that a store holds up must not keep the process.

    Args:
        open_session: Returns a new session; called in each thread.
        verdict_key: Key of the daemon's verdicts; empty for none.
    """

    def __init__(self, open_session: Callable[[], Session], verdict_key: bytes) -> None:
        self._open_session = open_session
        self._verdict_key = verdict_key
        self._jobs: queue.Queue[Callable[[Reading], None]] = queue.Queue()
        self._slots = trio.Semaphore(_MAX_WAITING)
        self._catalogue = Catalogue()
        for number in range(_THREADS):
            threading.Thread(target=self._run, name=f"reader-{number}", daemon=True).start()

    async def ask(self, question: Callable[[Reading], _T]) -> _T:
        """Answer a question in one of the threads.

        Raises:
            Unreachable: too many questions wait.
        """
        try:
            self._slots.acquire_nowait()
        except trio.WouldBlock:
            raise Unreachable("too many pages are being read at once", hint="try again in a moment") from None
        token = trio.lowlevel.current_trio_token()
        done = trio.Event()
        found: list[_T] = []
        failed: list[BaseException] = []
        is_wanted = True

        def job(reading: Reading) -> None:
            try:
                if is_wanted:
                    found.append(question(reading))
            except OSError as error:
                failed.append(reading.why_unreadable(error))
            except BaseException as error:
                failed.append(error)
            try:
                token.run_sync_soon(done.set)
            except trio.RunFinishedError:
                return

        try:
            self._jobs.put(job)
            await done.wait()
        finally:
            is_wanted = False
            self._slots.release()
        if failed:
            raise failed[0]
        return found[0]

    def _run(self) -> None:
        session = self._open_session()
        with click.Context(click.Command("web"), obj=session):
            reading = Reading(session, self._catalogue, self._verdict_key)
            while True:
                self._jobs.get()(reading)


class Catalogue:
    """The list of snapshots, read again when it has changed. Used by all threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._state: object = None
        self._infos: list[SnapshotInfo] = []
        self._loaded: dict[str, dict[str, Snapshot]] = {}
        self._unread: dict[str, list[str]] = {}
        self._checkpoints: dict[str, dict[bytes, DatedCheckpoint]] = {}
        self._statuses: tuple[float, list[ReadStatus]] | None = None

    def infos(self, session: Session) -> list[SnapshotInfo]:
        """Return what the catalogue knows of each snapshot, newest first."""
        snapshots = session.snapshots
        with self._lock:
            state = snapshots.state()
            if state != self._state:
                self._infos = snapshots.list()
                self._state = state
            return self._infos

    def statuses(self, session: Session) -> list[ReadStatus]:
        """Return the statuses of the hosts of a remote, read again after half a minute: a page that is open asks often."""
        from ciuic.remote.host_status import read_statuses

        with self._lock:
            now = time.monotonic()
            if self._statuses is None or now - self._statuses[0] > _STATUSES_SECONDS:
                remote = session.remote.remote
                found, _ = read_statuses(remote.objects, remote.sealer)
                self._statuses = (now, found)
            return self._statuses[1]

    def loaded(self, repository: Repository) -> list[Snapshot]:
        """Return all snapshots of a repository that can be read, newest first. What may change of one later (a hold, tags) may be old."""
        with self._lock:
            known = self._loaded.setdefault(repository.id, {})
            names, unread = repository.snapshots.names(), []
            for gone in known.keys() - names:
                del known[gone]
            for name in names - known.keys():
                try:
                    known[name] = repository.snapshots.load(SnapshotId(name))
                except NotFound:
                    # Removed meanwhile.
                    continue
                except CiuicError as error:
                    unread.append(f"{name} cannot be read: {one_line(error.message)}")
            self._unread[repository.id] = unread
            return sorted(known.values(), key=order_of, reverse=True)

    def unread(self, repository: Repository) -> list[str]:
        """Return a sentence for each snapshot that could not be read when they were loaded last."""
        with self._lock:
            return list(self._unread.get(repository.id, ()))

    def newest_checkpoints(self, records: VerdictRecords, snapshot: Snapshot) -> dict[bytes, DatedCheckpoint]:
        """Return the newest checkpoint in each root of a snapshot, as far as verdicts are stored."""
        known = self._checkpoints.get(str(snapshot.id))
        if known is None:
            record = records.record(snapshot)
            if record is None:
                return {}
            known = {path: newest for path, some in record.roots if (newest := newest_of(some)) is not None}
            # Verdicts on a snapshot are stored once.
            self._checkpoints[str(snapshot.id)] = known
            while len(self._checkpoints) > 2 * _MAX_LOOKED_BACK:
                del self._checkpoints[next(iter(self._checkpoints))]
        return known


class LastGoodCheckpoint(NamedTuple):
    """The newest checkpoint of a root that is GOOD."""

    snapshot: Snapshot
    newest: DatedCheckpoint
    directory: bytes
    """Directory to restore: the checkpoint itself, or the parent of a checkpoint file."""


class Listing(NamedTuple):
    """A page of the names in a directory."""

    snapshot: Snapshot
    path: bytes
    entries: list[Entry]
    after: bytes | None
    """Name after which the next page begins; None if this is the last."""
    entry: Entry | None
    """The directory, or the file that is there in its place; None above the roots."""


class Host(NamedTuple):
    """A host with snapshots."""

    name: str
    newest: SnapshotInfo
    """Newest snapshot, if there is one that is no safety snapshot."""
    snapshots: int
    checkpoint: DatedCheckpoint | None
    """Newest checkpoint of that snapshot, as far as a verdict is stored."""


class HostReport(NamedTuple):
    """Status that a host publishes on a remote."""

    name: str
    read: ReadStatus
    problems: list[HostProblem]
    """Why a person should look at it, the worst first."""


class Reading:
    """The snapshots, read by one thread."""

    def __init__(self, session: Session, catalogue: Catalogue, verdict_key: bytes) -> None:
        self.session = session
        self._verdict_key = verdict_key
        self._catalogue = catalogue

    def _records(self, repository: Repository) -> VerdictRecords:
        return VerdictRecords(repository, self._verdict_key, self.session.checkpoint_patterns)

    @property
    def infos(self) -> list[SnapshotInfo]:
        """Snapshots as the catalogue has them, newest first."""
        return self._catalogue.infos(self.session)

    def why_unreadable(self, error: OSError) -> CiuicError:
        """Return what to say of an error of the disk."""
        if self.session.remote_url is None and not Repository.exists(self.session.repository_dir):
            place = one_line(str(self.session.repository_dir))
            return Unreachable(
                f"there is no repository at {place}",
                hint="if its disk is not mounted, mount it; the page goes on by itself",
            )
        return CiuicError(
            f"{one_line(str(error.filename or 'the repository'))} cannot be read: {error.strerror}"
        )

    def snapshot(self, text: str) -> tuple[Repository, Snapshot]:
        """Return the snapshot that a text names, and its repository; the newest one for an empty text."""
        id_ = self.session.snapshots.resolve(text or "latest")
        repository = self.session.repository_of(id_)
        return repository, repository.snapshots.load(id_)

    def drills(self) -> list[LastDrill]:
        """Return the last drills of the repository, newest first; none of a remote."""
        return [] if self.session.remote_url is not None else read_drills(self.session.repository_dir)

    def before(self, snapshot: Snapshot) -> SnapshotInfo | None:
        """Return the snapshot before one: of the same host, with one of its roots, and no safety snapshot; None for the first."""
        return max(self._beside(snapshot, -1), key=lambda info: info.time_ns, default=None)

    def after(self, snapshot: Snapshot) -> SnapshotInfo | None:
        """Return the snapshot after one, as `before`; None for the newest."""
        return min(self._beside(snapshot, 1), key=lambda info: info.time_ns, default=None)

    def _beside(self, snapshot: Snapshot, sign: int) -> Iterator[SnapshotInfo]:
        roots = {root.path for root in snapshot.roots}
        return (
            info
            for info in self.infos
            if (info.time_ns - snapshot.time_ns) * sign > 0
            and info.host == snapshot.host
            and not roots.isdisjoint(info.roots)
            and _is_ordinary(info)
        )

    def top(self, text: str) -> bytes:
        """Return the directory that all roots of a snapshot have in common: the root itself where there is one."""
        roots = [root.path for root in self.snapshot(text)[1].roots if root.path.startswith(b"/")]
        return normalise(posixpath.commonpath(roots)) if roots else b"/"

    def listing(self, text: str, path: bytes, after: bytes = b"", start: bytes = b"") -> Listing:
        """Return a page of the names in a directory, as of a snapshot.

        Args:
            text: Which snapshot.
            path: Absolute path; above the roots, the steps to them are listed.
            after: Name after which the page begins.
            start: Beginning of the names that are wanted.
        """
        repository, snapshot = self.snapshot(text)
        path = as_recorded(snapshot, path)
        leading = roots_below(snapshot, path)
        if leading:
            return Listing(snapshot, path, leading, None, None)
        located = find(repository, snapshot, path)
        if not located.entry.is_dir:
            return Listing(snapshot, path, [], None, located.entry)
        # Entries are in byte order, so that those with one beginning lie together.
        begin = max(after, _before(start)) if start else after
        found = repository.trees.entries(located.entry.content, after=begin)
        if start:
            found = itertools.takewhile(lambda entry: entry.name.startswith(start), found)
        entries = list(itertools.islice(found, MAX_NAMES + 1))
        more = entries[MAX_NAMES - 1].name if len(entries) > MAX_NAMES else None
        shown = [_resolved(repository, located, entry) for entry in entries[:MAX_NAMES]]
        return Listing(snapshot, path, shown, more, located.entry)

    def hosts(self) -> list[Host]:
        """Return the hosts that have snapshots here, by name."""
        found: dict[str, list[SnapshotInfo]] = {}
        for info in self.infos:
            found.setdefault(info.host, []).append(info)
        newest = {
            name: next((one for one in infos if _is_ordinary(one)), infos[0]) for name, infos in found.items()
        }
        verdicts = self.summaries(list(newest.values()))
        return [
            Host(name, newest[name], len(found[name]), verdicts.get(str(newest[name].id)))
            for name in sorted(found)
        ]

    def reports(self) -> list[HostReport]:
        """Return what the hosts of the remote say of themselves, those that need a person first; nothing of a repository."""
        if self.session.remote_url is None:
            return []
        # Only here: a page of a repository does without these packages.
        from ciuic.remote.host_status import host_names, host_problems

        statuses = self._catalogue.statuses(self.session)
        names, now_ns = host_names(statuses), time.time_ns()
        found = [HostReport(names[one.reporter], one, host_problems(one, now_ns=now_ns)) for one in statuses]
        return sorted(found, key=lambda one: (not one.problems, -one.read.told_ns, one.name))

    def versions(self, path: bytes, host: str = "") -> tuple[list[Version], list[str]]:
        """Return the versions of a path in the innermost root with it, newest first, with verdicts where they are stored.

        Beside them come sentences about what could not be read, of which the versions say nothing.

        Args:
            path: The path.
            host: Whose; empty for the first host that has it.
        """
        place = self.place(path, host)
        found: list[Version] = []
        damage = self._catalogue.unread(place.repository)[:_MAX_DAMAGE]

        def note(snapshot: Snapshot, where: bytes, error: Damaged) -> None:
            if len(damage) < _MAX_DAMAGE:
                damage.append(f"{one_line(where)} cannot be read in {snapshot.id}: {one_line(error.message)}")

        for one in itertools.islice(
            versions(place.repository, place.timeline, path, on_damage=note), MAX_VERSIONS
        ):
            version = Version(place, path, one)
            if found:
                found[-1].older = version.snapshot
            found.append(version)
        if not found and not damage:
            raise NotFound(f"no snapshot has {one_line(path)}")
        records = self._records(place.repository)
        for version in found:
            if version.found.entry is not None:
                version.verdict = answers.stored_verdict(records, version)
        return found, damage

    def search(self, pattern: bytes, *, deleted: bool) -> FoundRows:
        """Return the paths of all snapshots that match, as ``ciuic find`` prints them, and at most `MAX_NAMES` of them.

        For `look_process`: it reads all trees.

        Raises:
            UsageError: nothing can match the pattern.
        """
        try:
            matcher = GlobMatcher(pattern)
        except ValueError as error:
            raise UsageError(f"the pattern {one_line(pattern)!r} finds nothing: {error}") from None
        found: list[FoundPath] = []
        damage: list[str] = []

        def note(snapshot: Snapshot, path: bytes, error: Damaged) -> None:
            if len(damage) < _MAX_DAMAGE:
                damage.append(f"{one_line(path)} cannot be read in {snapshot.id}: {one_line(error.message)}")

        for repository in self.session.repositories:
            for timeline in timelines(self._catalogue.loaded(repository)):
                found += [
                    one
                    for one in search(repository, timeline, matcher, on_damage=note)
                    if one.is_deleted or not deleted
                ]
            damage = [*self._catalogue.unread(repository)[:_MAX_DAMAGE], *damage]
        found.sort(key=lambda one: (-one.snapshot.order_ns, one.path, one.host))
        rows = tuple(
            FoundRow(
                path=quote_from_bytes(one.path),
                is_dir=one.entry.is_dir,
                size_bytes=answers.size_of(one.entry),
                snapshot=str(one.snapshot.id),
                time_ns=one.snapshot.time_ns,
                is_deleted=one.is_deleted,
                host=one.host,
            )
            for one in found[:MAX_NAMES]
        )
        return FoundRows(rows=rows, count=len(found), damage=tuple(damage))

    def place(self, path: bytes, host: str = "") -> Place:
        """Return the innermost root that has a path. Raises NotFound."""
        best: Place | None = None
        for repository in self.session.repositories:
            for timeline in timelines(self._catalogue.loaded(repository), lambda root: is_within(path, root)):
                if host and timeline.host != host:
                    continue
                if best is None or len(timeline.path) > len(best.timeline.path):
                    best = Place(repository, timeline)
        if best is None:
            raise NotFound(f"no snapshot has {one_line(path)}")
        return best

    def file(self, text: str, path: bytes) -> SnapshotFile:
        """Return a regular file of a snapshot, to be read by ranges. Raises NotFound, UsageError."""
        repository, snapshot = self.snapshot(text)
        located = find(repository, snapshot, path)
        if not located.entry.is_file:
            raise UsageError(f"{one_line(path)} is no file in {snapshot.id}")
        return SnapshotFile(repository, snapshot, located, lambda time_ns: None)

    def preview(self, text: str, path: bytes) -> list[answers.Line]:
        """Return the lines of a preview of a file: its text, or its first bytes. No format is parsed."""
        return list(answers.first_lines(self._version(text, path)))

    def tensors(self, text: str, path: bytes) -> tuple[str, ...]:
        """Return what `ciuic tensors` shows, a line for each tensor, first those with NaN or infinities.

        For `look_process`: what it parses is a user's.

        Raises:
            NotFound: there is no such path.
            UsageError: it has no tensors that are known, or they cannot be read.
        """
        from ciuic.cli.commands.tensors import tensor_versions
        from ciuic.cli.shared.timelines import PassedOver

        one = next(iter(tensor_versions(self.session, path, text or None, "*", PassedOver(), None)), None)
        if one is None:
            raise NotFound(f"no snapshot has {one_line(path)}")
        if not one.tensors:
            other = one.is_other or not one.problem
            raise UsageError(f"{one_line(path)} has no tensors that are known here" if other else one.problem)
        figures = sorted(one.tensors.items(), key=lambda pair: not (pair[1].nan or pair[1].inf))
        lines = [f"{plural(len(figures), 'tensor')}, norm {one.norm:.4g}, {_not_finite(one.nan, one.inf)}"]
        for name, tensor in figures[:MAX_NAMES]:
            shape = "x".join(map(str, tensor.shape)) or "scalar"
            norm = "" if tensor.norm is None else f"norm {tensor.norm:.4g}"
            bad = _not_finite(tensor.nan, tensor.inf) if tensor.nan or tensor.inf else ""
            lines.append("  ".join(filter(None, (one_line(name), one_line(tensor.dtype), shape, norm, bad))))
        if len(figures) > MAX_NAMES:
            lines.append(f"and {len(figures) - MAX_NAMES:,} more: ciuic tensors shows all")
        return (*lines, *(f"left out: {one_line(reason)}" for reason in one.left_out))

    def _version(self, text: str, path: bytes) -> Version:
        repository, snapshot = self.snapshot(text)
        path = as_recorded(snapshot, path)
        located = find(repository, snapshot, path)
        timeline = Timeline(snapshot.host, located.root.path, [snapshot])
        one = PathVersion("added", snapshot, snapshot, 1, located.entry, (), snapshot.host, snapshot)
        return Version(Place(repository, timeline), path, one)

    def located(self, repository: Repository, snapshot: Snapshot, path: bytes) -> Located:
        """Return the entry of a path in a snapshot. Raises NotFound."""
        return find(repository, snapshot, as_recorded(snapshot, path))

    def image_kind(self, text: str, path: bytes) -> str | None:
        """Return the media type of a picture that a browser may show; None for other files."""
        file = self.file(text, path)
        return image_kind(file.read(0, 16)) if file.size_bytes <= _MAX_IMAGE_BYTES else None

    def summaries(self, infos: Sequence[SnapshotInfo]) -> dict[str, DatedCheckpoint]:
        """Return the newest checkpoint of each snapshot, as far as verdicts are stored."""
        found = {}
        for repository in self.session.repositories:
            records = self._records(repository)
            names = records.names()
            for info in infos:
                summary = records.summary(info.id) if info.id in names else None
                if summary is not None and summary.newest is not None:
                    found[str(info.id)] = summary.newest
        return found

    def safety_since(self, time_ns: int) -> str:
        """Return the id of the first safety snapshot that was taken since a time; empty for none."""
        found = [
            info for info in self.infos if info.time_ns >= time_ns and is_safety(info.tags, info.message)
        ]
        return str(found[-1].id) if found else ""

    def last_goods(self) -> dict[bytes, LastGoodCheckpoint]:
        """Return, by root, the newest snapshot whose newest checkpoint there is GOOD by its stored verdict, and that checkpoint.

        Of a remote there are none: verdicts are stored on the host.
        """
        if self.session.remote_url is not None:
            return {}
        repository = self.session.repository
        records = self._records(repository)
        found: dict[bytes, LastGoodCheckpoint] = {}
        ordinary = [one for one in self._catalogue.loaded(repository) if not is_safety(one.tags, one.message)]
        # A repository may have snapshots of different roots, so that the newest one tells nothing of the others.
        for snapshot in ordinary[:_MAX_LOOKED_BACK]:
            for path, newest in self._catalogue.newest_checkpoints(records, snapshot).items():
                if newest.checkpoint.verdict.state == "GOOD" and path not in found:
                    place = self._directory_of(repository, snapshot, newest.checkpoint.path)
                    found[path] = LastGoodCheckpoint(snapshot, newest, place)
        return found

    def _directory_of(self, repository: Repository, snapshot: Snapshot, path: bytes) -> bytes:
        try:
            is_dir = self.located(repository, snapshot, path).entry.is_dir
        except NotFound:
            # The prefix of a TensorFlow checkpoint.
            is_dir = False
        return path if is_dir else posixpath.dirname(path)

    def stored_checkpoints(self, snapshot: Snapshot) -> list[DatedCheckpoint]:
        """Return the checkpoints of a snapshot with their stored verdicts, newest first; none where none are stored."""
        record = self._records(self.session.repository_of(snapshot.id)).record(snapshot)
        found = [one for _, some in record.roots for one in some] if record is not None else []
        return sorted(found, key=age_of, reverse=True)[:MAX_NAMES]

    def image(self, text: str, path: bytes) -> tuple[str, bytes] | None:
        """Return the media type and the bytes of a picture that a browser may show; None for other files.

        Pictures that can carry programs (SVG) are none.
        """
        file = self.file(text, path)
        if file.size_bytes > _MAX_IMAGE_BYTES:
            return None
        kind = image_kind(file.read(0, 16))
        return None if kind is None else (kind, file.read(0, file.size_bytes))


def _not_finite(nan: int, inf: int) -> str:
    return f"{nan:,} NaN, {inf:,} infinite"


def _is_ordinary(info: SnapshotInfo) -> bool:
    return not is_safety(info.tags, info.message)


def image_kind(head: bytes) -> str | None:
    """Return the media type of a picture by its first bytes; None if it is none that a browser may show."""
    if head[:4] == b"RIFF" and head[8:12] == b"WEBP":
        return "image/webp"
    return next((kind for magic, kind in _IMAGES.items() if head.startswith(magic)), None)


def path_of(text: str) -> bytes:
    """Return the absolute path of a request's text, whose bytes that are not UTF-8 are surrogates.

    Raises:
        UsageError: it is not absolute, or has a NUL, ``.`` or ``..``.
    """
    try:
        path = text.encode("utf-8", "surrogateescape")
    except UnicodeEncodeError:
        raise UsageError("the path is not text") from None
    if not path.startswith(b"/") or b"\0" in path:
        raise UsageError("a path begins with / and has no NUL")
    if not {b".", b".."}.isdisjoint(path.split(b"/")):
        raise UsageError("a path has no . and no ..")
    return normalise(path)


def _before(name: bytes) -> bytes:
    # The greatest name that is less than all that begin with this one, as far as names go (255 bytes).
    last = name[-1]
    return name[:-1] + (bytes([last - 1]) + b"\xff" * (256 - len(name)) if last else b"")


def _resolved(repository: Repository, located: Located, entry: Entry) -> Entry:
    try:
        return resolve(repository, located.root, entry)
    except Damaged:
        return entry
