"""Property, crash and conformance tests repeated with more examples and other seeds until the time is over.

A round runs them in a random order and ends early when its time is over; short runs therefore try a different
part of them with every seed.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import time

from torture.figure import Figure

_FOLDERS = ("tests/property", "tests/crash", "tests/conformance")
_PASSING = re.compile(r"^\s+- (\d+) passing", re.MULTILINE)
_SUMMARY = re.compile(r"(\d+) passed")


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: tests passed and examples passed, over all rounds."""
    rng = random.Random(seed)
    end = time.time() + seconds
    tests = examples = 0
    failures: tuple[str, ...] = ()
    while time.time() < end and not failures:
        code, text = _round(rng.randrange(1 << 31), end, seconds)
        tests += sum(int(count) for count in _SUMMARY.findall(text)[-1:])
        examples += sum(int(count) for count in _PASSING.findall(text))
        if code != 0:
            failures = (text[-20_000:],)
    return [Figure("tests passed", tests, failures), Figure("examples passed", examples)]


def _round(seed: int, end: float, seconds: float) -> tuple[int, str]:
    # The examples of one test grow with the time, so that a long run goes deep and a short one still goes
    # broad.
    environment = {
        "HYPOTHESIS_PROFILE": "torture",
        "TORTURE_EXAMPLES": str(max(50, int(seconds))),
        "TORTURE_END": str(end),
    }
    done = subprocess.run(
        [
            sys.executable, "-m", "pytest", "-q", "-p", "torture.until", "--timeout=7200", "--timeout-method=thread",
            "-p", "randomly", f"--randomly-seed={seed}", f"--hypothesis-seed={seed}", "--hypothesis-show-statistics",
            *_FOLDERS,
        ],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        check=False,
    )  # fmt: skip
    return done.returncode, done.stdout.decode("utf-8", "replace")
