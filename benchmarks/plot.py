"""Plot of a session: speed as a ratio to the plain directory, one panel per place. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.contenders import NATIVE
from benchmarks.samples import Cell, Summary, Table

COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#718096")
_BAR_INCHES, _GAP_INCHES = 0.1, 0.12
LEGEND_INCHES = 0.4


def missing_reason() -> str:
    """Return why no plot can be drawn; empty if one can."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return "matplotlib is not installed (the group `bench` of pyproject.toml has it)"
    return ""


def draw(table: Table, path: Path) -> bool:
    """Write a PNG; return False if there is nothing to compare."""
    rows = {cell: row for cell, row in table.items() if NATIVE in row and len(row) > 1}
    if not rows:
        return False
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    names = sorted({name for row in rows.values() for name in row if name != NATIVE})
    places = list(dict.fromkeys(cell.place for cell in rows))
    longest = max(sum(cell.place == place for cell in rows) for place in places)
    figure, panels = pyplot.subplots(
        1, len(places), squeeze=False,
        figsize=(9 * len(places), 1.5 + longest * (_BAR_INCHES * len(names) + _GAP_INCHES)),
    )  # fmt: skip
    for place, panel in zip(places, panels[0], strict=True):
        _panel(panel, [(cell, row) for cell, row in rows.items() if cell.place == place], names, place)
    write(figure, panels[0], path, dots_per_inch=110)
    pyplot.close(figure)
    return True


def write(figure: Any, panels: Sequence[Any], path: Path, *, dots_per_inch: int) -> None:
    """Save the figure as a PNG, with one legend for all panels in LEGEND_INCHES at its top."""
    handles = {
        name: handle
        for panel in panels
        for handle, name in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="upper center", ncol=len(handles))
    figure.tight_layout(rect=(0, 0, 1, 1 - LEGEND_INCHES / figure.get_figheight()))
    figure.savefig(path, dpi=dots_per_inch)


def _panel(panel: Any, rows: Sequence[tuple[Cell, dict[str, Summary]]], names: list[str], place: str) -> None:
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        heights, bars = [], []
        for line, (_, row) in enumerate(rows):
            if name in row and row[NATIVE].median > 0:
                heights.append(line + (number - (len(names) - 1) / 2) * height)
                bars.append(_speed(row[name], row[NATIVE].median))
        if bars:
            errors = [[bar.value - bar.low for bar in bars], [bar.high - bar.value for bar in bars]]
            # Bars start at the line of the plain directory (1.0): a logarithmic axis has no zero.
            panel.barh(
                heights, [bar.value - 1 for bar in bars], left=1.0, height=height, label=name,
                color=COLOURS[number % len(COLOURS)], xerr=errors, ecolor="#1a202c",
            )  # fmt: skip
    panel.axvline(1.0, color="#1a202c", linewidth=1)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_yticks(range(len(rows)), [cell.figure for cell, _ in rows], fontsize=8)
    panel.set_ylim(len(rows) - 0.5, -0.5)
    panel.set_title(f"{place}: speed against the plain directory (medians; whiskers: quartiles)", fontsize=10)
    panel.set_xlabel("slower  ←  1 = as fast  →  faster")
    panel.grid(axis="x", alpha=0.3)


class _Bar(NamedTuple):
    value: float
    low: float
    high: float


def _speed(summary: Summary, native: float) -> _Bar:
    """Return a ratio of speeds, also for measured times. Ends are kept above zero, for the logarithm."""
    least = min(value for value in (summary.least, summary.median) if value > 0) / 10
    low, high = max(least, summary.low_quartile), max(least, summary.high_quartile)
    if summary.higher_is_better:
        return _Bar(summary.median / native, low / native, high / native)
    return _Bar(native / summary.median, native / high, native / low)
