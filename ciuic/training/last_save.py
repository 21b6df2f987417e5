"""What a manager does for the last snapshot before preemption: when it may be staged, of which state, and how long it will take.

At a boundary the state is saved as at any other. Elsewhere it may be staged only where nothing changes that is saved: within an
evaluation, or between two passes over the data of which a loader tells. There generators and position are put back to what they were at
the last boundary: the resumed run goes on from that one, and evaluates again.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ciuic.training import randomness
from ciuic.training.evaluation import Glimpse, evaluating
from ciuic.training.positions import Position
from ciuic.training.preemption import BeforePreemption, Watch

if TYPE_CHECKING:
    from ciuic.training.manager import SnapshotManager

_LEAST_SECONDS: Final = 0.5


class Remembered(NamedTuple):
    """Of the last boundary, what an evaluation changes."""

    random: dict[str, Any]
    positions: dict[str, Any]
    epoch: int | None


class Guard:
    """While it is entered, signals only leave word; ``left`` is called when it is not any more."""

    def __init__(self) -> None:
        self.depth = 0
        self.left: Callable[[], None] = lambda: None

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        self.depth -= 1
        if not self.depth and error is None:
            self.left()


class LastSave:
    """One for a manager. The host of a `Watch`."""

    def __init__(self, manager: SnapshotManager, rule: BeforePreemption) -> None:
        self._manager = manager
        self._rule = rule
        self._remembered: Remembered | None = None
        self._glimpse: Glimpse | None = None
        self._word_left = False
        self._pid = os.getpid()
        self.watch = Watch(rule, self)
        self.agree: Callable[[bool], bool] | None = None
        """Between ranks: whether any of them was told. Asked at each boundary, of all of them."""
        manager._guard.left = self._unguarded
        self.watch.install()

    @property
    def grace_seconds(self) -> float:
        """After a signal."""
        return self._rule.grace_seconds

    # -- what the manager calls

    def stepped(self) -> None:
        """Right after a step."""
        if self._glimpse is None:
            self._glimpse = Glimpse(self._manager._objects.values())
        self._glimpse.take()

    def forget_glimpse(self) -> None:
        """Objects were registered."""
        self._glimpse = None

    def at_boundary(self) -> None:
        """Before what is due otherwise is saved. SystemExit."""
        if self._agreed():
            self.watch.at_boundary()
        objects = self._manager._objects
        self._remembered = Remembered(
            randomness.state(),
            {name: one.state_dict() for name, one in objects.items() if isinstance(one, Position)},
            self._manager._epoch_now(),
        )

    def _agreed(self) -> bool:
        """Whether it is time to act on what was told, here or to another rank."""
        if self.agree is None:
            return True
        try:
            agreed = self.agree(self.watch.told)
        except RuntimeError:
            return True  # the other ranks are gone
        if agreed and not self.watch.told:
            self.watch.notified("another rank was told", self._rule.grace_seconds, certain=True)
        return agreed

    # -- what the watch calls

    def is_ours(self) -> bool:
        return os.getpid() == self._pid

    def hear(self) -> None:
        if self._manager._guard.depth:
            self._word_left = True
        else:
            with self._manager._guard:
                self._manager._hear(self._manager._client.poll())

    def can_stage_now(self) -> bool:
        manager = self._manager
        boundaries = manager._boundaries
        if manager._guard.depth or manager._closed or self.agree is not None:
            return False
        if not manager._objects or not manager._changed:
            return True  # nothing is to be saved that is not
        objects = manager._objects.values()
        if not any(isinstance(getattr(one, "training", None), bool) for one in objects):
            return boundaries.between_passes
        still = self._glimpse is not None and self._glimpse.is_still()
        return evaluating(objects) and still and boundaries.settled

    def estimate_seconds(self) -> float | None:
        manager = self._manager
        own = manager._costs.write_estimate_seconds(manager._size_bytes)
        if own is None or not manager._size_bytes:
            return None
        return own * (manager._client.pending + manager._changed)

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        manager = self._manager
        if not manager._objects or not (manager._changed or manager.stats.saved or manager._client.pending):
            return False
        if not manager._changed:
            return True
        as_it_was = None if at_boundary or not manager._boundaries.unchanged else self._remembered
        return manager._save_last(reason, as_it_was)

    def wait_durable(self, seconds: float) -> str | None:
        """And from here on closing the manager takes no longer than that."""
        manager = self._manager
        manager._close_by = time.monotonic() + max(_LEAST_SECONDS, seconds)
        if not manager.wait(seconds) or manager._changed:
            return None
        if manager._ranks is not None and not manager._ranks.saves:
            return "the one that rank 0 writes"
        return manager.stats.last_id or None

    def _unguarded(self) -> None:
        if self._word_left:
            self._word_left = False
            self.hear()
        self.watch.act()
