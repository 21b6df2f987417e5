"""An overlay worker that serves its mount by our own session with the kernel (kernel/session.py).

Its life is that of the portable driver (pyfuse3_driver.py): mount, serve, detach, save. There is no event
loop: the session's threads serve, the control server's threads control, and the main thread waits.
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
from ciuic.fuse_layer.control_server import ControlServer
from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.journal import journal_writer
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.journal.succession import SessionClaim
from ciuic.fuse_layer.kernel import session as kernel_session
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.session import Negotiated
from ciuic.fuse_layer.system import mounts, takeover_priority
from ciuic.fuse_layer.worker_lifecycle import STOP_SIGNALS, CoreFactory, Departure, WorkerContext, detach_own
from ciuic.protocol.worker_frames import Share
from ciuic.system.io_throttle import WAITS_SUFFIX

log = structlog.get_logger(__name__)

_COLLECT_SECONDS: Final = 10.0
_PARK_SECONDS: Final = 2.0
"""Time limit for requests under way when the session is handed over."""
READAHEAD_BYTES: Final = 512 << 10
"""Readahead of a mount whose reads pass through the worker.

With the kernel's 128 KiB each request costs more than its data: a file on a tmpfs was read at 1,058 MB/s and not
2,443. A page of a mapping that is read at random takes longer with it (134 and 230 us), twice that again with 2 MiB.
"""
_LAST_ANSWER_SECONDS: Final = 0.05
"""Time in which the answer to ``hand_over`` is sent before this process ends."""


class NotInherited(Exception):
    """The predecessor left nothing from which its session could go on."""


class KernelWorker:
    """Worker of one mount, from start to end. ``run`` blocks until it is over."""

    def __init__(
        self,
        context: WorkerContext,
        make_core: CoreFactory,
        *,
        passthrough: bool = True,
        stack_depth: int = 1,
        session_fd: int | None = None,
    ) -> None:
        self._context = context
        self._make_core = make_core
        self._passthrough = passthrough
        self._stack_depth = stack_depth
        self._session_fd = session_fd
        self._device = ""
        self._mounted_ns = time.time_ns()
        self._departure = Departure(context, lambda: self._device, self._unmounted)
        self._journal: JournalWriter | None = None
        self._claim: SessionClaim | None = None
        self._handed_over = False
        # Held while a file is changed without a request of the session, because ``park`` does not wait for
        # that.
        self._sharing = threading.Lock()
        self._shares = True

    def run(self) -> None:
        """Mount or take over, serve, and return when the mount is gone and the tracking is saved."""
        if self._session_fd is not None:
            self._take_over(self._session_fd)
            return
        fuse_fd = mounts.mount_fuse(self._context.backing_fd)
        # Noted at once: the kernel gives a device number anew as soon as it is free, and only our own mount
        # may be detached.
        self._know_mount()
        try:
            self._claim = SessionClaim.begin(self._claim_path)
            negotiated = kernel_session.negotiate(
                fuse_fd, passthrough=self._passthrough, stack_depth=self._stack_depth
            )
            if negotiated.writeback:
                mounts.set_readahead(self._device, READAHEAD_BYTES)
            # A journal of an earlier session under this name would be read by a successor of this one.
            journal_writer.remove(self._journal_base)
            if negotiated.resends:
                self._journal = self._new_journal(negotiated)
            core = self._make_core(kernel_keeps_times=negotiated.writeback, journal=self._journal)
            driver = KernelDriver(core, fuse_fd, negotiated, journal=self._journal)
            self._serve(fuse_fd, core, driver)
        except BaseException:
            detach_own(self._context, self._device, has_served=False)
            raise
        finally:
            os.close(fuse_fd)

    def _take_over(self, fuse_fd: int) -> None:
        """Go on with the session of a predecessor. A failure here leaves the session to the next attempt."""
        # Before the journal is read: a predecessor that still serves would go on writing it.
        self._claim = SessionClaim.inherit(self._claim_path)
        began = time.perf_counter()
        stages: dict[str, float] = {}

        def reached(stage: str) -> None:
            stages[stage] = round(1000 * (time.perf_counter() - began), 1)

        self._know_mount()
        inherited = journal_writer.replay(self._journal_base)
        reached("ledger read")
        if inherited is None:
            raise NotInherited("the predecessor left no journal that this version understands")
        negotiated = Negotiated(inherited.minor, inherited.flags, inherited.max_write_bytes)
        self._journal = self._new_journal(negotiated, inherited)
        core = self._make_core(
            kernel_keeps_times=negotiated.writeback, journal=self._journal, inherited=inherited
        )
        driver = KernelDriver(core, fuse_fd, negotiated, journal=self._journal, inherited=inherited)
        reached("nodes and handles opened")
        # After everything is open, and before the first request is read: the kernel sends again what the
        # predecessor had read.
        driver.answer_opens(inherited)
        driver.session.resend()
        reached("requests asked for again")
        log.info(
            "session_taken_over",
            root=self._context.root,
            files=len(inherited.files),
            stages_ms=stages,
        )
        self._serve(fuse_fd, core, driver)

    @property
    def _claim_path(self) -> Path:
        return Path(f"{self._context.control}.serving")

    @property
    def _journal_base(self) -> Path:
        return Path(f"{self._context.control}.ledger")

    def _new_journal(
        self, negotiated: Negotiated, inherited: InheritedSession | None = None
    ) -> JournalWriter | None:
        try:
            kept = JournalWriter(self._journal_base, inherited=inherited)
            kept.begin(negotiated.minor, negotiated.flags, negotiated.max_write_bytes)
        except OSError as error:
            log.error("ledger_given_up", error=str(error))
            return None
        return kept

    def _know_mount(self) -> None:
        entry = mounts.overlay_over(self._context.backing_fd)
        self._device = entry.device if entry is not None else ""

    def _serve(self, fuse_fd: int, core: OverlayCore, driver: KernelDriver) -> None:
        self._driver, self._core = driver, core
        server = ControlServer(
            core,
            self._context.control,
            backing_fd=self._context.backing_fd,
            session_fd=fuse_fd if self._journal is not None else None,
            on_stop=self.stop,
            on_stay=self._departure.stay,
            on_hand_over=self.hand_over,
            on_share=self.share,
            on_snapshots_directory=driver.snapshots_directory.show_to,
            extra_status=self._status,
        )
        try:
            for number in STOP_SIGNALS:
                signal.signal(number, self._on_signal)
            # Before the first thread, because a thread has the priority of the one that starts it.
            takeover_priority.lower_priority(group_after_seconds=takeover_priority.SETTLED_SECONDS)
            threading.Thread(target=_collect_garbage, name="garbage", daemon=True).start()
            self._core.room_for_unseen.start()
            driver.session.latency.publish(f"{self._context.control}{WAITS_SUFFIX}")
            driver.session.begin()
            server.start()
            log.info(
                "overlay_mounted",
                root=self._context.root,
                driver="kernel",
                passthrough=driver.modes.passthrough,
            )
            self._context.announce()
            driver.session.wait()
        finally:
            if not self._handed_over:
                detach_own(self._context, self._device, has_served=driver.session.is_over)
            server.close()
            if not self._handed_over:
                driver.session.latency.unpublish()
        # The last save has begun, which a second signal must not interrupt.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        if self._handed_over:
            # Not through the interpreter's end: threads that have parked a request wait for ever.
            os._exit(0)
        core.save_tracking()
        core.close()
        if self._journal is not None:
            self._journal.remove()
        if self._claim is not None:
            self._claim.release()

    def hand_over(self) -> None:
        """Leave the session to a successor, with its tracking.

        This process ends afterwards; parked requests are the successor's.

        Raises:
            OSError: EOPNOTSUPP where there is no journal from which a successor could go on.
        """
        if self._journal is None or not self._journal.kept:
            raise OSError(errno.EOPNOTSUPP, "this session cannot be handed over")
        log.info("handing_over", root=self._context.root)
        with self._sharing:
            self._shares = False
        # Tracking is saved only if no request is under way: one that is could change a file after its mark
        # was saved. Without it the successor's next snapshot compares everything.
        if self._driver.session.park(_PARK_SECONDS):
            try:
                self._core.save_for_successor()
            except OSError as error:
                # A full disk, for example. No request is served any more, so the hand-over goes on.
                log.error("tracking_not_handed_over", error=str(error))
        self._handed_over = True
        threading.Timer(_LAST_ANSWER_SECONDS, self._driver.session.end).start()

    def share(self, request: Share, source_fd: int) -> None:
        """Give a file that is open for writing extents of ``source_fd`` (core/files.py).

        Raises:
            OSError: ESTALE for another mount's file, EOPNOTSUPP while the session is handed over, otherwise
                as of `Data.share`.
        """
        # A node number of another mount would name another file here.
        if not self._device or request.device != self._device:
            raise OSError(errno.ESTALE, "that file is not of this mount")
        with self._sharing:
            if not self._shares:
                # The tracking is saved already: a mark made now would not reach the successor.
                raise OSError(errno.EOPNOTSUPP, "this session is being handed over")
            self._driver.share(request.node, source_fd, request.source_offset, request.offset, request.length)

    def _status(self) -> Mapping[str, Any]:
        return {
            "driver": "kernel",
            "driver_why": self._context.driver_why,
            "filtered": self._context.filtered,
            "version": ciuic.__version__,
            "passthrough": self._driver.modes.passthrough,
            "survives": self._journal is not None and self._journal.kept,
            "mounted_ns": self._mounted_ns,
            "requests": self._driver.session.requests,
            "waited_us": self._driver.session.latency.microseconds,
        }

    def _on_signal(self, number: int, frame: object) -> None:
        log.info("stop_signal", signal=signal.Signals(number).name)
        threading.Thread(target=self._stop_for_signal, daemon=True).start()

    def _stop_for_signal(self) -> None:
        try:
            self.stop(self._context.grace_seconds)
        except OSError as error:
            log.error("overlay_not_unmounted", root=self._context.root, error=str(error))

    def stop(self, grace_seconds: float) -> bool:
        """Unmount and end as soon as nobody is in the mount or the grace is over (Departure.stop)."""
        return self._departure.stop(grace_seconds)

    def _unmounted(self, seconds: float) -> None:
        if self._journal is not None:
            # No successor goes on with this session. While its open handles are served, another session may
            # begin, which would find its journal and remove its orphans' links.
            self._journal.remove()
            self._core.pin_orphans()
        # A greater value would raise OverflowError in the timer's thread, and the worker would never end.
        timer = threading.Timer(min(seconds, threading.TIMEOUT_MAX), self._end)
        timer.daemon = True
        timer.start()

    def _end(self) -> None:
        log.warning("handles_left_open", open_files=self._core.open_files)
        self._driver.session.end()


def _collect_garbage() -> None:
    """Collect young garbage only: a full collection walks a million nodes, and the job would wait for it."""
    # What exists already is never looked at again, and full collections are off: they would stop all threads.
    gc.freeze()
    gc.disable()
    while True:
        time.sleep(_COLLECT_SECONDS)
        with contextlib.suppress(RuntimeError):
            gc.collect(1)
