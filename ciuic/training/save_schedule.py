"""Decision at a boundary whether a snapshot is due: the rules of the program, agreed between ranks, and the costs of saving.

Guarantees: with several ranks the answer at one boundary is the same on all, and so is the step from which
the rules count. A rule that raises is logged and counts as "not due".

A snapshot costs the stall of the training, and then what steps lose while the writer works beside them: the
median time between two boundaries while something is being written, compared with the median while nothing
is. Medians, because an evaluation between two boundaries is no step.

The costs are forecast at the first boundary, when the size of the state is known (`Forecast`). The writer has measured at its
start how fast the repository takes data, by some megabytes in a file without a name; the first real snapshot tells it better.
What will not fit, or not in time, is reported then and not on the day on which it fails.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

from ciuic.repository import Repository
from ciuic.training.format.reading import metric_floats
from ciuic.training.free_resources import memory_left
from ciuic.training.logs import quietly, warn_once
from ciuic.training.ranks import Vote
from ciuic.training.rules import AfterIf, Interval, Keep, Latest, Moment, Rule, SaveRules
from ciuic.training.state.boundaries import NOTHING_TELLS, Boundaries
from ciuic.units import human_size, plural


class SaveSchedule:
    """Rules of one manager, with the steps and the time since the last snapshot."""

    def __init__(self, rules: SaveRules, vote: Vote | None) -> None:
        """Begin to count at step 0, now.

        Args:
            rules: Rules of the program.
            vote: As for `decide_by`.
        """
        self.rules = rules
        self._vote = vote
        self.reported: dict[str, float] = {}
        """Metrics for the next snapshot."""
        # The monotonic clock: one that is set back would delay snapshots.
        self._last_step, self._last_seconds = 0, time.monotonic()

    @property
    def decides_alone(self) -> bool:
        """True if this process decides without other ranks."""
        return self._vote is None

    def decide_by(self, vote: Vote | None) -> None:
        """Agree with other ranks by this vote from now on; None: decide alone."""
        self._vote = vote

    def begin_at(self, step: int) -> None:
        """Count steps and time from here on."""
        self._last_step, self._last_seconds = step, time.monotonic()

    def taken(self, step: int | None) -> None:
        """Record that a snapshot was taken.

        Args:
            step: Step to count from; None: the other ranks count from an earlier one.
        """
        if step is not None:
            self.begin_at(step)
        self.reported = {}
        self.rules.saved()

    def report(self, metrics: Mapping[str, float]) -> None:
        """Add metrics to the next snapshot, and show them to the rules."""
        self.reported |= metric_floats(metrics)
        self.rules.observe(self.reported)

    def warn_without_boundaries(self, boundaries: Boundaries) -> None:
        """Warn once if there are rules to be asked at boundaries, and none ever comes."""
        if boundaries.lacking and any(True for _ in self.rules):
            warn_once(NOTHING_TELLS)

    def may_be_due(self, step: int, costs: SaveCosts) -> bool:
        """Return whether a snapshot may be due at the boundary of this step, without asking another rank."""
        with suppress(Exception):  # `due` logs it
            return self._vote is not None or bool(self.rules.due(self._moment(step, costs)))
        return False

    def _moment(self, step: int, costs: SaveCosts) -> Moment:
        return Moment(
            step=step,
            steps_since=step - self._last_step,
            seconds_since=time.monotonic() - self._last_seconds,
            cost_seconds=costs.seconds,
            write_seconds=costs.write_seconds,
        )

    def due(self, step: int, costs: SaveCosts) -> str:
        """Return why a snapshot is due; empty if none is.

        With several ranks every rank asks at every boundary.

        Raises:
            RuntimeError: The other ranks are gone.
        """
        moment = self._moment(step, costs)
        reason = ""
        # The rules may be the program's own, and raise anything.
        with quietly("the rules could not say whether a snapshot is due"):
            reason = self.rules.due(moment)
        if self._vote is None:
            return reason
        # What every rank decides alike needs no message. The rest is voted on, with the result of the vote
        # begun at the boundary before: a message that has to arrive now would let the training wait for it.
        alike = self.rules.due_alike(moment)
        wanted = self._vote(bool(reason), again=not (alike or self.rules.all_alike))
        return alike or ("a rank found it due" if wanted else "")


_SAVES: Final = 5
_STEPS: Final = 64
# Steps of each kind before their medians are compared.
_MIN_STEPS: Final = 8


class SaveCosts:
    """Durations of the newest saves and steps."""

    def __init__(self) -> None:
        """Begin without any measurement."""
        # The first stall includes allocating the memory, so it counts only until there are others.
        self._first_stall: float | None = None
        self._stalls: deque[float] = deque(maxlen=_SAVES)
        self._writes: deque[tuple[int, float]] = deque(maxlen=_SAVES)
        self._steps: dict[bool, deque[float]] = {False: deque(maxlen=_STEPS), True: deque(maxlen=_STEPS)}
        self._last: float | None = None
        self.measured_bytes_per_second = 0.0
        """Write speed that the writer measured at its start, before there was a snapshot; 0: unknown."""

    def stalled(self, seconds: float) -> None:
        """Record the stall of one save."""
        if self._first_stall is None:
            self._first_stall = seconds
        else:
            self._stalls.append(seconds)
        # The time until the next boundary includes the stall, so it is not counted as a step.
        self._last = None

    def wrote(self, size_bytes: int, seconds: float) -> None:
        """Record that a snapshot of this size was durable so many seconds after it was staged."""
        self._writes.append((size_bytes, seconds))

    def boundary(self, now: float, *, writing: bool) -> None:
        """Record a boundary at this monotonic time.

        Args:
            now: Monotonic clock.
            writing: Whether the writer works on a snapshot.
        """
        if self._last is not None:
            self._steps[writing].append(now - self._last)
        self._last = now

    @property
    def write_seconds(self) -> float:
        """Median time for which the newest snapshots were written; 0 before the first."""
        return median(seconds for _, seconds in self._writes) if self._writes else 0.0

    @property
    def slowdown(self) -> float:
        """Share of their speed that steps lose while a snapshot is written, 0 to 1."""
        quiet, busy = self._steps[False], self._steps[True]
        if min(len(quiet), len(busy)) < _MIN_STEPS:
            return 0.0
        return max(0.0, 1.0 - median(quiet) / max(median(busy), 1e-9))

    @property
    def seconds(self) -> float | None:
        """Cost of one snapshot for the training; None before the first."""
        if self._first_stall is None:
            return None
        return median(self._stalls or [self._first_stall]) + self.slowdown * self.write_seconds

    def write_estimate_seconds(self, size_bytes: int) -> float | None:
        """Return an upper estimate of the time until a snapshot of this size is durable.

        The result is None if nothing was measured.

        It scales the slowest of the newest snapshots.
        """
        if self._writes:
            # Scaled up for a state that has grown, never down: part of the time does not depend on the size.
            return max(seconds * max(1.0, size_bytes / max(1, size)) for size, seconds in self._writes)
        if self.measured_bytes_per_second:
            return size_bytes / self.measured_bytes_per_second
        return None


_TRIED_BYTES: Final = 8 << 20
_UNNAMED_FILE_MODE: Final = 0o600


class Forecast(NamedTuple):
    """Expected cost of a snapshot."""

    size_bytes: int
    """Size of the uncompressed state, as far as it is stored in this directory, by however many ranks: what a snapshot
    takes of which nothing was stored before."""
    write_seconds: float | None
    """Estimated time until a snapshot is durable, also the last one before preemption. None: unknown."""
    free_bytes: int
    """Free space on the file system of the repository."""
    warnings: tuple[str, ...]
    """One sentence for each thing that will not fit, or not in time."""


def forecast(
    size_bytes: int,
    *,
    free_bytes: int,
    write_seconds: float | None,
    at_most: int | None = None,
    stored: int = 0,
    shortest_interval_seconds: float | None = None,
    grace_seconds: float | None = None,
    copy_bytes: int | None = None,
    memory_bytes: int | None = None,
) -> Forecast:
    """Compute a forecast.

    Args:
        size_bytes: Size of the state.
        free_bytes: Free space on the file system of the repository.
        write_seconds: Time until a snapshot is durable; None: unknown.
        at_most: Number of snapshots that the rules keep; None: all.
        stored: Number of them that exist already.
        shortest_interval_seconds: Shortest time between two snapshots that a rule asks for.
        grace_seconds: Time between a signal and the end of the process.
        copy_bytes: Size of this process's copy of its state; None: all of it.
        memory_bytes: Memory that is left for the copy.
    """
    said = []
    size, free = human_size(size_bytes), human_size(free_bytes)
    # One more than are kept: the oldest is removed only after the newest is durable.
    to_come = 1 if at_most is None else max(1, at_most + 1 - stored)
    if size_bytes > free_bytes:
        said.append(f"a snapshot of {size} does not fit: {free} are free")
    elif to_come * size_bytes > free_bytes:
        said.append(
            f"{plural(to_come, 'snapshot')} of {size} each may not fit if all of the state changes between them: "
            f"{free} are free"
        )
    if write_seconds is not None:
        takes = f"a snapshot of {size} takes about {write_seconds:.0f} s to be durable"
        if grace_seconds is not None and write_seconds > grace_seconds:
            said.append(
                f"{takes}, and {grace_seconds:.0f} s are left after a signal: there will be no last snapshot"
            )
        if shortest_interval_seconds is not None and write_seconds > shortest_interval_seconds:
            said.append(
                f"{takes}, and one is due every {shortest_interval_seconds:.0f} s: some will be skipped"
            )
    copy_bytes = size_bytes if copy_bytes is None else copy_bytes
    if memory_bytes is not None and copy_bytes > memory_bytes:
        said.append(
            f"the copy of {human_size(copy_bytes)} does not fit into memory: {human_size(memory_bytes)} are left"
        )
    return Forecast(size_bytes, write_seconds, free_bytes, tuple(said))


def forecast_for(
    save_dir: Path,
    root: bytes,
    size_bytes: int,
    *,
    copy_bytes: int,
    write_seconds: float | None,
    rules: Iterable[Rule],
    keeps: Iterable[Keep],
    grace_seconds: float | None,
) -> Forecast:
    """Compute the forecast for snapshots of ``root`` in the repository as it is now.

    Raises:
        CiuicError: The repository cannot be opened.
        OSError: The same, as the file system says it.
    """
    # `f_bavail`, not `f_bfree`: blocks that are reserved for root are not ours.
    space = os.statvfs(save_dir)
    with Repository.open(save_dir) as repository:
        stored = len(repository.snapshots.list(root=root))
    return forecast(
        size_bytes,
        free_bytes=space.f_bavail * space.f_frsize,
        write_seconds=write_seconds,
        # The largest of several: rules only add to what is kept.
        at_most=max((rule.number for rule in keeps if isinstance(rule, Latest)), default=None),
        stored=stored,
        shortest_interval_seconds=min(
            (float(rule.seconds) for rule in rules if isinstance(rule, (Interval, AfterIf))),
            default=None,
        ),
        grace_seconds=grace_seconds,
        copy_bytes=copy_bytes,
        memory_bytes=memory_left(),
    )


def measure(directory: str) -> float:
    """Return how many bytes per second become durable in a directory; 0 if that cannot be tried.

    Nothing is left behind, even if the process is killed: the file has no name.
    """
    # Random: a file system that compresses would take zeros in no time.
    content = memoryview(os.urandom(_TRIED_BYTES))
    # Not every file system has O_TMPFILE, and not every Python knows it.
    with suppress(OSError, AttributeError):
        fd = os.open(directory, os.O_TMPFILE | os.O_WRONLY, _UNNAMED_FILE_MODE)
        try:
            began = time.monotonic()
            while content:
                content = content[os.write(fd, content) :]
            # What counts is durable data, not what the page cache takes.
            os.fsync(fd)
            return _TRIED_BYTES / max(1e-6, time.monotonic() - began)
        finally:
            os.close(fd)
    return 0.0
