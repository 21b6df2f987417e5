"""When snapshots are taken by themselves: small rules, several of them at once, asked at each boundary of two steps.

    SnapshotManager(save_when=[Interval("1h"), AfterIf(900, changes=1000), OnImprovement("loss")])

Guarantees: a rule only says that a snapshot is due. Any of them is enough, and every snapshot, whatever it was taken for, begins
their counting anew. Somebody's own rule is a subclass of `Rule`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final, Literal, NamedTuple

from ciuic.training.given import count
from ciuic.units import parse_duration

Mode = Literal["min", "max"]
_DAY_SECONDS: Final = 86400.0


class Moment(NamedTuple):
    """What a rule is asked about: a boundary."""

    step: int
    """Optimizer steps of the run."""
    steps_since: int
    """The last snapshot was staged, or the run began."""
    seconds_since: float
    cost_seconds: float | None
    """What a snapshot costs the training, as measured: the stall, and what steps lost while it was written. None before the first."""
    write_seconds: float
    """What the writer has taken for one."""


class Rule:
    """Says when a snapshot is due."""

    alike: ClassVar[bool] = False
    """Whether every rank of a run thinks the same at the same step: what looks at a clock does not."""

    def due(self, moment: Moment) -> bool:
        """Asked at each boundary, so it had better be quick."""
        raise NotImplementedError

    def observe(self, metrics: Mapping[str, float]) -> None:
        """What the program has reported, and what is known of earlier snapshots of the run when it is resumed."""

    def saved(self) -> None:
        """A snapshot was staged."""


@dataclass(frozen=True)
class Interval(Rule):
    """So long after the last one: seconds, or text like ``1h``."""

    seconds: float | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", seconds_of(self.seconds, "an interval"))

    def due(self, moment: Moment) -> bool:
        return moment.seconds_since >= float(self.seconds)


@dataclass(frozen=True)
class Steps(Rule):
    """So many optimizer steps after the last one."""

    number: int
    alike: ClassVar[bool] = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", count(self.number, "a number of steps"))

    def due(self, moment: Moment) -> bool:
        return moment.steps_since >= self.number


@dataclass(frozen=True)
class AfterIf(Rule):
    """So long after the last one, if there were so many optimizer steps since: several of them, as ``save`` of Redis."""

    seconds: float | str
    changes: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "seconds", seconds_of(self.seconds, "an interval"))
        object.__setattr__(self, "changes", count(self.changes, "a number of changes"))

    def due(self, moment: Moment) -> bool:
        return moment.seconds_since >= float(self.seconds) and moment.steps_since >= self.changes


@dataclass
class OnImprovement(Rule):
    """When a metric that `SnapshotManager.report` was given is better than ever before, by ``least`` at least."""

    metric: str
    mode: Mode = "min"
    least: float = 0.0
    best: float | None = field(default=None, compare=False)
    """So far, earlier snapshots of the run included."""
    _due: bool = field(default=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        check_mode(self.mode)

    def observe(self, metrics: Mapping[str, float]) -> None:
        value = metrics.get(self.metric)
        if value is None or math.isnan(value):
            return
        if self.best is None or is_better(value, self.best, self.mode, self.least):
            self.best, self._due = value, True

    def due(self, moment: Moment) -> bool:
        return self._due

    def saved(self) -> None:
        self._due = False


@dataclass(frozen=True)
class Automatic(Rule):
    """As often as is worth it, from what a snapshot costs and how often runs fail.

    With cost C and a mean time of ``mtbf`` between failures the least time is lost, to saving and to repeating what was not saved,
    with sqrt(2 C mtbf) between two snapshots: J. W. Young, A first order approximation to the optimum checkpoint interval, CACM 17
    (1974), and J. T. Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006). It is never so
    often that saving takes more than ``max_overhead`` of the time, nor that the writer cannot keep up. The first snapshot, from
    which the cost is learnt, is taken after ``first_seconds``.
    """

    max_overhead: float = 0.01
    mtbf: float | str = _DAY_SECONDS
    first_seconds: float = 60.0

    def __post_init__(self) -> None:
        object.__setattr__(self, "mtbf", seconds_of(self.mtbf, "a time between failures"))
        if not 0 < self.max_overhead < 1:
            raise ValueError("max_overhead is a share between 0 and 1")

    def interval_seconds(self, cost_seconds: float, write_seconds: float) -> float:
        """What is between two snapshots of this cost."""
        best = math.sqrt(2 * cost_seconds * float(self.mtbf))
        return max(best, cost_seconds / self.max_overhead, write_seconds)

    def due(self, moment: Moment) -> bool:
        if not moment.steps_since:
            return False
        if moment.cost_seconds is None:
            return moment.seconds_since >= self.first_seconds
        return moment.seconds_since >= self.interval_seconds(moment.cost_seconds, moment.write_seconds)


class Rules:
    """All rules of a manager."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = tuple(rules)
        for rule in self._rules:
            if not isinstance(rule, Rule):
                raise TypeError(f"{rule!r} is no rule of when to save")

    def __iter__(self) -> Iterator[Rule]:
        return iter(self._rules)

    def due(self, moment: Moment) -> str:
        """The first that says so, in words; empty if none does."""
        for rule in self._rules:
            if rule.due(moment):
                return repr(rule)
        return ""

    def due_alike(self, moment: Moment) -> str:
        """As `due`, by those rules alone of which every rank of a run thinks the same at the same step."""
        return next((repr(rule) for rule in self._rules if rule.alike and rule.due(moment)), "")

    @property
    def all_alike(self) -> bool:
        """Whether every rank of a run always thinks the same."""
        return all(rule.alike for rule in self._rules)

    @property
    def look_at_metrics(self) -> bool:
        """Whether any of them does."""
        return any(type(rule).observe is not Rule.observe for rule in self._rules)

    def observe(self, metrics: Mapping[str, float]) -> None:
        for rule in self._rules:
            rule.observe(metrics)

    def saved(self) -> None:
        for rule in self._rules:
            rule.saved()


def of(interval: float | str | None, every_steps: int | None, further: Iterable[Rule]) -> list[Rule]:
    """What the short forms stand for, and the rest. ValueError."""
    short: list[Rule] = [] if interval is None else [Interval(interval)]
    if every_steps is not None:
        short.append(Steps(every_steps))
    return [*short, *further]


def is_better(value: float, than: float, mode: Mode, least: float = 0.0) -> bool:
    """NaN is not."""
    if math.isnan(value):
        return False
    return value < than - least if mode == "min" else value > than + least


def check_mode(mode: str) -> None:
    """ValueError."""
    if mode not in ("min", "max"):
        raise ValueError(f"a metric is best at its min or its max, not {mode!r}")


def seconds_of(value: float | str, what: str) -> float:
    """Of a number or of text like ``1h``. ValueError."""
    seconds = float(parse_duration(value)) if isinstance(value, str) else float(value)
    if not 0 < seconds < math.inf:
        raise ValueError(f"{what} is a time above zero")
    return seconds
