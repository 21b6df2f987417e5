"""An overlay worker that serves its mount by our own session with the kernel (kernel_session.py).

The same life as with the portable driver (worker.py): mount, serve, detach, save. There is no event loop: the session's
threads serve, the control server's threads control, and this one waits.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import structlog

import ciuic
from ciuic.fuse_layer import kernel_negotiation, ledger_writer, mounts, urgency
from ciuic.fuse_layer.control_frames import Share
from ciuic.fuse_layer.control_server import ControlServer
from ciuic.fuse_layer.core import OverlayCore
from ciuic.fuse_layer.kernel_driver import KernelDriver
from ciuic.fuse_layer.kernel_negotiation import Negotiated
from ciuic.fuse_layer.ledger import Inherited
from ciuic.fuse_layer.ledger_writer import Ledger
from ciuic.fuse_layer.session_claim import SessionClaim
from ciuic.fuse_layer.worker_parts import STOP_SIGNALS, CoreFactory, Place, detach_own
from ciuic.pace import WAITS_SUFFIX

log = structlog.get_logger(__name__)

_COLLECT_SECONDS: Final = 10.0
_PARK_SECONDS: Final = 2.0
_LAST_ANSWER_SECONDS: Final = 0.05


class NotInherited(Exception):
    """There is nothing to go on with."""


class KernelWorker:
    """One mount, from start to end. ``run`` blocks until it is over."""

    def __init__(
        self,
        place: Place,
        make_core: CoreFactory,
        *,
        passthrough: bool = True,
        stack_depth: int = 1,
        session_fd: int | None = None,
    ) -> None:
        self._place = place
        self._make_core = make_core
        self._passthrough = passthrough
        self._stack_depth = stack_depth
        self._session_fd = session_fd
        self._device = ""
        self._mounted_ns = time.time_ns()
        self._stop_lock = threading.Lock()
        self._stopping = False
        self._ledger: Ledger | None = None
        self._claim: SessionClaim | None = None
        self._handed_over = False
        self._sharing = threading.Lock()
        """Held by whoever changes a file without a request of the session: ``park`` does not wait for that."""
        self._shares = True

    def run(self) -> None:
        """Mount or take over, serve, and return when the mount is gone and everything that should be saved is."""
        if self._session_fd is not None:
            self._take_over(self._session_fd)
            return
        fuse_fd = mounts.mount_fuse(self._place.backing_fd)
        self._know_mount()
        try:
            self._claim = SessionClaim.begin(self._claim_path)
            negotiated = kernel_negotiation.negotiate(
                fuse_fd, passthrough=self._passthrough, stack_depth=self._stack_depth
            )
            ledger_writer.remove(self._ledger_base)
            if negotiated.resends:
                self._ledger = self._new_ledger(negotiated)
            core = self._make_core(kernel_keeps_times=negotiated.writeback, ledger=self._ledger)
            driver = KernelDriver(core, fuse_fd, negotiated, ledger=self._ledger)
            self._serve(fuse_fd, core, driver)
        except BaseException:
            detach_own(self._place.root, self._device, has_served=False)
            raise
        finally:
            os.close(fuse_fd)

    def _take_over(self, fuse_fd: int) -> None:
        """Go on with the session of a predecessor. What fails here leaves the session to the next attempt."""
        self._claim = SessionClaim.inherit(self._claim_path)
        began = time.perf_counter()
        stages: dict[str, float] = {}

        def reached(stage: str) -> None:
            stages[stage] = round(1000 * (time.perf_counter() - began), 1)

        self._know_mount()
        inherited = ledger_writer.replay(self._ledger_base)
        reached("ledger read")
        if inherited is None:
            raise NotInherited("the predecessor left no ledger that this version understands")
        negotiated = Negotiated(inherited.minor, inherited.flags, inherited.max_write_bytes)
        self._ledger = self._new_ledger(negotiated, inherited)
        core = self._make_core(
            kernel_keeps_times=negotiated.writeback, ledger=self._ledger, inherited=inherited
        )
        driver = KernelDriver(core, fuse_fd, negotiated, ledger=self._ledger, inherited=inherited)
        reached("nodes and handles opened")
        driver.session.resend()
        reached("requests asked for again")
        log.info(
            "session_taken_over",
            root=self._place.root,
            files=len(inherited.files),
            stages_ms=stages,
        )
        self._serve(fuse_fd, core, driver)

    @property
    def _claim_path(self) -> Path:
        return Path(f"{self._place.control}.serving")

    @property
    def _ledger_base(self) -> Path:
        return Path(f"{self._place.control}.ledger")

    def _new_ledger(self, negotiated: Negotiated, inherited: Inherited | None = None) -> Ledger | None:
        try:
            kept = Ledger(self._ledger_base, inherited=inherited)
            kept.begin(negotiated.minor, negotiated.flags, negotiated.max_write_bytes)
        except OSError as error:
            log.error("ledger_given_up", error=str(error))
            return None
        return kept

    def _know_mount(self) -> None:
        entry = mounts.overlay_at(self._place.root)
        self._device = entry.device if entry is not None else ""

    def _serve(self, fuse_fd: int, core: OverlayCore, driver: KernelDriver) -> None:
        self._driver, self._core = driver, core
        server = ControlServer(
            core,
            self._place.control,
            backing_fd=self._place.backing_fd,
            session_fd=fuse_fd if self._ledger is not None else None,
            on_stop=self.stop,
            on_hand_over=self.hand_over,
            on_share=self.share,
            extra_status=self._status,
        )
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)
            # Before the first thread: each has the priority of the one that starts it.
            urgency.lower_priority(group_after_seconds=urgency.SETTLED_SECONDS)
            threading.Thread(target=_collect_garbage, name="garbage", daemon=True).start()
            driver.session.waits.publish(f"{self._place.control}{WAITS_SUFFIX}")
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
            if not self._handed_over:
                detach_own(self._place.root, self._device, has_served=driver.session.is_over)
            server.close()
            if not self._handed_over:
                driver.session.waits.unpublish()
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # the end has begun: a second request must not tear it
        if self._handed_over:
            os._exit(0)  # threads that have read a request and will not answer it wait for ever
        core.save_tracking()
        core.close()
        if self._ledger is not None:
            self._ledger.remove()
        if self._claim is not None:
            self._claim.release()

    def hand_over(self) -> None:
        """Leave the session to a successor, with everything that is tracked. This process ends afterwards; what it was at is
        carried out by the successor."""
        if self._ledger is None or not self._ledger.kept:
            raise OSError(errno.EOPNOTSUPP, "this session cannot be handed over")
        log.info("handing_over", root=self._place.root)
        with self._sharing:
            self._shares = False
        if self._driver.session.park(_PARK_SECONDS):
            try:
                self._core.save_for_successor()
            except OSError as error:  # a full disk: nobody serves any more, so there is no way but on
                log.error("tracking_not_handed_over", error=str(error))
        self._handed_over = True
        threading.Timer(_LAST_ANSWER_SECONDS, self._driver.session.end).start()

    def share(self, request: Share, source_fd: int) -> None:
        """Give a file that is open for writing extents of ``source_fd`` (data.py). OSError: ESTALE for another mount's file."""
        if not self._device or request.device != self._device:  # its number would name another file here
            raise OSError(errno.ESTALE, "that file is not of this mount")
        with self._sharing:
            if not self._shares:  # what is marked here now would not come to the successor
                raise OSError(errno.EOPNOTSUPP, "this session is being handed over")
            self._driver.share(request.node, source_fd, request.source_offset, request.offset, request.length)

    def _status(self) -> Mapping[str, Any]:
        return {
            "driver": "kernel",
            "driver_why": self._place.driver_why,
            "filtered": self._place.filtered,
            "version": ciuic.__version__,
            "passthrough": self._driver.modes.passthrough,
            "survives": self._ledger is not None and self._ledger.kept,
            "mounted_ns": self._mounted_ns,
            "requests": self._driver.session.requests,
            "waited_us": self._driver.session.waits.microseconds,
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
        if self._ledger is not None:
            self._ledger.remove()  # nobody will go on with this session; while it lingers there may be another
            self._core.pin_orphans()
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
