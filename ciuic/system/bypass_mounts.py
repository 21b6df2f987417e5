"""Find mounts by which a directory is reached without going through the overlay that is (or will be) mounted over it.

A container that bind-mounted a root, or a directory in it or above it, before the overlay was mounted keeps the plain directory. So
does a bind mount of the root, or of a part of it, at another place of the host. Through a bind mount inside the root, changes pass
the overlay, but under a name that snapshots do not enter.

Guarantees: only the text of /proc (readlink and mountinfo) is used, so no mounted file system can block the search. One process stands
for each mount namespace; one whose processes may not be examined is left out, and so is one that no process is in. A mount that
cannot be written through is left out. Processes that hold descriptors from before the overlay are the subject of bypass.py.

References:
    mount_namespaces(7), on propagation; proc_pid_mountinfo(5)
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.system import mountinfo
from ciuic.system.bypass import (
    OVERLAY_FS_TYPE,
    Location,
    is_below,
    joined,
    locate,
    mount_beneath,
    name_inside,
    real_path,
)
from ciuic.system.mountinfo import Mount

REMEDY: Final = (
    "end the container and start it again now that the root is protected, or unmount the bind mount; "
    "until then captures compare the whole tree (docs/containers.md)"
)


class BypassingMount(NamedTuple):
    """A place at which a part of a root is reached without its overlay."""

    place: bytes
    """Where, as the processes of the mount namespace name it."""
    shows: bytes
    """The root, or what of it is reached there, as this process names it."""
    pid: int
    """A process of the mount namespace."""
    command: str
    elsewhere: bool
    """True if this process is in another mount namespace."""

    def __str__(self) -> str:
        """Say what is reached and where."""
        place, shows = (name.decode("utf-8", "backslashreplace") for name in (self.place, self.shows))
        owner = f" in the mount namespace of process {self.pid} ({self.command})" if self.elsewhere else ""
        return f"{shows} at {place}{owner}"


class _Namespace(NamedTuple):
    """The mounts that a process sees."""

    identity: str
    pid: int
    mounts: list[Mount]


def find_bypassing_mounts(
    root: Path | str | bytes, *, ignore_pids: Collection[int] = (), proc: Path = Path("/proc")
) -> list[BypassingMount]:
    """Return the mounts through which the backing directory of ``root``, or a part of it, can be written past the overlay.

    The result is the same before and after the overlay is mounted: before, it is computed which mounts the overlay will be propagated
    to. In a chroot where /proc/self/mountinfo does not show the root's file system, nothing can be found.

    Args:
        root: absolute path, covered by ciuic's overlay or not.
        ignore_pids: processes that stand for no mount namespace.
        proc: mount point of proc.
    """
    path = real_path(root)
    own = mountinfo.read(proc / "self")
    try:
        location = locate(path, own)
    except ValueError:
        return []
    namespaces = _namespaces(proc, ignore_pids)
    covered = _receivers(path, location, own, [one.mounts for one in namespaces])
    here = os.readlink(proc / "self/ns/mnt")
    found = []
    for one in namespaces:
        ways = [
            (mount, place)
            for mount in one.mounts
            if mount.mount_id not in covered
            and (place := name_inside(location, mount)) is not None
            and not _is_read_only(mount)
            and _is_reached(mount, place, one.mounts)
        ]
        command = _command(proc / str(one.pid)) if ways else ""
        for mount, place in ways:
            below = mount.root[len(location.path) :] if is_below(mount.root, location.path) else b""
            found.append(
                BypassingMount(place, joined(path, below), one.pid, command, elsewhere=one.identity != here)
            )
    return found


def _namespaces(proc: Path, ignore_pids: Collection[int]) -> list[_Namespace]:
    """Return what is seen in each mount namespace, by its first process that may be examined."""
    seen: dict[tuple[str, str], _Namespace] = {}
    for pid in sorted(int(name) for name in os.listdir(proc) if name.isdigit()):
        if pid in ignore_pids:
            continue
        process = proc / str(pid)
        try:
            # A chrooted process sees a part of its namespace's mounts.
            view = os.readlink(process / "ns/mnt"), os.readlink(process / "root")
            if view not in seen and (view[0], "/") not in seen:
                seen[view] = _Namespace(view[0], pid, mountinfo.read(process))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            # It has ended, or belongs to another user.
            continue
    return [one for (identity, top), one in seen.items() if top == "/" or (identity, "/") not in seen]


def _receivers(path: bytes, location: Location, own: list[Mount], tables: Iterable[list[Mount]]) -> set[int]:
    """Return the mounts on which an overlay will appear when it is mounted over ``path``; none where it is mounted."""
    if any(mount.fs_type == OVERLAY_FS_TYPE for mount in mountinfo.mounts_at(path, own)):
        return set()
    target = mount_beneath(path, own)
    candidates = [
        mount
        for table in tables
        for mount in table
        if mount.device == location.device and is_below(location.path, mount.root)
    ]
    groups = {target.peers} - {0}
    while more := {mount.peers for mount in candidates if mount.master in groups and mount.peers} - groups:
        groups |= more
    return {target.mount_id} | {
        mount.mount_id for mount in candidates if groups & {mount.peers, mount.master}
    }


def _is_reached(mount: Mount, place: bytes, mounts: Sequence[Mount]) -> bool:
    """Return whether a path through a mount is not hidden by another mount, or hidden by overlays alone, which show what they hide."""
    on_it = [other for other in mounts if other.parent_id == mount.mount_id and other is not mount]
    if any(is_below(place, other.mount_point) for other in on_it):
        return False
    by_id = {other.mount_id: other for other in mounts}
    # Bounded: a table that is read while mounts change may have a cycle.
    for _ in mounts:
        parent = by_id.get(mount.parent_id)
        if parent is None or parent is mount:
            return True
        for other in mounts:
            hides = other.parent_id == parent.mount_id and other.fs_type != OVERLAY_FS_TYPE
            if (
                hides
                and other.mount_point != mount.mount_point
                and is_below(mount.mount_point, other.mount_point)
            ):
                return False
        mount = parent
    return True


def _command(process: Path) -> str:
    """Return the short name of a process; empty when it has ended."""
    # Not its command line: reading that waits for the process's memory map, which its owner can keep locked.
    try:
        return (process / "comm").read_bytes().strip().decode("utf-8", "backslashreplace")
    except (FileNotFoundError, ProcessLookupError):
        return ""


def _is_read_only(mount: Mount) -> bool:
    return any(b"ro" in options.split(b",") for options in (mount.options, mount.super_options))
