"""Captured data and its changes: checkpoints and logs as of a training run, and many small files.

All content comes from fixed seeds and is the same in every session. A checkpoint is a directory of two files,
the model's weights in bfloat16 and the optimizer's state in float32, of normally distributed values, which
compress about as well as those of real models.
"""

from __future__ import annotations

import importlib
import os
import random
from typing import Any

from benchmarks.suite import Job

_CHECKPOINTS = 5
_CHECKPOINT_BYTES = 512 << 20
_LOGS = 5000
_LOG_BYTES = 20_000
_APPENDED_LOGS = 50
_OVERWRITTEN_BYTES = 1 << 20
_PIECE_VALUES = 4 << 20
NEXT = "next"
ONE_DIRECTORY = "checkpoints/step-1"


def checkpoint_bytes(job: Job, share: float) -> int:
    """Return the size of one checkpoint at this scale."""
    return max(2 << 20, round(_CHECKPOINT_BYTES * share * job.scale) >> 20 << 20)


def log_count(job: Job, share: float) -> int:
    """Return the number of logs at this scale."""
    return max(10, round(_LOGS * share * job.scale))


def make(top: str, job: Job, share: float) -> None:
    """Make the tree, and next to it, as ``next``, the checkpoint that ``change`` adds."""
    for number in range(_CHECKPOINTS):
        _checkpoint(f"{top}/tree/checkpoints/step-{number}", number, checkpoint_bytes(job, share))
    _checkpoint(f"{top}/{NEXT}", _CHECKPOINTS, checkpoint_bytes(job, share))
    os.makedirs(f"{top}/tree/logs")
    for number in range(log_count(job, share)):
        with open(f"{top}/tree/logs/{number}.jsonl", "wb") as file:
            file.write(
                log_lines(number, random.Random(number).randrange(_LOG_BYTES // 2, 3 * _LOG_BYTES // 2))
            )


def change(job: Job, share: float) -> None:
    """Add a checkpoint, append a few lines to 50 logs, and overwrite 1 MiB in the middle of a large file."""
    new = job.path("checkpoints/step-new")
    os.mkdir(new)
    for name in os.listdir(f"{job.source}/{NEXT}"):
        _copy(f"{job.source}/{NEXT}/{name}", f"{new}/{name}")
    for number in range(0, log_count(job, share), max(1, log_count(job, share) // _APPENDED_LOGS)):
        with open(job.path(f"logs/{number}.jsonl"), "ab") as file:
            file.write(log_lines(-number - 1, 1000))
    size = os.stat(job.path("checkpoints/step-0/optimizer.f32")).st_size
    amount = min(_OVERWRITTEN_BYTES, size // 4)
    with open(job.path("checkpoints/step-0/optimizer.f32"), "r+b") as file:
        file.seek(size // 3)
        file.write(random.Random("over").randbytes(amount))


def small_files(top: str, start: int, stop: int) -> None:
    """Make small files with the numbers ``range(start, stop)``, a hundred per directory."""
    for number in range(start, stop):
        folder = f"{top}/{number // 10_000}/{number // 100 % 100}"
        if number % 100 == 0 or number == start:
            os.makedirs(folder, exist_ok=True)
        fd = os.open(f"{folder}/{number}", os.O_WRONLY | os.O_CREAT, 0o644)
        os.write(fd, b"%d\n" % number * 10)
        os.close(fd)


def _checkpoint(folder: str, seed: int, size: int) -> None:
    numpy: Any = importlib.import_module("numpy")
    generator = numpy.random.default_rng(seed)
    os.makedirs(folder)
    weights = size // 4
    for name, left in (("model.bf16", weights), ("optimizer.f32", size - weights)):
        with open(f"{folder}/{name}", "wb") as file:
            while left > 0:
                values = generator.standard_normal(_PIECE_VALUES, dtype=numpy.float32) * numpy.float32(0.02)
                if name.endswith("bf16"):
                    values = (values.view(numpy.uint32) >> 16).astype(numpy.uint16)
                left -= file.write(values.tobytes()[:left])


def log_lines(seed: int, size: int) -> bytes:
    """Return at least ``size`` bytes of JSON log lines."""
    generator = random.Random(seed)
    lines, written, step = [], 0, 0
    while written < size:
        step += 10
        line = f'{{"step": {step}, "loss": {generator.random() * 3:.6f}, "tokens_per_second": {generator.randrange(90_000, 110_000)}}}\n'
        lines.append(line)
        written += len(line)
    return "".join(lines).encode()


def _copy(source: str, target: str) -> None:
    # With read and write, as a job does: a copy inside the kernel could share extents.
    with open(source, "rb") as reader, open(target, "wb") as writer:
        while piece := reader.read(8 << 20):
            writer.write(piece)
