"""Run the tortures one after the other, print one table of figures, exit with 1 for a broken promise.

    make torture SECONDS=600 SEED=7            (or: PYTHONPATH=tests .venv/bin/python -m torture --seconds 600 --seed 7)
    make torture SECONDS=600 ARGS="cut faults" only these
    make torture ARGS="fuzz --each 3600"       an hour for each decoder

A torture is a module of this folder with ``run(seconds: float, seed: int) -> list[Figure]``, and a line in TORTURES.
What ``run`` may rely on:

* it has a process of its own; the current directory is the checkout, TMPDIR a short-named directory of its own that
  is unmounted and removed afterwards (unix socket paths end at 107 bytes);
* ``seconds`` is when to begin nothing new, not a limit: checking what was done may take longer (four times as long and
  ten minutes; then the runner ends it, which is a failure);
* every choice comes from ``random.Random(seed)``, so that a run can be repeated as far as timing allows;
* raising is a failure with the traceback as its text; so is leaving a process, a mount or a loop device behind.
"""

from __future__ import annotations

import argparse
import ctypes
import importlib
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from support import leftovers
from torture.figure import Figure

CHECKOUT = Path(__file__).parents[2]
_PR_SET_CHILD_SUBREAPER = 36


class Torture(NamedTuple):
    """A module of this folder, and its share of the seconds relative to the others."""

    module: str
    share: float
    only_named: bool = False
    """True if it runs only where the command names it."""


TORTURES = [
    Torture("properties", 3),
    Torture("cut", 2),
    Torture("kills", 2),
    Torture("survival", 1),
    Torture("holders", 1),
    Torture("twins", 2),
    Torture("power", 2),
    Torture("saved_state", 1),
    Torture("damage", 1),
    Torture("year", 2),
    Torture("databases", 1),
    Torture("oracle", 1),
    Torture("faults", 2),
    Torture("suites", 2),
    Torture("xfstests", 2),
    Torture("restore_race", 1),
    Torture("lazy", 1),
    Torture("mess", 1),
    Torture("remote", 1),
    Torture("syncs", 0.5),
    Torture("checkpoints", 1),
    Torture("fuzz", 1),
    Torture("training", 1),
    Torture("resumes", 1),
    Torture("ranks", 1),
    Torture("hosts", 1),
    Torture("slurm", 1),
    Torture("elastic", 1),
    Torture("sets", 1),
    Torture("mutants", 1, only_named=True),
]


def chosen(only: Sequence[str]) -> list[Torture]:
    """Return the tortures of these names; without names, all that need not be named."""
    return [one for one in TORTURES if (one.module in only if only else not one.only_named)]


def _python_path() -> str:
    """Return the import path: the tests' modules, then the caller's PYTHONPATH (databases)."""
    named = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(dict.fromkeys([str(CHECKOUT / "tests"), *filter(None, named)]))


def main() -> int:
    """Parse the command line; the hidden option --into runs one torture in its own process."""
    parser = argparse.ArgumentParser(prog="torture", description="Tries to break what ciuic promises.")
    parser.add_argument("only", nargs="*", help="names of tortures; all but mutants when none is given")
    parser.add_argument("--seconds", type=float, default=600, help="for all of them together (600)")
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument(
        "--each", type=float, help="with fuzz alone: seconds for each decoder, instead of --seconds"
    )
    parser.add_argument("--into", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.into:
        return _run_here(arguments.only[0], arguments.seconds, arguments.seed, Path(arguments.into))
    known = {torture.module for torture in TORTURES}
    if unknown := set(arguments.only) - known:
        parser.error(f"no torture named {', '.join(sorted(unknown))}; there are {', '.join(sorted(known))}")
    if arguments.each is not None:
        if arguments.only != ["fuzz"]:
            parser.error("--each is for fuzz alone: make torture ARGS='fuzz --each 3600'")
        from support.readers import readers

        arguments.seconds = arguments.each * len(readers())
    seed = random.SystemRandom().randrange(1 << 31) if arguments.seed is None else arguments.seed
    return _run_all(chosen(arguments.only), arguments.seconds, seed)


def _run_here(module: str, seconds: float, seed: int, into: Path) -> int:
    figures: list[Figure] = importlib.import_module(f"torture.{module}").run(seconds, seed)
    into.write_bytes(msgspec.json.encode(figures))
    return 0


def _run_all(tortures: list[Torture], seconds: float, seed: int) -> int:
    # Orphans become children of this process, so that leftovers of a torture are seen.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    shares = sum(torture.share for torture in tortures)
    rows = []
    for torture in tortures:
        part = seconds * torture.share / shares
        print(f"--- {torture.module}: {part:.0f} s, seed {seed}", flush=True)
        started = time.monotonic()
        rows += [(torture.module, figure) for figure in _run_apart(torture.module, part, seed)]
        print(f"--- {torture.module}: over after {time.monotonic() - started:.0f} s", flush=True)
    return _print_table(rows, seed)


def _run_apart(module: str, seconds: float, seed: int) -> list[Figure]:
    """Run one torture in a process and a directory of its own, and check what it left behind."""
    place = Path(tempfile.mkdtemp(prefix="ciuic-x-", dir="/tmp"))
    before = leftovers.take_stock((place,))
    into = place / "figures.json"
    command = [sys.executable, "-m", "torture", module, "--seconds", str(seconds), "--seed", str(seed)]
    process = subprocess.Popen(
        [*command, "--into", str(into)],
        cwd=CHECKOUT,
        env={**os.environ, "TMPDIR": str(place), "PYTHONPATH": _python_path()},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )
    try:
        figures = _outcome(process, into, 4 * seconds + 600)
    finally:
        # Also when the operator interrupts: nothing stays mounted.
        left = leftovers.remove_new(before, (place,))
        leftovers.unmount_below(place)
        shutil.rmtree(place, ignore_errors=True)
    return figures + ([Figure("left nothing behind", 0, tuple(left))] if left else [])


def _outcome(process: subprocess.Popen[bytes], into: Path, limit_seconds: float) -> list[Figure]:
    try:
        _, stderr = process.communicate(timeout=limit_seconds)
    except subprocess.TimeoutExpired:
        return [Figure("ended in time", 0, (f"it was still running after {limit_seconds:.0f} s",))]
    finally:
        if process.poll() is None:
            # A session of its own: no other process is in the group.
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    text = stderr.decode("utf-8", "replace")
    sys.stderr.write(text)
    if process.returncode != 0 or not into.exists():
        return [Figure("ended properly", 0, (f"exit status {process.returncode}\n{text[-4000:]}",))]
    return msgspec.json.decode(into.read_bytes(), type=list[Figure])


def _print_table(rows: list[tuple[str, Figure]], seed: int) -> int:
    failures = [
        f"{module}, {figure.name}: {text}"
        for module, figure in rows
        for text in dict.fromkeys(figure.failures)
    ]
    for text in failures:
        print(f"\nFAILED {text}")
    width = max((len(figure.name) for _, figure in rows), default=0)
    print(f"\n{'torture':12}  {'figure':{width}}  {'count':>10}  failures")
    for module, figure in rows:
        print(f"{module:12}  {figure.name:{width}}  {figure.count:>10,}  {len(figure.failures):>8,}")
    print(f"\nseed {seed}: {'a promise was broken' if failures else 'every promise was kept'}", flush=True)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
