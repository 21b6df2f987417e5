"""Runs tiers of the suite, and looks at what fails a second time.

    make test TIER="test slice-2" ARGS="--durations=20"      (or: python -m support.suite test slice-2 --durations=20)

| tier | is |
| --- | --- |
| ``test`` | tests that gate a landing: everything outside of tests/e2e that is not marked ``full`` |
| ``full`` | every test, on each driver of the overlay |
| ``slice-1`` … ``slice-3`` | a third of what ``full`` has beyond ``test``; the slice of a file never changes |

A failed test is run once more, alone. If it passes then, it is listed as flaky, with the seed of the run and its first failure. More
than `MAX_FLAKY` of them, or a test that fails twice, fail the run.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

CHECKOUT: Final = Path(__file__).parents[2]
MAX_FLAKY: Final = 3
_MAX_LOOKED_AT_TWICE: Final = 20
"""More failures than this have one cause, which a second look does not excuse: they end the run."""
SLICES: Final = 3

# A test that hangs on a mount cannot be interrupted from Python: pytest-timeout ends the process, with all stacks. At a load of 9 the
# longest took 300 seconds.
_PYTEST: Final = (sys.executable, "-m", "pytest", "--timeout=600", "--timeout-method=thread")
# What is run on the other drivers as well; all that mounts would take twice the time.
_BOTH_DRIVERS: Final = (
    "tests/conformance",
    "tests/property/test_mount_exact.py",
    "tests/smoke/test_daemon_mounts.py",
)
# "kernel-cached" is a kernel without passthrough (before 6.9), where everything is cached.
_CACHED: Final = (
    *_BOTH_DRIVERS[:2],
    "tests/e2e/test_job_survives_dead_workers.py::test_a_job_does_not_notice_that_its_worker_is_killed",
)


class Run(NamedTuple):
    """One run of pytest."""

    arguments: tuple[str, ...]
    driver: str = "kernel"


class Flaky(NamedTuple):
    """A test that failed in a run and passed alone."""

    name: str
    seed: int
    first_failure: str


def runs_of(tier: str) -> list[Run]:
    """Return what a tier consists of.

    Raises:
        ValueError: There is no such tier.
    """
    if tier == "test":
        return [Run(("--ignore=tests/e2e", "-m", "not full"))]
    other_drivers = [Run(_BOTH_DRIVERS, "pyfuse3"), Run(_CACHED, "kernel-cached")]
    if tier == "full":
        return [Run(()), *other_drivers]
    kind, _, number = tier.partition("-")
    if kind != "slice" or not number.isdecimal() or not 1 <= int(number) <= SLICES:
        raise ValueError(f"no tier named {tier}: test, full, or slice-1 to slice-{SLICES}")
    files = sorted(name for name in _files_beyond_test() if _slice_of(name) == int(number))
    return [Run(("-m", "full", *files)), *other_drivers[int(number) - 1 : int(number)]]


def _files_beyond_test() -> Iterator[str]:
    for path in (CHECKOUT / "tests").rglob("test_*.py"):
        name = str(path.relative_to(CHECKOUT))
        if name.startswith("tests/e2e/") or "mark.full" in path.read_text(encoding="utf-8"):
            yield name


def _slice_of(name: str) -> int:
    return zlib.crc32(name.encode()) % SLICES + 1


def main(arguments: list[str]) -> int:
    """Run the tiers that are named first, with the other arguments for pytest; return the exit status."""
    tiers = list(itertools.takewhile(lambda argument: not argument.startswith("-"), arguments))
    options = arguments[len(tiers) :]
    if not tiers or any(option.startswith(("-x", "--exitfirst", "--maxfail")) for option in options):
        print("name a tier, and let it run to its end: python -m support.suite TIER... [OPTION OF PYTEST...]")
        return 2
    flaky: list[Flaky] = []
    status = 0
    for run in [run for tier in tiers for run in runs_of(tier)]:
        found = look(run, options, random.SystemRandom().randrange(1 << 31))
        if isinstance(found, int):
            status = found
            break
        flaky += found
    for one in flaky:
        print(f"flaky: {one.name}\n    seed {one.seed}, passed alone; first: {one.first_failure}")
    if len(flaky) > MAX_FLAKY:
        print(f"{len(flaky)} tests are flaky, at most {MAX_FLAKY} may be")
        status = status or 1
    return status


def look(run: Run, options: Iterable[str], seed: int, cwd: Path = CHECKOUT) -> list[Flaky] | int:
    """Run tests, and those that fail once more, alone; return the flaky ones, or an exit status other than 0."""
    with tempfile.TemporaryDirectory() as kept:
        report = Path(kept, "report.xml")
        jobs = os.environ.get("JOBS", "3")
        # An expensive file begins early (tests/costs.txt); by the number of its tests, a file with one long test would be the last.
        parallel = ("-n", jobs, "--dist", "loadfile", "--no-loadscope-reorder")

        def pytest(*more: str) -> int:
            command = [*_PYTEST, f"--randomly-seed={seed}", "-o", f"cache_dir={kept}/cache", *more]
            environment = {**os.environ, "CIUIC_TEST_DRIVER": run.driver}
            # The Makefile's is relative: a program in another directory would look for its modules there.
            environment.pop("PYTHONPATH", None)
            # It could leave tests out.
            environment.pop("PYTEST_ADDOPTS", None)
            print(f"{run.driver}: {' '.join(command[1:])}", flush=True)
            return subprocess.run(command, cwd=cwd, env=environment, check=False).returncode

        status = pytest(
            *parallel,
            f"--maxfail={_MAX_LOOKED_AT_TWICE + 1}",
            f"--junitxml={report}",
            "-o",
            "junit_family=xunit1",
            *options,
            *run.arguments,
        )
        if status != 1:
            return status or []
        messages = _messages(report)
        # xdist repeats a test whose process died, and only the report has it then.
        failed = sorted(_last_failed(kept) | messages.keys())
        if not 0 < len(failed) <= _MAX_LOOKED_AT_TWICE:
            return status
        print(f"second look: {len(failed)} failed, each is run once more, alone", flush=True)
        again = pytest("-n", "0", f"--junitxml={report}", *failed)
        if again or ET.parse(report).find(".//skipped") is not None:
            print("failed twice:", *sorted(_last_failed(kept)), sep="\n    ")
            return status
        return [Flaky(name, seed, messages.get(name, "no message")) for name in failed]


def _last_failed(kept: str) -> set[str]:
    path = Path(kept, "cache/v/cache/lastfailed")
    return set(json.loads(path.read_text(encoding="utf-8"))) if path.exists() else set()


def _messages(report: Path) -> dict[str, str]:
    """Return the first line of what each failed test said."""
    messages: dict[str, str] = {}
    for case in ET.parse(report).iter("testcase"):
        for failure in (*case.findall("failure"), *case.findall("error")):
            name = f"{case.get('file')}::{case.get('name')}"
            messages.setdefault(name, (failure.get("message") or "").partition("\n")[0])
    return messages


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
