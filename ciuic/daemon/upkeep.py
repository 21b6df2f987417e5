"""Upkeep: apply retention and free space when that is worth it, in a process of its own.

Guarantees: upkeep never runs at the same time as a capture of this daemon, and never takes more than a
twentieth of the time, so that a large repository is not walked after every snapshot. Leaves to
ciuic.retention what to remove, to ciuic.maintenance.prune removing it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import structlog
import trio

from ciuic.daemon.base.child_processes import send_urgency
from ciuic.daemon.base.events import Alerts, Wakeup
from ciuic.daemon.base.job_process import job_process
from ciuic.daemon.base.process_priority import RunningProcess
from ciuic.daemon.base.repository_store import Store, UpkeepNeed, UpkeepRules
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.jobs import UpkeepJob, job_command
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import ErrorDocument, PruneReport
from ciuic.structs import decode_json
from ciuic.system.processes import describe_exit
from ciuic.system.urgency import Urgency
from ciuic.units import plural

# After a round of t seconds the next one waits 20 t, so that upkeep takes less than a twentieth of the time.
_COST_RATIO = 20
# Several snapshots that are committed in sequence cause one round.
_MIN_PAUSE_SECONDS = 60.0
_KEY_UNSTORED = "unstored"
"""Key of the alert that a snapshot was removed before every remote had it."""
# An alert is a sentence; the log has all ids.
_MAX_NAMED_SNAPSHOTS = 20
# To the end of a process that was told to end.
_END_SECONDS = 10.0
log = structlog.get_logger(__name__)


class Upkeep:
    """Starts upkeep processes. `run` is its task; `suggest` says that there may be something to do.

    Belongs to the trio thread.
    """

    def __init__(
        self,
        settings: Callable[[], Settings],
        store: Callable[[], Store],
        repository_lock: trio.Lock,
        alerts: Alerts,
        *,
        cwd: Path,
        now_ns: Callable[[], int],
        command: Sequence[str] = (),
        reserve_bytes: Callable[[], int] = lambda: 0,
        caller_waits: Callable[[], bool] = lambda: False,
        wakeup: Wakeup | None = None,
    ) -> None:
        """Prepare to start processes.

        Args:
            settings: settings in force.
            store: the repository.
            repository_lock: held while a process of ours writes to the repository.
            alerts: where failures are reported.
            cwd: working directory of the processes.
            now_ns: wall clock.
            command: command of a process; empty: the module of upkeep.
            reserve_bytes: returns the space that captures leave free. Blocks: it looks at the disk.
            caller_waits: returns whether a caller waits for a capture, which begins when upkeep has ended.
            wakeup: set when there may be something to do: a snapshot was committed, or the store is full.
        """
        self._settings = settings
        self._store = store
        self._lock = repository_lock
        self._alerts = alerts
        self._cwd = cwd
        self._now_ns = now_ns
        self._reserve_bytes = reserve_bytes
        self._command = list(command or job_command("upkeep"))
        self._caller_waits = caller_waits
        self._wakeup = wakeup or Wakeup()
        self._process: trio.Process | None = None
        self._began_at = 0.0
        # A caller waits for the running upkeep.
        self._awaited = False

    def running(self) -> RunningProcess | None:
        """Return the process that runs, with its urgency as of now; None where none does."""
        process = self._process
        if process is None:
            return None
        return RunningProcess(process.pid, self._urgency(), partial(_send, process))

    def _urgency(self) -> Urgency:
        settings = self._settings()
        return Urgency(
            min_share=1.0 if self._awaited else settings.min_share,
            finish_within_seconds=settings.finish_within_seconds,
            elapsed_seconds=trio.current_time() - self._began_at,
            requested=self._caller_waits(),
        )

    def suggest(self) -> None:
        """Wake the task: a snapshot was committed, or the store is full."""
        self._wakeup.set()

    async def run(self) -> None:
        """Wait for suggestions and follow them, until cancelled."""
        while True:
            await self._wakeup.wait()
            began = trio.current_time()
            await self.once()
            await trio.sleep(max(_MIN_PAUSE_SECONDS, _COST_RATIO * (trio.current_time() - began)))

    async def once(self) -> None:
        """Apply retention and free space if that is worth it. Errors become alerts."""
        try:
            need = await trio.to_thread.run_sync(self._need)
            if need.is_due:
                await self.prune(dry_run=False, awaited=False)
            # The remotes have caught up: what they lack was removed, and nothing else is at risk.
            if not need.unstored:
                self._alerts.clear(_KEY_UNSTORED)
            self._alerts.clear("upkeep")
        except CiuicError as error:
            log.error("upkeep_failed", error=str(error))
            self._alerts.report(
                "upkeep",
                f"old snapshots could not be removed: {error}",
                hint=error.hint,
                severity="warning",
            )
        except Exception:
            log.exception("upkeep_failed")  # a defect there must not end the service

    async def prune(self, *, dry_run: bool, awaited: bool = True) -> PruneReport:
        """Apply retention and free space now, after a capture that runs.

        Args:
            dry_run: decide only.
            awaited: a caller waits, perhaps on a full disk, so that upkeep does not yield to others.

        Raises:
            CiuicError: the error of the process.
        """
        settings = self._settings()
        if settings.repository is None:
            raise CiuicError(
                "no repository is configured", hint="protect a directory first: ciuic protect PATH"
            )
        job = UpkeepJob(
            repository=str(settings.repository),
            policy=settings.retention,
            min_free=settings.min_free,
            remotes=settings.remotes,
            reserve_bytes=await trio.to_thread.run_sync(self._reserve_bytes),
            dry_run=dry_run,
            io_priority=settings.io_priority,
            runtime_dir=str(settings.runtime_dir),
            trust_repository=settings.trust_repository,
        )
        async with self._lock:
            self._began_at, self._awaited = trio.current_time(), awaited
            job = msgspec.structs.replace(job, urgency=self._urgency())
            report = await self._run_process(job)
        log.info("upkeep_done", removed=len(report.removed), freed_bytes=report.freed_bytes, dry_run=dry_run)
        for note in report.notes:
            log.info("upkeep_note", note=note)
        if not dry_run:
            self._tell_unstored(report)
        return report

    def _tell_unstored(self, report: PruneReport) -> None:
        """Report the snapshots that were removed before every remote had them."""
        if not report.removed_unstored:
            return
        ids = [one.id for one in report.removed_unstored]
        remotes = sorted({name for one in report.removed_unstored for name in one.remotes})
        log.warning("unstored_removed", snapshots=ids, remotes=remotes)
        named = ", ".join(ids[:_MAX_NAMED_SNAPSHOTS])
        rest = f" and {len(ids) - _MAX_NAMED_SNAPSHOTS} more" if len(ids) > _MAX_NAMED_SNAPSHOTS else ""
        self._alerts.report(
            _KEY_UNSTORED,
            f"{plural(len(ids), 'snapshot')} removed for lack of space before remote "
            f"{', '.join(remotes)} had stored {'it' if len(ids) == 1 else 'them'}: {named}{rest}",
            hint="free space, and see why the remote is behind: ciuic remote status",
        )

    def _need(self) -> UpkeepNeed:
        settings = self._settings()
        rules = UpkeepRules(settings.retention, settings.min_free, settings.remotes, self._reserve_bytes())
        return self._store().upkeep_need(rules, now_ns=self._now_ns())

    async def _run_process(self, job: UpkeepJob) -> PruneReport:
        # Upkeep looks between any two pieces of work whether it should stop; its writes are crash-safe, and the lock goes with it. No process
        # of ours may write to the repository when the lock is released.
        async with job_process(self._command, job, self._cwd, wait_seconds=_END_SECONDS) as running:
            # From now on a line that the process is sent is an urgency.
            self._process = running.process
            try:
                answer, status = await running.output()
            finally:
                self._process = None
        try:
            if status == 0:
                return decode_json(answer, PruneReport)
            refusal = decode_json(answer, ErrorDocument)
        except msgspec.DecodeError as error:
            raise CiuicError(
                f"the upkeep process ended without a result ({describe_exit(status)})"
            ) from error
        raise refusal.raised()


def _send(process: trio.Process, urgency: Urgency) -> bool:
    stdin = process.stdin
    return isinstance(stdin, trio.lowlevel.FdStream) and send_urgency(stdin.fileno(), urgency)
