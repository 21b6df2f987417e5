"""The session as a picture: medians as ratios to the plain directory, one panel a place. Needs matplotlib."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.contenders import NATIVE
from benchmarks.samples import Cell, Summary, Table, ratio

_COLOURS = ("#2b6cb0", "#dd6b20", "#2f855a", "#805ad5", "#718096")
_ROW_INCHES = 0.24


def why_not() -> str:
    """Why nothing can be drawn, or nothing."""
    try:
        importlib.import_module("matplotlib")
    except ImportError:
        return "matplotlib is not installed (the group `bench` of pyproject.toml has it)"
    return ""


def draw(table: Table, path: Path) -> bool:
    """Writes a PNG; false when there is nothing to compare."""
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
        figsize=(9 * len(places), 1.5 + _ROW_INCHES * longest * (len(names) + 1)),
    )  # fmt: skip
    for place, panel in zip(places, panels[0], strict=True):
        _panel(panel, [(cell, row) for cell, row in rows.items() if cell.place == place], names, place)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return True


def _panel(panel: Any, rows: Sequence[tuple[Cell, dict[str, Summary]]], names: list[str], place: str) -> None:
    height = 0.8 / len(names)
    for number, name in enumerate(names):
        heights, values, spans = [], [], []
        for line, (_, row) in enumerate(rows):
            value = ratio(row, name, NATIVE)
            if value is None or value <= 0:
                continue
            base = row[NATIVE].median
            heights.append(line + (number - (len(names) - 1) / 2) * height)
            values.append(value)
            spans.append((value - row[name].low_quartile / base, row[name].high_quartile / base - value))
        if values:
            errors = [[max(0.0, low) for low, _ in spans], [max(0.0, high) for _, high in spans]]
            colour = _COLOURS[number % len(_COLOURS)]
            panel.barh(
                heights, values, height=height, label=name, color=colour, xerr=errors, ecolor="#1a202c"
            )
    panel.axvline(1.0, color="#1a202c", linewidth=1)
    panel.set_xscale("log")
    panel.set_yticks(
        range(len(rows)), [f"{cell.figure} [{row[NATIVE].unit}]" for cell, row in rows], fontsize=8
    )
    panel.invert_yaxis()
    panel.set_title(f"{place}: median, as a ratio to the plain directory (whiskers: quartiles)", fontsize=10)
    panel.grid(axis="x", alpha=0.3)
    panel.legend(fontsize=8)
