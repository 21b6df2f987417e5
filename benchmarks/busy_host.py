"""Snapshots on a busy host: their duration, and their cost for fio and a training step beside them.

    make bench-polite ARGS="--cases busy"                           the figures that are reported
    make bench-polite ARGS="--cases busy --rounds 1 --seconds 4"    smoke test; its figures mean nothing

The busy host has eight processes that compute in an endless loop, each in a session of its own, and a writer
of 80 MB/s that syncs every 8 MiB to the disk that also holds root and repository (ext4 on a loop device, as
in polite.py). A daemon with its default configuration serves the root. Each round measures, from the start of
the command to its end,

* `ciuic protect` of a root of 12 MB in 205 files, and `ciuic snapshot --wait`: its first snapshot;
* `ciuic snapshot --wait` after 1.5 MB in 205 files were written;

and fio's 4 KiB random reads and a training step of PyTorch that reads from the root, in alternation with and
without a snapshot of such changes every five seconds (requested over the socket). The changes are made in
both cases.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final, NamedTuple

from support.live import Live

from ciuic.protocol.control import ControlClient

BUSY_PROCESSES: Final = 8
_FILES: Final = 205
_FIRST_BYTES: Final = 12_000_000
_CHANGED_BYTES: Final = 1_500_000
_EVERY_SECONDS: Final = 5.0
_SETTLE_SECONDS: Final = 2.0
_COMMAND_SECONDS: Final = 600.0

_COMPUTE: Final = "while True: pass"
_WRITE: Final = """
import os, sys, time
file, block = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY), os.urandom(1 << 20)
began, written = time.monotonic(), 0
while True:
    for _ in range(8):
        os.pwrite(file, block, written % 512 << 20)
        written += 1
    os.fsync(file)
    time.sleep(max(0.0, began + written * (1 << 20) / 80e6 - time.monotonic()))
"""
_TRAIN: Final = """
import json, os, sys, time
import torch
torch.set_num_threads(1)
layers = torch.nn.Sequential(torch.nn.Linear(256, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1))
optimizer = torch.optim.Adam(layers.parameters())
names, seconds, until = sorted(os.scandir(sys.argv[1]), key=lambda entry: entry.name), [], time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:
    began = time.perf_counter()
    with open(names[len(seconds) % len(names)].path, "rb") as file:
        sample = bytearray(file.read(4096).ljust(4096, b"x"))  # another thread may be writing the file
    values = torch.frombuffer(sample, dtype=torch.uint8).float().reshape(16, 256) / 256
    optimizer.zero_grad()
    layers(values).square().mean().backward()
    optimizer.step()
    seconds.append(time.perf_counter() - began)
print(json.dumps(seconds))
"""


class Bar(NamedTuple):
    """Limit of one figure."""

    figure: str
    limit: float
    unit: str


BARS: Final = (
    Bar("first snapshot of 12 MB", 20.0, "s"),
    Bar("snapshot of 1.5 MB of changes", 5.0, "s"),
    Bar("fio p99 beside snapshots", 1.1, "ratio"),
    Bar("training step p99 beside snapshots", 1.1, "ratio"),
)
BESIDE: Final = ("nothing", "snapshots")


class Figure(NamedTuple):
    """One value of one round."""

    round: int
    name: str
    beside: str
    value: float


class Host:
    """A daemon, a root and a repository on one disk, with or without other processes at work."""

    def __init__(self, place: Path, own: Path) -> None:
        """Prepare the host; ``own`` is a directory with a short name, for sockets and logs."""
        self.place = place
        self.live = Live(own, repository=place / "repository")
        text = self.live.config.read_text().replace('[capture]\nmin_share = "100%"\n', "")
        self.live.config.write_text(text)  # the default configuration
        self._root_number = 0
        self.root = place / "root-0"

    def new_root(self) -> None:
        """Replace the directory by a new one of 12 MB."""
        if self._root_number:
            self.live.run("unprotect", str(self.root))
            shutil.rmtree(self.root)
        self._root_number += 1
        self.root = self.place / f"root-{self._root_number}"
        self.write(_FIRST_BYTES)
        os.sync()

    def write(self, total_bytes: int) -> None:
        """Write every file again."""
        for number in range(_FILES):
            folder = self.root / f"d{number % 10}"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / str(number)).write_bytes(os.urandom(total_bytes // _FILES))

    def command_seconds(self) -> float:
        """Return the seconds that `ciuic snapshot --wait` takes."""
        began = time.monotonic()
        self.live.run("snapshot", "--wait", timeout_seconds=_COMMAND_SECONDS)
        return time.monotonic() - began

    def request_seconds(self) -> float:
        """Return the seconds of the same request over the socket.

        Starting the command's interpreter would disturb fio and the training.
        """
        began = time.monotonic()
        with ControlClient(self.live.top / "run" / "control.sock") as control:
            control.take_snapshot(wait=True)
        return time.monotonic() - began


@contextlib.contextmanager
def busy(place: Path) -> Iterator[None]:
    """Run processes that spin on the processors, and a writer on the disk."""
    commands = [[sys.executable, "-c", _COMPUTE]] * BUSY_PROCESSES
    commands.append([sys.executable, "-c", _WRITE, str(place / "writer")])
    processes = [subprocess.Popen(command, start_new_session=True) for command in commands]
    try:
        time.sleep(_SETTLE_SECONDS)
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextlib.contextmanager
def changes(host: Host, *, snapshots: bool) -> Iterator[list[float]]:
    """Change 1.5 MB every five seconds, with or without a snapshot of each; collect their durations."""
    stop, durations = threading.Event(), list[float]()

    def change() -> None:
        while not stop.is_set():
            next_at = time.monotonic() + _EVERY_SECONDS
            host.write(_CHANGED_BYTES)
            if snapshots:
                durations.append(host.request_seconds())
            stop.wait(max(0.0, next_at - time.monotonic()))

    thread = threading.Thread(target=change)
    thread.start()
    try:
        yield durations
    finally:
        stop.set()
        thread.join()


def fio_p99_ms(place: Path, seconds: float) -> float:
    """Measure 4 KiB random reads that bypass the page cache, one at a time."""
    from benchmarks.polite import JOBS, run_fio

    percentiles = run_fio(JOBS[0], place, seconds)["clat_ns"]["percentile"]
    return float(percentiles["99.000000"]) / 1e6


def step_p99_ms(host: Host, seconds: float) -> float:
    """Train with one thread on samples from the root, in short steps: a turn has hundreds of them."""
    completed = subprocess.run(
        [sys.executable, "-c", _TRAIN, str(host.root / "d1"), str(seconds)],
        check=True,
        capture_output=True,
        text=True,
        timeout=seconds + 120,
    )
    seconds_each: list[float] = json.loads(completed.stdout)
    return statistics.quantiles(seconds_each, n=100)[98] * 1e3


def measure(host: Host, number: int, seconds: float) -> Iterator[Figure]:
    """Run one round."""
    host.new_root()
    with busy(host.place):
        began = time.monotonic()
        host.live.run("protect", str(host.root))
        yield Figure(number, "protect", "", time.monotonic() - began)
        yield Figure(number, BARS[0].figure, "", host.command_seconds())
        host.write(_CHANGED_BYTES)
        yield Figure(number, BARS[1].figure, "", host.command_seconds())
        # The order changes every round: the second case always runs on the state that the first has left.
        for beside in BESIDE[:: -1 if number % 2 else 1]:
            with changes(host, snapshots=beside == "snapshots") as durations:
                yield Figure(number, "fio p99", beside, fio_p99_ms(host.place, seconds))
                yield Figure(number, "training step p99", beside, step_p99_ms(host, seconds))
            for duration in durations:
                yield Figure(number, "snapshot of 1.5 MB beside fio or a training", "", duration)


def medians(figures: Sequence[Figure]) -> dict[tuple[str, str], float]:
    """Return the median of each figure, by its name and the work beside it."""
    keys = dict.fromkeys((figure.name, figure.beside) for figure in figures)
    return {
        key: statistics.median(figure.value for figure in figures if (figure.name, figure.beside) == key)
        for key in keys
    }


def verdicts(figures: Sequence[Figure]) -> list[tuple[Bar, float]]:
    """Return the measured value of each bar: medians, and ratios of medians of one run."""
    found = medians(figures)
    for name in ("fio p99", "training step p99"):
        found[f"{name} beside snapshots", ""] = found[name, BESIDE[1]] / found[name, BESIDE[0]]
    return [(bar, found[bar.figure, ""]) for bar in BARS]


def table(figures: Sequence[Figure]) -> str:
    """Return figures and bars as text."""
    lines = [
        "| figure | beside it | values | median | least | most |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for (name, beside), median in medians(figures).items():
        values = [figure.value for figure in figures if (figure.name, figure.beside) == (name, beside)]
        unit = "ms" if name.endswith("p99") else "s"
        lines.append(
            f"| {name}, {unit} | {beside or '-'} | {len(values)} | {median:.3g} | {min(values):.3g} | {max(values):.3g} |"
        )
    lines += ["", "| bar | limit | measured | |", "| --- | ---: | ---: | --- |"]
    lines += [
        f"| {bar.figure}, {bar.unit} | {bar.limit:g} | {value:.3g} | {'met' if value <= bar.limit else 'MISSED'} |"
        for bar, value in verdicts(figures)
    ]
    return "\n".join(lines)


def run(options: argparse.Namespace, results: Path) -> None:
    """Measure, print, and write the figures to a file."""
    from benchmarks.polite import JOBS, disk, run_fio

    figures: list[Figure] = []
    with contextlib.ExitStack() as stack:
        top = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ciuic-b-", dir=options.disk)))
        place = stack.enter_context(disk(top, "none"))
        own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ciuic-b-")))
        host = Host(place, own)
        stack.callback(host.live.close)
        host.live.start()
        run_fio(JOBS[1], place, 1)  # its file
        load = os.getloadavg()[0]
        for number in range(options.rounds):
            for figure in measure(host, number, options.seconds):
                figures.append(figure)
                print(figure, file=sys.stderr)
    text = f"{table(figures)}\n\nLoad of the machine before the first round: {load:.2f}, processors: {os.cpu_count()}.\n"
    print(text)
    results.mkdir(exist_ok=True)
    (results / f"{options.name}-busy.md").write_text(text)
    (results / f"{options.name}-busy.json").write_text(
        json.dumps([figure._asdict() for figure in figures], indent=1) + "\n"
    )
