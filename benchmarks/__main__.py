"""Cost of a protected directory for the job.

    make bench                                         everything, at the size of the figures that are reported
    make bench ARGS="--scale 0.02 --rounds 1"          smoke test; its figures mean nothing
    make bench ARGS="data metadata --places tmpfs"     only these

docs/benchmarks.md says what is measured and how to read it.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from benchmarks import command, plot, report, workloads
from benchmarks.contenders import NATIVE, Contender, contenders, refusal_reason
from benchmarks.places import DISK, TMPFS
from benchmarks.samples import Note
from benchmarks.suite import CORE


def _contenders(wanted: set[str], top: Path) -> tuple[list[Contender], list[Note]]:
    chosen = [
        contender
        for contender in contenders(os.environ)
        if not wanted or contender.name in wanted | {NATIVE, CORE}
    ]
    refused = {contender.name: refusal_reason(contender, top) for contender in chosen}
    return (
        [contender for contender in chosen if not refused[contender.name]],
        [Note(name, reason) for name, reason in refused.items() if reason],
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
