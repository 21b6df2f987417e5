"""How answers are encoded, and for how long the kernel may believe them.

Guarantees: every change passes through us, so what the kernel caches stays true until the kernel itself changes it: names and
attributes live for a day, but for those that change without a request (a file that is open for writing, a set-id bit that a
write takes away). Nothing is carried out here.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from ciuic.fuse_layer import kernel_protocol as p
from ciuic.fuse_layer.core import Attr
from ciuic.fuse_layer.syscalls import Statx

FOREVER_SECONDS: Final = 86_400
_WRITTEN_NS: Final = 100_000_000
"""Life of the attributes of a file that is open for writing: mappings change times and blocks without a request."""
_LEAST_BLOCKS: Final = 8
ABSENT: Final = p.ENTRY_HEAD.pack(0, 0, FOREVER_SECONDS, 0, 0, 0) + bytes(p.ATTR.size)
_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID


class Answers:
    """For one connection. ``writeback``: the kernel's write cache is on."""

    def __init__(self, *, writeback: bool) -> None:
        self._writeback = writeback

    def _lives(self, attr: Attr, *, written: bool = False) -> tuple[int, int, bytes]:
        """For how long the attributes are true (seconds, nanoseconds), and struct fuse_attr."""
        st = attr.st
        seconds, nanoseconds, blocks = FOREVER_SECONDS, 0, st.st_blocks
        if stat.S_ISREG(st.st_mode):
            if attr.written or written:
                seconds, nanoseconds = 0, _WRITTEN_NS
                if self._writeback:
                    # Archivers take a file without blocks for a single hole; its data may only not have been written back.
                    blocks = max(blocks, _LEAST_BLOCKS)
            if st.st_mode & _SET_IDS:
                seconds = nanoseconds = 0  # a write takes these away, and the kernel is not told
        return seconds, nanoseconds, p.pack_attr(attr.node, st, attr.nlink, blocks)

    def entry(self, attr: Attr, *, written: bool = False) -> bytes:
        seconds, nanoseconds, packed = self._lives(attr, written=written)
        head = p.ENTRY_HEAD.pack(attr.node, attr.generation, FOREVER_SECONDS, seconds, 0, nanoseconds)
        return head + packed

    def attributes(self, attr: Attr) -> bytes:
        seconds, nanoseconds, packed = self._lives(attr)
        return p.ATTR_HEAD.pack(seconds, nanoseconds, 0) + packed

    def statx(self, attr: Attr, extra: Statx) -> bytes:
        seconds, nanoseconds, _packed = self._lives(attr)
        st = attr.st
        times = [divmod(ns, 10**9) for ns in (st.st_atime_ns, extra.btime_ns, st.st_ctime_ns, st.st_mtime_ns)]
        return p.STATX_OUT_HEAD.pack(seconds, nanoseconds, 0) + p.STATX_STRUCT.pack(
            *(extra.mask, st.st_blksize, extra.attributes, attr.nlink, st.st_uid, st.st_gid, st.st_mode),
            *(attr.node, st.st_size, st.st_blocks, extra.attributes_mask),
            *(number for time in times for number in time),
            *(os.major(st.st_rdev), os.minor(st.st_rdev), os.major(st.st_dev), os.minor(st.st_dev)),
        )


def statfs(vfs: os.statvfs_result) -> bytes:
    return p.KSTATFS.pack(
        *(vfs.f_blocks, vfs.f_bfree, vfs.f_bavail, vfs.f_files, vfs.f_ffree),
        *(vfs.f_bsize, vfs.f_namemax, vfs.f_frsize),
    )


def sized(size: int, value: bytes) -> bytes:
    """The answer of the two-step calls: with size 0 how long the value is."""
    if not size:
        return p.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
