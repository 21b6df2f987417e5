"""Entries that a collector appends to the logs of others: fences, and entries that sum up a log."""

from __future__ import annotations

from ciuic.remote.format.log_entry import LogEntry
from ciuic.remote.log.bounded import create_entry, read_entry
from ciuic.remote.log.log_summary import LogSummary
from ciuic.remote.objects.model import NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer


def append_to_log(
    objects: Objects, sealer: Sealer, writer: str, summary: LogSummary, entry: LogEntry
) -> bool:
    """Append an entry to a log whose end is as ``summary`` says; take it into ``summary``, and return True.

    False: the log has another end. What stands there is taken in, if it is there; else the log has to be read again.
    """
    number = summary.next
    created = create_entry(objects, sealer, writer, number, entry)
    standing = entry if created else _read(objects, sealer, writer, number)
    if standing is None:
        return False
    mine = standing.nonce == entry.nonce
    if mine and number:
        # The name is free also if it was deleted, after all before it (`Collector`): then the log ends elsewhere,
        # and what was created counts for nothing.
        before = _read(objects, sealer, writer, number - 1)
        if before is None or before.nonce != summary.nonce:
            return False
    summary.apply(number, standing)
    return mine


def _read(objects: Objects, sealer: Sealer, writer: str, number: int) -> LogEntry | None:
    try:
        return read_entry(objects, sealer, writer, number)
    except NoSuchObject:
        return None
