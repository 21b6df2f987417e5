"""Command line of a benchmark: read the arguments, run the session, write a table, a plot and the raw values.

Guarantees: what was measured before an interruption is written; nothing that was mounted or started stays, or
it is named and the exit code is 1.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
from support import leftovers

from benchmarks import plot, report
from benchmarks.contenders import Contender
from benchmarks.samples import Note, Table, table
from benchmarks.session import Options, Session
from benchmarks.suite import Suite

RESULTS = Path(__file__).parent / "results"
_PR_SET_CHILD_SUBREAPER = 36


class Benchmark(NamedTuple):
    """Suites, contenders and bars of one `make bench…`."""

    prog: str
    description: str
    suites: Sequence[Suite]
    contenders: Callable[[set[str], Path], tuple[list[Contender], list[Note]]]
    """Function that returns the contenders that can be measured, and the reasons why others cannot.

    It gets the requested names (none for all), and a directory in which to try."""
    places: tuple[str, ...]
    comparison: report.Comparison
    draw: Callable[[Table, Path], bool]
    name: str
    """Default name of the files to write."""
    rounds: int = 5


def _arguments(benchmark: Benchmark) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=benchmark.prog, description=benchmark.description)
    names = [suite.name for suite in benchmark.suites]
    places = ",".join(benchmark.places)
    parser.add_argument(
        "only", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}; all when none is given"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="sizes and counts, as a share of the full ones (1)"
    )
    parser.add_argument(
        "--rounds", type=int, default=benchmark.rounds, help="how often every step is measured (%(default)s)"
    )
    parser.add_argument("--places", default=places, help="of %(default)s, with commas (all)")
    parser.add_argument(
        "--contenders", default="", help="names with commas; all that can serve when not given"
    )
    parser.add_argument(
        "--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write (benchmarks/results)")
    parser.add_argument(
        "--name", default=benchmark.name, help="of the files to write (%(default)s, which git ignores)"
    )
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(names):
        parser.error(f"no suite named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if unknown := set(arguments.places.split(",")) - set(benchmark.places):
        parser.error(f"no place named {', '.join(sorted(unknown))}")
    if arguments.scale <= 0 or arguments.rounds < 1:
        parser.error(
            f"--scale must be more than 0 and --rounds at least 1, got {arguments.scale:g} and {arguments.rounds}"
        )
    return arguments


def main(benchmark: Benchmark) -> int:
    """Return 0 if something was measured and nothing was left behind."""
    arguments = _arguments(benchmark)
    if os.geteuid() != 0:
        print("benchmarks: this needs root, because it mounts and drops caches", file=sys.stderr)
        return 2
    # Orphans become children of this process, so that processes left behind by a contender are found. SIGTERM
    # raises SystemExit, so that the cleanup below runs.
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    with (
        # In /tmp whatever TMPDIR says: the paths of unix sockets end at 107 bytes.
        tempfile.TemporaryDirectory(prefix="ciuic-b-", dir="/tmp", ignore_cleanup_errors=True) as own,
        tempfile.TemporaryDirectory(
            prefix="ciuic-b-", dir=arguments.disk, ignore_cleanup_errors=True
        ) as disk,
    ):
        below = (Path(own), Path(disk))
        before = leftovers.take_stock(below)
        try:
            found = _measure(benchmark, arguments, Path(own), Path(disk))
        finally:
            left = leftovers.remove_new(before, below)
            for name in left:
                print(f"benchmarks: left behind: {name}", file=sys.stderr)
    return 0 if found and not left else 1


def _measure(benchmark: Benchmark, arguments: argparse.Namespace, own: Path, disk: Path) -> bool:
    began, load = _now(), os.getloadavg()
    options = Options(
        scale=arguments.scale,
        rounds=arguments.rounds,
        places=tuple(arguments.places.split(",")),
        own=own,
        disk=disk,
    )
    wanted = set(filter(None, arguments.contenders.split(",")))
    available, refused = benchmark.contenders(wanted, own)
    session = Session(options, available, lambda text: print(text, flush=True))
    for note in refused:
        session.note(note.what, note.why)
    try:
        session.run(
            [suite for suite in benchmark.suites if not arguments.only or suite.name in arguments.only]
        )
    finally:  # write also what was measured before an interruption
        document = report.Document(
            machine=report.machine(arguments.disk),
            began=began,
            ended=_now(),
            load_before=load,
            load_after=os.getloadavg(),
            scale=arguments.scale,
            rounds=arguments.rounds,
            samples=session.samples,
            notes=session.notes,
        )
        _write(benchmark, document, arguments.results, arguments.name)
    return bool(session.samples)


def _write(benchmark: Benchmark, document: report.Document, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = table(document.samples)
    if reason := plot.missing_reason():
        print(f"no plot: {reason}")
    picture = f"{name}.png" if not reason and benchmark.draw(found, folder / f"{name}.png") else ""
    (folder / f"{name}.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    )
    text = report.markdown(document, found, picture, benchmark.comparison)
    (folder / f"{name}.md").write_text(text, encoding="utf-8")
    print(f"written: {folder / name}.md, .json{', .png' if picture else ''}")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())
