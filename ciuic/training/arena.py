"""Memory that the trainer fills and the writer reads, and that outlives the trainer.

An arena is an anonymous file (memfd): it has no name, and the kernel frees it when both processes have let go
of it. Its pages count as shared memory of the process that touched them first; the size of /dev/shm does not
bound it. It is sealed against shrinking, so that the reader never meets a missing page. A forked process has
it mapped too, at no cost: page tables of shared memory are filled on access. (Excluding it from forks would
leave a hole in the child's address space, which another mapping would fill, and which closing the arena would
then unmap.)
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ciuic.training.free_resources import memory_left

# Size of a huge page, so that all of the arena can be huge pages.
_GRAIN_BYTES: Final = 2 << 20
# Linux 5.14: makes all pages present at once, in a third of the time that touching them takes.
_MADV_POPULATE_WRITE: Final = 23
# Numbers of linux/fcntl.h, for builds of Python whose module lacks the names.
_SEALS: Final = fcntl.F_ADD_SEALS if hasattr(fcntl, "F_ADD_SEALS") else 1033
_GET_SEALS: Final = 1034
_SEAL_SHRINK: Final = 2
_LIBC: Final = ctypes.CDLL(None)


class Arena:
    """The trainer's side of an arena. The memory is zeros at first."""

    def __init__(self, size_bytes: int) -> None:
        """Create an arena of at least this size.

        Raises:
            OSError: There is not so much memory (ENOMEM).
        """
        self.size_bytes = -(-max(1, size_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        self.fd = os.memfd_create("ciuic-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            # The writer refuses memory without this seal: reading behind a new end would kill it (SIGBUS).
            fcntl.fcntl(self.fd, _SEALS, _SEAL_SHRINK)
            # Without MADV_DONTFORK, which saves nothing for shared memory: fork with 1 GiB takes 0.5 ms
            # either way (measured).
            self.map = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        with suppress(OSError):  # Advice only.
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self.map)
        self.pinned: bool | None = None
        """True if the memory is page-locked for devices; None: not tried yet."""
        self._unpin: Callable[[], None] | None = None
        # `pin` may run in the thread that prepares the arena while the training thread closes it: `close`
        # must see the undo.
        self._pinning = threading.Lock()

    def make_present(self) -> None:
        """Allocate the pages now, so that the first save does not fault on each of them.

        Other threads run meanwhile.

        A failure does not matter: then the pages come with the first save.
        """
        # By ctypes, because mmap.madvise would hold the interpreter lock for all that time (measured: 0.6 s
        # for 1 GiB).
        _LIBC.madvise(
            ctypes.c_void_p(self._address()),
            ctypes.c_size_t(self.size_bytes),
            ctypes.c_int(_MADV_POPULATE_WRITE),
        )

    def pin(self, register: Callable[[int, int], Callable[[], None] | None]) -> None:
        """Page-lock the memory, once, and not after `close`.

        Args:
            register: Gets address and size; returns how to undo it, or None if it failed.
        """
        with self._pinning:
            if self.pinned is None:
                self._unpin = register(self._address(), self.size_bytes)
                self.pinned = self._unpin is not None

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def close(self) -> None:
        """Unpin the memory and close the descriptor; the memory stays as long as arrays refer to it.

        No device may be writing to it any more.
        """
        with self._pinning:
            self.pinned = False
            if self._unpin is not None:
                unpin, self._unpin = self._unpin, None
                unpin()
        # The mapping and the writer keep the memory; the descriptor is not needed for that.
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class ReadArena:
    """The writer's side of an arena."""

    def __init__(self, fd: int) -> None:
        """Map an arena, and close its descriptor.

        Raises:
            OSError: The memory is not sealed against shrinking.
        """
        try:
            # Reading behind the end of memory that the trainer has cut would kill this process (SIGBUS).
            if not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
                raise OSError(errno.EPERM, "the memory of the state may shrink")
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        """Unmap the arena; `memory` and what was made of it cannot be read any more."""
        self.memory.release()
        self._map.close()


def allocate_arena(size_bytes: int) -> Arena:
    """Allocate an arena.

    Raises:
        OSError: ENOMEM, also where filling the arena would invoke the out-of-memory killer.
    """
    # Checked beforehand: pages are allocated when they are first written to, and there is no error to handle
    # then: the out-of-memory killer would end the trainer.
    left = memory_left()
    if left is not None and size_bytes > left:
        raise OSError(
            errno.ENOMEM,
            f"not enough memory for a copy of the state: {size_bytes >> 20} MiB, {left >> 20} MiB are free",
        )
    return Arena(size_bytes)
