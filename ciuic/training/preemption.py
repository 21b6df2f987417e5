"""The last snapshot before the machine, the job or the process is taken away, and requeueing of the job.

    SnapshotManager(save_when=[Interval("1h"), BeforePreemption(grace_seconds=120, clouds=["aws"])])
    BeforePreemption(grace_seconds=120, then=requeue_slurm)        # sbatch --requeue --signal=USR1@120

A signal, or a notice of the cloud that the writer found (`cloud_notices`), leads to one snapshot at the next
boundary of two steps, which is saved as any other. Within an evaluation there may be no boundary for long, nor between
two passes over the data of which a loader tells: nothing changes there that is saved, so the snapshot is taken at once,
in the signal handler, which Python runs in the main thread between two bytecodes. The state is then that of the
last boundary, generators and position included, so that the resumed run makes the same evaluation again. The
snapshot is left out, and the log says so, if measurements tell that it cannot be durable in the time that is
left.

With a remote its process is told of the deadline at once, and sends what will be whole by then (`ciuic.remote.upload_deadline`).
A program that ends waits for what is promised, within the grace period: in a container that process ends with it.

The program is in an evaluation if every registered model that has the flag is out of training mode (torch's
``model.eval()``). The beginning of the model's weights is compared with what it was after the last step,
because some programs put an average of the weights into the model while they evaluate, and that must not be
saved as the model.

Guarantees: handlers that were installed before are called once the snapshot is staged or given up. A forked
process answers these signals as if this module did not exist. A program that asks for nothing else ends as
the signal would have ended it, but with the snapshot taken and by SystemExit, so that it can clean up. Being
ready costs some forty microseconds a step (measured with torch).

For submitit the job's callable needs a method ``checkpoint`` that returns what is to be run again;
`requeue_submitit` is that:

    class Train:
        def __call__(self, save_dir): ...
        checkpoint = requeue_submitit

submitit's own handler is called once the last snapshot is staged, and requeues by itself.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, Final, Literal, Protocol

from ciuic.errors import CiuicError
from ciuic.system.cloud_notices import MetadataService
from ciuic.system.slurm import SlurmJob
from ciuic.training.logs import log, quietly
from ciuic.training.ranks import Ranks, Vote
from ciuic.training.remote.copies import UploadBeforeEnd
from ciuic.training.rules import Moment, Rule
from ciuic.training.save_pipeline import SavePipeline
from ciuic.training.snapshot_taker import RunProgress, SnapshotSpec, SnapshotTaker
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.rank_state import BoundaryState
from ciuic.training.state.registered import Registered
from ciuic.training.writer.heartbeat import TrainerHeartbeat
from ciuic.training.writer.messages import PreemptionNotice

NOTIFIED: Final = signal.SIGURG
"""Signal by which the writer reports a notice; ignored by default, so that it harms no process that does not
expect it.
"""
_SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2)
# Part of the grace period that is left for the program's own end.
_END_SECONDS: Final = 1.0
_NOTICE_EXIT_CODE: Final = 128 + signal.SIGTERM
Then = Literal["as before", "exit", "continue"]
Upload = Literal["wait", "urgent", "as before"]


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
    uploads: tuple[UploadBeforeEnd, ...] = ()
    """What each remote has, where the program ends and has waited for that."""


@dataclass(frozen=True)
class BeforePreemption(Rule):
    """Take one last snapshot on a signal or a notice.

    ``grace_seconds``: time left after a signal (Kubernetes: terminationGracePeriodSeconds; Slurm: the time of
    ``--signal``; a notice of a cloud says it itself). ``clouds``: clouds whose metadata services are asked,
    by name or as `MetadataService`. ``then``: what follows the snapshot. ``as before``: previous handlers are
    called, and without one a signal ends the program, while a notice does not. ``exit``: SystemExit in any
    case, with ``exit_code`` (by default 128 + signal). ``continue``: the program goes on. A callable is
    called with a `Preempted`. ``upload``: of a manager with a remote. ``wait``: until the deadline the upload has no idle priority,
    bandwidth limit or schedule, sends only what will be whole by then, and a program that ends waits for that. ``urgent``: the
    same without the wait. ``as before``: nothing of this.
    """

    grace_seconds: float = 30.0
    signals: Sequence[signal.Signals] = _SIGNALS
    clouds: Sequence[str | MetadataService] = ()
    then: Then | Callable[[Preempted], object] = "as before"
    exit_code: int | None = None
    upload: Upload = "wait"

    def __post_init__(self) -> None:
        if self.upload not in ("wait", "urgent", "as before"):
            raise ValueError(f"upload= must be 'wait', 'urgent' or 'as before', got {self.upload!r}")
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

    def process_messages(self) -> None:
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

    def announce_end(self, cause: str, seconds: float) -> None:
        """Tell the processes that upload that they end in this time."""

    def wait_remote(self, seconds: float) -> tuple[UploadBeforeEnd, ...]:
        """Wait for what the remotes will have in this time, and return it; nothing where the program does not wait."""


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
        # A vote carries 0 to 255 (`ranks.Vote`), and signals end at 64 (signal(7)).
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
            self._host.process_messages()
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
        # An uncertain end is none to drop older uploads for.
        if merged.certain:
            self._host.announce_end(merged.cause, self._left(merged))

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
            found: str | None = None
            uploads: tuple[UploadBeforeEnd, ...] = ()
            if staged and self._may_end(preempted):
                found = self._host.wait_durable(self._left(preempted))
            if self._may_end(preempted):
                uploads = self._host.wait_remote(self._left(self._pending or preempted))
            self._follow_up(found, uploads)
        finally:
            self._acting = False

    def _left(self, preempted: Preempted) -> float:
        """Return the seconds until the program has to begin to end."""
        return max(0.0, preempted.deadline - time.monotonic() - _END_SECONDS)

    def _may_end(self, preempted: Preempted) -> bool:
        goes_on = self._rule.then == "continue" or (self._rule.then == "as before" and not preempted.signal)
        return preempted.certain and not goes_on

    def _follow_up(self, snapshot: str | None, uploads: tuple[UploadBeforeEnd, ...] = ()) -> None:
        """Do what follows the snapshot: callbacks, previous handlers, SystemExit."""
        preempted, signals = self._pending, self._signals
        assert preempted is not None
        # Before what may raise or take long: the preemption is answered, and its timer must not fire.
        self._forget()
        if self._may_end(preempted):
            self._host.ends()
        then, previous = self._rule.then, self._previous.get(preempted.signal)
        if callable(then):
            then(replace(preempted, snapshot=snapshot, uploads=uploads))
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


# Few enough that taking them after each step costs nothing beside the step.
_SAMPLE_ELEMENTS: Final = 8


def evaluating(objects: Iterable[Any]) -> bool:
    """Return whether all models are out of training mode; False if none has the flag.

    Averages of weights (``update_parameters``) do not count: they are in training mode all the time.
    """
    flags = [
        value.training
        for value in objects
        if isinstance(getattr(value, "training", None), bool) and not hasattr(value, "update_parameters")
    ]
    return bool(flags) and not any(flags)


class WeightSample:
    """First elements of the first and the last parameter of each model."""

    def __init__(self, objects: Iterable[Any]) -> None:
        """Choose the parameters to sample."""
        self._parameters: list[Any] = []
        for value in objects:
            if isinstance(getattr(value, "training", None), bool) and callable(
                getattr(value, "parameters", None)
            ):
                # Views need contiguous memory, and empty parameters have no elements to compare.
                every = [one for one in value.parameters() if one.numel() and one.is_contiguous()]
                # Two are enough: an average that is put into the model replaces all of them.
                self._parameters += [*every[:1], *every[1:][-1:]]
        self._seen: list[Any] | None = None

    def take(self) -> None:
        """Remember the elements as they are after a step."""
        self._seen = [_first_elements(one).clone() for one in self._parameters]

    def is_still(self) -> bool:
        """Return whether the elements are unchanged since `take`; False before the first step."""
        return self._seen is not None and all(
            bool((_first_elements(one) == seen).all())
            for one, seen in zip(self._parameters, self._seen, strict=True)
        )


def _first_elements(parameter: Any) -> Any:
    return parameter.detach().view(-1)[:_SAMPLE_ELEMENTS]


_MIN_CLOSE_SECONDS: Final = 0.5


class LastSave:
    """Decides on and takes the last snapshot of one manager; the `PreemptionHost` of a `PreemptionWatch`."""

    def __init__(
        self,
        rule: BeforePreemption,
        agree: Vote | Callable[[bool], bool] | None,
        *,
        root: bytes,
        is_closed: Callable[[], bool],
        run: RunProgress,
        boundaries: Boundaries,
        registered: Registered,
        pipeline: SavePipeline,
        taker: SnapshotTaker,
        heartbeat: TrainerHeartbeat,
    ) -> None:
        """Create it without signal handlers; `watch.install` installs them.

        Args:
            rule: What the program asked for.
            agree: Tells at each boundary whether any rank was told of preemption; every rank asks. None: this
                process decides alone.
            root: Path of the training in its snapshots.
            is_closed: Tells whether the manager takes no further snapshot.
            run: Progress of the run.
            boundaries: Tells whether the state is whole.
            registered: Objects that are saved.
            pipeline: Stages and waits.
            taker: Takes the snapshot.
            heartbeat: Is told that the program will end.
        """
        self._rule = rule
        self._agree = agree
        self._root = root
        self._is_closed = is_closed
        self._run = run
        self._boundaries = boundaries
        self._registered = registered
        self._pipeline = pipeline
        self._taker = taker
        self._heartbeat = heartbeat
        self._close_by: float | None = None
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

    @property
    def close_by(self) -> float | None:
        """Deadline of `SnapshotManager.close` on the monotonic clock; None: only its own timeout counts."""
        return self._close_by

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
        epoch = self._registered.epoch(self._run.epoch)
        self._remembered = self._taker.step_end or BoundaryState(
            stateful.random_states(), self._registered.positions(), epoch
        )

    def guard_released(self) -> None:
        """Act on signals that arrived within the critical section."""
        # Only the main thread may run what follows: it ends in SystemExit or in handlers of the program.
        if threading.current_thread() is not threading.main_thread():
            if self._writer_spoke or self.watch.is_pending:
                self.watch.wake()
            return
        if self._writer_spoke:
            self._writer_spoke = False
            self.process_messages()
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

    def process_messages(self) -> None:
        """Read what the writer has said, or leave that to the end of the critical section."""
        if self._pipeline.guard.depth:
            self._writer_spoke = True
        else:
            with self._pipeline.guard:
                self._pipeline.process_messages()

    def can_stage_now(self) -> bool:
        """Return whether the state is that of the last boundary, and nobody is staging."""
        # Several ranks must save at the same boundary, so their evaluations are not interrupted.
        if self._pipeline.guard.depth or self._is_closed() or self._agree is not None:
            return False
        if not self._registered.objects or not self._pipeline.changed:
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
        return self._pipeline.estimate_seconds()

    def stage_last(self, reason: str, *, at_boundary: bool) -> bool:
        """Stage the last snapshot; return whether the state is staged or durable."""
        pipeline = self._pipeline
        if not self._registered.objects or not (pipeline.changed or pipeline.stats.saved or pipeline.pending):
            return False
        # Nothing has changed since the last snapshot: that one is waited for.
        if not pipeline.changed:
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
        self._close_by = time.monotonic() + max(_MIN_CLOSE_SECONDS, seconds)
        self._pipeline.hurry()
        # `changed` is set again by a save that has failed.
        if not self._pipeline.wait(seconds) or self._pipeline.changed:
            return None
        if not self._taker.writes:
            return "the one that rank 0 writes"
        return self._pipeline.stats.last_id or None

    def announce_end(self, cause: str, seconds: float) -> None:
        """Tell the processes that upload that they end in this time."""
        if self._rule.upload != "as before":
            self._pipeline.copies.announce_end(cause, seconds)

    def wait_remote(self, seconds: float) -> tuple[UploadBeforeEnd, ...]:
        """Wait for what the remotes will have in this time, log and return it."""
        copies = self._pipeline.copies
        if self._rule.upload != "wait" or not copies.orders or not self._taker.writes:
            return ()
        with quietly("the upload could not be waited for"):
            uploads = copies.wait_before_end(self._root, seconds)
            if uploads:
                log.warning("ciuic: %s", "; ".join(one.text for one in uploads))
            return uploads
        return ()


def requeue_slurm(preempted: Preempted) -> None:
    """Requeue this Slurm job, from its first process alone, and end the process.

    Also where Slurm preempts by requeueing: it does so only with a job that still runs at the end of the grace period.
    Not below ``ciuic slurm run``, which requeues when all processes of the job have ended. Outside of
    Slurm, or if the scheduler refuses, the failure is logged, and the process ends with 128 + signal.

    Raises:
        SystemExit: always; 0 if the job was requeued.
    """
    job = SlurmJob.of(os.environ)
    if job is None:
        log.error("ciuic: not requeued: SLURM_JOB_ID is not set, so this is no Slurm job")
        raise SystemExit(128 + preempted.signal)
    # Every process of the job gets the signal; one request is enough.
    if job.is_first_process:
        try:
            job.requeue()
        except CiuicError as error:
            log.error("ciuic: not requeued: %s", error)
            raise SystemExit(128 + preempted.signal) from None
        log.warning("ciuic: job %s is requeued", job.id)
    raise SystemExit(0)


def requeue_submitit(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return a submitit request to run the same callable with the same arguments; it resumes by itself.

    It is meant as the method ``checkpoint`` of a submitit callable.
    """
    from submitit.helpers import DelayedSubmission  # type: ignore[import-not-found, unused-ignore]

    return DelayedSubmission(self, *args, **kwargs)
