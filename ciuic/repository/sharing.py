"""Content taken over from a file by sharing its extents with a pack, instead of writing it again (FICLONERANGE: XFS, btrfs).

A stretch of the file is first *staged*: cloned into a nameless file of our own, which nobody else can change. It is read and
hashed there, and what is to be stored as it is is cloned on into a pack. So the id of a chunk and its stored bytes agree, whatever
becomes of the file meanwhile; and the file's own pages in the page cache are left alone. A clone costs some 20 us for 4 MiB.
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
_SCRATCH_BYTES: Final = 1 << 30
"""Of one nameless file: it holds on to what the original may have given up since."""
ALIGN_BYTES: Final = 4096
_NEVER: Final = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.ENOSYS, errno.EPERM, errno.EINVAL)
"""EINVAL: blocks larger than ours, or (rarely) a file that has just become shorter, and then others are read as well."""


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

    def close(self) -> None:
        self._scratch = None

    def _room(self) -> Scratch:
        if self._scratch is None or self._scratch.end >= _SCRATCH_BYTES:
            self._scratch = Scratch(self._directory)
        return self._scratch


def clone_range(source: int, offset: int, length: int, target: int, target_offset: int) -> None:
    """Makes the range of the target share the extents of the source's. OSError where that cannot be."""
    fcntl.ioctl(target, _FICLONERANGE, _RANGE.pack(source, offset, length, target_offset))
