"""Writers of checkpoints of every format, stopped and killed at 500 random instants each; no torn file may be called GOOD.

Of the whole files that no process had open at least 99 % must be GOOD.
"""

from __future__ import annotations

import importlib.util
import tempfile
import time
from pathlib import Path

from support.checkpoint_files import FORMATS, MODES, watch
from torture.figure import Figure

_INSTANTS = 500
"""Instants of each format, without a limit of time."""


def run(seconds: float, seed: int) -> list[Figure]:
    """Return, for each format, the snapshots that were judged and the torn ones among the GOOD."""
    until = time.monotonic() + seconds
    here = [
        name
        for name, one in FORMATS.items()
        if not one.library or importlib.util.find_spec(one.library) is not None
    ]
    figures = [
        Figure(f"{name}: {one.library} is not installed", 0)
        for name, one in FORMATS.items()
        if name not in here
    ]
    totals = {name: [0, 0, 0] for name in here}
    wrong: dict[str, list[str]] = {name: [] for name in here}
    rounds = 0
    while not rounds or time.monotonic() < until:
        for name in here:
            for mode in MODES:
                with tempfile.TemporaryDirectory() as top:
                    found = watch(name, mode, seed + rounds, _INSTANTS // len(MODES), Path(top))
                wrong[name] += found.wrong
                for index, count in enumerate((sum(found.states.values()), found.whole, found.whole_good)):
                    totals[name][index] += count
        rounds += 1
    for name in here:
        judged, whole, good = totals[name]
        if good < 0.99 * whole:
            wrong[name].append(f"only {good} of {whole} whole files were GOOD")
        figures.append(Figure(f"{name}: snapshots of killed writers judged", judged, tuple(wrong[name])))
        figures.append(Figure(f"{name}: whole ones among them that were GOOD", good))
    return figures
