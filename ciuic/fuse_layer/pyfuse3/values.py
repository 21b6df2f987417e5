"""Conversion of the core's values to pyfuse3's. Pure: no call into the core, the kernel or the event loop."""

from __future__ import annotations

import os
import stat
from typing import Protocol

import pyfuse3

TIMEOUT_SECONDS = 86_400.0
"""Life of cached names and attributes: every change passes through the worker, so they stay true."""

WRITTEN_TIMEOUT_SECONDS = 0.1
"""Life of attributes of files that are open for writing; a getattr ten times a second costs nothing."""
_MIN_BLOCKS = 8


class AttrLike(Protocol):
    """Attributes of a node, as the core returns them (overlay_state.Attr)."""

    @property
    def node(self) -> int:
        """Id of the node."""

    @property
    def generation(self) -> int:
        """Generation of the id."""

    @property
    def st(self) -> os.stat_result:
        """Attributes of the backing inode."""

    @property
    def nlink(self) -> int:
        """Link count without hidden links."""

    @property
    def written(self) -> bool:
        """True if a handle that can write is open."""


def entry_of(attr: AttrLike, *, written: bool = False) -> pyfuse3.EntryAttributes:
    """Return attributes for the kernel; a node id is its inode number.

    ``written``: it is being opened for writing just now.
    """
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
            # A write takes these bits away in the core; the kernel, which would run the file with them, is
            # not told.
            entry.attr_timeout = 0.0
    return entry


def _being_written(entry: pyfuse3.EntryAttributes) -> None:
    """Shorten the life of a written file's attributes, and let it have blocks."""
    # Size and times of a file in the kernel's write cache are the kernel's own; the blocks are the server's,
    # and grow without a request (du). Never none, because archivers take a file without blocks for a single
    # hole and do not read it, while its data may not have been written back yet (GNU tar --sparse).
    entry.attr_timeout = WRITTEN_TIMEOUT_SECONDS
    entry.st_blocks = max(entry.st_blocks, _MIN_BLOCKS)


def absent_entry() -> pyfuse3.EntryAttributes:
    """Return the entry of a name that is free, which the kernel remembers until it creates the name itself."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = TIMEOUT_SECONDS
    return entry


def statvfs_of(vfs: os.statvfs_result) -> pyfuse3.StatvfsData:
    """Return file system figures for the kernel."""
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
