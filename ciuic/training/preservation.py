"""Which snapshots of a training stay: a pure function of what is known of them and of the rules.

    SnapshotManager(keep=[Latest(3), EverySteps(10_000), Best(2, "loss")])

Guarantees: a snapshot stays if any rule keeps it; the newest one and those that are held always stay, and without a rule all do. Rules
only add: one more, or a larger number, never removes what stayed without it. And what a rule keeps it would have kept if nothing had
been removed before: the first of each stretch, and of equal ones the oldest, so that those that come later take no one's place.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ciuic.training.policies import Mode, check_mode, is_better

NS_PER_SECOND = 10**9


class Latest(msgspec.Struct, tag=True, frozen=True):
    """So many of the newest."""

    number: int

    def __post_init__(self) -> None:
        _check(self.number, "a number of snapshots")


class EverySteps(msgspec.Struct, tag=True, frozen=True):
    """The first of each so many optimizer steps, of each run."""

    number: int

    def __post_init__(self) -> None:
        _check(self.number, "a number of steps")


class EverySeconds(msgspec.Struct, tag=True, frozen=True):
    """The first of each so many seconds."""

    seconds: float

    def __post_init__(self) -> None:
        if not 1 <= self.seconds < math.inf:
            raise ValueError("a time between snapshots is a second or more")


class Best(msgspec.Struct, tag=True, frozen=True):
    """So many of those whose metric is the best; those without it do not count."""

    number: int
    metric: str
    mode: Mode = "min"

    def __post_init__(self) -> None:
        _check(self.number, "a number of snapshots")
        check_mode(self.mode)


class Held(msgspec.Struct, tag=True, frozen=True):
    """Those that are held, and no others but the newest. They stay under every other rule as well."""


Keep = Latest | EverySteps | EverySeconds | Best | Held


class Known(NamedTuple):
    """What rules look at."""

    id: str
    time_ns: int
    held: bool = False
    run: str = ""
    step: int | None = None
    """None: not known."""
    metrics: Mapping[str, float] = MappingProxyType({})


def needs_facts(rules: Iterable[Keep]) -> bool:
    """Whether any rule looks at steps or metrics, which stand in the snapshots themselves."""
    return any(isinstance(rule, (EverySteps, Best)) for rule in rules)


def kept(snapshots: Sequence[Known], rules: Sequence[Keep]) -> dict[str, list[str]]:
    """The ids of those that stay, each with why. The order of ``snapshots`` is no matter."""
    oldest_first = sorted(snapshots, key=lambda one: (one.time_ns, one.id))
    if not rules:
        return {one.id: ["all stay"] for one in oldest_first}
    why: dict[str, list[str]] = {}
    for one in oldest_first:
        if one.held:
            why.setdefault(one.id, []).append("held")
    if oldest_first:
        why.setdefault(oldest_first[-1].id, []).append("newest")
    for rule in rules:
        for one in _kept_by(rule, oldest_first):
            why.setdefault(one.id, []).append(repr(rule))
    return why


def _kept_by(rule: Keep, oldest_first: Sequence[Known]) -> Sequence[Known]:
    if isinstance(rule, Latest):
        return oldest_first[-rule.number :]
    if isinstance(rule, EverySteps):
        return _firsts(
            (one, (one.run, one.step // rule.number)) for one in oldest_first if one.step is not None
        )
    if isinstance(rule, EverySeconds):
        every_ns = int(rule.seconds * NS_PER_SECOND)
        return _firsts((one, one.time_ns // every_ns) for one in oldest_first)
    if isinstance(rule, Best):
        return _best(rule, oldest_first)
    return []


def _firsts(found: Iterable[tuple[Known, object]]) -> list[Known]:
    """The first of each stretch."""
    first: dict[object, Known] = {}
    for one, stretch in found:
        first.setdefault(stretch, one)
    return list(first.values())


def _best(rule: Best, oldest_first: Sequence[Known]) -> list[Known]:
    sign = 1.0 if rule.mode == "min" else -1.0
    with_it = [
        one
        for one in oldest_first
        if is_better(one.metrics.get(rule.metric, math.nan), math.inf * sign, rule.mode)
    ]
    # A stable sort: of equal ones the oldest.
    return sorted(with_it, key=lambda one: sign * one.metrics[rule.metric])[: rule.number]


def _check(number: int, what: str) -> None:
    if number < 1:
        raise ValueError(f"{what} is from 1 on")
