"""Content taken over from a file by sharing its extents with a pack, instead of writing it again (FICLONERANGE: XFS, btrfs).

A stretch of the file is first *staged*: cloned into a nameless file of our own, which nobody else can change. It is read and
hashed there, and what is to be stored as it is is cloned on into a pack. So the id of a chunk and its stored bytes agree, whatever
becomes of the file meanwhile; and the file's own pages in the page cache are left alone. What is in the page cache may be read from the
file all the same, if `Stage.still` says afterwards that it was what is staged. A clone costs some 20 us for 4 MiB.
Where extents cannot be shared nothing fails: there is no stage, and everything is read and written.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from typing import Final, NamedTuple

from ciuic import page_cache

_FICLONERANGE: Final = 0x4020940D
_RANGE: Final = struct.Struct("=qQQQ")  # source descriptor, its offset, length, offset in the target
_FIRST_BYTES: Final = 1 << 20
"""Less is copied as soon as it is cloned twice."""
_WINDOW_BYTES: Final = 32 << 20
"""Staged at once where more of a file is to follow: a clone waits for reads of either file, and they for it."""
_SCRATCH_BYTES: Final = 64 << 20
"""Of one nameless file: packs take from it while others are read, and it holds on to what the original may have given up since."""
ALIGN_BYTES: Final = 4096
_NEVER: Final = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.ENOSYS, errno.EPERM, errno.EINVAL)
"""EINVAL: blocks larger than ours, or (rarely) a file that has just become shorter, and then others are read as well."""


_FIEMAP: Final = 0xC020660B
_FIEMAP_SYNC: Final = 1
_FIEMAP_HEAD: Final = struct.Struct("=QQIIII")  # start, length, flags, extents found, room for extents, 0
_FIEMAP_EXTENT: Final = struct.Struct("=QQQQQIIII")  # logical, physical, length, 0, 0, flags, 0, 0, 0
_MOST_EXTENTS: Final = 128
_UNKNOWN: Final = 0x2 | 0x4
"""Flags of an extent: of unknown place, and still to be allocated."""
_ENCODED: Final = 0x8
"""Compressed: its physical offset is that of the whole, wherever in it the range begins."""


class Scratch:
    """A nameless file; gone with the last reference to it."""

    def __init__(self, directory: str) -> None:
        self.fd = -1
        self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self.end = 0

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class Place(NamedTuple):
    """Where staged content lies."""

    file: Scratch
    offset: int


class Stage:
    """Stages for one repository. Belongs to one thread; what it returns may be read by others."""

    def __init__(self, directory: str) -> None:
        """``directory``: on the file system of the packs."""
        self._directory = directory
        self._scratch: Scratch | None = None
        self._refused: set[int] = set()
        """Devices whose files share nothing with us."""

    def take(self, fd: int, offset: int, length: int) -> Place | None:
        """The range of the file as it is now, of whole blocks of 4 KiB; None when it must be read where it is."""
        if length < _FIRST_BYTES or offset % ALIGN_BYTES or length % ALIGN_BYTES:
            return None
        state = os.fstat(fd)
        if state.st_dev in self._refused or state.st_size < offset + length:
            return None
        try:
            scratch = self._room()
            page_cache.write_out(
                fd, offset, length
            )  # or the clone does it, and keeps writers out for as long
            clone_range(fd, offset, length, scratch.fd, scratch.end)
        except OSError as error:
            if error.errno in _NEVER:
                self._refused.add(state.st_dev)
            return None
        place = Place(scratch, scratch.end)
        scratch.end += length
        return place

    def still(self, fd: int, offset: int, length: int, place: Place) -> bool:
        """Whether the file holds, and has held since it was staged, what is staged.

        By the maps of extents, once dirty pages are written: blocks that are shared are never written in place, and those that the
        stage holds on to are not used again, so whatever changed lies elsewhere now.
        """
        try:
            found = extents(fd, offset, length)
            return found is not None and found == extents(place.file.fd, place.offset, length)
        except OSError:
            return False

    def close(self) -> None:
        self._scratch = None

    def _room(self) -> Scratch:
        if self._scratch is None or self._scratch.end >= _SCRATCH_BYTES:
            self._scratch = Scratch(self._directory)
        return self._scratch


class StagedFile:
    """A file that is staged from one end to the other, some way ahead."""

    def __init__(self, stage: Stage, fd: int, size_bytes: int) -> None:
        self._stage = stage
        self._fd = fd
        self._whole_bytes = size_bytes - size_bytes % ALIGN_BYTES
        self._start = self._end = 0
        self._place: Place | None = None

    def take(self, offset: int, length: int) -> Place | None:
        """As ``Stage.take``."""
        if self._place is None or offset < self._start or offset + length > self._end:
            end = max(offset + length, min(offset + _WINDOW_BYTES, self._whole_bytes))
            self._place = self._stage.take(self._fd, offset, end - offset)
            if self._place is None and end > offset + length:  # perhaps it has become shorter
                end = offset + length
                self._place = self._stage.take(self._fd, offset, length)
            self._start, self._end = offset, end
        if self._place is None or length % ALIGN_BYTES or not length:
            return None
        return self._place._replace(offset=self._place.offset + offset - self._start)


def clone_range(source: int, offset: int, length: int, target: int, target_offset: int) -> None:
    """Makes the range of the target share the extents of the source's. OSError where that cannot be."""
    fcntl.ioctl(target, _FICLONERANGE, _RANGE.pack(source, offset, length, target_offset))


def extents(fd: int, offset: int, length: int) -> list[tuple[int, int, int]] | None:
    """(offset in the range, physical offset, length) of what the range occupies, adjoining extents as one, after its dirty pages
    were written; None where nobody can say. OSError."""
    reply = bytearray(_FIEMAP_HEAD.size + _MOST_EXTENTS * _FIEMAP_EXTENT.size)
    _FIEMAP_HEAD.pack_into(reply, 0, offset, length, _FIEMAP_SYNC, 0, _MOST_EXTENTS, 0)
    fcntl.ioctl(fd, _FIEMAP, reply)
    count = _FIEMAP_HEAD.unpack_from(reply)[3]
    if count >= _MOST_EXTENTS:
        return None
    found: list[tuple[int, int, int]] = []
    for number in range(count):
        logical, physical, size, _, _, flags, *_ = _FIEMAP_EXTENT.unpack_from(
            reply, _FIEMAP_HEAD.size + number * _FIEMAP_EXTENT.size
        )
        if flags & _UNKNOWN:
            return None
        before = max(0, offset - logical)
        start, end = max(logical, offset), min(logical + size, offset + length)
        physical += 0 if flags & _ENCODED else before
        last = found[-1] if found else None
        if last and last[0] + last[2] == start - offset and last[1] + last[2] == physical:
            found[-1] = (last[0], last[1], last[2] + end - start)
        else:
            found.append((start - offset, physical, end - start))
    return found


def can_share(directory: str) -> bool:
    """Whether files on the file system of ``directory`` can share extents. False where that cannot be tried."""
    try:
        source, target = Scratch(directory), Scratch(directory)
        os.pwrite(source.fd, bytes(ALIGN_BYTES), 0)
        clone_range(source.fd, 0, ALIGN_BYTES, target.fd, 0)
    except OSError:
        return False
    return True
