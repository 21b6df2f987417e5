"""Life of a worker, for both drivers: its context, the announcement that it serves, and the end of its own mount."""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Final, Protocol

import structlog

from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.system import mounts

log = structlog.get_logger(__name__)

STOP_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
SIGNAL_GRACE_SECONDS: Final = 20.0
"""Time after a signal in which open handles are served on."""
_PROBE_SECONDS: Final = 5.0
_TRIES: Final = 5
_TRY_SECONDS: Final = 0.05
_WAIT_SECONDS: Final = 0.5
"""Pause between two attempts to unmount an overlay that somebody is in; the kernel does not tell when the last one leaves."""


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
        """True if system calls that a worker has no use for are refused (syscall_profiles.py)."""
        self._ready_fd = ready_fd

    def announce(self) -> None:
        """Report that the mount answers, to the process that started the worker."""
        if self._ready_fd is not None:
            # That process may be gone; the job is not.
            with contextlib.suppress(BrokenPipeError):
                os.write(self._ready_fd, b"ready\n")
            os.close(self._ready_fd)
            self._ready_fd = None


class Departure:
    """The end of a worker that was asked to stop: its overlay is unmounted as soon as nobody is in it.

    A process with its working directory, an open file or a mapping in the overlay goes on as before, and so does everybody
    else, until the last one has left. Thread-safe.
    """

    def __init__(
        self, context: WorkerContext, device: Callable[[], str], on_unmounted: Callable[[float], None]
    ) -> None:
        """Take the parts.

        Args:
            context: root and plain directory.
            device: returns the device of our mount, by which it is recognised.
            on_unmounted: called once, when the mount is gone, with the seconds for which handles that are left (in other
                mount namespaces, or because the grace is over) are served.
        """
        self._context = context
        self._device = device
        self._on_unmounted = on_unmounted
        self._lock = threading.Lock()
        self._unmounted = False
        self._deadline: float | None = None
        self._waiting = False

    def stop(self, grace_seconds: float) -> bool:
        """Unmount now, or as soon as nobody is in the overlay; after the grace also under those who are.

        Return whether it is unmounted.

        Raises:
            OSError: EBUSY where others have mounted something inside, which would be lost. Nothing is begun.
        """
        for _ in range(_TRIES):
            with self._lock:
                self._deadline = time.monotonic() + grace_seconds
                if self._try():
                    return True
                # A program that only looks at a name is in it for a moment as well.
                wait = self._deadline > time.monotonic()
            if wait:
                time.sleep(_TRY_SECONDS)
        with self._lock:
            begin = not self._waiting
            self._waiting = True
        log.info("overlay_in_use", root=self._context.root)
        if begin:
            threading.Thread(target=self._wait, name="departure", daemon=True).start()
        return False

    def stay(self) -> None:
        """Serve on, because a daemon goes on with this mount.

        Raises:
            OSError: ENOTCONN where it is unmounted already.
        """
        with self._lock:
            if self._unmounted:
                raise OSError(errno.ENOTCONN, "the overlay is unmounted")
            self._deadline = None

    def _wait(self) -> None:
        said = ""
        while True:
            with self._lock:
                try:
                    if self._deadline is None or self._try():
                        self._waiting = False
                        return
                    if time.monotonic() >= self._deadline:
                        detach_own(self._context, self._device(), has_served=False)
                        self._gone(0)
                        return
                    pause = min(_WAIT_SECONDS, self._deadline - time.monotonic())
                except OSError as error:
                    # Something was mounted inside meanwhile: it is not taken away with the overlay, grace or not.
                    if str(error) != said:
                        said = str(error)
                        log.warning("overlay_not_unmounted", root=self._context.root, error=said)
                    pause = _WAIT_SECONDS
            time.sleep(max(0.0, pause))

    def _try(self) -> bool:
        if not self._unmounted and _unmount_own(self._context, self._device()):
            assert self._deadline is not None
            self._gone(max(0.0, self._deadline - time.monotonic()))
        return self._unmounted

    def _gone(self, seconds: float) -> None:
        self._unmounted = True
        self._on_unmounted(seconds)


def _unmount_own(context: WorkerContext, device: str) -> bool:
    """Unmount our own mount unless somebody is in it; return whether it is gone. One that is not ours is left alone.

    Raises:
        OSError: EBUSY where others have mounted something inside it, which would be lost with it.
    """
    entry = mounts.overlay_over(context.backing_fd)
    if entry is None or entry.device != device:
        return True
    inside = mounts.mounts_inside(entry)
    if inside:
        # A worker may move no mounts (system/syscall_profiles.py); the daemon has done so before it asks.
        names = ", ".join(os.fsdecode(one.mount_point) for one in inside)
        raise OSError(errno.EBUSY, f"mounted inside the overlay: {names}")
    if not mounts.unmount(entry.mount_point):
        return False
    log.info("overlay_unmounted", root=context.root)
    return True


def detach_own(context: WorkerContext, device: str, *, has_served: bool) -> None:
    """Detach our own mount from the root; one that is not ours, or gone already, is left alone.

    Args:
        context: root and plain directory.
        device: device of our mount, by which it is recognised.
        has_served: our session is over, so that our mount answers no request.
    """
    entry = mounts.overlay_over(context.backing_fd)
    if entry is None or entry.device != device:
        return
    # The kernel gives a device number anew as soon as it is free: quick remounts had a late worker detach its
    # successor's mount.
    if has_served and mounts.probe(entry.mount_point, _PROBE_SECONDS) == "alive":
        # Our session is over, so this is a successor's mount, which was given the device number of ours.
        return
    if mounts.mounts_inside(entry):
        # The overlay is dead now, or will be. The daemon, which may mount them again, detaches it.
        log.warning("overlay_left_for_mounts_inside", root=context.root)
        return
    mounts.detach(entry.mount_point)
    log.info("overlay_detached", root=context.root)
