"""What snapshots cost: ciuic beside restic, borg and cp.

    make bench-store                                         everything, at the size of the figures that are reported
    make bench-store ARGS="--scale 0.02 --rounds 1"          does everything work? (no figure of it means anything)
    make bench-store ARGS="tree --places xfs"                only these

docs/benchmarks.md says what is measured and how to read it.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from benchmarks import command, report
from benchmarks.contenders import Contender, Daemon, Place, Plain, Served
from benchmarks.samples import Note
from benchmarks.store import picture, sharing, tools
from benchmarks.store.bars import BARS
from benchmarks.store.suites import PLACES, SUITES

_NEVER = "52w"
"""Between two snapshots of the daemon's own: those that are measured are asked for."""


def _ciuic(place: Place) -> Served:
    return Daemon(place, "kernel", interval=_NEVER)


def _reflink(place: Place) -> Served:
    if why := sharing.why_not(place.beside):
        raise RuntimeError(why)
    return Plain(place)


def _contenders(wanted: set[str], top: Path) -> tuple[list[Contender], list[Note]]:
    del top
    able = [Contender(tools.CIUIC, _ciuic)]
    refused = []
    for name in (tools.RESTIC, tools.BORG):
        if shutil.which(name):
            able.append(Contender(name, Plain))
        else:
            refused.append(Note(name, "it is not installed"))
    able += [Contender(tools.COPY, Plain), Contender(tools.REFLINK, _reflink)]
    return [one for one in able if not wanted or one.name in wanted], refused


if __name__ == "__main__":
    sys.exit(
        command.main(
            command.Benchmark(
                prog="benchmarks.store",
                description="ciuic beside restic, borg and cp.",
                suites=SUITES,
                contenders=_contenders,
                places=PLACES,
                comparison=report.Comparison(tools.COPY, BARS, "Seconds of each command"),
                draw=picture.draw,
                name="latest-store",
                rounds=3,
            )
        )
    )
