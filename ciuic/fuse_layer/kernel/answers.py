"""Encoding of answers, with the time for which the kernel may cache them.

Guarantees: every change passes through the worker, so cached names and attributes stay true until the kernel
itself changes them: they live for a day, but for those that change without a request (a file that is open for
writing, a set-id bit that a write takes away). Nothing is carried out here.
"""

from __future__ import annotations

import errno
import os
import stat
from typing import Final

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.core import Attr
from ciuic.fuse_layer.system.syscalls import Statx

FOREVER_SECONDS: Final = 86_400
_WRITTEN_NS: Final = 100_000_000
"""Life of the attributes of a file that is open for writing: mappings change times and blocks without a
request."""
_MIN_BLOCKS: Final = 8
"""Blocks of a file that is being written, at least: archivers take a file without blocks for a single
hole."""
ABSENT: Final = p.ENTRY_HEAD.pack(0, 0, FOREVER_SECONDS, 0, 0, 0) + bytes(p.ATTR.size)
"""Entry of a name that is free, which the kernel remembers until it creates the name itself."""
_SET_IDS: Final = stat.S_ISUID | stat.S_ISGID


class ReplyEncoder:
    """Encoder of one connection's answers. ``writeback``: the kernel's write cache is on."""

    def __init__(self, *, writeback: bool) -> None:
        self._writeback = writeback

    def _lives(self, attr: Attr, *, written: bool = False) -> tuple[int, int, bytes]:
        """Return the life of the attributes (seconds, nanoseconds), and struct fuse_attr."""
        st = attr.st
        seconds, nanoseconds, blocks = FOREVER_SECONDS, 0, st.st_blocks
        if stat.S_ISREG(st.st_mode):
            if attr.written or written:
                seconds, nanoseconds = 0, _WRITTEN_NS
                if self._writeback:
                    # Its data may not have been written back yet.
                    blocks = max(blocks, _MIN_BLOCKS)
            if st.st_mode & _SET_IDS:
                # A write takes these bits away, and the kernel is not told.
                seconds = nanoseconds = 0
        return seconds, nanoseconds, p.pack_attr(attr.node, st, attr.nlink, blocks)

    def entry(self, attr: Attr, *, written: bool = False) -> bytes:
        """Encode struct fuse_entry_out; ``written``: the file is being opened for writing just now."""
        seconds, nanoseconds, packed = self._lives(attr, written=written)
        head = p.ENTRY_HEAD.pack(attr.node, attr.generation, FOREVER_SECONDS, seconds, 0, nanoseconds)
        return head + packed

    def attributes(self, attr: Attr) -> bytes:
        """Encode struct fuse_attr_out."""
        seconds, nanoseconds, packed = self._lives(attr)
        return p.ATTR_HEAD.pack(seconds, nanoseconds, 0) + packed

    def statx(self, attr: Attr, extra: Statx) -> bytes:
        """Encode struct fuse_statx_out."""
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
    """Encode struct fuse_statfs_out."""
    return p.KSTATFS.pack(
        *(vfs.f_blocks, vfs.f_bfree, vfs.f_bavail, vfs.f_files, vfs.f_ffree),
        *(vfs.f_bsize, vfs.f_namemax, vfs.f_frsize),
    )


def sized(size: int, value: bytes) -> bytes:
    """Encode the answer of getxattr and listxattr: the value, or with size 0 its length."""
    if not size:
        return p.GETXATTR_OUT.pack(len(value), 0)
    if len(value) > size:
        raise OSError(errno.ERANGE, os.strerror(errno.ERANGE))
    return value
