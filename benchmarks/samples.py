"""Measured values and their summary."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import msgspec


class Sample(msgspec.Struct, frozen=True):
    """Value of one figure, place, contender and round."""

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
    """Note of something that was left out or failed, with the reason."""

    what: str
    why: str


class Cell(NamedTuple):
    """Key of values that belong together; ordered as measured."""

    suite: str
    place: str
    figure: str


class Summary(NamedTuple):
    """Summary of the values of one contender in a cell: five numbers, and the number of values."""

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
    """Summarise at least one value; quartiles by linear interpolation between the values."""
    ordered = sorted(values)
    low, high = ordered[0], ordered[0]
    if len(ordered) > 1:
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
    median = statistics.median(ordered)
    return Summary(unit, higher_is_better, median, low, high, ordered[0], ordered[-1], len(ordered))


def table(samples: Iterable[Sample]) -> Table:
    """Summarise all samples."""
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
    """Return the ratio of the medians; None if one was not measured."""
    summary, reference = row.get(contender), row.get(against)
    if summary is None or reference is None or reference.median == 0:
        return None
    return summary.median / reference.median
