"""Geometry of the charts: numbers become coordinates in a box, which a template draws as SVG.

Guarantees: whatever the numbers are, every coordinate is finite and lies in its box; a larger number is never drawn below a smaller one; and
the number of points, ticks and rectangles is bounded. Numbers that are none make gaps.

References: M. Bruls, K. Huizing, J. van Wijk, "Squarified Treemaps" (2000); P. Heckbert, "Nice numbers for graph labels" (Graphics Gems, 1990).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

MAX_POINTS: Final = 1200
_MAX_TICKS: Final = 12

Point = tuple[int, float | None]
"""Step, and a number; None where it was none."""


class Axis(NamedTuple):
    """Numbers from low to high, drawn from start to end."""

    low: float
    high: float
    start: float
    end: float

    def at(self, value: float) -> float:
        """Return the coordinate of a number; of one outside, that of the nearest end."""
        # Halves: the difference of two finite numbers may be infinite.
        share = (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)
        return self.start + min(1.0, max(0.0, share)) * (self.end - self.start)

    def ticks(self, count: int = 6) -> list[float]:
        """Return round numbers on the axis, at most a dozen."""
        rough = (self.high / 2 - self.low / 2) / max(1, count) * 2
        if not math.isfinite(rough) or rough < 1e-300:
            return [self.low, self.high]
        magnitude = 10.0 ** math.floor(math.log10(rough))
        step = next((nice * magnitude for nice in (1, 2, 2.5, 5, 10) if nice * magnitude >= rough), rough)
        first, last = math.ceil(self.low / step), math.floor(self.high / step)
        if not 0 <= last - first < _MAX_TICKS:
            return [self.low, self.high]
        return [value for at in range(first, last + 1) if self.low <= (value := at * step) <= self.high]


def axis_of(values: Sequence[float], start: float, end: float) -> Axis:
    """Return an axis on which all finite numbers have room; a single one lies in the middle."""
    finite = [float(value) for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    # Where the two are too near for a difference, the axis is widened.
    if not high / 2 - low / 2 > max(abs(low), abs(high)) * 1e-12 + 1e-300:
        margin = max(abs(low), 1e-3) * 0.5
        low, high = max(low - margin, -1.7e308), min(high + margin, 1.7e308)
    return Axis(low, high, start, end)


def in_order(points: Sequence[Point]) -> list[Point]:
    """Return the points by step, of a step the last one: a training that was taken back writes steps again.

    A file without steps has them all at 0: its lines are counted.
    """
    if len(points) > 1 and not any(step for step, _ in points):
        return [(at, value) for at, (_, value) in enumerate(points)]
    return sorted(dict(points).items())


def thinned(points: Sequence[Point], most: int = MAX_POINTS) -> list[Point]:
    """Return at most so many points in order; of neighbours the least and the greatest, and those that are none."""
    if len(points) <= most:
        return list(points)
    size = math.ceil(len(points) / max(1, most // 3))
    found: list[Point] = []
    for begin in range(0, len(points), size):
        some = points[begin : begin + size]
        numbers = [(value, at) for at, (_, value) in enumerate(some) if value is not None]
        kept = {at for at, (_, value) in enumerate(some) if value is None}
        kept = {min(kept)} if kept else set()
        if numbers:
            kept |= {min(numbers)[1], max(numbers)[1]}
        found += [some[at] for at in sorted(kept)]
    return found


def lines(points: Sequence[Point], x: Axis, y: Axis) -> Iterator[str]:
    """Yield the coordinates of each unbroken line, as the attribute ``points`` of SVG has them."""
    line: list[str] = []
    for step, value in points:
        if value is None or not math.isfinite(value):
            if line:
                yield " ".join(line)
            line = []
        else:
            line.append(f"{x.at(step):.1f},{y.at(value):.1f}")
    if line:
        yield " ".join(line)


class Rectangle(NamedTuple):
    """Place of an item of a treemap."""

    left: float
    top: float
    width: float
    height: float


def treemap(sizes: Sequence[float], width: float, height: float) -> list[Rectangle]:
    """Return a rectangle for each size, in their order, whose areas are in proportion; together they fill the box.

    Args:
        sizes: Positive numbers, largest first.
        width: Width of the box.
        height: Its height.
    """
    found: list[Rectangle] = []
    left = top = 0.0
    largest = max(sizes, default=0.0) or 1.0
    # In parts of the largest, so that the sum is finite.
    rest = [size / largest for size in sizes]
    while rest:
        scale = (width - left) * (height - top) / sum(rest)
        is_wide = width - left >= height - top
        side = height - top if is_wide else width - left
        count, row = 1, rest[0]
        while count < len(rest) and _worst(rest[: count + 1], side, scale) <= _worst(
            rest[:count], side, scale
        ):
            row += rest[count]
            count += 1
        depth = row * scale / side if side > 0 else 0.0
        depth = min(depth, (width - left) if is_wide else (height - top))
        at = 0.0
        for size in rest[:count]:
            length = side * size / row
            found.append(
                Rectangle(left, top + at, depth, length)
                if is_wide
                else Rectangle(left + at, top, length, depth)
            )
            at += length
        left, top = (left + depth, top) if is_wide else (left, top + depth)
        rest = rest[count:]
    return found


def _worst(sizes: Sequence[float], side: float, scale: float) -> float:
    """Return the worst ratio of the sides in a row."""
    total = sum(sizes) * scale
    least, most = min(sizes) * scale, max(sizes) * scale
    if total <= 0 or least <= 0 or side <= 0:
        return math.inf
    return max(side * side * most / total / total, total * total / (side * side) / least)
