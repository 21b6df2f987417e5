"""What a protected directory costs the job.

    make bench                                         everything, at the size of the figures that are reported
    make bench ARGS="--scale 0.02 --rounds 1"          does everything work? (no figure of it means anything)
    make bench ARGS="data metadata --places tmpfs"     only these

docs/benchmarks.md says what is measured and how to read it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import command, plot, report, workloads
from benchmarks.contenders import NATIVE, Contender, contenders, why_not
from benchmarks.places import DISK, TMPFS
from benchmarks.samples import Note
from benchmarks.suite import CORE


def _contenders(wanted: set[str], top: Path) -> tuple[list[Contender], list[Note]]:
    chosen = [one for one in contenders(os.environ) if not wanted or one.name in wanted | {NATIVE, CORE}]
    refused = {one.name: why_not(one, top) for one in chosen}
    return (
        [one for one in chosen if not refused[one.name]],
        [Note(name, why) for name, why in refused.items() if why],
    )


if __name__ == "__main__":
    sys.exit(
        command.main(
            command.Benchmark(
                prog="benchmarks",
                description="ciuic next to the plain directory.",
                suites=workloads.SUITES,
                contenders=_contenders,
                places=(TMPFS, DISK),
                comparison=report.WITH_THE_PLAIN_DIRECTORY,
                draw=plot.draw,
                name="latest",
            )
        )
    )
