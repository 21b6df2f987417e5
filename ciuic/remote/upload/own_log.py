"""Own log of an uploader, kept short enough to be read for years.

After so many entries the log is summed up; before its snapshots are more than one entry can name, another log is begun. Readers
read each log back to its last sum, so that what they read grows with the snapshots that exist, not with those that
ever did.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ciuic.errors import Damaged
from ciuic.remote.collection.log_upkeep import LogUpkeep
from ciuic.remote.format.log_entry import MAX_MANIFESTS
from ciuic.remote.format.names import new_hex_id
from ciuic.remote.log.log_reader import LogReader
from ciuic.remote.log.writer_log import WriterLog
from ciuic.remote.objects.model import Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository import log as events

MAX_ENTRIES: Final = 1024
"""Entries after which the log is summed up. Each time the uploader lists all logs and reads what is new."""
MAX_SNAPSHOTS: Final = MAX_MANIFESTS // 2
"""Snapshots of one log, about: as many again may come before it is summed up the next time."""


class OwnLog:
    """Own log of an uploader. For one thread.

    Args:
        objects: The remote.
        sealer: Its seals.
        log: The log, which was begun.
        reader: Reader of all logs.
        max_entries: See `MAX_ENTRIES`.
        max_snapshots: See `MAX_SNAPSHOTS`.
        new_id: For tests.
    """

    def __init__(
        self,
        objects: Objects,
        sealer: Sealer,
        log: WriterLog,
        reader: LogReader,
        *,
        max_entries: int = MAX_ENTRIES,
        max_snapshots: int = MAX_SNAPSHOTS,
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
