"""What a manager does for the last snapshot before preemption: when it may be staged, of which state, and how long it will take.

At a boundary the state is saved as at any other. Elsewhere it may be staged only where nothing changes that is saved: within an
evaluation, or between two passes over the data of which a loader tells. There generators and position are put back to what they were at
the last boundary: the resumed run goes on from that one, and evaluates again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from ciuic.training import randomness
from ciuic.training.evaluation import Glimpse, evaluating
from ciuic.training.messages import Notice
from ciuic.training.preemption import BeforePreemption, Watch
from ciuic.training.ranks import Vote
from ciuic.training.taking import Remembered

if TYPE_CHECKING:
    from ciuic.training.manager import SnapshotManager

_LEAST_SECONDS: Final = 0.5


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
        self.agree: Vote | Callable[[bool], bool] | None = None
        """Between ranks: whether any of them was told. Asked at each boundary, of all of them."""
        manager._saver.guard.left = self._unguarded
        self.watch.install()

    @property
    def grace_seconds(self) -> float:
        """After a signal."""
        return self._rule.grace_seconds

    # -- what the manager calls

    def stepped(self) -> None:
        """Right after a step."""
        if self._glimpse is None:
            self._glimpse = Glimpse(self._manager._registered.objects.values())
        self._glimpse.take()

    def notified(self, notice: Notice) -> None:
        """By a metadata service."""
        self.watch.notified(notice.text, notice.seconds, certain=notice.certain)

    def forget_glimpse(self) -> None:
        """Objects were registered."""
        self._glimpse = None

    def at_boundary(self) -> None:
        """Before what is due otherwise is saved. SystemExit."""
        if self._agreed():
            self.watch.at_boundary()
        manager = self._manager
        self._remembered = Remembered(
            randomness.state(), manager._registered.positions(), manager._registered.epoch(manager.epoch)
        )

    def _agreed(self) -> bool:
        """Whether it is time to act on what was told, here or to another rank."""
        if self.agree is None:
            return True
        try:
            if isinstance(self.agree, Vote):
                word = self.agree(self.watch.word)
            else:
                word = int(self.agree(self.watch.told))
        except RuntimeError:
            return True  # the other ranks are gone
        if word and not self.watch.told:
            self.watch.heard(word, self._rule.grace_seconds)
        return bool(word)

    # -- what the watch calls

    def is_ours(self) -> bool:
        return os.getpid() == self._pid

    def hear(self) -> None:
        if self._manager._saver.guard.depth:
            self._word_left = True
        else:
            with self._manager._saver.guard:
                self._manager._saver.hear()

    def can_stage_now(self) -> bool:
        manager = self._manager
        boundaries = manager._boundaries
        if manager._saver.guard.depth or manager._closed or self.agree is not None:
            return False
        if not manager._registered.objects or not manager._saver.changed:
            return True  # nothing is to be saved that is not
        objects = manager._registered.objects.values()
        if not any(isinstance(getattr(one, "training", None), bool) for one in objects):
            return boundaries.between_passes
        still = self._glimpse is not None and self._glimpse.is_still()
        return evaluating(objects) and still and boundaries.settled

    def estimate_seconds(self) -> float | None:
        return self._manager._saver.estimate_seconds()

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        manager = self._manager
        if not manager._registered.objects or not (
            manager._saver.changed or manager.stats.saved or manager._saver.pending
        ):
            return False
        if not manager._saver.changed:
            return True
        as_it_was = None if at_boundary or not manager._boundaries.unchanged else self._remembered
        return manager._save_last(reason, as_it_was)

    def ends(self) -> None:
        self._manager._heartbeat.preempted()

    def wait_durable(self, seconds: float) -> str | None:
        """And from here on closing the manager takes no longer than that."""
        manager = self._manager
        manager._close_by = time.monotonic() + max(_LEAST_SECONDS, seconds)
        manager._saver.hurry()
        if not manager.wait(seconds) or manager._saver.changed:
            return None
        if not manager._taker.writes:
            return "the one that rank 0 writes"
        return manager.stats.last_id or None

    def _unguarded(self) -> None:
        if threading.current_thread() is not threading.main_thread():
            if self._word_left or self.watch.told:
                self.watch.wake()
            return
        if self._word_left:
            self._word_left = False
            self.hear()
        self.watch.act()
