"""The undo log: records that the overlay writes while a capture goes on, and the capture's reader.

One definition serves both sides. Guarantees: `encode` and `LogReader` are inverse; a reader never sees half a
record; the reader answers with the record that is true for its epoch, the one with the smallest epoch not
below it. The overlay core decides when to write which record (architecture.md, section 5); this module does
no file operation but reading the log. The changes of the epoch are in the sealed file (sealed_format.py).

Rules that both sides rely on and that the shape of the records does not show:

* A record is in the log (written, not necessarily synced: both processes see one page cache) before the
  change that it protects against happens. So a reader reads the backing state first, polls after, and the log
  wins.
* The log is one inode for as long as any epoch is pending. When it is unlinked or cut short under a reader,
  the reader's epoch has been dropped, and `poll` raises `UndoLost`.
* `SealedChange.data` marks a block when any byte of it changed since the epoch before, which includes every
  block between the new end and the old end of a file that was truncated, even when it was extended again
  later.
* An operation that changes nlink or ctime of a sealed inode (unlink, link, rename) writes its inode record
  first.
"""

from __future__ import annotations

import os
import re
from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

import msgspec

from ciuic.structs import msgpack_decoder
from ciuic.types import recorded_time

LOG_NAME = "log"
HOLD_DIR = "hold"
MAX_RECORD_BYTES = 64 << 20
"""Limit of a record, more than xattrs and names can add up to: a greater length is damage."""

_LENGTH_BYTES = 4
_READ_BYTES = 1 << 20


class UndoLost(Exception):
    """The undo of this epoch was given up or dropped: its content can no longer be read exactly."""


class UndoDamaged(Exception):
    """The log or the sealed file does not decode."""


def sealed_name(epoch: int) -> str:
    """Return the name of the sealed file of `epoch`, in the undo directory."""
    return f"sealed-{epoch}"


def blocks_name(ino: int, epoch: int) -> str:
    """Return the name of the sparse file with the old blocks of `ino` that were true up to `epoch`."""
    return f"blocks-{ino}.{epoch}"


def hold_name(ino: int) -> str:
    """Return the name, below the undo directory, of the hard link that keeps `ino` alive."""
    return f"{HOLD_DIR}/{ino}"


# ----------------------------------------------------------------------------
# Changes


# gc=False: there may be a million of them, none in a cycle, and the collector would look at each.
class SealedChange(msgspec.Struct, array_like=True, gc=False):
    """Changes of one inode in one epoch."""

    fresh: bool
    """True if it was created in this epoch: an inode of this number in the previous snapshot was another
    file."""
    attrs: bool
    data: int | bytes
    """0 nothing, 1 the whole file, or a bitmap of block numbers (bit b & 7 of byte b >> 3)."""
    names: dict[bytes, int] | None
    """Touched names of a directory, with their binding when the epoch began: -1 the same as now (something at
    or below the child changed), 0 absent, otherwise an inode number."""
    names_apart: bool = False
    """True if the names of a sealed file are too many, and lie in frames of their own (sealed_format.py)."""


_encoder = msgspec.msgpack.Encoder()
_SAME_BYTES = re.compile(rb"\x00+|\xff+|.", re.DOTALL)


def bitmap_runs(bitmap: bytes) -> Iterator[tuple[int, int]]:
    """Yield the blocks that are set as runs (first, stop), ascending; neighbours may be runs of their own."""
    for found in _SAME_BYTES.finditer(bitmap):
        if bitmap[found.start()] == 0xFF:
            yield found.start() * 8, found.end() * 8
        else:
            base = found.start() * 8
            yield from ((base + bit, base + bit + 1) for bit in range(8) if bitmap[found.start()] >> bit & 1)


# ----------------------------------------------------------------------------
# The undo log


class OldStat(msgspec.Struct, array_like=True, frozen=True):
    """Old attributes of an inode. `nlink` does not count the hold link; times are those that an entry holds."""

    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    mtime_ns: int
    ctime_ns: int
    atime_ns: int

    @classmethod
    def of(cls, st: os.stat_result, *, hold_links: int = 0) -> OldStat:
        """Take attributes from a stat result, of whose links `hold_links` are ours."""
        return cls(
            st.st_mode,
            st.st_nlink - hold_links,
            st.st_uid,
            st.st_gid,
            st.st_rdev,
            st.st_size,
            recorded_time(st.st_mtime_ns),
            recorded_time(st.st_ctime_ns),
            recorded_time(st.st_atime_ns),
        )


class InodeRecord(msgspec.Struct, array_like=True, frozen=True, tag="i"):
    """Attributes and xattrs of `ino`, true up to `epoch`."""

    ino: int
    epoch: int
    stat: OldStat
    xattrs: dict[bytes, bytes]


class NameRecord(msgspec.Struct, array_like=True, frozen=True, tag="n"):
    """`name` in directory `dir_ino` was bound to `ino` (0: absent) up to `epoch`."""

    dir_ino: int
    epoch: int
    name: bytes
    ino: int
    file_type: int = 0
    """File type, st_mode >> 12; 0 when absent."""
    fd: int = -1
    """Number of a worker's descriptor of a directory; -1 for one that was empty and is removed, and for all
    else, which has a hold link."""


class BlocksRecord(msgspec.Struct, array_like=True, frozen=True, tag="b"):
    """Blocks [first_block, first_block + count) of `ino`, true up to `epoch`, lie in `blocks_name(ino, epoch)`."""

    ino: int
    epoch: int
    first_block: int
    count: int


class SwappedRecord(msgspec.Struct, array_like=True, frozen=True, tag="s"):
    """Up to `epoch` the place of `new_ino` was held by `ino`, which is whole under its hold link."""

    ino: int
    epoch: int
    new_ino: int


class AbandonedRecord(msgspec.Struct, array_like=True, frozen=True, tag="x"):
    """The pending epochs up to `epoch` were given up."""

    epoch: int
    reason: str


Record = InodeRecord | NameRecord | BlocksRecord | SwappedRecord | AbandonedRecord

_record_decoder = msgpack_decoder(Record)


def encode(record: Record) -> bytes:
    """Encode a record as length and body, to be appended in one write (several records may be joined into one)."""
    body = _encoder.encode(record)
    return len(body).to_bytes(_LENGTH_BYTES, "little") + body


def decode_log(data: bytes) -> tuple[list[Record], int]:
    """Return every whole record of a log, and their length in bytes; a record behind them was cut short.

    Raises:
        UndoDamaged: a whole record does not decode.
    """
    records: list[Record] = []
    position = 0
    while len(data) - position >= _LENGTH_BYTES:
        size = int.from_bytes(data[position : position + _LENGTH_BYTES], "little")
        end = position + _LENGTH_BYTES + size
        if size > MAX_RECORD_BYTES:
            raise UndoDamaged(f"undo log: a record of {size} bytes")
        if end > len(data):
            break
        try:
            records.append(_record_decoder.decode(data[position + _LENGTH_BYTES : end]))
        except msgspec.DecodeError as error:
            raise UndoDamaged(f"undo log: {error}") from error
        position = end
    return records, position


class BlockRun(NamedTuple):
    """Blocks [first, stop), whose old content is in `blocks_name(ino, epoch)`."""

    first: int
    stop: int
    epoch: int


class LogReader:
    """The undo log as the capture of one epoch sees it. Not thread-safe.

    Memory follows the number of records that matter to this epoch. A log that does not exist yet counts as
    empty.
    """

    def __init__(self, path: str | bytes, epoch: int) -> None:
        self.path = path
        self.epoch = epoch
        self.abandoned: AbandonedRecord | None = None
        self._fd = -1
        self._offset = 0
        self._tail = b""
        self._inodes: dict[int, InodeRecord] = {}
        self._names: dict[int, dict[bytes, NameRecord]] = {}
        self._blocks: dict[int, dict[int, list[tuple[int, int]]]] = {}
        self._swapped: dict[int, SwappedRecord] = {}

    def close(self) -> None:
        """Close the log."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def poll(self) -> int:
        """Read the records that were appended since the last call, and return their number.

        Raises:
            UndoLost: this epoch was abandoned, or the log is no longer the one that was opened.
            UndoDamaged: a complete record does not decode.
        """
        if self._fd < 0:
            try:
                self._fd = os.open(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return 0
        records = 0
        while piece := os.pread(self._fd, _READ_BYTES, self._offset):
            self._offset += len(piece)
            records += self._take(piece)
        # Asked after the records were read: a log that is dropped afterwards was whole until then.
        state = os.fstat(self._fd)
        if self.abandoned is not None:
            raise UndoLost(f"the undo log was given up: {self.abandoned.reason}")
        if state.st_nlink == 0 or state.st_size < self._offset:
            raise UndoLost("the undo log was dropped while it was being read")
        return records

    def inode(self, ino: int) -> InodeRecord | None:
        """Return the attributes of `ino` at the end of this epoch; None when the backing inode still has them."""
        return self._inodes.get(ino)

    def name(self, dir_ino: int, name: bytes) -> NameRecord | None:
        """Return the binding of a name at the end of this epoch; None when the backing directory still has it."""
        return self._names.get(dir_ino, {}).get(name)

    def names(self, dir_ino: int) -> dict[bytes, NameRecord]:
        """Return every name of a directory that has a record; the dictionary grows with later polls."""
        return self._names.get(dir_ino, {})

    def swapped(self, new_ino: int) -> SwappedRecord | None:
        """Return the record of the inode that `new_ino` replaced; None without one."""
        return self._swapped.get(new_ino)

    def blocks(self, ino: int, first: int, stop: int) -> list[BlockRun]:
        """Return the runs of the blocks [first, stop) that are in the log, ascending and not overlapping."""
        by_epoch = self._blocks.get(ino)
        if not by_epoch:
            return []
        found: list[BlockRun] = []
        missing = [(first, stop)]
        # The smallest epoch first: blocks that several epochs saved are true for ours in the oldest copy.
        for epoch in sorted(by_epoch):
            still_missing: list[tuple[int, int]] = []
            for low, high in missing:
                for run_first, run_stop in _overlaps(by_epoch[epoch], low, high):
                    found.append(BlockRun(run_first, run_stop, epoch))
                    if low < run_first:
                        still_missing.append((low, run_first))
                    low = run_stop
                if low < high:
                    still_missing.append((low, high))
            missing = still_missing
        found.sort()
        return found

    def _take(self, piece: bytes) -> int:
        """Index the complete records of `piece`, and keep an incomplete last one for later."""
        data = self._tail + piece if self._tail else piece
        position = records = 0
        while len(data) - position >= _LENGTH_BYTES:
            size = int.from_bytes(data[position : position + _LENGTH_BYTES], "little")
            if size > MAX_RECORD_BYTES:
                raise UndoDamaged(f"undo log: a record of {size} bytes")
            end = position + _LENGTH_BYTES + size
            # The writer may be in the middle of this record: its change has not happened yet.
            if end > len(data):
                break
            try:
                record = _record_decoder.decode(data[position + _LENGTH_BYTES : end])
            except msgspec.DecodeError as error:
                raise UndoDamaged(f"undo log: {error}") from error
            self._index(record)
            position = end
            records += 1
        self._tail = data[position:]
        return records

    def _index(self, record: Record) -> None:
        """Keep a record if it has the smallest epoch of those that are true for ours."""
        if record.epoch < self.epoch:
            return
        if isinstance(record, InodeRecord):
            known = self._inodes.get(record.ino)
            if known is None or record.epoch < known.epoch:
                self._inodes[record.ino] = record
        elif isinstance(record, NameRecord):
            names = self._names.setdefault(record.dir_ino, {})
            known_name = names.get(record.name)
            if known_name is None or record.epoch < known_name.epoch:
                names[record.name] = record
        elif isinstance(record, BlocksRecord):
            runs = self._blocks.setdefault(record.ino, {}).setdefault(record.epoch, [])
            _add_run(runs, record.first_block, record.first_block + record.count)
        elif isinstance(record, SwappedRecord):
            known_swap = self._swapped.get(record.new_ino)
            if known_swap is None or record.epoch < known_swap.epoch:
                self._swapped[record.new_ino] = record
        else:
            self.abandoned = record


def _add_run(runs: list[tuple[int, int]], first: int, stop: int) -> None:
    """Add [first, stop) to sorted runs that neither overlap nor touch, and keep them so."""
    low = bisect_left(runs, (first, 0))
    if low and runs[low - 1][1] >= first:
        low -= 1
    high = low
    while high < len(runs) and runs[high][0] <= stop:
        first, stop = min(first, runs[high][0]), max(stop, runs[high][1])
        high += 1
    runs[low:high] = [(first, stop)]


def _overlaps(runs: list[tuple[int, int]], low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of sorted runs that lie in [low, high), ascending."""
    index = max(0, bisect_left(runs, (low, 0)) - 1)
    while index < len(runs) and runs[index][0] < high:
        first, stop = max(runs[index][0], low), min(runs[index][1], high)
        if first < stop:
            yield first, stop
        index += 1
