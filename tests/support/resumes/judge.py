"""Comparison of a run that was killed and resumed with an undisturbed one, in state and in reported values."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple


class Comparison(NamedTuple):
    """Differences of a killed run, by name."""

    states: tuple[str, ...]
    """Parts of the final state that differ."""
    values: tuple[str, ...]
    """Reported values that differ, but for those by design."""
    by_design: tuple[str, ...]
    """Reported values that differ as the documentation says."""


def compare(undisturbed: Path, killed: Path, world: int, by_design: Mapping[str, str]) -> Comparison:
    """Compare the results and logs of all ranks.

    Args:
        undisturbed: directory of the undisturbed run.
        killed: directory of the run that was killed.
        world: number of ranks.
        by_design: values that a resume does not give back.
    """
    states: list[str] = []
    values: list[str] = []
    for rank in range(world):
        expected, found = (
            json.loads((where / f"result-{rank}").read_text()) for where in (undisturbed, killed)
        )
        states += _different(expected["state"], found["state"])
        values += [f"at the end: {name}" for name in _different(expected["values"], found["values"])]
        values += _different_lines(_lines(undisturbed, rank), _lines(killed, rank))
    named = {name for name in values if name in by_design}
    return Comparison(tuple(sorted(set(states))), tuple(sorted(set(values) - named)), tuple(sorted(named)))


def compare_lives(killed: Path) -> Comparison:
    """Compare each state that a life has resumed from with the same one as an earlier life has saved it.

    Args:
        killed: directory of the run; its first rank reports ``state NAME``, and ``resumed NAME`` later.
    """
    saved, resumed = (
        {
            line["key"].partition(" ")[2]: line["values"]
            for line in _lines(killed, 0)
            if line["key"].startswith(kind)
        }
        for kind in ("state ", "resumed ")
    )
    states = {name for key, values in resumed.items() for name in _different(saved.get(key, {}), values)}
    return Comparison(tuple(sorted(states)), () if resumed else ("no life has resumed",), ())


def _lines(where: Path, rank: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (where / f"log-{rank}").read_text().splitlines()]


def _different_lines(expected: list[dict[str, Any]], found: list[dict[str, Any]]) -> list[str]:
    """Return the names of values in which any line of any life differs, and the kinds of lines that are missing."""
    by_key = {line["key"]: line["values"] for line in expected}
    if len(by_key) != len(expected):
        return ["the undisturbed run has two lines with one key"]
    problems = []
    for line in found:
        key = line["key"]
        kind = key.split()[0]
        if key not in by_key:
            problems.append(f"{kind}: a line that the undisturbed run has not")
        else:
            problems += [f"{kind}: {name}" for name in _different(by_key[key], line["values"])]
    missing = by_key.keys() - {line["key"] for line in found}
    return problems + [f"{key.split()[0]}: a line is missing" for key in missing]


def _different(expected: Mapping[str, Any], found: Mapping[str, Any]) -> list[str]:
    names = expected.keys() | found.keys()
    return [
        name for name in names if name not in expected or name not in found or expected[name] != found[name]
    ]
