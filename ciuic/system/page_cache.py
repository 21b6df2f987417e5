"""Read files without leaving them in the page cache, and without evicting from it what other processes put there.

Pages that others use must stay, and pages that nobody used must not push them out. The pages of a range that are not resident are
therefore recorded before it is read, and dropped after. The kernel's readahead makes pages look as if somebody used them. A reader
of a whole file records its pages before the readahead reaches them (`Lookout`), and is as fast as possible: 2.9 GB/s, because the
kernel reads into large folios and in requests as large as the disk takes. A reader of single ranges forbids readahead and starts
reads with `read_in`, a page at a time (0.7 to 1.2 GB/s).

Guarantees: no page that was resident is dropped, nor one that is dirty, mapped or locked (posix_fadvise(2) leaves those). Nothing
here fails: where residence cannot be found out, nothing is dropped. mincore(2) reports on files that this user owns or may write, or
with CAP_FOWNER, and reports pages of other files as resident.

RWF_DONTCACHE of preadv2(2) would do the same in the kernel from Linux 6.14 on. Until 6.16 it may drop a page that was just written,
so a backup program must not use it.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import re
from collections import deque
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

Span = tuple[int, int]
"""(offset, length) in bytes, both multiples of the page size."""

_PAGE_BYTES: Final = mmap.PAGESIZE
# MAP_FAILED, -1, as ctypes returns it.
_FAILED: Final = ctypes.c_void_p(-1).value
_NR_CACHESTAT: Final = 451
_SYNC_FILE_RANGE_WRITE: Final = 2
_SYNC_FILE_RANGE_ALL: Final = 7
# Half of it is more than the kernel reads ahead, which is twice the device's setting: mostly 128 KiB, rarely 8 MiB.
_LOOKOUT_BYTES: Final = 64 << 20
# Amounts that are read before a page is dropped (`DropBehind`): 4,000 small files took 21 µs more each when
# dropped at once, and take 6 µs. The second limit also bounds the descriptors of files that wait.
_LAG_BYTES: Final = 4 << 20
_LAG_SPANS: Final = 128
# mincore(2): the lowest bit of each byte says whether the page is resident; the others are reserved and zero today.
_ABSENT: Final = re.compile(rb"[\x00\x02\x04\x06\x08\x0a\x0c\x0e]+")

_libc = ctypes.CDLL(None, use_errno=True)
# By ctypes and not by Python's mmap: of a read-only mapping that gives no address, which mincore(2) needs.
_mmap = _libc.mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_int64)
_munmap = _libc.munmap
_munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = (ctypes.c_long, ctypes.c_uint, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint)
_sync_file_range = _libc.sync_file_range
_sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)


def forbid_readahead(fd: int) -> None:
    """Disable readahead for reads through this descriptor."""
    # Pipes, and file systems that take no advice.
    with suppress(OSError):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def cold_spans(fd: int, offset: int, length: int) -> list[Span]:
    """Return the pages of the range that are not resident, as maximal spans in order; none where that cannot be found out."""
    start = offset - offset % _PAGE_BYTES
    pages = -(-(offset + length - start) // _PAGE_BYTES)
    if pages <= 0:
        return []
    cached = _cached_pages(fd, start, pages * _PAGE_BYTES)
    if cached == 0:
        return [(start, pages * _PAGE_BYTES)]
    if cached is not None and cached >= pages:
        return []
    # Partly resident: only mincore(2) tells which pages are. An untouched mapping reads none.
    address = _mmap(None, pages * _PAGE_BYTES, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address == _FAILED:
        return []
    try:
        found = ctypes.create_string_buffer(pages)
        if _mincore(address, pages * _PAGE_BYTES, found) != 0:
            return []
    finally:
        _munmap(address, pages * _PAGE_BYTES)
    return [
        (start + absent.start() * _PAGE_BYTES, (absent.end() - absent.start()) * _PAGE_BYTES)
        for absent in _ABSENT.finditer(found.raw)
    ]


def _cached_pages(fd: int, offset: int, length: int) -> int | None:
    """Return the number of resident pages of a range; None where the kernel lacks cachestat(2) (before Linux 6.5)."""
    # Three microseconds, where a mapping and mincore(2) take fourteen.
    found = (ctypes.c_uint64 * 5)()
    if _syscall(_NR_CACHESTAT, fd, (ctypes.c_uint64 * 2)(offset, length), found, 0) != 0:
        return None
    return found[0]


class Lookout:
    """Records which pages of a file were not resident before it is read from end to end, far ahead of the kernel's readahead."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._spans: deque[Span] = deque()
        self._known_bytes = 0

    @property
    def began(self) -> bool:
        """True if any part of the file was examined."""
        return self._known_bytes > 0

    def reach(self, end: int) -> list[Span]:
        """Return the spans up to ``end`` that were not returned before; must be called before anything beyond is read."""
        # Half a window ahead of the reader, at least: what the kernel reads ahead would count as resident,
        # and stay.
        while self._known_bytes < min(end + _LOOKOUT_BYTES // 2, self._size_bytes):
            self._spans.extend(cold_spans(self._fd, self._known_bytes, _LOOKOUT_BYTES))
            self._known_bytes = self._window_behind_holes(self._known_bytes + _LOOKOUT_BYTES)
        end += -end % _PAGE_BYTES
        found: list[Span] = []
        while self._spans and self._spans[0][0] < end:
            offset, length = self._spans.popleft()
            if offset + length > end:
                self._spans.appendleft((end, offset + length - end))
                length = end - offset
            found.append((offset, length))
        return found

    def _window_behind_holes(self, start: int) -> int:
        """Return the first window from this one on that has data, which is not read before; the same one where nothing tells."""
        # truncate(2) makes a hole of exabytes at once, window by window it takes hours. The kernel reads ahead
        # into the beginning of a hole alone, which the window before has.
        if start >= self._size_bytes:
            return start
        try:
            data = min(os.lseek(self._fd, start, os.SEEK_DATA), self._size_bytes)
        except OSError as error:
            data = self._size_bytes if error.errno == errno.ENXIO else start
        return max(start, data - data % _LOOKOUT_BYTES)


def read_in(fd: int, spans: Iterable[Span]) -> None:
    """Start reading the spans into the page cache, without waiting."""
    with suppress(OSError):
        for offset, length in spans:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def drop(fd: int, spans: Iterable[Span]) -> None:
    """Drop the clean pages of the spans from the page cache."""
    with suppress(OSError):
        for offset, length in spans:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


class DropBehind:
    """Drops pages a little after they were read. Belongs to one thread; `close` drops the rest.

    The delay is there because a page that was just read is in a list of its processor, and to drop it the kernel empties these lists
    on all processors and waits for that (measured: 0.7 ms a file on two busy processors, more than reading it).
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[Span], int]] = deque()
        self._waiting_bytes = 0
        self._waiting_spans = 0

    def begin(self, fd: int, offset: int, length: int) -> list[Span]:
        """Start reading the range; the result must be passed to `end` after it was read."""
        spans = cold_spans(fd, offset, length)
        # Reading a single page takes no longer than starting to read it.
        if len(spans) > 1 or length > _PAGE_BYTES:
            read_in(fd, spans)
        return spans

    def end(self, fd: int, spans: list[Span]) -> None:
        """Queue the spans of a range that was read. ``fd`` may be closed afterwards."""
        if not spans:
            return
        try:
            later = os.dup(fd)
        except OSError:
            # No descriptors left: drop at once, at the cost described above.
            drop(fd, spans)
            return
        cold_bytes = sum(length for _, length in spans)
        self._waiting.append((later, spans, cold_bytes))
        self._waiting_bytes += cold_bytes
        self._waiting_spans += 1
        while self._waiting_bytes > _LAG_BYTES + cold_bytes or self._waiting_spans > _LAG_SPANS:
            self._drop_oldest()

    def close(self) -> None:
        """Drop everything that is queued."""
        while self._waiting:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        fd, spans, cold_bytes = self._waiting.popleft()
        self._waiting_bytes -= cold_bytes
        self._waiting_spans -= 1
        drop(fd, spans)
        os.close(fd)


def start_writing(fd: int, offset: int, length: int) -> None:
    """Start writing the dirty pages of the range to disk, without waiting. Nothing is durable by that.

    A later fsync finds little to do, and does not queue a second's worth of writes at once before those of other processes.
    """
    _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


def write_out(fd: int, offset: int, length: int) -> None:
    """Write the dirty pages of the range to disk and wait; they are not durable by that."""
    _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_ALL)
