"""Rules of a training's snapshots: when one is due (``save_when``), and which are kept (``keep``).

    SnapshotManager(
        save_when=[Interval("1h"), AfterIf(900, changes=1000), OnImprovement("loss")],
        keep=[Latest(3), EverySteps(10_000), Best(2, "loss")],
    )

A rule of saving is asked at each boundary of two steps and only says that a snapshot is due. Any one of several rules is
enough, and every snapshot, for whatever reason it was taken, restarts the counts of all. A program's own rule is a subclass
of `Rule`.

Retention is a pure function of the rules and of what is known of the snapshots. Guarantees: a snapshot is kept if any rule
keeps it; the newest one and those that are held are always kept, and without a rule all are. Rules only add: one more rule,
or a larger number, never removes what is kept without it. A rule keeps what it would have kept if nothing had been removed
before: the first snapshot of each period, and of equally good ones the oldest, so that later snapshots displace none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar, Final, Literal, NamedTuple

import msgspec

from ciuic.training.arguments import count
from ciuic.units import parse_duration

Mode = Literal["min", "max"]
# Default of `Automatic.mtbf`.
_DAY_SECONDS: Final = 86400.0


class Moment(NamedTuple):
    """Boundary about which a rule is asked."""

    step: int
    """Optimizer steps of the run."""
    steps_since: int
    """Steps since the last snapshot was staged, or since the run began."""
    seconds_since: float
    """Time since the last snapshot was staged, or since the run began."""
    cost_seconds: float | None
    """Measured cost of a snapshot: the stall, and what steps lost while it was written.

    It is None before the first snapshot.
    """
    write_seconds: float
    """Time that the writer took for one."""


class Rule:
    """Decides when a snapshot is due; base class for the program's own rules."""

    alike: ClassVar[bool] = False
    """True if every rank of a run decides the same at the same step.

    A rule that looks at a clock does not.
    """

    def due(self, moment: Moment) -> bool:
        """Return whether a snapshot is due. Called at each boundary, so it should be fast."""
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Look at reported metrics, and on resume at those of earlier snapshots of the run."""

    def saved(self) -> None:
        """Restart counting: a snapshot was staged."""


@dataclass(frozen=True)
class Interval(Rule):
    """A snapshot each time so many seconds have passed since the last one.

    Args:
        seconds: Seconds, or text such as ``1h``.
    """

    seconds: float | str

    def __post_init__(self) -> None:
        # The dataclass is frozen; this replaces text such as "1h" by its seconds.
        object.__setattr__(self, "seconds", _seconds_of(self.seconds, "interval"))

    def due(self, moment: Moment) -> bool:
        """Return whether the time has passed."""
        return moment.seconds_since >= float(self.seconds)


@dataclass(frozen=True)
class Steps(Rule):
    """A snapshot each time so many optimizer steps were taken since the last one."""

    number: int
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", count(self.number, "the number of steps"))

    def due(self, moment: Moment) -> bool:
        """Return whether the steps were taken."""
        return moment.steps_since >= self.number


@dataclass(frozen=True)
class AfterIf(Rule):
    """A snapshot after so many seconds, if so many optimizer steps were taken meanwhile.

    Several such rules at once work as the ``save`` option of Redis does.

    Args:
        seconds: Seconds, or text such as ``15m``.
        changes: Optimizer steps.
    """

    seconds: float | str
    changes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", _seconds_of(self.seconds, "interval"))
        object.__setattr__(self, "changes", count(self.changes, "the number of changes"))

    def due(self, moment: Moment) -> bool:
        """Return whether the time has passed and the steps were taken."""
        return moment.seconds_since >= float(self.seconds) and moment.steps_since >= self.changes


@dataclass
class OnImprovement(Rule):
    """A snapshot when a metric given to `SnapshotManager.report` is better than ever before.

    Args:
        metric: Name of the metric.
        mode: ``min`` if smaller is better, ``max`` if larger is.
        least: Smallest improvement that counts.
    """

    metric: str
    mode: Mode = "min"
    least: float = 0.0
    best: float | None = field(default=None, compare=False)
    """Best value so far, earlier snapshots of the run included."""
    _due: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_mode(self.mode)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Remember the metric if it is the best so far; NaN never is."""
        # The program may report other metrics at other times, and a loss that diverges becomes NaN.
        value = metrics.get(self.metric)
        if value is None or math.isnan(value):
            return
        if self.best is None or _is_better(value, self.best, self.mode, self.least):
            self.best, self._due = value, True

    def due(self, moment: Moment) -> bool:
        """Return whether the metric has improved since the last snapshot."""
        return self._due

    def saved(self) -> None:
        """Wait for the next improvement."""
        self._due = False


@dataclass(frozen=True)
class Automatic(Rule):
    """A snapshot at the interval that loses the least time to saving and to repeating work after failures.

    With cost C of a snapshot that interval is sqrt(2 C mtbf). It is lengthened until saving takes no more
    than ``max_overhead`` of the time, and until the writer can keep up.

    Args:
        max_overhead: Largest share of the time that saving may take, between 0 and 1.
        mtbf: Mean time between failures: seconds, or text such as ``12h``.
        first_seconds: Time before the first snapshot, from which the cost is learnt.

    References:
        J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17 (1974).
        J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22
            (2006).
    """

    max_overhead: float = 0.01
    mtbf: float | str = _DAY_SECONDS
    first_seconds: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtbf", _seconds_of(self.mtbf, "the time between failures"))
        if not 0 < self.max_overhead < 1:
            raise ValueError(f"max_overhead must be a share between 0 and 1, got {self.max_overhead!r}")

    def interval_seconds(self, cost_seconds: float, write_seconds: float) -> float:
        """Return the time between two snapshots of this cost."""
        best = math.sqrt(2 * cost_seconds * float(self.mtbf))
        return max(best, cost_seconds / self.max_overhead, write_seconds)

    def due(self, moment: Moment) -> bool:
        """Return whether the interval has passed; never before the first step after a snapshot."""
        # Nothing was trained since the last snapshot.
        if not moment.steps_since:
            return False
        # The cost is unknown until there was a snapshot.
        if moment.cost_seconds is None:
            return moment.seconds_since >= self.first_seconds
        return moment.seconds_since >= self.interval_seconds(moment.cost_seconds, moment.write_seconds)


class SaveRules:
    """All rules of a manager."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        """Raise TypeError for what is no `Rule`."""
        self._rules = tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"save_when must be rules such as ciuic.training.Steps(500), got {rule!r}")

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def due(self, moment: Moment) -> str:
        """Return the text of the first rule that makes a snapshot due; empty if none does."""
        for rule in self._rules:
            if rule.due(moment):
                return repr(rule)
        return ""

    def due_alike(self, moment: Moment) -> str:
        """Return the same as `due`, from the rules alone that every rank decides alike at the same step."""
        return next((repr(rule) for rule in self._rules if rule.alike and rule.due(moment)), "")

    @property
    def all_alike(self) -> bool:
        """True if every rank of a run always decides the same."""
        return all(rule.alike for rule in self._rules)

    @property
    def look_at_metrics(self) -> bool:
        """True if any rule looks at metrics."""
        return any(type(rule).observe is not Rule.observe for rule in self._rules)

    def observe(self, metrics: Mapping[str, float]) -> None:
        """Show metrics to all rules."""
        for rule in self._rules:
            rule.observe(metrics)

    def saved(self) -> None:
        """Tell all rules that a snapshot was staged."""
        for rule in self._rules:
            rule.saved()


def rules_of(interval: float | str | None, every_steps: int | None, further: Iterable[Rule]) -> list[Rule]:
    """Return the rules for which the short options stand, and the further ones.

    Raises:
        ValueError: An option is out of its range.
    """
    short: list[Rule] = [] if interval is None else [Interval(interval)]
    if every_steps is not None:
        short.append(Steps(every_steps))
    return [*short, *further]


def _is_better(value: float, than: float, mode: Mode, least: float = 0.0) -> bool:
    """Return whether a metric is better than another by more than ``least``; NaN never is."""
    if math.isnan(value):
        return False
    return value < than - least if mode == "min" else value > than + least


def _check_mode(mode: str) -> None:
    """Raise ValueError unless the mode is ``min`` or ``max``."""
    if mode not in ("min", "max"):
        raise ValueError(f'mode must be "min" or "max", got {mode!r}')


def _seconds_of(value: float | str, what: str) -> float:
    """Return a duration in seconds.

    Args:
        value: Seconds, or text such as ``1h``.
        what: What errors call it.

    Raises:
        ValueError: The duration is not positive and finite, or the text is none.
    """
    seconds = float(parse_duration(value)) if isinstance(value, str) else float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f'{what} must be a positive duration such as "1h", got {value!r}')
    return seconds


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
        _check_mode(self.mode)


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
