"""Parts that the workers of both drivers share: context, announcement, detaching of their own mount."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
from typing import Final, Protocol

import structlog

from ciuic.fuse_layer.core.core import OverlayCore
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.system import mounts

log = structlog.get_logger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
SIGNAL_GRACE_SECONDS: Final = 20.0
"""Time after a signal in which open handles are served on."""
_PROBE_SECONDS: Final = 5.0


class CoreFactory(Protocol):
    """Function that makes the overlay core once the terms with the kernel are known."""

    def __call__(
        self,
        *,
        kernel_keeps_times: bool,
        journal: JournalWriter | None = None,
        inherited: InheritedSession | None = None,
    ) -> OverlayCore:
        """Make the core; arguments as of OverlayCore."""


class WorkerContext:
    """Root, control socket and descriptors of a worker."""

    def __init__(self, root: str, backing_fd: int, control: str, ready_fd: int | None) -> None:
        self.root = root
        self.backing_fd = backing_fd
        self.control = control
        self.grace_seconds = SIGNAL_GRACE_SECONDS
        self.driver_why = ""
        """Reason for this driver, in words, for the worker's status."""
        self.filtered = False
        """True if system calls that a worker has no use for are refused (profiles.py)."""
        self._ready_fd = ready_fd

    def announce(self) -> None:
        """Report that the mount answers, to the process that started the worker."""
        if self._ready_fd is not None:
            # That process may be gone; the job is not.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = None


def unmount_own(root: str, device: str) -> None:
    """Take our own mount from the root while it is served; one that is not ours, or gone already, is left alone.

    Raises:
        OSError: EBUSY where others have mounted something inside it, which would be lost with it.
    """
    entry = mounts.overlay_at(root)
    if entry is None or entry.device != device:
        return
    inside = mounts.mounts_inside(entry)
    if inside:
        # A worker may move no mounts (system/sandbox/profiles.py); the daemon has done so before it asks.
        names = ", ".join(os.fsdecode(one.mount_point) for one in inside)
        raise OSError(errno.EBUSY, f"mounted inside the overlay: {names}")
    detach_own(root, device, has_served=False)


def detach_own(root: str, device: str, *, has_served: bool) -> None:
    """Detach our own mount from the root; one that is not ours, or gone already, is left alone.

    Args:
        root: path of the root.
        device: device of our mount, by which it is recognised.
        has_served: our session is over, so that our mount answers no request.
    """
    entry = mounts.overlay_at(root)
    if entry is None or entry.device != device:
        return
    # The kernel gives a device number anew as soon as it is free: quick remounts had a late worker detach its
    # successor's mount.
    if has_served and mounts.probe(root, _PROBE_SECONDS) == "alive":
        # Our session is over, so this is a successor's mount, which was given the device number of ours.
        return
    mounts.detach(root)
    log.info("overlay_detached", root=root)
