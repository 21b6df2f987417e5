"""Decision at a boundary whether a snapshot is due: the rules of the program, agreed between ranks.

Guarantees: with several ranks the answer at one boundary is the same on all, and so is the step from which
the rules count. A rule that raises is logged and counts as "not due".
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ciuic.training.format.reading import metric_floats
from ciuic.training.policy.boundaries import NOTHING_TELLS, Boundaries
from ciuic.training.policy.policies import Moment, SaveRules
from ciuic.training.ranks.group import Vote
from ciuic.training.util.logs import quietly, warn_once
from ciuic.training.util.save_costs import SaveCosts


class SaveSchedule:
    """Rules of one manager, with the steps and the time since the last snapshot."""

    def __init__(self, rules: SaveRules, vote: Vote | None) -> None:
        """Begin to count at step 0, now."""
        self.rules = rules
        self.vote = vote
        """Agreement between ranks; None: this process decides alone."""
        self.reported: dict[str, float] = {}
        """Metrics for the next snapshot."""
        # The monotonic clock: one that is set back would delay snapshots.
        self._last_step, self._last_seconds = 0, time.monotonic()

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

    def due(self, step: int, costs: SaveCosts) -> str:
        """Return why a snapshot is due; empty if none is.

        With several ranks every rank asks at every boundary.

        Raises:
            RuntimeError: The other ranks are gone.
        """
        moment = Moment(
            step=step,
            steps_since=step - self._last_step,
            seconds_since=time.monotonic() - self._last_seconds,
            cost_seconds=costs.seconds,
            write_seconds=costs.write_seconds,
        )
        reason = ""
        # The rules may be the program's own, and raise anything.
        with quietly("the rules could not say whether a snapshot is due"):
            reason = self.rules.due(moment)
        if self.vote is None:
            return reason
        # What every rank decides alike needs no message. The rest is voted on, with the result of the vote
        # begun at the boundary before: a message that has to arrive now would let the training wait for it.
        alike = self.rules.due_alike(moment)
        wanted = self.vote(bool(reason), again=not (alike or self.rules.all_alike))
        return alike or ("a rank found it due" if wanted else "")
