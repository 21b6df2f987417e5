"""Process that applies retention and frees space: `python -m ciuic.daemon.upkeep_process`.

Standard input: one `UpkeepJob` as a line of JSON, then an `Urgency` a line whenever it changes
(base/child_processes.py). Standard output: one `PruneReport` (exit status 0) or `ErrorDocument` (exit status: its
code). A process of its own, so that I/O class and nice value apply, and marking never occupies the daemon's
interpreter.
"""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import msgspec

from ciuic.config import MinFree
from ciuic.errors import CiuicError
from ciuic.protocol.control_types import (
    ErrorDocument,
    PrunedSnapshot,
    PruneReport,
    UnstoredSnapshot,
    rfc3339,
)
from ciuic.protocol.stored_remotely import RemotePlace, remotes_done
from ciuic.retention import RetentionPolicy
from ciuic.structs import decode_json
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.urgency import Urgency

# Wait for another writer. Captures of the same daemon are none: the daemon lets them and upkeep take turns.
_LOCK_WAIT_SECONDS = 60.0


class UpkeepJob(msgspec.Struct, kw_only=True, frozen=True):
    """Job of one upkeep process."""

    repository: str
    policy: RetentionPolicy
    min_free: MinFree | None = None
    remotes: tuple[RemotePlace, ...] = ()
    reserve_bytes: int = 0
    dry_run: bool = False
    io_priority: str = "idle"
    urgency: Urgency = Urgency()
    runtime_dir: str = ""
    trust_repository: bool = False


def run_job(job: UpkeepJob, *, should_stop: Callable[[], bool] = lambda: False) -> PruneReport:
    """Decide about every snapshot, remove those that no rule keeps, and free the space. Durable on return.

    Args:
        job: repository and policy.
        should_stop: asked between any two pieces of work.
    """
    # Imported here: the daemon imports this module for `UpkeepJob`, and needs none of these.
    from ciuic.maintenance.prune import prune
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own

    require_own(job.repository, trusted=job.trust_repository)
    with Repository.open(job.repository) as repository:
        remotes = remotes_done(job.remotes, repository.id, now_ns=time.time_ns())
        result = prune(
            repository,
            job.policy,
            min_free=job.min_free,
            remotes=remotes.done,
            reserve_bytes=job.reserve_bytes,
            dry_run=job.dry_run,
            wait_seconds=_LOCK_WAIT_SECONDS,
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
        removed_unstored=[
            UnstoredSnapshot(id=str(decision.id), remotes=list(decision.remotes))
            for decision in result.removed_unstored
        ],
        freed_bytes=result.freed_bytes,
        notes=[*remotes.flaws, *result.notes],
    )


def main() -> int:
    """Run the process and return its exit status."""
    from ciuic.daemon.base.child_processes import JobInput, follow_urgency
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_upkeep

    stop = threading.Event()
    # A flag and no exception: the process ends between two pieces of work, where the repository is
    # consistent.
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    try:
        job_input = JobInput(0)
        job = decode_json(job_input.first_line(), UpkeepJob)
        # Before privileges are dropped: to raise the priority again as the deadline nears takes RLIMIT_NICE,
        # which is set here (docs/decisions/deadlines.md).
        precedence = yield_to_others(job.io_priority, job.urgency.least_share(0))
        heard = gauges(waits_files(job.runtime_dir) if job.runtime_dir else ())
        pace = Pace(heard, urgency=job.urgency, processor_waits=processor_waits())
        # Where it cannot be written, upkeep runs without it.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
        # A filter of system calls may forbid it; a full disk is worse than upkeep with more privileges.
        with suppress(OSError):
            limit_upkeep(job.repository)
        unfiltered = syscall_profiles.limit_calls(syscall_profiles.UPKEEP)
        if unfiltered:
            sys.stderr.write(f"upkeep: system calls are not filtered: {unfiltered}\n")
        follow_urgency(job_input, pace, precedence)

        def asked_to_stop() -> bool:
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
