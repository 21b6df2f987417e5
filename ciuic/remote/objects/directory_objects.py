"""Objects as files of a directory, such as a mounted NAS.

An object is there whole or not at all, and durable when a call returns: content is written to a file in
``.incoming``, synced, then given its name by link(2), which fails if the name is taken, or by rename(2) in
place of another; then the directory is synced. Directories are walked without following symbolic links, for
the file system may belong to others. A root that is missing, or lies on another device than when it was
opened, is a file system that is not mounted: nothing is written there.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shlex
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from ciuic.errors import CiuicError
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects.model import (
    MAX_OBJECT_BYTES,
    NoSuchObject,
    ObjectInfo,
    RemoteRefused,
    RemoteUnreachable,
    TooLargeObject,
    check_name,
    is_name,
)
from ciuic.repository.identity import Bytes
from ciuic.system.disk import READ_DIRECTORY, READ_FILE, Disk

_INCOMING: Final = ".incoming"
# A directory that another host removes while an object is put there is made again.
_MAX_TRIES: Final = 20
_STALE_SECONDS: Final = 86400
_REFUSED: Final = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
# open(2) of a symbolic link with O_NOFOLLOW, and of a socket.
_NO_FILE: Final = (errno.ELOOP, errno.ENXIO)
# link(2) of file systems without hard links.
_NO_LINKS: Final = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK)

_GiveName = Callable[[int, str], None]
"""Gives an incoming file its name in the directory of this descriptor."""


class DirectoryObjects:
    """Objects below a directory.

    Files and directories get the permissions of the root: a group that may write there shares the remote.
    """

    def __init__(self, directory: str, *, make: bool = False, disk: Disk | None = None) -> None:
        """Open a directory; with ``make`` it is made with its parents, else it has to be there."""
        self._directory = directory
        self._disk: Final = disk or Disk()
        with self._told("open"):
            if make:
                self._make_root()
            root = os.stat(directory)
        if not stat.S_ISDIR(root.st_mode):
            raise RemoteRefused(f"cannot open {directory}: not a directory")
        self._device = root.st_dev
        self._dir_mode = stat.S_IMODE(root.st_mode) & 0o777
        self._file_mode = self._dir_mode & 0o666
        self._durable: set[tuple[str, ...]] = set()
        self._swept = False

    @property
    def url(self) -> str:
        """URL of the directory."""
        return f"file://{self._directory}"

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object, in place of one that is there."""
        check_name(name)
        with self._told("store", name), self._root() as root, self._incoming(root, data) as incoming:
            directory_fd, temporary = incoming

            def rename(directory: int, base: str) -> None:
                os.rename(temporary, base, src_dir_fd=directory_fd, dst_dir_fd=directory)

            self._place(root, name, rename)

    def create(self, name: str, data: Bytes) -> bool:
        """Store the object if the name is free; False if it is taken."""
        check_name(name)
        with self._told("create", name), self._root() as root, self._incoming(root, [data]) as incoming:
            directory_fd, temporary = incoming

            def link(directory: int, base: str) -> None:
                try:
                    os.link(
                        temporary,
                        base,
                        src_dir_fd=directory_fd,
                        dst_dir_fd=directory,
                        follow_symlinks=False,
                    )
                except FileExistsError:
                    # NFS: the server did it and its reply was lost, so the kernel asked again (open(2), NOTES).
                    if os.stat(temporary, dir_fd=directory_fd).st_nlink != 2:
                        raise

            try:
                self._place(root, name, link)
            except FileExistsError:
                # Who was first may not have synced the name yet, and the caller is about to rely on it.
                with self._opened(root, name.split("/")[:-1]) as directory:
                    self._disk.sync(directory)
                return False
            except OSError as exc:
                if exc.errno in _NO_LINKS:
                    raise RemoteRefused(
                        f"cannot create {name}: the file system of {self._directory} has no hard links "
                        f"({exc.strerror}), and nothing else creates a whole file only where there is none"
                    ) from None
                raise
        return True

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        with self._told("read", name), self._file(name) as (fd, info):
            size_bytes = info.st_size
            if size_bytes > MAX_OBJECT_BYTES:
                raise TooLargeObject(name, size_bytes)
            return _read_at(fd, 0, size_bytes)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length), cut at the end of the object."""
        with self._told("read", name), self._file(name) as (fd, info):
            return [_read_at(fd, at, max(0, min(length, info.st_size - at))) for at, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last ``length`` bytes."""
        with self._told("read", name), self._file(name) as (fd, info):
            start = max(0, info.st_size - length)
            return info.st_size, _read_at(fd, start, info.st_size - start)

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; None if there is none."""
        try:
            with self._told("read", name), self._file(name) as (_, info):
                return ObjectInfo(name, info.st_size, info.st_mtime_ns)
        except NoSuchObject:
            return None

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with ``prefix``, ascending by the bytes of their names."""
        with self._told("list", prefix), self._root() as root:
            # A descriptor for each level, so that no directory is read through a link.
            yield from self._walk(root, "", prefix, after)

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects, and directories that are empty then."""
        with self._told("delete objects"), self._root() as root:
            changed: set[tuple[str, ...]] = set()
            for name in names:
                check_name(name)
                *above, base = name.split("/")
                with contextlib.suppress(FileNotFoundError), self._opened(root, above) as directory:
                    os.unlink(base, dir_fd=directory)
                    changed.add(tuple(above))
            for parents in changed:
                with contextlib.suppress(FileNotFoundError), self._opened(root, parents) as directory:
                    self._disk.sync(directory)
            # The deepest first. That an empty directory is gone need not be durable.
            for parents in sorted(changed, key=len, reverse=True):
                self._remove_empty(root, parents)

    def reconnect(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Do nothing: no descriptor is kept, so that the file system can be unmounted."""

    def _make_root(self) -> None:
        missing = []
        path = self._directory
        while not os.path.isdir(path):
            missing.append(path)
            path = os.path.dirname(path)
        for made in reversed(missing):
            with contextlib.suppress(FileExistsError):
                os.mkdir(made, 0o700)
            self._disk.sync_dir(os.path.dirname(made))

    @contextlib.contextmanager
    def _root(self) -> Iterator[int]:
        try:
            fd = os.open(self._directory, os.O_RDONLY | os.O_DIRECTORY)
        except FileNotFoundError:
            raise RemoteUnreachable(f"there is no directory {self._directory}: is it mounted?") from None
        try:
            if os.fstat(fd).st_dev != self._device:
                raise RemoteUnreachable(
                    f"{self._directory} is on another file system than before: is it mounted?"
                )
            yield fd
        finally:
            os.close(fd)

    @contextlib.contextmanager
    def _opened(self, root: int, parts: Sequence[str], *, make: bool = False) -> Iterator[int]:
        """Open the directory of these names below the root; with ``make`` it is made, and durable."""
        path = tuple(parts)
        sync = make and path not in self._durable
        fd = os.dup(root)
        try:
            for part in path:
                try:
                    below = os.open(part, READ_DIRECTORY, dir_fd=fd)
                except FileNotFoundError:
                    if not make:
                        raise
                    sync = True
                    self._make_directory(fd, part)
                    below = os.open(part, READ_DIRECTORY, dir_fd=fd)
                if sync:
                    # Also of a directory that another host made and may not have synced yet.
                    self._disk.sync(fd)
                os.close(fd)
                fd = below
            if make:
                self._durable.add(path)
            yield fd
        finally:
            os.close(fd)

    def _make_directory(self, parent: int, name: str) -> None:
        with contextlib.suppress(FileExistsError):
            os.mkdir(name, self._dir_mode, dir_fd=parent)
            # mkdir(2) takes the umask of this process away from it.
            os.chmod(name, self._dir_mode, dir_fd=parent)

    @contextlib.contextmanager
    def _incoming(self, root: int, data: Sequence[Bytes]) -> Iterator[tuple[int, str]]:
        """Write a synced file; yield its directory and its name, which is removed at the end."""
        with self._opened(root, [_INCOMING], make=True) as directory:
            temporary = os.urandom(16).hex()
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            fd = os.open(temporary, flags, self._file_mode, dir_fd=directory)
            try:
                try:
                    os.fchmod(fd, self._file_mode)
                    size_bytes = self._disk.write_at(fd, data, 0)
                    # Before the name: it must never lead to content that a power cut takes away.
                    self._disk.sync(fd)
                    self._disk.uncache(fd, 0, size_bytes)
                    if not self._swept:
                        self._sweep(directory, os.fstat(fd).st_mtime)
                finally:
                    os.close(fd)
                yield directory, temporary
            finally:
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(temporary, dir_fd=directory)

    def _sweep(self, incoming: int, now: float) -> None:
        """Remove what killed processes left, by the clock of the file system."""
        self._swept = True
        for name in os.listdir(incoming):
            with contextlib.suppress(OSError):
                if os.stat(name, dir_fd=incoming, follow_symlinks=False).st_mtime < now - _STALE_SECONDS:
                    os.unlink(name, dir_fd=incoming)

    def _place(self, root: int, name: str, give_name: _GiveName) -> None:
        """Give the incoming file its name, durably."""
        *parents, base = name.split("/")
        for tries_left in reversed(range(_MAX_TRIES)):
            try:
                with self._opened(root, parents, make=True) as directory:
                    give_name(directory, base)
                    self._disk.sync(directory)
                    return
            except FileNotFoundError:
                # The directory was empty, and another host removed it (`_remove_empty`).
                self._durable.clear()
                if not tries_left:
                    raise

    def _remove_empty(self, root: int, parents: Sequence[str]) -> None:
        for depth in range(len(parents), 0, -1):
            self._durable.discard(tuple(parents[:depth]))
            try:
                with self._opened(root, parents[: depth - 1]) as above:
                    os.rmdir(parents[depth - 1], dir_fd=above)
            except OSError:
                # Not empty, or another host was first.
                return

    @contextlib.contextmanager
    def _file(self, name: str) -> Iterator[tuple[int, os.stat_result]]:
        check_name(name)
        *parents, base = name.split("/")
        with self._root() as root:
            try:
                with self._opened(root, parents) as directory:
                    fd = os.open(base, READ_FILE, dir_fd=directory)
            except (FileNotFoundError, NotADirectoryError):
                raise NoSuchObject(name) from None
            except OSError as exc:
                # A symbolic link, a socket: no permission and no other try makes an object of it.
                if exc.errno not in _NO_FILE:
                    raise
                raise DamagedRemote(
                    name, f"it is no regular file in {self._directory} ({exc.strerror})"
                ) from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode):
                raise DamagedRemote(name, f"it is no regular file in {self._directory}")
            yield fd, info
        finally:
            os.close(fd)

    def _walk(self, fd: int, path: str, wanted: str, after: str) -> Iterator[ObjectInfo]:
        """Yield the objects of a directory, whose names begin with ``path``."""
        with os.scandir(fd) as scan:
            # With its slash a directory sorts among files as the names below it do.
            entries = sorted(
                (entry.name + "/" * entry.is_dir(follow_symlinks=False), entry) for entry in scan
            )
        for end, entry in entries:
            name = path + end
            # What is not named like an object is none: .incoming, snapshots of the NAS.
            if not is_name(name.rstrip("/")):
                continue
            if name.endswith("/"):
                leads_there = name.startswith(wanted) or wanted.startswith(name)
                if leads_there and (name > after or after.startswith(name)):
                    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                        below = os.open(entry.name, READ_DIRECTORY, dir_fd=fd)
                        try:
                            yield from self._walk(below, name, wanted, after)
                        finally:
                            os.close(below)
            elif name.startswith(wanted) and name > after and entry.is_file(follow_symlinks=False):
                with contextlib.suppress(FileNotFoundError):
                    info = os.stat(entry.name, dir_fd=fd, follow_symlinks=False)
                    yield ObjectInfo(name, info.st_size, info.st_mtime_ns)

    @contextlib.contextmanager
    def _told(self, doing: str, name: str = "") -> Iterator[None]:
        """Turn an OSError into an error of `Objects`."""
        try:
            yield
        except CiuicError:
            raise
        except OSError as exc:
            what = " ".join(filter(None, ("cannot", doing, name, "in", self._directory)))
            if doing == "open" and exc.errno == errno.ENOENT:
                raise RemoteUnreachable(
                    f"{what}: there is no such directory",
                    hint=f"is its file system mounted, and the path right? A new one is made by ciuic remote init, or by: mkdir -p {shlex.quote(self._directory)}",
                ) from None
            kind = RemoteRefused if exc.errno in _REFUSED else RemoteUnreachable
            raise kind(f"{what}: {exc.strerror or exc}") from None


def _read_at(fd: int, offset: int, length: int) -> bytes:
    """Return the bytes of a range; fewer only at the end of the file."""
    parts = []
    while length > 0:
        # A single pread(2) returns 2 GiB at most, and less after a signal.
        part = os.pread(fd, length, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        length -= len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)
