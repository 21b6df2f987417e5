"""Process that judges the checkpoints of new snapshots: `python -m ciuic.daemon.verdict_process`.

Standard input: one `VerdictJob` as a line of JSON. Standard output: one `VerdictRecord` a line, in the order of the job; a snapshot
that is gone has none. The process reads what users have written, so it can write nothing but its output: it has no capability but
that of reading, no call that changes a name or an attribute, and limits of memory and processor time. The daemon signs and stores.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path

import msgspec

from ciuic.errors import CiuicError
from ciuic.structs import decode_json

MAX_MEMORY_BYTES = 1 << 30
MAX_PROCESSOR_SECONDS = 600
_COUNTED_BYTES = 8 << 30
"""Limit of the numbers that are read to count those that are not finite: some tens of processor seconds."""


class VerdictJob(msgspec.Struct, kw_only=True, frozen=True):
    """Snapshots to be judged."""

    repository: str
    snapshots: tuple[str, ...]
    key: bytes = b""
    """Key of this host, for the records of earlier snapshots."""
    patterns: tuple[str, ...] = ()
    """The user's patterns of what is one checkpoint."""
    io_priority: str = "idle"


def main() -> int:
    """Run the process and return its exit status."""
    from ciuic.daemon.base.child_processes import JobInput
    from ciuic.history import judge_snapshot
    from ciuic.repository import Repository
    from ciuic.system import syscall_profiles
    from ciuic.system.io_throttle import yield_to_others
    from ciuic.system.privileges import limit_reader, limit_resources
    from ciuic.types import Snapshot
    from ciuic.verdicts.records import MAX_RECORD_BYTES, VerdictRecord, VerdictRecords
    from ciuic.verdicts.verdict import FileVerdicts

    try:
        job = decode_json(JobInput(0).first_line(), VerdictJob)
        yield_to_others(job.io_priority)
        limit_resources(MAX_MEMORY_BYTES, MAX_PROCESSOR_SECONDS)
        # Where it cannot be written, the process runs without it.
        with suppress(OSError):
            Path("/proc/self/oom_score_adj").write_text("500")
        # A filter of system calls may forbid it, as that of a container.
        with suppress(OSError):
            limit_reader()
        unfiltered = syscall_profiles.limit_calls(syscall_profiles.READER)
        if unfiltered:
            sys.stderr.write(f"verdicts: system calls are not filtered: {unfiltered}\n")
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
                    line = msgspec.json.encode(record)
                    if len(line) < MAX_RECORD_BYTES:
                        sys.stdout.buffer.write(line + b"\n")
                        sys.stdout.buffer.flush()
    except (CiuicError, OSError, msgspec.DecodeError) as error:
        sys.stderr.write(f"verdicts: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
