"""Mount an overlay over its own directory, detach it, and tell which mounts there are.

Guarantees: a mount is made over exactly the directory whose backing descriptor was opened before; what is
mounted is read from /proc/self/mountinfo and never asked of the mount itself, because a dead one answers
ENOTCONN and a hung one does not answer. This module does not know what serves a mount.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple, TypeVar

from ciuic import SNAPSHOTS_DIR_NAME
from ciuic.errors import CiuicError, UsageError
from ciuic.fuse_layer.system import syscalls
from ciuic.protocol import state_directory
from ciuic.system.disk import PIN, PIN_DIRECTORY
from ciuic.system.mountinfo import is_served_by_a_user, mount_id

FS_TYPE = "fuse.ciuic"
SNAPSHOTS_FS_TYPE = "fuse.ciuic-snapshots"
"""Type of the view that the daemon mounts on `.snapshots` of a root: it goes with the overlay."""

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MS_POSIXACL = 1 << 16
_MS_BIND, _MS_MOVE, _MS_REC, _MS_PRIVATE, _MS_SHARED = 1 << 12, 1 << 13, 1 << 14, 1 << 18, 1 << 20
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
# A bound for the loop over views that lie on top of one another.
_DETACH_TRIES = 10
_DETACH_SECONDS = 0.2
_MAX_STACKED = 16
# Flags of the backing mount that the overlay has to have, too: it would lift the operator's restriction
# otherwise.
_KEPT_FLAGS = (
    (os.ST_RDONLY, _MS_RDONLY),
    (os.ST_NOSUID, _MS_NOSUID),
    (os.ST_NODEV, _MS_NODEV),
    (os.ST_NOEXEC, _MS_NOEXEC),
)

_libc = ctypes.CDLL(None, use_errno=True)

Liveness = Literal["alive", "dead", "hung"]
T = TypeVar("T")


class AlreadyMounted(CiuicError):
    """An overlay of ours lies over the directory already."""


class MountsInside(CiuicError):
    """File systems that others mounted inside an overlay would be lost with it."""


class NotTheRoot(UsageError):
    """A path leads to another directory than it did when it was configured."""


class MountEntry(NamedTuple):
    """A line of mountinfo (proc(5)); paths as the kernel knows them, unescaped."""

    mount_id: int
    parent_id: int
    device: str
    """``major:minor``; the minor number of a FUSE mount names its connection."""
    mount_point: bytes
    fs_type: str
    source: bytes
    super_options: bytes = b""
    root: bytes = b"/"
    """Directory of the file system that is mounted."""


def _read_mounts(mountinfo: str = "/proc/self/mountinfo") -> list[MountEntry]:
    """Return all mounts that this process can see, in the order in which they were made."""
    with open(mountinfo, "rb") as file:
        return parse_mountinfo(file.read())


def parse_mountinfo(text: bytes) -> list[MountEntry]:
    """Return the entries of a mountinfo file; optional fields are skipped (proc(5): ended by a lone hyphen)."""
    entries = []
    # Not splitlines(): the kernel escapes the newline in names, but no carriage return and no form feed.
    for line in text.split(b"\n"):
        before, _, after = line.partition(b" - ")
        head, tail = before.split(b" "), after.split(b" ")
        if len(head) < 6 or len(tail) < 2:
            continue
        entries.append(
            MountEntry(
                int(head[0]),
                int(head[1]),
                head[2].decode(),
                _unescape(head[4]),
                # A user who mounts by fusermount3(1) chooses the subtype, any bytes.
                os.fsdecode(_unescape(tail[0])),
                _unescape(tail[1]),
                tail[2] if len(tail) > 2 else b"",
                _unescape(head[3]),
            )
        )
    return entries


def _unescape(field: bytes) -> bytes:
    return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)


def mount_at(path: str | bytes, mounts: list[MountEntry] | None = None) -> MountEntry | None:
    """Return the topmost mount whose mount point is ``path``, an absolute path without symlinks; None without one."""
    wanted = os.path.normpath(os.fsencode(path))
    # Compared with the table and not asked by stat(2), which a hung mount would never answer.
    found = [entry for entry in (_read_mounts() if mounts is None else mounts) if entry.mount_point == wanted]
    if len(found) < 2:
        return found[0] if found else None
    # Stacked mounts name each other as parents: the top one is the parent of none.
    parents = {entry.parent_id for entry in found}
    return next((entry for entry in found if entry.mount_id not in parents), found[-1])


def overlay_at(path: str | bytes, mounts: list[MountEntry] | None = None) -> MountEntry | None:
    """Return the overlay of ours that lies over ``path``, dead or alive; None when the topmost mount there is not ours."""
    entry = mount_at(path, mounts)
    return entry if entry is not None and entry.fs_type == FS_TYPE else None


def overlay_places() -> list[bytes]:
    """Return the mount points of all overlays of ours that this process can see."""
    return [entry.mount_point for entry in mounts_of(FS_TYPE)]


def mounts_of(fs_type: str) -> list[MountEntry]:
    """Return all mounts of a type that this process can see, in the order in which they were made."""
    return [entry for entry in _read_mounts() if entry.fs_type == fs_type]


def overlay_over(backing_fd: int) -> MountEntry | None:
    """Return the overlay of ours that lies over an open plain directory, wherever that is by now; None without one."""
    # A directory above it may be renamed at any time, and itself until something is mounted there.
    return overlay_at(os.readlink(b"/proc/self/fd/%d" % backing_fd))


def mounts_inside(overlay: MountEntry, mounts: list[MountEntry] | None = None) -> list[MountEntry]:
    """Return the mounts that others made directly on an overlay; those inside these go where they go.

    What lies below the same path in the plain directory, hidden by the overlay, is not among them.
    """
    entries = _read_mounts() if mounts is None else mounts
    return [
        entry
        for entry in entries
        if entry.parent_id == overlay.mount_id and entry.fs_type != SNAPSHOTS_FS_TYPE
    ]


def mounts_in_overlay_at(path: str | bytes) -> list[MountEntry]:
    """Return the mounts that others made directly on the overlay over ``path``; none without an overlay."""
    mounts = _read_mounts()
    overlay = overlay_at(path, mounts)
    return mounts_inside(overlay, mounts) if overlay is not None else []


class MovedMounts:
    """Mounts that were inside an overlay and are now in the same places of the plain directory below it.

    Processes that use such a mount notice nothing: it stays the same mount. Until the overlay is unmounted, paths lead to it
    through the overlay.
    """

    def __init__(self, root: str | bytes, backing_fd: int) -> None:
        """Move them.

        Args:
            root: path of the root.
            backing_fd: descriptor of the plain directory, below the overlay.

        Raises:
            MountsInside: one of them cannot be moved; all are where they were.
        """
        self._root = os.path.normpath(os.fsencode(root))
        self._backing_fd = backing_fd
        self._moved: list[tuple[int, bytes]] = []
        self._rebound: list[tuple[bytes, bytes]] = []
        """(directory, name) of bind mounts of the overlay itself, which are ones of the plain directory now."""
        overlay = overlay_at(self._root)
        inside = mounts_inside(overlay) if overlay is not None else []
        if not inside:
            return
        place = self._root
        try:
            # MS_MOVE refuses a mount whose parent is shared, and where systemd runs every mount is.
            self._on_overlay(lambda fd: _change_mount(fd, _MS_PRIVATE))
            for entry in inside:
                place = entry.mount_point
                name = os.path.relpath(place, self._root)
                if overlay is not None and entry.device == overlay.device:
                    self._rebind(entry, name)
                else:
                    self._move(name, backing_fd)
                    if entry in mounts_in_overlay_at(self._root):
                        # What was moved was mounted over it, and would cover it in the plain directory.
                        raise OSError(errno.EBUSY, "another file system is mounted over it")
        except OSError as error:
            with suppress(OSError):
                self.back()
            raise MountsInside(
                f"{os.fsdecode(place)} is mounted inside the overlay of {os.fsdecode(self._root)} and cannot be moved "
                f"to the plain directory: {error.strerror}",
                hint="unmount it there first",
            ) from error

    def _move(self, name: bytes, backing_fd: int) -> None:
        # The descriptor of a mount is that of its root, and does not keep the overlay busy.
        fd = self._on_overlay(lambda overlay_fd: _open_inside(overlay_fd, name))
        try:
            _move_mount(fd, backing_fd, name)
        except BaseException:
            os.close(fd)
            raise
        self._moved.append((fd, name))

    def _rebind(self, entry: MountEntry, name: bytes) -> None:
        """Replace a bind mount of the overlay in itself by one of the plain directory in itself.

        Moved below the plain directory it would lead the next worker into the overlay again, which waited for itself.
        """
        # First, and hidden by the overlay: where it fails nothing has changed.
        _bind(self._backing_fd, entry.root, name)
        if not unmount(entry.mount_point):
            _detach_at(self._backing_fd, name)
            raise OSError(errno.EBUSY, os.strerror(errno.EBUSY))
        self._rebound.append((entry.root, name))

    def back(self) -> None:
        """Move all of them to the overlay again, because it stays.

        Where the mount below the plain directory is shared the kernel refuses that (EINVAL). They stay there then, and the
        overlay shows them like everything that was mounted before it.

        Raises:
            OSError: one of them could not be moved for another reason.
        """

        def work(overlay_fd: int) -> None:
            try:
                while self._moved:
                    _move_mount(self._moved[-1][0], overlay_fd, self._moved[-1][1])
                    os.close(self._moved.pop()[0])
            except OSError as error:
                if error.errno != errno.EINVAL:
                    raise
            while self._rebound:
                directory, name = self._rebound.pop()
                with suppress(OSError):
                    _detach_at(self._backing_fd, name)
                _bind(overlay_fd, directory, name)
            # Containers that follow this namespace see later mounts in it again.
            _change_mount(overlay_fd, _MS_SHARED)

        self._on_overlay(work)

    def close(self) -> None:
        """Leave them where they are now."""
        while self._moved:
            os.close(self._moved.pop()[0])

    def _on_overlay(self, work: Callable[[int], T]) -> T:
        fd = _open_overlay(self._root, FS_TYPE)
        try:
            return work(fd)
        finally:
            # It would keep the overlay busy.
            os.close(fd)


def _open_inside(directory_fd: int, name: bytes) -> int:
    """Return an O_PATH descriptor of the path ``name`` below a directory (b"": itself); no symbolic link is followed."""
    fd = os.dup(directory_fd)
    for part in name.split(b"/") if name else ():
        try:
            deeper = os.open(part, PIN, dir_fd=fd)
        finally:
            os.close(fd)
        fd = deeper
    return fd


def _move_mount(mount_fd: int, directory_fd: int, name: bytes) -> None:
    """Move the mount whose root is ``mount_fd`` to the path ``name`` below a directory."""
    target_fd = _open_inside(directory_fd, name)
    try:
        target = b"/proc/self/fd/%d" % target_fd
        if _libc.mount(b"/proc/self/fd/%d" % mount_fd, target, None, ctypes.c_ulong(_MS_MOVE), None) != 0:
            _raise_errno(name)
    finally:
        os.close(target_fd)


def _bind(top_fd: int, directory: bytes, name: bytes) -> None:
    """Mount one directory below ``top_fd`` over another one."""
    target_fd = _open_inside(top_fd, name)
    try:
        source_fd = _open_inside(top_fd, directory.strip(b"/"))
        try:
            source, target = b"/proc/self/fd/%d" % source_fd, b"/proc/self/fd/%d" % target_fd
            if _libc.mount(source, target, None, ctypes.c_ulong(_MS_BIND), None) != 0:
                _raise_errno(name)
        finally:
            os.close(source_fd)
    finally:
        os.close(target_fd)


def _detach_at(top_fd: int, name: bytes) -> None:
    fd = _open_inside(top_fd, name)
    try:
        if mount_id(fd) != mount_id(top_fd) and _libc.umount2(b"/proc/self/fd/%d" % fd, _MNT_DETACH) != 0:
            _raise_errno(name)
    finally:
        os.close(fd)


def _change_mount(fd: int, flag: int) -> None:
    path = b"/proc/self/fd/%d" % fd
    if _libc.mount(None, path, None, ctypes.c_ulong(flag), None) != 0:
        _raise_errno(path)


def probe(path: str | bytes, timeout_seconds: float) -> Liveness:
    """Return whether what is mounted at ``path`` answers.

    Returns:
        ``dead``: its server is gone (ENOTCONN). ``hung``: no answer in time; the thread that asked stays
        behind until the server answers or its connection is aborted.
    """
    # In a thread of its own, because a call into a hung mount waits without being interruptible.
    answer: list[Liveness] = []

    def ask() -> None:
        try:
            os.statvfs(path)
        except OSError as error:
            answer.append("dead" if error.errno in (errno.ENOTCONN, errno.ECONNABORTED) else "alive")
        else:
            answer.append("alive")

    thread = threading.Thread(target=ask, name="mount-probe", daemon=True)
    thread.start()
    thread.join(timeout_seconds)
    return answer[0] if answer else "hung"


def open_backing(path: str | bytes) -> int:
    """Return an O_PATH descriptor of the directory at ``path``, through which it stays reachable under a mount.

    The path was free of symbolic links when it was configured. The owner of a directory on the way can have
    put one there since, and would have root mount over any directory of the host.

    Raises:
        NotTheRoot: a symbolic link is on the way, or another user serves the file system (fusermount3(1)).
        AlreadyMounted: an overlay of ours lies there: its descriptor would lead through the overlay, not
            beside it.
        OSError: it cannot be opened.
    """
    fd = os.open(path, PIN_DIRECTORY)
    try:
        # O_NOFOLLOW refuses a link in the last place alone. The descriptor's own name shows one on the way.
        reached = os.readlink(b"/proc/self/fd/%d" % fd)
        if reached != os.path.normpath(os.fsencode(path)):
            raise NotTheRoot(
                f"{os.fsdecode(path)} leads to {os.fsdecode(reached)}",
                hint="a symbolic link was put on the way: protect the directory itself",
            )
        entry = mount_of(fd)
        if entry is not None and is_served_by_a_user(os.fsencode(entry.fs_type), entry.super_options):
            raise NotTheRoot(
                f"{os.fsdecode(path)} lies on a FUSE file system that a user serves, not root",
                hint="protect the directories that its files are kept in",
            )
        if overlay_at(reached) is not None:
            raise AlreadyMounted(
                f"{os.fsdecode(path)} is already mounted by ciuic",
                hint="stop the daemon that serves it, or unmount it",
            )
    except BaseException:
        os.close(fd)
        raise
    return fd


def mount_of(fd: int) -> MountEntry | None:
    """Return the mount that an open descriptor is on; None for a mount that is detached."""
    wanted = mount_id(fd)
    return next((entry for entry in _read_mounts() if entry.mount_id == wanted), None)


def open_fuse() -> int:
    """Return a descriptor of /dev/fuse for one mount."""
    return os.open("/dev/fuse", os.O_RDWR)


def set_readahead(device: str, size_bytes: int) -> None:
    """Set the readahead of the mount ``device`` (major:minor); nothing where sysfs is absent or read-only."""
    # INIT can only lower it. Best effort: in most containers sysfs is read-only.
    with suppress(OSError):
        Path(f"/sys/class/bdi/{device}/read_ahead_kb").write_text(str(size_bytes >> 10), encoding="ascii")


def mount_fuse(
    backing_fd: int,
    fs_type: str = FS_TYPE,
    *,
    read_only: bool = False,
    for_others: bool = True,
    fuse_fd: int | None = None,
) -> int:
    """Mount a new FUSE connection over the directory ``backing_fd`` and return its /dev/fuse descriptor.

    nosuid, nodev, noexec and read-only are taken from the backing mount. ``fs_type`` tells what serves it;
    ``read_only`` also takes set-id bits and devices from it; with ``for_others`` other users may use it, as modes allow.
    ``fuse_fd`` is an open /dev/fuse to be used, which is closed after a failure.

    Raises:
        OSError: the kernel refuses; nothing is mounted then.
    """
    if fuse_fd is None:
        fuse_fd = open_fuse()
    # MS_POSIXACL makes the kernel leave the umask to the server, which alone knows whether a default ACL
    # overrides it (measured: without it mkdir arrives masked).
    flags = _MS_POSIXACL
    if read_only:
        flags |= _MS_RDONLY | _MS_NOSUID | _MS_NODEV
    options = f"fd={fuse_fd},rootmode=40000,user_id={os.getuid()},group_id={os.getgid()},default_permissions"
    if for_others:
        options += ",allow_other"
    try:
        kept = os.fstatvfs(backing_fd).f_flag
        for st_flag, ms_flag in _KEPT_FLAGS:
            if kept & st_flag:
                flags |= ms_flag
        # The target is named by the descriptor: a path may have been renamed since it was opened.
        target = b"/proc/self/fd/%d" % backing_fd
        if _libc.mount(b"ciuic", target, fs_type.encode(), ctypes.c_ulong(flags), options.encode()) != 0:
            _raise_errno(target)
    except BaseException:
        os.close(fuse_fd)
        raise
    return fuse_fd


def unmount(path: str | bytes, fs_type: str = FS_TYPE) -> bool:
    """Unmount the topmost mount of ours at ``path`` unless a process is in it or another mount is on it.

    Returns:
        True if it is unmounted, False if it is in use and as it was.

    Raises:
        OSError: EINVAL when no mount of ours is there.
    """
    target = os.path.normpath(os.fsencode(path))
    parent, name = os.path.split(target)
    # A descriptor of the mount itself would keep it busy. Its directory is compared with its path instead: somebody may
    # have put a symbolic link on the way.
    fd = os.open(parent, PIN_DIRECTORY)
    try:
        entry = mount_at(target)
        if os.readlink(b"/proc/self/fd/%d" % fd) != parent or entry is None or entry.fs_type != fs_type:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(target))
        if _libc.umount2(b"/proc/self/fd/%d/%b" % (fd, name), _UMOUNT_NOFOLLOW) == 0:
            return True
        if ctypes.get_errno() != errno.EBUSY:
            _raise_errno(target)
        return False
    finally:
        os.close(fd)


def detach(path: str | bytes, fs_type: str = FS_TYPE) -> None:
    """Detach the topmost mount of ours from ``path`` at once (MNT_DETACH); files that are open in it are served on.

    Raises:
        OSError: EINVAL when no overlay of ours is mounted there.
    """
    fd = _open_overlay(os.fsencode(path), fs_type)
    try:
        # Without UMOUNT_NOFOLLOW: the magic link of the descriptor is followed, and nothing else is.
        if _libc.umount2(b"/proc/self/fd/%d" % fd, _MNT_DETACH) != 0:
            _raise_errno(os.fsencode(path))
    finally:
        os.close(fd)


def new_mount(fs_type: str, before: Sequence[MountEntry], path: bytes) -> MountEntry | None:
    """Return the mount of a type that was made at ``path`` since `mounts_of` returned ``before``; None if it is gone already."""
    known = {one.mount_id for one in before}
    new = [one for one in mounts_of(fs_type) if one.mount_id not in known]
    id_ = _mount_id_at(path)
    # Wherever it is: a directory above may be renamed at any time. Of several that are elsewhere none is known to be ours.
    return next((one for one in new if one.mount_id == id_), new[0] if len(new) == 1 else None)


def _mount_id_at(path: bytes) -> int | None:
    """Return the id of the mount that a path leads to, through symbolic links as well; None if it leads nowhere.

    O_PATH asks the file system of the mount nothing, which this process may serve itself.
    """
    try:
        fd = os.open(path, os.O_PATH)
    except OSError:
        return None
    try:
        with open(f"/proc/self/fdinfo/{fd}") as facts:
            return next((int(line.split()[1]) for line in facts if line.startswith("mnt_id:")), None)
    finally:
        os.close(fd)


def mount_now(mount: MountEntry) -> MountEntry | None:
    """Return the entry that a mount has now, with its present path; None if it is gone."""
    same = (mount.mount_id, mount.device)
    return next((one for one in mounts_of(mount.fs_type) if (one.mount_id, one.device) == same), None)


def detach_mount(mount: MountEntry) -> None:
    """Detach a mount wherever it is now; do nothing if it is gone.

    Raises:
        OSError: it cannot be reached, as something is mounted over it or its path changes all the time.
    """
    for last in (*(False,) * (_DETACH_TRIES - 1), True):
        entry = mount_now(mount)
        if entry is None:
            return
        try:
            detach(entry.mount_point, entry.fs_type)
        except OSError:
            # A directory above was renamed in between.
            if last:
                raise
            time.sleep(_DETACH_SECONDS)


def detach_view(root: str) -> None:
    """Detach the view of its snapshots from a root, whether anybody serves it or not; do nothing where there is none."""
    place = os.path.join(os.fsencode(os.path.normpath(root)), SNAPSHOTS_DIR_NAME)
    for _ in range(_MAX_STACKED):
        # Looked at first: the name of a mount is in the kernel's memory, and the walk to it waits for nobody who changes the root.
        entry = mount_at(place)
        if entry is None or entry.fs_type != SNAPSHOTS_FS_TYPE:
            return
        detach(place, SNAPSHOTS_FS_TYPE)


def detach_keeping_inside(path: str | bytes) -> list[str]:
    """Detach a dead overlay from ``path``, and mount what others had mounted inside it over the plain directory again.

    These mounts are copies: nobody who has a file open in the old ones loses it, but a working directory there has no path any
    more. They cannot be moved, because nothing leads to the plain directory while the overlay is over it.

    Returns:
        Paths of what could not be kept, in words.
    """
    target = os.path.normpath(os.fsencode(path))
    overlay = overlay_at(target)
    inside = mounts_inside(overlay) if overlay is not None else []
    lost: list[str] = []
    kept: list[tuple[bytes, int]] = []
    rebound: list[tuple[bytes, bytes]] = []
    plain_fd = -1
    try:
        for entry in inside:
            name = os.path.relpath(entry.mount_point, target)
            if overlay is not None and entry.device == overlay.device:
                # A bind mount of the dead overlay itself.
                rebound.append((entry.root, name))
                continue
            try:
                kept.append((name, _copy_of(target, name)))
            except OSError as error:
                lost.append(f"{os.fsdecode(entry.mount_point)} ({os.strerror(error.errno or 0)})")
        detach(target)
        if kept or rebound:
            plain_fd = os.open(target, PIN_DIRECTORY)
        for directory, name in rebound:
            try:
                _bind(plain_fd, directory, name)
            except OSError as error:
                lost.append(f"{os.fsdecode(os.path.join(target, name))} ({os.strerror(error.errno or 0)})")
        for name, fd in kept:
            try:
                place_fd = _open_inside(plain_fd, name)
                try:
                    syscalls.attach_mount(fd, place_fd)
                finally:
                    os.close(place_fd)
            except OSError as error:
                lost.append(f"{os.fsdecode(os.path.join(target, name))} ({os.strerror(error.errno or 0)})")
    finally:
        for fd in (plain_fd, *(fd for _, fd in kept)):
            if fd >= 0:
                os.close(fd)
    return lost


def _copy_of(root: bytes, name: bytes) -> int:
    # The kernel has the names on the way to a mount point, so that the walk works although nobody answers.
    overlay_fd = _open_overlay(root, FS_TYPE)
    try:
        fd = _open_inside(overlay_fd, name)
    finally:
        os.close(overlay_fd)
    try:
        # The end of a shared mount inside this one would be that of its copy.
        _change_mount(fd, _MS_PRIVATE | _MS_REC)
        return syscalls.clone_mount(fd)
    finally:
        os.close(fd)


def _open_overlay(path: bytes, fs_type: str) -> int:
    """Return an O_PATH descriptor of the topmost mount of ours at ``path``; OSError (EINVAL) where none is."""
    # The mount is named by a descriptor that is compared with mountinfo: the owner of a directory on the way
    # may put a symbolic link there at any time. The comparison asks nothing of the mount, because a dead one
    # would answer ENOTCONN.
    fd = os.open(path, PIN)
    try:
        entry = mount_of(fd)
        if entry is None or entry.fs_type != fs_type or entry.mount_point != os.path.normpath(path):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), os.fsdecode(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def remove_state(path: str | bytes) -> None:
    """Remove the state directory of a root that is no longer protected; under a mount of ours do nothing.

    What cannot be removed stays, and the next session empties it.
    """
    # The root itself may be gone, or be another directory by now.
    with suppress(OSError, CiuicError):
        fd = open_backing(path)
        try:
            state_directory.remove_state(fd)
        finally:
            os.close(fd)


def _raise_errno(path: bytes) -> None:
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), os.fsdecode(path))
