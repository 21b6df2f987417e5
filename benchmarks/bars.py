"""Bars of figures, as data, and the judgement whether a session met them.

A bar is a ratio of medians measured in one session, or an absolute limit of a median. A bar that the
session cannot judge (the reference was not measured) is reported as not judged, never as met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.contenders import NATIVE, PEER, PEER_PLAIN
from benchmarks.samples import Cell, Table, ratio
from benchmarks.suite import CIUIC, CORE

KERNEL, _ = CIUIC


class Bar(NamedTuple):
    """Limit of the ratio to ``against`` or to the contender's own ``figure``; else of the median."""

    figures: tuple[str, ...]
    limit: float
    at_least: bool = True
    against: str = NATIVE
    contenders: tuple[str, ...] = CIUIC
    places: tuple[str, ...] = ("tmpfs", "disk")
    figure: str = ""

    def shown(self, unit: str) -> str:
        """Return the bar as a table shows it: "≥ 0.95 of native"."""
        sign = "≥" if self.at_least else "≤"
        reference = self.against or self.figure
        return f"{sign} {self.limit:g} of {reference}" if reference else f"{sign} {self.limit:g} {unit}"


class Verdict(NamedTuple):
    """Result of a bar; ``met`` is None when it could not be judged."""

    bar: Bar
    measured: float | None
    met: bool | None


_WRITES = ("new file, 8 MiB writes", "new file, 64 KiB writes", "new file, 8 MiB writes, four writers",
           "new file, 64 KiB writes, four writers", "new file, odd-sized writes")  # fmt: skip
_READS = ("cold read", "warm read", "random cold 4 KiB reads", "mmap read, cold", "mmap read, warm")
_SMALL = {"create + write 2 KB": 0.65, "stat of names just made": 1.0, "open + read 2 KB": 0.6, "stat of uncached names": 0.9,
          "readdir": 0.7, "unlink": 0.45}  # fmt: skip
_PROGRAMS = ("git clone of a local repository", "pip install of a wheel", "untar")

BARS = (
    Bar(_WRITES, 0.95),
    Bar(_READS, 0.97),
    Bar(("new file, 4 KiB writes",), 0.85),
    Bar(("file replaced, 8 MiB writes",), 0.9),
    Bar(("appends of 200 bytes to a log",), 0.6, against=PEER_PLAIN),
    *(
        Bar((figure,), limit, against=PEER, contenders=(KERNEL,), places=("tmpfs",))
        for figure, limit in _SMALL.items()
    ),
    Bar(_PROGRAMS, 0.33, places=("disk",)),
    Bar(("find, cold", "find, warm"), 0.67),
    Bar(("training step, median",), 1.01, at_least=False),
    Bar(("training step, mean with captures",), 1.02, at_least=False),
    Bar(("hold of a cut, p99",), 5.0, at_least=False, against="", contenders=(*CIUIC, CORE)),
    Bar(
        ("worker memory above 60 MB, a file looked up",), 250.0, at_least=False, against="", contenders=CIUIC
    ),
)


def judge(cell: Cell, contender: str, table: Table, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Judge every bar that applies to this figure of this contender."""
    verdicts = []
    for bar in bars:
        if cell.figure in bar.figures and contender in bar.contenders and cell.place in bar.places:
            measured = _measured(bar, cell, contender, table)
            met = (
                None if measured is None else measured >= bar.limit if bar.at_least else measured <= bar.limit
            )
            verdicts.append(Verdict(bar, measured, met))
    return verdicts


def _measured(bar: Bar, cell: Cell, contender: str, table: Table) -> float | None:
    row = table[cell]
    if bar.against:
        return ratio(row, contender, bar.against)
    if not bar.figure:
        return row[contender].median
    reference = table.get(cell._replace(figure=bar.figure), {}).get(contender)
    return row[contender].median / reference.median if reference is not None and reference.median else None


def unmeasured(table: Table, bars: Sequence[Bar] = BARS) -> list[str]:
    """Return figures with a bar for which the session has no value."""
    measured = {cell.figure for cell in table}
    return sorted({figure for bar in bars for figure in bar.figures} - measured)
