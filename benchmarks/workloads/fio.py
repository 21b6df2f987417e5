"""fio, if it is installed: sequential and random reads and writes of one job with blocking calls."""

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
    """Run one fio job on the file that all steps share, and return its figures."""
    completed = subprocess.run(
        [
            *("fio", "--name=bench", f"--filename={job.path('fio')}", f"--size={_size_bytes(job)}"),
            *("--ioengine=psync", "--thread", "--fallocate=none", "--invalidate=0", "--randrepeat=1"),
            *("--output-format=json", *options),
        ],
        check=False,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        # fio may leave files of its own in its working directory.
        cwd=job.source,
    )
    if completed.returncode != 0:
        raise RuntimeError(
            f"fio ended with {completed.returncode}: {completed.stderr.decode(errors='replace')[-400:]}"
        )
    figures: dict[str, dict[str, float]] = json.loads(completed.stdout)["jobs"][0]
    return figures


def _size_bytes(job: Job) -> int:
    return job.count(_MIB, 4) * MIB


def _step(figure: Figure, measure: Callable[[Job], float], before: Before = "settled") -> Step:
    return Step((figure,), lambda job: Measured([measure(job)]), before)


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
