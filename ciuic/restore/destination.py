"""File operations below a directory descriptor, and how that descriptor is opened.

Guarantees: no operation follows a symbolic link, so a link that another user plants in the destination cannot redirect what is
written or removed: every step starts from the descriptor of a directory that was itself opened with O_NOFOLLOW.

The path to the destination is the caller's, so links on it are followed, but only those that belong to root, to the caller, or
to the owner of the directory that they lead to (the rule of Apache's SymLinksIfOwnerMatch). The owner of a destination therefore
cannot send a restore by root to a directory of another user, not even while it runs. Missing directories are created, but none
behind a link.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from typing import TYPE_CHECKING

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.errors import CiuicError
from ciuic.printable import one_line
from ciuic.repository.lookup import join
from ciuic.system.disk import PIN, READ_DIRECTORY, LinkedPath
from ciuic.system.mountinfo import LEFT_ALONE, MountBorders

if TYPE_CHECKING:
    import ctypes
    from random import Random

TEMPORARY_PREFIX = b".ciuic-restore-"
_RENAME_NOREPLACE = 1
_CHANGE_NAMES = stat.S_IWUSR | stat.S_IXUSR
# linux/fs.h
_FS_IOC_GETFLAGS = 0x80086601
_FS_APPEND_FL = 0x20
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


@cache
def _chosen() -> Random:
    # Imported here: a dry run, which makes no names, needs neither the module nor its digests.
    from random import Random

    # Temporary names need to differ, not to be secret: os.urandom for each name cost more than creating some of the files.
    chosen = Random(os.urandom(32))
    # A forked child would otherwise choose the same names as its parent.
    os.register_at_fork(after_in_child=lambda: chosen.seed(os.urandom(32)))
    return chosen


@cache
def _libc() -> ctypes.CDLL:
    # Imported here: a dry run needs no ctypes (2 ms).
    import ctypes

    return ctypes.CDLL(None, use_errno=True)


def stat_at(folder: int, name: bytes) -> os.stat_result | None:
    """Return the status of a name itself, None if there is no such name."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def open_directory(folder: int, name: bytes) -> int:
    """Open a directory. NotADirectoryError for anything else, a symbolic link included."""
    return os.open(name, READ_DIRECTORY, dir_fd=folder)


def lift_mode(fd: int) -> int | None:
    """Let the caller change names in its own directory, where the mode withholds that; return the mode to put back, None for none.

    Root needs no right of its own.
    """
    st = os.fstat(fd)
    if not may_lift(st) or st.st_mode & _CHANGE_NAMES == _CHANGE_NAMES:
        return None
    mode = stat.S_IMODE(st.st_mode)
    os.chmod(fd, mode | _CHANGE_NAMES)
    return mode


def may_lift(st: os.stat_result) -> bool:
    """Return whether the caller owns a directory and so may change its mode."""
    return 0 != st.st_uid == os.geteuid()


def open_below(folder: int, names: Sequence[bytes]) -> int:
    """Open the directory that these names lead to, step by step. OSError."""
    fd = os.dup(folder)
    for name in names:
        try:
            below = open_directory(fd, name)
        finally:
            os.close(fd)
        fd = below
    return fd


def proc_path(fd: int) -> bytes:
    """Return a path that leads to the inode of a descriptor, for system calls that take no O_PATH descriptor."""
    return f"/proc/self/fd/{fd}".encode("ascii")


def new_temporary_name(run: str) -> bytes:
    """Return a hidden name that no other restore uses; names of one run share a prefix."""
    # 48 random bits: the run's own 64 bits tell runs apart, these tell the names of one run apart.
    return TEMPORARY_PREFIX + f"{run}-{_chosen().getrandbits(48):012x}".encode("ascii")


def is_temporary(name: bytes, run: str) -> bool:
    """Return whether the name was made by `new_temporary_name` for this run."""
    return name.startswith(TEMPORARY_PREFIX + run.encode("ascii") + b"-")


def rename_new(source: int, old: bytes, folder: int, new: bytes) -> None:
    """Rename from one directory into another.

    Raises:
        FileExistsError: the new name is taken.
        OSError: the rename failed.
    """
    # Python has no wrapper for renameat2(2), which alone refuses a taken name in one step.
    if _libc().renameat2(source, old, folder, new, _RENAME_NOREPLACE) == 0:
        return
    import ctypes

    code = ctypes.get_errno()
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), new)
    # A file system without RENAME_NOREPLACE (renameat2(2), NOTES): check first, and accept the race.
    if stat_at(folder, new) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new, src_dir_fd=source, dst_dir_fd=folder)


def refusal(error: OSError) -> str:
    """Return an error in words, for EPERM with the likely reason."""
    text = error.strerror or str(error)
    # Root is refused little else; an overlay does not tell the flags.
    if text == os.strerror(errno.EPERM) and not os.geteuid():
        text += ": it or its directory may be immutable or append-only (chattr +i, +a)"
    return text


def is_append_only(folder: int) -> bool:
    """Return whether names of a directory cannot be renamed or removed (chattr +a), as far as its file system tells."""
    # The kernel writes an int, where the number of the call says long.
    try:
        flags = int.from_bytes(fcntl.ioctl(folder, _FS_IOC_GETFLAGS, bytes(8))[:4], sys.byteorder)
    except OSError:
        return False
    return bool(flags & _FS_APPEND_FL)


def unlink_if_there(folder: int, name: bytes) -> None:
    """Remove a name if it exists. OSError."""
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


class Remover(msgspec.Struct):
    """Removes trees, sparing what must be spared, and never across the border of a mount."""

    spared_inodes: frozenset[tuple[int, int]] = frozenset()
    """(device, inode) of directories that stay, with everything below."""
    spared: Callable[[bytes, bool], bool] | None = None
    """Function of (source path, is a directory) that returns True for what stays, with everything below."""
    dry_run: bool = False
    failures: list[tuple[bytes, str]] = []
    """(path, reason) of each name that could not be removed."""
    stays: Callable[[bytes], bool] | None = None
    """Function of a source path that returns True for a directory that stays itself, whatever is removed below it."""
    removed_below: list[bytes] = []
    """Paths of what was removed from directories that stay: the tops alone."""

    def remove(self, folder: int, name: bytes, path: bytes, source_path: bytes) -> bool:
        """Remove ``name`` from ``folder``; return whether it is gone. The parents of what is spared stay, silently."""
        st = stat_at(folder, name)
        if st is None:
            return True
        borders = MountBorders(folder)
        if not stat.S_ISDIR(st.st_mode):
            return self._leaf(folder, borders, name, path, source_path)
        # A stack instead of a recursion: directories may be thousands deep.
        stack: list[_Level] = []
        gone = self._descend(stack, folder, borders, name, path, source_path)
        try:
            while stack:
                gone = self._step(stack)
        finally:
            for level in stack:
                level.close()
        return gone

    def _leaf(self, folder: int, borders: MountBorders, name: bytes, path: bytes, source_path: bytes) -> bool:
        if self.spared is not None and self.spared(source_path, False):
            return False
        if borders.at(name):
            self.failures.append((path, LEFT_ALONE))
            return False
        if self.dry_run:
            return True
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.failures.append((path, f"it could not be removed: {refusal(error)}"))
            return False
        return True

    def _descend(
        self,
        stack: list[_Level],
        folder: int,
        borders: MountBorders,
        name: bytes,
        path: bytes,
        source_path: bytes,
    ) -> bool:
        """Push a directory on the stack; return False if it stays as it is."""
        # The state of a root (undo log, tracking) is never the restore's to remove.
        if name == STATE_DIR_NAME or (self.spared is not None and self.spared(source_path, True)):
            return False
        try:
            fd = open_directory(folder, name)
        except OSError as error:
            self.failures.append((path, f"it could not be removed: {refusal(error)}"))
            return False
        # Of the descriptor and not of the name, which may lead elsewhere by now.
        st = os.fstat(fd)
        if borders.before(name, fd):
            if not self._stays(source_path):
                self.failures.append((path, LEFT_ALONE))
        elif (st.st_dev, st.st_ino) not in self.spared_inodes:
            # Put back by `_Level.close`; EROFS or EPERM is met again, and named, by the first removal.
            lifted = None
            if not self.dry_run:
                with suppress(OSError):
                    lifted = lift_mode(fd)
            above = stack[-1] if stack else None
            linked = LinkedPath(path, above.path if above is not None else None)
            linked_source = LinkedPath(source_path, above.source_path if above is not None else None)
            # Listed by a path of bytes: os.listdir(fd) would return text.
            names = iter(os.listdir(proc_path(fd)))
            stack.append(_Level(fd, folder, name, linked, linked_source, MountBorders(fd), names, lifted))
            return True
        os.close(fd)
        return False

    def _step(self, stack: list[_Level]) -> bool:
        """Treat the next name; return whether it is gone."""
        level = stack[-1]
        name = next(level.names, None)
        if name is not None:
            path, source_path = join(bytes(level.path), name), join(bytes(level.source_path), name)
            st = stat_at(level.fd, name)
            if st is None:
                return True
            if stat.S_ISDIR(st.st_mode):
                gone = self._descend(stack, level.fd, level.borders, name, path, source_path)
            else:
                gone = self._leaf(level.fd, level.borders, name, path, source_path)
                if gone:
                    level.gone.append(path)
            level.empty = level.empty and gone
            return gone
        stack.pop().close()
        gone = level.empty and not self._stays(bytes(level.source_path)) and self._rmdir(level)
        if not gone:
            self.removed_below += level.gone
        if stack:
            stack[-1].empty = stack[-1].empty and gone
            if gone:
                stack[-1].gone.append(bytes(level.path))
        return gone

    def _stays(self, source_path: bytes) -> bool:
        return self.stays is not None and self.stays(source_path)

    def _rmdir(self, level: _Level) -> bool:
        if self.dry_run:
            return True
        try:
            os.rmdir(level.name, dir_fd=level.folder)
        except OSError as error:
            self.failures.append((bytes(level.path), f"it could not be removed: {refusal(error)}"))
            return False
        return True


class _Level(msgspec.Struct):
    """A directory being emptied."""

    fd: int
    folder: int
    name: bytes
    path: LinkedPath
    source_path: LinkedPath
    borders: MountBorders
    names: Iterator[bytes]
    lifted: int | None
    """Mode to put back."""
    empty: bool = True
    gone: list[bytes] = []
    """Paths of the names that were removed."""

    def close(self) -> None:
        if self.lifted is not None:
            with suppress(OSError):
                os.chmod(self.fd, self.lifted)
        os.close(self.fd)


# The kernel follows as many in one path (path_resolution(7)).
_MAX_LINKS = 40


def open_way(path: bytes, *, make: bool = False) -> int:
    """Open the directory at an absolute path for reading; ``make`` creates missing directories.

    Raises:
        FileNotFoundError: the directory does not exist, without ``make``.
        CiuicError: a symbolic link on the path must not be followed.
        OSError: a step of the path cannot be opened.
    """
    at = _PathWalk(path).walk(os.open("/", PIN | os.O_DIRECTORY), path, make)
    # O_PATH descriptors cannot be listed or synced, so the directory is opened again, by ".".
    try:
        return os.open(".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=at)
    finally:
        os.close(at)


def made_directory(path: bytes) -> bytes:
    """Return the path without links of a directory, which is made if it is missing; raises as `open_way`."""
    fd = open_way(path, make=True)
    try:
        return os.readlink(os.fsencode(proc_path(fd)))
    finally:
        os.close(fd)


class _PathWalk:
    """A walk from the top of the file system along a path."""

    def __init__(self, path: bytes) -> None:
        self._path = path
        self._links = 0

    def walk(self, at: int, path: bytes, make: bool) -> int:
        """Return a descriptor of the directory at ``path``, relative to ``at``, which is closed."""
        try:
            for name in path.split(b"/"):
                if name in (b"", b"."):
                    continue
                below = self._step(at, name, make)
                os.close(at)
                at = below
        except BaseException:
            os.close(at)
            raise
        return at

    def _step(self, at: int, name: bytes, make: bool) -> int:
        try:
            # O_PATH with O_NOFOLLOW opens a symbolic link itself, whose owner and target are then read from the descriptor.
            fd = os.open(name, PIN, dir_fd=at)
        except FileNotFoundError:
            if not make:
                raise
            # Another process may create it meanwhile.
            with suppress(FileExistsError):
                os.mkdir(name, dir_fd=at)
            fd = os.open(name, PIN, dir_fd=at)
        try:
            st = os.fstat(fd)
            if not stat.S_ISLNK(st.st_mode):
                if not stat.S_ISDIR(st.st_mode):
                    raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), name)
                return os.dup(fd)
            return self._follow(at, fd, st)
        finally:
            os.close(fd)

    def _follow(self, at: int, link: int, st: os.stat_result) -> int:
        self._links += 1
        if self._links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))
        target = os.readlink(b"", dir_fd=link)
        start = os.open("/", PIN | os.O_DIRECTORY) if target.startswith(b"/") else os.dup(at)
        # make=False, because a directory behind a link would be made where the link's owner wants it.
        there = self.walk(start, target, make=False)
        owner = os.fstat(there).st_uid
        # Checked on the descriptor that is used from here on, so the directory cannot be exchanged after the check.
        if st.st_uid in (0, os.geteuid(), owner):
            return there
        os.close(there)
        raise CiuicError(
            f"{one_line(self._path)} leads through a symbolic link of user {st.st_uid} to {one_line(target)},"
            f" which belongs to user {owner}",
            hint="name the directory itself, not a link to it",
        )
