"""The last snapshot before the machine, the job or the process is taken away.

    SnapshotManager(save_when=[Interval("1h"), BeforePreemption(grace_seconds=120, clouds=["aws"])])

A signal, or a notice of the cloud that the writer found (cloud_notices.py), leads to one snapshot at the next
boundary of two steps. Within an evaluation there may be no boundary for long: there it is taken at once, in
the signal handler, which Python runs in the main thread between two bytecodes. The state is then that of the
last boundary, generators and position included, so that the resumed run makes the same evaluation again. The
snapshot is left out, and the log says so, if measurements tell that it cannot be durable in the time that is
left.

Guarantees: handlers that were installed before are called once the snapshot is staged or given up. A forked
process answers these signals as if this module did not exist. A program that asks for nothing else ends as
the signal would have ended it, but with the snapshot taken and by SystemExit, so that it can clean up. Being
ready costs some forty microseconds a step (measured with torch).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final, Literal, Protocol

from ciuic.training.policy.policies import Moment, Rule
from ciuic.training.protocol.cloud_notices import MetadataService

log = logging.getLogger("ciuic")

NOTIFIED: Final = signal.SIGURG
"""Signal by which the writer reports a notice; ignored by default, so that it harms no process that does not
expect it.
"""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Part of the grace period that is left for the program's own end.
_END_SECONDS: Final = 1.0
_NOTICE_EXIT_CODE: Final = 128 + signal.SIGTERM
Then = Literal["as before", "exit", "continue"]


@dataclass(frozen=True)
class Preempted:
    """Description of a preemption, passed to a callable ``then``."""

    cause: str
    """Name of the signal, or the text of the cloud's notice."""
    signal: int
    """Number of the signal; 0 for a notice."""
    deadline: float
    """End of the grace period on the clock of `time.monotonic`."""
    frame: FrameType | None = field(default=None, repr=False)
    certain: bool = True
    snapshot: str | None = None
    """Id of the last snapshot, if it is durable."""


@dataclass(frozen=True)
class BeforePreemption(Rule):
    """Take one last snapshot on a signal or a notice.

    ``grace_seconds``: time left after a signal (Kubernetes: terminationGracePeriodSeconds; Slurm: the time of
    ``--signal``; a notice of a cloud says it itself). ``clouds``: clouds whose metadata services are asked,
    by name or as `MetadataService`. ``then``: what follows the snapshot. ``as before``: previous handlers are
    called, and without one a signal ends the program, while a notice does not. ``exit``: SystemExit in any
    case, with ``exit_code`` (by default 128 + signal). ``continue``: the program goes on. A callable is
    called with a `Preempted`.
    """

    grace_seconds: float = 30.0
    signals: Sequence[signal.Signals] = _SIGNALS
    clouds: Sequence[str | MetadataService] = ()
    then: Then | Callable[[Preempted], object] = "as before"
    exit_code: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.then) and self.then not in ("as before", "exit", "continue"):
            raise ValueError(
                f"then= must be 'as before', 'exit', 'continue' or a callable, got {self.then!r}"
            )
        # An unknown cloud is an error of the program, not of the writer process later.
        _ = self.services

    def due(self, moment: Moment) -> bool:
        """Return False: it depends on more than boundaries, see `PreemptionWatch`."""
        return False

    @property
    def services(self) -> tuple[MetadataService, ...]:
        """Metadata services that the writer is to ask.

        Raises:
            ValueError: a cloud is unknown.
        """
        return tuple(one if isinstance(one, MetadataService) else MetadataService(one) for one in self.clouds)  # type: ignore[arg-type]


class PreemptionHost(Protocol):
    """Services of the manager that `PreemptionWatch` uses."""

    def is_ours(self) -> bool:
        """Return whether this is the process that trains."""

    def hear(self) -> None:
        """Read the writer's messages; a notice calls `PreemptionWatch.notified`."""

    def can_stage_now(self) -> bool:
        """Return whether the state, outside of a boundary, is that of the last one.

        False as well while a save is being staged.
        """

    def estimate_seconds(self) -> float | None:
        """Estimate the time until a snapshot staged now is durable; None if it is not known."""

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        """Stage the last snapshot; return whether there is one of the state, staged or durable."""

    def ends(self) -> None:
        """Record that the program will be ended for the preemption."""

    def wait_durable(self, seconds: float) -> str | None:
        """Wait for the last snapshot and return its id; None if it is not durable in this time."""


class PreemptionWatch:
    """Signal handlers and deadline of one manager, from `install` to `remove`."""

    def __init__(self, rule: BeforePreemption, host: PreemptionHost) -> None:
        """Prepare the watch without installing a handler.

        Args:
            rule: signals, grace period and what follows the snapshot.
            host: the manager.
        """
        self._rule = rule
        self._host = host
        self._previous: dict[int, Any] = {}
        self._pending: Preempted | None = None
        """Preemption that has not been answered; None if there is none."""
        self._signals: dict[int, FrameType | None] = {}
        """Signals that belong to it, in the order in which they came, with their frames."""
        self._timer: threading.Timer | None = None
        self._expired = False
        self._acting = False

    @property
    def is_pending(self) -> bool:
        """True if a last snapshot is wanted."""
        return self._pending is not None

    def install(self) -> None:
        """Install signal handlers.

        Outside of the main thread there are none: notices alone are handled, at boundaries.
        """
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "ciuic: no snapshot before preemption: only the main thread can install signal handlers"
            )
            return
        for number in (*self._rule.signals, NOTIFIED):
            # None: the handler was not installed by Python, and replacing it could not be undone.
            if signal.getsignal(number) is None:
                log.warning(
                    "ciuic: %s already has a handler of a C library and is not watched",
                    signal.Signals(number).name,
                )
                continue
            self._previous[number] = signal.signal(
                number, self._on_notified if number == NOTIFIED else self._on_signal
            )

    def remove(self) -> None:
        """Restore the previous handlers where no other handler replaced ours since."""
        # First, and on any thread: the timer must not fire any more.
        self._forget()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            # A handler that the program installed later stays.
            if signal.getsignal(number) in (self._on_signal, self._on_notified):
                signal.signal(number, previous)
        self._previous.clear()

    def notified(self, cause: str, seconds: float, *, certain: bool) -> None:
        """Record a notice of the cloud."""
        self._record(Preempted(cause, 0, time.monotonic() + seconds, None, certain))

    @property
    def code(self) -> int:
        """Code for other ranks: 0 for no preemption, 1 for a notice, else the signal's number plus one."""
        # A vote carries 0 to 255 (`ranks.group.Vote`), and signals end at 64 (signal(7)).
        return 0 if self._pending is None else 1 + self._pending.signal

    def receive_code(self, code: int, seconds: float) -> None:
        """Record the code of another rank, so that this rank ends as that one does."""
        number = code - 1
        cause = f"{signal.Signals(number).name} to another rank" if number else "another rank was told"
        self._record(Preempted(cause, number, time.monotonic() + seconds))

    def at_boundary(self) -> None:
        """Take the last snapshot at a boundary, where the state is whole.

        Raises:
            SystemExit: the program is to end after it.
        """
        if self._pending is not None and not self._acting:
            self._take_last(at_boundary=True)

    def act(self) -> None:
        """Take the last snapshot outside of a boundary if the state allows it, or give up after the deadline.

        The manager calls it when it leaves a critical section in which a signal may have come.
        """
        if self._pending is None or self._acting:
            return
        if self._host.can_stage_now():
            self._take_last(at_boundary=False)
        elif self._expired:
            log.error(
                "ciuic: no snapshot before %s: no step ended within the grace period", self._pending.cause
            )
            self._acting = True
            try:
                self._follow_up(None)
            finally:
                self._acting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._host.is_ours():
            # A forked process inherits Python's handlers.
            self._as_in_a_child(number, frame)
            return
        self._record(
            Preempted(signal.Signals(number).name, number, time.monotonic() + self._rule.grace_seconds, frame)
        )
        self.act()

    def _on_notified(self, number: int, frame: FrameType | None) -> None:
        if self._host.is_ours():
            # The notice is a message of the writer; the signal only wakes this process.
            self._host.hear()
            self.act()
        # SIGURG may have a use of its own in the program: it also tells of out-of-band data (socket(7)).
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _as_in_a_child(self, number: int, frame: FrameType | None) -> None:
        """Handle the signal as if this module did not exist.

        A data loader's worker must end when it is told to.
        """
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            # The default action, by the signal itself: the parent sees the exit status that it expects.
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _record(self, preempted: Preempted) -> None:
        if preempted.signal:
            self._signals.setdefault(preempted.signal, preempted.frame)
        pending = self._pending
        merged = preempted if pending is None else self._merged(pending, preempted)
        if merged == pending:
            return
        self._pending = merged
        if pending is None or merged.cause != pending.cause:
            log.warning("ciuic: %s: taking a last snapshot at the next boundary", preempted.cause)
        if pending is None or merged.deadline < pending.deadline:
            self._start_timer(merged.deadline)

    def _merged(self, pending: Preempted, further: Preempted) -> Preempted:
        """Return one preemption for two: the earliest deadline, and the end that the stronger one wants."""
        # Of the causes that counts which ends the program in more cases. Without this a SIGTERM within the
        # 120 s of a cloud's notice was dropped, and the program went on after the snapshot.
        stronger = further if self._strength(further) > self._strength(pending) else pending
        # A repeated signal does not extend the time that is left.
        return replace(stronger, deadline=min(pending.deadline, further.deadline))

    def _strength(self, preempted: Preempted) -> int:
        """Order causes: uncertain notice, notice, signal with a handler of the program, fatal signal."""
        if not preempted.signal:
            return int(preempted.certain)
        return 3 if self._previous.get(preempted.signal) == signal.SIG_DFL else 2

    def _start_timer(self, deadline: float) -> None:
        """Start the timer of a deadline, in place of a running one."""
        if self._timer is not None:
            self._timer.cancel()
        # A timer thread, because the main thread may be in one long step in which no boundary comes.
        left = max(0.0, deadline - time.monotonic() - _END_SECONDS)
        self._timer = threading.Timer(left, self._expire)
        # It must not keep a process alive that ends before the deadline.
        self._timer.daemon = True
        self._timer.start()

    def wake(self) -> None:
        """Make the main thread run its handler, from another thread."""
        thread = threading.main_thread().ident
        if NOTIFIED in self._previous and thread is not None:
            # A signal to the main thread interrupts what it waits for; Python runs handlers in no other
            # thread.
            signal.pthread_kill(thread, NOTIFIED)

    def _expire(self) -> None:
        """Give up after the deadline. Runs on the timer's thread, so the main thread must be woken."""
        self._expired = True
        self.wake()

    def _forget(self) -> None:
        self._pending, self._expired = None, False
        self._signals = {}
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take_last(self, *, at_boundary: bool) -> None:
        preempted = self._pending
        assert preempted is not None
        # A second signal meanwhile only shortens the deadline; it must not take another snapshot within this
        # one.
        self._acting = True
        try:
            left = preempted.deadline - time.monotonic()
            needed = self._host.estimate_seconds()
            # It could not be durable in time: the time is left to the program's own end.
            if needed is not None and needed > left:
                log.error(
                    "ciuic: no snapshot before %s: writing takes %.0f s, only %.0f s are left",
                    preempted.cause,
                    needed,
                    left,
                )
                staged = False
            else:
                staged = self._host.stage_last(preempted.cause, at_boundary=at_boundary)
            # Again, because a signal may have come while the state was staged.
            preempted = self._pending or preempted
            found = None
            if staged and self._may_end(preempted):
                found = self._host.wait_durable(
                    max(0.0, preempted.deadline - time.monotonic() - _END_SECONDS)
                )
            self._follow_up(found)
        finally:
            self._acting = False

    def _may_end(self, preempted: Preempted) -> bool:
        """Return whether the program may end for this preemption."""
        goes_on = self._rule.then == "continue" or (self._rule.then == "as before" and not preempted.signal)
        return preempted.certain and not goes_on

    def _follow_up(self, snapshot: str | None) -> None:
        """Do what follows the snapshot: callbacks, previous handlers, SystemExit."""
        preempted, signals = self._pending, self._signals
        assert preempted is not None
        # Before what may raise or take long: the preemption is answered, and its timer must not fire.
        self._forget()
        if self._may_end(preempted):
            self._host.ends()
        then, previous = self._rule.then, self._previous.get(preempted.signal)
        if callable(then):
            then(replace(preempted, snapshot=snapshot))
        for number, frame in signals.items():
            # After the snapshot and before the end: submitit requeues in a handler of its own.
            if callable(handler := self._previous.get(number)):
                handler(number, frame)
        by_default = then == "as before" and preempted.signal != 0 and previous == signal.SIG_DFL
        if preempted.certain and (then == "exit" or by_default):
            code = self._rule.exit_code
            # Not by the signal itself: `finally` and atexit functions of the program run.
            default = 128 + preempted.signal if preempted.signal else _NOTICE_EXIT_CODE
            raise SystemExit(default if code is None else code)


def rule_of(rules: Iterable[Rule]) -> BeforePreemption | None:
    """Return the one `BeforePreemption` among the rules, if any.

    Raises:
        ValueError: there are several.
    """
    found = [rule for rule in rules if isinstance(rule, BeforePreemption)]
    if len(found) > 1:
        raise ValueError(f"save_when must have one BeforePreemption at most, got {len(found)}")
    return found[0] if found else None
