"""Retention of a training's snapshots: a pure function of the rules and of what is known of the snapshots.

    SnapshotManager(keep=[Latest(3), EverySteps(10_000), Best(2, "loss")])

Guarantees: a snapshot is kept if any rule keeps it; the newest one and those that are held are always kept,
and without a rule all are. Rules only add: one more rule, or a larger number, never removes what is kept
without it. A rule keeps what it would have kept if nothing had been removed before: the first snapshot of
each period, and of equally good ones the oldest, so that later snapshots displace none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import msgspec

from ciuic.training.policy.save_rules import Mode, check_mode

NS_PER_SECOND = 10**9


class Latest(msgspec.Struct, tag=True, frozen=True):
    """Keep the newest snapshots.

    Args:
        number: How many.
    """

    number: int

    def __post_init__(self) -> None:
        _check(self.number, "the number of snapshots")


class EverySteps(msgspec.Struct, tag=True, frozen=True):
    """Keep the first snapshot of each period of so many optimizer steps, for each run.

    Args:
        number: Steps of a period.
    """

    number: int

    def __post_init__(self) -> None:
        _check(self.number, "the number of steps")


class EverySeconds(msgspec.Struct, tag=True, frozen=True):
    """Keep the first snapshot of each period of so many seconds.

    Args:
        seconds: Length of a period, at least 1.
    """

    seconds: float

    def __post_init__(self) -> None:
        if not 1 <= self.seconds < math.inf:
            raise ValueError(f"EverySeconds must be at least one second, got {self.seconds!r}")


class Best(msgspec.Struct, tag=True, frozen=True):
    """Keep the snapshots whose metric is best; those without the metric do not count.

    Args:
        number: How many.
        metric: Name of the metric.
        mode: ``min`` if smaller is better, ``max`` if larger is.
    """

    number: int
    metric: str
    mode: Mode = "min"

    def __post_init__(self) -> None:
        _check(self.number, "the number of snapshots")
        check_mode(self.mode)


class Held(msgspec.Struct, tag=True, frozen=True):
    """Keep held snapshots and the newest, and no others.

    Held snapshots are kept under every other rule too.
    """


Keep = Latest | EverySteps | EverySeconds | Best | Held


class RetentionCandidate(NamedTuple):
    """Facts about a snapshot that rules look at."""

    id: str
    time_ns: int
    held: bool = False
    run: str = ""
    step: int | None = None
    """Optimizer steps; None: unknown."""
    metrics: Mapping[str, float] = MappingProxyType({})


def needs_facts(rules: Iterable[Keep]) -> bool:
    """Return whether any rule looks at steps or metrics, which are stored in the snapshots themselves."""
    return any(isinstance(rule, (EverySteps, Best)) for rule in rules)


def kept(snapshots: Sequence[RetentionCandidate], rules: Sequence[Keep]) -> dict[str, list[str]]:
    """Return the ids of the snapshots to keep, each with the reasons.

    The order of ``snapshots`` does not matter.
    """
    # By time and id, so that snapshots of the same instant have an order that does not change from one call
    # to the next.
    oldest_first = sorted(snapshots, key=lambda one: (one.time_ns, one.id))
    if not rules:
        return {one.id: ["all stay"] for one in oldest_first}
    why: dict[str, list[str]] = {}
    for one in oldest_first:
        if one.held:
            why.setdefault(one.id, []).append("held")
    # The newest stays in any case: a resume needs one.
    if oldest_first:
        why.setdefault(oldest_first[-1].id, []).append("newest")
    for rule in rules:
        for one in _kept_by(rule, oldest_first):
            why.setdefault(one.id, []).append(repr(rule))
    return why


def _kept_by(rule: Keep, oldest_first: Sequence[RetentionCandidate]) -> Sequence[RetentionCandidate]:
    if isinstance(rule, Latest):
        return oldest_first[-rule.number :]
    # Steps of another run are counted apart: two runs may share a repository and a name one after the other.
    if isinstance(rule, EverySteps):
        return _first_of_each(
            (one, (one.run, one.step // rule.number)) for one in oldest_first if one.step is not None
        )
    if isinstance(rule, EverySeconds):
        # Periods since the epoch, not since the oldest snapshot: they stay when snapshots are removed.
        every_ns = int(rule.seconds * NS_PER_SECOND)
        return _first_of_each((one, one.time_ns // every_ns) for one in oldest_first)
    if isinstance(rule, Best):
        return best_of(rule, oldest_first)
    return []


def _first_of_each(found: Iterable[tuple[RetentionCandidate, object]]) -> list[RetentionCandidate]:
    """Return the first snapshot of each period."""
    first: dict[object, RetentionCandidate] = {}
    for one, period in found:
        first.setdefault(period, one)
    return list(first.values())


def best_of(rule: Best, oldest_first: Sequence[RetentionCandidate]) -> list[RetentionCandidate]:
    """Return the snapshots that a rule keeps, the best first."""
    sign = 1.0 if rule.mode == "min" else -1.0
    # A snapshot without the metric, or with NaN or an infinity, is no candidate.
    with_it = [one for one in oldest_first if math.isfinite(one.metrics.get(rule.metric, math.nan))]
    # The sort is stable: of equally good snapshots the oldest is kept.
    return sorted(with_it, key=lambda one: sign * one.metrics[rule.metric])[: rule.number]


def _check(number: int, what: str) -> None:
    if number < 1:
        raise ValueError(f"{what} must be at least 1, got {number!r}")
