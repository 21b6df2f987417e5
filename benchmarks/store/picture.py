"""Plot of a session: seconds of each command per place, and their growth with the number of files."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from benchmarks import plot
from benchmarks.samples import Table
from benchmarks.store.suites import ALL, SMALL_FILES, nothing_changed

_LINE_INCHES = 0.55
_GROWTH_INCHES = 4.0


def draw(table: Table, path: Path) -> bool:
    """Write a PNG; return False if there is nothing to compare."""
    rows = {cell: row for cell, row in table.items() if _is_duration(cell.figure)}
    if not rows:
        return False
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    places = list(dict.fromkeys(cell.place for cell in rows))
    lines = list(dict.fromkeys(cell.figure for cell in rows))
    heights = [1 + _LINE_INCHES * len(lines)]
    if any(_growth_points(table, place, name) for place in places for name in ALL):
        heights.append(_GROWTH_INCHES)
    figure, panels = pyplot.subplots(
        len(heights), len(places), squeeze=False, height_ratios=heights,
        figsize=(8 * len(places), sum(heights) + plot.LEGEND_INCHES),
    )  # fmt: skip
    for column, place in enumerate(places):
        _times(panels[0][column], table, place, lines)
        if len(heights) > 1:
            _growth(panels[1][column], table, place)
    plot.write(figure, panels[0], path, dots_per_inch=100)
    pyplot.close(figure)
    return True


def _times(panel: Any, table: Table, place: str, lines: list[str]) -> None:
    for number, name in enumerate(ALL):
        _bars(panel, table, place, lines, name, number)
    panel.set_xscale("log")
    panel.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_yticks(range(len(lines)), lines, fontsize=8)
    panel.set_ylim(len(lines) - 0.5, -0.5)
    panel.set_title(f"{place} (medians; whiskers: quartiles)", fontsize=10)
    panel.set_xlabel("seconds; shorter is better")
    panel.grid(axis="x", alpha=0.3)


def _growth_points(table: Table, place: str, name: str) -> dict[int, float]:
    return {
        files: row[name].median
        for files in SMALL_FILES
        for cell, row in table.items()
        if cell.place == place and cell.figure == nothing_changed(files) and name in row
    }


def _growth(panel: Any, table: Table, place: str) -> None:
    """Draw the seconds of a capture without changes over the number of files in the tree (at scale 1)."""
    for number, name in enumerate(ALL):
        points = _growth_points(table, place, name)
        if points:
            panel.plot(list(points), list(points.values()), marker="o", color=plot.COLOURS[number])
    panel.set_xscale("log")
    panel.set_yscale("log")
    panel.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    panel.set_xlabel("files in the tree at scale 1, none of them changed")
    panel.set_ylabel("seconds")
    panel.grid(alpha=0.3)


def _is_duration(figure: str) -> bool:
    parts = (", processor", ", memory", ", from cut", ", size", ", space", ", speed")
    return not any(part in figure for part in parts)


def _bars(panel: Any, table: Table, place: str, lines: list[str], name: str, number: int) -> None:
    height = 0.85 / len(ALL)
    positions, widths, errors = [], [], ([], [])  # type: ignore[var-annotated]
    for cell, row in table.items():
        if cell.place == place and cell.figure in lines and name in row:
            summary = row[name]
            positions.append(lines.index(cell.figure) + (number - (len(ALL) - 1) / 2) * height)
            widths.append(summary.median)
            errors[0].append(summary.median - summary.low_quartile)
            errors[1].append(summary.high_quartile - summary.median)
    if positions:
        panel.barh(
            positions,
            widths,
            height=height,
            label=name,
            color=plot.COLOURS[number],
            xerr=errors,
            ecolor="#1a202c",
        )
