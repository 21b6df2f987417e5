"""Reading of all logs and rounds of a remote, the second time only what is new: which snapshots exist, which packs are condemned.

A log is read from its end back to the last entry that sums up those before it, or to what was read before: what
lies before a summary counts for nothing, whether it was deleted, or created late by a party that had been paused.

Guarantees: every entry that was there before `LogReader.refresh` was called is taken in. A log that is shorter
than it was is an error. So is one with an entry that is missing or cannot be read, and nothing is taken in of that log then:
a collector must not delete what an unread commit needs. Readers pass over such entries (``skip_damaged``).

Of a damaged log the provable content is read (`read_provable`). Every entry is sealed by itself: one that opens is what its
writer or a collector put there. All of them count from the last readable one that sums up those before it. What a lost
entry removed may therefore show again, which costs nothing but space; what it committed is not there before the log is
repaired.

A log never vanishes, and never becomes shorter; but the store, or a user who may delete in it, can bring back an older state.
Then manifests show which no log accounts for (`unlogged_manifests`). A manifest names the log that its writer wrote when it
was stored. It was committed in that log, if at all, before anything that the writer wrote later.

A round of collectors condemns packs in ``gc/<r>``, which then count as not stored; from ``gc/<r>.final`` on only what that
names is deleted. Where that cannot be read, all that the round began with counts as not stored. Objects of rounds are never
deleted, so a host that was away for long reads what it missed (`Rounds`).

References:
    docs/remote-format.md, sections 6 to 8
"""

from __future__ import annotations

import shlex
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Final, NamedTuple, TypeVar

import msgspec
import xxhash

from ciuic.errors import Damaged
from ciuic.remote.documents import (
    MAX_MANIFESTS,
    GivenUp,
    LiveManifest,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogMove,
    LogRemove,
    LogRetired,
    LogState,
    RemoteManifest,
    StoredRound,
    decode_manifest,
    read_document,
    read_entry,
    read_round,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.object_names import (
    LOGS_PREFIX,
    MAX_NUMBER,
    ROUNDS_PREFIX,
    HexId,
    LogPosition,
    PackRef,
    RoundPart,
    log_entry_name,
    log_prefix,
    parse_log_entry,
    parse_manifest,
    parse_round,
    round_name,
)
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, RemoteUnreachable
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log
from ciuic.repository.errors import UnsupportedFormat
from ciuic.structs import decode_msgpack
from ciuic.system.disk import Disk, read_regular
from ciuic.units import plural


class RolledBack(DamagedRemote):
    """The remote lacks something that this host has seen in it: somebody brought back an older state."""

    def __init__(self, name: str, reason: str, directory: str = "", lacks: str = "") -> None:
        """Take the object that is missing, what was expected, where this host remembers what it saw, and what else is gone; empty for unknown."""
        memory = shlex.quote(directory) if directory else "this host's cache of the remote"
        super().__init__(
            name,
            f"the remote is older than it was: {reason}{lacks}",
            hint=f"somebody deleted in it, or restored it from a copy; to go on with what is there now, remove {memory}, "
            "and commit again what was lost: ciuic check --remote --repair",
        )
        self.expected = reason


@contextmanager
def naming_memory(directory: str, lacks: Callable[[], str] = str) -> Iterator[None]:
    """Name the directory with what this host remembers of a remote in the hint of a RolledBack, and in its message what is gone."""
    try:
        yield
    except RolledBack as error:
        raise RolledBack(error.name, error.expected, directory, lacks()) from None


class NothingCommitted(Damaged):
    """A remote has packs, and no log says that there is or was a snapshot: logs may be lost."""

    def __init__(self, url: str, packs: int) -> None:
        super().__init__(
            f"{url} has {plural(packs, 'pack')}, and no log commits a snapshot or removes one; nothing was deleted",
            hint="logs may have been deleted, or the first upload has not ended: ciuic check --remote",
        )


class LostCommits(DamagedRemote):
    """A manifest is stored, and the log that must have committed it is gone or cut."""

    def __init__(self, name: str, reason: str, more: int) -> None:
        others = f", and {plural(more, 'other manifest')} like it" if more else ""
        super().__init__(
            name,
            f"no log commits or removes it{others}: {reason}; nothing was deleted",
            hint="ciuic check --remote --repair commits it again; then ciuic forget --remote gives up what is not wanted",
        )


class IncompleteListing(RemoteUnreachable):
    """A listing lacks an object that is there: the store lists late, or something between it and this host answered."""

    def __init__(self, prefix: str, name: str) -> None:
        super().__init__(
            f"the listing of {prefix} lacks {name}, which is there; nothing was decided by it",
            hint="the store must list an object as soon as it is created, and no proxy may answer in its place",
        )


def missing_object_error(
    objects: Objects, prefix: str, name: str, reason: str
) -> IncompleteListing | RolledBack:
    """Return the error for a known object that a listing lacks: of the listing if the object is there, else of the remote.

    Args:
        objects: The remote.
        prefix: Prefix that was listed.
        name: Object that this host has seen.
        reason: What was expected and found, for people.
    """
    return IncompleteListing(prefix, name) if objects.info(name) else RolledBack(name, reason)


# A round may begin between a listing and the question for the next one.
_ATTEMPTS: Final = 3
_ROUND_MISSING: Final = "other objects say that it must be there, but it is missing"
_ROUND_MISSING_HINT: Final = (
    "deleted from a bucket with versions, it is stored again by ciuic check --remote --behind-deletions --repair; if somebody "
    "with the key of a host made up the later objects below gc/: withdraw that key, see that no collection runs, and delete "
    "these objects in the store"
)


class Rounds:
    """Packs and manifests that rounds condemned. Not thread-safe.

    Args:
        objects: The remote.
        sealer: Its seals.
        known: Last round whose deletions the caller's index has (`RemoteIndex.rounds_finished`); it and those before it
            are not read. -1 for none. None for a caller that will list all packs after the first `refresh`: then
            no round that has ended before it is read.
    """

    def __init__(self, objects: Objects, sealer: Sealer, *, known: int | None = -1) -> None:
        self._objects = objects
        self._sealer = sealer
        self._read: dict[int, tuple[RoundPart, StoredRound]] = {}
        self._skip_ended = known is None
        self.finished = -1 if known is None else known
        """Last round of which everything that it deletes is deleted, as all before it; -1 for none."""
        self.last = self.finished
        """Last round that was begun; -1 for none."""
        self.version = 0
        """Number that grows whenever more is condemned than before."""
        self.condemned: frozenset[PackRef] = frozenset()
        """Packs that count as not stored: a round deleted them, or may yet."""
        self.manifests: frozenset[str] = frozenset()
        """Manifests of which the same holds; their names must not be used again."""
        self.damaged: dict[int, DamagedRemote] = {}
        """Rounds whose ``.final`` cannot be read. They count as under way, and what they began with as not stored."""

    @property
    def unfinished(self) -> int | None:
        """Number of the round that is under way, or None."""
        return self.last if self.last > self.finished else None

    @property
    def deleted(self) -> frozenset[PackRef]:
        """Packs that finished rounds deleted, of those that were read and not forgotten."""
        read = (content for round_, (_, content) in self._read.items() if round_ <= self.finished)
        return frozenset(PackRef(ref) for content in read for ref in content.condemned)

    def content(self, round_: int) -> tuple[RoundPart, StoredRound]:
        """Return the furthest part of a round that was read, ``begun`` or ``final``, and its content."""
        return self._read[round_]

    def refresh(self) -> None:
        """Read what rounds have condemned since the last call. One LIST, a HEAD, and a GET for each new part.

        Raises:
            RolledBack: a round that was seen is missing.
            IncompleteListing: the listing lacks a round that is there.
            DamagedRemote: a round cannot be read, and neither what it began with.
        """
        before = (self.condemned, self.manifests)
        parts, last = self._list_all()
        if self._skip_ended and parts:
            self.finished = self._last_ended(parts[last], last)
        self._skip_ended = False
        for round_ in range(self.finished + 1, last + 1):
            # A round begins only after the one before has ended. A listing may lack what was created while it was
            # made: .final beside .done, or a whole round before a later one.
            ended = round_ < last or not parts[round_].isdisjoint(("final", "done"))
            self._learn(round_, ended)
            if (
                self.finished == round_ - 1
                and round_ not in self.damaged
                and (round_ < last or "done" in parts[round_])
            ):
                self.finished = round_
        self.last = last
        self._count(before)

    def _last_ended(self, parts: set[RoundPart], last: int) -> int:
        """Return the last round that has ended. Names are not sealed: one that anybody made up must not hide rounds.

        Where the last one has not ended, its own seal says so of those before it; the caller reads it.
        """
        if "done" not in parts:
            return last - 1
        try:
            read_round(self._objects, self._sealer, last, "done")
        except NoSuchObject as error:
            raise DamagedRemote(error.name, _ROUND_MISSING, hint=_ROUND_MISSING_HINT) from None
        except DamagedRemote:
            try:
                read_round(self._objects, self._sealer, last, "final")
            except DamagedRemote:
                # All that it began with counts as not stored until a repair.
                return last - 1
            except NoSuchObject:
                pass
            raise
        return last

    def forget(self) -> None:
        """Stop counting what finished rounds deleted; the caller's index no longer has it."""
        for round_ in [r for r in self._read if r <= self.finished]:
            del self._read[round_]
        self._unite()

    def _list_all(self) -> tuple[dict[int, set[RoundPart]], int]:
        """Return the parts as `_list` does, and the last round, after which none is there."""
        for _ in range(_ATTEMPTS):
            parts = self._list()
            last = max(parts, default=self.last)
            # Rounds have no gaps. A writer that misses one relies on what is about to be deleted.
            if last == MAX_NUMBER or self._objects.info(round_name(last + 1)) is None:
                return parts, last
        raise IncompleteListing(ROUNDS_PREFIX, round_name(last + 1))

    def _list(self) -> dict[int, set[RoundPart]]:
        """Return the parts of each round that is not known to be finished; checks that the last known one is there."""
        after = round_name(self.finished - 1, "final") if self.finished > 0 else ""
        parts: dict[int, set[RoundPart]] = {}
        for info in self._objects.list(ROUNDS_PREFIX, after=after):
            if name := parse_round(info.name):
                parts.setdefault(name.round, set()).add(name.part)
        if self.finished >= 0 and "done" not in parts.get(self.finished, ()):
            known = round_name(self.finished, "done")
            raise missing_object_error(
                self._objects, ROUNDS_PREFIX, known, "this round had ended, and is missing now"
            )
        if self.last > self.finished and self.last not in parts:
            known = round_name(self.last)
            raise missing_object_error(
                self._objects, ROUNDS_PREFIX, known, "this round was there, and is missing now"
            )
        return {
            round_: found for round_, found in parts.items() if round_ > self.finished or self._skip_ended
        }

    def _learn(self, round_: int, ended: bool) -> None:
        known = self._read.get(round_)
        if known is None or (ended and known[0] == "begun"):
            part: RoundPart = "final" if ended else "begun"
            try:
                content = read_round(self._objects, self._sealer, round_, part)
            except NoSuchObject as error:
                raise DamagedRemote(error.name, _ROUND_MISSING, hint=_ROUND_MISSING_HINT) from None
            except DamagedRemote as error:
                if not ended:
                    raise
                part, content = "begun", self._beginning(round_, error)
            else:
                self.damaged.pop(round_, None)
            self._read[round_] = (part, content)

    def _beginning(self, round_: int, error: DamagedRemote) -> StoredRound:
        """Return what a round began with, whose decision cannot be read; it decided on nothing else."""
        try:
            content = read_round(self._objects, self._sealer, round_, "begun")
        except (NoSuchObject, DamagedRemote):
            raise error from None
        if round_ not in self.damaged:
            log.warning("remote_round_unreadable", error=error.message)
        self.damaged[round_] = DamagedRemote(error.name, error.reason, hint=_REPAIR_HINT)
        return content

    def _count(self, before: tuple[frozenset[PackRef], frozenset[str]]) -> None:
        self._unite()
        # What was rescued from a round counts as stored again, which no caller has to hear of.
        if not (self.condemned <= before[0] and self.manifests <= before[1]):
            self.version += 1

    def _unite(self) -> None:
        contents = [content for _, content in self._read.values()]
        self.condemned = frozenset(PackRef(ref) for content in contents for ref in content.condemned)
        self.manifests = frozenset(name for content in contents for name in content.manifests)


class LogSummary(msgspec.Struct, kw_only=True):
    """Log up to the entry before ``next``."""

    next: int = 0
    """Number of the first entry that was not read."""
    committed: dict[str, LiveManifest] = {}
    """Snapshots that this log committed, by manifest; some may be removed, by this log or another."""
    removed: set[str] = set()
    """Manifests that this log removed."""
    given_up: set[GivenUp] = set()
    """Snapshots that operators gave up in this log."""
    fence: int = -1
    """Last round whose fence was read in this log; -1 for none."""
    state: int = -1
    """Number of the last entry that sums up those before it; -1 for none."""
    own: int = -1
    """Number of the last entry that the writer itself made, as far as it is there; -1 for none."""
    moving: frozenset[str] = frozenset()
    """Packs that this writer moves to another storage class or place: no collector deletes them meanwhile."""
    nonce: str = ""
    """Nonce of the entry before ``next``."""
    retired: bool = False

    def copy(self) -> LogSummary:
        """Return a copy that can be changed."""
        return msgspec.structs.replace(
            self, committed=dict(self.committed), removed=set(self.removed), given_up=set(self.given_up)
        )

    def kept_given_up(self) -> tuple[GivenUp, ...]:
        """Return what an entry that sums up the log says of snapshots that operators gave up."""
        # Beyond the limit of a document their hosts may upload them again, which costs nothing but space.
        return tuple(sorted(self.given_up, key=lambda one: (one.repository, one.snapshot))[:MAX_MANIFESTS])

    def apply(self, number: int, entry: LogEntry) -> tuple[PackRef, ...]:
        """Take in entry ``number``, which follows what was read; return the packs that it names."""
        packs: tuple[PackRef, ...] = ()
        if isinstance(entry, LogState | LogRetired):
            self.committed = {live.manifest: live for live in entry.live}
            self.removed = set(entry.removed)
            self.given_up = set(entry.given_up)
            self.state = number
            self.moving = frozenset()
            self.retired = isinstance(entry, LogRetired)
        elif isinstance(entry, LogFence):
            self.fence = max(self.fence, entry.round)
        elif isinstance(entry, LogCommit):
            self.committed[entry.manifest] = LiveManifest(
                entry.repository, entry.snapshot, entry.manifest, entry.digest
            )
            packs = tuple(PackRef(ref) for ref in entry.packs)
        elif isinstance(entry, LogRemove):
            self.removed.update(entry.manifests)
            self.given_up.update(entry.snapshots)
        elif isinstance(entry, LogMove):
            self.moving = frozenset(entry.packs)
        if isinstance(entry, LogHello | LogCommit | LogRemove | LogMove):
            self.own = number
        self.next = number + 1
        self.nonce = entry.nonce
        return packs


def is_uploader(objects: Objects, sealer: Sealer, writer: str, summary: LogSummary, repository: str) -> bool:
    """Return whether the writer of a log uploaded a snapshot that it commits: a repair commits what others have uploaded.

    Raises:
        RemoteUnreachable: a manifest could not be read now.
    """
    for name, live in summary.committed.items():
        if live.repository != repository:
            continue
        try:
            manifest = read_document(objects, name, partial(decode_manifest, sealer, name))
        except (NoSuchObject, Damaged, UnsupportedFormat):
            continue
        if manifest.writer == writer:
            return True
    return False


_PROVABLE_BATCH = 16
# A log has no gaps, and an entry for each snapshot: no writer gets here, least of all over so many missing entries.
_FAR = 1 << 32
_WIDE = 1 << 20
_MISSING = "it is missing"

Found = LogEntry | str
"""Entry, or the reason why it cannot be read."""
Reads = Callable[[Callable[[int], Found], Iterable[int]], Iterable[Found]]
"""Function that applies a function to numbers, such as the ``map`` of a pool of threads."""


class DamagedLog(NamedTuple):
    """Log of which entries cannot be read or are missing."""

    summary: LogSummary
    """All of it that can be proved."""
    problems: dict[str, str]
    """Reasons by the names of entries; of several missing ones the first."""
    later: str = ""
    """Reason of an entry that has a later version; empty for none. A process that cannot read it must not sum up this log."""

    stray: tuple[str, ...] = ()
    """Unreadable objects whose numbers no writer reaches. After the last number nothing can be appended any more, so that a
    repair deletes them."""

    @property
    def error(self) -> DamagedRemote:
        """The first problem as an error."""
        name, reason = next(iter(self.problems.items()))
        return DamagedRemote(name, reason)


def read_provable(
    objects: Objects, sealer: Sealer, writer: str, known: LogSummary, reads: Reads = map
) -> DamagedLog:
    """Return what can be proved of a log.

    Args:
        objects: The remote.
        sealer: Its seals.
        writer: Name of the log.
        known: What was read of it while it was whole; not changed.
        reads: Reads several entries at a time.

    """
    later: list[str] = []

    def read(number: int) -> Found:
        try:
            return read_entry(objects, sealer, writer, number)
        except NoSuchObject:
            return _MISSING
        except DamagedRemote as error:
            return error.reason
        except UnsupportedFormat as error:
            # Or a user without a key wrote it: then it must not stop readers either.
            later.append(error.message)
            return error.message

    numbers = [
        position.number
        for info in objects.list(log_prefix(writer))
        if (position := parse_log_entry(info.name)) and position.number >= known.next
    ]
    found: dict[int, Found] = {}
    begin = known.next
    for end in range(len(numbers), 0, -_PROVABLE_BATCH):
        some = numbers[max(end - _PROVABLE_BATCH, 0) : end][::-1]
        found.update(zip(some, reads(read, some), strict=True))
        sums = [number for number in some if isinstance(found[number], LogState | LogRetired)]
        if sums:
            begin = sums[0]
            break
    summary = known.copy()
    problems: dict[str, str] = {}
    stray: list[str] = []
    expected = begin
    for number in sorted(number for number in found if number >= begin):
        if number > expected:
            if number - expected > _WIDE and number > _FAR:
                stray = stray or [log_entry_name(writer, far) for far in sorted(found) if far >= number]
            problems[log_entry_name(writer, expected)] = _missing_entries(number - expected)
        expected = number + 1
        entry = found[number]
        if isinstance(entry, str):
            problems[log_entry_name(writer, number)] = entry
        else:
            stray = []
            summary.apply(number, entry)
    summary.next = expected
    return DamagedLog(summary, problems, "".join(later[:1]), tuple(stray))


def _missing_entries(count: int) -> str:
    return _MISSING if count == 1 else f"it and the {count - 1} entries after it are missing"


_Argument = TypeVar("_Argument")
_Result = TypeVar("_Result")


class InlinePool:
    """Stand-in for a pool: calls one after the other, and none whose result is not asked for."""

    def __enter__(self) -> InlinePool:
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def map(self, call: Callable[[_Argument], _Result], arguments: Iterable[_Argument]) -> Iterable[_Result]:
        """Yield the results, in order."""
        return map(call, arguments)


# Entries of one log that are asked for at once; more than are needed are at most this many small requests.
_ENTRY_BATCH: Final = 16
# Logs whose newest entries are asked for while another log is taken in: of ten thousand logs most have one new entry.
_LOGS_AHEAD: Final = 32
# A collector may delete what a listing named before it is read. It does so once a round: three are plenty.

_MAX_CACHE_BYTES: Final = 256 << 20
_CHECKSUM_BYTES: Final = 16

# As many names as a store lists with one request.
_SKIP_ENTRIES: Final = 1000
_REPAIR_HINT: Final = "ciuic check --remote --repair"

_Cache = dict[HexId, LogSummary]


class NewEntries(NamedTuple):
    """Result of `LogReader.refresh`."""

    packs: tuple[PackRef, ...]
    """Packs that new commits name."""
    complete: bool
    """False if commits may be summed up in what was read, or are lost: then their packs are not among ``packs``."""


class _BegunLog(NamedTuple):
    """Log with new entries, of which the newest were asked for."""

    writer: str
    known: LogSummary
    end: int
    """Number of its last entry."""
    newest: Iterable[LogEntry | None]
    """Last entries, backwards."""


class _GapError(Exception):
    """An entry between others was not there."""


class LogReader:
    """All logs of a remote. Not thread-safe.

    Args:
        objects: The remote.
        sealer: Its seals.
        cache_path: Local file that keeps what was read; None for none.
        disk: For tests.
        threads: Entries that are read at the same time.
        skip_damaged: Take in all that can be proved of a damaged log; for those who delete nothing.
        passes_cuts: Take a log that is shorter than it was for a damaged one of which only what is there counts; for those who
            only add. Whoever can delete the log of one host would else stop all others.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        *,
        cache_path: str | None = None,
        disk: Disk | None = None,
        threads: int = 16,
        skip_damaged: bool = False,
        passes_cuts: bool = False,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._cache_path = cache_path
        self._disk = disk or Disk()
        self._threads = threads
        self._skip_damaged = skip_damaged
        self._passes_cuts = passes_cuts
        self.logs: dict[str, LogSummary] = read_log_cache(cache_path) if cache_path else {}
        """Summary of each log as far as it is whole, by writer."""
        self.damaged: dict[str, DamagedLog] = {}
        """Logs that the last `refresh` found damaged, by writer; only with ``skip_damaged``."""
        self.first: dict[str, int] = {}
        """Number of the first entry of each log that is there, as last listed."""
        self.witness: LogPosition | None = None
        """Entry that the caller has created: a listing without it is not believed."""

    def live(self) -> dict[str, LiveManifest]:
        """Return all snapshots that exist, by the names of their manifests."""
        removed = self.removed()
        return {
            manifest: snapshot
            for summary in self._provable()
            for manifest, snapshot in summary.committed.items()
            if manifest not in removed
        }

    def removed(self) -> set[str]:
        """Return the manifests that some log removed, as far as logs still say so."""
        return set().union(*(summary.removed for summary in self._provable()))

    def given_up(self, repository: str) -> set[str]:
        """Return the ids of this repository's snapshots that operators gave up, in any log."""
        return {
            one.snapshot
            for summary in self._provable()
            for one in summary.given_up
            if one.repository == repository
        }

    def _provable(self) -> Iterable[LogSummary]:
        whole = (summary for writer, summary in self.logs.items() if writer not in self.damaged)
        return (*whole, *(damaged.summary for damaged in self.damaged.values()))

    def moving(self) -> frozenset[PackRef]:
        """Return the packs that some writer moves to another storage class or place."""
        return frozenset(PackRef(ref) for summary in self.logs.values() for ref in summary.moving)

    def last_own(self, writer: str) -> int:
        """Return the number of the last entry that the writer of a log made; -1 if none is found."""
        summary = self.logs[writer]
        if summary.own < 0:
            # The log was read back to its last sum only.
            for number in range(summary.next - 1, self.first.get(writer, 0) - 1, -1):
                try:
                    entry = read_entry(self._objects, self._sealer, writer, number)
                except (NoSuchObject, DamagedRemote):
                    # Damage before a sum that a repair made: nothing is deleted until the writer goes on.
                    break
                if isinstance(entry, LogHello | LogCommit | LogRemove | LogMove):
                    summary.own = number
                    break
        return summary.own

    def refresh(self) -> NewEntries:
        """Read what is new in all logs. One LIST, and a GET for each new entry.

        Raises:
            RolledBack: a log is shorter than it was, or gone; not with ``passes_cuts``.
            IncompleteListing: the listing lacks an entry that is there.
            DamagedRemote: an entry cannot be read, or is missing; not with ``skip_damaged``.
            UnsupportedFormat: a later version of ciuic wrote an entry; not with ``skip_damaged``.
        """
        ends = self._list()
        damaged: dict[str, DamagedLog] = {}
        for writer, summary in self.logs.items():
            try:
                self._check_end(writer, summary.next, ends.get(writer, -1))
            except RolledBack as error:
                if not self._passes_cuts:
                    raise
                there = read_provable(self._objects, self._sealer, writer, LogSummary())
                damaged[writer] = there._replace(problems={error.name: error.reason, **there.problems})
        packs: list[PackRef] = []
        complete = not damaged
        changed = False
        with ThreadPoolExecutor(self._threads) if self._threads > 1 else InlinePool() as pool:
            for begun in self._begin_logs(pool, ends):
                writer, known = begun.writer, begun.known
                try:
                    entries = self._read(pool, begun)
                except RolledBack:
                    raise
                except (DamagedRemote, UnsupportedFormat) as error:
                    if not self._skip_damaged:
                        raise _with_hint(error) from None
                    found = read_provable(self._objects, self._sealer, writer, known, pool.map)
                    complete = False
                    if found.problems:
                        damaged[writer] = found
                    else:
                        # Read once more it is sound: what came before was spoilt on its way.
                        self.logs[writer] = found.summary
                        changed = True
                    continue
                complete = complete and not isinstance(entries[0][1], LogState | LogRetired)
                summary = known.copy()
                for number, entry in entries:
                    packs += summary.apply(number, entry)
                self.logs[writer] = summary
                changed = True
        self.damaged = damaged
        if changed:
            self._save()
        return NewEntries(tuple(packs), complete)

    def _begin_logs(
        self, pool: ThreadPoolExecutor | InlinePool, ends: Mapping[str, int]
    ) -> Iterator[_BegunLog]:
        """Yield each log with new entries; the newest entries of logs behind it are on their way then."""
        ahead: deque[_BegunLog] = deque()
        for writer, end in ends.items():
            known = self.logs.get(writer) or LogSummary()
            if end >= known.next:
                newest = self._read_batch(pool, writer, known.next, end)
                ahead.append(_BegunLog(writer, known, end, newest))
            if len(ahead) > _LOGS_AHEAD:
                yield ahead.popleft()
        yield from ahead

    def _list(self) -> dict[str, int]:
        """Return the number of the last entry of each log."""
        ends: dict[str, int] = {}
        self.first = {}
        after: str | None = ""
        while after is not None:
            after = self._list_from(after, ends)
        if self.witness is not None and ends.get(self.witness.writer, -1) < self.witness.number:
            raise IncompleteListing(LOGS_PREFIX, log_entry_name(*self.witness))
        return ends

    def _list_from(self, after: str, ends: dict[str, int]) -> str | None:
        """List entries after a name; return from where to go on, or None at the end."""
        for info in self._objects.list(LOGS_PREFIX, after=after):
            if position := parse_log_entry(info.name):
                # Ascending: the first and last of each writer are the ends of its log.
                self.first.setdefault(position.writer, position.number)
                ends[position.writer] = max(position.number, ends.get(position.writer, -1))
                known = self.logs.get(position.writer)
                # Entries that were read and that no collector has deleted yet: a page of each thousand.
                if known is not None and known.next - position.number > _SKIP_ENTRIES:
                    return log_entry_name(position.writer, known.next - 2)
        return None

    def _check_end(self, writer: str, next_: int, end: int) -> None:
        if end < next_ - 1:
            found = f"its last entry is {end}" if end >= 0 else "it is gone"
            reason = f"this log had the entry {next_ - 1}, now {found}"
            raise missing_object_error(
                self._objects, log_prefix(writer), log_entry_name(writer, next_ - 1), reason
            )

    def _read(self, pool: ThreadPoolExecutor | InlinePool, begun: _BegunLog) -> list[tuple[int, LogEntry]]:
        """Return the entries that are new, or those from the last that sums up those before it on."""
        writer, first, end = begun.writer, begun.known.next, begun.end
        newest = begun.newest
        for _ in range(_ATTEMPTS):
            try:
                return self._read_back(pool, writer, first, end, newest)
            except _GapError as gap:
                missing = str(gap)
                # A collector has summed up the log meanwhile: then its end is another.
                numbers = [
                    position.number
                    for info in self._objects.list(log_prefix(writer))
                    if (position := parse_log_entry(info.name))
                ]
                listed, end = end, max(numbers, default=-1)
                # An end that was listed may be summed up by a later one, and never vanishes.
                self._check_end(writer, listed + 1, end)
                newest = self._read_batch(pool, writer, first, end)
        raise DamagedRemote(missing, "this entry of a log is missing between others")

    def _read_back(
        self,
        pool: ThreadPoolExecutor | InlinePool,
        writer: str,
        first: int,
        end: int,
        newest: Iterable[LogEntry | None],
    ) -> list[tuple[int, LogEntry]]:
        entries: list[tuple[int, LogEntry]] = []
        for last in range(end, first - 1, -_ENTRY_BATCH):
            batch = newest if last == end else self._read_batch(pool, writer, first, last)
            for number, entry in zip(_batch_of(first, last), batch, strict=True):
                if entry is None:
                    raise _GapError(log_entry_name(writer, number))
                entries.append((number, entry))
                if isinstance(entry, LogState | LogRetired):
                    return entries[::-1]
        return entries[::-1]

    def _read_batch(
        self, pool: ThreadPoolExecutor | InlinePool, writer: str, first: int, last: int
    ) -> Iterable[LogEntry | None]:
        """Ask for the entry ``last`` and some before it, down to ``first``; return them backwards."""

        def read(number: int) -> LogEntry | None:
            try:
                return read_entry(self._objects, self._sealer, writer, number)
            except NoSuchObject:
                return None

        return pool.map(read, _batch_of(first, last))

    def _save(self) -> None:
        if self._cache_path:
            content = msgspec.msgpack.encode(self.logs)
            self._disk.replace_file(self._cache_path, xxhash.xxh3_128_digest(content) + content, shared=True)


def _batch_of(first: int, last: int) -> range:
    return range(last, max(last - _ENTRY_BATCH, first - 1), -1)


def _with_hint(error: DamagedRemote | UnsupportedFormat) -> DamagedRemote | UnsupportedFormat:
    if isinstance(error, UnsupportedFormat):
        return error
    return error.anew(hint=_REPAIR_HINT)


def read_log_cache(path: str) -> dict[str, LogSummary]:
    """Return what a `LogReader` has kept in its cache; nothing if it cannot be read."""
    try:
        data = read_regular(path, _MAX_CACHE_BYTES + 1)
    except FileNotFoundError:
        return {}
    content = data[_CHECKSUM_BYTES:]
    try:
        # A flipped bit in a number would say that the remote is older than it was.
        if xxhash.xxh3_128_digest(content) != data[:_CHECKSUM_BYTES]:
            raise msgspec.DecodeError("it does not match its checksum")
        return dict(decode_msgpack(content, _Cache))
    except msgspec.DecodeError as error:
        # A cache: the logs say all that is in it.
        log.warning("remote_log_cache_unreadable", path=path, error=str(error))
        return {}


UPLOADING_NS: Final = 3600 * 10**9
"""Age by the store's clock from which a manifest of a writer that has a log is no longer about to be committed."""


class UnloggedManifest(NamedTuple):
    """Manifest whose commit may be lost."""

    name: str
    manifest: RemoteManifest
    data: bytes
    reason: str
    """Fault of its writer's log, in words."""
    is_young: bool = False
    """It may be about to be committed."""


def unlogged_manifests(
    objects: Objects,
    sealer: Sealer,
    stored: Iterable[ObjectInfo],
    logs: LogReader,
    young_since: int,
    *,
    with_young: bool = False,
) -> list[UnloggedManifest]:
    """Return the manifests that no log commits or removes, though nothing shows that they were never committed.

    Left out are those of damaged logs, which are damage of their own, and those that do not open: nobody could read them.

    Args:
        objects: The remote.
        sealer: Its seals.
        stored: Listing of manifests, made before the logs were read.
        logs: Logs, read.
        young_since: Time by the store's clock; younger manifests count only if their writer has no log.
        with_young: Return those as well whose writer has a log.

    Raises:
        IncompleteListing: the log of a manifest's writer is there, and was not listed.
    """
    live, removed = logs.live(), logs.removed()
    found = []
    for info in stored:
        if info.name in live or info.name in removed or parse_manifest(info.name) is None:
            continue
        try:
            manifest, data = read_document(objects, info.name, partial(_decoded_manifest, sealer, info.name))
        except (NoSuchObject, Damaged, UnsupportedFormat):
            continue
        if manifest.writer in logs.damaged:
            continue
        is_young = manifest.writer in logs.logs and info.modified_ns >= young_since
        if manifest.writer not in logs.logs:
            if there := _listed_late(objects, manifest.writer):
                raise IncompleteListing(LOGS_PREFIX, there)
            reason = f"w/{manifest.writer}/, the log of its writer, is gone"
        elif (with_young or not is_young) and not _went_on(objects, logs, manifest.writer, info):
            reason = f"w/{manifest.writer}/, the log of its writer, ends before it"
        else:
            continue
        found.append(UnloggedManifest(info.name, manifest, data, reason, is_young))
    return found


def _listed_late(objects: Objects, writer: str) -> str:
    """Return an entry of a log that a listing of all logs lacks; empty if there is none."""
    first = log_entry_name(writer, 0)
    if objects.info(first) is not None:
        return first
    # A log that was summed up begins later.
    return next((info.name for info in objects.list(log_prefix(writer)) if parse_log_entry(info.name)), "")


def _decoded_manifest(sealer: Sealer, name: str, data: bytes) -> tuple[RemoteManifest, bytes]:
    return decode_manifest(sealer, name, data), data


def _went_on(objects: Objects, logs: LogReader, writer: str, manifest: ObjectInfo) -> bool:
    """Return whether a writer wrote to its log after it had stored the manifest: then it was never committed."""
    own = logs.last_own(writer)
    entry = objects.info(log_entry_name(writer, own)) if own >= 0 else None
    # Stores tell whole seconds: an entry of the same second may be the one before.
    return entry is not None and entry.modified_ns > manifest.modified_ns
