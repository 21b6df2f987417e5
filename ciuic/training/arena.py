"""Memory that the trainer fills and the writer reads, and that does not end with the trainer.

An anonymous file (memfd): no name anywhere, freed by the kernel with the last of the two. It counts as shared memory of whoever
touched it first; the size of /dev/shm does not bound it. It cannot shrink, so that the reader never meets a missing page. A process
that is forked has it mapped, too, and its page tables are not copied: that of shared memory are filled when it is touched. (Keeping it
from forks would leave a hole there, which something else fills, and which the end of the mapping then takes away.)
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

_GRAIN_BYTES: Final = 2 << 20
_MADV_POPULATE_WRITE: Final = 23
"""Linux 5.14: makes all pages present at once, a third of the time that touching them takes."""
_SEALS: Final = fcntl.F_ADD_SEALS if hasattr(fcntl, "F_ADD_SEALS") else 1033
_GET_SEALS: Final = 1034
_SEAL_SHRINK: Final = 2
_LIBC: Final = ctypes.CDLL(None)


class Arena:
    """The trainer's side. The memory is zeros at first."""

    def __init__(self, size_bytes: int) -> None:
        """OSError (ENOMEM) where there is not so much."""
        self.size_bytes = -(-max(1, size_bytes) // _GRAIN_BYTES) * _GRAIN_BYTES
        self.fd = os.memfd_create("ciuic-state", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.fd, self.size_bytes)
            fcntl.fcntl(self.fd, _SEALS, _SEAL_SHRINK)
            self.map = mmap.mmap(self.fd, self.size_bytes)
        except BaseException:
            os.close(self.fd)
            raise
        with suppress(OSError):  # only advice
            self.map.madvise(mmap.MADV_HUGEPAGE)
        self.memory = memoryview(self.map)
        self.pinned: bool | None = None
        """Page-locked for devices; None: nobody has asked yet."""
        self._unpin: Callable[[], None] | None = None
        self._pinning = threading.Lock()

    def make_present(self) -> None:
        """Takes the memory now and not in the first save, in which each page would be a fault; other threads run meanwhile.

        Where it is not to be had at once that is no matter. mmap.madvise would hold the interpreter lock for all that time
        (measured: 0.6 s for 1 GiB).
        """
        _LIBC.madvise(
            ctypes.c_void_p(self._address()),
            ctypes.c_size_t(self.size_bytes),
            ctypes.c_int(_MADV_POPULATE_WRITE),
        )

    def pin(self, register: Callable[[int, int], Callable[[], None] | None]) -> None:
        """Once, and not after `close`. ``register``: gets address and size, returns how to undo it, or None where it failed."""
        with self._pinning:
            if self.pinned is None:
                self._unpin = register(self._address(), self.size_bytes)
                self.pinned = self._unpin is not None

    def _address(self) -> int:
        return ctypes.addressof(ctypes.c_char.from_buffer(self.map))

    def close(self) -> None:
        """Lets go of the descriptor; the memory stays for as long as arrays look at it. No device may write to it any more."""
        with self._pinning:
            self.pinned = False
            if self._unpin is not None:
                unpin, self._unpin = self._unpin, None
                unpin()
        if self.fd >= 0:
            fd, self.fd = self.fd, -1
            os.close(fd)


class ReadArena:
    """The writer's side."""

    def __init__(self, fd: int) -> None:
        """OSError for memory that the trainer could still cut: reading behind its end would end this process (SIGBUS)."""
        try:
            if not fcntl.fcntl(fd, _GET_SEALS) & _SEAL_SHRINK:
                raise OSError(errno.EPERM, "the memory of the state may shrink")
            self._map = mmap.mmap(fd, os.fstat(fd).st_size, prot=mmap.PROT_READ)
        finally:
            os.close(fd)
        self.memory = memoryview(self._map)

    def close(self) -> None:
        self.memory.release()
        self._map.close()
