"""Every decoder fed by a fuzzer that sees which lines an input reaches; by blind mutations where atheris is not installed."""

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


def run(seconds: float, seed: int) -> list[Figure]:
    """Figure: inputs that were read or refused with words."""
    if importlib.util.find_spec("atheris") is None:
        return [_blind(seconds, seed)]
    with tempfile.TemporaryDirectory() as top:
        return [_guided(Path(top), seconds, seed)]


def _guided(top: Path, seconds: float, seed: int) -> Figure:
    corpus, found = top / "corpus", top / "found"
    fill(corpus)
    found.mkdir()
    command = [
        *(sys.executable, "-m", "support.fuzz", str(corpus)),
        *(f"-seed={seed % (1 << 31) or 1}", f"-max_total_time={max(2, int(seconds))}", f"-max_len={_LONGEST_BYTES}"),
        *(f"-rss_limit_mb={_MEMORY_MIB}", f"-timeout={_ONE_INPUT_SECONDS}", f"-artifact_prefix={found}/"),
        *("-print_final_stats=1", "-verbosity=0"),
    ]  # fmt: skip
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(_TESTS)}, capture_output=True, text=True, errors="replace", check=False
    )  # fmt: skip
    said = done.stdout + done.stderr
    executed = re.search(r"number_of_executed_units:\s*(\d+)", said)
    count = int(executed[1]) if executed else 0
    wrong = [
        f"{path.name}: keep as {to_keep(path.read_bytes())[:2000]!r}" for path in sorted(found.iterdir())
    ]
    if done.returncode or not count:
        wrong.append(f"exit status {done.returncode}: {said[-3000:]}")
    return Figure("inputs of guided fuzzing read or refused with words", count, tuple(wrong))


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
