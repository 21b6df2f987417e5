"""A disk with bad sectors that come and go: one file on our FUSE file system, for a loop device.

    python -m support.bad_disk IMAGE MOUNT_POINT BAD

MOUNT_POINT/image is IMAGE, and every request goes to it directly. While the file BAD has lines ``start end`` (bytes of
the image), reading and writing anything in these ranges is EIO. There is no device mapper in a container; this is all
of dm-flakey that is needed.
"""

from __future__ import annotations

import errno
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pyfuse3
import trio

if TYPE_CHECKING:
    from pyfuse3 import FileHandleT, FileNameT, FlagT, InodeT, RequestContext

_IMAGE_INODE: InodeT = 2
_HANDLE: FileHandleT = 1


class BadDisk(pyfuse3.Operations):
    """FUSE operations on the one file."""

    def __init__(self, image: Path, bad: Path) -> None:
        super().__init__()
        self._fd = os.open(image, os.O_RDWR)
        self._bad = bad

    def _check(self, offset: int, length: int) -> None:
        try:
            lines = self._bad.read_text().split("\n")
        except FileNotFoundError:
            return
        for line in filter(None, lines):
            start, end = map(int, line.split())
            if offset < end and start < offset + length:
                raise pyfuse3.FUSEError(errno.EIO)

    async def getattr(self, inode: InodeT, ctx: RequestContext | None = None) -> pyfuse3.EntryAttributes:
        facts = os.fstat(self._fd)
        entry = pyfuse3.EntryAttributes()
        entry.st_ino = inode
        entry.st_mode = 0o40700 if inode == pyfuse3.ROOT_INODE else 0o100600
        entry.st_size, entry.st_blksize, entry.st_blocks = facts.st_size, 4096, facts.st_blocks
        return entry

    async def lookup(
        self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext
    ) -> pyfuse3.EntryAttributes:
        if name != b"image":
            raise pyfuse3.FUSEError(errno.ENOENT)
        return await self.getattr(_IMAGE_INODE)

    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> pyfuse3.FileInfo:
        return pyfuse3.FileInfo(fh=_HANDLE, direct_io=True)

    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        self._check(off, size)
        return os.pread(self._fd, size, off)

    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        self._check(off, len(buf))
        return os.pwrite(self._fd, buf, off)

    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        """Do nothing: the page cache below is as safe as this disk needs to be."""


def main() -> None:
    """Serve until the mount is removed."""
    image, point, bad = map(Path, sys.argv[1:])
    pyfuse3.init(BadDisk(image, bad), str(point), {"fsname=bad_disk"})
    try:
        trio.run(pyfuse3.main)
    finally:
        pyfuse3.close(unmount=False)


if __name__ == "__main__":
    main()
