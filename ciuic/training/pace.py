"""Whether a snapshot is due at a boundary: what the rules say, of which they count from the last one, agreed between ranks.

Guarantees: on several ranks the answer at one boundary is the same on all, and so is the step from which they count. A rule that raises
is logged and says no.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from ciuic.training.boundaries import NOTHING_TELLS, Boundaries
from ciuic.training.costs import Costs
from ciuic.training.description import floats
from ciuic.training.logs import quietly, warn_once
from ciuic.training.policies import Moment, Rules
from ciuic.training.ranks import Vote


class Pace:
    def __init__(self, rules: Rules, vote: Vote | None) -> None:
        self.rules = rules
        self.vote = vote
        """Between ranks; None where this process decides alone."""
        self.reported: dict[str, float] = {}
        """Metrics for the next snapshot."""
        self._last_step, self._last_seconds = 0, time.monotonic()

    def begin_at(self, step: int) -> None:
        """From here on time and steps are counted."""
        self._last_step, self._last_seconds = step, time.monotonic()

    def taken(self, step: int | None) -> None:
        """A snapshot was taken; None: one from which nothing is counted."""
        if step is not None:
            self.begin_at(step)
        self.reported = {}
        self.rules.saved()

    def report(self, metrics: Mapping[str, float]) -> None:
        self.reported |= floats(metrics)
        self.rules.observe(self.reported)

    def listens(self, boundaries: Boundaries) -> None:
        """Says so where rules would be asked at boundaries, and none ever comes."""
        if boundaries.lacking and any(True for _ in self.rules):
            warn_once(NOTHING_TELLS)

    def due(self, step: int, costs: Costs) -> str:
        """Why, or "". RuntimeError when the other ranks are gone."""
        moment = Moment(
            step=step,
            steps_since=step - self._last_step,
            seconds_since=time.monotonic() - self._last_seconds,
            cost_seconds=costs.seconds,
            write_seconds=costs.write_seconds,
        )
        reason = ""
        with quietly("the rules could not say whether a snapshot is due"):  # they may be the program's own
            reason = self.rules.due(moment)
        if self.vote is None:
            return reason
        alike = self.rules.due_alike(moment)
        wanted = self.vote(bool(reason), again=not (alike or self.rules.all_alike))
        return alike or ("a rank found it due" if wanted else "")
