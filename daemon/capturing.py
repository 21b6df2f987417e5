"""Capturing what was cut: one snapshot at a time, in the order of the cuts, until each is committed or given up.

Guarantees: each sealed epoch is in the end either committed or given back to its worker; a failure is tried again for as long as
pending.retry_after says; a defect of ours costs one snapshot, not the service. A snapshot whose epochs are gone is cut anew under its
id (retaking.py). Leaves to others: the queue and its journal (snapshot_queue.py), the cut (snapshots.py), the work itself
(capture_process.py).

Belongs to the trio thread. Every await below may find the world changed: sessions end, captures are killed; ``interrupted`` of
a pending snapshot is looked at after each.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import msgspec
import structlog
import trio

from ciuic.control_types import RepositoryStatus, SnapshotState, rfc3339
from ciuic.daemon.alerts import KEY_MISSING, Alerts
from ciuic.daemon.capture_job import EXIT_UNDO_LOST, Done, Failed, printable
from ciuic.daemon.capture_process import CaptureProcess
from ciuic.daemon.cut import Flush, flush
from ciuic.daemon.estimate import Durations
from ciuic.daemon.events import EventBus
from ciuic.daemon.job import make_job
from ciuic.daemon.left_out import LeftOutAlerts
from ciuic.daemon.pending import PendingSnapshot, retry_after
from ciuic.daemon.predecessor import await_capture
from ciuic.daemon.promises import Promises
from ciuic.daemon.retaking import MAX_RETAKES, RETAKE_PAUSES_SECONDS, Retaking
from ciuic.daemon.runtime import RuntimeDirectory
from ciuic.daemon.settings import Settings
from ciuic.daemon.snapshot_queue import SnapshotQueue
from ciuic.daemon.space import Shortage, SpaceWatch
from ciuic.daemon.store import Store
from ciuic.daemon.supervisor import RootSupervisor
from ciuic.daemon.trust import Trust
from ciuic.daemon.urging import Running
from ciuic.daemon.verdicts import find_commit, tell_workers
from ciuic.errors import CiuicError
from ciuic.processes import start_ticks
from ciuic.units import plural
from ciuic.urgency import Urgency

log = structlog.get_logger(__name__)


class Context(NamedTuple):
    """The parts of the daemon that taking snapshots uses."""

    settings: Callable[[], Settings]
    roots: Callable[[], Mapping[str, RootSupervisor]]
    store: Callable[[], Store]
    runtime: RuntimeDirectory
    alerts: Alerts
    events: EventBus
    now_ns: Callable[[], int]
    host: str
    new_capture: Callable[[], CaptureProcess]
    flush: Flush = flush
    space: SpaceWatch | None = None
    """None: captures keep no reserve."""


class Capturing:
    """The task that captures what is queued."""

    def __init__(
        self,
        context: Context,
        queue: SnapshotQueue,
        promises: Promises,
        retaking: Retaking,
        somebody_waits: Callable[[], bool],
    ) -> None:
        """``somebody_waits``: whether a person or a program waits for what is captured, or for what comes after it."""
        self._context = context
        self._queue = queue
        self._promises = promises
        self._retaking = retaking
        self._somebody_waits = somebody_waits
        self.repository_lock = trio.Lock()
        """Held while a process of ours writes to the repository: captures and upkeep take turns."""
        self.on_committed: Callable[[], None] = lambda: None
        self.on_urgency: Callable[[], None] = lambda: None
        """The terms of what is captured may have changed."""
        self.on_scheduled_lost: Callable[[], None] = lambda: None
        """A session ended before a scheduled snapshot had its root: another is due now."""
        self.last_failure: SnapshotState | None = None
        """The newest failure, if nothing was committed since."""
        self.last_cut_ns = 0
        """Wall clock of the cut of the newest snapshot that was committed in this daemon's life; 0 before the first."""
        self.trust = Trust(context.roots, context.runtime)
        self.durations = Durations()
        self.leaving = False
        """The daemon ends and its workers serve on: a successor captures what waits."""
        self._shortage = Shortage()
        self._left_out = LeftOutAlerts(context.alerts)
        self._stopped = trio.Event()
        self._running = False

    def running(self) -> Running | None:
        """Return the capture that runs, with its terms as of now; None where none does."""
        for pending in self._queue:
            if pending.process is not None and pending.process.pid:
                return Running(pending.process.pid, self.urgency(pending), pending.process.urge)
        return None

    def urgency(self, pending: PendingSnapshot) -> Urgency:
        """Return the terms of this capture as of now."""
        settings = self._context.settings()
        return Urgency(
            min_share=settings.min_share,
            finish_within_seconds=settings.finish_within_seconds,
            elapsed_seconds=max(0.0, trio.current_time() - pending.cut_at),
            requested=self._somebody_waits(),
        )

    async def run(self) -> None:
        """Capture what is queued, for ever.

        Cancelled, it ends the running capture and gives every epoch back, unless the workers serve on for a successor that captures
        what waits (``leaving``).
        """
        self._running = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._retaking.run)
                while True:
                    await self._capture_first()
        finally:
            with trio.move_on_after(10, shield=True):
                for pending in () if self.leaving else self._queue:
                    await self._give_up(pending, Failed(error="the daemon stopped before it was captured"))
            self._queue.clear()
            self._stopped.set()

    async def stopped(self) -> None:
        """Wait until ``run``, cancelled, has given every epoch back; return at once if it never ran."""
        if self._running:
            await self._stopped.wait()

    async def _capture_first(self) -> None:
        pending = await self._queue.first()
        try:
            is_settled = await self._settle(pending)
        except Exception as error:
            # A defect costs this snapshot, not the service: its changes go into the next one.
            log.exception("capture_defect", id=pending.id)
            await self._give_up(pending, Failed(error=f"a defect in ciuic: {error!r}"))
            is_settled = True
        if is_settled:
            if pending.failure is None:
                await self._promises.keep(
                    pending
                )  # before the journal forgets it: a successor does this again
            self._queue.remove(pending)

    async def _settle(self, pending: PendingSnapshot) -> bool:
        """Make attempts until the snapshot is committed or given up. Return False where it was cut anew: others may be before it now."""
        if pending.record.scheduled:
            pending.needed_bytes = self._shortage.needed_bytes()
        await await_capture(pending)
        while True:
            if await self._committed_already(pending):
                return True
            if pending.is_lost():
                await self._give_up(pending, Failed(error=pending.lost))
                return True
            if pending.doubtful:
                await self._retaking.settle(pending)
                continue
            if pending.interrupted:
                return not await self._retaken(pending)
            pending.capturing()
            async with self.repository_lock:
                outcome = await self._attempt(pending)
            if isinstance(outcome, Done):
                return True
            if pending.has_lost_session:
                continue
            if outcome.code == EXIT_UNDO_LOST:
                # Given up by its worker, for want of space as a rule: what the same roots show now is captured under the same id.
                pending.interrupt_all(outcome.error)
                continue
            if not await self._wait_for_another_attempt(pending, outcome):
                return True

    async def _wait_for_another_attempt(self, pending: PendingSnapshot, outcome: Failed) -> bool:
        """Wait for the next attempt after a failure. Return False when the snapshot was given up instead."""
        pending.needed_bytes = max(pending.needed_bytes, outcome.needed_bytes)
        waited = trio.current_time() - pending.cut_at
        after = retry_after(outcome, pending.tries, waited).after_seconds
        log.warning(
            "capture_failed",
            id=pending.id,
            error=outcome.error,
            code=outcome.code,
            retry_after_seconds=after,
        )
        if after is None:
            culprit = pending.leave_out_culprit(outcome)
            if culprit:
                log.error("root_left_out", id=pending.id, root=culprit, error=outcome.error)
                return True
            self._shortage.met(outcome.needed_bytes)
            await self._give_up(pending, outcome)
            return False
        pending.waiting(outcome)
        self._context.alerts.report(
            "capture",
            f"snapshot {pending.id} waits: {outcome.error}",
            hint=outcome.hint,
            severity="warning",
        )
        self.on_committed()  # upkeep may free what a full store lacks
        with trio.move_on_after(after):
            await pending.wake.wait()
        return True

    async def _retaken(self, pending: PendingSnapshot) -> bool:
        """Cut an interrupted snapshot anew. False when it was given up: it has no root left, or cannot be cut."""
        reason = next(iter(pending.interrupted.values()))
        error = ""
        while pending.interrupted and pending.retakes < MAX_RETAKES:
            await trio.sleep(RETAKE_PAUSES_SECONDS[pending.retakes])
            pending.retakes += 1
            try:
                await self._retaking.retake(pending)
            except CiuicError as failure:
                error = str(failure)
                log.warning("snapshot_not_retaken", id=pending.id, error=error)
        if not pending.interrupted:
            return True
        text = f"{reason}; it could not be cut anew in {MAX_RETAKES} attempts{error and f': {error}'}"
        await self._give_up(pending, Failed(error=text))
        return False

    async def _attempt(self, pending: PendingSnapshot) -> Done | Failed:
        """Run one capture process, and return how it ended.

        On Done the snapshot is committed: callers that wait for it were told before the process ended.
        """
        space = self._context.space
        room = await trio.to_thread.run_sync(space.look) if space is not None else RepositoryStatus()
        try:
            job, fds = make_job(
                pending,
                self._context.settings(),
                self._context.roots(),
                self._context.host,
                self.urgency(pending),
            )
        except CiuicError as error:
            return Failed(error=str(error), hint=error.hint, code=EXIT_UNDO_LOST)
        job = msgspec.structs.replace(
            job,
            reserve_bytes=room.reserve_bytes,
            reserve_reason=room.reserve_reason,
            needed_bytes=pending.needed_bytes,
        )
        process = self._context.new_capture()
        pending.process = process
        try:
            return await process.run(
                job,
                fds,
                on_start=lambda pid: self._capture_started(pending, pid),
                on_progress=pending.progressed,
                on_done=partial(self._commit, pending),
            )
        except OSError as error:
            return Failed(error=f"the capture process cannot be started: {error}")
        finally:
            pending.process = None
            pending.record.capture_pid = 0
            for fd in fds:
                os.close(fd)

    def _capture_started(self, pending: PendingSnapshot, pid: int) -> None:
        pending.record.capture_pid = pid
        pending.record.capture_started_ticks = start_ticks(pid)
        self._queue.write_journal()
        self.on_urgency()

    async def _commit(self, pending: PendingSnapshot, done: Done) -> None:
        for root in done.left_out:
            pending.leave_out(os.fsdecode(root.path), root.reason)
        await tell_workers(pending, self._context.roots(), committed=True)
        self.trust.settle(pending)
        unread = [f"{printable(error.root)}/{printable(error.path)}: {error.error}" for error in done.errors]
        pending.committed(new_bytes=done.new_bytes, errors=unread)
        self.durations.add(done.seconds)
        log.info(
            "snapshot_committed",
            id=pending.id,
            new_bytes=done.new_bytes,
            files_read=done.files_read,
            bytes_read=done.bytes_read,
            modes=done.modes,
            seconds=round(done.seconds, 3),
            unreadable=done.errors_total,
            left_out=pending.record.left_out,
        )
        self._after_commit(pending)
        if done.errors_total:
            self._context.alerts.report(
                "unreadable",
                f"{plural(done.errors_total, 'file')} could not be read into {pending.id}: {'; '.join(unread[:3])}",
                hint="the snapshot has everything else; look at the disk below the root",
                severity="warning",
            )
        else:
            self._context.alerts.clear("unreadable")

    def _after_commit(self, pending: PendingSnapshot) -> None:
        self.last_failure = None
        self._shortage = Shortage()
        self.last_cut_ns = max(self.last_cut_ns, pending.record.time_ns)
        self._context.alerts.clear("capture")
        self._context.alerts.clear("store")
        self._context.alerts.clear(KEY_MISSING)
        self._context.alerts.clear("clock")
        for cut in pending.remaining:
            # What the end of a session may have hidden is in this snapshot.
            self._context.alerts.clear(f"worker:{cut.path}")
            self._context.alerts.clear(f"unmounted:{cut.path}")
        self._left_out.tell(pending)
        if pending.record.scheduled and pending.lost:
            self.on_scheduled_lost()
        self.on_committed()

    async def _committed_already(self, pending: PendingSnapshot) -> bool:
        """Return whether an earlier attempt, or a predecessor's capture, has committed the snapshot."""
        if pending.record.attempts == 0:
            return False
        try:
            answer = await trio.to_thread.run_sync(find_commit, self._context.store(), pending.remaining)
        except CiuicError as error:
            log.warning("repository_not_asked", id=pending.id, error=str(error))
            return False
        if answer is None:
            return False
        found, roots = answer
        for cut in pending.remaining:
            if cut.path not in roots:
                pending.leave_out(cut.path, "it could not be captured; the snapshot's own record says why")
        await tell_workers(pending, self._context.roots(), committed=True)
        pending.committed(new_bytes=found.new_bytes)
        log.info("snapshot_committed", id=pending.id, new_bytes=found.new_bytes, found="after restart")
        self._after_commit(pending)
        return True

    async def _give_up(self, pending: PendingSnapshot, failure: Failed) -> None:
        if pending.finished.is_set():  # committed, and only its process had not ended yet
            return
        await tell_workers(pending, self._context.roots(), committed=False)
        await self._promises.lose(pending, failure.error)  # on file before anybody is told
        pending.failed(failure)
        if pending.record.scheduled and pending.is_lost():
            self.on_scheduled_lost()
        self.last_failure = pending.state
        log.error("snapshot_failed", id=pending.id, error=failure.error)
        self._context.alerts.report(
            "capture",
            f"snapshot {pending.id} of {rfc3339(pending.record.time_ns)} failed: {failure.error}",
            hint=failure.hint or "its changes will be in the next snapshot",
        )

    def settings_changed(self) -> None:
        """The next scheduled snapshot is tried whatever became of the last one: other excludes may make it fit."""
        self._shortage = Shortage()
