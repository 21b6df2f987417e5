"""Extents for files that are restored through an overlay, in place under a protected root.

No ioctl of ours reaches the file beneath, so its worker is asked (``share``, docs/architecture.md section 3). What keeps it exact:

* The file is made, cut to its size, dressed, synced and named through the overlay, like any other. So the cut, the undo log, names,
  owners and what the kernel caches of names and attributes are the overlay's business, as always.
* Only its content comes by another way: the worker clones inside the gate, after it has marked what it changes, and then has the
  kernel drop what it cached of that range. The size does not change by it, so the kernel knows it beforehand.
* The source is a descriptor that we have open for reading, and the target a file that is open for writing through that very mount:
  whoever asks could have read the one and written the other himself.
* A request of which nobody knows whether it was carried out (the worker died) is followed by writing the same bytes.

Where there is no worker that can, or none that we may ask, everything is written.
"""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import TYPE_CHECKING

from ciuic import mountinfo
from ciuic.worker_sockets import worker_socket

if TYPE_CHECKING:
    # The channel's client is all that is used of the layer above; imported where a root is restored in place only.
    from ciuic.fuse_layer.control_client import ControlClient
    from ciuic.fuse_layer.control_frames import Share

_FS_TYPE = b"fuse.ciuic"
_SECONDS = 20.0
_OF_THE_DISK = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS, errno.EFBIG)


class Overlay:
    """The way to the worker of one mount; for one thread."""

    def __init__(self, device: str, socket_path: Path) -> None:
        from ciuic.fuse_layer.control_client import ControlClient

        self._device = device
        self._client: ControlClient = ControlClient(socket_path, timeout_seconds=_SECONDS)

    def share(self, source: int, source_offset: int, fd: int, offset: int, length: int) -> bool:
        """Whether the range is shared now. A file that several threads fill has its size already. OSError, of a full disk for
        instance."""
        from ciuic.fuse_layer.control_frames import Share

        now = os.fstat(fd)
        if now.st_size < offset + length:
            os.ftruncate(fd, offset + length)
        wanted = Share(
            device=self._device, node=now.st_ino, source_offset=source_offset, offset=offset, length=length
        )
        answer = self._ask(wanted, source)
        if (
            answer == errno.EINVAL
        ):  # with the kernel's write cache on, the worker may not know yet how long the file is
            os.ftruncate(fd, max(now.st_size, offset + length))
            answer = self._ask(wanted, source)
        if answer in _OF_THE_DISK:
            raise OSError(answer, os.strerror(answer))
        return answer == 0

    def _ask(self, wanted: Share, source: int) -> int:
        """0, or the errno of what stands against it."""
        from ciuic.fuse_layer.control_client import WorkerRefused, WorkerUnreachable

        try:
            self._client.share(wanted, source)
        except WorkerUnreachable:
            return errno.ENOTCONN
        except WorkerRefused as error:
            return error.errno or errno.EOPNOTSUPP
        return 0

    def close(self) -> None:
        self._client.close()


def find(device: int, runtime_dir: Path) -> Overlay | None:
    """The overlay whose files have this st_dev; None for any other file system."""
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
            if path.exists():  # a bind mount of it has none
                return Overlay("{}:{}".format(*numbers), path)
    return None
