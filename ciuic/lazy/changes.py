"""Journal of the byte ranges that a job has changed in an incomplete file.

Guarantees: a range that is the job's is never fetched over. The journal of a file says, after the death of the process, exactly which
changes were acknowledged: a write is recorded after its bytes are in the file and before its answer; a new size is recorded before it
is set. A write cut short by a kill is therefore fetched over again, and a size that was recorded is set again. After a power cut
only writes before the last mark count, which an fsync puts behind them when they are durable.

The journal of a file has the name of its hidden link (incomplete_files.py), in the directory ``changes``, and goes after the link.
"""

from __future__ import annotations

import errno
import os
import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import suppress
from enum import IntEnum
from itertools import islice
from typing import Final, NamedTuple

from ciuic.system.disk import Disk

END: Final = (1 << 63) - 1
"""End of a range that has none."""
_RECORD: Final = struct.Struct("<QQqII")
_FLAGS: Final = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


# Ranges of one run at most: adding one copies a run and the list of runs, which has 4,000 for a million ranges.
_RUN: Final = 256


class ByteRanges:
    """Immutable set of byte offsets, as ranges in ascending order that do not touch.

    Adding a range costs the square root of their number: they lie in runs, which the sets before and after share. Threads
    may read one set while others are made from it.
    """

    __slots__ = ("_firsts", "_runs")

    def __init__(self) -> None:
        # Starts and ends of the ranges of each run, and the first start of each.
        self._runs: list[tuple[list[int], list[int]]] = []
        self._firsts: list[int] = []

    def __bool__(self) -> bool:
        return bool(self._runs)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self._from(0)

    def _from(self, run: int) -> Iterator[tuple[int, int]]:
        for starts, ends in islice(self._runs, run, None):
            yield from zip(starts, ends, strict=True)

    def _run_of(self, start: int) -> int:
        """Return the number of the run with the last range that begins at ``start`` or before; -1 if none does."""
        return bisect_right(self._firsts, start) - 1

    def add(self, start: int, end: int) -> ByteRanges:
        """Return the set with one more range."""
        if start >= end or self.covers(start, end):
            return self
        made = ByteRanges()
        if not self._runs:
            made._runs, made._firsts = [([start], [end])], [start]
            return made
        # All that the range touches lies between the end of one run's beginning and the beginning of another's end.
        first = max(self._run_of(start), 0)
        last = max(self._run_of(end), 0)
        starts, ends = self._runs[first]
        later_starts, later_ends = self._runs[last]
        before = bisect_right(ends, start - 1)
        after = bisect_right(later_starts, end)
        if before < len(starts):
            start = min(start, starts[before])
        if after:
            end = max(end, later_ends[after - 1])
        starts = [*starts[:before], start, *later_starts[after:]]
        ends = [*ends[:before], end, *later_ends[after:]]
        half = len(starts) if len(starts) <= _RUN else _RUN // 2
        parts = [(starts[at : at + half], ends[at : at + half]) for at in range(0, len(starts), half)]
        made._runs = [*self._runs[:first], *parts, *self._runs[last + 1 :]]
        made._firsts = [*self._firsts[:first], *(part[0][0] for part in parts), *self._firsts[last + 1 :]]
        return made

    def covers(self, start: int, end: int) -> bool:
        """Return whether all of a range is in the set."""
        run = self._run_of(start)
        if run < 0:
            return False
        starts, ends = self._runs[run]
        return ends[bisect_right(starts, start) - 1] >= end

    def gaps(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the parts of a range that are not in the set."""
        found: list[tuple[int, int]] = []
        for first, last in self._from(max(self._run_of(start), 0)):
            if first >= end or start >= end:
                break
            if first > start:
                found.append((start, first))
            start = max(start, last)
        if start < end:
            found.append((start, end))
        return found


class Kind(IntEnum):
    """Kind of a record."""

    TIME = 0
    """The modification time was set; the range is empty."""
    WRITE = 1
    SIZE = 2
    """The size was set to the start of the range."""
    MARK = 3
    """All writes in the first ``start`` bytes of the journal are durable."""


class Change(NamedTuple):
    """A record of the journal."""

    kind: Kind
    start: int
    end: int
    mtime_ns: int
    """Modification time after the change."""

    def encode(self) -> bytes:
        """Return the record as bytes."""
        fields = (self.start, self.end, self.mtime_ns, int(self.kind))
        return _RECORD.pack(*fields, zlib.crc32(repr(fields).encode()))


class Changes(NamedTuple):
    """State of a changed file, as its journal says."""

    ranges: ByteRanges
    size_bytes: int
    mtime_ns: int


def decode(data: bytes) -> list[Change]:
    """Decode a journal, up to the first record that is not whole."""
    found: list[Change] = []
    for at in range(0, len(data) - _RECORD.size + 1, _RECORD.size):
        *fields, check = _RECORD.unpack_from(data, at)
        if zlib.crc32(repr(tuple(fields)).encode()) != check or fields[3] > Kind.MARK:
            break
        found.append(Change(Kind(fields[3]), *fields[:3]))
    return found


def durable_part(changes: list[Change]) -> list[Change]:
    """Return what counts of a journal when the machine was started anew since: writes before the last mark, and every new size.

    A new size is synced before it is set, so it may have been set.
    """
    marks = [change.start // _RECORD.size for change in changes if change.kind is Kind.MARK]
    known = marks[-1] if marks else 1
    return [change for number, change in enumerate(changes) if number < known or change.kind is Kind.SIZE]


def replay(changes: list[Change], size_bytes: int, mtime_ns: int) -> Changes:
    """Return the state after the changes; size and modification time are those before the first."""
    ranges = ByteRanges()
    for change in changes:
        if change.kind is Kind.SIZE:
            ranges = ranges.add(min(change.start, size_bytes), END)
            size_bytes = change.start
        elif change.kind is Kind.WRITE:
            ranges = ranges.add(change.start, change.end)
            size_bytes = max(size_bytes, change.end)
        mtime_ns = change.mtime_ns
    return Changes(ranges, size_bytes, mtime_ns)


class ChangeJournals:
    """The journals of one restore; ``directory`` is the descriptor of their directory, which the caller closes."""

    def __init__(self, directory: int) -> None:
        self.directory: Final = directory

    def append(self, name: bytes, change: Change, *, durable: bool = False) -> int:
        """Append a record, and return the length of the journal before it.

        Args:
            name: name of the file's hidden link.
            change: the record.
            durable: it, and those before it, are durable on return.
        """
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | _FLAGS
        fd = os.open(name, flags, 0o600, dir_fd=self.directory)
        try:
            size = os.fstat(fd).st_size
            record = change.encode()
            if os.write(fd, record) != len(record):
                # A part of a record would hide those that follow.
                os.ftruncate(fd, size)
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if durable:
                os.fsync(fd)
        finally:
            os.close(fd)
        if durable:
            os.fsync(self.directory)
        return size

    def length(self, name: bytes) -> int:
        """Return the length of a journal in bytes."""
        return os.stat(name, dir_fd=self.directory, follow_symlinks=False).st_size

    def cut(self, name: bytes, length: int) -> None:
        """Take back the records from ``length`` on."""
        fd = os.open(name, os.O_WRONLY | _FLAGS, dir_fd=self.directory)
        try:
            os.ftruncate(fd, length)
        finally:
            os.close(fd)

    def read(self, name: bytes) -> list[Change] | None:
        """Return the records of a journal; None if there is none."""
        try:
            fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=self.directory)
        except FileNotFoundError:
            return None
        with os.fdopen(fd, "rb") as file:
            return decode(file.read())

    def replace(self, name: bytes, changes: list[Change]) -> None:
        """Replace a journal, atomically and durably."""
        Disk().replace_file(name, b"".join(change.encode() for change in changes), dir_fd=self.directory)

    def remove(self, name: bytes) -> None:
        """Remove the journal of a file, if it has one."""
        with suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self.directory)

    def keep_only(self, names: set[bytes]) -> None:
        """Remove the journals of all other files: they are complete."""
        for name in map(os.fsencode, os.listdir(self.directory)):
            if name not in names:
                self.remove(name)
