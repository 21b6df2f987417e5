"""Files and directories as they are now, as the source of verdicts. Symbolic links are not followed, and nothing but regular files is opened."""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator
from typing import Final

from ciuic.verdicts.sources import MAX_NAMES, DirectorySource, FileSource

# O_NONBLOCK: a fifo that takes the file's place between stat and open would block for ever.
_OPEN: Final = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
_UNKNOWN_WRITER: Final = "it is not known whether a program has it open for writing"


class LiveFile(FileSource):
    """A regular file. The caller closes it, or leaves that to the end of the object."""

    def __init__(self, fd: int, name: bytes) -> None:
        facts = os.fstat(fd)
        self.name = name
        self.size_bytes = facts.st_size
        # Content that changes has no id.
        self.identity = b""
        self._fd = fd
        self._changed = (facts.st_mtime_ns, facts.st_size)

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range."""
        return os.pread(self._fd, length, offset)

    def holes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges that the file system has no data for."""
        at = start
        while at < stop:
            data = self._seek(at, os.SEEK_DATA, stop)
            if data > at:
                yield at, min(data, stop)
            at = max(data, self._seek(data, os.SEEK_HOLE, stop)) if data < stop else stop

    def doubt(self) -> str:
        """Return whether a program has the file open for writing, or has changed it since it was opened here."""
        facts = os.fstat(self._fd)
        if (facts.st_mtime_ns, facts.st_size) != self._changed:
            return "it was changed while it was judged"
        try:
            # fcntl(2): a read lease is refused while the file is open for writing. On FUSE and NFS there are none.
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_RDLCK)
            fcntl.fcntl(self._fd, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        except OSError as error:
            is_open = error.errno in (errno.EAGAIN, errno.EACCES) and os.geteuid() in (0, facts.st_uid)
            return "a program has it open for writing" if is_open else _UNKNOWN_WRITER
        return ""

    def mixture(self) -> str:
        """Return nothing: how the file was written is not known of a file as it is now."""
        return ""

    def close(self) -> None:
        """Close the file. May be called twice."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        self.close()

    def _seek(self, at: int, whence: int, end: int) -> int:
        try:
            return min(os.lseek(self._fd, at, whence), end)
        except OSError as error:
            # ENXIO: no data after this offset.
            if error.errno != errno.ENXIO:
                raise
            return end


class LiveDirectory(DirectorySource):
    """A directory."""

    def __init__(self, path: bytes) -> None:
        self.path = path

    def names(self) -> list[bytes]:
        """Return the names in the directory."""
        names = []
        with os.scandir(self.path) as found:
            for item in found:
                names.append(item.name)
                if len(names) >= MAX_NAMES:
                    break
        return sorted(names)

    def file(self, name: bytes) -> FileSource | None:
        """Return the regular file of this name."""
        return open_live_file(os.path.join(self.path, name))

    def directory(self, name: bytes) -> DirectorySource | None:
        """Return the directory of this name."""
        path = os.path.join(self.path, name)
        try:
            mode = os.lstat(path).st_mode
        except OSError:
            return None
        return LiveDirectory(path) if stat.S_ISDIR(mode) else None


def open_live_file(path: bytes) -> LiveFile | None:
    """Open a regular file; None for anything else."""
    try:
        # A device is not opened: that alone may have effects.
        if not stat.S_ISREG(os.lstat(path).st_mode):
            return None
        fd = os.open(path, _OPEN)
    except OSError:
        return None
    if not stat.S_ISREG(os.fstat(fd).st_mode):
        os.close(fd)
        return None
    return LiveFile(fd, os.path.basename(path))
