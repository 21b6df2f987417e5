"""The durable operations, all in one object: a test can make the nth one fail, tear a write, or lose unsynced
ones.

Everything that must survive a crash goes through here, and the order that makes a file durable under its name
is written once (`replace_file`). SQLite is the exception: it can be rebuilt, so nothing durable depends on
it.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

from ciuic import page_cache
from ciuic.repository.ids import Bytes
from ciuic.repository.opening import open_to_write
from ciuic.repository.sharing import clone_range

_IOVECS = 512  # the kernel takes 1024 at most (UIO_MAXIOV)


class Disk:
    """The real disk. Descriptors are plain integers; every error comes as the OSError that it is."""

    def make_dir(self, path: str, mode: int = 0o700) -> None:
        os.mkdir(path, mode)

    def create(self, path: str, mode: int = 0o600) -> int:
        """A descriptor for reading and writing a file that must not have existed."""
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)

    def open_write(self, path: str) -> int:
        """A descriptor for reading and writing a file that exists."""
        return open_to_write(path, os.O_RDWR)

    def write_at(self, fd: int, parts: Iterable[Bytes], offset: int) -> int:
        """Writes the parts one behind the other from ``offset``, all of them; returns the offset behind the
        last.
        """
        pending = [memoryview(part).cast("B") for part in parts if len(part)]
        pending.reverse()
        while pending:
            batch = pending[: -_IOVECS - 1 : -1]
            written = os.pwritev(fd, batch, offset)
            offset += written
            while written:
                head = pending.pop()
                if written < len(head):
                    pending.append(head[written:])
                    break
                written -= len(head)
        return offset

    def share(self, source: int, offset: int, length: int, fd: int, target_offset: int) -> bool:
        """Makes the range of ``fd`` share the extents of the source's range; False where that cannot be."""
        try:
            clone_range(source, offset, length, fd, target_offset)
        except OSError:
            return False  # the bytes are written instead, and say what is wrong if that is more than this
        return True

    def truncate(self, fd: int, size_bytes: int) -> None:
        os.ftruncate(fd, size_bytes)

    def sync(self, fd: int) -> None:
        os.fsync(fd)

    def start_writing(self, fd: int, offset: int, length: int) -> None:
        """Begins to write the range out, so that `sync` does not send everything at once. Makes nothing durable."""
        page_cache.start_writing(fd, offset, length)

    def uncache(self, fd: int, offset: int, length: int) -> None:
        """Lets the page cache drop what was synced: it belongs to the job, and packs are hardly read again soon."""
        os.posix_fadvise(fd, offset, length, os.POSIX_FADV_DONTNEED)

    def close(self, fd: int) -> None:
        os.close(fd)

    def rename(self, source: str, target: str) -> None:
        os.rename(source, target)

    def unlink(self, path: str) -> None:
        os.unlink(path)

    def sync_dir(self, path: str) -> None:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace_file(self, path: str, data: bytes) -> None:
        """Gives ``path`` this content at once and durably: after a crash there is the old file or the new
        one, whole.

        The temporary name is the same each time (`<path>.tmp`), so a crash leaves at most one of it behind;
        the lock makes that safe.
        """
        temporary = path + ".tmp"
        if os.path.lexists(temporary):
            self.unlink(temporary)
        fd = self.create(temporary)
        try:
            try:
                self.write_at(fd, [data], 0)
                self.sync(fd)
            finally:
                self.close(fd)
            self.rename(temporary, path)
        except OSError:
            if os.path.lexists(
                temporary
            ):  # on a full disk the torn copy is space that the next deletion needs
                self.unlink(temporary)
            raise
        self.sync_dir(os.path.dirname(path))

    def remove_file(self, path: str) -> None:
        """Removes the name, durably."""
        self.unlink(path)
        self.sync_dir(os.path.dirname(path))

    def touch_dir(self, path: str) -> None:
        """Gives the directory a new time of change, durably: for who goes by it and would not see what happens in a file."""
        os.utime(path)
        self.sync_dir(path)
