"""PyTorch training loop on the processor.

It has a data loader with workers that read small files, an optimizer, a log line per step, and every few
steps a checkpoint, written under a temporary name and renamed.

With ciuic it runs in a protected root of a daemon that takes a snapshot at every interval (a minute at scale
1). The time of a step includes waiting for data, computing, logging, and the checkpoint if one is due. The
times of snapshots come from the daemon's log; a step counts as during capture if any part of it lies between
a cut and its commit.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import statistics
import time
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple

from benchmarks.suite import Figure, Job, Measured, Step, Suite

_SECONDS, _MIN_SECONDS = 150.0, 2.0
_SAMPLES = 2_000
_SAMPLE_VALUES = 4096
_HIDDEN = 512
_BATCH = 32
_WORKERS = 2
_CHECKPOINT_EVERY = 20
_KEPT_CHECKPOINTS = 3


class Interval(NamedTuple):
    """Interval of wall-clock time, in seconds since the epoch: a step or a capture."""

    began: float
    ended: float


def _missing() -> str:
    for name in ("numpy", "torch"):
        if importlib.util.find_spec(name) is None:
            return f"{name} is not installed"
    return ""


class Samples:
    """Data set with one file per sample."""

    def __init__(self, folder: str, count: int) -> None:
        self._folder, self._count = folder, count

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        if index >= self._count:
            raise IndexError(index)
        torch: Any = importlib.import_module("torch")
        with open(f"{self._folder}/{index}", "rb") as file:
            values = torch.frombuffer(bytearray(file.read()), dtype=torch.float32)
        return values, values[:16].sum()


def _furnish(job: Job) -> None:
    numpy: Any = importlib.import_module("numpy")
    generator = numpy.random.default_rng(1)
    os.makedirs(job.path("data"))
    os.makedirs(job.path("checkpoints"))
    for number in range(job.count(_SAMPLES, 4 * _BATCH)):
        with open(job.path(f"data/{number}"), "wb") as file:
            file.write(generator.random(_SAMPLE_VALUES, dtype=numpy.float32).tobytes())


class Trainer:
    """Model, optimizer and data of one run."""

    def __init__(self, job: Job) -> None:
        torch: Any = importlib.import_module("torch")
        data: Any = importlib.import_module("torch.utils.data")
        torch.manual_seed(1)
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // 2))
        self._torch, self._job = torch, job
        layers = torch.nn
        self._model = layers.Sequential(
            layers.Linear(_SAMPLE_VALUES, _HIDDEN), layers.ReLU(), layers.Linear(_HIDDEN, _HIDDEN), layers.ReLU(),
            layers.Linear(_HIDDEN, 1),
        )  # fmt: skip
        self._optimizer = torch.optim.Adam(self._model.parameters(), lr=1e-4)
        samples = Samples(job.path("data"), job.count(_SAMPLES, 4 * _BATCH))
        self._loader = data.DataLoader(
            samples,
            batch_size=_BATCH,
            shuffle=True,
            num_workers=_WORKERS,
            persistent_workers=True,
            drop_last=True,
        )
        self.saves: list[float] = []

    def run(self, seconds: float) -> list[Interval]:
        """Train for at least ``seconds`` and return the interval of each step."""
        steps: list[Interval] = []
        until = time.time() + seconds
        with open(self._job.path("train.log"), "a", buffering=1) as log:
            while True:
                began = time.time()
                for inputs, targets in self._loader:
                    self._optimizer.zero_grad()
                    loss = ((self._model(inputs).squeeze(1) - targets) ** 2).mean()
                    loss.backward()
                    self._optimizer.step()
                    log.write(f'{{"step": {len(steps)}, "loss": {float(loss.detach()):.6f}}}\n')
                    if len(steps) % _CHECKPOINT_EVERY == _CHECKPOINT_EVERY - 1:
                        self._save(len(steps) // _CHECKPOINT_EVERY)
                    ended = time.time()
                    steps.append(Interval(began, ended))
                    began = ended
                    if ended > until:
                        return steps

    def _save(self, number: int) -> None:
        began = time.time()
        state = {
            "model": self._model.state_dict(),
            "optimizer": self._optimizer.state_dict(),
            "number": number,
        }
        path = self._job.path(f"checkpoints/{number}.pt")
        self._torch.save(state, f"{path}.tmp")
        os.rename(f"{path}.tmp", path)
        old = self._job.path(f"checkpoints/{number - _KEPT_CHECKPOINTS}.pt")
        if os.path.exists(old):
            os.unlink(old)
        self.saves.append(time.time() - began)


def captures(log: str) -> list[Interval]:
    """Return the interval from each cut in the daemon's log to its commit, or to now without a commit."""
    cuts: dict[str, float] = {}
    intervals = []
    with open(log, encoding="utf-8", errors="replace") as lines:
        for line in lines:
            if '"snapshot_cut"' in line or '"snapshot_committed"' in line:
                event = json.loads(line)
                time_seconds = datetime.fromisoformat(event["timestamp"].replace("Z", "+00:00")).timestamp()
                if event["event"] == "snapshot_cut":
                    cuts[event["id"]] = time_seconds
                elif event["id"] in cuts:
                    intervals.append(Interval(cuts.pop(event["id"]), time_seconds))
    return intervals + [Interval(cut, time.time()) for cut in cuts.values()]


def figures(
    steps: Sequence[Interval], capturing: Sequence[Interval], saves: Sequence[float], *, snapshots: bool
) -> Measured:
    """Return the figures in milliseconds, without the first step, which waits for the loader's workers."""
    counted = list(steps[1:])
    times = [(step.ended - step.began) * 1000 for step in counted]
    captured = [
        time_ms
        for step, time_ms in zip(counted, times, strict=True)
        if any(step.began < window.ended and step.ended > window.began for window in capturing)
    ]
    while_capturing = (
        (statistics.fmean(captured) if captured else None) if snapshots else statistics.fmean(times)
    )
    save = statistics.fmean(saves) * 1000 if saves else None
    return Measured([statistics.median(times), statistics.fmean(times), while_capturing, save], times)


def _train(job: Job) -> Measured:
    trainer = Trainer(job)
    steps = trainer.run(max(_MIN_SECONDS, _SECONDS * job.scale))
    capturing = captures(job.log) if job.log else []
    return figures(steps, capturing, trainer.saves, snapshots=bool(job.log))


SUITE = Suite(
    "training",
    (
        Step(
            (
                Figure("training step, median", "ms", False),
                Figure("training step, mean with captures", "ms", False),
                Figure("training step, mean while capture runs", "ms", False),
                Figure("checkpoint save, mean", "ms", False),
            ),
            _train,
            limit_seconds=600,
        ),
    ),
    furnish=_furnish,
    missing=_missing,
    places=("disk",),
    with_daemon=True,
)
