"""Ways to things on the backing file system: descriptors that close themselves, and names below them.

A name is no identity. Whoever reads, opens or changes something *of a node* pins it first (NodeTable.pin): between looking up
the way and using it, another thread may have renamed something else to that name.
"""

from __future__ import annotations

import errno
import os
import time
from typing import Final

_AT_ONCE: Final = 2
_RENAME_WAIT_SECONDS: Final = 0.001


def stale() -> OSError:
    return OSError(errno.ESTALE, "the backing file is no longer where it was")


def wait_for_rename(attempt: int) -> None:
    """Before the ``attempt``-th look: a rename is done on disk and its thread has yet to say so in the node table. That takes
    it microseconds of its own, and a few milliseconds where other threads have the interpreter."""
    if attempt >= _AT_ONCE:
        time.sleep(_RENAME_WAIT_SECONDS)


class Descriptor:
    """An open descriptor that closes when the last user lets go of the object: eviction never hits a user."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __del__(self) -> None:
        os.close(self.fd)


class Way:
    """How to reach a node now: a directory descriptor and a name, or a descriptor of the thing itself.

    ``path`` serves the calls that take no dir_fd. Keep the object for as long as the numbers are used.
    """

    __slots__ = ("_keep", "dir_fd", "name")

    def __init__(self, keep: Descriptor, name: bytes | None) -> None:
        self._keep = keep
        self.dir_fd = keep.fd
        self.name = name
        """None: the descriptor is the thing itself."""

    @property
    def path(self) -> bytes:
        if self.name is None:
            return b"/proc/self/fd/%d" % self.dir_fd
        return b"/proc/self/fd/%d/%b" % (self.dir_fd, self.name)

    @property
    def follow(self) -> bool:
        """Whether calls on ``path`` must follow it: the magic link of a descriptor, never a symbolic link."""
        return self.name is None

    def stat(self) -> os.stat_result:
        if self.name is None:
            return os.fstat(self.dir_fd)
        return os.stat(self.name, dir_fd=self.dir_fd, follow_symlinks=False)

    def open(self, flags: int) -> int:
        if self.name is None:
            return os.open(self.path, flags | os.O_CLOEXEC)
        return os.open(self.name, flags | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.dir_fd)
