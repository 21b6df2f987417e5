"""Share extents of packs with restored files, where both are on one file system that supports it (XFS, btrfs).

Guarantees: only bytes that were read and verified are shared. After a refusal of the file system it is not asked again. The
caller writes what cannot be shared.

Share extents of packs with files that are restored in place through an overlay.

A protected root shows its files through a FUSE mount, which forwards no clone ioctl to the disk. The overlay worker is asked to
clone instead (request ``share``, docs/architecture.md section 3). Why the result is exact:

* The file is created, resized, given its attributes, synced and renamed through the overlay, as any other file. The cut, the
  undo log, names, owners and the kernel's caches of names and attributes therefore stay in the hands of the overlay.
* Only the content takes the other way. The worker clones inside the gate, after it has marked what it changes, and then has the
  kernel invalidate its cache of the range. The file's size does not change, so the kernel knows it beforehand.
* The source is a descriptor that this process has open for reading, and the target is a file that it has open for writing
  through that very mount. The request therefore grants nothing that read(2) and write(2) would not.
* After a request whose outcome is unknown (the worker died), the same bytes are written.

Content is written as usual where no worker answers, the worker cannot share, or the caller may not ask it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Callable
from pathlib import Path

from ciuic.protocol.worker_client import WorkerControlClient, WorkerRefused, WorkerUnreachable
from ciuic.protocol.worker_frames import Share, worker_socket
from ciuic.repository.extent_sharing import ALIGN_BYTES, clone_range
from ciuic.system import mountinfo

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


_FS_TYPE = b"fuse.ciuic"
_TIMEOUT_SECONDS = 20.0
_DISK_ERRORS = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)
"""Errors of the disk itself: writing the bytes instead would meet them again."""


class OverlaySharing:
    """Requests to the overlay worker of one mount; for one thread."""

    def __init__(self, device: str, socket_path: Path) -> None:
        self._device = device
        self._client = WorkerControlClient(socket_path, timeout_seconds=_TIMEOUT_SECONDS)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Return whether the range of ``fd`` now shares its extents with the source.

        The file grows to the end of the range; a file that several threads fill has its final size already.

        Raises:
            OSError: the disk cannot take the content, because it is full for instance.
        """
        now = os.fstat(fd)
        # The worker refuses a range beyond the end of the file, because a clone must not change the size.
        if now.st_size < offset + length:
            os.ftruncate(fd, offset + length)
        request = Share(
            device=self._device, node=now.st_ino, source_offset=source_offset, offset=offset, length=length
        )
        code = self._ask(request, source)
        if code == errno.EINVAL:
            # With the kernel's write-back cache on, the worker may not know the file's length yet: set it again.
            os.ftruncate(fd, max(now.st_size, offset + length))
            code = self._ask(request, source)
        if code in _DISK_ERRORS:
            raise OSError(code, os.strerror(code))
        return code == 0

    def _ask(self, request: Share, source: int) -> int:
        """Send the request; return 0 or the errno of the refusal."""
        try:
            self._client.share(request, source)
        # The outcome is unknown: the caller writes the same bytes, so it does not matter whether they were
        # shared.
        except WorkerUnreachable:
            return errno.ENOTCONN
        except WorkerRefused as error:
            return error.errno or errno.EOPNOTSUPP
        return 0

    def close(self) -> None:
        """Close the connection to the worker."""
        self._client.close()


def find(device: int, runtime_dir: Path) -> OverlaySharing | None:
    """Return the overlay whose files have this ``st_dev``, or None for any other file system."""
    # FUSE mounts have anonymous device numbers, whose major is 0.
    if os.major(device):
        return None
    numbers = (os.major(device), os.minor(device))
    try:
        mounts = mountinfo.read()
    except OSError:
        return None
    for mount in mounts:
        if mount.fs_type == _FS_TYPE and mount.device == numbers:
            path = worker_socket(runtime_dir, mount.mount_point)
            # A bind mount of a root has the same device number and no socket of its own.
            if path.exists():
                return OverlaySharing("{}:{}".format(*numbers), path)
    return None
