"""Flags of the backing descriptor for an open of the job."""

from __future__ import annotations

import os

# Offsets come from the kernel. O_APPEND would ignore them: with the kernel's write cache on, 21,000 appended
# bytes became 29,040 on disk, hidden until the page cache was dropped. O_DIRECT would impose the alignment of
# the backing file system on requests. Creating and truncating are steps of the core's own (namespace.py,
# data.py).
_BACKING_FLAGS_DROPPED = (
    os.O_APPEND | os.O_DIRECT | os.O_SYNC | os.O_DSYNC | os.O_TRUNC | os.O_EXCL | os.O_CREAT
)


def backing_flags(flags: int) -> int:
    """Return the flags of the backing descriptor for an open with ``flags`` (OpenFile says why)."""
    if flags & os.O_ACCMODE == os.O_WRONLY:
        # The kernel's write cache reads a page back before a part of it is written: EBADF otherwise.
        flags = flags & ~os.O_ACCMODE | os.O_RDWR
    return (flags & ~_BACKING_FLAGS_DROPPED) | os.O_CLOEXEC | os.O_NOFOLLOW


def writes(flags: int) -> bool:
    """Return whether an open with ``flags`` can write."""
    return flags & os.O_ACCMODE != os.O_RDONLY
