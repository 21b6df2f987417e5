"""Writing of logs of a remote: this host's own (hello, commit, remove, move), and the entries that keep every log short.

Guarantees: a commit that returned is in the log; it was created by a party that knew every round whose fence stands
before it. No clock and no lock are involved.

Create-only orders every entry against the fences that collectors put into the same log. An entry is created at the
first free number only, by a party that has read all entries before it. What a fence condemns therefore counts as
not stored before the next commit can be created.

After an entry was created, the entry before it is read once more. Collectors delete a log's entries one at a time,
ascending, and never the last that its writer made nor any after it, so that it is still there unless the new name had been
deleted and was free for that reason alone: the log has gone on without this process, which then takes a new name.

The name of the log and the number of its next entry are kept in a local file (`WriterState`): after `WriterState.save`
returned, a bucket whose log is shorter is noticed, also after a power cut.

A log that sums up leaves out what it removed once no other log commits it any more. Which removals these are was
read before the commits were: a removal that is seen before its commit is kept. A damaged log is summed up so that its
damaged entries count for nothing any more.

A writer sums up its own log, too (`LogRotation`), so that the log of a host that snapshots every minute stays short where
collections are rare; it deletes nothing. Before its snapshots are more than one entry can name, another log is begun.
Readers read each log back to its last sum, so that what they read grows with the snapshots that exist, not with those
that ever did.

References:
    docs/remote-format.md, sections 6 and 8
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from typing import Final

import msgspec

from ciuic.errors import Damaged, UsageError
from ciuic.remote.documents import (
    MAX_MANIFESTS,
    GivenUp,
    LogCommit,
    LogEntry,
    LogFence,
    LogHello,
    LogMove,
    LogRemove,
    LogRetired,
    LogState,
    create_entry,
    read_entry,
    read_object,
)
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import (
    InlinePool,
    LogReader,
    LogSummary,
    RolledBack,
    Rounds,
    missing_object_error,
)
from ciuic.remote.object_names import HexId, Number, log_entry_name, log_prefix, new_hex_id, parse_log_entry
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, RefusedBody
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log
from ciuic.repository import log as events
from ciuic.repository.errors import UnsupportedFormat
from ciuic.structs import convert, decode_json
from ciuic.system.disk import Disk, read_regular

_MAX_BYTES: Final = 4096
# 35 bytes each: they fit into the file. A host begins another log after 32,768 snapshots, and where it lost one.
_MAX_EARLIER: Final = 64


class WriterPosition(msgspec.Struct, frozen=True, kw_only=True):
    """Log of this host, up to the entry before ``next``."""

    writer: HexId
    next: Number
    earlier: tuple[HexId, ...] = ()
    """Earlier logs of this host, which have no other writer."""
    nonce: str = ""
    """Nonce of the entry before ``next``; empty if it was not noted."""


class WriterState:
    """File with the `WriterPosition`; ``path`` is in a directory of the caller's own."""

    def __init__(self, path: str, disk: Disk | None = None) -> None:
        self._path = path
        self._disk = disk or Disk()

    def load(self) -> WriterPosition | None:
        """Return what was saved; None if there is nothing, or nothing readable."""
        try:
            data = read_regular(self._path, _MAX_BYTES + 1)
        except FileNotFoundError:
            return None
        try:
            return decode_json(data, WriterPosition)
        except msgspec.DecodeError as error:
            # Without the file the host takes a new name, which is always allowed.
            log.warning("remote_writer_state_unreadable", path=self._path, error=str(error))
            return None

    def save(self, position: WriterPosition) -> None:
        """Replace what was saved; durable on return."""
        self._disk.replace_file(self._path, msgspec.json.encode(position))


class WriterLog:
    """Log of one uploader, collector or operator. May be used by several threads at once.

    Every method may raise RemoteUnreachable: calling it again with the same arguments continues, and finds out
    whether the lost request was carried out. Damaged remotes raise DamagedRemote.

    Args:
        objects: The remote.
        sealer: Its seals.
        state: Name and end of the log, kept on this host.
        rounds: What counts as not stored; `hello` and fences bring it up to date.
        host: Name for people.
        repository: Id of the repository, 32 hexadecimal digits.
        new_id: For tests.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        state: WriterState,
        rounds: Rounds,
        *,
        host: str,
        repository: str,
        new_id: Callable[[], str] = new_hex_id,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._state = state
        self.rounds = rounds
        self._host = host
        self._repository = repository
        self._new_id = new_id
        # One entry at a time: two threads would race for one number, and a fence that one of them passed would be
        # new to the other.
        self._lock = threading.RLock()
        self.writer = ""
        """Name of the log; empty before `hello`."""
        self._next = 0
        # Nonce of the entry before ``_next``, as this process knows it.
        self._before = ""
        # Nonces of entries that were tried at ``_next``: the reply to any of them may have been lost.
        self._tried: dict[str, LogEntry] = {}
        self._said_hello = False
        self._earlier: tuple[str, ...] = ()
        # True if another process writes to the log, as after a disk was cloned or restored.
        self._shared = False
        # True if the log belongs to somebody else, or has ended: another has to be begun.
        self._lost = True
        # True if another is to be begun though this one is whole.
        self._is_full = False
        # True while rounds must be read before anything may be committed.
        self._rounds_unread = True

    @property
    def next_number(self) -> int:
        """Number of the next entry of this host's log, from 0."""
        return self._next

    @property
    def own_names(self) -> frozenset[str]:
        """Names of the logs in which this host alone has written, as far as it knows."""
        return frozenset((self.writer, *self._earlier))

    def hello(self) -> None:
        """Begin to write: continue this host's log, or begin one, then read all rounds.

        On return ``rounds`` has everything that was condemned before; what is condemned later has a fence in this
        log before it is deleted.

        Raises:
            RolledBack: the log is shorter than this host knows it to be.
        """
        with self._lock:
            known = self._state.load()
            self._earlier = () if known is None else known.earlier
            self._lost = known is None or not self._continue(known)
            self._rounds_unread = True
            self._get_ready()
            self._said_hello = True

    def commit(
        self,
        snapshot: str,
        manifest: str,
        digest: str,
        packs: Sequence[str] = (),
        *,
        checked: int,
        repository: str = "",
    ) -> bool:
        """Commit the snapshot of a manifest; durable on return of True.

        False: rounds condemned more than the caller took into account. Then everything that the snapshot relies on
        must be looked up again, what is missing uploaded (the manifest under a new name, if ``rounds.manifests`` has
        it), and commit called again.

        Args:
            snapshot: Id of the snapshot in its repository.
            manifest: Name of the manifest's object, which is stored, as are all chunks of the snapshot.
            digest: Its digest.
            packs: Packs that were uploaded for it.
            checked: ``rounds.version`` before the caller began to look up what is stored.
            repository: Id of the snapshot's repository; empty for that of the log.

        Raises:
            UsageError: `hello` was not called, or did not return.
        """
        with self._lock:
            self._require_hello()
            fields = {
                "repository": repository or self._repository,
                "snapshot": snapshot,
                "manifest": manifest,
                "digest": digest,
                "packs": tuple(packs),
            }
            while True:
                self._get_ready()
                if self.rounds.version != checked:
                    return False
                if self._append(self._tried_commit(fields)):
                    return True

    def remove(self, manifests: Sequence[str], snapshots: Sequence[GivenUp] = ()) -> None:
        """Give up the snapshots of these manifests; durable on return.

        Args:
            manifests: Names of the manifests.
            snapshots: Those that their hosts must not upload again by themselves.
        """
        with self._lock:
            self._require_hello()
            entry = LogRemove(nonce=self._new_id(), manifests=tuple(manifests), snapshots=tuple(snapshots))
            while True:
                self._get_ready()
                if self._append(entry):
                    return

    def move(self, packs: Sequence[str], *, checked: int) -> bool:
        """Begin to move these packs to another storage class or place, in place of those before; durable on return of True.

        Until the next call no collector deletes them: every round whose fence follows the entry spares them. False: rounds
        condemned more than the caller took into account; then it leaves out what ``rounds.condemned`` has, and calls again.

        Args:
            packs: Packs that are live and not condemned; none if nothing moves any more.
            checked: ``rounds.version`` before the caller looked at what is condemned.
        """
        with self._lock:
            self._require_hello()
            entry = LogMove(nonce=self._new_id(), packs=tuple(packs))
            while True:
                self._get_ready()
                if packs and self.rounds.version != checked:
                    return False
                if self._append(entry):
                    return True

    def look(self) -> bool:
        """Look whether the log is still what this host knows it to be; False for one that says nothing of it any more.

        Raises:
            RolledBack: it is not.
        """
        with self._lock:
            if self._lost:
                return False
            known = self._position()
            end, last = read_end(self._objects, self._sealer, known)
            return is_readable_end(known, end, last)

    def begin_another(self) -> None:
        """Have the next entry begin a new log; this one keeps what it has."""
        with self._lock:
            self._is_full = True

    def _require_hello(self) -> None:
        if not self._said_hello:
            raise UsageError("an entry needs a log: call hello() first")

    def _get_ready(self) -> None:
        """Begin another log if this one is lost or full; read rounds if there may be new ones, in this order."""
        if self._lost or self._is_full:
            self._begin()
        if self._rounds_unread:
            self._read_rounds()

    def _read_rounds(self) -> None:
        self.rounds.refresh()
        self._rounds_unread = False

    def _begin(self) -> None:
        """Begin a log under a new random name."""
        writer = self._new_id()
        if self._next and not self._shared:
            self._earlier = (*self._earlier, self.writer)[-_MAX_EARLIER:]
        self._become(writer, 0, "")
        self._shared = False
        # Lost until it stands: after an error the next call begins another one.
        self._lost = True
        hello = self._hello()
        if not create_entry(self._objects, self._sealer, writer, 0, hello):
            standing = self._read(0)
            if standing is None or standing.nonce != hello.nonce:
                raise DamagedRemote(log_entry_name(writer, 0), "this name is new, but an object has it")
        self._pass(hello)
        self._save()
        self._lost = self._is_full = False
        self._rounds_unread = True

    def _continue(self, known: WriterPosition) -> bool:
        """Continue the log of an earlier process; False if it has ended or somebody else writes to it."""
        # Also of a log that is refused: what this host says of itself goes by its name.
        self._become(known.writer, 0, "")
        end, last = read_end(self._objects, self._sealer, known)
        self._become(known.writer, end, "")
        if last is None or isinstance(last, LogRetired):
            return False
        if self._went_on(known.next, end):
            self._shared = True
            return False
        self._pass(last)
        self._lost = False
        hello = self._hello()
        while not self._lost:
            if self._append(hello):
                return True
        return False

    def _went_on(self, begin: int, end: int) -> bool:
        """Return whether a writer, and not collectors alone, made entries that this host's state does not know.

        Then two hosts have this state, or it was restored to an earlier one. One hello may be that of a process which
        was killed before it saved its position.
        """
        said_hello = False
        for number in range(begin, end + 1):
            entry = self._read(number)
            if entry is None or isinstance(entry, LogCommit | LogRemove | LogMove):
                return True
            if isinstance(entry, LogHello):
                if said_hello:
                    return True
                said_hello = True
        return False

    def _hello(self) -> LogHello:
        return LogHello(nonce=self._new_id(), host=self._host, repository=self._repository)

    def _tried_commit(self, fields: Mapping[str, object]) -> LogCommit:
        """Return the entry of an earlier call with these fields whose reply may have been lost, or a new one."""
        for entry in self._tried.values():
            if isinstance(entry, LogCommit) and all(
                getattr(entry, name) == value for name, value in fields.items()
            ):
                return entry
        return convert({"kind": "commit", "nonce": self._new_id(), **fields}, LogCommit)

    def _append(self, entry: LogEntry) -> bool:
        """Try to create the entry at the end of the log as it is known, and pass over what stands there.

        False: try again, unless `_get_ready` finds that something has changed first.
        """
        self._tried[entry.nonce] = entry
        created = create_entry(self._objects, self._sealer, self.writer, self._next, entry)
        standing = entry if created else self._read(self._next)
        mine = standing is not None and standing.nonce in self._tried
        if standing is None or (not mine and not isinstance(standing, LogFence | LogState)):
            # Another uploader has this name, as after a disk was cloned; or the log was ended.
            self._lost = True
            self._shared = True
            return False
        if mine and not self._stands():
            self._lost = True
            self._refuse_older()
            return False
        self._pass(standing)
        self._rounds_unread = self._rounds_unread or isinstance(standing, LogFence)
        if mine:
            self._save()
        # Otherwise one that an earlier call tried to create: it stands, and this one does not yet.
        return standing.nonce == entry.nonce

    def _stands(self) -> bool:
        """Return whether the entry before the one that was created is the one that this process knows."""
        before = self._read(self._next - 1)
        return before is not None and before.nonce == self._before

    def _refuse_older(self) -> None:
        """Raise RolledBack where the entry before the one that was created is not the known one, though nothing follows.

        Collectors delete entries only behind a later one that sums them up, so this log is that of an older state of the bucket, and
        what this process knows to be stored may be gone.
        """
        if max(_numbers(self._objects, self.writer), default=-1) > self._next:
            return
        name = log_entry_name(self.writer, self._next - 1)
        try:
            before = read_entry(self._objects, self._sealer, self.writer, self._next - 1)
        except NoSuchObject:
            raise RolledBack(name, f"this host's log had the entry {self._next - 1}") from None
        except (DamagedRemote, UnsupportedFormat):
            return
        if before.nonce != self._before:
            raise RolledBack(name, f"this host's log had another entry {self._next - 1}")

    def _read(self, number: int) -> LogEntry | None:
        """Return the entry; None if it was deleted, or cannot be read: another log can always be begun."""
        return _read_any(self._objects, self._sealer, self.writer, number)

    def _become(self, writer: str, next_: int, before: str) -> None:
        self.writer, self._next, self._before = writer, next_, before
        self._tried.clear()

    def _pass(self, entry: LogEntry) -> None:
        """Note that ``entry`` stands at the end of the log as it was known."""
        self._next += 1
        self._before = entry.nonce
        # Requests that are still under way are for the number that was passed, and fail.
        self._tried.clear()

    def _save(self) -> None:
        self._state.save(self._position())

    def _position(self) -> WriterPosition:
        return WriterPosition(writer=self.writer, next=self._next, earlier=self._earlier, nonce=self._before)


def read_end(objects: Objects, sealer: Sealer, known: WriterPosition) -> tuple[int, LogEntry | None]:
    """Return number and content of the last entry of this host's log, None for one that cannot be read. A LIST and a GET.

    Raises:
        RolledBack: the log is not what this host knows it to be.
        IncompleteListing: the listing lacks an entry that is there.
    """
    numbers, number = _numbers(objects, known.writer), known.next - 1
    end = max(numbers, default=-1)
    last = _read_any(objects, sealer, known.writer, end) if numbers else None
    if number in numbers:
        before = last if number == end else _read_any(objects, sealer, known.writer, number)
        if before is not None and known.nonce not in ("", before.nonce):
            raise RolledBack(
                log_entry_name(known.writer, number), f"this host's log had another entry {number}"
            )
        return end, last
    # One of the later entries may sum up those before it, which may then be gone; or may do so, unreadable.
    later = (
        _read_any(objects, sealer, known.writer, one) for one in sorted(numbers, reverse=True) if one > number
    )
    if not any(entry is None or isinstance(entry, LogState | LogRetired) for entry in later):
        reason = f"this host's log had the entry {number}, now its last is {end}"
        raise missing_object_error(
            objects, log_prefix(known.writer), log_entry_name(known.writer, number), reason
        )
    return end, last


def is_readable_end(known: WriterPosition, end: int, last: LogEntry | None) -> bool:
    """Return whether what `read_end` found says what this host wrote last: what that commits is lost where it cannot be read."""
    return known.next == 0 or end >= known.next or last is not None


def _numbers(objects: Objects, writer: str) -> set[int]:
    """Return the numbers of the entries that a listing of the log has."""
    listed = objects.list(log_prefix(writer))
    return {position.number for info in listed if (position := parse_log_entry(info.name))}


def _read_any(objects: Objects, sealer: Sealer, writer: str, number: int) -> LogEntry | None:
    """Return the entry; None if it was deleted, or cannot be read."""
    try:
        return read_entry(objects, sealer, writer, number)
    except (NoSuchObject, DamagedRemote, UnsupportedFormat):
        return None


def append_to_log(
    objects: Objects, sealer: Sealer, writer: str, summary: LogSummary, entry: LogEntry
) -> bool:
    """Append an entry to a log whose end is as ``summary`` says; take it into ``summary``, and return True.

    False: the log has another end. What stands there is taken in, if it is there; else the log has to be read again.
    """
    number = summary.next
    created = create_entry(objects, sealer, writer, number, entry)
    standing = entry if created else _read_if_there(objects, sealer, writer, number)
    if standing is None:
        return False
    mine = standing.nonce == entry.nonce
    if mine and number:
        # The name is free also if it was deleted, after all before it (`Collector`): then the log ends elsewhere,
        # and what was created counts for nothing.
        before = _read_if_there(objects, sealer, writer, number - 1)
        if before is None or before.nonce != summary.nonce:
            return False
    summary.apply(number, standing)
    return mine


def _read_if_there(objects: Objects, sealer: Sealer, writer: str, number: int) -> LogEntry | None:
    try:
        return read_entry(objects, sealer, writer, number)
    except NoSuchObject:
        return None


def sum_up_log(
    objects: Objects,
    sealer: Sealer,
    writer: str,
    summary: LogSummary,
    removed_anywhere: Collection[str],
    *,
    new_id: Callable[[], str] = new_hex_id,
) -> bool:
    """Append an entry to a log that says everything ``summary`` has; True if it stands.

    False: the log has another end than ``summary`` knows, and has to be read again.

    Args:
        objects: The remote.
        sealer: Its seals.
        writer: Name of the log.
        summary: All that is known of the log, up to its end.
        removed_anywhere: Manifests that any log removed.
        new_id: For tests.
    """
    live = [one for name, one in sorted(summary.committed.items()) if name not in removed_anywhere]
    entry = LogState(
        nonce=new_id(),
        live=tuple(live),
        removed=tuple(sorted(summary.removed)),
        given_up=summary.kept_given_up(),
    )
    before = _identify_entry(objects, writer, summary.next - 1)
    if before is None:
        return False
    if not create_entry(objects, sealer, writer, summary.next, entry):
        try:
            if read_entry(objects, sealer, writer, summary.next).nonce != entry.nonce:
                return False
        except (NoSuchObject, DamagedRemote):
            return False
    # Not by its nonce, as elsewhere: the last entry may be the damaged one. While it is there as it was, the new name
    # had not been deleted before.
    return _identify_entry(objects, writer, summary.next - 1) == before


def _identify_entry(objects: Objects, writer: str, number: int) -> bytes | ObjectInfo | None:
    """Return what tells whether the object is still there as it was; None if it is not there."""
    name = log_entry_name(writer, number)
    try:
        return read_object(objects, name)
    except NoSuchObject:
        return None
    except DamagedRemote:
        # Too large to be read, or a web page that somebody stored.
        return objects.info(name)


DEFAULT_MAX_ENTRIES: Final = 128
"""Entries after the last that sums up, from which a log is summed up."""
DEFAULT_RETIRE_NS: Final = 30 * 86_400 * 10**9
"""Age of a writer's last entry, by the store's clock, from which its log is ended: 30 days."""
SEVERAL_WRITERS: Final = (
    "a host that lost its state, or was restored, looks like this until `prune --remote` ends its earlier log, "
    f"{DEFAULT_RETIRE_NS // (86_400 * 10**9)} days after that log's last entry, and nothing has to be done; "
    "where a disk was cloned, make a new repository on one of the hosts"
)
"""Text for several logs that commit the snapshots of one repository: causes, and what to do."""


class LogUpkeep:
    """Upkeep of all logs of a remote.

    Args:
        objects: The remote.
        sealer: Its seals.
        reader: Logs, as they were read after the fences of the current round.
        max_entries: A log with more entries than this is summed up.
        retire_ns: Age from which a silent writer's log is ended.
        new_id: For tests.
        threads: Logs that are looked at, and of which entries are deleted, at the same time.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        reader: LogReader,
        *,
        max_entries: int = DEFAULT_MAX_ENTRIES,
        retire_ns: int = DEFAULT_RETIRE_NS,
        new_id: Callable[[], str] = new_hex_id,
        threads: int = 16,
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._reader = reader
        self._max_entries = max_entries
        self._retire_ns = retire_ns
        self._new_id = new_id
        self._threads = threads

    def sum_up_own(self, writer: str) -> int:
        """Sum up this log alone if it is long, and return the number of snapshots that it has then."""
        self._sum_up(None, (writer,))
        removed = self._reader.removed()
        return len(self._reader.logs[writer].committed.keys() - removed)

    def run(self, now_ns: int | None, stored: Collection[str] = ()) -> None:
        """Sum up logs, and delete what lies before.

        Args:
            now_ns: The store's time; None to end no log.
            stored: Manifests that are there: a log does not forget that it removed one of these, whose commit would seem lost.
        """
        self._sum_up(now_ns, stored=frozenset(stored))
        with self._pool() as pool:
            # Entries of one log go one after the other, but each log by itself.
            for _ in pool.map(self._delete_old, list(self._reader.logs)):
                pass

    def _pool(self) -> ThreadPoolExecutor | InlinePool:
        return ThreadPoolExecutor(self._threads) if self._threads > 1 else InlinePool()

    def _sum_up(
        self,
        now_ns: int | None,
        only: Collection[str] | None = None,
        stored: frozenset[str] = frozenset(),
    ) -> None:
        removed_before = {writer: set(summary.removed) for writer, summary in self._reader.logs.items()}
        self._reader.refresh()
        # As they were before any of them is summed up here: readers that are slow may be at either.
        commits = Counter(chain.from_iterable(summary.committed for summary in self._reader.logs.values()))
        committed = {writer: frozenset(summary.committed) for writer, summary in self._reader.logs.items()}
        removed = self._reader.removed()
        chosen = [
            writer
            for writer, summary in self._reader.logs.items()
            if not summary.retired and (only is None or writer in only)
        ]
        silent = self._silent(chosen, now_ns)
        for writer in chosen:
            summary = self._reader.logs[writer]
            retire = writer in silent
            # A sum would forget that packs move; those of a mover that is gone have arrived when its log is ended.
            if not retire and summary.moving:
                continue
            if not retire and summary.next - max(summary.state, 0) <= self._max_entries:
                continue
            forgotten = {
                manifest
                for manifest in removed_before.get(writer, ())
                # No other log commits it.
                if manifest not in stored and commits[manifest] == (manifest in committed[writer])
            }
            kept = summary.removed - forgotten
            live = tuple(
                snapshot
                for manifest, snapshot in sorted(summary.committed.items())
                if manifest not in removed
            )
            if max(len(live), len(kept)) > MAX_MANIFESTS:
                continue
            kind = LogRetired if retire else LogState
            entry = kind(
                nonce=self._new_id(),
                live=live,
                removed=tuple(sorted(kept)),
                given_up=summary.kept_given_up(),
            )
            # A log that goes on at this very moment waits for the next round.
            try:
                append_to_log(self._objects, self._sealer, writer, summary, entry)
            except RefusedBody as error:
                # A long log costs its readers time; a round that does not end would keep everything from being deleted.
                events.warning("remote_log_not_summed_up", error=error.message)

    def _silent(self, writers: Sequence[str], now_ns: int | None) -> set[str]:
        """Return those of the writers that have been silent for so long that their logs end; none without a time."""
        if now_ns is None:
            return set()
        before_ns = now_ns - self._retire_ns

        def is_silent(writer: str) -> bool:
            own = self._reader.last_own(writer)
            info = self._objects.info(log_entry_name(writer, own)) if own >= 0 else None
            return info is not None and info.modified_ns < before_ns

        with self._pool() as pool:
            return {
                writer for writer, silent in zip(writers, pool.map(is_silent, writers), strict=True) if silent
            }

    def _delete_old(self, writer: str) -> None:
        """Delete the entries that the last sum of a log makes superfluous."""
        summary = self._reader.logs[writer]
        first = self._reader.first.get(writer, 0)
        if summary.state <= first:
            return
        # Of entries that a listing lacks, later ones would be deleted before them.
        if first and self._objects.info(log_entry_name(writer, first - 1)) is not None:
            return
        for number in range(first, min(summary.state, self._reader.last_own(writer))):
            # One request after the other: see the head of this module.
            self._objects.delete([log_entry_name(writer, number)])


_OWN_MAX_ENTRIES: Final = 1024
"""Entries after which the log is summed up. Each time the uploader lists all logs and reads what is new."""
_OWN_MAX_SNAPSHOTS: Final = MAX_MANIFESTS // 2
"""Snapshots of one log, about: as many again may come before it is summed up the next time."""


class LogRotation:
    """Own log of an uploader. For one thread.

    Args:
        objects: The remote.
        sealer: Its seals.
        log: The log, which was begun.
        reader: Reader of all logs.
        max_entries: See `_OWN_MAX_ENTRIES`.
        max_snapshots: See `_OWN_MAX_SNAPSHOTS`.
        new_id: For tests.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        log: WriterLog,
        reader: LogReader,
        *,
        max_entries: int = _OWN_MAX_ENTRIES,
        max_snapshots: int = _OWN_MAX_SNAPSHOTS,
        new_id: Callable[[], str] = new_hex_id,
    ) -> None:
        self._log = log
        self._reader = reader
        self._upkeep = LogUpkeep(objects, sealer, reader, max_entries=max_entries, new_id=new_id)
        self._max_entries = max_entries
        self._max_snapshots = max_snapshots
        self._looked = (log.writer, self._last_sum())

    def tidy(self) -> None:
        """Sum up the log if it has become long, and begin another if it has too many snapshots.

        Raises:
            RemoteUnreachable: another call does it.
        """
        writer, after = self._looked
        if self._log.writer != writer:
            self._looked = (self._log.writer, 0)
            return
        if self._log.next_number - after <= self._max_entries:
            return
        # Also after a failure not again for as many entries.
        try:
            self._reader.refresh()
            # A removal is forgotten when no other log commits the snapshot, which a damaged one might.
            if self._reader.damaged:
                return
            if self._upkeep.sum_up_own(writer) > self._max_snapshots:
                self._log.begin_another()
        except Damaged as error:
            events.warning("remote_log_not_summed_up", error=error.message)
        finally:
            self._looked = (writer, self._log.next_number)

    def _last_sum(self) -> int:
        known = self._reader.logs.get(self._log.writer)
        return 0 if known is None else max(known.state, 0)
