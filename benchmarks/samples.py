"""What was measured, and its summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """One value: of one figure, place, contender and round."""

    suite: str
    figure: str
    unit: str
    higher_is_better: bool
    place: str
    contender: str
    round: int
    value: float
    raw: list[float] = []


class Note(msgspec.Struct, frozen=True):
    """Something that was left out or failed, and why."""

    what: str
    why: str


class Cell(NamedTuple):
    """Which values belong together; ordered as measured."""

    suite: str
    place: str
    figure: str


class Summary(NamedTuple):
    """The values of one contender in a cell: five numbers, and how many values they came from."""

    unit: str
    higher_is_better: bool
    median: float
    low_quartile: float
    high_quartile: float
    least: float
    most: float
    number_of_values: int


Table = dict[Cell, dict[str, Summary]]
"""Cell → contender → summary, both in the order in which they were measured."""


def summarise(values: Sequence[float], unit: str, *, higher_is_better: bool = True) -> Summary:
    """Of at least one value; quartiles by linear interpolation between the values."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[0]
    if len(ordered) > 1:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    median = statistics.median(ordered)
    return Summary(unit, higher_is_better, median, low, high, ordered[0], ordered[-1], len(ordered))


def table(samples: Iterable[Sample]) -> Table:
    """All samples, summarised."""
    values: dict[Cell, dict[str, list[float]]] = {}
    figures: dict[Cell, Sample] = {}
    for sample in samples:
        cell = Cell(sample.suite, sample.place, sample.figure)
        figures[cell] = sample
        values.setdefault(cell, {}).setdefault(sample.contender, []).append(sample.value)
    return {
        cell: {
            contender: summarise(found, figures[cell].unit, higher_is_better=figures[cell].higher_is_better)
            for contender, found in row.items()
        }
        for cell, row in values.items()
    }


def ratio(row: dict[str, Summary], contender: str, against: str) -> float | None:
    """Of the medians; None when one was not measured."""
    one, other = row.get(contender), row.get(against)
    if one is None or other is None or other.median == 0:
        return None
    return one.median / other.median
