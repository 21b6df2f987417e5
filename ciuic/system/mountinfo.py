"""Mounts of a process from /proc/<pid>/mountinfo, and the borders at which a directory shows another mount.

Guarantees: no mounted file system is touched, so that a dead mount cannot block it, except the one that a directory is on whose
borders are asked for. Paths are bytes with the kernel's octal escapes decoded. A border is told by the ids of mounts and not by device
numbers, so a bind mount of the same file system is one. Btrfs subvolumes have a device number of their own on one mount; they are
borders too. Through an overlay, which shows all that lies below its root as one mount, the overlay's worker is asked
(`HIDDEN_MOUNTS`).

References:
    proc_pid_mountinfo(5); statx(2), STATX_MNT_ID (Linux 5.8); proc_pid_fdinfo(5), mnt_id
"""

from __future__ import annotations

import errno
import os
import posixpath
import re
import select
import stat
import struct
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec

from ciuic.errors import CiuicError

_ESCAPE = re.compile(rb"\\([0-7]{3})")
LAZY_FS_TYPE: Final = b"fuse.ciuic-restore"
"""Type of the mount over a directory that is being restored lazily (ciuic.lazy)."""
LAZY_RESTORE: Final = b"lazy-restore"
"""Directory in the container ``.ciuic-state`` of a directory that a lazy restore has not completed (ciuic.lazy)."""


class Mount(msgspec.Struct, frozen=True):
    """A line of mountinfo."""

    mount_id: int
    parent_id: int
    device: tuple[int, int]
    """(major, minor) of the superblock; on btrfs it differs from st_dev."""
    root: bytes
    """Directory of the file system that is mounted."""
    mount_point: bytes
    """Mount point, relative to the reading process's root directory."""
    options: bytes
    fs_type: bytes
    source: bytes
    super_options: bytes
    peers: int = 0
    """Group of mounts to which what is mounted on this one is propagated ("shared"); 0 for none."""
    master: int = 0
    """Group from which this mount receives what is mounted there ("slave"); 0 for none."""


def _unescape(text: bytes) -> bytes:
    r"""Decode ``\040`` and other octal escapes (space, tab, newline, backslash, hash)."""
    return _ESCAPE.sub(lambda match: bytes([int(match[1], 8)]), text)


def parse(text: bytes) -> list[Mount]:
    """Return the mounts in the order of the file: of several on one mount point the last is the topmost.

    Lines that are no mount are left out.
    """
    # Not splitlines(): the kernel escapes the newline in names, but no carriage return and no form feed, and
    # every user may mount under such a name in a namespace of their own.
    return [mount for line in text.split(b"\n") if (mount := _parse_line(line)) is not None]


def _parse_line(line: bytes) -> Mount | None:
    try:
        return _mount_of(line.split(b" "))
    except (ValueError, IndexError):
        # One line of a foreign namespace must not hide the mounts of all the others from a search.
        return None


def _mount_of(fields: list[bytes]) -> Mount:
    # Any number of optional fields precede the dash.
    dash = fields.index(b"-", 6)
    major, minor = fields[2].split(b":")
    return Mount(
        mount_id=int(fields[0]),
        parent_id=int(fields[1]),
        device=(int(major), int(minor)),
        root=_unescape(fields[3]),
        mount_point=_unescape(fields[4]),
        options=fields[5],
        fs_type=_unescape(fields[dash + 1]),
        source=_unescape(fields[dash + 2]) if len(fields) > dash + 2 else b"",
        super_options=fields[dash + 3] if len(fields) > dash + 3 else b"",
        peers=_group(fields[6:dash], b"shared:"),
        master=_group(fields[6:dash], b"master:"),
    )


def _group(optional: list[bytes], tag: bytes) -> int:
    return next((int(field[len(tag) :]) for field in optional if field.startswith(tag)), 0)


def read(process: Path = Path("/proc/self")) -> list[Mount]:
    """Return the mounts that ``process`` sees. FileNotFoundError or ProcessLookupError when it has ended."""
    try:
        return parse((process / "mountinfo").read_bytes())
    except OSError as error:
        # A zombie, which has left its namespaces (fs/proc_namespace.c, mounts_open_common).
        if error.errno == errno.EINVAL:
            raise ProcessLookupError(errno.ESRCH, "the process has ended", str(process)) from None
        raise


class MountTable:
    """The process's own mounts, read again when they have changed. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._fd = -1
        self._poll = select.poll()
        self._mounts: list[Mount] = []

    def read(self) -> list[Mount]:
        """Return the mounts as they are now."""
        with self._lock:
            # The kernel reports a change once, to the poll that follows it (proc_pid_mounts(5)).
            if self._fd < 0:
                self._fd = os.open("/proc/self/mountinfo", os.O_RDONLY | os.O_CLOEXEC)
                self._poll.register(self._fd, select.POLLPRI)
            elif not self._poll.poll(0):
                return self._mounts
            self._mounts = read()
            return self._mounts

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)


def is_served_by_a_user(fs_type: bytes, super_options: bytes) -> bool:
    """Return whether a process of an ordinary user serves a file system (fusermount3(1)).

    Such a process may never answer, and decides what root sees there.
    """
    if not fs_type.startswith(b"fuse"):
        return False
    options = dict(option.partition(b"=")[::2] for option in super_options.split(b","))
    # user_id is the user who mounted it, whose process serves it (mount.fuse(8)).
    return options.get(b"user_id", b"0") not in (b"0", b"%d" % os.geteuid())


def mounts_at(path: bytes, mounts: list[Mount]) -> list[Mount]:
    """Return the mounts whose mount point is exactly ``path``, bottom first."""
    return [mount for mount in mounts if mount.mount_point == path]


def mounted_inside(path: bytes, mounts: list[Mount]) -> list[bytes]:
    """Return the mount points of what is mounted directly on the topmost mount at ``path``; it would go with a lazy unmount."""
    found = mounts_at(path, mounts)
    return [mount.mount_point for mount in mounts if found and mount.parent_id == found[-1].mount_id]


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
# stx_mask, then stx_dev_major, stx_dev_minor and stx_mnt_id.
_STATX_FIELDS = struct.Struct("=I132xIIQ")


@cache
def _statx_call() -> tuple[Callable[..., int] | None, Callable[[], Any]]:
    """Return statx(2), which C libraries of before 2018 lack, and the type of its result."""
    # Imported here: who reads mountinfo alone needs no ctypes (2 ms).
    import ctypes

    return getattr(ctypes.CDLL(None, use_errno=True), "statx", None), ctypes.c_char * 256


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
        if name in self.hidden:
            return True
        place, own = self._place_at(name), self._own()
        if place is None or place == own:
            return False
        if place[1] != own[1]:
            return True
        try:
            return stat.S_ISDIR(os.stat(name, dir_fd=self._fd, follow_symlinks=False).st_mode)
        except OSError:
            return True

    def before(self, name: bytes, fd: int) -> bool:
        """Return whether a descriptor that was opened by a name of the directory is on another mount."""
        return name in self.hidden or is_beyond(fd, self._own())

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


def border_names(fd: int, mounts: list[Mount]) -> list[bytes]:
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
    """Return the device number and the mount id of a descriptor: two directories that differ have a border between them.

    For a file the mount alone counts: overlayfs gives it the device of its layer.
    """
    found = _statx(fd, b"")
    return found if found is not None else (os.fstat(fd).st_dev, _mount_id_of_fdinfo(fd))


def is_beyond(fd: int, place: tuple[int, int]) -> bool:
    """Return whether a border lies between what a descriptor is open on and the directory that it is in, at ``place``."""
    found = place_of(fd)
    return found != place and (found[1] != place[1] or stat.S_ISDIR(os.fstat(fd).st_mode))


def _statx(fd: int, name: bytes) -> tuple[int, int] | None:
    """Return device number and mount id; None where there is no such name, or the kernel does not tell."""
    call, make_buffer = _statx_call()
    if call is None:
        return None
    # Asked for each existing name of a restore: the type is made once, and one call takes it apart (3 us in place of 4).
    buffer = make_buffer()
    # No attribute is asked for: FUSE refuses attributes to callers that its user did not admit, root included, but tells the mount.
    if call(fd, name, _FLAGS | (_AT_EMPTY_PATH if not name else 0), 0, buffer) != 0:
        return None
    mask, major, minor, mount = _STATX_FIELDS.unpack_from(buffer)
    if not mask & _STATX_MNT_ID:
        return None
    return os.makedev(major, minor), mount


def _mount_id_of_fdinfo(fd: int) -> int:
    with open(f"/proc/self/fdinfo/{fd}", "rb") as file:
        for line in file:
            if line.startswith(b"mnt_id:"):
                return int(line[7:])
    raise CiuicError("/proc/self/fdinfo does not name the mount of a descriptor", hint="is /proc mounted?")
