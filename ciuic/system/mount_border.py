"""Borders of a mount: the names of a directory at which another file system, or another part of the same one, is mounted.

Guarantees: a border is told by the ids of mounts and not by device numbers, so a bind mount of the same file system is one.
Btrfs subvolumes have a device number of their own on one mount; they are borders too. Through an overlay, which shows all that
lies below its root as one mount, the overlay's worker is asked (`HIDDEN_MOUNTS`). No file system is sent a request that could
block, except the one that the directory itself is on.

References:
    statx(2), STATX_MNT_ID (Linux 5.8); proc_pid_fdinfo(5), mnt_id
"""

from __future__ import annotations

import ctypes
import os
import posixpath
import struct
from typing import Final

from ciuic.errors import CiuicError
from ciuic.system import mountinfo

HIDDEN_MOUNTS: Final = b"system.ciuic.mounts"
"""Extended attribute that an overlay answers for a directory: the names in it, each ended by a NUL, at which something is mounted
below the overlay or a btrfs subvolume begins. ``system.`` attributes are read without a permission (xattr(7)), so every user's restore learns them."""
LEFT_ALONE: Final = "another file system is mounted there: it is left alone"

_AT_SYMLINK_NOFOLLOW = 0x100
_AT_NO_AUTOMOUNT = 0x800
_AT_EMPTY_PATH = 0x1000
_AT_STATX_DONT_SYNC = 0x4000
_STATX_MNT_ID = 0x1000
_FLAGS = _AT_SYMLINK_NOFOLLOW | _AT_NO_AUTOMOUNT | _AT_STATX_DONT_SYNC
# Offsets in struct statx (include/uapi/linux/stat.h).
_MASK_AT, _DEVICE_AT, _MOUNT_AT, _STATX_BYTES = 0, 136, 144, 256
# C libraries of before 2018 lack it.
_statx_call = getattr(ctypes.CDLL(None, use_errno=True), "statx", None)


def mount_id(fd: int) -> int:
    """Return the id of the mount that a descriptor is on, as in mountinfo, without a request to the file system."""
    found = _statx(fd, b"")
    return found[1] if found is not None else _mount_id_of_fdinfo(fd)


class MountBorders:
    """Borders among the names of one open directory.

    Used for as long as the directory is open; what is mounted below an overlay is read once, when it is first needed.
    """

    __slots__ = ("_fd", "_here", "_hidden")

    def __init__(self, fd: int) -> None:
        """Take the directory's descriptor, which stays the caller's and is no O_PATH descriptor."""
        self._fd = fd
        self._here: tuple[int, int] | None = None
        self._hidden: frozenset[bytes] | None = None

    def at(self, name: bytes) -> bool:
        """Return whether a name of the directory leads to another mount; False if there is no such name."""
        return name in self.hidden or self._place_at(name) not in (None, self._own())

    def before(self, name: bytes, fd: int) -> bool:
        """Return whether a descriptor that was opened by a name of the directory is on another mount."""
        return name in self.hidden or place_of(fd) != self._own()

    @property
    def hidden(self) -> frozenset[bytes]:
        """Names at which something is mounted, or a subvolume begins, below an overlay."""
        if self._hidden is None:
            try:
                self._hidden = frozenset(os.getxattr(self._fd, HIDDEN_MOUNTS).split(b"\0")) - {b""}
            except OSError:
                # Every other file system: it has no such attribute.
                self._hidden = frozenset()
        return self._hidden

    def _own(self) -> tuple[int, int]:
        if self._here is None:
            self._here = place_of(self._fd)
        return self._here

    def _place_at(self, name: bytes) -> tuple[int, int] | None:
        found = _statx(self._fd, name)
        if found is not None:
            return found
        try:
            fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self._fd)
        except OSError:
            return None
        try:
            own, identity = self._own(), _mount_id_of_fdinfo(fd)
            # Another mount is known by its id: its server may never answer stat(2).
            return place_of(fd) if identity == own[1] else (own[0], identity)
        finally:
            os.close(fd)


def first_border(top: bytes, path: bytes) -> bytes | None:
    """Return the first name on the way from a directory to a path below it at which something is mounted, as a path; None for none.

    Symbolic links below ``top`` are not followed. OSError where a directory on the way cannot be opened.
    """
    here = top
    fd = os.open(top, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in path[len(top) :].strip(b"/").split(b"/") if path != top else ():
            here = posixpath.join(here, name)
            if MountBorders(fd).at(name):
                return here
            if here == path:
                break
            below = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=fd)
            os.close(fd)
            fd = below
    finally:
        os.close(fd)
    return None


def border_names(fd: int, mounts: list[mountinfo.Mount]) -> list[bytes]:
    """Return the names of a directory at which something is mounted or a subvolume begins, seen through its descriptor.

    Args:
        fd: descriptor of the directory, open for reading, which may lie below another mount: it is not reached by its path.
        mounts: the process's mounts.
    """
    path = os.readlink(b"/proc/self/fd/%d" % fd)
    candidates = {
        posixpath.basename(mount.mount_point)
        for mount in mounts
        if mount.mount_point != path and posixpath.dirname(mount.mount_point) == path
    }
    here = place_of(fd)
    if here not in ((os.makedev(*mount.device), mount.mount_id) for mount in mounts):
        # Only a file system with subvolumes gives directories another device number than its superblock's. No list names these.
        with os.scandir(fd) as entries:
            candidates.update(
                os.fsencode(entry.name) for entry in entries if entry.is_dir(follow_symlinks=False)
            )
    # A candidate may be mounted over the directory's path and not in the directory.
    borders = MountBorders(fd)
    return sorted(name for name in candidates if borders.at(name))


def place_of(fd: int) -> tuple[int, int]:
    """Return the device number and the mount id of a descriptor: two that differ have a border between them."""
    found = _statx(fd, b"")
    return found if found is not None else (os.fstat(fd).st_dev, _mount_id_of_fdinfo(fd))


def _statx(fd: int, name: bytes) -> tuple[int, int] | None:
    """Return device number and mount id; None where there is no such name, or the kernel does not tell."""
    if _statx_call is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    # No attribute is asked for: FUSE refuses attributes to callers that its user did not admit, root included, but tells the mount.
    if _statx_call(fd, name, _FLAGS | (_AT_EMPTY_PATH if not name else 0), 0, buffer) != 0:
        return None
    if not struct.unpack_from("=I", buffer, _MASK_AT)[0] & _STATX_MNT_ID:
        return None
    major, minor, mount = struct.unpack_from("=IIQ", buffer, _DEVICE_AT)
    return os.makedev(major, minor), mount


def _mount_id_of_fdinfo(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise CiuicError("/proc/self/fdinfo does not name the mount of a descriptor", hint="is /proc mounted?")
