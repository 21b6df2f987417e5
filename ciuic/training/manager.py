"""`SnapshotManager`: a training's state, saved without a stall and resumed exactly.

Guarantees: a save costs the training one copy of its state in memory; the rest is the writer process's, which finishes what it was given
also when the training is killed. A snapshot exists whole or not at all, and what is loaded was checked byte for byte. Whatever goes wrong
with saving is logged and counted and never raised into the training, but for what the program itself has wrong (an object without a
state, a value that cannot be stored), which the first save says. Not for several threads at once, and one process of a run saves.
"""

from __future__ import annotations

import atexit
import os
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from ciuic.training import given, policies
from ciuic.training.alone import Alone
from ciuic.training.boundaries import Boundaries
from ciuic.training.filesystem import Filesystem, Roots
from ciuic.training.for_frameworks import ForFrameworks
from ciuic.training.forecast import Forecast, look_ahead
from ciuic.training.heartbeat import Heartbeat
from ciuic.training.lanes import capturing
from ciuic.training.last_save import LastSave
from ciuic.training.loading import check_complete, load_given, load_latest, put_back
from ciuic.training.logs import log, quietly
from ciuic.training.marks import Marked
from ciuic.training.messages import COMPRESSIONS, Begin, Rules
from ciuic.training.outcome import EXIT_SECONDS, Resumed, Save, State, Stats
from ciuic.training.pace import Pace
from ciuic.training.places import ensure_repository
from ciuic.training.policies import Rule
from ciuic.training.preemption import rule_of
from ciuic.training.preservation import Keep, Latest
from ciuic.training.ranks import Ranks
from ciuic.training.registered import Registered
from ciuic.training.saver import Saver
from ciuic.training.taking import Remembered, Run, Taker, Wanted, asked_for


class SnapshotManager(ForFrameworks, Marked):
    """Saves the state of a training without stopping it, and resumes it exactly.

        manager = SnapshotManager("./snapshots", max_snapshots=10)
        manager.save_snapshot(model, optimizer, epoch)
        state = manager.load_latest_snapshot()              # None: there is no snapshot
        model.load_state_dict(state["model_state_dict"])

    By itself, every 500 steps, everything that an exact resume needs included:

        manager = SnapshotManager("./snapshots", every_steps=500, max_snapshots=10)
        manager.register(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)
        resumed = manager.resume()                          # None: the run begins

    take, hand_over, save_handed, join_ranks and load_to_resume are for frameworks. What is guaranteed: docs/snapshot-manager.md.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "./snapshots",
        interval: float | str | None = None,
        max_snapshots: int | None = None,
        *,
        every_steps: int | None = None,
        save_when: Iterable[Rule] | Rule = (),
        keep: Iterable[Keep] | Keep = (),
        agree: Callable[[bool], bool] | None = None,
        name: str = "training",
        nice: int = 10,
        compression: str = "auto",
        distributed: bool | None = None,
        heartbeat_seconds: float | None = None,
        overlap: bool = True,
        filesystem: Roots = False,
    ) -> None:
        """Opens the repository at ``save_dir``, or makes one there, parents included.

        When, once the objects are known: ``interval`` (seconds, or text like ``1h``), ``every_steps`` (of the optimizer), ``save_when``
        (further rules: ciuic.training.Steps, AfterIf, OnImprovement, Automatic, BeforePreemption, …).
        What stays: ``max_snapshots`` of the newest, ``keep`` (further rules: EverySteps, EverySeconds, Best, Held); with neither all.
        ``name``: of the run, where several share a repository.
        ``compression``: ``auto`` finds out for each tensor what makes it smaller, while nobody else wants the processors; ``small``
        takes what time it needs, ``none`` takes none. ``nice``: of the process that writes.
        ``distributed``: whether this is one of several ranks that train one model, which then all make a manager and call the same of its
        methods; None: if torch.distributed is initialized for several. ``agree``: asked by all ranks at each boundary whether any of them
        was told of preemption, where it is not to be this manager's own way.
        ``heartbeat_seconds``: without a step, a report or a save for so long the training counts as hung, for a daemon on the same machine
        (docs/daemon.md, Trainers), which notices its death in any case. ``overlap``: an automatic snapshot copies trained weights from an
        accelerator beside the next forward and backward; False for a program that changes them otherwise than by its optimizers' steps,
        without torch knowing (overlap.py). ``filesystem``: with every snapshot one of the files of the same instant, where a daemon
        protects them: True for all protected directories that belong to this user, or which ones.

        ValueError; TypeError; CiuicError or OSError when there can be no repository there.
        """
        self.save_dir = Path(given.directory(save_dir))
        rules = policies.Rules(policies.of(interval, every_steps, given.several(save_when, "save_when")))
        latest = [] if max_snapshots is None else [Latest(given.count(max_snapshots, "max_snapshots"))]
        self._keeps: tuple[Keep, ...] = (*latest, *given.several(keep, "keep"))
        given.one_of(compression, COMPRESSIONS, "compression")
        given.file_name(name)
        self.forecast: Forecast | None = None
        """After the first step: what saving will come to, and what will not fit."""
        self._root = os.fsencode(f"/{name}")
        self._boundaries = Boundaries(self._stepped, self._at_boundary)
        self._close_by: float | None = None
        preempted = rule_of(rules)
        ensure_repository(self.save_dir)
        self._heartbeat = Heartbeat(name, str(self.save_dir), heartbeat_seconds)
        self._saver = Saver(
            Begin(
                repository=str(self.save_dir),
                root=self._root,
                rules=Rules(keep=self._keeps),
                nice=nice,
                services=() if preempted is None else preempted.services,
                compression=compression,
                watched=self._heartbeat.hello,
            ),
            self._heartbeat.fds,
        )
        self._saver.overlap.enabled = overlap
        self._registered = Registered(self._boundaries, self._saver.overlap.watch)
        self.stats: Stats = self._saver.stats
        self._closed = False
        self._may_join = distributed is not False
        ranks = Ranks.meet(name) if self._may_join else None
        self._pace = Pace(rules, None if ranks is None else ranks.vote())
        self._run = Run()
        files = Filesystem(filesystem, self.save_dir, self.stats)
        self._taker = Taker(
            self._run,
            self._registered,
            self._pace,
            self._saver,
            ranks,
            files,
            Alone(str(self.save_dir), name),
        )
        self._last = None if preempted is None else LastSave(self, preempted)
        if self._last is not None:
            self._saver.noticed = self._last.notified
            self._last.agree = agree or (None if ranks is None else ranks.vote())
        atexit.register(self.close)

    @property
    def step(self) -> int:
        """Optimizer steps of the run, restarts included; counted where the optimizer has hooks for that, else the program's to set."""
        return self._run.step

    @step.setter
    def step(self, step: int) -> None:
        self._run.step = given.whole_number(step, "step")

    @property
    def epoch(self) -> int | None:
        """As the program gave it last."""
        return self._run.epoch

    @epoch.setter
    def epoch(self, epoch: int | None) -> None:
        self._run.epoch = None if epoch is None else given.whole_number(epoch, "epoch")

    # -- what is saved

    def register(self, **objects: Any) -> None:
        """Makes objects known by name: each is saved with every snapshot and put back by `resume`.

        Besides models and optimizers: schedulers, scalers, averages, samplers, loaders, generators, dicts, whatever has a state. TypeError
        for what has none. ``loader``: any data loader; one without a state_dict is counted from now on.
        """
        if self._last is not None:
            self._last.forget_glimpse()
        for name, value in objects.items():
            self._registered.add(name, value)
        if self._taker.writes:
            with quietly("the writer could not be started"):
                self._saver.client.start()

    def save_snapshot(
        self,
        model: Any = None,
        optimizer: Any = None,
        epoch: int | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: str | tuple[str, ...] | list[str] = (),
        hold: str | bool = "",
        wait: bool = False,
        filesystem: Roots | None = None,
        **others: Any,
    ) -> Save | None:
        """Saves now, and returns when the state is copied; with ``wait`` when the snapshot is durable.

        What is registered is saved too. ``model`` and ``optimizer``: objects, or what their state_dict() returned. ``others``: further
        objects, or plain values, which come back under their own names. ``hold``: a reason for which the snapshot is kept for ever.
        ``filesystem``: with one of the files, which is held with it; None: as the manager has it. While the writer still has both arenas
        this waits for one. Returns None when it could not be saved, which is logged, and on every rank but 0. TypeError names what cannot
        be stored.

        Of several ranks all should call it, and wait for nobody but with ``wait``; called on rank 0 alone it saves what that has.
        """
        if self._closed:
            raise ValueError("the manager is closed")
        objects, wanted = asked_for(model, optimizer, epoch, others, metrics or {}, tags, hold, filesystem)
        if not objects and not wanted.plain and not self._registered.objects:
            raise ValueError("there is nothing to save: give save_snapshot a model, or register it")
        self.register(**objects)
        self._heartbeat.beat(self.step)
        self.epoch = self.epoch if wanted.epoch is None else wanted.epoch
        self.step = self.step if step is None else given.whole_number(step, "step")
        caller, save = sys._getframe(1), None
        try:
            place = f"{os.path.basename(caller.f_code.co_filename)}:{caller.f_lineno}"
            save = self._taker.take(wanted, self._taker.parts_when_asked(place))
        finally:
            if wait:
                self._taker.wait_durable(save, EXIT_SECONDS)
        return save

    def boundary(self) -> None:
        """Says that a step is over and the state is whole: for loops in which nothing registered could tell. Takes a snapshot if one
        is due."""
        self._boundaries.explicit()

    def report(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Metrics of the state as it is, for rules that look at them and for the next snapshot. One that is due for them is taken now
        where the state is whole, else at the next boundary."""
        self._pace.report(given.numbers({**(metrics or {}), **more}))
        self._heartbeat.beat(self.step)
        self._saver.advance()
        if self._taker.ranks is not None:
            return  # what one rank was told is heard by the others at the next boundary
        saves = not self._closed and self._registered.objects and self._saver.client.is_ours
        if saves and self._boundaries.whole:
            self._save_if_due()

    # -- what is read back

    def load_latest_snapshot(self) -> State | None:
        """The newest state that is whole; None if there is no snapshot. Damaged (`NothingGood`) if there are some and none is whole."""
        with self._saver.guard:
            self._saver.hear()
        return load_latest(self.save_dir, self._root)

    def load_snapshot(self, snapshot: str) -> State:
        """A given one: an id, an unambiguous beginning of it, ``latest``, ``latest~2``, a time. NotFound; Damaged; ValueError."""
        return load_given(self.save_dir, snapshot)

    def resume(self) -> Resumed | None:
        """Puts the newest good state into everything that is registered, in place, generators and position included.

        None if there is no snapshot: the run begins. Damaged if there are some and none is whole. What is in the snapshot and not registered
        is left, and the other way round is a KeyError before anything is changed. Every rank gets the same snapshot, and of that what was
        its own.
        """
        state = self.load_to_resume()
        if state is None:
            return None
        check_complete(state, self._registered.objects)
        self._saver.settle()
        with self._saver.guard:
            put_back(state, self._registered.objects, self._taker.ranks)
        self.goes_on_from(state)
        position = self._registered.position
        epoch, batch = (self.epoch, 0) if position is None else (position.epoch, position.taken)
        log.info("ciuic: resumed from %s, step %d", state.id, self.step)
        return Resumed(state.id, self.step, epoch, batch, tuple(state.passed_over))

    def goes_on_from(self, state: State) -> None:
        """What `resume` does beside the objects: steps, rules and the name of the run go on as they were. For a framework that puts the
        objects back itself."""
        self._saver.changed = False
        self.step, self.epoch = state.facts.step or 0, state.facts.epoch
        self._run.id = state.facts.run or self._run.id
        self._pace.begin_at(self.step)
        if self._taker.writes:
            self._taker.alone.make_sure()
        self._observe_earlier()

    # -- life

    def wait(self, timeout_seconds: float = EXIT_SECONDS) -> bool:
        """Until everything that was staged is durable; whether that came in time."""
        return self._saver.wait(timeout_seconds)

    def close(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """Waits for what was staged, so long, and lets the writer go. What is not done by then is finished by the writer all the same."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        self._heartbeat.closing(sys.exc_info()[1])
        if self._last is not None:
            self._last.watch.remove()
        if self._close_by is not None:
            timeout_seconds = min(timeout_seconds, max(0.0, self._close_by - time.monotonic()))
        self._saver.close(timeout_seconds)
        self._taker.alone.release()
        if self._taker.ranks is not None:
            self._taker.ranks.close()
            self._taker.ranks = None

    def __enter__(self) -> SnapshotManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _prepare(self) -> None:
        self._taker.prepare()
        self.forecast = look_ahead(
            self.save_dir,
            self._root,
            self._saver.size_bytes,
            write_seconds=self._saver.costs.write_estimate_seconds(self._saver.size_bytes),
            rules=self._pace.rules,
            keeps=self._keeps,
            grace_seconds=None if self._last is None else self._last.grace_seconds,
        )
        for warning in self.forecast.warnings:
            log.warning("ciuic: %s", warning)

    def _stepped(self) -> None:
        self.step += 1
        self._heartbeat.beat(self.step)
        self._saver.changed = True
        if self._last is not None:
            self._last.stepped()
        self._pace.listens(self._boundaries)

    def _at_boundary(self) -> None:
        if self._closed or not self._registered.objects or not self._saver.is_ours or capturing():
            return
        self._saver.changed = True
        self._heartbeat.beat(self.step)
        if self._saver.pending:
            with self._saver.guard:
                self._saver.hear()
        if not self._taker.all_at_boundary():
            self._leave_ranks()
        if self._last is not None:
            self._last.at_boundary()
        self._saver.costs.boundary(time.monotonic(), writing=self._saver.pending > 0)
        if not self._save_if_due() and not self._taker.prepared:
            with quietly("the first snapshot could not be prepared"):
                self._prepare()
        self._saver.overlap.boundary()

    def _leave_ranks(self) -> None:
        log.error(
            "ciuic: not every rank has registered what it trains with its SnapshotManager, so rank 0 saves by itself from now on, without the "
            "others' generators and positions: register on every rank, or make the manager with distributed=False on rank 0 if this is meant"
        )
        self._taker.leave_ranks()
        self._pace.vote = None
        if self._last is not None:
            self._last.agree = None

    def _save_if_due(self) -> bool:
        if self._pace.vote is None and self._saver.pauses:
            return False  # with several ranks all of them have to be asked
        try:
            reason = self._pace.due(self.step, self._saver.costs)
        except RuntimeError as error:
            self._saver.failed(f"the ranks cannot agree any more: {error}")
            return False
        if self._pace.vote is None and self._saver.underway.changed:
            reason = reason or "the one before it was changed while it was copied"
        self._saver.underway.changed = False
        if reason:
            with quietly("a snapshot could not be taken"):
                self._taker.take(Wanted(reason), self._taker.gather_parts(may_wait=False))
        return bool(reason)

    def _save_last(self, reason: str, as_it_was: Remembered | None) -> bool:
        """Whether it is staged."""
        with quietly("the last snapshot could not be taken"):
            wanted = Wanted(reason, may_wait=True, as_it_was=as_it_was)
            save = self._taker.take(wanted, self._taker.gather_parts(may_wait=True))
            return save is not None or not self._taker.writes
        return False

    def _observe_earlier(self) -> None:
        """What was best before must be beaten after a resume, too."""
        if self._pace.rules.look_at_metrics:
            for saved in self.list_snapshots():
                if saved.facts.run == self._run.id:
                    self._pace.rules.observe(saved.facts.metrics)
            self._pace.rules.saved()
