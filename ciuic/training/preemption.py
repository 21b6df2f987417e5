"""The last snapshot before the machine, the job or the process is taken away.

    SnapshotManager(save_when=[Interval("1h"), BeforePreemption(grace_seconds=120, clouds=["aws"])])

A signal, or a notice of the cloud that the writer has found (notices.py), leads to one snapshot at the next boundary of two steps. Within an
evaluation there is no boundary for long: there it is taken at once, in the signal handler, which Python runs in the main thread
between two bytecodes; the state is that of the last boundary, generators and position included, so that the resumed run makes the same
evaluation again. It is left out, and said, where what was measured tells that it cannot be durable in the time that is left.

Guarantees: handlers that were there before are called, once the snapshot is staged or given up. What a process that was forked does
with these signals is what it would do without us. A program that says nothing else ends as it would have ended, but with the
snapshot taken and by SystemExit, so that it can clean up. Being ready costs some forty microseconds a step (measured with torch).
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, Final, Literal, Protocol

from ciuic.training.notices import Metadata
from ciuic.training.policies import Moment, Rule

log = logging.getLogger("ciuic")

NOTIFIED: Final = signal.SIGURG
"""By which the writer says that it has found a notice: ignored by default, so that it harms nobody who does not expect it."""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
_END_SECONDS: Final = 1.0
"""Left of the grace for the program's own end."""
_NOTICE_EXIT_CODE: Final = 128 + signal.SIGTERM
Then = Literal["as before", "exit", "continue"]


@dataclass(frozen=True)
class Preempted:
    """What has happened."""

    cause: str
    """The signal's name, or what the cloud says."""
    signal: int
    """0: a notice."""
    deadline: float
    """By `time.monotonic`."""
    frame: FrameType | None = field(default=None, repr=False)
    certain: bool = True
    snapshot: str | None = None
    """The id of the last snapshot, if it is durable."""


@dataclass(frozen=True)
class BeforePreemption(Rule):
    """One last snapshot on a signal or a notice.

    ``grace_seconds``: what is left after a signal (Kubernetes: terminationGracePeriodSeconds; Slurm: the time of ``--signal``; a notice of a
    cloud says it itself). ``clouds``: whose metadata services are asked, by name or as `Metadata`. ``then``: ``as before``: previous
    handlers are called, and where there was none a signal ends the program, while a notice does not; ``exit``: SystemExit in any case, with
    ``exit_code`` (128 + signal if there is none); ``continue``: the program goes on; or something to call with a `Preempted`.
    """

    grace_seconds: float = 30.0
    signals: Sequence[signal.Signals] = _SIGNALS
    clouds: Sequence[str | Metadata] = ()
    then: Then | Callable[[Preempted], object] = "as before"
    exit_code: int | None = None

    def __post_init__(self) -> None:
        if not callable(self.then) and self.then not in ("as before", "exit", "continue"):
            raise ValueError(f"{self.then!r} is nothing that can be done after the last snapshot")
        _ = self.services

    def due(self, moment: Moment) -> bool:
        return False  # it does not depend on boundaries alone: see Watch

    @property
    def services(self) -> tuple[Metadata, ...]:
        """What the writer is to ask. ValueError."""
        return tuple(one if isinstance(one, Metadata) else Metadata(one) for one in self.clouds)  # type: ignore[arg-type]


class Host(Protocol):
    """What the manager does for it."""

    def is_ours(self) -> bool:
        """Whether this is the process that trains."""

    def hear(self) -> None:
        """Takes what the writer has said; `Watch.notified` is called of it."""

    def can_stage_now(self) -> bool:
        """Whether the state is that of the last boundary, though this is none, and nobody is staging."""

    def estimate_seconds(self) -> float | None:
        """Until a snapshot that is staged now would be durable; None: not known."""

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        """Whether there is a snapshot of the state, staged or durable."""

    def ends(self) -> None:
        """The program will be ended for it."""

    def wait_durable(self, seconds: float) -> str | None:
        """The id of the last snapshot, if it is durable in this time."""


class Watch:
    """From `install` to `remove`."""

    def __init__(self, rule: BeforePreemption, host: Host) -> None:
        self._rule = rule
        self._host = host
        self._previous: dict[int, Any] = {}
        self._told: Preempted | None = None
        """What has to be answered."""
        self._timer: threading.Timer | None = None
        self._expired = False
        self._acting = False

    @property
    def told(self) -> bool:
        """Whether a snapshot is wanted."""
        return self._told is not None

    def install(self) -> None:
        """In the main thread; from another one notices alone are heard, at boundaries."""
        if threading.current_thread() is not threading.main_thread():
            log.warning(
                "ciuic: signals can be watched from the main thread alone: no snapshot before preemption"
            )
            return
        for number in (*self._rule.signals, NOTIFIED):
            if signal.getsignal(number) is None:
                log.warning(
                    "ciuic: %s is handled by a library in C and is not watched", signal.Signals(number).name
                )
                continue
            self._previous[number] = signal.signal(
                number, self._on_notified if number == NOTIFIED else self._on_signal
            )

    def remove(self) -> None:
        """Puts back what was there, where nobody has taken our place meanwhile."""
        self._forget()
        if threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous.items():
            if signal.getsignal(number) in (self._on_signal, self._on_notified):
                signal.signal(number, previous)
        self._previous.clear()

    def notified(self, cause: str, seconds: float, *, certain: bool) -> None:
        """The cloud says so."""
        self._tell(Preempted(cause, 0, time.monotonic() + seconds, None, certain))

    @property
    def word(self) -> int:
        """What this rank tells others: 0 nothing, 1 a notice, else one more than the signal's number."""
        return 0 if self._told is None else 1 + self._told.signal

    def heard(self, word: int, seconds: float) -> None:
        """Another rank was told so: this one ends as that does."""
        number = word - 1
        cause = f"{signal.Signals(number).name} to another rank" if number else "another rank was told"
        self._tell(Preempted(cause, number, time.monotonic() + seconds))

    def at_boundary(self) -> None:
        """The state is whole. Raises SystemExit if that is what is to follow."""
        if self._told is not None and not self._acting:
            self._take(at_boundary=True)

    def act(self) -> None:
        """As soon as the manager is done with something in which a signal may have come."""
        if self._told is None or self._acting:
            return
        if self._host.can_stage_now():
            self._take(at_boundary=False)
        elif self._expired:
            log.error("ciuic: no snapshot before %s: no step was over in time", self._told.cause)
            self._acting = True
            try:
                self._end(None)
            finally:
                self._acting = False

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self._host.is_ours():
            self._as_in_a_child(number, frame)
            return
        self._tell(
            Preempted(signal.Signals(number).name, number, time.monotonic() + self._rule.grace_seconds, frame)
        )
        self.act()

    def _on_notified(self, number: int, frame: FrameType | None) -> None:
        if self._host.is_ours():
            self._host.hear()
            self.act()
        previous = self._previous.get(number)
        if callable(previous):
            previous(number, frame)

    def _as_in_a_child(self, number: int, frame: FrameType | None) -> None:
        """A worker of a data loader must end when it is told to."""
        previous = self._previous.get(number, signal.SIG_DFL)
        if callable(previous):
            previous(number, frame)
        elif previous == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def _tell(self, told: Preempted) -> None:
        if self._told is not None and self._told.deadline <= told.deadline:
            return
        log.warning("ciuic: %s: a last snapshot at the next boundary", told.cause)
        self._forget()
        self._told = told
        left = max(0.0, told.deadline - time.monotonic() - _END_SECONDS)
        self._timer = threading.Timer(left, self._expire)
        self._timer.daemon = True
        self._timer.start()

    def wake(self) -> None:
        """From another thread: the main thread looks what there is to do."""
        thread = threading.main_thread().ident
        if NOTIFIED in self._previous and thread is not None:
            signal.pthread_kill(thread, NOTIFIED)

    def _expire(self) -> None:
        """In a thread: the main thread has to find it out."""
        self._expired = True
        self.wake()

    def _forget(self) -> None:
        self._told, self._expired = None, False
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _take(self, *, at_boundary: bool) -> None:
        told = self._told
        assert told is not None
        self._acting = True
        try:
            left = told.deadline - time.monotonic()
            needed = self._host.estimate_seconds()
            if needed is not None and needed > left:
                log.error(
                    "ciuic: no snapshot before %s: it takes %.0f s, %.0f s are left", told.cause, needed, left
                )
                staged = False
            else:
                staged = self._host.stage_last(told.cause, at_boundary=at_boundary)
            found = None
            if staged and self._ends(told):
                found = self._host.wait_durable(max(0.0, told.deadline - time.monotonic() - _END_SECONDS))
            self._end(found)
        finally:
            self._acting = False

    def _ends(self, told: Preempted) -> bool:
        """Whether the program may end for it."""
        goes_on = self._rule.then == "continue" or (self._rule.then == "as before" and not told.signal)
        return told.certain and not goes_on

    def _end(self, snapshot: str | None) -> None:
        """Whatever is to follow."""
        told = self._told
        assert told is not None
        self._forget()
        if self._ends(told):
            self._host.ends()
        then, previous = self._rule.then, self._previous.get(told.signal)
        if callable(then):
            then(Preempted(told.cause, told.signal, told.deadline, told.frame, told.certain, snapshot))
        if callable(previous):
            previous(told.signal, told.frame)
        by_default = then == "as before" and told.signal != 0 and previous == signal.SIG_DFL
        if told.certain and (then == "exit" or by_default):
            code = self._rule.exit_code
            default = 128 + told.signal if told.signal else _NOTICE_EXIT_CODE
            raise SystemExit(default if code is None else code)


def rule_of(rules: Iterable[Rule]) -> BeforePreemption | None:
    """The one among them. ValueError if there are two."""
    found = [rule for rule in rules if isinstance(rule, BeforePreemption)]
    if len(found) > 1:
        raise ValueError("one BeforePreemption is enough")
    return found[0] if found else None
