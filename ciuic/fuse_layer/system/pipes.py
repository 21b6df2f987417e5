"""A pipe through which bulk data pass between /dev/fuse and a file without being copied into this process.

splice(2) moves references to pages of the page cache: a request's body is copied once, into the file, and a
reply's data once, into the kernel's cache of the mount. Guarantees: no call waits for room in the pipe; a write
that fails leaves in it what was not written, so that it can be tried again. A pipe that is not empty when its
request has been answered is to be closed: the next request must not begin with its rest.

References:
    splice(2), pipe(7), Documentation/filesystems/fuse (fuse_dev_splice_read, fuse_dev_splice_write)
"""

from __future__ import annotations

import errno
import fcntl
import os
from typing import Final

MAX_SPLICED_BYTES: Final = 512 << 10
"""Limit of the data of one request: with headers it must fit into `_PIPE_BYTES`, each page in a slot of its own."""
MIN_SPLICED_BYTES: Final = 64 << 10
"""Below it the further system calls cost more than the copy that they save."""
_PIPE_BYTES: Final = 1 << 20
"""Limit for a process without CAP_SYS_RESOURCE (/proc/sys/fs/pipe-max-size)."""


class Pipe:
    """A pipe of one thread, which both fills and empties it. ``len`` is the number of bytes in it.

    Raises:
        OSError: no descriptors are left, or the pipe cannot be made large enough.
    """

    def __init__(self) -> None:
        self._out, self._in = os.pipe()
        self._filled = 0
        self._taken = memoryview(b"")
        """Bytes that were taken out because the file does not splice."""
        try:
            # A pipe that is too small makes the kernel fail the request that does not fit into it.
            if fcntl.fcntl(self._in, fcntl.F_SETPIPE_SZ, _PIPE_BYTES) < _PIPE_BYTES:
                raise OSError(errno.EMFILE, "the pipe is smaller than asked for")
        except BaseException:
            self.close()
            raise

    def __len__(self) -> int:
        return self._filled

    def close(self) -> None:
        """Close both ends."""
        os.close(self._out)
        os.close(self._in)

    def receive(self, fuse_fd: int) -> int:
        """Read one request from the kernel, and return its length; waits for one. OSError as of read(2)."""
        self._filled = os.splice(fuse_fd, self._in, _PIPE_BYTES)
        return self._filled

    def take(self, view: memoryview) -> None:
        """Read the next bytes, as many as the view is long."""
        done = 0
        while done < len(view):
            done += os.readv(self._out, [view[done:]])
        self._filled -= done

    def pwrite_to(self, fd: int, offset: int) -> int:
        """Write to a file as pwrite(2) with what is left; return the number of bytes written, which leave the pipe."""
        if not self._taken:
            try:
                count = os.splice(self._out, fd, self._filled, offset_dst=offset)
                self._filled -= count
                return count
            except OSError as error:
                # Of an append-only inode, and of file systems that do not splice.
                if error.errno != errno.EINVAL:
                    raise
            taken = memoryview(bytearray(self._filled))
            self.take(taken)
            self._taken, self._filled = taken, len(taken)
        count = os.pwrite(fd, self._taken, offset)
        self._filled -= count
        self._taken = self._taken[count:]
        return count

    def fill(self, head: bytes, fd: int, offset: int, length: int) -> bool:
        """Put a head and a range of a file into the empty pipe; return False where not all of that could be had.

        The pipe is to be closed then.
        """
        self._filled = os.write(self._in, head)
        end = offset + length
        while offset < end:
            try:
                # Without waiting for room, which nobody would make.
                count = os.splice(fd, self._in, end - offset, offset_src=offset, flags=os.SPLICE_F_NONBLOCK)
            except OSError:
                # A file system that does not splice, or an error that the reader gets by read(2).
                count = 0
            if not count:
                return False
            self._filled += count
            offset += count
        return True

    def send(self, fuse_fd: int) -> None:
        """Give the kernel what is in the pipe as one reply. After an OSError, as of write(2), the pipe is to be closed."""
        os.splice(self._out, fuse_fd, self._filled)
        self._filled = 0
