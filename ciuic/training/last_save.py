"""Last snapshot before preemption: when it may be staged, what state it holds, how long it will take.

At a boundary the state is saved as at any other. Elsewhere it may be staged only where nothing changes that
is saved: within an evaluation, or between two passes over the data of which a loader tells. There random
generators and loader positions are put back to their values at the last boundary, so that the resumed run
continues from that boundary and evaluates again.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from ciuic.training.policy.boundaries import Boundaries
from ciuic.training.preemption.last_moment import BeforePreemption, PreemptionWatch
from ciuic.training.protocol.messages import PreemptionNotice
from ciuic.training.ranks.group import Ranks, Vote
from ciuic.training.registered import Registered
from ciuic.training.saving.saver import Saver
from ciuic.training.saving.snapshot_spec import BoundaryState, SnapshotSpec
from ciuic.training.saving.snapshot_taker import SnapshotTaker
from ciuic.training.util import randomness
from ciuic.training.util.evaluation import WeightSample, evaluating
from ciuic.training.util.logs import quietly
from ciuic.training.writer.heartbeat import TrainerHeartbeat

_MIN_CLOSE_SECONDS: Final = 0.5


@dataclass
class Lifetime:
    """End of a manager's life, shared by the parts that look at it."""

    closed: bool = False
    close_by: float | None = None
    """Deadline of `close` on the monotonic clock; None: only its own timeout counts."""


class LastSave:
    """Decides on and takes the last snapshot of one manager; the `PreemptionHost` of a `PreemptionWatch`."""

    def __init__(
        self,
        rule: BeforePreemption,
        agree: Vote | Callable[[bool], bool] | None,
        *,
        lifetime: Lifetime,
        boundaries: Boundaries,
        registered: Registered,
        saver: Saver,
        taker: SnapshotTaker,
        heartbeat: TrainerHeartbeat,
    ) -> None:
        """Create it without signal handlers; `watch.install` installs them.

        Args:
            rule: What the program asked for.
            agree: Tells at each boundary whether any rank was told of preemption; every rank asks. None: this
                process decides alone.
            lifetime: Gets the deadline of closing.
            boundaries: Tells whether the state is whole.
            registered: Objects that are saved.
            saver: Stages and waits.
            taker: Takes the snapshot.
            heartbeat: Is told that the program will end.
        """
        self._rule = rule
        self._agree = agree
        self._lifetime = lifetime
        self._boundaries = boundaries
        self._registered = registered
        self._saver = saver
        self._taker = taker
        self._heartbeat = heartbeat
        self._remembered: BoundaryState | None = None
        self._weight_sample: WeightSample | None = None
        self._writer_spoke = False
        """The writer signalled while the critical section was entered."""
        # A forked child (a worker of a loader) inherits the handlers, and must not save.
        self._pid = os.getpid()
        self.watch = PreemptionWatch(rule, self)

    @property
    def grace_seconds(self) -> float:
        """Time between a signal and the end of the process."""
        return self._rule.grace_seconds

    # -- what the coordinator calls

    def stepped(self) -> None:
        """Remember the start of the weights right after an optimizer step."""
        # With `at_boundary` this takes 44 microseconds a step (measured with torch on one thread).
        if self._weight_sample is None:
            self._weight_sample = WeightSample(self._registered.objects.values())
        self._weight_sample.take()

    def notified(self, notice: PreemptionNotice) -> None:
        """Pass the notice of a metadata service to the watch."""
        self.watch.notified(notice.text, notice.seconds, certain=notice.certain)

    def forget_weight_sample(self) -> None:
        """Drop the remembered weights, because other objects are registered now."""
        self._weight_sample = None

    def join_ranks(self, ranks: Ranks) -> None:
        """Agree with the other ranks from now on, unless the program brought its own way."""
        if self._agree is None:
            self._agree = ranks.vote()

    def leave_ranks(self) -> None:
        """Decide alone from now on."""
        self._agree = None

    def at_boundary(self) -> None:
        """Take the last snapshot if it is time, before any other that is due.

        Raises:
            SystemExit: The program is to end after it.
        """
        # Every rank asks at every boundary, whether it was told or not: the answer is collective.
        if self._agreed():
            self.watch.at_boundary()
        epoch = self._registered.epoch(self._taker.run.epoch)
        self._remembered = BoundaryState(randomness.state(), self._registered.positions(), epoch)

    def guard_released(self) -> None:
        """Act on signals that arrived within the critical section."""
        # Only the main thread may run what follows: it ends in SystemExit or in handlers of the program.
        if threading.current_thread() is not threading.main_thread():
            if self._writer_spoke or self.watch.is_pending:
                self.watch.wake()
            return
        if self._writer_spoke:
            self._writer_spoke = False
            self.hear()
        self.watch.act()

    def _agreed(self) -> bool:
        """Return whether it is time to act on what this rank or another one was told."""
        if self._agree is None:
            return True
        try:
            if isinstance(self._agree, Vote):
                code = self._agree(self.watch.code)
            else:
                code = int(self._agree(self.watch.is_pending))
        except RuntimeError:
            return True  # The other ranks are gone, and will not come to any later boundary.
        # The code carries the signal's number, so that this rank ends as the one that was told: as a notice,
        # after which a program goes on, it would run until its partner is gone, and fail.
        # Also where this rank was told of a notice alone, and another one of a signal: its code is larger.
        if code > self.watch.code:
            self.watch.receive_code(code, self._rule.grace_seconds)
        return bool(code)

    # -- what the watch calls

    def is_ours(self) -> bool:
        """Return whether this is the process that trains."""
        return os.getpid() == self._pid

    def hear(self) -> None:
        """Read what the writer has said, or leave that to the end of the critical section."""
        if self._saver.guard.depth:
            self._writer_spoke = True
        else:
            with self._saver.guard:
                self._saver.hear()

    def can_stage_now(self) -> bool:
        """Return whether the state is that of the last boundary, and nobody is staging."""
        # Several ranks must save at the same boundary, so their evaluations are not interrupted.
        if self._saver.guard.depth or self._lifetime.closed or self._agree is not None:
            return False
        if not self._registered.objects or not self._saver.changed:
            return True  # Nothing is to be saved that is not.
        objects = self._registered.objects.values()
        if not any(isinstance(getattr(one, "training", None), bool) for one in objects):
            return self._boundaries.between_passes
        # Some programs put an average of the weights into the model while they evaluate, which must not be
        # saved as the model.
        still = self._weight_sample is not None and self._weight_sample.is_still()
        return evaluating(objects) and still and self._boundaries.settled

    def estimate_seconds(self) -> float | None:
        """Return how long a snapshot staged now takes to be durable; None if nothing was measured."""
        return self._saver.estimate_seconds()

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        """Stage the last snapshot; return whether the state is staged or durable."""
        saver = self._saver
        if not self._registered.objects or not (saver.changed or saver.stats.saved or saver.pending):
            return False
        # Nothing has changed since the last snapshot: that one is waited for.
        if not saver.changed:
            return True
        boundary_state = None if at_boundary or not self._boundaries.unchanged else self._remembered
        with quietly("the last snapshot could not be taken"):
            wanted = SnapshotSpec(reason, may_wait=True, boundary_state=boundary_state)
            save = self._taker.take_due(wanted)
            return save is not None or not self._taker.writes
        return False

    def ends(self) -> None:
        """Tell the daemon that the program will end because of preemption."""
        self._heartbeat.preempted()

    def wait_durable(self, seconds: float) -> str | None:
        """Wait for the last snapshot, and bound every later `close` by the same deadline.

        Returns:
            Its id; None if it is not durable in this time.
        """
        # `close` in a `finally` of the program must not take longer than the grace either.
        self._lifetime.close_by = time.monotonic() + max(_MIN_CLOSE_SECONDS, seconds)
        self._saver.hurry()
        # `changed` is set again by a save that has failed.
        if not self._saver.wait(seconds) or self._saver.changed:
            return None
        if not self._taker.writes:
            return "the one that rank 0 writes"
        return self._saver.stats.last_id or None
