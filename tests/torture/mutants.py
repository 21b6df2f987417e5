"""Faults that were made by hand (tests/mutants), one at a time: a test of their subject must notice each.

A mutated file is mounted over the original, in a mount namespace of its own: whatever a test starts, with any environment, runs the
mutated code, and nothing else on the machine does. First come the tests of `make test`, then those that `make test-full` adds.
`CIUIC_MUTANTS="NAME NAME"` chooses mutants by name or by subject.
"""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from mutants import MUTANTS, Mutant
from torture.figure import Figure

CHECKOUT = Path(__file__).parents[2]
_FULL_TIER = "tests/e2e"
"""Folder of which `make test` runs nothing."""
_NOT_CAUGHT = "NOT CAUGHT"
_ACCEPTED_SHARE = 0.05
"""Share of the mutants that may be left to `make test-full`."""
_JOBS = int(os.environ.get("JOBS") or os.cpu_count() or 1)
# One argument each: the mutated file, the original, then the program.
_MOUNTED = 'mount --bind "$1" "$2" && shift 2 && exec "$@"'
_NO_TESTS = 5
_SUMMARY = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


class _Outcome(NamedTuple):
    mutant: Mutant
    tier: str
    test: str
    seconds: float


def run(seconds: float, seed: int) -> list[Figure]:
    """Run the chosen mutants in a random order, for as long as there is time, after their tests without any mutant."""
    until = time.monotonic() + seconds
    chosen = named(os.environ.get("CIUIC_MUTANTS", "").split())
    random.Random(seed).shuffle(chosen)
    place = Path(tempfile.mkdtemp(prefix="mutants-"))
    if failed := _first_failure(
        None, sorted({test for one in chosen for test in one.tests}), place, "make test"
    ):
        return [Figure("tests without a mutant", 1, (f"{failed} fails without any mutant",))]

    def attempt(mutant: Mutant) -> _Outcome | None:
        return _attempt(mutant, place) if time.monotonic() < until else None

    with ThreadPoolExecutor(_JOBS) as pool:
        outcomes = [outcome for outcome in pool.map(attempt, chosen) if outcome is not None]
    missed = [outcome for outcome in outcomes if outcome.tier != "make test"]
    texts = [f"{one.mutant.name}: {one.tier}: {one.mutant.consequence}" for one in missed]
    few = len(missed) <= _ACCEPTED_SHARE * len(outcomes) and not any(
        one.tier == _NOT_CAUGHT for one in missed
    )
    _print(outcomes)
    return [
        Figure("mutants, each noticed by `make test`", len(outcomes), () if few else tuple(texts)),
        Figure("  of which only `make test-full` notices", sum(one.tier != _NOT_CAUGHT for one in missed)),
        Figure("mutants for which there was no time", len(chosen) - len(outcomes)),
    ]


def named(names: Sequence[str]) -> list[Mutant]:
    """Return the mutants of these names or subjects; all where none is given."""
    known = {mutant.name for mutant in MUTANTS} | {mutant.subject for mutant in MUTANTS}
    if unknown := set(names) - known:
        raise ValueError(f"no mutant and no subject is named {', '.join(sorted(unknown))}")
    return [one for one in MUTANTS if not names or one.name in names or one.subject in names]


def _attempt(mutant: Mutant, place: Path) -> _Outcome:
    began = time.monotonic()
    tier, test = _NOT_CAUGHT, ""
    with _mutated(mutant, place) as file:
        for tier in ("make test", "make test-full"):
            if test := _first_failure((file, CHECKOUT / mutant.path), mutant.tests, place, tier):
                break
        else:
            tier = _NOT_CAUGHT
    outcome = _Outcome(mutant, tier, test, time.monotonic() - began)
    print(_row(outcome), flush=True)
    return outcome


@contextmanager
def _mutated(mutant: Mutant, place: Path) -> Iterator[Path]:
    original = CHECKOUT / mutant.path
    file = place / f"{mutant.name}.py"
    file.write_text(mutant.applied(original.read_text()))
    # A time of its own: Python goes by time and size of the source where it takes compiled code for its own.
    os.utime(file, (time.time(), 1 + [one.name for one in MUTANTS].index(mutant.name)))
    file.chmod(0o644)
    yield file
    file.unlink()


def _first_failure(mounted: tuple[Path, Path] | None, tests: Iterable[str], place: Path, tier: str) -> str:
    """Return the first test of a tier that fails; empty where none does."""
    inside = [test for test in tests if not test.startswith(_FULL_TIER)]
    outside = [test for test in tests if test.startswith(_FULL_TIER)]
    runs = [(inside, "not full")] if tier == "make test" else [(inside, "full"), (outside, "")]
    for some, marker in runs:
        if some and (failed := _pytest(mounted, [*some, "-m", marker], place)):
            return failed
    return ""


def _pytest(mounted: tuple[Path, Path] | None, arguments: Sequence[str], place: Path) -> str:
    command = [str(CHECKOUT / ".ci/with-test-disk"), sys.executable, "-m", "pytest", "-x", "-q", *arguments]
    command += ["-p", "no:cacheprovider", "--timeout-method=thread"]
    if mounted is None:
        command += ["-n", str(_JOBS), "--dist", "loadfile"]
    else:
        command = ["unshare", "--mount", "sh", "-c", _MOUNTED, "mounted", *map(str, mounted), *command]
    with tempfile.TemporaryFile(dir=place) as output:
        done = subprocess.run(
            command,
            cwd=CHECKOUT,
            # Longer than any test takes, as in the Makefile: a mutant may wait for ever.
            env={"PYTEST_TIMEOUT": "600", **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            check=False,
        )
        output.seek(0)
        text = output.read().decode("utf-8", "replace")
    if done.returncode in (0, _NO_TESTS):
        return ""
    found = _SUMMARY.search(text)
    if found is None:
        raise RuntimeError(f"the tests could not be run: exit status {done.returncode}: {text[-500:]}")
    return found[1]


def _row(outcome: _Outcome) -> str:
    mutant, tier, test, seconds = outcome
    return f"{mutant.subject:12} {mutant.name:34} {tier:14} {seconds:5.0f} s  {test}"


def _print(outcomes: Iterable[_Outcome]) -> None:
    print("\n" + "\n".join(sorted(map(_row, outcomes))), flush=True)
