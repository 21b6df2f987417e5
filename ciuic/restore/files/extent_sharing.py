"""Share extents of packs with restored files, where both are on one file system that supports it (XFS, btrfs).

Guarantees: only bytes that were read and verified are shared. After a refusal of the file system it is not asked again. The
caller writes what cannot be shared.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic.repository.disk.extent_sharing import ALIGN_BYTES, clone_range

if TYPE_CHECKING:
    from ciuic.restore.files.overlay_sharing import OverlaySharing

__all__ = ["ALIGN_BYTES", "Sharing"]
# _IOW(0x94, 9, int), linux/fs.h.
_FICLONE = 0x40049409
# Errors by which a file system says that it cannot share these extents; others, such as ENOSPC, are raised.
# EPERM: the target is immutable. ETXTBSY: one of the two is a swap file (ioctl_ficlonerange(2)).
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
    """Shares extents, and remembers which file systems can; for one thread.

    Args:
        runtime_dir: directory of the overlay workers' sockets; None asks no worker.
    """

    def __init__(self, runtime_dir: Path | None = None) -> None:
        self._able: dict[int, bool] = {}
        """st_dev → whether sharing worked the last time."""
        self._runtime_dir = runtime_dir
        self._overlays: dict[int, OverlaySharing | None] = {}

    def may(self, fd: int) -> bool:
        """Return whether sharing with this file is worth a try: it worked on its file system, or was not tried yet."""
        return self._able.get(os.fstat(fd).st_dev, True)

    def is_known(self, fd: int) -> bool:
        """Return whether sharing has worked on the file system of this file."""
        return self._able.get(os.fstat(fd).st_dev, False)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Share a range; return whether the file system did so. OSError, such as ENOSPC."""
        overlay = self._overlay(fd)
        if overlay is None:
            return self._try(fd, lambda: clone_range(source, source_offset, length, fd, offset))
        shared = overlay.share(source, source_offset, fd, offset, length)
        self._able[os.fstat(fd).st_dev] = shared
        return shared

    def may_clone(self, fd: int) -> bool:
        """Return whether `clone` is worth a try for this file. Overlay workers do not clone whole files."""
        return self.may(fd) and self._overlay(fd) is None

    def clone(self, source: int, fd: int) -> bool:
        """Clone the whole content of ``source``, as of one instant; return whether the file system did so. OSError."""
        return self._try(fd, lambda: fcntl.ioctl(fd, _FICLONE, source))

    def prepare(self, fd: int, size_bytes: int) -> None:
        """Set the size of a new file that several threads are going to fill through an overlay. OSError."""
        # The worker refuses ranges beyond the end, and each thread that made the file longer could cut what
        # others shared.
        if size_bytes and self._overlay(fd) is not None:
            os.ftruncate(fd, size_bytes)

    def close(self) -> None:
        """Close the connections to overlay workers."""
        for overlay in self._overlays.values():
            if overlay is not None:
                overlay.close()

    def _overlay(self, fd: int) -> OverlaySharing | None:
        if self._runtime_dir is None:
            return None
        device = os.fstat(fd).st_dev
        # Disks have a major number; only anonymous devices can be overlays.
        if os.major(device):
            return None
        # Looked up once for each file system.
        if device not in self._overlays:
            from ciuic.restore.files.overlay_sharing import find

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
