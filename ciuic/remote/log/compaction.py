"""Entries that keep logs short: sum up long or damaged logs, fence those of others, delete what lies before, and end dead ones.

Entries of a log are deleted one at a time, ascending, and never the last that its writer made nor any after it.
The creator of an entry reads the one before it again: if that is still there, the new name was never deleted.

A log that sums up leaves out what it removed once no other log commits it any more. Which removals these are was
read before the commits were: a removal that is seen before its commit is kept. A damaged log is summed up so that its
damaged entries count for nothing any more.

A writer sums up its own log, too (`LogRotation`), so that the log of a host that snapshots every minute stays short where
collections are rare; it deletes nothing. Before its snapshots are more than one entry can name, another log is begun.
Readers read each log back to its last sum, so that what they read grows with the snapshots that exist, not with those
that ever did.

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from ciuic.errors import Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.documents import (
    MAX_MANIFESTS,
    LogEntry,
    LogRetired,
    LogState,
    create_entry,
    read_entry,
    read_object,
)
from ciuic.remote.format.names import log_entry_name, new_hex_id
from ciuic.remote.log.log_reader import LogReader, LogSummary
from ciuic.remote.log.writer_log import WriterLog
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log as events


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


class LogUpkeep:
    """Upkeep of all logs of a remote.

    Args:
        objects: The remote.
        sealer: Its seals.
        reader: Logs, as they were read after the fences of the current round.
        max_entries: A log with more entries than this is summed up.
        retire_ns: Age from which a silent writer's log is ended.
        new_id: For tests.
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
    ) -> None:
        self._objects = objects
        self._sealer = sealer
        self._reader = reader
        self._max_entries = max_entries
        self._retire_ns = retire_ns
        self._new_id = new_id

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
        for writer, summary in self._reader.logs.items():
            self._delete_old(writer, summary)

    def _sum_up(
        self,
        now_ns: int | None,
        only: Collection[str] | None = None,
        stored: frozenset[str] = frozenset(),
    ) -> None:
        removed_before = {writer: set(summary.removed) for writer, summary in self._reader.logs.items()}
        self._reader.refresh()
        # As they were before any of them is summed up here: readers that are slow may be at either.
        committed = {writer: set(summary.committed) for writer, summary in self._reader.logs.items()}
        removed = self._reader.removed()
        for writer, summary in self._reader.logs.items():
            if summary.retired or (only is not None and writer not in only):
                continue
            retire = now_ns is not None and self._is_silent(writer, summary, now_ns)
            # A sum would forget that packs move; those of a mover that is gone have arrived when its log is ended.
            if not retire and summary.moving:
                continue
            if not retire and summary.next - max(summary.state, 0) <= self._max_entries:
                continue
            elsewhere = set().union(*(some for other, some in committed.items() if other != writer))
            kept = summary.removed - (removed_before.get(writer, set()) - elsewhere - stored)
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
            append_to_log(self._objects, self._sealer, writer, summary, entry)

    def _is_silent(self, writer: str, summary: LogSummary, now_ns: int) -> bool:
        own = self._reader.last_own(writer)
        info = self._objects.info(log_entry_name(writer, own)) if own >= 0 else None
        return info is not None and info.modified_ns < now_ns - self._retire_ns

    def _delete_old(self, writer: str, summary: LogSummary) -> None:
        """Delete the entries that the last sum makes superfluous."""
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
