"""The process that applies retention and frees space: `python -m ciuic.daemon.upkeep_process`.

One `UpkeepJob` on standard input, as a line of JSON, then an `Urgency` a line whenever its terms change (terms.py); on standard output one `PruneReport` (exit 0) or `ErrorDocument` (exit: its code).
A process of its own, so that I/O class and nice value apply and marking never holds the daemon's interpreter.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ciuic.config import MinFree
from ciuic.control_types import ErrorDocument, PrunedSnapshot, PruneReport, rfc3339
from ciuic.errors import CiuicError
from ciuic.pace import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.retention import RetentionPolicy
from ciuic.urgency import Urgency

LOCK_WAIT_SECONDS = 60.0


class UpkeepJob(msgspec.Struct, kw_only=True, frozen=True):
    """What to do."""

    repository: str
    policy: RetentionPolicy
    min_free: MinFree | None = None
    dry_run: bool = False
    io_priority: str = "idle"
    urgency: Urgency = Urgency()
    runtime_dir: str = ""
    trust_repository: bool = False


def run_job(job: UpkeepJob, *, should_stop: Callable[[], bool] = lambda: False) -> PruneReport:
    """Decides about every snapshot, removes what nothing keeps, frees the space. Durable on return."""
    from ciuic.gc import prune
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own

    require_own(job.repository, trusted=job.trust_repository)
    with Repository.open(job.repository) as repository:
        result = prune(
            repository,
            job.policy,
            min_free=job.min_free,
            dry_run=job.dry_run,
            wait_seconds=LOCK_WAIT_SECONDS,
            should_stop=should_stop,
        )
    return PruneReport(
        dry_run=job.dry_run,
        decisions=[
            PrunedSnapshot(
                id=str(decision.id),
                time=rfc3339(decision.time_ns),
                keep=decision.kept,
                reasons=list(decision.reasons),
            )
            for decision in result.plan.decisions
        ],
        removed=[str(id_) for id_ in result.removed],
        freed_bytes=result.freed_bytes,
    )


def main() -> int:
    """The process."""
    from ciuic import seccomp_profiles
    from ciuic.daemon.terms import Instructions, follow
    from ciuic.privileges import limit_upkeep

    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        instructions = Instructions(0)
        job = msgspec.json.decode(instructions.first_line(), type=UpkeepJob)
        precedence = yield_to_others(job.io_priority, job.urgency.least_share(0))
        heard = gauges(waits_files(job.runtime_dir) if job.runtime_dir else ())
        pace = Pace(heard, urgency=job.urgency, processor_waits=processor_waits())
        with suppress(OSError):  # where it cannot be written, we are a process like any other
            Path("/proc/self/oom_score_adj").write_text("500")
        with suppress(OSError):  # a filter of system calls: full disks are worse than this
            limit_upkeep(job.repository)
        unfiltered = seccomp_profiles.limit_calls(seccomp_profiles.UPKEEP)
        if unfiltered:
            sys.stderr.write(f"upkeep: system calls are not filtered: {unfiltered}\n")
        follow(instructions, pace, precedence)

        def asked_to_stop() -> bool:  # it asks between any two pieces of work
            pace.step()
            return stop.is_set()

        answer: PruneReport | ErrorDocument = run_job(job, should_stop=asked_to_stop)
        code = 0
    except CiuicError as error:
        answer, code = (
            ErrorDocument(error=error.message, hint=error.hint, code=error.exit_code),
            error.exit_code,
        )
    except OSError as error:
        answer, code = ErrorDocument(error=f"the store failed: {error}"), 1
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return code


if __name__ == "__main__":
    sys.exit(main())
