"""Jobs that the daemon has done in processes of their own: `python -m ciuic.daemon.jobs NAME`.

Standard input: the job as one line of JSON; after it, for upkeep, an `Urgency` a line whenever it changes (base/child_processes.py); of
notices, the end of the stream ends the process. Standard output and exit status:

| name | prints |
| --- | --- |
| `upkeep` | one `PruneReport` (exit status 0) or `ErrorDocument` (exit status: its code) |
| `drill` | nothing (0: the outcome, good or not, is in the records of the repository) or an `ErrorDocument` |
| `verdicts` | one `VerdictRecord` a line, in the order of the job; a snapshot that is gone has none |
| `numbers` | one `NumbersRead` a line for each file, in their order |
| `notices` | a `NoticeLine` a line for each notice, each that is taken back and each trouble with a service |

Processes of their own, so that I/O class and nice value apply, and marking, restoring or judging never occupies the daemon's interpreter. Each
is killed first when memory runs out, and has dropped what its work does not need before it reads what users or services have written: verdicts
and numbers can write nothing but their output, and have limits of memory and processor time; notices have no capability. The daemon imports
this module for the jobs; what a process needs beyond them is imported in it.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from ciuic.config import MinFree
from ciuic.daemon.base.child_processes import JobInput, follow_urgency, mark_expendable
from ciuic.errors import CiuicError, NotFound
from ciuic.number_files import NumberPlace, read_numbers
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
from ciuic.system.child_process import module_command
from ciuic.system.cloud_notices import CloudNotice, MetadataService, watch
from ciuic.system.interrupts import interrupt
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.urgency import MIN_SHARE, Urgency

if TYPE_CHECKING:
    from ciuic.system.seccomp import Profile

_J = TypeVar("_J")
# Wait of upkeep for another writer. Captures of the same daemon are none: the daemon lets them and upkeep take turns.
_LOCK_WAIT_SECONDS = 60.0
_MAX_VERDICT_MEMORY_BYTES: Final = 1 << 30
_MAX_VERDICT_PROCESSOR_SECONDS: Final = 600
_COUNTED_BYTES = 8 << 30
"""Limit of the numbers that are read to count those that are not finite: some tens of processor seconds."""
_MAX_NUMBER_MEMORY_BYTES: Final = 256 << 20
_MAX_NUMBER_PROCESSOR_SECONDS: Final = 60
_MAX_NOTICE_MEMORY_BYTES: Final = 512 << 20


def job_command(name: str) -> list[str]:
    """Return the command of a process that does a job of this name (a key of `_JOBS`)."""
    return [*module_command("ciuic.daemon.jobs"), name]


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


class VerdictJob(msgspec.Struct, kw_only=True, frozen=True):
    """Snapshots to be judged."""

    repository: str
    snapshots: tuple[str, ...]
    key: bytes = b""
    """Key of this host, for the records of earlier snapshots."""
    patterns: tuple[str, ...] = ()
    """The user's patterns of what is one checkpoint."""
    io_priority: str = "idle"


class NumberJob(msgspec.Struct, frozen=True, kw_only=True):
    """Files to read."""

    places: tuple[NumberPlace, ...]


class NoticeJob(msgspec.Struct, frozen=True, kw_only=True):
    """Services to ask."""

    services: tuple[MetadataService, ...]


class NoticeLine(msgspec.Struct, frozen=True, kw_only=True):
    """Statement of a metadata service about the end of this machine."""

    kind: Literal["notice", "withdrawn", "problem"]
    key: str = ""
    """Identity of the event."""
    text: str = ""
    seconds: float = 0.0
    """Time until the end."""
    certain: bool = True
    """False: the end has only become more likely."""


def run_upkeep_job(job: UpkeepJob, *, should_stop: Callable[[], bool] = lambda: False) -> PruneReport:
    """Decide about every snapshot, remove those that no rule keeps, and free the space. Durable on return.

    Args:
        job: repository and policy.
        should_stop: asked between any two pieces of work.
    """
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


def run_drill_job(job: DrillJob, pace: Pace) -> None:
    """Drill the newest snapshot and one at random, and note the outcome.

    Raises:
        NotFound: there is no snapshot, or one was removed meanwhile; nothing is noted.
        CiuicError: the repository must not be written to; nothing is noted.
        OSError: the outcome cannot be noted.
    """
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


def _confine(name: str, limit: Callable[[], object], profile: Profile | None = None) -> None:
    """Be killed first when memory runs out, and drop the privileges and system calls that the work does not need.

    A filter of system calls, as that of a container, may forbid a step; the work with more privileges is better than none.

    Args:
        name: how messages call the process.
        limit: drops privileges; OSError where that is forbidden.
        profile: system calls that stay; None: all.
    """
    mark_expendable(os.getpid())
    with suppress(OSError):
        limit()
    if profile is not None:
        from ciuic.system.syscall_profiles import limit_calls

        unfiltered = limit_calls(profile)
        if unfiltered:
            sys.stderr.write(f"{name}: system calls are not filtered: {unfiltered}\n")


def _refused(error: CiuicError) -> int:
    """Print an error as the answer, and return the exit status."""
    sys.stdout.buffer.write(msgspec.json.encode(ErrorDocument.of(error)))
    return error.exit_code


def _print_line(document: msgspec.Struct) -> None:
    sys.stdout.buffer.write(msgspec.json.encode(document) + b"\n")
    sys.stdout.buffer.flush()


def _upkeep(job_input: JobInput) -> int:
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_upkeep

    stop = threading.Event()
    # A flag and no exception: the process ends between two pieces of work, where the repository is consistent.
    signal.signal(signal.SIGTERM, lambda number, frame: stop.set())
    job = decode_json(job_input.first_line(), UpkeepJob)
    # Before privileges are dropped: to raise the priority again as the deadline nears takes RLIMIT_NICE,
    # which is set here (docs/decisions/deadlines.md).
    precedence = yield_to_others(job.io_priority, job.urgency.least_share(0))
    heard = gauges(waits_files(job.runtime_dir) if job.runtime_dir else ())
    pace = Pace(heard, urgency=job.urgency, processor_waits=processor_waits())
    _confine("upkeep", lambda: limit_upkeep(job.repository), syscall_profiles.UPKEEP)
    follow_urgency(job_input, pace, precedence)

    def asked_to_stop() -> bool:
        pace.step()
        return stop.is_set()

    try:
        report = run_upkeep_job(job, should_stop=asked_to_stop)
    except OSError as error:
        return _refused(CiuicError(f"the store failed: {error}"))
    sys.stdout.buffer.write(msgspec.json.encode(report))
    return 0


def _drill(job_input: JobInput) -> int:
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_drill

    # Through all `finally` clauses, which remove what was restored: SIGTERM ends it early, without a record.
    signal.signal(signal.SIGTERM, interrupt)
    try:
        job = decode_json(job_input.first_line(), DrillJob)
        yield_to_others(job.io_priority, job.min_share)
        # Before privileges are dropped.
        pace = Pace(
            gauges(waits_files(job.runtime_dir) if job.runtime_dir else ()),
            urgency=Urgency(min_share=job.min_share),
            processor_waits=processor_waits(),
        )
        _confine("drill", limit_drill, syscall_profiles.DRILL)
        run_drill_job(job, pace)
    except OSError as error:
        return _refused(CiuicError(f"the outcome could not be noted: {error}"))
    except KeyboardInterrupt:
        return 130
    return 0


def _verdicts(job_input: JobInput) -> int:
    from ciuic.history import judge_snapshot
    from ciuic.repository import Repository
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_reader, limit_resources
    from ciuic.types import Snapshot
    from ciuic.verdicts.records import MAX_RECORD_BYTES, VerdictRecord, VerdictRecords
    from ciuic.verdicts.verdict import FileVerdicts

    job = decode_json(job_input.first_line(), VerdictJob)
    yield_to_others(job.io_priority)
    limit_resources(_MAX_VERDICT_MEMORY_BYTES, _MAX_VERDICT_PROCESSOR_SECONDS)
    _confine("verdicts", limit_reader, syscall_profiles.READER)
    with Repository.open(job.repository) as repository:
        records = VerdictRecords(repository, job.key, job.patterns)
        snapshots, _ = repository.snapshots.load_all()
        # That of the snapshot judged last, and those that its roots ask for: of most there is one.
        made: dict[str, VerdictRecord | None] = {}

        def record_of(snapshot: Snapshot) -> VerdictRecord | None:
            if snapshot.id not in made:
                made[snapshot.id] = records.record(snapshot)
            return made[snapshot.id]

        known = FileVerdicts(
            lambda: (found.files for one in snapshots if (found := records.record(one)) is not None),
            counted_bytes=_COUNTED_BYTES,
        )
        for snapshot in snapshots:
            if snapshot.id in job.snapshots:
                record = judge_snapshot(repository, snapshots, snapshot, known, record_of, job.patterns)
                made = {record.snapshot: record}
                if len(msgspec.json.encode(record)) < MAX_RECORD_BYTES:
                    _print_line(record)
    return 0


def _numbers(job_input: JobInput) -> int:
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_reader, limit_resources

    job = decode_json(job_input.first_line(), NumberJob)
    limit_resources(_MAX_NUMBER_MEMORY_BYTES, _MAX_NUMBER_PROCESSOR_SECONDS)
    _confine("numbers", limit_reader)
    # Without a word where it cannot be filtered: it runs twice a minute.
    syscall_profiles.limit_calls(syscall_profiles.READER)
    for place in job.places:
        _print_line(read_numbers(place))
    return 0


def _notices(job_input: JobInput) -> int:
    from ciuic.system.privileges import limit_sender

    job = decode_json(job_input.first_line(), NoticeJob)
    _confine("notices", lambda: limit_sender(_MAX_NOTICE_MEMORY_BYTES))
    lock = threading.Lock()

    def say(line: NoticeLine) -> None:
        with lock, suppress(OSError):
            _print_line(line)

    def report(notice: CloudNotice) -> None:
        say(
            NoticeLine(
                kind="notice",
                key=notice.key,
                text=notice.text,
                seconds=notice.seconds,
                certain=notice.certain,
            )
        )

    watch(
        job.services,
        report,
        lambda text: say(NoticeLine(kind="problem", text=text)),
        withdraw=lambda notice: say(NoticeLine(kind="withdrawn", key=notice.key, text=notice.text)),
    )
    # Until the daemon ends or closes it: a daemon that is killed leaves nobody who asks.
    while os.read(0, 4096):
        pass
    return 0


_JOBS: Final = {
    "upkeep": _upkeep,
    "drill": _drill,
    "verdicts": _verdicts,
    "numbers": _numbers,
    "notices": _notices,
}


def main(name: str) -> int:
    """Do the job of this name, and return the exit status."""
    try:
        return _JOBS[name](JobInput(0))
    except CiuicError as error:
        if name in ("upkeep", "drill"):
            return _refused(error)
        sys.stderr.write(f"{name}: {error}\n")
    except (OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"{name}: {error}\n")
    return 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
