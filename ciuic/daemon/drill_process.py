"""Process that drills a restore: `python -m ciuic.daemon.drill_process`.

Standard input: one `DrillJob` as a line of JSON. Standard output: nothing (exit status 0: the outcome, good or not, is in the records of
the repository) or an `ErrorDocument` (exit status: its code). A process of its own, so that I/O class and nice value apply; SIGTERM ends
it early, without a record and with nothing left in the scratch directory.
"""

from __future__ import annotations

import random
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import msgspec

from ciuic.errors import CiuicError, NotFound
from ciuic.protocol.control_types import ErrorDocument
from ciuic.structs import decode_json
from ciuic.system.interrupts import interrupt
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.urgency import MIN_SHARE, Urgency


class DrillJob(msgspec.Struct, kw_only=True, frozen=True):
    """Job of one drill."""

    repository: str
    scratch: str
    io_priority: str = "idle"
    min_share: float = MIN_SHARE
    runtime_dir: str = ""
    trust_repository: bool = False
    patterns: tuple[str, ...] = ()
    """The user's patterns of what is one checkpoint."""


def run_job(job: DrillJob, pace: Pace) -> None:
    """Drill the newest snapshot and one at random, and note the outcome.

    Raises:
        NotFound: there is no snapshot, or one was removed meanwhile; nothing is noted.
        CiuicError: the repository must not be written to; nothing is noted.
        OSError: the outcome cannot be noted.
    """
    # Imported here: the daemon imports this module for `DrillJob`, and needs none of these.
    from ciuic.maintenance.drill import (
        choose_snapshots,
        failed_outcome,
        outcome_of,
        run_drill,
        scratch_directory,
    )
    from ciuic.protocol.last_drill import add_drill
    from ciuic.repository import Repository
    from ciuic.repository.trust import require_own

    require_own(job.repository, trusted=job.trust_repository)
    seed = random.SystemRandom().randrange(1 << 32)
    began = time.monotonic()
    try:
        with Repository.open(job.repository) as repository, scratch_directory(Path(job.scratch)) as scratch:
            done = [
                (
                    snapshot,
                    run_drill(
                        repository,
                        snapshot,
                        scratch,
                        seed=seed,
                        patterns=job.patterns,
                        between=pace.step,
                    ),
                )
                for snapshot in choose_snapshots(repository.snapshots, seed)
            ]
        outcome = outcome_of(done, time.monotonic() - began)
    except NotFound:
        raise
    except CiuicError as error:
        outcome = failed_outcome(error, time.monotonic() - began)
    except OSError as error:
        outcome = failed_outcome(
            CiuicError(f"{job.scratch} cannot be used: {error.strerror}"), time.monotonic() - began
        )
    add_drill(Path(job.repository), outcome)


def main() -> int:
    """Run the process and return its exit status."""
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_drill

    # Through all `finally` clauses, which remove what was restored.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        job = decode_json(sys.stdin.buffer.readline(), DrillJob)
        yield_to_others(job.io_priority, job.min_share)
        # Before privileges are dropped.
        pace = Pace(
            gauges(waits_files(job.runtime_dir) if job.runtime_dir else ()),
            urgency=Urgency(min_share=job.min_share),
            processor_waits=processor_waits(),
        )
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
        # A filter of system calls may forbid it; a drill with more privileges is better than none.
        with suppress(OSError):
            limit_drill()
        unfiltered = syscall_profiles.limit_calls(syscall_profiles.DRILL)
        if unfiltered:
            sys.stderr.write(f"drill: system calls are not filtered: {unfiltered}\n")
        run_job(job, pace)
    except CiuicError as error:
        answer = ErrorDocument(error=error.message, hint=error.hint, code=error.exit_code)
    except OSError as error:
        answer = ErrorDocument(error=f"the outcome could not be noted: {error}")
    except KeyboardInterrupt:
        return 130
    else:
        return 0
    sys.stdout.buffer.write(msgspec.json.encode(answer))
    return answer.code or 1


if __name__ == "__main__":
    sys.exit(main())
