"""Read all logs of a remote, the second time only what is new, and say which snapshots exist.

A log is read from its end back to the last entry that sums up those before it, or to what was read before: what
lies before a summary counts for nothing, whether it was deleted, or created late by a party that had been paused.

Guarantees: every entry that was there before `LogReader.refresh` was called is taken in. A log that is shorter
than it was is an error. So is one with an entry that is missing or cannot be read, and nothing is taken in of that log then:
a collector must not delete what an unread commit needs. Readers pass over such entries (``skip_damaged``).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

import msgspec
import xxhash

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.log_entry import (
    LiveManifest,
    LogCommit,
    LogEntry,
    LogHello,
    LogMove,
    LogRemove,
    LogRetired,
    LogState,
)
from ciuic.remote.format.names import (
    LOGS_PREFIX,
    HexId,
    LogPosition,
    PackRef,
    log_entry_name,
    log_prefix,
    parse_log_entry,
)
from ciuic.remote.log.bounded import read_entry
from ciuic.remote.log.damaged_log import DamagedLog, read_provable
from ciuic.remote.log.errors import IncompleteListing, RolledBack, missing
from ciuic.remote.log.inline_pool import InlinePool
from ciuic.remote.log.log_summary import LogSummary
from ciuic.remote.objects.model import NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log
from ciuic.repository.disk.opening import open_regular
from ciuic.repository.disk.operations import Disk
from ciuic.repository.errors import UnsupportedFormat

# Entries of one log that are asked for at once; more than are needed are at most this many small requests.
_BATCH: Final = 16
# A collector may delete what a listing named before it is read. It does so once a round: three are plenty.
_ATTEMPTS: Final = 3
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
        threads: int = 8,
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
            for writer, end in ends.items():
                known = self.logs.get(writer) or LogSummary()
                if end < known.next:
                    continue
                try:
                    entries = self._read(pool, writer, known.next, end)
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
            raise missing(self._objects, log_prefix(writer), log_entry_name(writer, next_ - 1), reason)

    def _read(
        self, pool: ThreadPoolExecutor | InlinePool, writer: str, first: int, end: int
    ) -> list[tuple[int, LogEntry]]:
        """Return the entries from ``first``, or from the last that sums up those before it, to ``end``."""
        for _ in range(_ATTEMPTS):
            try:
                return self._read_back(pool, writer, first, end)
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
        raise DamagedRemote(missing, "this entry of a log is missing between others")

    def _read_back(
        self, pool: ThreadPoolExecutor | InlinePool, writer: str, first: int, end: int
    ) -> list[tuple[int, LogEntry]]:
        def read(number: int) -> LogEntry | None:
            try:
                return read_entry(self._objects, self._sealer, writer, number)
            except NoSuchObject:
                return None

        entries: list[tuple[int, LogEntry]] = []
        for last in range(end, first - 1, -_BATCH):
            numbers = range(last, max(last - _BATCH, first - 1), -1)
            for number, entry in zip(numbers, pool.map(read, numbers), strict=True):
                if entry is None:
                    raise _GapError(log_entry_name(writer, number))
                entries.append((number, entry))
                if isinstance(entry, LogState | LogRetired):
                    return entries[::-1]
        return entries[::-1]

    def _save(self) -> None:
        if self._cache_path:
            content = msgspec.msgpack.encode(self.logs)
            self._disk.replace_file(self._cache_path, xxhash.xxh3_128_digest(content) + content)


def _with_hint(error: DamagedRemote | UnsupportedFormat) -> DamagedRemote | UnsupportedFormat:
    if isinstance(error, UnsupportedFormat):
        return error
    return DamagedRemote(error.name, error.reason, hint=_REPAIR_HINT)


def read_log_cache(path: str) -> dict[str, LogSummary]:
    """Return what a `LogReader` has kept in its cache; nothing if it cannot be read."""
    try:
        fd = open_regular(path, os.O_RDONLY)
    except FileNotFoundError:
        return {}
    with open(fd, "rb") as file:
        # A read of the limit would allocate all of it first.
        data = file.read(min(os.fstat(fd).st_size, _MAX_CACHE_BYTES + 1))
    content = data[_CHECKSUM_BYTES:]
    try:
        # A flipped bit in a number would say that the remote is older than it was.
        if xxhash.xxh3_128_digest(content) != data[:_CHECKSUM_BYTES]:
            raise msgspec.DecodeError("it does not match its checksum")
        return dict(msgspec.msgpack.decode(content, type=_Cache))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        # A cache: the logs say all that is in it.
        log.warning("remote_log_cache_unreadable", path=path, error=str(error))
        return {}
