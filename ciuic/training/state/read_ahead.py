"""Count of batches that were fetched and not trained with yet.

A prefetcher fetches a batch before it trains with the one before, so that the position of a loader is not that of
the training. The batches that a pass fetches before any gradient is added, and before any step, are read ahead; so
many are ahead until the pass ends, and each step after its end trains with some of them. Where the gradients are
out of sight (no optimizer of torch's) the steps alone are counted, and where those cannot tell, or the batches
are fetched by another thread, the position is not sure: that is logged, and again at a resume. A program that tells
(`consumed`) is believed.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from ciuic.training.state.gradients import Gradients
from ciuic.training.util.logs import warn_once

NOT_SURE: Final = (
    "a resume would not be exact: the program seems to fetch batches before it trains with the one before, and how many "
    "cannot be known here: call manager.consumed() for each batch that it takes from its prefetcher"
)
_AHEAD: Final = (
    "the program fetches %d batch(es) before it trains with the first: they count as read ahead, and come again after a "
    "resume. If it has left them out instead, call manager.consumed() for each batch that it has done with"
)


class ReadAhead:
    """Batches of the current pass that were fetched and not trained with."""

    def __init__(self, gradients: Gradients | None = None) -> None:
        """Begin before the first pass.

        Args:
            gradients: Those of the training; None: the program does not train with the loader's manager.
        """
        self._gradients = gradients or Gradients()
        self._home = threading.get_ident()
        """Thread that has registered the loader."""
        self._steps_in: int | None = None
        """Thread of the last step."""
        self._is_told = False
        self._is_doubtful = False
        """The position has been found unsure."""
        self.begun()
        self._mark: dict[int, tuple[Any, int]] = {}

    def begun(self) -> None:
        """Begin or continue a pass."""
        self._fetched = 0
        self._consumed = 0
        self._ahead = 0
        self._is_leading = True
        """The program has not trained in this pass yet."""
        self._is_exhausted = False
        self._steps_after_end = 0
        self._at_steps: list[int] = []
        """Numbers of batches fetched at the first two steps."""
        self._trained = False

    def asked(self) -> None:
        """Look at what has happened since the fetch before."""
        if self._is_leading and self._fetched and not self._is_exhausted:
            if self._trained or self._gradients.were_added(self._mark):
                self._is_leading = False
            elif self._gradients.are_known:
                self._ahead += 1
        if self._is_leading:
            self._mark = self._gradients.mark()
        self._trained = False

    def fetched(self) -> None:
        """Count a batch."""
        self._fetched += 1

    def exhausted(self) -> None:
        """Note that there was no further batch."""
        self._is_exhausted = True

    def trained(self) -> None:
        """Note that the batches fetched before are trained with, with or without a step."""
        self._trained = True

    def stepped(self) -> None:
        """Count a step of the run."""
        self.trained()
        self._steps_in = threading.get_ident()
        self._steps_after_end += self._is_exhausted
        if len(self._at_steps) < 2:
            self._at_steps.append(self._fetched)
        if self._is_told or not self._fetched:
            return
        if self._ahead:
            warn_once(_AHEAD % self._ahead)
        # Where gradients are seen, this is a step with what was accumulated of the last batches.
        if not self._gradients.are_known and (self._is_exhausted or self._ahead_by_steps() > 0):
            self._doubt()

    def consumed(self, batches: int) -> None:
        """Believe the program, which has trained with so many more batches of the pass or is about to."""
        self._is_told = True
        self._consumed += batches

    def is_foreign(self) -> bool:
        """Return whether batches are fetched by another thread than the one that trains; then none of its fetches is a boundary."""
        here = threading.get_ident()
        # Not the thread of steps alone: an optimizer may step within the backward pass, in a thread of autograd.
        if self._steps_in is None or here in (self._steps_in, self._home):
            return False
        self._doubt()
        return True

    @property
    def is_sure(self) -> bool:
        """True if the position is that of the training."""
        if self._is_told:
            return True
        # Two batches before the first step: accumulated, or one read ahead?
        first = not self._gradients.are_known and len(self._at_steps) == 1 and self._at_steps[0] > 1
        return not self._is_doubtful and not first

    @property
    def remaining(self) -> int:
        """Number of batches that were fetched and not trained with."""
        if self._is_told:
            return max(0, self._fetched - self._consumed)
        per_step = self._at_steps[1] - self._at_steps[0] if len(self._at_steps) == 2 else 1
        return max(0, min(self._fetched, self._ahead) - self._steps_after_end * max(1, per_step))

    def _ahead_by_steps(self) -> int:
        """Return by how many batches the first step came later than the second."""
        return 2 * self._at_steps[0] - self._at_steps[1] if len(self._at_steps) == 2 else 0

    def _doubt(self) -> None:
        self._is_doubtful = True
        if not self._is_told:
            warn_once(NOT_SURE)
