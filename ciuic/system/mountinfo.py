"""Parser of /proc/<pid>/mountinfo. No mounted file system is touched, so that a dead mount cannot block it.

Paths are bytes with the kernel's octal escapes decoded.

References:
    proc_pid_mountinfo(5)
"""

from __future__ import annotations

import os
import re
import select
import threading
from pathlib import Path
from typing import Final, NamedTuple

_ESCAPE = re.compile(rb"\\([0-7]{3})")
LAZY_FS_TYPE: Final = b"fuse.ciuic-restore"
"""Type of the mount over a directory that is being restored lazily (ciuic.lazy)."""
LAZY_RESTORE: Final = b"lazy-restore"
"""Directory in the container ``.ciuic-state`` of a directory that a lazy restore has not completed (ciuic.lazy)."""


class Mount(NamedTuple):
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


def unescape(text: bytes) -> bytes:
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
        root=unescape(fields[3]),
        mount_point=unescape(fields[4]),
        options=fields[5],
        fs_type=unescape(fields[dash + 1]),
        source=unescape(fields[dash + 2]) if len(fields) > dash + 2 else b"",
        super_options=fields[dash + 3] if len(fields) > dash + 3 else b"",
        peers=_group(fields[6:dash], b"shared:"),
        master=_group(fields[6:dash], b"master:"),
    )


def _group(optional: list[bytes], tag: bytes) -> int:
    return next((int(field[len(tag) :]) for field in optional if field.startswith(tag)), 0)


def read(process: Path = Path("/proc/self")) -> list[Mount]:
    """Return the mounts that ``process`` sees. FileNotFoundError or ProcessLookupError when it has ended."""
    return parse((process / "mountinfo").read_bytes())


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
