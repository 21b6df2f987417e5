"""Sharing extents of packs with restored files, where both lie on a file system that can: XFS, btrfs.

Guarantees: only bytes that have been read and found right are shared; where the file system refuses, the caller is told, and asks
no more for files on it. Leaves to the caller: writing what cannot be shared.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable

from ciuic.repository.sharing import ALIGN_BYTES, clone_range

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
    """What is known of the file systems on which files are restored; for one thread."""

    def __init__(self) -> None:
        self._able: dict[int, bool] = {}

    def may(self, fd: int) -> bool:
        """Whether it is worth asking for this file."""
        return self._able.get(os.fstat(fd).st_dev, True)

    def is_known(self, fd: int) -> bool:
        """Whether it has worked on that file system."""
        return self._able.get(os.fstat(fd).st_dev, False)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Whether the range is shared now. OSError, of a full disk for instance."""
        return self._try(fd, lambda: clone_range(source, source_offset, length, fd, offset))

    def clone(self, source: int, fd: int) -> bool:
        """Whether the whole content of ``source``, as it was at one moment, is that of the new file now. OSError."""
        return self._try(fd, lambda: fcntl.ioctl(fd, _FICLONE, source))

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
