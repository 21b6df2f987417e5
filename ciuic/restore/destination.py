"""Plain file operations below a directory descriptor, none of which follows a symbolic link.

Guarantees: a link that somebody plants in the destination cannot redirect what is written or removed, because every
step is made from the descriptor of a directory that was itself opened with O_NOFOLLOW.
"""

from __future__ import annotations

import ctypes
import errno
import os
import random
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ciuic import STATE_DIR_NAME
from ciuic.linked_path import LinkedPath
from ciuic.lookup import join

TEMPORARY_PREFIX = b".ciuic-restore-"
OPEN_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_RENAME_NOREPLACE = 1
_UNSUPPORTED = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)

_chosen = random.Random(os.urandom(32))
"""Names need only differ: asking the kernel for each cost more than making some of the files."""
os.register_at_fork(after_in_child=lambda: _chosen.seed(os.urandom(32)))
_libc = ctypes.CDLL(None, use_errno=True)


def stat_at(folder: int, name: bytes) -> os.stat_result | None:
    """The status of a name itself, None if there is no such name."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False)
    except FileNotFoundError:
        return None


def open_directory(folder: int, name: bytes) -> int:
    """NotADirectoryError for anything else, a symbolic link included."""
    return os.open(name, OPEN_DIRECTORY, dir_fd=folder)


def open_below(folder: int, names: Sequence[bytes]) -> int:
    """The directory that these names lead to, one by one."""
    fd = os.dup(folder)
    for name in names:
        try:
            below = open_directory(fd, name)
        finally:
            os.close(fd)
        fd = below
    return fd


def proc_path(fd: int) -> bytes:
    """A path for calls that take no O_PATH descriptor: it leads to the inode, whatever that is."""
    return f"/proc/self/fd/{fd}".encode("ascii")


def new_temporary_name(run: str) -> bytes:
    """A hidden name that no other restore uses; those of one run share a prefix."""
    return TEMPORARY_PREFIX + f"{run}-{_chosen.getrandbits(48):012x}".encode("ascii")


def is_temporary(name: bytes, run: str) -> bool:
    return name.startswith(TEMPORARY_PREFIX + run.encode("ascii") + b"-")


def rename_new(source: int, old: bytes, folder: int, new: bytes) -> None:
    """Rename from one directory into another; FileExistsError if the new name is taken."""
    if _libc.renameat2(source, old, folder, new, _RENAME_NOREPLACE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNSUPPORTED:
        raise OSError(code, os.strerror(code), new)
    if stat_at(folder, new) is not None:
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), new)
    os.rename(old, new, src_dir_fd=source, dst_dir_fd=folder)


def unlink_if_there(folder: int, name: bytes) -> None:
    try:
        os.unlink(name, dir_fd=folder)
    except FileNotFoundError:
        return


@dataclass
class Remover:
    """Removes trees, sparing what must be spared, and never across the border of a file system."""

    spared_inodes: frozenset[tuple[int, int]] = frozenset()
    spared: Callable[[bytes, bool], bool] | None = None
    """(source path, is a directory) → leave it, with all that is below."""
    dry_run: bool = False
    failures: list[tuple[bytes, str]] = field(default_factory=list)
    """(path, reason) of what could not be removed."""

    def remove(self, folder: int, name: bytes, path: bytes, source_path: bytes) -> bool:
        """Whether ``name`` in ``folder`` is gone. What is spared below it keeps its parents, silently."""
        st = stat_at(folder, name)
        if st is None:
            return True
        if not stat.S_ISDIR(st.st_mode):
            return self._leaf(folder, name, path, source_path)
        device = os.fstat(folder).st_dev
        stack: list[_Level] = []
        gone = self._descend(stack, folder, name, path, source_path, device)
        try:
            while stack:
                gone = self._step(stack, device)
        finally:
            for level in stack:
                level.close()
        return gone

    def _leaf(self, folder: int, name: bytes, path: bytes, source_path: bytes) -> bool:
        if self.spared is not None and self.spared(source_path, False):
            return False
        if self.dry_run:
            return True
        try:
            os.unlink(name, dir_fd=folder)
        except FileNotFoundError:
            return True
        except OSError as error:
            self.failures.append((path, f"it could not be removed: {error.strerror}"))
            return False
        return True

    def _descend(
        self, stack: list[_Level], folder: int, name: bytes, path: bytes, source_path: bytes, device: int
    ) -> bool:
        """Puts a directory on the stack; False if it stays as it is."""
        if name == STATE_DIR_NAME or (self.spared is not None and self.spared(source_path, True)):
            return False
        try:
            fd = open_directory(folder, name)
        except OSError as error:
            self.failures.append((path, f"it could not be removed: {error.strerror}"))
            return False
        st = os.fstat(fd)
        if st.st_dev != device:
            self.failures.append((path, "another file system is mounted there: it is left alone"))
        elif (st.st_dev, st.st_ino) not in self.spared_inodes:
            above = stack[-1] if stack else None
            linked = LinkedPath(path, above.path if above is not None else None)
            linked_source = LinkedPath(source_path, above.source_path if above is not None else None)
            stack.append(_Level(fd, folder, name, linked, linked_source, iter(os.listdir(proc_path(fd)))))
            return True
        os.close(fd)
        return False

    def _step(self, stack: list[_Level], device: int) -> bool:
        """One name further; whether the last one looked at is gone."""
        level = stack[-1]
        name = next(level.names, None)
        if name is not None:
            path, source_path = join(bytes(level.path), name), join(bytes(level.source_path), name)
            st = stat_at(level.fd, name)
            if st is None:
                return True
            if stat.S_ISDIR(st.st_mode):
                gone = self._descend(stack, level.fd, name, path, source_path, device)
            else:
                gone = self._leaf(level.fd, name, path, source_path)
            level.empty = level.empty and gone
            return gone
        stack.pop().close()
        gone = level.empty and self._rmdir(level)
        if stack and not gone:
            stack[-1].empty = False
        return gone

    def _rmdir(self, level: _Level) -> bool:
        if self.dry_run:
            return True
        try:
            os.rmdir(level.name, dir_fd=level.folder)
        except OSError as error:
            self.failures.append((bytes(level.path), f"it could not be removed: {error.strerror}"))
            return False
        return True


@dataclass
class _Level:
    """A directory being emptied."""

    fd: int
    folder: int
    name: bytes
    path: LinkedPath
    source_path: LinkedPath
    names: Iterator[bytes]
    empty: bool = True

    def close(self) -> None:
        os.close(self.fd)
