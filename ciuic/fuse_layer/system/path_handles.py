"""Handles of paths on the backing file system: descriptors that close themselves, and names below them.

A name is no identity. Code that reads, opens or changes something *of a node* pins the inode first
(NodeTable.pin): between finding a path and using it, another thread may have renamed something else to that
name.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Final

_IMMEDIATE_ATTEMPTS: Final = 2
_RENAME_WAIT_SECONDS: Final = 0.001


def stale() -> OSError:
    """Return the error for a node whose inode cannot be found any more."""
    return OSError(errno.ESTALE, "the backing file is no longer where it was")


def wait_for_rename(attempt: int) -> None:
    """Wait before a further attempt to find an inode, from the third one on."""
    # A rename is done on disk, and its thread has yet to record it in the node table. That takes it
    # microseconds of its own, and a few milliseconds where other threads have the interpreter.
    if attempt >= _IMMEDIATE_ATTEMPTS:
        time.sleep(_RENAME_WAIT_SECONDS)


class Descriptor:
    """An open descriptor that closes with the last reference to the object: eviction from a cache never hits a user."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        # Not by an explicit close: other threads may be using the number in a system call.
        os.close(self.fd)


class PathHandle:
    """Path to an inode at this moment: a directory descriptor and a name, or a descriptor of the inode itself.

    Keep the object for as long as its numbers are used: they close with it.
    """

    __slots__ = ("_keep", "dir_fd", "name")

    def __init__(self, keep: Descriptor, name: bytes | None) -> None:
        self._keep = keep
        self.dir_fd = keep.fd
        self.name = name
        """Name below ``dir_fd``; None where ``dir_fd`` is the inode itself."""

    @property
    def path(self) -> bytes:
        """Absolute path through /proc, for system calls that take no directory descriptor."""
        if self.name is None:
            return b"/proc/self/fd/%d" % self.dir_fd
        return b"/proc/self/fd/%d/%b" % (self.dir_fd, self.name)

    @property
    def follow(self) -> bool:
        """True if calls on ``path`` must follow its last link: the magic link of a descriptor, never a symbolic link."""
        return self.name is None

    def stat(self) -> os.stat_result:
        """Return the attributes of what the path leads to; symbolic links are not followed."""
        if self.name is None:
            return os.fstat(self.dir_fd)
        return os.stat(self.name, dir_fd=self.dir_fd, follow_symlinks=False)

    def open(self, flags: int) -> int:
        """Open what the path leads to; symbolic links are not followed."""
        if self.name is None:
            return os.open(self.path, flags | os.O_CLOEXEC)
        return os.open(self.name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.dir_fd)
