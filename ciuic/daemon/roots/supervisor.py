"""Supervisor of one root: recover, mount, watch, and replace the worker at once when it dies.

Guarantees: as long as the task runs, the overlay is over the root or an alert says why not; a dead mount is
detached before a new worker starts; after `stop` nothing is mounted there, unless a process is in the
overlay: then it is served on until the last one has left, because a job must not fail. Belongs to the trio
thread.

A worker that hangs is killed, so that a successor goes on with its session. The probe needs no lock and no
disk in the worker: one that does not answer three probes in a row is stopped, deadlocked or in an endless
loop, and its job waits with it; a disk that hangs keeps a worker from serving, not from answering. A worker
whose session would end with it is never killed.

A worker whose overlay another process unmounted goes on serving open files, with nothing pending in the undo
log that it shares with its successor.

Leaves to others: processes and mounts (mount_hooks.py, worker_process.py), the search for bypasses
(bypass_watch.py).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

import structlog
import trio

import ciuic
from ciuic.daemon.base.child_processes import restart_pause_seconds
from ciuic.daemon.base.events import Alerts, EventBus
from ciuic.daemon.base.settings import RootSettings
from ciuic.daemon.roots.bypass_watch import BypassWatch
from ciuic.daemon.roots.mount_hooks import MountHooks
from ciuic.daemon.roots.snapshots_view import SnapshotsView
from ciuic.daemon.roots.worker_process import LINGER_GRACE_SECONDS, OverlayWorker, WorkerClient
from ciuic.errors import CiuicError, Unreachable, UsageError
from ciuic.fuse_layer.journal.succession import (
    PLAIN_AFTER_DEATHS,
    STABLE_SECONDS,
    counted_deaths,
    pause_seconds,
)
from ciuic.fuse_layer.system.mounts import MovedMounts
from ciuic.protocol.control_types import MountState, RootStatus, rfc3339
from ciuic.system import service_manager
from ciuic.system.open_files import describe
from ciuic.system.processes import describe_exit

STOP_TIMEOUT_SECONDS = 60.0
# Pause between two looks at what is mounted in an overlay that ends when nobody is in it.
_DEPARTURE_SECONDS = 1.0
# A worker that has detached and still lives after this long is serving open handles.
LINGER_NOTICE_SECONDS = 3.0
# Pause between two probes of a worker (`_end_when_hung`).
_PROBE_PERIOD_SECONDS = 3.0
# The probe needs no lock and no disk in the worker.
_PROBE_ANSWER_SECONDS = 5.0
# Probes in a row without an answer, after which a worker counts as hung.
_SILENCES = 3
# The old worker should leave undo log, journal and socket before the root is mounted anew. That takes some
# milliseconds, unless the host is overloaded or the worker hangs, and meanwhile the plain directory is open
# to everybody.
_DETACH_SECONDS: Final = 3.0
# libfuse owns the connection of a pyfuse3 worker, so the end of the process is the only sign that no file was
# open in it.
_END_SECONDS: Final = 0.5
# Longest wait for what a worker tells about itself, because `ciuic status` waits for the slowest one.
_STATUS_TIMEOUT_SECONDS: Final = 2.0
_COPIED_FIELDS: Final = (
    *("driver", "driver_why", "passthrough", "filtered", "epoch", "dirty_bytes"),
    *("dirty_inodes", "undo_bytes", "open_files", "requests"),
)
log = structlog.get_logger(__name__)

# A limiter of its own: probes of workers that hang are abandoned and keep their threads until the socket
# times out.
_threads = trio.CapacityLimiter(256)


class _RootAlerts:
    """Report and clear the alerts of one root. Belongs to the trio thread."""

    def __init__(self, alerts: Alerts, path: str) -> None:
        self._alerts = alerts
        self._path = path

    def not_mounted(self, error: str, hint: str) -> None:
        """Report that the root has no overlay."""
        self._alerts.report(
            f"root:{self._path}",
            f"{self._path} is not protected: {error}",
            hint=hint or "the daemon keeps trying",
            root=self._path,
        )

    def not_unmounted(self, error: str, hint: str) -> None:
        """Report that the overlay is still over the root although it should not be."""
        self._alerts.report(
            f"root:{self._path}",
            f"the overlay of {self._path} could not be unmounted: {error or 'its worker does not stop'}",
            hint=hint or f"look at its log; as a last resort: umount -l {self._path}",
            root=self._path,
        )

    def clear_mount(self) -> None:
        """Clear what `not_mounted` and `not_unmounted` reported."""
        self._alerts.clear(f"root:{self._path}")

    def clear_silent(self) -> None:
        """Clear the alert about a worker that does not answer: it has ended."""
        self._alerts.clear(f"silent:{self._path}")

    def worker_died(self, status: int | None, *, has_session: bool) -> None:
        """Report that the worker died.

        Args:
            status: exit status, negative for a signal; None when it is not known.
            has_session: a successor can go on with the session, so that files stay open.
        """
        noticed = (
            "a successor goes on with its session, and files stay open"
            if has_session
            else "files that were open through it answer ENOTCONN"
        )
        self._alerts.report(
            f"worker:{self._path}",
            f"the overlay worker of {self._path} died ({describe_exit(status)}) and was started again",
            hint=f"{noticed}; see the worker's last lines in the log",
            root=self._path,
            severity="warning",
        )

    def unmounted_by_others(self, *, lingers: bool) -> None:
        """Report that another process unmounted the overlay.

        Args:
            lingers: the worker goes on serving files that are open in the overlay.
        """
        files = (
            "files that were open in it go on being served, and what is written to them is not tracked"
            if lingers
            else "no file was open in it"
        )
        self._alerts.report(
            f"unmounted:{self._path}",
            f"the overlay of {self._path} was taken off by somebody else (umount, or a signal to its worker) and is "
            f"mounted again; {files}",
            hint="the next snapshot compares the whole tree; to take an overlay away: ciuic unprotect PATH",
            root=self._path,
            severity="warning",
        )

    def plain(self, plain: bool) -> None:
        """Report that the root is served without tracking, or clear that."""
        if not plain:
            self._alerts.clear(f"plain:{self._path}")
            return
        self._alerts.report(
            f"plain:{self._path}",
            f"{self._path} is served without snapshots: its overlay workers kept dying",
            hint="the job goes on, and the log has the workers' last lines; to try again, "
            + service_manager.restart_hint(),
            root=self._path,
        )

    def set_aside(self, names: Sequence[bytes]) -> None:
        """Report the new names of files that the root's owner had put where the worker keeps its state."""
        if not names:
            return
        shown = ", ".join(os.fsdecode(name) for name in names)
        self._alerts.report(
            f"reserved:{self._path}",
            f"{self._path} had a file of its owner under the reserved name {os.fsdecode(ciuic.STATE_DIR_NAME)}; "
            f"it was renamed to {shown}",
            hint="look at it; ciuic has not used it",
            root=self._path,
            severity="warning",
        )


async def _end_when_hung(worker: OverlayWorker) -> None:
    """Probe a worker until it hangs, and kill it then. Ends with the use of the worker."""
    if worker.session_fd is None:
        return
    silences = 0
    while silences < _SILENCES:
        await trio.sleep(_PROBE_PERIOD_SECONDS)
        silences = 0 if await _answers(worker) else silences + 1
        if worker.closed:
            return
    log.error("worker_hangs", pid=worker.pid, silences=silences)
    worker.kill()


async def _answers(worker: OverlayWorker) -> bool:
    """Probe once, on a new connection: the standing one may be waiting for an answer that needs a disk."""
    client = worker.connect()
    try:
        with trio.fail_after(_PROBE_ANSWER_SECONDS):
            await trio.to_thread.run_sync(_probe, client, abandon_on_cancel=True, limiter=_threads)
    except trio.TooSlowError:
        return False
    except CiuicError as error:
        log.warning("worker_silent", pid=worker.pid, error=str(error))
        return False
    return True


def _probe(client: WorkerClient) -> None:
    try:
        client.alive()
    finally:
        client.close()


def _abort_pending(client: WorkerClient) -> None:
    """Abort every epoch that is sealed and not captured."""
    for epoch in client.status().pending:
        client.abort(epoch)


async def _leave_to_linger(worker: OverlayWorker, grace_seconds: float) -> bool:
    """Have a worker whose overlay is gone end when the last file in it is closed.

    Return whether it lives on until then.

    Args:
        worker: worker without a mount.
        grace_seconds: longest time for which it serves open files.
    """
    if worker.session_fd is None:
        with trio.move_on_after(_END_SECONDS):
            await worker.wait()
    lingers = worker.is_alive() and not worker.session_is_over()
    with trio.move_on_after(_DETACH_SECONDS):
        if not lingers:
            await worker.wait()
            return False
        with suppress(CiuicError):
            await worker.ask(_abort_pending)
            await worker.ask(lambda client: client.stop(grace_seconds))
    return lingers


async def _add_worker_status(document: RootStatus, worker: OverlayWorker, *, has_gap: bool) -> None:
    """Add what the worker answers within `_STATUS_TIMEOUT_SECONDS` to `document`.

    A worker that does not answer is its error.

    Args:
        document: document to complete.
        worker: worker of the root.
        has_gap: a process has written to the root without passing the overlay, so tracking does not count.
    """
    document.worker_pid = worker.pid
    document.session = worker.session
    try:
        with trio.fail_after(_STATUS_TIMEOUT_SECONDS):
            facts = await worker.ask(lambda client: client.status())
    except (Unreachable, trio.TooSlowError):
        document.error = "the worker does not answer"
        return
    for name in _COPIED_FIELDS:
        setattr(document, name, getattr(facts, name))
    document.waited_seconds = facts.waited_us / 1e6
    document.pending = list(facts.pending)
    document.tracking = facts.since > 0 and not has_gap
    document.mounted_since = rfc3339(facts.mounted_ns) if facts.mounted_ns else ""


def _put_back(moved: MovedMounts) -> None:
    """Return mounts to an overlay that stays after all: the job looks for them there."""
    try:
        moved.back()
    except OSError as error:
        log.error("mounts_not_moved_back", error=str(error))
    moved.close()


class RootSupervisor:
    """Supervisor of one root. `run` is its task; everything else may be called at any time."""

    def __init__(
        self,
        settings: RootSettings,
        hooks: MountHooks,
        *,
        alerts: Alerts,
        events: EventBus,
        on_session: Callable[[str, OverlayWorker], Awaitable[None]],
        on_session_lost: Callable[[str, str], None],
        departs: bool = False,
        view: SnapshotsView | None = None,
    ) -> None:
        """Take the parts.

        Args:
            settings: settings of the root.
            hooks: access to mounts and processes.
            alerts: standing alerts.
            events: events of the daemon.
            on_session: called when a worker serves the root.
            on_session_lost: called when a session is lost.
            departs: the root is no longer protected: its overlay is served only until nobody is in it, and `run` ends then.
            view: shows the root's snapshots in it; None: nothing does.
        """
        self.settings = settings
        self.view = view
        self._departs = departs
        self.path = settings.path
        self.in_use = False
        """Whether, after `stop`, the overlay is still there because a process is in it; its worker unmounts it later."""
        self.lingers = False
        """Whether, after `stop`, the worker lives on for a job that has files open, and still needs its
        state directory."""
        self.worker: OverlayWorker | None = None
        self.state: MountState = "starting"
        self.restarts = 0
        self.error = ""
        self.fault: type[CiuicError] = CiuicError
        """Class of ``error``: a UsageError is about the directory, which its owner may have moved, and not about this host."""
        self.plain = False
        """True if the root is served without tracking, so that no snapshot has it."""
        # Deaths of workers in a row.
        self._deaths = 0
        self._served_since = 0.0
        # Another process unmounted the overlay, and the session ended with it.
        self._session_gone = False
        # Worker that was told to end and to leave its session to a successor.
        self._handed_over: OverlayWorker | None = None
        self.bypass = BypassWatch(settings.path, hooks, alerts)
        self._hooks = hooks
        self._root_alerts = _RootAlerts(alerts, settings.path)
        self._events = events
        self._on_session = on_session
        self._on_session_lost = on_session_lost
        self._settled = trio.Event()
        self._changed = trio.Event()
        self._stopping = False
        self._scope = trio.CancelScope()
        self._finished = trio.Event()

    # -- the task

    async def run(self) -> None:
        """Serve the root until `stop` or `leave`."""
        try:
            with self._scope:
                async with trio.open_nursery() as nursery:
                    if self.view is not None:
                        nursery.start_soon(self.view.run, lambda: self.worker)
                    await self._run()
                    nursery.cancel_scope.cancel()
        finally:
            self._settled.set()
            self._finished.set()

    async def _run(self) -> None:
        failures = 0
        while not self._stopping:
            if self._departs and not await self._hooks.is_mounted(self.path):
                await self._hooks.forget(self.path)
                self._set("unmounted")
                break
            began = trio.current_time()
            worker = await self._establish()
            if worker is None:
                failures += 1
            else:
                while worker is not None:
                    began = trio.current_time()
                    await self._watch(worker)
                    worker = await self._succeeded(worker)
                lived = trio.current_time() - began
                # A worker that lived for long ends the row of failures, so that the next mount
                # follows at once.
                failures = 0 if lived >= STABLE_SECONDS else failures
                failures += 1
            if not self._stopping:
                await trio.sleep(restart_pause_seconds(failures))

    async def _establish(self) -> OverlayWorker | None:
        """Mount, or adopt the worker of a predecessor.

        Return None, with an alert, when neither is possible now.
        """
        try:
            worker = await self._hooks.establish(self.settings)
        except (CiuicError, OSError) as error:
            hint = error.hint if isinstance(error, CiuicError) else ""
            self.error = str(error)
            self.fault = UsageError if isinstance(error, UsageError) else CiuicError
            self._set("failed")
            log.error("root_not_mounted", root=self.path, error=self.error)
            self._root_alerts.not_mounted(self.error, hint)
            self._settled.set()
            return None
        # Known before the first checkpoint, so that `stop` unmounts it.
        self.worker = worker
        self.bypass.mounted(adopted=worker.adopted)
        self._now_served_by(worker)
        return worker

    async def _watch(self, worker: OverlayWorker) -> None:
        """Wait until the worker has ended or its mount is gone, and record what happened."""
        status: int | None = None
        self._session_gone = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_end_when_hung, worker)
            nursery.start_soon(self._take_up, worker)
            # In a task of its own: it waits for the cut that is being made, which may itself wait for this
            # worker's successor.
            nursery.start_soon(self._on_session, self.path, worker)
            nursery.start_soon(self.bypass.serve, self._own_pids)
            nursery.start_soon(self._end_when_unmounted, nursery.cancel_scope)
            if self._departs:
                nursery.start_soon(self._ask_to_depart, worker)
            status = await worker.wait()
            nursery.cancel_scope.cancel()
        self._settled.set()
        self.worker = None
        # Before anything else: the plain directory is open to everybody now, and a capture that goes on would
        # not be exact.
        self._on_session_lost(self.path, worker.session)
        self._root_alerts.clear_silent()
        if self._stopping:
            self.worker = worker
            return
        if worker is self._handed_over:
            return
        # A worker ends with status 0 when its mount is gone. A killed worker leaves its mount, and the job
        # waits for the successor.
        try:
            is_gone = self._session_gone or (not status and not await self._hooks.is_mounted(self.path))
        except trio.Cancelled:
            self.worker = worker
            raise
        if is_gone:
            if self._departs:
                self._session_gone = True
            else:
                await self._unmounted_by_others(worker)
            return
        self.restarts += 1
        # SIGKILL does not count: it says nothing against the worker.
        self._deaths = counted_deaths(self._deaths, status, trio.current_time() - self._served_since)
        self.error = f"the overlay worker ended: {describe_exit(status)}"
        self._set("restarting")
        log.error("worker_died", root=self.path, pid=worker.pid, status=describe_exit(status))
        self._root_alerts.worker_died(status, has_session=worker.session_fd is not None)

    async def _take_up(self, worker: OverlayWorker) -> None:
        """Have the worker of an earlier daemon serve on, or hand over."""
        if worker.adopted and not self._departs:
            # An earlier daemon may have asked it to unmount as soon as nobody is in it.
            with suppress(CiuicError):
                await worker.ask(lambda client: client.stay())
        await self._renew(worker)
        self._settled.set()

    async def _end_when_unmounted(self, watching: trio.CancelScope) -> None:
        try:
            await self._hooks.unmounted(self.path)
        except OSError as error:
            # Out of descriptors: the end of the session is still noticed by the end of the worker.
            log.warning("mounts_not_watched", root=self.path, error=str(error))
            return
        # Not waited for: a worker that serves open files lives on after its mount is gone.
        self._session_gone = True
        watching.cancel()

    async def _ask_to_depart(self, worker: OverlayWorker) -> None:
        """Have a worker unmount as soon as nobody is in the overlay, whatever others have mounted inside it."""
        # Of each worker: one that goes on with the session of another does not know of its request.
        with suppress(CiuicError):
            await worker.ask(lambda client: client.stop(LINGER_GRACE_SECONDS))
        while True:
            await trio.sleep(_DEPARTURE_SECONDS)
            # The worker waits for the others by itself, but may move no mounts. While somebody is in the overlay they stay in it.
            if not await self._hooks.has_mounts_inside(self.path) or await self._hooks.users(self.path):
                continue
            # The end of the mount ends this task, but not between the unmounting and what follows it.
            with trio.move_on_after(STOP_TIMEOUT_SECONDS, shield=True), suppress(CiuicError):
                moved = await self._hooks.move_mounts_inside(self.path, worker.backing_fd)
                is_unmounted = False
                try:
                    is_unmounted = await worker.ask(lambda client: client.stop(LINGER_GRACE_SECONDS))
                finally:
                    if is_unmounted:
                        moved.close()
                    else:
                        with trio.CancelScope(shield=True):
                            await trio.to_thread.run_sync(_put_back, moved)

    async def _unmounted_by_others(self, worker: OverlayWorker) -> None:
        """Handle an overlay that another process unmounted.

        Open files go on being served, and the root is mounted anew.
        """
        self._session_gone = True
        self._set("restarting")
        self.error = "its overlay was taken off by somebody else"
        await self._hooks.forget(self.path)
        lingers = await _leave_to_linger(worker, LINGER_GRACE_SECONDS)
        self.lingers |= lingers
        log.error("root_unmounted_by_others", root=self.path, pid=worker.pid, open_files=lingers)
        self._root_alerts.unmounted_by_others(lingers=lingers)

    async def _succeeded(self, dead: OverlayWorker) -> OverlayWorker | None:
        """Close `dead` and return a worker that goes on with its session.

        Return None where that is impossible; the mount of the session is detached then.
        """
        if self._stopping:
            # Since the worker was seen to end: its session is for `stop` and `leave`.
            self.worker = dead
            return None
        if self._session_gone:  # it ended with its mount
            dead.close()
            return None
        try:
            worker = await self._successor_of(dead)
            if worker is not None:
                self._now_served_by(worker)
                return worker
        except trio.Cancelled:
            # `stop` has a successor unmount, and `leave` closes it.
            self.worker = dead
            raise
        finally:
            # While any process holds the session, a mount that no worker serves hangs; it is dead, and can be
            # detached, only after that.
            if self.worker is not dead:
                dead.close()
        await self._give_up_session()
        return None

    async def _successor_of(self, dead: OverlayWorker) -> OverlayWorker | None:
        """Return a worker that goes on with the session of `dead`; None where there can be none."""
        while dead.session_fd is not None and not dead.session_is_over():
            pause = pause_seconds(self._deaths)
            if pause is None:
                log.error("session_given_up", root=self.path, deaths=self._deaths)
                break
            # The job waits meanwhile, so the first pauses are 0.
            await trio.sleep(pause)
            # Without tracking a defect in it cannot end the next worker: the job goes on, and snapshots are
            # refused.
            plain = self._deaths >= PLAIN_AFTER_DEATHS
            try:
                return await self._hooks.succeed(self.settings, dead, plain=plain)
            except (CiuicError, OSError) as error:
                log.error("session_not_taken_over", root=self.path, error=str(error))
                # Counted as a death: the pause grows, and in the end the session is given up instead of
                # hanging.
                self._deaths += 1
        return None

    async def _give_up_session(self) -> None:
        """Detach a mount that no worker serves.

        Do nothing while the daemon ends: `stop` detaches it then, and after `leave` the next daemon does.
        """
        if self._stopping:
            return
        await self._hooks.forget(self.path)
        try:
            await self._hooks.detach_dead(self.path)
        except (CiuicError, OSError) as error:
            log.error("dead_mount_not_detached", root=self.path, error=str(error))

    def _now_served_by(self, worker: OverlayWorker) -> None:
        self.worker = worker
        self.error = ""
        self._served_since = trio.current_time()
        self._handed_over = None
        self._root_alerts.clear_mount()
        if worker.plain != self.plain:
            self.plain = worker.plain
            log.log(
                logging.ERROR if self.plain else logging.INFO, "root_plain", root=self.path, plain=self.plain
            )
        self._root_alerts.plain(self.plain)
        self._root_alerts.set_aside(worker.set_aside)
        self._set("mounted")
        log.info(
            "root_mounted", root=self.path, pid=worker.pid, session=worker.session, adopted=worker.adopted
        )

    async def _renew(self, worker: OverlayWorker) -> None:
        """Replace an adopted worker of another version, or one that tracks nothing, by a full one of this version."""
        is_current = worker.version == ciuic.__version__ and not worker.plain
        if not worker.adopted or worker.session_fd is None or is_current:
            return
        # The job waits from the hand-over on. Without a prepared process it would wait for an interpreter to
        # start as well: 2.4 s after an upgrade, on two busy processors.
        await self._hooks.prepare_successor()
        log.info("worker_renewed", root=self.path, pid=worker.pid, version=worker.version)
        await self.hand_over(worker)

    async def hand_over(self, worker: OverlayWorker) -> None:
        """Have `worker` end and leave its session to a new one. Open files stay open, and tracking goes on."""
        self._handed_over = worker
        try:
            await worker.ask(lambda client: client.hand_over())
        except (Unreachable, CiuicError) as error:
            self._handed_over = None
            log.warning("worker_not_renewed", root=self.path, error=str(error))

    def _own_pids(self) -> set[int]:
        return {os.getpid()} | ({self.worker.pid} if self.worker else set())

    # -- from outside

    async def refresh_bypassing(self) -> None:
        """See `BypassWatch.refresh`."""
        await self.bypass.refresh(self._own_pids())

    async def not_in_transition(self) -> None:
        """Wait while a worker is being started; return when the root is mounted, failed or stopped."""
        while self.state in ("starting", "restarting"):
            await self._changed.wait()

    async def settled(self) -> None:
        """Wait for the end of the first attempt to mount, successful or not."""
        await self._settled.wait()

    async def stop(self) -> None:
        """Unmount and end the task. On return no overlay is over the root, or an alert says why one is."""
        self._stopping = True
        self._set("stopping")
        self._scope.cancel()
        await self._finished.wait()
        async with trio.open_nursery() as nursery:
            await self._unmount(nursery)
            nursery.cancel_scope.cancel()

    async def _unmount(self, nursery: trio.Nursery) -> None:
        """Have the worker unmount, or where it dies or hangs a successor of it.

        Args:
            nursery: looks whether the workers hang.
        """
        worker, self.worker = self.worker, None
        try:
            if worker is None:
                # The stop may have come while a successor was being started, of which files are open.
                with suppress(CiuicError):
                    worker = await self._hooks.recover(self.settings)
            while worker is not None:
                nursery.start_soon(_end_when_hung, worker)
                self._on_session_lost(self.path, worker.session)
                if self.view is not None:
                    await self.view.end(worker)
                if await self._stop_worker(worker):
                    break
                worker = await self._last_successor(worker)
            else:
                # In this order: the mount is dead, and can be detached, only when no process holds its
                # session.
                await self._hooks.forget(self.path)
                await self._hooks.detach_dead(self.path)
        except (CiuicError, OSError, trio.TooSlowError) as error:
            log.error("root_not_unmounted", root=self.path, error=str(error) or type(error).__name__)
            self.error = str(error)
            self._root_alerts.not_unmounted(self.error, error.hint if isinstance(error, CiuicError) else "")
            if worker is not None and not worker.closed:
                # Another supervisor goes on with it, or the next daemon.
                self._hooks.hold(self.path, worker)
            return
        finally:
            # Only now: mounts are put back, and the session is held, through its descriptors.
            if worker is not None:
                worker.close()
        self._root_alerts.clear_mount()
        if self.in_use:
            # Its session is kept, so that a successor goes on with it where its worker is killed.
            log.info(
                "root_in_use", root=self.path, by=[str(user) for user in await self._hooks.users(self.path)]
            )
            return
        await self._hooks.forget(self.path)
        self._set("unmounted")
        log.info("root_unmounted", root=self.path)

    async def leave(self) -> None:
        """End the task and leave the overlay mounted: its worker serves on, and the next daemon adopts it."""
        self._stopping = True
        if self.view is not None:
            self.view.leaving = True
        self._scope.cancel()
        await self._finished.wait()
        worker, self.worker = self.worker, None
        if worker is not None:
            self._hooks.hold(self.path, worker)
            worker.close()
        log.info("root_left_mounted", root=self.path)

    async def _last_successor(self, dead: OverlayWorker) -> OverlayWorker | None:
        """Close a worker that died before it had unmounted, and return one that does so in its place.

        Without one the files that a job has open would fail. Return None where there can be none.
        """
        self._deaths += 1
        try:
            return await self._successor_of(dead)
        finally:
            dead.close()

    async def _stop_worker(self, worker: OverlayWorker) -> bool:
        """Have a worker unmount, and wait for its end unless it still serves handles.

        Return False where it died first. It is not closed.

        Where a process is in the overlay, the worker serves on and unmounts later; then `in_use` is set. What others have mounted inside the overlay stays mounted in its place.

        Raises:
            MountsInside: that is impossible; the overlay stays.
            TooSlowError: it does not unmount in time.
        """
        moved: MovedMounts | None = None
        try:
            with trio.fail_after(STOP_TIMEOUT_SECONDS):
                try:
                    moved = await self._hooks.move_mounts_inside(self.path, worker.backing_fd)
                    # No epoch may be pending in a worker that lingers: it shares the undo directory with its
                    # successor.
                    await worker.ask(_abort_pending)
                    if not await worker.ask(lambda client: client.stop(LINGER_GRACE_SECONDS)):
                        self.in_use = True
                        self._hooks.hold(self.path, worker)
                        return True
                except Unreachable:
                    if worker.is_alive():
                        worker.terminate()  # SIGTERM has the effect of the stop request
                if not await self._is_detached_by(worker):
                    return False
            if moved is not None:
                moved.close()
                moved = None
            with trio.move_on_after(LINGER_NOTICE_SECONDS):
                await worker.wait()
                return True
            self.lingers = True
            log.info("worker_serves_open_handles", root=self.path, pid=worker.pid)
            return True
        finally:
            if moved is not None:
                with trio.CancelScope(shield=True):
                    await trio.to_thread.run_sync(_put_back, moved)

    async def _is_detached_by(self, worker: OverlayWorker) -> bool:
        """Wait until the overlay is gone, and return True; return False where the worker ended first."""
        # Polled, although mountinfo can be waited for: a wake-up for every mount of the host costs more than
        # this.
        while await self._hooks.is_mounted(self.path):
            if not worker.is_alive():
                return False
            await trio.sleep(0.02)
        return True

    async def status(self) -> RootStatus:
        """Return the status of the root, with what its worker answers in time."""
        document = RootStatus(
            path=self.path,
            driver=self.settings.driver,
            state=self.state,
            restarts=self.restarts,
            error=self.error,
            snapshots_dir="off" if self.view is None else self.view.state,
            bypassing=self.bypass.reports(),
            bypassing_mounts=self.bypass.mount_reports(),
        )
        if self._departs:
            users = describe(await self._hooks.users(self.path))
            document.state = "stopping"
            document.error = (
                f"no longer protected; its overlay ends when nobody is in it: {users or 'a mount inside it'}"
            )
        worker = self.worker
        if worker is None:
            return document
        await _add_worker_status(document, worker, has_gap=self.bypass.has_gap)
        return document

    def _set(self, state: MountState) -> None:
        if state != self.state:
            self.state = state
            self._changed.set()
            self._changed = trio.Event()
            self._events.emit("root_state", root=self.path, detail=state)


@contextmanager
def backing_descriptors(supervisors: Iterable[RootSupervisor]) -> Iterator[list[int]]:
    """Yield duplicates of the backing descriptors of mounted roots, for use in a thread."""
    # Duplicates: a worker that ends closes its own at any time.
    with ExitStack() as stack:
        fds = []
        for supervisor in supervisors:
            if supervisor.worker is not None:
                fds.append(os.dup(supervisor.worker.backing_fd))
                stack.callback(os.close, fds[-1])
        yield fds
