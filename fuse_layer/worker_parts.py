"""What the workers of both drivers share: where they serve, what they are told, how they come off."""

from __future__ import annotations

import contextlib
import os
import signal
from typing import Final, Protocol

import structlog

from ciuic.fuse_layer import mounts
from ciuic.fuse_layer.core import OverlayCore
from ciuic.fuse_layer.ledger import Inherited
from ciuic.fuse_layer.ledger_writer import Ledger

log = structlog.get_logger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
SIGNAL_GRACE_SECONDS: Final = 20.0
_PROBE_SECONDS: Final = 5.0


class CoreFactory(Protocol):
    """Makes the overlay core once it is known what the driver lets the kernel do."""

    def __call__(
        self, *, kernel_keeps_times: bool, ledger: Ledger | None = None, inherited: Inherited | None = None
    ) -> OverlayCore: ...


class Place:
    """Where a worker serves, and whom it tells that it does."""

    def __init__(self, root: str, backing_fd: int, control: str, ready_fd: int | None) -> None:
        self.root = root
        self.backing_fd = backing_fd
        self.control = control
        self.grace_seconds = SIGNAL_GRACE_SECONDS
        self.driver_why = ""
        """Why this driver serves, in words, for whoever asks for the worker's status."""
        self.filtered = False
        """Whether system calls that a worker has no use for are refused (seccomp_profiles.py)."""
        self._ready_fd = ready_fd

    def announce(self) -> None:
        """The mount answers."""
        if self._ready_fd is not None:
            with contextlib.suppress(BrokenPipeError):  # whoever started us is gone; the job is not
                os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = None


def detach_own(root: str, device: str, *, has_served: bool) -> None:
    """Take our own mount off the root; a mount that is not ours, or gone already, is left alone. ``has_served``: our
    session is over, nobody answers there any more."""
    entry = mounts.overlay_at(root)
    if entry is None or entry.device != device:
        return
    if has_served and mounts.probe(root, _PROBE_SECONDS) == "alive":
        return  # our session is over, so this is a successor's mount that was given the number of ours
    mounts.detach(root)
    log.info("overlay_detached", root=root)
