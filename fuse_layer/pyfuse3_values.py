"""The core's values as pyfuse3 wants them, and back. Pure: no call into the core, the kernel or the event loop."""

from __future__ import annotations

import os
import stat
from typing import Protocol

import pyfuse3

TIMEOUT_SECONDS = 86_400.0
"""Every change passes through us, so what the kernel caches stays true until the kernel itself changes it."""

WRITTEN_TIMEOUT_SECONDS = 0.1
"""For files open for writing; a getattr ten times a second costs nothing."""
_LEAST_BLOCKS = 8


class AttrLike(Protocol):
    """What the core says of a node."""

    @property
    def node(self) -> int: ...
    @property
    def generation(self) -> int: ...
    @property
    def st(self) -> os.stat_result: ...
    @property
    def nlink(self) -> int: ...
    @property
    def written(self) -> bool: ...


def entry_of(attr: AttrLike, *, written: bool = False) -> pyfuse3.EntryAttributes:
    """Attributes for the kernel; a node id is its inode number. ``written``: it is being opened for writing just now."""
    st = attr.st
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attr.node
    entry.generation = attr.generation
    entry.entry_timeout = TIMEOUT_SECONDS
    entry.attr_timeout = TIMEOUT_SECONDS
    entry.st_mode = st.st_mode
    entry.st_nlink = attr.nlink
    entry.st_uid = st.st_uid
    entry.st_gid = st.st_gid
    entry.st_rdev = st.st_rdev
    entry.st_size = st.st_size
    entry.st_blksize = st.st_blksize
    entry.st_blocks = st.st_blocks
    entry.st_atime_ns = st.st_atime_ns
    entry.st_mtime_ns = st.st_mtime_ns
    entry.st_ctime_ns = st.st_ctime_ns
    if stat.S_ISREG(st.st_mode):
        if attr.written or written:
            _being_written(entry)
        if st.st_mode & (stat.S_ISUID | stat.S_ISGID):
            # A write takes these away in the core; the kernel, which would run the file with them, is not told.
            entry.attr_timeout = 0.0
    return entry


def _being_written(entry: pyfuse3.EntryAttributes) -> None:
    """Size and times of a file in its write cache are the kernel's own, the blocks are ours and grow unasked (du).

    Never none: archivers take a file without blocks for a single hole and do not read it, while its data may only
    not have been written back yet (GNU tar --sparse).
    """
    entry.attr_timeout = WRITTEN_TIMEOUT_SECONDS
    entry.st_blocks = max(entry.st_blocks, _LEAST_BLOCKS)


def absent_entry() -> pyfuse3.EntryAttributes:
    """The answer to a lookup that found nothing: the kernel remembers it until it creates the name itself."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = TIMEOUT_SECONDS
    return entry


def statvfs_of(vfs: os.statvfs_result) -> pyfuse3.StatvfsData:
    """File system figures for the kernel."""
    data = pyfuse3.StatvfsData()
    data.f_bsize = vfs.f_bsize
    data.f_frsize = vfs.f_frsize
    data.f_blocks = vfs.f_blocks
    data.f_bfree = vfs.f_bfree
    data.f_bavail = vfs.f_bavail
    data.f_files = vfs.f_files
    data.f_ffree = vfs.f_ffree
    data.f_favail = vfs.f_favail
    data.f_namemax = vfs.f_namemax
    return data
