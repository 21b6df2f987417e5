"""Process that reads numbers from files of trainings: `python -m ciuic.daemon.number_process`.

Standard input: one `NumberJob` as a line of JSON. Standard output: one `NumbersRead` as JSON for each file, in their order. The process reads what
users have written (`ciuic.number_files`), so it can write nothing but its output, has no capability but that of reading, and limits of memory and
processor time. A file is read on from where the last look ended, at most `MAX_READ_BYTES` of it; of a larger rest the end.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from ciuic.number_files import NumberPlace, read_numbers
from ciuic.structs import decode_json

_MAX_MEMORY_BYTES: Final = 256 << 20
_MAX_PROCESSOR_SECONDS: Final = 60


class NumberJob(msgspec.Struct, frozen=True, kw_only=True):
    """Files to read."""

    places: tuple[NumberPlace, ...]


def main() -> int:
    """Run the process and return its exit status."""
    from ciuic.daemon.base.child_processes import JobInput
    from ciuic.system import syscall_profiles
    from ciuic.system.privileges import limit_reader, limit_resources

    try:
        job = decode_json(JobInput(0).first_line(), NumberJob)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        sys.stderr.write(f"numbers: {error}\n")
        return 1
    limit_resources(_MAX_MEMORY_BYTES, _MAX_PROCESSOR_SECONDS)
    # Where it cannot be written, the process runs without it.
    with suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("500")
    # A filter of system calls may forbid it, as that of a container.
    with suppress(OSError):
        limit_reader()
    syscall_profiles.limit_calls(syscall_profiles.READER)
    for place in job.places:
        sys.stdout.buffer.write(msgspec.json.encode(read_numbers(place)) + b"\n")
        sys.stdout.buffer.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())
