"""The bars: what was promised of which figure, as data, and whether a session met them.

A bar is a ratio of medians measured in one session, or an absolute limit of a median. What cannot be judged from the
session (the reference was not measured) is said to be so, never taken for met.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.contenders import NATIVE, PEER, PEER_PLAIN
from benchmarks.samples import Cell, Table, ratio
from benchmarks.suite import CIUIC, CORE

KERNEL, PYFUSE3 = CIUIC


class Bar(NamedTuple):
    """``limit`` of the ratio to ``against``, or to the same contender's ``figure``, or of the median itself when both are empty."""

    figures: tuple[str, ...]
    limit: float
    at_least: bool = True
    against: str = NATIVE
    of: tuple[str, ...] = CIUIC
    places: tuple[str, ...] = ("tmpfs", "disk")
    figure: str = ""

    def words(self, unit: str) -> str:
        """As in a table: "≥ 0.95 of native"."""
        sign = "≥" if self.at_least else "≤"
        other = self.against or self.figure
        return f"{sign} {self.limit:g} of {other}" if other else f"{sign} {self.limit:g} {unit}"


class Verdict(NamedTuple):
    """A bar and what came of it; ``met`` is None when it could not be judged."""

    bar: Bar
    measured: float | None
    met: bool | None


_WRITES = ("new file, 8 MiB writes", "new file, 64 KiB writes", "new file, 8 MiB writes, four writers",
           "new file, 64 KiB writes, four writers")  # fmt: skip
_READS = ("cold read", "warm read", "random cold 4 KiB reads", "mmap read, cold", "mmap read, warm")
_SMALL = ("create + write 2 KB", "open + read 2 KB", "stat of uncached names", "unlink")

BARS = (
    Bar(_WRITES, 0.95),
    Bar(_READS, 0.97),
    Bar(("new file, 4 KiB writes",), 0.85),
    Bar(("appends of 200 bytes to a log",), 0.6, against=PEER_PLAIN),
    Bar(_SMALL, 1.0, against=PEER),
    Bar(_SMALL, 3.0, against=PYFUSE3, of=(KERNEL,)),
    Bar(("training step, median",), 1.01, at_least=False),
    Bar(("training step, mean with captures",), 1.02, at_least=False),
    Bar(("hold of a cut, p99",), 5.0, at_least=False, against="", of=(*CIUIC, CORE)),
    Bar(("worker memory above 60 MB, a file looked up",), 250.0, at_least=False, against="", of=CIUIC),
)


def judge(cell: Cell, contender: str, table: Table, bars: Sequence[Bar] = BARS) -> list[Verdict]:
    """Every bar that applies to this figure of this contender."""
    verdicts = []
    for bar in bars:
        if cell.figure in bar.figures and contender in bar.of and cell.place in bar.places:
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
    other = table.get(cell._replace(figure=bar.figure), {}).get(contender)
    return row[contender].median / other.median if other is not None and other.median else None


def unmeasured(table: Table, bars: Sequence[Bar] = BARS) -> list[str]:
    """Figures with a bar that the session has no value for."""
    seen = {cell.figure for cell in table}
    return sorted({figure for bar in bars for figure in bar.figures} - seen)
