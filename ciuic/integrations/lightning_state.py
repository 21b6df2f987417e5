"""States of a Lightning Trainer as objects that a manager saves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ciuic.integrations.lightning_results import ContinuedResults, results_state
from ciuic.training.convert.export_state import LOOPS
from ciuic.training.state import rank_state

RESULTS: Final = "results"
"""Key of what was logged, in the state of `RankLocalState`."""


class TrainerCheckpoint:
    """Checkpoint of the Trainer as an object that a manager saves.

    The loops are left out: they hold each rank's position.
    """

    # Weights, moments and schedules are the same under DistributedDataParallel; `RankLocalState` has what is
    # not.
    alike_on_ranks = True

    def __init__(self) -> None:
        self.given: dict[str, Any] | None = None
        """Checkpoint that the Trainer passed for the save in progress."""
        self._dump: Callable[[], dict[str, Any]] = dict
        self._dumped: dict[str, Any] | None = None

    def attach(self, dump: Callable[[], dict[str, Any]]) -> None:
        """Set the function that makes the Trainer dump a checkpoint."""
        self._dump = dump

    def whole(self) -> dict[str, Any]:
        """Return the checkpoint; it is dumped once per save, because the hooks for that may be collective."""
        if self.given is not None:
            return self.given
        if self._dumped is None:
            self._dumped = self._dump()
        return self._dumped

    def forget(self) -> None:
        """Drop the checkpoint after a save."""
        self.given = self._dumped = None

    def __getstate__(self) -> dict[str, Any]:
        """Return an object that is attached to no Trainer: programs pickle and copy Trainers."""
        return {"given": None, "_dump": dict, "_dumped": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the checkpoint without the loops."""
        return {key: value for key, value in self.whole().items() if key != LOOPS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to load: the Trainer loads by itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("resume with trainer.fit(ckpt_path=…)")


class RankLocalState:
    """State that differs between processes.

    That is the place in the data, what was logged in the epoch, and the buffers that DistributedDataParallel
    may leave different.
    """

    def __init__(self, checkpoint: TrainerCheckpoint) -> None:
        self._checkpoint = checkpoint
        self.model: Any = None
        """Model, if there are several processes."""
        self.trainer: Any = None
        """Trainer that fits, while it does."""
        self.continued = ContinuedResults({})
        """Values that were logged before the resume and that the Trainer has not got back yet."""

    def __getstate__(self) -> dict[str, Any]:
        """Return an object that is attached to no Trainer: programs pickle and copy Trainers."""
        return {**vars(self), "trainer": None}

    def state_dict(self) -> dict[str, Any]:
        """Return the loops, what was logged, and the small buffers."""
        buffers = {} if self.model is None else rank_state.small_buffers(self.model)
        logged = {} if self.trainer is None else results_state(self.trainer, self.continued.pending)
        return {LOOPS: self._checkpoint.whole().get(LOOPS, {}), "buffers": buffers, RESULTS: logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to load: the Trainer loads by itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("resume with trainer.fit(ckpt_path=…)")
