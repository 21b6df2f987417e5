"""Keeping one root served: recover, mount, watch, and mount again at once when its worker dies.

Guarantees: as long as the task runs and the root is wanted, the overlay is over it or an alert says why not; a dead
mount is detached before a new worker starts; after ``stop`` nothing is mounted there. A worker that still serves open
handles is left alive: the job that holds them must not be hurt. Belongs to the trio thread.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import structlog
import trio

import ciuic
from ciuic import service_manager
from ciuic.bypass import Bypasser
from ciuic.control_types import MountState, RootStatus, rfc3339
from ciuic.daemon.alerts import Alerts
from ciuic.daemon.bypass_watch import BypassWatch
from ciuic.daemon.events import EventBus
from ciuic.daemon.hang_watch import end_when_hung
from ciuic.daemon.mount_hooks import MountHooks
from ciuic.daemon.settings import RootSettings
from ciuic.daemon.taken_off import abort_pending, leave_to_linger, report_taken_off
from ciuic.daemon.worker_process import Worker, describe_exit
from ciuic.errors import CiuicError, Unreachable
from ciuic.fuse_layer.succession import (
    PLAIN_AFTER_DEATHS,
    STABLE_SECONDS,
    counted_deaths,
    pause_seconds,
)
from ciuic.units import plural

BACKOFF_SECONDS = (0.0, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)
STOP_TIMEOUT_SECONDS = 60.0
STATUS_TIMEOUT_SECONDS = 2.0
LINGER_NOTICE_SECONDS = 3.0
"""A worker that has detached and still lives after this long is serving open handles."""
LINGER_GRACE_SECONDS = 10 * 365 * 86400.0
"""How long a detached worker serves the handles of a job that goes on: until they close, whatever that takes."""
log = structlog.get_logger(__name__)


class RootSupervisor:
    """One root. ``run`` is its task; everything else may be asked at any time."""

    def __init__(
        self,
        settings: RootSettings,
        hooks: MountHooks,
        *,
        alerts: Alerts,
        events: EventBus,
        on_session: Callable[[str, Worker], Awaitable[None]],
        on_session_lost: Callable[[str, str], None],
    ) -> None:
        self.settings = settings
        self.path = settings.path
        self.lingers = False
        """After ``stop``: the worker lives on for a job that has files open, and still needs its state directory."""
        self.worker: Worker | None = None
        self.state: MountState = "starting"
        self.restarts = 0
        self.error = ""
        self.plain = False
        """Served, and nothing tracked: no snapshots."""
        self._deaths = 0
        """Of workers, in a row."""
        self._served_since = 0.0
        self._session_gone = False
        """The overlay was unmounted by somebody else, and its session with it."""
        self._handed_over: Worker | None = None
        """Told to end, and to leave its session to a successor."""
        self.bypass = BypassWatch(settings.path, hooks, alerts)
        self._hooks = hooks
        self._alerts = alerts
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
        """Serves the root until ``stop``."""
        failures = 0
        try:
            with self._scope:
                while not self._stopping:
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
                        failures = 0 if lived >= STABLE_SECONDS else failures
                        failures += 1
                    if not self._stopping:
                        await trio.sleep(BACKOFF_SECONDS[min(failures - 1, len(BACKOFF_SECONDS) - 1)])
        finally:
            self._finished.set()

    async def _establish(self) -> Worker | None:
        """Mounts, or adopts what a predecessor left; None and an alert when that is not possible now."""
        try:
            worker = await self._hooks.establish(self.settings)
        except (CiuicError, OSError) as error:
            hint = error.hint if isinstance(error, CiuicError) else ""
            self.error = str(error)
            self._set("failed")
            log.error("root_not_mounted", root=self.path, error=self.error)
            self._alerts.report(
                f"root:{self.path}",
                f"{self.path} is not protected: {self.error}",
                hint=hint or "the daemon keeps trying",
                root=self.path,
            )
            self._settled.set()
            return None
        self.bypass.mounted(adopted=worker.adopted)
        self._now_served_by(worker)
        await self._renew(worker)
        self._settled.set()
        return worker

    async def _watch(self, worker: Worker) -> None:
        """Returns when the worker has ended, or its mount is gone."""
        status: int | None = None
        self._session_gone = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(end_when_hung, worker)
            # Beside the wait: it waits for the cut that is being made, which may be waiting for this very worker's successor.
            nursery.start_soon(self._on_session, self.path, worker)
            nursery.start_soon(self.bypass.run, self._own_pids)
            nursery.start_soon(self._end_when_unmounted, nursery.cancel_scope)
            status = await worker.wait()
            nursery.cancel_scope.cancel()
        self.worker = None
        # First of all: a capture that goes on while the plain directory is open to everybody would not be exact.
        self._on_session_lost(self.path, worker.session)
        self._alerts.clear(f"silent:{self.path}")
        if self._stopping:
            worker.close()
            return
        if worker is self._handed_over:
            return
        # A worker ends well when its mount is gone. One that was killed leaves it, and its job waits for the successor.
        if self._session_gone or (not status and not await self._hooks.is_mounted(self.path)):
            await self._unmounted_by_others(worker)
            return
        self.restarts += 1
        self._deaths = counted_deaths(self._deaths, status, trio.current_time() - self._served_since)
        self.error = f"the overlay worker ended: {describe_exit(status)}"
        self._set("restarting")
        log.error("worker_died", root=self.path, pid=worker.pid, status=describe_exit(status))
        noticed = (
            "files that were open through it answer ENOTCONN"
            if worker.session_fd is None
            else "a successor goes on with its session, and files stay open"
        )
        self._alerts.report(
            f"worker:{self.path}",
            f"the overlay worker of {self.path} died ({describe_exit(status)}) and was started again",
            hint=f"{noticed}; the log has the worker's last words",
            root=self.path,
            severity="warning",
        )

    async def _end_when_unmounted(self, watching: trio.CancelScope) -> None:
        try:
            await self._hooks.unmounted(self.path)
        except OSError as error:  # out of descriptors: what ends the session is noticed all the same
            log.warning("mounts_not_watched", root=self.path, error=str(error))
            return
        # A worker whose session ended with the mount is about to end by itself; one that serves open files is not.
        self._session_gone = True
        watching.cancel()

    async def _unmounted_by_others(self, worker: Worker) -> None:
        """The overlay is gone although nobody asked us: whatever is open in it goes on being served, and the root is mounted anew."""
        self._session_gone = True
        self._set("restarting")
        self.error = "its overlay was taken off by somebody else"
        await self._hooks.forget(self.path)
        lingers = await leave_to_linger(worker, LINGER_GRACE_SECONDS)
        self.lingers |= lingers
        log.error("root_unmounted_by_others", root=self.path, pid=worker.pid, open_files=lingers)
        report_taken_off(self._alerts, self.path, lingers=lingers)

    async def _succeeded(self, dead: Worker) -> Worker | None:
        """Closes ``dead`` and goes on with its session; None, and nothing of it is left mounted, where that is impossible."""
        if self._stopping:
            return None
        if self._session_gone:  # with its mount: nobody can go on with it
            dead.close()
            return None
        try:
            while dead.session_fd is not None and not self._stopping:
                pause = pause_seconds(self._deaths)
                if pause is None:
                    log.error("session_given_up", root=self.path, deaths=self._deaths)
                    break
                # The job waits meanwhile: at once the first times.
                await trio.sleep(pause)
                plain = self._deaths >= PLAIN_AFTER_DEATHS
                try:
                    worker = await self._hooks.succeed(self.settings, dead, plain=plain)
                except (CiuicError, OSError) as error:
                    log.error("session_not_taken_over", root=self.path, error=str(error))
                    self._deaths += 1
                    continue
                self._now_served_by(worker, plain=plain)
                return worker
        finally:
            # Without this descriptor, and what systemd keeps of it, a mount that nobody serves is dead; with it it would hang.
            dead.close()
        await self._give_up_session()
        return None

    async def _give_up_session(self) -> None:
        """Take the mount off that nobody serves. Nothing while the daemon ends: `stop` does it, `leave` leaves all to the next one."""
        if self._stopping:
            return
        await self._hooks.forget(self.path)
        try:
            await self._hooks.detach_dead(self.path)
        except (CiuicError, OSError) as error:
            log.error("dead_mount_not_detached", root=self.path, error=str(error))

    def _now_served_by(self, worker: Worker, *, plain: bool = False) -> None:
        self.worker = worker
        self.error = ""
        self._served_since = trio.current_time()
        self._handed_over = None
        self._alerts.clear(f"root:{self.path}")
        if plain != self.plain:
            self.plain = plain
            log.log(logging.ERROR if plain else logging.INFO, "root_plain", root=self.path, plain=plain)
        if plain:
            self._alerts.report(
                f"plain:{self.path}",
                f"{self.path} is served without snapshots: its overlay worker died {plural(self._deaths, 'time')} in a row",
                hint="the job goes on, and the log has the workers' last words; to try again, "
                + service_manager.restart_hint(),
                root=self.path,
            )
        else:
            self._alerts.clear(f"plain:{self.path}")
        if worker.set_aside:
            names = ", ".join(os.fsdecode(name) for name in worker.set_aside)
            self._alerts.report(
                f"reserved:{self.path}",
                f"{self.path} had something of its owner's under the reserved name {os.fsdecode(ciuic.STATE_DIR_NAME)}; "
                f"it is called {names} now",
                hint="look at what it is; ciuic has not used it",
                root=self.path,
                severity="warning",
            )
        self._set("mounted")
        log.info(
            "root_mounted", root=self.path, pid=worker.pid, session=worker.session, adopted=worker.adopted
        )

    async def _renew(self, worker: Worker) -> None:
        """An adopted worker of another version leaves its session to one of ours."""
        if not worker.adopted or worker.session_fd is None or worker.version == ciuic.__version__:
            return
        # The job waits from the hand-over on. Not also for an interpreter to start: 2.4 s after an upgrade, on two busy processors.
        await self._hooks.prepare_successor()
        log.info("worker_renewed", root=self.path, pid=worker.pid, version=worker.version)
        await self.hand_over(worker)

    async def hand_over(self, worker: Worker) -> None:
        """``worker`` ends, and a new one goes on with its session: no program notices, tracking goes on."""
        self._handed_over = worker
        try:
            await worker.ask(lambda client: client.hand_over())
        except (Unreachable, CiuicError) as error:
            self._handed_over = None
            log.warning("worker_not_renewed", root=self.path, error=str(error))

    def _own_pids(self) -> set[int]:
        return {os.getpid()} | ({self.worker.pid} if self.worker else set())

    # -- from outside

    @property
    def bypassing(self) -> Sequence[Bypasser]:
        """Processes that were found going round the overlay and are not known to have ended."""
        return self.bypass.processes

    @property
    def all_accounted(self) -> bool:
        """See `BypassWatch.all_accounted`."""
        return self.bypass.all_accounted

    @property
    def untrusted(self) -> bool:
        """Somebody went round the overlay since the last snapshot that compared everything: tracking has a gap."""
        return self.bypass.has_gap

    @untrusted.setter
    def untrusted(self, has_gap: bool) -> None:
        self.bypass.has_gap = has_gap

    async def refresh_bypassing(self) -> None:
        """Looks whether the processes that were found are gone. Finds no new ones: there can be none."""
        await self.bypass.refresh(self._own_pids())

    async def not_in_transition(self) -> None:
        """Returns when the root is mounted, failed or stopped: not while a worker is being started."""
        while self.state in ("starting", "restarting"):
            await self._changed.wait()

    async def settled(self) -> None:
        """Returns when the first attempt to mount has ended, well or not."""
        await self._settled.wait()

    async def stop(self) -> None:
        """Unmounts and ends the task. On return nothing of ours lies over the root, or an alert says why it does."""
        self._stopping = True
        self._set("stopping")
        self._scope.cancel()
        await self._finished.wait()
        worker, self.worker = self.worker, None
        try:
            if worker is None:
                await self._hooks.forget(self.path)  # first: the mount is dead when nobody holds its session
                await self._hooks.detach_dead(self.path)
            else:
                self._on_session_lost(self.path, worker.session)
                await self._stop_worker(worker)
        except (CiuicError, OSError, trio.TooSlowError) as error:
            log.error("root_not_unmounted", root=self.path, error=str(error) or type(error).__name__)
            self._alerts.report(
                f"root:{self.path}",
                f"the overlay of {self.path} could not be taken away: {str(error) or 'its worker does not stop'}",
                hint=f"look at its log; as a last resort: umount -l {self.path}",
                root=self.path,
            )
            return
        self._alerts.clear(f"root:{self.path}")
        await self._hooks.forget(self.path)
        self._set("unmounted")
        log.info("root_unmounted", root=self.path)

    async def leave(self) -> None:
        """Ends the task; the overlay stays mounted and its worker serves on, for the next daemon to find."""
        self._stopping = True
        self._scope.cancel()
        await self._finished.wait()
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.close()
        log.info("root_left_mounted", root=self.path)

    async def _stop_worker(self, worker: Worker) -> None:
        """Asks it to detach, and sees it end, unless it still serves open handles. TooSlowError if it does not detach."""
        try:
            with trio.fail_after(STOP_TIMEOUT_SECONDS):
                try:
                    # Nothing may be pending in a worker that lingers: it shares the undo directory with its successor.
                    await worker.ask(abort_pending)
                    await worker.ask(lambda client: client.stop(LINGER_GRACE_SECONDS))
                except Unreachable:
                    if not worker.is_alive():
                        worker.close()
                        await self._hooks.forget(self.path)
                        await self._hooks.detach_dead(self.path)
                        return
                    worker.terminate()  # SIGTERM asks for the same
                await self._wait_detached()
            with trio.move_on_after(LINGER_NOTICE_SECONDS):
                await worker.wait()
                return
            self.lingers = True
            log.info("worker_serves_open_handles", root=self.path, pid=worker.pid)
        finally:
            worker.close()

    async def _wait_detached(self) -> None:
        # Polled: mountinfo can be waited for, but a wake-up for every mount of the machine costs more than this.
        while await self._hooks.is_mounted(self.path):  # noqa: ASYNC110
            await trio.sleep(0.02)

    async def status(self) -> RootStatus:
        """The root now, with what its worker answers within two seconds."""
        document = RootStatus(
            path=self.path,
            driver=self.settings.driver,
            state=self.state,
            restarts=self.restarts,
            error=self.error,
            bypassing=self.bypass.reports(),
        )
        worker = self.worker
        if worker is None:
            return document
        document.worker_pid = worker.pid
        document.session = worker.session
        try:
            with trio.fail_after(STATUS_TIMEOUT_SECONDS):
                facts = await worker.ask(lambda client: client.status())
        except (Unreachable, trio.TooSlowError):
            document.error = "the worker does not answer"
            return document
        for name in (
            "driver",
            "driver_why",
            "passthrough",
            "filtered",
            "epoch",
            "dirty_bytes",
            "dirty_inodes",
            "undo_bytes",
            "open_files",
            "requests",
        ):
            setattr(document, name, getattr(facts, name))
        document.waited_seconds = facts.waited_us / 1e6
        document.pending = list(facts.pending)
        document.tracking = facts.since > 0 and not self.untrusted
        document.mounted_since = rfc3339(facts.mounted_ns) if facts.mounted_ns else ""
        return document

    def _set(self, state: MountState) -> None:
        if state != self.state:
            self.state = state
            self._changed.set()
            self._changed = trio.Event()
            self._events.emit("root_state", root=self.path, detail=state)


@contextmanager
def backing_descriptors(supervisors: Iterable[RootSupervisor]) -> Iterator[list[int]]:
    """Duplicates of the backing directories of those that are mounted, for a thread: a worker that ends closes its own."""
    with ExitStack() as stack:
        fds = []
        for supervisor in supervisors:
            if supervisor.worker is not None:
                fds.append(os.dup(supervisor.worker.backing_fd))
                stack.callback(os.close, fds[-1])
        yield fds
