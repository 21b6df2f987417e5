"""Sum up long logs, delete what lies before, and end the logs of writers that are gone.

Entries of a log are deleted one at a time, ascending, and never the last that its writer made nor any after it.
The creator of an entry reads the one before it again: if that is still there, the new name was never deleted.

A writer sums up its own log, too (`LogUpkeep.sum_up_own`), so that the log of a host that snapshots every minute stays short
where collections are rare. It deletes nothing.

A log that sums up leaves out what it removed once no other log commits it any more. Which removals these are was
read before the commits were: a removal that is seen before its commit is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Final

from ciuic.remote.format.log_entry import (
    MAX_MANIFESTS,
    LogRetired,
    LogState,
)
from ciuic.remote.format.names import log_entry_name, new_hex_id
from ciuic.remote.log.log_reader import LogReader
from ciuic.remote.log.log_summary import LogSummary
from ciuic.remote.log.others_log import append_to_log
from ciuic.remote.objects.model import Objects
from ciuic.remote.sealing.sealer import Sealer

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
