"""Drills that nobody asks for: when one is due, the process that does it, and alerts about how the last one ended.

Guarantees: a drill begins only while no capture and no upkeep of this daemon runs and memory is not short, and is ended when memory
becomes short. When it is due follows from the records of the repository alone, so that a restart of the daemon repeats and forgets
none; a record in the future (the clock was put back) is not waited for. `ciuic drill` by hand counts as one. Leaves what is restored
and compared to ciuic.maintenance.drill.

Shortage of memory on the host, for which background work waits.

References:
    proc_meminfo(5); Documentation/accounting/psi.rst of the kernel
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec
import structlog
import trio

from ciuic.daemon.base.events import Alerts, repeat
from ciuic.daemon.base.job_process import job_process
from ciuic.daemon.base.settings import Settings
from ciuic.daemon.jobs import DrillJob, job_command
from ciuic.errors import CiuicError, NotFound
from ciuic.protocol.control_types import ErrorDocument
from ciuic.protocol.last_drill import LastDrill, read_drills, standing_drill
from ciuic.structs import decode_json
from ciuic.system.processes import describe_exit
from ciuic.units import human_duration

_LEAST_SHARE: Final = 0.1
"""Part of the memory that has to be available."""
_MOST_WAITING: Final = 10.0
"""Per cent of the last ten seconds in which tasks waited for memory."""


def is_memory_short(proc: Path = Path("/proc")) -> bool:
    """Return whether little memory is available, or tasks wait for it. False for what the kernel does not tell."""
    with suppress(OSError, ValueError, KeyError):
        lines = (proc / "meminfo").read_text().splitlines()
        sizes = {name: int(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines)}
        if sizes["MemAvailable"] < _LEAST_SHARE * sizes["MemTotal"]:
            return True
    # EOPNOTSUPP where pressure is disabled (psi=0 on the kernel's command line).
    with suppress(OSError, ValueError):
        # "some avg10=0.00 avg60=…"
        some = (proc / "pressure/memory").read_text().partition("\n")[0]
        return float(some.partition("avg10=")[2].partition(" ")[0]) > _MOST_WAITING
    return False


KEY_DRILL = "drill"
"""Key of the alert that the last drill was not good."""
KEY_LATE = "drill-late"
"""Key of the alert that no drill was done for too long."""
_PERIOD_SECONDS = 60.0
# Pause between two looks at the memory while a drill runs: it allocates no faster than it reads.
_WATCH_SECONDS = 5.0
_DAY_SECONDS = 86_400
# After a process that ended without an outcome.
_RETRY_SECONDS = 3600.0
_END_SECONDS = 10.0
log = structlog.get_logger(__name__)


def next_drill_ns(records: Sequence[LastDrill], every_seconds: int, now_ns: int) -> int:
    """Return when the next drill is due; the present time if there was none.

    Args:
        records: Last drills, newest first.
        every_seconds: Time from one drill to the next. One that was not good is repeated after a day at the latest.
        now_ns: Wall clock.
    """
    if not records or records[0].time_ns > now_ns:
        return now_ns
    last = records[0]
    wait_seconds = every_seconds if last.is_good else min(every_seconds, _DAY_SECONDS)
    return last.time_ns + wait_seconds * 10**9


class Drills:
    """Starts drills. `run` is its task. Belongs to the trio thread."""

    def __init__(
        self,
        settings: Callable[[], Settings],
        alerts: Alerts,
        *,
        cwd: Path,
        now_ns: Callable[[], int],
        command: Sequence[str] = (),
        is_busy: Callable[[], bool] = lambda: False,
        is_memory_short: Callable[[], bool] = is_memory_short,
    ) -> None:
        """Prepare to start processes.

        Args:
            settings: settings in force.
            alerts: where outcomes are reported.
            cwd: working directory of the processes.
            now_ns: wall clock.
            command: command of a process; empty: the module of drills.
            is_busy: returns whether other work of the daemon runs, which goes first.
            is_memory_short: returns whether the job may need the memory that a drill would take.
        """
        self._settings = settings
        self._alerts = alerts
        self._cwd = cwd
        self._now_ns = now_ns
        self._command = list(command or job_command("drill"))
        self._is_busy = is_busy
        self._is_memory_short = is_memory_short
        self._not_before = 0.0
        self._late_since_ns = now_ns()

    async def run(self) -> None:
        """Look every minute whether a drill is due, until cancelled."""
        await repeat(self.once, _PERIOD_SECONDS, "drill_failed")

    async def once(self) -> None:
        """Do a drill if one is due and nothing speaks against it. Outcomes become alerts."""
        settings = self._settings()
        if settings.repository is None:
            return
        records = await trio.to_thread.run_sync(read_drills, settings.repository)
        if self._is_due(records, settings.drill_every_seconds) and await self._may_begin():
            await self._drill(settings, settings.repository)
            records = await trio.to_thread.run_sync(read_drills, settings.repository)
        self._tell(records, settings.drill_every_seconds)

    def _is_due(self, records: Sequence[LastDrill], every_seconds: int) -> bool:
        if not every_seconds or trio.current_time() < self._not_before:
            return False
        return next_drill_ns(records, every_seconds, self._now_ns()) <= self._now_ns()

    async def _may_begin(self) -> bool:
        return not self._is_busy() and not await trio.to_thread.run_sync(self._is_memory_short)

    def _tell(self, records: Sequence[LastDrill], every_seconds: int) -> None:
        """Report a drill that was not good, and one that is late."""
        last = standing_drill(records)
        if last is None or last.is_good:
            self._alerts.clear(KEY_DRILL)
        else:
            is_damage = last.verdict == "damaged"
            self._alerts.report(
                KEY_DRILL,
                f"{'a restore would not be exact' if is_damage else 'the last drill failed'}: {last.reason}",
                hint="ciuic drill repeats it; ciuic verify --all --checksum names all damage"
                if is_damage
                else "ciuic drill repeats it, with the same options if it was done by hand",
                severity="problem" if is_damage else "warning",
                since_ns=last.time_ns,
            )
        # Twice the time, because a drill waits for captures and memory. Without any record it counts from the daemon's start.
        good_ns = next((one.time_ns for one in records if one.is_good), self._late_since_ns)
        if every_seconds and self._now_ns() - good_ns > 2 * every_seconds * 10**9:
            self._alerts.report(
                KEY_LATE,
                f"no drill of a restore was good for more than {human_duration(2 * every_seconds)}, and [drill] every is "
                f"{human_duration(every_seconds)}",
                hint="ciuic drill does one now",
                severity="warning",
            )
        else:
            self._alerts.clear(KEY_LATE)

    async def _drill(self, settings: Settings, repository: Path) -> None:
        """Run a process to its end, or until memory is short."""
        job = DrillJob(
            repository=str(repository),
            scratch=str(settings.drill_scratch),
            io_priority=settings.io_priority,
            min_share=settings.min_share,
            runtime_dir=str(settings.runtime_dir),
            trust_repository=settings.trust_repository,
            patterns=settings.checkpoint_patterns,
        )
        # Unless it leaves a record, from which the next one follows.
        self._not_before = trio.current_time() + _RETRY_SECONDS
        log.info("drill_begun")
        # It removes what it has restored before it ends.
        async with (
            job_process(self._command, job, self._cwd, wait_seconds=_END_SECONDS) as running,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(self._end_if_memory_is_short, running.process)
            answer, status = await running.output()
            nursery.cancel_scope.cancel()
        self._conclude(status, answer)

    async def _end_if_memory_is_short(self, process: trio.Process) -> None:
        while True:
            await trio.sleep(_WATCH_SECONDS)
            if await trio.to_thread.run_sync(self._is_memory_short):
                log.warning("drill_ended_for_memory")
                process.terminate()
                return

    def _conclude(self, status: int, answer: bytes) -> None:
        log.info("drill_ended", status=status)
        if status == 0:
            self._not_before = 0.0
            return
        with suppress(msgspec.DecodeError):
            refusal = decode_json(answer, ErrorDocument)
            # No snapshot yet, or one that was removed meanwhile.
            if refusal.code != NotFound.exit_code:
                raise CiuicError(refusal.error, hint=refusal.hint)
            # The next look, after the first snapshot: nothing failed.
            self._not_before = 0.0
            return
        log.warning("drill_without_outcome", how=describe_exit(status))
