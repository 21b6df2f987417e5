"""`SnapshotManager`: a training's state, saved without a stall and resumed exactly.

    from ciuic import SnapshotManager
    manager = SnapshotManager(save_dir="./snapshots", interval=3600, max_snapshots=10)
    manager.save_snapshot(model, optimizer, epoch)
    state = manager.load_latest_snapshot()

Guarantees: a save costs the training one copy of its state in memory; the rest is the writer process's, which finishes what it was given
also when the training is killed. A snapshot exists whole or not at all, and what is loaded was checked byte for byte. Whatever goes wrong
with saving is logged and counted and never raised into the training, but for what the program itself has wrong (an object without a
state, a value that cannot be stored), which the first save says. Not for several threads at once, and one process of a run saves.
"""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from ciuic.errors import CiuicError, Damaged
from ciuic.repository import Repository
from ciuic.training import marks, policies, randomness, rank_state
from ciuic.training.boundaries import Boundaries
from ciuic.training.completeness import missing
from ciuic.training.costs import Costs
from ciuic.training.description import finite, floats, replaced, summary, versions
from ciuic.training.forecast import Forecast, forecast
from ciuic.training.last_save import Guard, LastSave, Remembered
from ciuic.training.logs import log, quietly
from ciuic.training.memory import memory_left
from ciuic.training.messages import (
    COMPRESSIONS,
    Begin,
    FromWriter,
    Manifest,
    Measured,
    Note,
    Notice,
    NotSaved,
    Rules,
    Saved,
)
from ciuic.training.outcome import EXIT_SECONDS, Resumed, Save, State, Stats
from ciuic.training.places import ensure_repository
from ciuic.training.policies import AfterIf, Interval, Moment, Rule
from ciuic.training.positions import Position, is_plain_loader
from ciuic.training.preemption import rule_of
from ciuic.training.preservation import Keep, Latest
from ciuic.training.rank_state import Mine
from ciuic.training.ranks import Ranks, RanksApart, Vote
from ciuic.training.reading import (
    Facts,
    SavedSnapshot,
    load,
    newest_good,
    saved_snapshots,
)
from ciuic.training.staging import gather, stage
from ciuic.training.stateful import has_state, load_into, state_of, way_of
from ciuic.training.writer_client import WriterClient

TAG: Final = "training"
_LOCK_WAIT_SECONDS: Final = 60.0
_POLL_SECONDS: Final = 0.2
_FIRST_PAUSE_SECONDS: Final = 1.0
_LONGEST_PAUSE_SECONDS: Final = 60.0
_ROOM: Final = 1.01
_ROOM_BYTES: Final = 1 << 20
"""For headers and documents beside the tensors."""


class SnapshotManager:
    def __init__(
        self,
        save_dir: str | os.PathLike[str] = "./snapshots",
        interval: float | str | None = None,
        max_snapshots: int | None = None,
        *,
        every_steps: int | None = None,
        save_when: Iterable[Rule] = (),
        keep: Iterable[Keep] = (),
        agree: Callable[[bool], bool] | None = None,
        name: str = "training",
        nice: int = 10,
        compression: str = "auto",
        distributed: bool | None = None,
    ) -> None:
        """Opens the repository at ``save_dir``, or makes one there, parents included.

        ``interval`` (seconds, or text like ``1h``) and ``every_steps`` (of the optimizer): when snapshots are taken by themselves, once the
        manager knows the objects; ``save_when`` are further rules for that (policies.py). ``max_snapshots``: so many of the newest stay;
        ``keep`` are further rules for that (preservation.py); with neither all stay. ``agree``: asked by all ranks at each boundary whether
        any of them was told of preemption, where it is not to be this manager's own way. ``name``: of the run, where several share a
        repository. ``nice``: of the writer. ``compression``: ``auto`` finds out for each tensor what makes it smaller, within one percent of
        the processors' time; ``small`` takes what time it needs, ``none`` takes none. ``distributed``: whether this is one of several ranks
        that train one model, which then all make a manager and call the same of its methods; None: if torch.distributed is initialized
        for several. ValueError; CiuicError or OSError when there can be no repository there.
        """
        self.save_dir = Path(os.path.abspath(os.fspath(save_dir)))
        self._rules = policies.Rules(policies.of(interval, every_steps, save_when))
        self._keeps: tuple[Keep, ...] = (*([] if max_snapshots is None else [Latest(max_snapshots)]), *keep)
        if compression not in COMPRESSIONS:
            raise ValueError(f"compression is one of {', '.join(COMPRESSIONS)}, not {compression!r}")
        if not name or "/" in name or name in (".", ".."):
            raise ValueError(f"{name!r} cannot be the name of a directory")
        self.step = 0
        """Optimizer steps of the run, restarts included; counted where the optimizer has hooks for that, else the program's to set."""
        self.epoch: int | None = None
        """As the program gave it last."""
        self.stats = Stats()
        self.forecast: Forecast | None = None
        """After the first step: what saving will come to, and what will not fit."""
        self._root = os.fsencode(f"/{name}")
        self._run = os.urandom(16).hex()
        self._objects: dict[str, Any] = {}
        self._position: Position | None = None
        self._has_position = False
        self._boundaries = Boundaries(self._stepped, self._at_boundary)
        self._saves: dict[int, Save] = {}
        self._costs = Costs()
        self._reported: dict[str, float] = {}
        """Metrics for the next snapshot."""
        self._last_save = time.monotonic()
        self._last_step = 0
        self._complained = False
        self._changed = False
        """Since the last save that was staged."""
        self._not_before, self._pause_seconds = 0.0, _FIRST_PAUSE_SECONDS
        self._size_bytes = 0
        self._close_by: float | None = None
        self._guard = Guard()
        preempted = rule_of(self._rules)
        ensure_repository(self.save_dir)
        self._client = WriterClient(
            Begin(
                repository=str(self.save_dir),
                root=self._root,
                rules=Rules(keep=self._keeps),
                nice=nice,
                services=() if preempted is None else preempted.services,
                compression=compression,
            )
        )
        self._closed = False
        self._ranks = Ranks.meet(name) if distributed is not False else None
        self._prepared = self._ranks is not None and not self._ranks.saves
        self._vote = None if self._ranks is None else self._ranks.vote()
        self._last = None if preempted is None else LastSave(self, preempted)
        if self._last is not None:
            self._last.agree = agree or (None if self._ranks is None else self._ranks.vote())
        atexit.register(self.close)

    # -- what is saved

    def register(self, **objects: Any) -> None:
        """Makes objects known by name: each is saved with every snapshot and put back by `resume`.

        Besides models and optimizers: schedulers, scalers, averages, samplers, loaders, generators, dicts, whatever has a state. TypeError
        for what has none. ``loader``: any data loader; one without a state_dict is counted from now on.
        """
        if self._last is not None:
            self._last.forget_glimpse()
        for name, value in objects.items():
            if not name.isidentifier() or name == "values":
                raise ValueError(f"{name!r} cannot be the name of an object")
            if self._objects.get(name) is value:
                continue
            self._objects[name] = self._known(name, value)
        if self._ranks is None or self._ranks.saves:
            with quietly("the writer could not be started"):
                self._client.start()

    def take(self, objects: Mapping[str, Any], *, with_position: bool = False) -> None:
        """As `register`, for saving when asked alone: nothing of the objects is watched. TypeError.

        ``with_position``: one of them knows where the run is in its data.
        """
        for name, value in objects.items():
            way_of(value, name)
        self._objects.update(objects)
        self._has_position = self._has_position or with_position

    def save_snapshot(
        self,
        model: Any = None,
        optimizer: Any = None,
        epoch: int | None = None,
        *,
        step: int | None = None,
        metrics: Mapping[str, float] | None = None,
        tags: tuple[str, ...] | list[str] = (),
        hold: str = "",
        wait: bool = False,
        **others: Any,
    ) -> Save | None:
        """Saves now, and returns when the state is copied; with ``wait`` when the snapshot is durable.

        What is registered is saved too. ``others``: further objects, or plain values, which come back under their own names. ``hold``: a
        reason for which the snapshot is kept for ever. While the writer still has both arenas this waits for one. Returns None when it
        could not be saved, which is logged, and on every rank but 0. TypeError names what cannot be stored.

        One of several ranks waits for rank 0 to have copied the state, or with ``wait`` for the snapshot.
        """
        given = {"model": model, "optimizer": optimizer, **others}
        objects = {name: value for name, value in given.items() if value is not None and has_state(value)}
        plain = {name: value for name, value in others.items() if name not in objects}
        self.register(**objects)
        if epoch is not None:
            self.epoch = epoch
        if step is not None:
            self.step = step
        facts = self._facts("asked for", metrics, epoch)
        parts = self._gather_parts()
        try:
            save = self._save(facts, plain, tuple(tags), hold, parts, may_wait=True)
            if wait and save is not None:
                save.wait()
        finally:
            if self._ranks is not None and parts is not None:
                with quietly("the other ranks were not told that the state is copied"):
                    self._ranks.tell()
        return save

    def leave_ranks(self) -> None:
        """From now on this process saves by itself, whatever others do: for who calls the manager on one rank alone."""
        self._ranks = self._vote = None
        if self._last is not None:
            self._last.agree = None

    def boundary(self) -> None:
        """Says that a step is over and the state is whole: for loops in which nothing registered could tell. Takes a snapshot if one
        is due."""
        self._boundaries.explicit()

    def report(self, metrics: Mapping[str, float] | None = None, **more: float) -> None:
        """Metrics of the state as it is, for rules that look at them and for the next snapshot. One that is due for them is taken now
        where the state is whole, else at the next boundary."""
        self._reported |= floats({**(metrics or {}), **more})
        self._rules.observe(self._reported)
        if self._ranks is not None:
            return  # what one rank was told is heard by the others at the next boundary
        if self._boundaries.whole and not self._closed and self._objects and self._client.is_ours:
            self._save_if_due()

    # -- what is read back

    def load_latest_snapshot(self) -> State | None:
        """The newest state that is whole; None if there is no snapshot. Damaged (`NothingGood`) if there are some and none is whole."""
        with self._guard:
            self._hear(self._client.poll())
        with Repository.open(self.save_dir) as repository:
            candidates = repository.snapshots.list(root=self._root)
        loaded = newest_good(str(self.save_dir), candidates)
        if loaded is None:
            return None
        for id_, reason in loaded.passed_over:
            log.warning("ciuic: %s is passed over: %s", id_, reason)
        if loaded.passed_over:
            with quietly("what is damaged could not be marked, so that it may be shared by later snapshots"):
                marks.mark_damage(self.save_dir, [one.id for one in loaded.passed_over])
        return State(loaded)

    def load_snapshot(self, snapshot: str) -> State:
        """A given one: an id, an unambiguous beginning of it, ``latest``, ``latest~2``, a time. NotFound; Damaged; ValueError."""
        with Repository.open(self.save_dir) as repository:
            id_ = repository.snapshots.resolve(snapshot)
        return State(load(str(self.save_dir), id_))

    def resume(self) -> Resumed | None:
        """Puts the newest good state into everything that is registered, in place, generators and position included.

        None if there is no snapshot: the run begins. Damaged if there are some and none is whole. What is in the snapshot and not registered
        is left, and the other way round is a KeyError before anything is changed. Every rank gets the same snapshot, and of that what was
        its own.
        """
        state = self.load_latest_snapshot() if self._ranks is None else self._load_together(self._ranks)
        if state is None:
            return None
        lacking = [name for name in self._objects if f"{name}_state_dict" not in state]
        if lacking:
            raise KeyError(f"{state.id} has no {', '.join(lacking)}: it was saved before that was registered")
        with self._guard:
            for name, value in self._objects.items():
                load_into(value, state[f"{name}_state_dict"], name)
            rank = self._ranks.rank if self._ranks is not None else 0
            rank_state.load(self._objects, state.ranks, rank)
            world_size = self._ranks.world_size if self._ranks is not None else 1
            if world_size != state.facts.world_size:
                log.warning(
                    "ciuic: not resumed exactly: saved by %d ranks, and now there are %d",
                    state.facts.world_size,
                    world_size,
                )
            for problem in randomness.restore(
                rank_state.random_of(state.ranks, rank) or state["random_state"]
            ):
                log.warning("ciuic: not resumed exactly: %s", problem)
        self.goes_on_from(state)
        position = self._position
        epoch, batch = (self.epoch, 0) if position is None else (position.epoch, position.taken)
        log.info("ciuic: resumed from %s, step %d", state.id, self.step)
        return Resumed(state.id, self.step, epoch, batch, tuple(state.passed_over))

    def goes_on_from(self, state: State) -> None:
        """What `resume` does beside the objects: steps, rules and the name of the run go on as they were. For a framework that puts the
        objects back itself."""
        self._changed = False
        self.step, self.epoch = state.facts.step or 0, state.facts.epoch
        self._run = state.facts.run or self._run
        self._last_step, self._last_save = self.step, time.monotonic()
        self._observe_earlier()

    def _load_together(self, ranks: Ranks) -> State | None:
        """The one that rank 0 finds, on every rank. Whatever goes wrong on one of them is raised on all."""
        state, problem = None, ""
        try:
            if ranks.saves:
                state = self.load_latest_snapshot()
        except (CiuicError, ValueError, OSError) as error:
            problem = str(error)
        id_ = ranks.tell((state.id if state is not None else None, problem))
        if not ranks.saves and id_[0] is not None:
            try:
                state = self.load_snapshot(id_[0])
            except (CiuicError, ValueError, OSError) as error:
                problem = str(error)
        if found := ranks.first_problem(problem):
            raise Damaged(f"no snapshot can be read by all ranks: {found}")
        return state

    def list_snapshots(self) -> list[SavedSnapshot]:
        """Newest first, those that cannot be read left out."""
        with Repository.open(self.save_dir) as repository:
            return saved_snapshots(repository, self._root)

    # -- marks

    def tag(self, snapshot: str, *tags: str) -> None:
        """Adds tags; durable on return. NotFound; Busy."""
        marks.tag(self.save_dir, snapshot, tags)

    def hold(self, snapshot: str, reason: str = "held") -> None:
        """Keeps it, whatever `max_snapshots` says, until `release`; durable on return. NotFound; Busy."""
        marks.hold(self.save_dir, snapshot, reason)

    def release(self, snapshot: str) -> None:
        """Undoes `hold`."""
        marks.release(self.save_dir, snapshot)

    # -- life

    def wait(self, timeout_seconds: float = EXIT_SECONDS, *, number: int | None = None) -> bool:
        """Until everything that was staged is durable (or one save is); whether that came in time."""
        end = time.monotonic() + timeout_seconds
        while self._client.pending if number is None else number in self._saves:
            left = end - time.monotonic()
            if left <= 0:
                return False
            with self._guard:
                self._hear(self._client.poll(min(left, _POLL_SECONDS)))
        with self._guard:
            self._hear(self._client.poll())
        return True

    def close(self, timeout_seconds: float = EXIT_SECONDS) -> None:
        """Waits for what was staged, so long, and lets the writer go. What is not done by then is finished by the writer all the same."""
        if self._closed:
            return
        self._closed = True
        atexit.unregister(self.close)
        if self._last is not None:
            self._last.watch.remove()
        if self._close_by is not None:
            timeout_seconds = min(timeout_seconds, max(0.0, self._close_by - time.monotonic()))
        with self._guard:
            self._hear(self._client.close(timeout_seconds))
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None

    def __enter__(self) -> SnapshotManager:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # -- inside

    def _known(self, name: str, value: Any) -> Any:
        """What is registered for it: the object, or the position that is counted for it."""
        if isinstance(value, Position):
            value.tell(self._boundaries.asked, self._boundaries.ended)
            self._position, self._has_position = value, True
            return value
        if is_plain_loader(value):
            self._position = Position(value, self._boundaries.asked, self._boundaries.ended)
            self._has_position = True
            return self._position
        way_of(value, name)
        if hasattr(value, "param_groups"):
            self._boundaries.watch_optimizer(value)
        elif hasattr(value, "__iter__") and hasattr(value, "dataset"):
            self._has_position = self._boundaries.watch_loader(value) or self._has_position
        elif hasattr(value, "update_parameters") or not hasattr(value, "forward"):
            self._boundaries.watch_follower(value)
        return value

    def _prepare(self) -> None:
        """After the first step everything has its size."""
        self._prepared = True
        states = {name: state_of(value, name) for name, value in self._objects.items()}
        self._size_bytes = gather(states, {}, {}).size_bytes
        self._look_ahead()
        self._client.prepare(int(self._size_bytes * _ROOM) + _ROOM_BYTES)

    def _look_ahead(self) -> None:
        self._hear(self._client.poll())
        space = os.statvfs(self.save_dir)
        with Repository.open(self.save_dir) as repository:
            stored = len(repository.snapshots.list(root=self._root))
        self.forecast = forecast(
            self._size_bytes,
            free_bytes=space.f_bavail * space.f_frsize,
            write_seconds=self._costs.write_estimate_seconds(self._size_bytes),
            at_most=max((rule.number for rule in self._keeps if isinstance(rule, Latest)), default=None),
            stored=stored,
            shortest_interval_seconds=min(
                (float(rule.seconds) for rule in self._rules if isinstance(rule, (Interval, AfterIf))),
                default=None,
            ),
            grace_seconds=None if self._last is None else self._last.grace_seconds,
            memory_bytes=memory_left(),
        )
        for warning in self.forecast.warnings:
            log.warning("ciuic: %s", warning)

    def _stepped(self) -> None:
        self.step += 1
        self._changed = True
        if self._last is not None:
            self._last.stepped()

    def _at_boundary(self) -> None:
        if self._closed or not self._objects or not self._client.is_ours:
            return
        self._changed = True
        if self._client.pending:
            with self._guard:
                self._hear(self._client.poll())
        if self._last is not None:
            self._last.at_boundary()
        self._costs.boundary(time.monotonic(), writing=self._client.pending > 0)
        if not self._save_if_due() and not self._prepared:
            with quietly("the first snapshot could not be prepared"):
                self._prepare()

    def _save_if_due(self) -> bool:
        if self._vote is None and time.monotonic() < self._not_before:
            return False  # with several ranks all of them have to be asked
        moment, reason = self._moment(), ""
        with quietly("the rules could not say whether a snapshot is due"):  # they may be the program's own
            reason = self._rules.due(moment)
        if self._vote is not None:
            reason = self._agreed(self._vote, moment, reason)
        if reason:
            with quietly("a snapshot could not be taken"):
                parts = self._gather_parts()
                self._save(self._facts(reason, None, None), {}, (), "", parts, may_wait=False)
        return bool(reason)

    def _save_last(self, reason: str, as_it_was: Remembered | None) -> bool:
        """Whether it is staged."""
        facts = self._facts(reason, None, None if as_it_was is None else as_it_was.epoch)
        with quietly("the last snapshot could not be taken"):
            parts = self._gather_parts()
            save = self._save(facts, {}, (), "", parts, may_wait=True, as_it_was=as_it_was)
            return save is not None or (self._ranks is not None and not self._ranks.saves)
        return False

    def _agreed(self, vote: Vote, moment: Moment, reason: str) -> str:
        """Why all ranks save at this boundary, or ""."""
        alike = self._rules.due_alike(moment)
        try:
            wanted = vote(bool(reason), again=not (alike or self._rules.all_alike))
        except RuntimeError as error:
            self._failed(f"the ranks cannot agree any more: {error}")
            return ""
        return alike or ("a rank found it due" if wanted else "")

    def _gather_parts(self) -> list[Mine] | None:
        """What each rank has of its own, on rank 0; [] on the others. None where this process saves for itself."""
        if self._ranks is None:
            return None
        # On all alike, whatever becomes of this one: they must find the next one due at the same step.
        self._last_save, self._last_step = time.monotonic(), self.step
        try:
            return self._ranks.gather(rank_state.mine(self._objects)) or []
        except RanksApart as error:
            log.error(
                "ciuic: the other ranks did not save with this one, whose generators and position alone are in the snapshot: %s",
                error,
            )
            return None

    def _moment(self) -> Moment:
        return Moment(
            step=self.step,
            steps_since=self.step - self._last_step,
            seconds_since=time.monotonic() - self._last_save,
            cost_seconds=self._costs.seconds,
            write_seconds=self._costs.write_seconds,
        )

    def _observe_earlier(self) -> None:
        """What was best before must be beaten after a resume, too."""
        if self._rules.look_at_metrics:
            for saved in self.list_snapshots():
                if saved.facts.run == self._run:
                    self._rules.observe(saved.facts.metrics)
            self._rules.saved()

    def _facts(self, reason: str, metrics: Mapping[str, float] | None, epoch: int | None) -> Facts:
        return Facts(
            step=self.step,
            epoch=self._epoch_now() if epoch is None else epoch,
            metrics=finite(self._reported | floats(metrics or {})),
            reason=reason,
            objects=tuple(self._objects),
            run=self._run,
            framework=versions(),
        )

    def _epoch_now(self) -> int | None:
        if self._position is not None and self._position.passes:
            return self._position.passes - 1
        return self.epoch

    def _save(
        self,
        facts: Facts,
        plain: Mapping[str, Any],
        tags: tuple[str, ...],
        hold: str,
        parts: list[Mine] | None = None,
        *,
        may_wait: bool,
        as_it_was: Remembered | None = None,
    ) -> Save | None:
        if self._closed:
            raise ValueError("the manager is closed")
        if self._ranks is not None and not self._ranks.saves:
            self._taken()
            return None
        with self._guard:
            return self._staged(facts, plain, tags, hold, parts, may_wait=may_wait, as_it_was=as_it_was)

    def _staged(
        self,
        facts: Facts,
        plain: Mapping[str, Any],
        tags: tuple[str, ...],
        hold: str,
        parts: list[Mine] | None,
        *,
        may_wait: bool,
        as_it_was: Remembered | None,
    ) -> Save | None:
        began = time.monotonic()
        self._hear(self._client.poll())
        self._say_what_is_missing()
        self._prepared = True
        states = {name: state_of(value, name) for name, value in self._objects.items()}
        random = randomness.state()
        if as_it_was is not None:
            states, random = states | as_it_was.positions, as_it_was.random
        values = {"plain": list(plain), "random": random}
        if parts:
            values["ranks"] = rank_state.differing(parts)
            facts = replaced(facts, world_size=len(parts))
        state = gather(states, plain, values)
        self._size_bytes = state.size_bytes
        manifest = Manifest(
            time_ns=time.time_ns(), message=summary(facts), tags=(TAG, *tags), hold_reason=hold, files=[]
        )
        facts = replaced(facts, size_bytes=state.size_bytes)
        try:
            number = stage(self._client, state, facts, manifest)
            while number is None and may_wait:
                self._hear(self._client.poll(_POLL_SECONDS))
                number = stage(self._client, state, facts, manifest)
        except OSError as error:
            # What cannot be staged now must not be tried again after every step.
            self._not_before = time.monotonic() + self._pause_seconds
            self._pause_seconds = min(2 * self._pause_seconds, _LONGEST_PAUSE_SECONDS)
            self._failed(error.strerror or str(error))
            return None
        if number is None:
            self._last_save, self._last_step = time.monotonic(), self.step
            self.stats.skipped += 1
            log.warning("ciuic: a snapshot is skipped: the last two are still being written")
            return None
        self._pause_seconds = _FIRST_PAUSE_SECONDS
        save = self._saves[number] = Save(self, number)
        self.stats.last_stall_seconds = time.monotonic() - began
        self.stats.stall_seconds += self.stats.last_stall_seconds
        self._costs.stalled(self.stats.last_stall_seconds)
        self._taken()
        return save

    def _taken(self) -> None:
        """A snapshot was taken of this boundary, by this rank or by rank 0."""
        self._changed = False
        self._last_save, self._last_step = time.monotonic(), self.step
        self._reported = {}
        self._rules.saved()

    def _say_what_is_missing(self) -> None:
        if not self._complained:
            self._complained = True
            for note in missing(self._objects, has_position=self._has_position):
                log.warning("ciuic: a resume would not be exact: %s", note)

    def _hear(self, said: list[FromWriter]) -> None:
        for message in said:
            if isinstance(message, Saved):
                self.stats.saved += 1
                self.stats.last_id, self.stats.last_write_seconds = message.id, message.seconds
                self._costs.wrote(message.size_bytes, message.seconds)
                if (save := self._saves.pop(message.number, None)) is not None:
                    save.id = message.id
                log.debug("ciuic: %s is saved, %d bytes new", message.id, message.new_bytes)
            elif isinstance(message, NotSaved):
                self._failed(message.reason)
                if (save := self._saves.pop(message.number, None)) is not None:
                    save.error = message.reason
            elif isinstance(message, Note):
                log.warning("ciuic: %s", message.text)
            elif isinstance(message, Measured):
                self._costs.measured_bytes_per_second = message.bytes_per_second
            elif isinstance(message, Notice) and self._last is not None:
                self._last.watch.notified(message.text, message.seconds, certain=message.certain)

    def _failed(self, reason: str) -> None:
        self.stats.failed += 1
        self._changed = True
        self.stats.last_error = reason
        log.error("ciuic: a snapshot was not saved, earlier ones are as they were: %s", reason)
