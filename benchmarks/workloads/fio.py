"""fio, where it is installed: sequential and random, reads and writes, one job, blocking calls."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable

from benchmarks.suite import Before, Figure, Job, Measured, Step, Suite
from benchmarks.timing import MIB

_MIB = 512
_RANDOM_CALLS = 100_000
_SMALL_BYTES = 4096


def _missing() -> str:
    return "" if shutil.which("fio") else "fio is not installed"


def _fio(job: Job, *options: str) -> dict[str, dict[str, float]]:
    """The figures of one job on a file that all steps share."""
    done = subprocess.run(
        [
            *("fio", "--name=bench", f"--filename={job.path('fio')}", f"--size={_size_bytes(job)}"),
            *("--ioengine=psync", "--thread", "--fallocate=none", "--invalidate=0", "--randrepeat=1"),
            *("--output-format=json", *options),
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=job.source,  # fio may leave files of its own where it stands
    )
    if done.returncode != 0:
        raise RuntimeError(f"fio ended with {done.returncode}: {done.stderr.decode(errors='replace')[-400:]}")
    found: dict[str, dict[str, float]] = json.loads(done.stdout)["jobs"][0]
    return found


def _size_bytes(job: Job) -> int:
    return job.count(_MIB, 4) * MIB


def _step(figure: Figure, take: Callable[[Job], float], before: Before = "settled") -> Step:
    return Step((figure,), lambda job: Measured([take(job)]), before)


def _write(job: Job) -> float:
    return _fio(job, "--rw=write", "--bs=1m", "--unlink=0")["write"]["bw_bytes"] / 1e6


def _read(job: Job) -> float:
    return _fio(job, "--rw=read", "--bs=1m")["read"]["bw_bytes"] / 1e6


def _random_read(job: Job) -> float:
    return _fio(job, "--rw=randread", "--bs=4k", _calls(job))["read"]["iops"]


def _random_write(job: Job) -> float:
    return _fio(job, "--rw=randwrite", "--bs=4k", "--overwrite=1", _calls(job))["write"]["iops"]


def _calls(job: Job) -> str:
    return f"--io_size={job.count(_RANDOM_CALLS, 200) * _SMALL_BYTES}"


SUITE = Suite(
    "fio",
    (
        _step(Figure("fio, sequential write 1 MiB", "MB/s"), _write),
        _step(Figure("fio, sequential read 1 MiB, cold", "MB/s"), _read, "cold"),
        _step(Figure("fio, sequential read 1 MiB, warm", "MB/s"), _read, "warm"),
        _step(Figure("fio, random read 4 KiB, warm", "/s"), _random_read, "warm"),
        _step(Figure("fio, random write 4 KiB in place", "/s"), _random_write),
    ),
    missing=_missing,
)
