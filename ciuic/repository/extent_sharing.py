"""Copy content into packs by sharing extents with the file instead of writing (FICLONERANGE: XFS, btrfs).

A range of the file is first *staged*: cloned into an unnamed file that no other process can change. It is read and
hashed there, and content that is to be stored as it is is cloned on into a pack. So the id of a chunk and its
stored bytes agree, whatever becomes of the file meanwhile, and the file's own pages in the page cache are
left alone. A range that is in the page cache may be read from the file all the same, if `Stage.is_unchanged`
says afterwards that it is what was staged. A clone costs about 20 us for 4 MiB. Where extents cannot be
shared nothing fails: there is no stage, and everything is read and written.

References:
    ioctl_ficlonerange(2); Documentation/filesystems/fiemap.rst; docs/decisions/sharing-extents.md
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import sys
from typing import Final, NamedTuple

from ciuic.system import page_cache
from ciuic.system.disk import clone_range

# Smallest range to stage; a smaller one is copied faster than it is cloned twice.
_FIRST_BYTES: Final = 1 << 20
# Range staged at once where more of a file follows: a clone waits for reads of either file, and they for it.
# 512 MiB cold on XFS: 0.43 to 0.60 s so, 0.67 to 0.74 with a clone for each run of 4 MiB
# (docs/decisions/capture-pipeline.md).
_WINDOW_BYTES: Final = 32 << 20
# Size of one scratch file: packs take from it while others are read, and it retains space that the original
# may have freed since.
_SCRATCH_BYTES: Final = 64 << 20
# Block size of XFS and btrfs as a rule.
ALIGN_BYTES: Final = 4096
# Errors that mean "never" for a device. EINVAL: blocks larger than 4 KiB, or (rarely) a file that has just
# become shorter; then the device's other files are read as well.
_NEVER: Final = (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.ENOSYS, errno.EPERM, errno.EINVAL)


_libc: Final = ctypes.CDLL(None, use_errno=True)
# More than struct statfs has, whose first field is the type; XFS and btrfs (linux/magic.h).
_STATFS_BYTES: Final = 256
_KNOWN_TYPES: Final = (0x58465342, 0x9123683E)
# FS_IOC_FSGETXATTR, the size of its structure, and a flag in its first field: linux/fs.h.
_FSGETXATTR: Final = 0x801C581F
_FSXATTR_BYTES: Final = 28
_XFLAG_REALTIME: Final = 0x1
_FIEMAP: Final = 0xC020660B
_FIEMAP_SYNC: Final = 1
# Start, length, flags, extents found, room for extents, 0.
_FIEMAP_HEAD: Final = struct.Struct("=QQIIII")
# Logical, physical, length, 0, 0, flags, 0, 0, 0.
_FIEMAP_EXTENT: Final = struct.Struct("=QQQQQIIII")
# A range of more extents counts as unknown: it is read from the stage.
_MAX_EXTENTS: Final = 128
# Flags of an extent at an unknown place, or still to be allocated.
_UNKNOWN: Final = 0x2 | 0x4
# Flag of a compressed extent: its physical offset is that of the whole, wherever in it the range begins.
_ENCODED: Final = 0x8
# Flags of extents whose physical offset does not tell their bytes: encoded (also 0x80: encrypted), 0x100 not
# aligned, 0x200 inline, 0x400 tail of several files, 0x800 unwritten.
_NOT_PLAIN: Final = _UNKNOWN | _ENCODED | 0x80 | 0x100 | 0x200 | 0x400 | 0x800


class Scratch:
    """Unnamed file; removed with the last reference to it."""

    def __init__(self, directory: str) -> None:
        # Set before the open: `__del__` also runs if that fails.
        self.fd = -1
        # Without a name: no other process can open it and change what is staged, and a kill leaves nothing
        # behind.
        self.fd = os.open(directory, os.O_TMPFILE | os.O_RDWR, 0o600)
        self.end = 0

    def __del__(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)


class StagedExtent(NamedTuple):
    """Position of staged content."""

    file: Scratch
    offset: int


class Stage:
    """Staging area of one repository. Belongs to one thread; staged extents may be read by others."""

    def __init__(self, directory: str) -> None:
        """Make a stage; ``directory`` is on the file system of the packs."""
        self._directory = directory
        self._scratch: Scratch | None = None
        # Devices whose files cannot share extents with the packs.
        self._refused: set[int] = set()

    def take(self, fd: int, offset: int, length: int) -> StagedExtent | None:
        """Stage the range of the file as it is now, in whole blocks of 4 KiB.

        Returns None when the range must be read instead.
        """
        # FICLONERANGE takes whole blocks only, except at the end of the source.
        if length < _FIRST_BYTES or offset % ALIGN_BYTES or length % ALIGN_BYTES:
            return None
        state = os.fstat(fd)
        # A range beyond the end is left out here: its EINVAL would count as "never" for the whole device.
        if state.st_dev in self._refused or state.st_size < offset + length:
            return None
        try:
            scratch = self._room()
            # Written out first: otherwise the clone does it, and blocks the job's writers for as long.
            page_cache.write_out(fd, offset, length)
            clone_range(fd, offset, length, scratch.fd, scratch.end)
        except OSError as error:
            if error.errno in _NEVER:
                self._refused.add(state.st_dev)
            return None
        place = StagedExtent(scratch, scratch.end)
        scratch.end += length
        return place

    def is_unchanged(self, fd: int, offset: int, length: int, place: StagedExtent) -> bool:
        """Return whether the file holds, and has held since it was staged, the staged content.

        Compares the maps of extents after dirty pages are written. Shared blocks are never written in place,
        and blocks that the stage retains are not used again, so changed content lies elsewhere now.
        Modification times would not do: a store through a mapping moves them when its page fault begins, not
        when it lands.
        """
        try:
            found = extents(fd, offset, length)
            return found is not None and found == extents(place.file.fd, place.offset, length)
        except OSError:
            return False

    def close(self) -> None:
        """Forget the scratch file."""
        self._scratch = None

    def _room(self) -> Scratch:
        if self._scratch is None or self._scratch.end >= _SCRATCH_BYTES:
            self._scratch = Scratch(self._directory)
        return self._scratch


class StagedFile:
    """Sequential stager of one file, which stages some way ahead."""

    def __init__(self, stage: Stage, fd: int, size_bytes: int) -> None:
        self._stage = stage
        self._fd = fd
        self._whole_bytes = size_bytes - size_bytes % ALIGN_BYTES
        self._start = self._end = 0
        self._place: StagedExtent | None = None

    def take(self, offset: int, length: int) -> StagedExtent | None:
        """Return the staged range, like `Stage.take`."""
        if self._place is None or offset < self._start or offset + length > self._end:
            end = max(offset + length, min(offset + _WINDOW_BYTES, self._whole_bytes))
            self._place = self._stage.take(self._fd, offset, end - offset)
            # The file may have become shorter.
            if self._place is None and end > offset + length:
                end = offset + length
                self._place = self._stage.take(self._fd, offset, length)
            self._start, self._end = offset, end
        if self._place is None or length % ALIGN_BYTES or not length:
            return None
        return self._place._replace(offset=self._place.offset + offset - self._start)


def share_extents(fd: int, offset: int, other: int, other_offset: int, length: int) -> bool:
    """Return whether two ranges lie in the same blocks of one file system; False where that cannot be told."""
    if os.fstat(fd).st_dev != os.fstat(other).st_dev:
        return False
    try:
        # Others may number the blocks of each of their disks anew, as XFS does with those of a real-time device.
        if not _numbers_blocks_once(fd) or _is_realtime(fd) or _is_realtime(other):
            return False
        found = extents(fd, offset, length, unknown=_NOT_PLAIN)
        return bool(found) and found == extents(other, other_offset, length, unknown=_NOT_PLAIN)
    except OSError:
        return False


def _numbers_blocks_once(fd: int) -> bool:
    buffer = ctypes.create_string_buffer(_STATFS_BYTES)
    if _libc.fstatfs(ctypes.c_int(fd), buffer):
        return False
    return int.from_bytes(buffer.raw[: ctypes.sizeof(ctypes.c_long)], sys.byteorder) in _KNOWN_TYPES


def _is_realtime(fd: int) -> bool:
    reply = bytearray(_FSXATTR_BYTES)
    fcntl.ioctl(fd, _FSGETXATTR, reply)
    return bool(int.from_bytes(reply[:4], sys.byteorder) & _XFLAG_REALTIME)


def extents(
    fd: int, offset: int, length: int, *, unknown: int = _UNKNOWN
) -> list[tuple[int, int, int]] | None:
    """Return (offset in the range, physical offset, length) of each extent in the range.

    Dirty pages are written first. Adjoining extents count as one. None where the file system cannot say, or an
    extent has one of the flags ``unknown``.

    Raises:
        OSError: the file system cannot be asked.
    """
    reply = bytearray(_FIEMAP_HEAD.size + _MAX_EXTENTS * _FIEMAP_EXTENT.size)
    _FIEMAP_HEAD.pack_into(reply, 0, offset, length, _FIEMAP_SYNC, 0, _MAX_EXTENTS, 0)
    fcntl.ioctl(fd, _FIEMAP, reply)
    count = _FIEMAP_HEAD.unpack_from(reply)[3]
    # A full reply may lack the extents that follow.
    if count >= _MAX_EXTENTS:
        return None
    found: list[tuple[int, int, int]] = []
    for number in range(count):
        logical, physical, size, _, _, flags, *_ = _FIEMAP_EXTENT.unpack_from(
            reply, _FIEMAP_HEAD.size + number * _FIEMAP_EXTENT.size
        )
        if flags & unknown:
            return None
        # FIEMAP reports whole extents, which may begin before the range and end after it.
        before = max(0, offset - logical)
        start, end = max(logical, offset), min(logical + size, offset + length)
        physical += 0 if flags & _ENCODED else before
        last = found[-1] if found else None
        # The two files may have the same blocks divided into extents differently.
        if last and last[0] + last[2] == start - offset and last[1] + last[2] == physical:
            found[-1] = (last[0], last[1], last[2] + end - start)
        else:
            found.append((start - offset, physical, end - start))
    return found


def can_share(directory: str) -> bool:
    """Return whether files on the file system of ``directory`` can share extents; False if untestable."""
    try:
        # Tried, not derived from the type of the file system: XFS can be made without shared extents.
        source, target = Scratch(directory), Scratch(directory)
        os.pwrite(source.fd, bytes(ALIGN_BYTES), 0)
        clone_range(source.fd, 0, ALIGN_BYTES, target.fd, 0)
    except OSError:
        return False
    return True
