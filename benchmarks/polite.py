"""Cost of a capture for other users of the disk: fio with and without one, in alternation.

    make bench-polite                                        the figures that are reported
    make bench-polite ARGS="--seconds 3 --rounds 1"          smoke test; its figures mean nothing

Each I/O scheduler has a loop device of its own, with direct I/O to the file below it, and ext4 on it. A job
(4 KiB random reads that bypass the page cache, one at a time; or a stream of buffered writes of 1 MiB at 1
GiB/s, if the disk is that fast) runs alone, beside captures that yield, and beside captures that do not
(`min_share` 100 %), in alternation. Captures follow one another without a pause, each of everything into a
new repository. docs/benchmarks.md explains the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

from ciuic.repository import Repository

SCHEDULERS: Final = ("none", "mq-deadline")
BESIDE: Final = {"nothing": None, "a capture": 0.01, "one that does not make way": 1.0}
"""Work beside the job, with its least share."""
CASES: Final = ("disk", "busy")
BAR: Final = 1.1
_RESULTS: Final = Path(__file__).with_name("results")
_DISK_BYTES: Final = 5 << 30
_TREE_BYTES: Final = 1 << 30
_SETTLE_SECONDS: Final = 2.0
_RAMP_SECONDS: Final = 1
"""Uncounted first second, within which a capture yields: its cost for the job is measured from then on."""


class Work(NamedTuple):
    """Job, with its options for fio."""

    name: str
    options: tuple[str, ...]
    direction: str


JOBS: Final = (
    Work("4 KiB random reads", ("--rw=randread", "--bs=4k", "--direct=1", "--size=512m"), "read"),
    Work("stream of writes", ("--rw=write", "--bs=1m", "--rate=1g", "--size=1g", "--end_fsync=0"), "write"),
)


class Run(NamedTuple):
    """Result of one turn."""

    scheduler: str
    job: str
    beside: str
    round: int
    """Number of the round; only results of one round are compared with each other."""
    p50_us: float
    p99_us: float
    job_bytes_per_second: float
    captured_bytes_per_second: float


def run_fio(work: Work, place: Path, seconds: float) -> dict[str, Any]:
    """Return fio's own figures for the direction of the work."""
    completed = subprocess.run(
        [
            "fio",
            "--name=job",
            f"--filename={place / 'fio'}",
            "--ioengine=psync",
            "--time_based",
            f"--ramp_time={_RAMP_SECONDS}",
            f"--runtime={seconds}",
            "--output-format=json",
            *work.options,
        ],
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )
    figures: dict[str, Any] = json.loads(completed.stdout[completed.stdout.index("{") :])["jobs"][0][
        work.direction
    ]
    return figures


class Captures:
    """Run captures one after the other until ``close``, in a thread that waits for their processes."""

    def __init__(self, place: Path, min_share: float) -> None:
        self._place = place
        self._min_share = min_share
        self._stop = threading.Event()
        self._process: subprocess.Popen[bytes] | None = None
        self.bytes_read = 0
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.is_set():
            repository = self._place / "repository"
            shutil.rmtree(repository, ignore_errors=True)
            Repository.create(repository).close()
            command = [
                sys.executable,
                "-m",
                "ciuic.daemon.capture.process",
                "--offline",
                "--repo",
                str(repository),
            ]
            self._process = subprocess.Popen(
                [*command, "--root", str(self._place / "tree"), "--min-share", str(self._min_share)],
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
            )
            if self._stop.is_set():
                self._process.send_signal(signal.SIGTERM)
            assert self._process.stdout is not None
            before = self.bytes_read
            for line in self._process.stdout:
                self.bytes_read = before + json.loads(line).get("bytes_read", 0)
            self._process.wait()

    def close(self) -> None:
        self._stop.set()
        if self._process is not None:
            self._process.send_signal(signal.SIGTERM)
        self._thread.join()


@contextlib.contextmanager
def disk(top: Path, scheduler: str) -> Iterator[Path]:
    """Yield the mount point of ext4 on a loop device with this scheduler."""
    image, point = top / f"{scheduler}.img", top / scheduler
    point.mkdir()
    with image.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, _DISK_BYTES)
    _command("mkfs.ext4", "-q", "-F", "-m", "0", "-E", "lazy_itable_init=0,lazy_journal_init=0", str(image))
    device = _command("losetup", "--find", "--show", "--direct-io=on", str(image)).strip()
    try:
        Path(f"/sys/block/{Path(device).name}/queue/scheduler").write_text(scheduler)
        _command("mount", device, str(point))
        try:
            yield point
        finally:
            _command("umount", str(point))
    finally:
        _command("losetup", "--detach", device)
        image.unlink()


def _command(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True, timeout=300).stdout


def furnish(place: Path) -> None:
    """Write the files to capture: files of 64 MiB that do not compress, and logs; and fio's own file."""
    tree = place / "tree"
    tree.mkdir()
    for number in range(_TREE_BYTES >> 26):
        (tree / f"checkpoint-{number}").write_bytes(os.urandom(64 << 20))
    for number in range(1000):
        (tree / f"log-{number}").write_bytes(b"step %d loss 0.123\n" % number * 200)
    run_fio(JOBS[1], place, 1)
    os.sync()


def turn(work: Work, scheduler: str, place: Path, beside: str, number: int, seconds: float) -> Run:
    """Run one job beside one kind of work in round ``number``, after earlier writes have settled."""
    os.sync()
    time.sleep(_SETTLE_SECONDS)
    share = BESIDE[beside]
    captures = Captures(place, share) if share is not None else None
    try:
        if captures is not None:
            time.sleep(_SETTLE_SECONDS)  # until its interpreter has started
        read_before = captures.bytes_read if captures else 0
        figures = run_fio(work, place, seconds)
        captured = (captures.bytes_read if captures else 0) - read_before
    finally:
        if captures is not None:
            captures.close()
    percentiles = figures["clat_ns"]["percentile"]
    return Run(
        scheduler,
        work.name,
        beside,
        number,
        percentiles["50.000000"] / 1000,
        percentiles["99.000000"] / 1000,
        figures["bw_bytes"],
        captured / seconds,
    )


def idle_rate(place: Path, min_share: float, seconds: float) -> float:
    """Return the bytes per second that captures read without other work."""
    os.sync()
    captures = Captures(place, min_share)
    try:
        time.sleep(_SETTLE_SECONDS)
        before, began = captures.bytes_read, time.monotonic()
        time.sleep(seconds)
        return (captures.bytes_read - before) / (time.monotonic() - began)
    finally:
        captures.close()


def table(runs: list[Run], idle: dict[str, list[float]]) -> str:
    """Return medians over the rounds; the ratio is that of p99 to p99 alone, of the same round."""
    lines = [
        "| scheduler | job | beside it | rounds | p50 us | p99 us | p99, ratio | job MB/s | capture MB/s |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    keys = dict.fromkeys((run.scheduler, run.job, run.beside) for run in runs)
    for scheduler, job, beside in keys:
        own = [run for run in runs if run[:3] == (scheduler, job, beside)]
        alone_us = {run.round: run.p99_us for run in runs if run[:3] == (scheduler, job, "nothing")}
        ratios = [run.p99_us / alone_us[run.round] for run in own if run.round in alone_us]
        ratio = f"{statistics.median(ratios):.2f}" if ratios else "-"
        p50, p99, rate, captured = (
            statistics.median(getattr(run, name) for run in own)
            for name in ("p50_us", "p99_us", "job_bytes_per_second", "captured_bytes_per_second")
        )
        lines.append(
            f"| {scheduler} | {job} | {beside} | {len(own)} | {p50:.0f} | {p99:.0f} | {ratio} | {rate / 1e6:.0f} | {captured / 1e6:.1f} |"
        )
    if idle:
        lines += ["", "| captures with nobody else there | MB/s |", "| --- | ---: |"]
    lines += [f"| {name} | {statistics.median(rates) / 1e6:.0f} |" for name, rates in idle.items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.polite", description=__doc__.split("\n", 1)[0])
    parser.add_argument("--cases", nargs="+", default=CASES, choices=CASES, help="see also busy_host.py")
    parser.add_argument("--seconds", type=float, default=12, help="of each turn")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--schedulers", nargs="+", default=SCHEDULERS)
    parser.add_argument("--jobs", nargs="+", type=int, default=range(len(JOBS)), help="0 reads, 1 writes")
    parser.add_argument(
        "--beside", nargs="+", default=tuple(BESIDE), choices=tuple(BESIDE), help="what the job runs beside"
    )
    parser.add_argument("--disk", type=Path, default=Path("/var/tmp"), help="where the devices' files lie")
    parser.add_argument("--skip-alone", action="store_true", help="captures are not measured by themselves")
    parser.add_argument("--name", default="latest-polite", help="of the results' files")
    options = parser.parse_args()
    if shutil.which("fio") is None:
        parser.error("fio is not installed: apt-get install fio")
    if "disk" in options.cases:
        _measure_disk_jobs(options)
    if "busy" in options.cases:
        from benchmarks import busy_host

        busy_host.run(options, _RESULTS)


def _measure_disk_jobs(options: argparse.Namespace) -> None:
    besides = [name for name in BESIDE if name in options.beside]
    runs: list[Run] = []
    idle: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory(prefix="ciuic-b-", dir=options.disk) as top:
        for scheduler in options.schedulers:
            with disk(Path(top), scheduler) as place:
                furnish(place)
                for number in range(options.rounds):
                    for job in options.jobs:
                        # The order changes every round: the second case always runs on the state that the
                        # first has left.
                        for beside in besides[:: -1 if number % 2 else 1]:
                            runs.append(turn(JOBS[job], scheduler, place, beside, number, options.seconds))
                            print(runs[-1], file=sys.stderr)
                    for beside, share in BESIDE.items():
                        if share is not None and not options.skip_alone:
                            rate = idle_rate(place, share, options.seconds / 2)
                            idle.setdefault(f"{scheduler}, {beside}", []).append(rate)
    text = table(runs, idle)
    print(text)
    _RESULTS.mkdir(exist_ok=True)
    (_RESULTS / f"{options.name}.md").write_text(text + "\n")
    document = {"runs": [run._asdict() for run in runs], "alone": idle}
    (_RESULTS / f"{options.name}.json").write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
