"""Provable content of a log of which entries are damaged or missing.

Every entry is sealed by itself: one that opens is what its writer or a collector put there. All of them count from the last
readable one that sums up those before it. What a lost entry removed may therefore show again, which costs nothing
but space; what it committed is not there before the log is repaired (`ciuic.remote.upkeep.log_repair`).

References:
    docs/remote-format.md, section 6
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from ciuic.remote.errors import DamagedRemote
from ciuic.remote.format.log_entry import LogEntry, LogRetired, LogState
from ciuic.remote.format.names import log_entry_name, log_prefix, parse_log_entry
from ciuic.remote.log.bounded import read_entry
from ciuic.remote.log.log_summary import LogSummary
from ciuic.remote.objects.model import NoSuchObject, Objects
from ciuic.remote.sealing.sealer import Sealer
from ciuic.repository.errors import UnsupportedFormat

_BATCH = 16
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
    for end in range(len(numbers), 0, -_BATCH):
        some = numbers[max(end - _BATCH, 0) : end][::-1]
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
            problems[log_entry_name(writer, expected)] = _missing(number - expected)
        expected = number + 1
        entry = found[number]
        if isinstance(entry, str):
            problems[log_entry_name(writer, number)] = entry
        else:
            stray = []
            summary.apply(number, entry)
    summary.next = expected
    return DamagedLog(summary, problems, "".join(later[:1]), tuple(stray))


def _missing(count: int) -> str:
    return _MISSING if count == 1 else f"it and the {count - 1} entries after it are missing"
