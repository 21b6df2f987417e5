"""Reading files without leaving them in the page cache, and without taking from it what somebody else put there.

What others use must stay where it is, and what nobody used must not push it out: the pages of a range that are not
resident are noted before it is read and dropped after. The kernel's readahead makes ranges look as if somebody used them. Who reads
a file from end to end notes them before it gets there (`Lookout`), and is as fast as can be: 2.9 GB/s, as the kernel
reads into large folios and in requests as large as the disk takes. Who reads here and there forbids it, and `read_in` takes
its place, a page at a time (0.7 to 1.2 GB/s).

Guarantees: no page that was resident is dropped, nor one that is dirty, mapped or locked (posix_fadvise(2) leaves those);
nothing here fails: where residence cannot be asked for, nothing is dropped. mincore(2) tells about files that are ours,
that we may write or for which we have CAP_FOWNER, and takes others' pages for resident.

RWF_DONTCACHE of preadv2(2) would do the same in the kernel, from Linux 6.14 on; until 6.16 it may drop a page that
somebody has just written to, so nobody who keeps other people's data uses it.
"""

from __future__ import annotations

import ctypes
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
_FAILED: Final = ctypes.c_void_p(-1).value
_NR_CACHESTAT: Final = 451
_SYNC_FILE_RANGE_WRITE: Final = 2
_SYNC_FILE_RANGE_ALL: Final = 7
_LOOKOUT_BYTES: Final = 64 << 20
"""Half of it is more than the kernel reads ahead: twice what the device says, 128 KiB mostly, rarely 8 MiB."""
_LAG_BYTES: Final = 4 << 20
_LAG_SPANS: Final = 128
_ABSENT: Final = re.compile(rb"[\x00\x02\x04\x06\x08\x0a\x0c\x0e]+")
"""The lowest bit of each byte is the answer; the kernel reserves the others (today they are zero)."""

_libc = ctypes.CDLL(None, use_errno=True)
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
    """Reads through this descriptor bring in what they ask for and nothing beyond."""
    with suppress(OSError):  # pipes, and file systems that take no advice
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)


def cold_spans(fd: int, offset: int, length: int) -> list[Span]:
    """The pages of the range that are not in the page cache now, as maximal spans in order; none where nobody can tell."""
    start = offset - offset % _PAGE_BYTES
    pages = -(-(offset + length - start) // _PAGE_BYTES)
    if pages <= 0:
        return []
    cached = _cached_pages(fd, start, pages * _PAGE_BYTES)
    if cached == 0:
        return [(start, pages * _PAGE_BYTES)]
    if cached is not None and cached >= pages:
        return []
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
    """cachestat(2), three microseconds where a mapping takes fourteen; None where the kernel has none (before 6.5)."""
    found = (ctypes.c_uint64 * 5)()
    if _syscall(_NR_CACHESTAT, fd, (ctypes.c_uint64 * 2)(offset, length), found, 0) != 0:
        return None
    return found[0]


class Lookout:
    """Which pages of a file were not in the page cache before it was read from end to end: asked far ahead of the kernel."""

    def __init__(self, fd: int, size_bytes: int) -> None:
        self._fd = fd
        self._size_bytes = size_bytes
        self._spans: deque[Span] = deque()
        self._known_bytes = 0

    @property
    def began(self) -> bool:
        """Whether anything was asked for."""
        return self._known_bytes > 0

    def reach(self, end: int) -> list[Span]:
        """Those up to ``end`` that have not been told yet. Before anything from there on is read."""
        while self._known_bytes < min(end + _LOOKOUT_BYTES // 2, self._size_bytes):
            self._spans.extend(cold_spans(self._fd, self._known_bytes, _LOOKOUT_BYTES))
            self._known_bytes += _LOOKOUT_BYTES
        end += -end % _PAGE_BYTES
        found: list[Span] = []
        while self._spans and self._spans[0][0] < end:
            offset, length = self._spans.popleft()
            if offset + length > end:
                self._spans.appendleft((end, offset + length - end))
                length = end - offset
            found.append((offset, length))
        return found


def read_in(fd: int, spans: Iterable[Span]) -> None:
    """Begins to read the spans into the page cache and waits for none of it."""
    with suppress(OSError):
        for offset, length in spans:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_WILLNEED)


def drop(fd: int, spans: Iterable[Span]) -> None:
    """Takes the clean pages of the spans out of the page cache."""
    with suppress(OSError):
        for offset, length in spans:
            os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)


class DropBehind:
    """Drops what was read, a little later. Belongs to one thread; ``close`` drops the rest.

    Later, because a page that has just been read waits in a list of its processor's, and to drop it the kernel empties
    those lists on all processors and waits for that (measured: 0.7 ms a file on two busy ones, more than reading it).
    """

    def __init__(self) -> None:
        self._waiting: deque[tuple[int, list[Span], int]] = deque()
        self._waiting_bytes = 0
        self._waiting_spans = 0

    def begin(self, fd: int, offset: int, length: int) -> list[Span]:
        """Begins to read the range in; what it returns goes to ``end`` when it has been read."""
        spans = cold_spans(fd, offset, length)
        if len(spans) > 1 or length > _PAGE_BYTES:  # one page is as soon read
            read_in(fd, spans)
        return spans

    def end(self, fd: int, spans: list[Span]) -> None:
        """The range has been read. ``fd`` may be closed afterwards."""
        if not spans:
            return
        try:
            later = os.dup(fd)
        except OSError:  # no descriptors left: what was read is no less read for that
            drop(fd, spans)
            return
        cold_bytes = sum(length for _, length in spans)
        self._waiting.append((later, spans, cold_bytes))
        self._waiting_bytes += cold_bytes
        self._waiting_spans += 1
        while self._waiting_bytes > _LAG_BYTES + cold_bytes or self._waiting_spans > _LAG_SPANS:
            self._drop_oldest()

    def close(self) -> None:
        while self._waiting:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        fd, spans, cold_bytes = self._waiting.popleft()
        self._waiting_bytes -= cold_bytes
        self._waiting_spans -= 1
        drop(fd, spans)
        os.close(fd)


def start_writing(fd: int, offset: int, length: int) -> None:
    """Begins to write the dirty pages of the range to disk and waits for none of it: a later fsync finds little to do, and
    does not put a second's worth of writes before everybody else's at once. No promise of anything durable.
    """
    _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_WRITE)


def write_out(fd: int, offset: int, length: int) -> None:
    """The dirty pages of the range are written to disk on return; not durable for that."""
    _sync_file_range(fd, offset, length, _SYNC_FILE_RANGE_ALL)
