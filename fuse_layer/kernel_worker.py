"""An overlay worker that serves its mount by our own session with the kernel (kernel_session.py).

The same life as with the portable driver (worker.py): mount, serve, detach, save. There is no event loop: the session's
threads serve, the control server's threads control, and this one waits.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

import structlog

from ciuic.fuse_layer import kernel_session, mounts
from ciuic.fuse_layer.control_server import ControlServer
from ciuic.fuse_layer.kernel_driver import KernelDriver
from ciuic.fuse_layer.kernel_session import Negotiated
from ciuic.fuse_layer.worker_parts import STOP_SIGNALS, CoreFactory, Place, detach_own

log = structlog.get_logger(__name__)

_COLLECT_SECONDS: Final = 10.0


class KernelWorker:
    """One mount, from start to end. ``run`` blocks until it is over."""

    def __init__(
        self, place: Place, make_core: CoreFactory, *, passthrough: bool = True, stack_depth: int = 1
    ) -> None:
        self._place = place
        self._make_core = make_core
        self._passthrough = passthrough
        self._stack_depth = stack_depth
        self._device = ""
        self._mounted_ns = 0
        self._stop_lock = threading.Lock()
        self._stopping = False

    def run(self) -> None:
        """Mount, serve, and return when the mount is gone and everything that should be saved is."""
        fuse_fd = mounts.mount_fuse(self._place.backing_fd)
        entry = mounts.overlay_at(self._place.root)
        self._device = entry.device if entry is not None else ""
        self._mounted_ns = time.time_ns()
        try:
            negotiated = kernel_session.negotiate(
                fuse_fd, passthrough=self._passthrough, stack_depth=self._stack_depth
            )
            self._serve(fuse_fd, negotiated)
        except BaseException:
            detach_own(self._place.root, self._device, has_served=False)
            raise
        finally:
            os.close(fuse_fd)

    def _serve(self, fuse_fd: int, negotiated: Negotiated) -> None:
        core = self._make_core(kernel_keeps_times=negotiated.writeback)
        driver = KernelDriver(core, fuse_fd, negotiated)
        self._driver, self._core = driver, core
        server = ControlServer(
            core,
            self._place.control,
            backing_fd=self._place.backing_fd,
            on_stop=self.stop,
            extra_status=self._status,
        )
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)
            threading.Thread(target=_collect_garbage, name="garbage", daemon=True).start()
            driver.session.begin()
            server.start()
            log.info(
                "overlay_mounted",
                root=self._place.root,
                driver="kernel",
                passthrough=driver.modes.passthrough,
            )
            self._place.announce()
            driver.session.wait()
        finally:
            detach_own(self._place.root, self._device, has_served=driver.session.is_over)
            server.close()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the end has begun: a second request must not tear it
        core.save_tracking()
        core.close()

    def _status(self) -> Mapping[str, Any]:
        return {
            "driver": "kernel",
            "driver_why": self._place.driver_why,
            "passthrough": self._driver.modes.passthrough,
            "mounted_ns": self._mounted_ns,
            "requests": self._driver.session.requests,
        }

    def _on_signal(self, number: int, frame: object) -> None:
        log.info("stop_signal", signal=signal.Signals(number).name)
        threading.Thread(target=self.stop, args=(self._place.grace_seconds,), daemon=True).start()

    def stop(self, grace_seconds: float) -> None:
        """Detach now, end when the last handle closes or the grace is over. Returns when it is detached."""
        with self._stop_lock:
            detach_own(self._place.root, self._device, has_served=False)
            if self._stopping:
                return
            self._stopping = True
        timer = threading.Timer(min(grace_seconds, threading.TIMEOUT_MAX), self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        log.warning("handles_left_open", open_files=self._core.open_files)
        self._driver.session.end()


def _collect_garbage() -> None:
    """Collect young garbage only: going through a million nodes would stop the job for as long as that takes."""
    gc.freeze()
    gc.disable()
    while True:
        time.sleep(_COLLECT_SECONDS)
        with contextlib.suppress(RuntimeError):
            gc.collect(1)
