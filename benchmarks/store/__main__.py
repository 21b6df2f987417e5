"""Cost of snapshots: ciuic next to restic, borg and cp.

    make bench-store                                         everything, at the size of the figures that are reported
    make bench-store ARGS="--scale 0.02 --rounds 1"          smoke test; its figures mean nothing
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

_INTERVAL = "52w"
"""Interval of the daemon, too long to occur: the benchmark requests the snapshots that it measures."""


def _ciuic(place: Place) -> Served:
    return Daemon(place, "kernel", interval=_INTERVAL)


def _reflink(place: Place) -> Served:
    if reason := sharing.unsupported_reason(place.beside):
        raise RuntimeError(reason)
    return Plain(place)


def _contenders(wanted: set[str], top: Path) -> tuple[list[Contender], list[Note]]:
    del top
    available = [Contender(tools.CIUIC, _ciuic)]
    refused = []
    for name in (tools.RESTIC, tools.BORG):
        if shutil.which(name):
            available.append(Contender(name, Plain))
        else:
            refused.append(Note(name, "it is not installed"))
    available += [Contender(tools.COPY, Plain), Contender(tools.REFLINK, _reflink)]
    return [contender for contender in available if not wanted or contender.name in wanted], refused


if __name__ == "__main__":
    sys.exit(
        command.main(
            command.Benchmark(
                prog="benchmarks.store",
                description="ciuic next to restic, borg and cp.",
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
