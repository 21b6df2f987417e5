"""Sharing extents of packs with restored files, where both lie on a file system that can: XFS, btrfs.

Guarantees: only bytes that have been read and found right are shared; where the file system refuses, the caller is told, and asks
no more for files on it. Leaves to the caller: writing what cannot be shared.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic.repository.sharing import ALIGN_BYTES, clone_range

if TYPE_CHECKING:
    from ciuic.restore.overlay import Overlay

__all__ = ["ALIGN_BYTES", "Sharing"]
_FICLONE = 0x40049409
_REFUSED = (
    errno.EOPNOTSUPP,
    errno.ENOTTY,
    errno.EXDEV,
    errno.EINVAL,
    errno.ENOSYS,
    errno.EPERM,
    errno.ETXTBSY,
)


class Sharing:
    """What is known of the file systems on which files are restored; for one thread. ``runtime_dir``: where overlay workers listen."""

    def __init__(self, runtime_dir: Path | None = None) -> None:
        self._able: dict[int, bool] = {}
        self._runtime_dir = runtime_dir
        self._overlays: dict[int, Overlay | None] = {}

    def may(self, fd: int) -> bool:
        """Whether it is worth asking for this file."""
        return self._able.get(os.fstat(fd).st_dev, True)

    def is_known(self, fd: int) -> bool:
        """Whether it has worked on that file system."""
        return self._able.get(os.fstat(fd).st_dev, False)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Whether the range is shared now. OSError, of a full disk for instance."""
        overlay = self._overlay(fd)
        if overlay is None:
            return self._try(fd, lambda: clone_range(source, source_offset, length, fd, offset))
        shared = overlay.share(source, source_offset, fd, offset, length)
        self._able[os.fstat(fd).st_dev] = shared
        return shared

    def may_clone(self, fd: int) -> bool:
        """Whether ``clone`` is worth asking for this file: nobody does it below an overlay."""
        return self.may(fd) and self._overlay(fd) is None

    def clone(self, source: int, fd: int) -> bool:
        """Whether the whole content of ``source``, as it was at one moment, is that of the new file now. OSError."""
        return self._try(fd, lambda: fcntl.ioctl(fd, _FICLONE, source))

    def prepare(self, fd: int, size_bytes: int) -> None:
        """For a new file that several threads are going to fill. OSError."""
        if size_bytes and self._overlay(fd) is not None:
            os.ftruncate(fd, size_bytes)

    def close(self) -> None:
        """Nothing is shared any more."""
        for overlay in self._overlays.values():
            if overlay is not None:
                overlay.close()

    def _overlay(self, fd: int) -> Overlay | None:
        if self._runtime_dir is None:
            return None
        device = os.fstat(fd).st_dev
        if os.major(device):  # a disk
            return None
        if device not in self._overlays:
            from ciuic.restore.overlay import find

            self._overlays[device] = find(device, self._runtime_dir)
        return self._overlays[device]

    def _try(self, fd: int, call: Callable[[], object]) -> bool:
        device = os.fstat(fd).st_dev
        try:
            call()
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._able[device] = False
            return False
        self._able[device] = True
        return True
