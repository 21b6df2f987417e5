"""Coverage-guided fuzzing of every decoder, or blind mutations where atheris is not installed.

With enough time each decoder (a reader of `support.readers`) has a process of its own and a line of figures:
executions, inputs in the corpus, edges reached. ``make torture ARGS="fuzz --each 3600"`` gives each an hour.
"""

from __future__ import annotations

import importlib.util
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support.fuzz import fill, to_keep
from support.readers import mutate, readers, refused_or_read
from torture.figure import Figure

_TESTS = Path(__file__).parents[1]
_MEMORY_MIB = 1024
_ONE_INPUT_SECONDS = 20
_LONGEST_BYTES = 70_000
_WORTH_A_PROCESS_SECONDS = 30
"""Least time for one target: each process takes some ten seconds to instrument what it imports."""


def run(seconds: float, seed: int) -> list[Figure]:
    """Return the figure of inputs that were read or refused with a message."""
    if importlib.util.find_spec("atheris") is None:
        return [_blind(seconds, seed)]
    targets = chosen(seconds)
    figures = []
    for name in targets:
        with tempfile.TemporaryDirectory() as top:
            figures.append(_guided(Path(top), seconds / len(targets), seed, name))
        sys.stdout.write(f"{figures[-1].name}: {figures[-1].count}\n")
        sys.stdout.flush()
    return figures


def chosen(seconds: float) -> list[str]:
    """Return the targets, one process each; with little time only the unnamed one for all."""
    only = os.environ.get("FUZZ_ONLY", "")
    names = [reader.name for reader in readers() if not only or reader.name in only.split(",")]
    return names if only or seconds >= _WORTH_A_PROCESS_SECONDS * len(names) else [""]


def figures_in(output: str) -> tuple[int, int, int]:
    """Return (executions, inputs in the corpus, edges) of libFuzzer's output; 0 if not reported."""
    executed = re.findall(r"number_of_executed_units:\s*(\d+)", output)
    state = re.findall(r"cov: (\d+) ft: \d+ corp: (\d+)", output)
    edges, corpus = state[-1] if state else (0, 0)
    return int(executed[-1]) if executed else 0, int(corpus), int(edges)


def _guided(top: Path, seconds: float, seed: int, name: str) -> Figure:
    corpus, found = top / "corpus", top / "found"
    fill(corpus, name)
    found.mkdir()
    command = [
        *(sys.executable, "-m", "support.fuzz", str(corpus)),
        *(f"-seed={seed % (1 << 31) or 1}", f"-max_total_time={max(2, int(seconds))}", f"-max_len={_LONGEST_BYTES}"),
        *(f"-rss_limit_mb={_MEMORY_MIB}", f"-timeout={_ONE_INPUT_SECONDS}", f"-artifact_prefix={found}/"),
        "-print_final_stats=1",
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": f"{_TESTS}:{_TESTS.parent}", "FUZZ_TARGET": name}, capture_output=True, text=True, errors="replace", check=False
    )  # fmt: skip
    output = done.stdout + done.stderr
    count, inputs, edges = figures_in(output)
    wrong = [f"{path.name}: keep as {_seed_bytes(path, name)[:2000]!r}" for path in sorted(found.iterdir())]
    if done.returncode or not count:
        wrong.append(f"exit status {done.returncode}: {output[-3000:]}")
    what = name or "all decoders together"
    return Figure(f"{what}: inputs read or refused (corpus {inputs}, {edges} edges)", count, tuple(wrong))


def _seed_bytes(path: Path, name: str) -> bytes:
    data = path.read_bytes()
    return name.encode() + b"\n" + data if name else to_keep(data)


def _blind(seconds: float, seed: int) -> Figure:
    dice, end, count = random.Random(seed), time.monotonic() + seconds, 0
    known = readers()
    while time.monotonic() < end:
        reader = dice.choice(known)
        data = mutate(reader.valid, dice)
        count += 1
        try:
            refused_or_read(reader, data)
        except Exception as error:
            return Figure(
                "mutated inputs", count, (f"{reader.name}: {type(error).__name__}: {error}: {data[:200]!r}",)
            )
    return Figure("mutated inputs read or refused with words (no atheris here)", count)
