"""Measures, and writes a table, a plot and the raw values.

    make bench                                         everything, at the size of the figures that are reported
    make bench ARGS="--scale 0.02 --rounds 1"          does everything work? (no figure of it means anything)
    make bench ARGS="data metadata --places tmpfs"     only these

docs/benchmarks.md says what is measured and how to read it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from support import leftovers

from benchmarks import plot, report, workloads
from benchmarks.contenders import NATIVE, contenders, why_not
from benchmarks.samples import table
from benchmarks.session import DISK, TMPFS, Options, Session
from benchmarks.suite import CORE

RESULTS = Path(__file__).parent / "results"
_PR_SET_CHILD_SUBREAPER = 36


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="benchmarks", description="ciuic next to the plain directory.")
    names = [suite.name for suite in workloads.SUITES]
    parser.add_argument(
        "only", nargs="*", metavar="SUITE", help=f"of {', '.join(names)}; all when none is given"
    )
    parser.add_argument(
        "--scale", type=float, default=1.0, help="sizes and counts, as a share of the full ones (1)"
    )
    parser.add_argument("--rounds", type=int, default=5, help="how often every step is measured (5)")
    parser.add_argument(
        "--places", default=f"{TMPFS},{DISK}", help="tmpfs, disk, or both with a comma (both)"
    )
    parser.add_argument(
        "--contenders", default="", help="names with commas; all that can serve when not given"
    )
    parser.add_argument(
        "--disk", type=Path, default=Path("/var/tmp"), help="a directory on the disk to measure"
    )
    parser.add_argument("--results", type=Path, default=RESULTS, help="where to write (benchmarks/results)")
    parser.add_argument("--name", default="latest", help="of the files to write (latest, which git ignores)")
    arguments = parser.parse_args()
    if unknown := set(arguments.only) - set(names):
        parser.error(f"no suite named {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if unknown := set(arguments.places.split(",")) - {TMPFS, DISK}:
        parser.error(f"no place named {', '.join(sorted(unknown))}")
    if arguments.scale <= 0 or arguments.rounds < 1:
        parser.error("scale and rounds must be more than nothing")
    return arguments


def main() -> int:
    """0 when something was measured and nothing was left behind."""
    arguments = _arguments()
    if os.geteuid() != 0:
        print("benchmarks: this needs root, because it mounts and drops caches", file=sys.stderr)
        return 2
    # Orphans become children of this process, so that what a contender leaves behind is seen; and an end by signal
    # takes the same way out as any other.
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
            found = _measure(arguments, Path(own), Path(disk))
        finally:
            left = leftovers.remove_new(before, below)
            for what in left:
                print(f"benchmarks: left behind: {what}", file=sys.stderr)
    return 0 if found and not left else 1


def _measure(arguments: argparse.Namespace, own: Path, disk: Path) -> bool:
    began, load = _now(), os.getloadavg()
    options = Options(
        scale=arguments.scale,
        rounds=arguments.rounds,
        places=tuple(arguments.places.split(",")),
        own=own,
        disk=disk,
    )
    wanted = set(filter(None, arguments.contenders.split(",")))
    chosen = [one for one in contenders(os.environ) if not wanted or one.name in wanted | {NATIVE, CORE}]
    refused = {one.name: why_not(one, own) for one in chosen}
    able = [one for one in chosen if not refused[one.name]]
    session = Session(options, able, lambda text: print(text, flush=True))
    for name, why in refused.items():
        if why:
            session.note(name, why)
    try:
        session.run(
            [suite for suite in workloads.SUITES if not arguments.only or suite.name in arguments.only]
        )
    finally:  # what was measured before an interruption is worth keeping
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
        _write(document, arguments.results, arguments.name)
    return bool(session.samples)


def _write(document: report.Document, folder: Path, name: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = table(document.samples)
    if why := plot.why_not():
        print(f"no plot: {why}")
    picture = f"{name}.png" if not why and plot.draw(found, folder / f"{name}.png") else ""
    (folder / f"{name}.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(document), indent=1) + b"\n"
    )
    (folder / f"{name}.md").write_text(report.markdown(document, found, picture), encoding="utf-8")
    print(f"written: {folder / name}.md, .json{', .png' if picture else ''}")


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime())


if __name__ == "__main__":
    sys.exit(main())
