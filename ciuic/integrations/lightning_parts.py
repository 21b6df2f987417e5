"""What `lightning` and `pytorch_lightning` share, which are the same code under two names: see `ciuic.integrations.lightning`."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ciuic.errors import CiuicError
from ciuic.integrations.in_parts import refuse_sharded, refuse_strategy
from ciuic.integrations.opening import Where, opened
from ciuic.repository import Repository
from ciuic.training import randomness, rank_state
from ciuic.training.manager import SnapshotManager
from ciuic.training.outcome import State
from ciuic.training.positions import Position
from ciuic.types import SnapshotId

log = logging.getLogger("ciuic")

_LOOPS: Final = "loops"
_MARK: Final = "ciuic-snapshot"
_HOLD: Final = "checkpoint "
_LONGEST_POINTER: Final = 4096
_LOCK_WAIT_SECONDS: Final = 60.0


class Checkpoint:
    """The checkpoint of the Trainer as an object that a manager saves: all but its loops, which know the position in the data."""

    alike_on_ranks = True

    def __init__(self) -> None:
        self.given: dict[str, Any] | None = None
        """By the Trainer, for the one save that is being made."""
        self.dump: Callable[[], dict[str, Any]] = dict
        self._dumped: dict[str, Any] | None = None

    def whole(self) -> dict[str, Any]:
        """Dumped once a save on every rank: the hooks in which that is done may be collective."""
        if self.given is not None:
            return self.given
        if self._dumped is None:
            self._dumped = self.dump()
        return self._dumped

    def forget(self) -> None:
        """The save is over."""
        self.given = self._dumped = None

    def state_dict(self) -> dict[str, Any]:
        return {key: value for key, value in self.whole().items() if key != _LOOPS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("trainer.fit(ckpt_path=…) goes on from a checkpoint")


class OfRank:
    """What each process has of its own: its place in the data, and buffers that DistributedDataParallel may leave different."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint
        self.model: Any = None
        """Of several processes."""

    def state_dict(self) -> dict[str, Any]:
        buffers = {} if self.model is None else rank_state.small_buffers(self.model)
        return {_LOOPS: self._checkpoint.whole().get(_LOOPS, {}), "buffers": buffers}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("trainer.fit(ckpt_path=…) goes on from a checkpoint")


class InStore:
    """`CheckpointIO` over a repository: comes before the framework's TorchCheckpointIO, to which other files are left."""

    def __init__(self, where: Where = "./snapshots", **options: Any) -> None:
        """``where``: a manager, or the directory of one that is made with ``options``."""
        super().__init__()
        self.manager: SnapshotManager = opened(where, options)
        self.checkpoint = Checkpoint()
        self.of_rank = OfRank(self.checkpoint)
        self.manager.take({"checkpoint": self.checkpoint, "of_rank": self.of_rank}, with_position=True)
        self.random: dict[str, Any] | None = None
        """The generators as they were, after a load."""
        self.together = False
        """All processes load at once, and the same."""
        self._parts: Any = None
        """What they gave for the save that the first of them is about to make."""
        self._latest: State | None = None
        self._to_remove: list[str] = []

    @property
    def has_latest(self) -> bool:
        """Whether `latest` has found something that is to be loaded yet."""
        return self._latest is not None

    def latest(self) -> str | None:
        """The newest snapshot that is whole, for `fit(ckpt_path=…)`: its file in the repository. None if there is no snapshot.

        Damaged if there are some and none is whole.
        """
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            self._release_what_was_removed()
        self._latest = self.manager.load_latest_snapshot()
        return None if self._latest is None else self._path_of(self._latest.id)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Stored as a snapshot that is held until it is removed here; at ``path`` stands which one. TypeError names what cannot be
        stored."""
        if storage_options is not None:
            raise TypeError("there are no storage_options here")
        refuse_strategy(_strategy_that_calls())
        self._remove_what_waits()
        tag = f"checkpoint-{os.urandom(6).hex()}"
        parts, self._parts = self._parts, None
        self.checkpoint.given = checkpoint
        try:
            save = self.manager.save_handed(
                parts,
                epoch=checkpoint.get("epoch"),
                step=checkpoint.get("global_step"),
                tags=(tag,),
                hold=_HOLD + os.path.abspath(path),
            )
        finally:
            self.checkpoint.forget()
        if save is None:
            return  # said in the log; a training does not end for it
        os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
        with open(f"{os.fspath(path)}.part", "w") as file:
            json.dump({_MARK: tag, "repository": str(self.manager.save_dir)}, file)
        os.replace(f"{os.fspath(path)}.part", path)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Of a snapshot, checked, on the CPU; ``map_location`` and ``weights_only`` are for files that are none."""
        find = self._finder(path)
        if find is None:
            own: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)  # type: ignore[misc]
            return own
        state = self.manager.load_to_resume(find) if self.together else find()
        assert state is not None
        self.manager.goes_on_from(state)
        self.random = state["random_state"]
        of_rank = state["of_rank_state_dict"]
        found: dict[str, Any] = {**state["checkpoint_state_dict"], _LOOPS: of_rank[_LOOPS]}
        for name, buffer in of_rank["buffers"].items():
            if name in found["state_dict"]:
                found["state_dict"][name] = buffer
        return found

    def hand_over(self, checkpoint: dict[str, Any]) -> None:
        """On every process: the first of them is about to save this."""
        self.checkpoint.given = checkpoint
        try:
            self._parts = self.manager.hand_over()
        finally:
            self.checkpoint.forget()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """The snapshot goes when all that was saved after it is durable."""
        tag = _pointed_to(path)
        if tag is None:
            super().remove_checkpoint(path)  # type: ignore[misc]
            return
        os.unlink(path)
        self._to_remove.append(tag)
        self._remove_what_waits()

    def teardown(self) -> None:
        """What was staged is durable when the Trainer is done."""
        self.manager.wait()
        self._remove_what_waits()
        super().teardown()  # type: ignore[misc]

    # -- inside

    def _finder(self, path: str | os.PathLike[str]) -> Callable[[], State] | None:
        """What reads the snapshot at ``path``; None if there is another kind of file. The same on all processes."""
        latest, self._latest = self._latest, None
        if latest is not None and os.fspath(path) == self._path_of(latest.id):
            return lambda: latest
        if os.path.dirname(os.path.abspath(path)) == os.path.dirname(self._path_of("x")):
            return lambda: self.manager.load_snapshot(os.path.basename(path))
        tag = _pointed_to(path)
        return None if tag is None else lambda: self._tagged(tag)

    def _path_of(self, id_: str) -> str:
        return os.path.join(self.manager.save_dir, "snapshots", id_)

    def _ids(self, tag: str) -> list[str]:
        with Repository.open(self.manager.save_dir) as repository:
            return [info.id for info in repository.snapshots.list() if tag in info.tags]

    def _tagged(self, tag: str) -> State:
        self.manager.wait()
        ids = self._ids(tag)
        if ids:
            return self.manager.load_snapshot(ids[0])
        log.warning("ciuic: the snapshot of this checkpoint was never stored; the newest good one is taken")
        state = self.manager.load_latest_snapshot()
        if state is None:
            raise FileNotFoundError(f"there is no snapshot in {self.manager.save_dir}")
        return state

    def _release_what_was_removed(self) -> None:
        """By a run that was killed before the snapshot could follow its file; from now on it is like others."""
        with Repository.open(self.manager.save_dir) as repository:
            held = [
                info
                for info in repository.snapshots.list()
                if info.held and info.hold_reason.startswith(_HOLD)
            ]
        for info in held:
            path = info.hold_reason.removeprefix(_HOLD)
            if os.path.isdir(os.path.dirname(path)) and _pointed_to(path) not in info.tags:
                self.manager.release(info.id)

    def _remove_what_waits(self) -> None:
        if not self._to_remove or not self.manager.wait(0):
            return
        tags, self._to_remove = self._to_remove, []
        try:
            ids = [SnapshotId(id_) for tag in tags for id_ in self._ids(tag)]
            with (
                Repository.open(self.manager.save_dir) as repository,
                repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="remove checkpoint") as writer,
            ):
                writer.remove_snapshots(ids)
        except (CiuicError, OSError) as error:
            log.error("ciuic: checkpoints could not be removed: %s", error)


class Saves:
    """The callback: saves by the manager's policy, at the ends of steps and epochs, and the end of the training."""

    def __init__(self, io: InStore) -> None:
        super().__init__()
        self.io = io
        self._checked_step = 0
        self._first_step = 0
        self._dumping = False
        """For a snapshot of ours."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """ValueError where the Trainer would load from somewhere else; NotImplementedError where the state is in parts."""
        refuse_strategy(trainer.strategy)
        if trainer.strategy.checkpoint_io is not self.io:
            raise ValueError(
                "the Trainer needs the same SnapshotCheckpointIO: Trainer(plugins=[io], callbacks=[SnapshotCallback(io)])"
            )
        self.io.checkpoint.dump = lambda: self._dump(trainer)
        if stage == "fit" and trainer.world_size > 1:
            self._check_latest(trainer)
            self.io.manager.join_ranks(prepare=False)  # a dump calls hooks, which may be collective
            self.io.of_rank.model, self.io.together = pl_module, True

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """The Trainer's own checkpoint, which the first process alone stores: on all of them."""
        if not self._dumping and trainer.world_size > 1:
            self.io.hand_over(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Before the first batch is fetched: the generators as they were."""
        refuse_sharded(pl_module)
        self.io.together = False
        self._first_step = self._checked_step = trainer.global_step
        found, self.io.random = self.io.random, None
        for problem in randomness.restore(found) if found is not None else ():
            log.warning("ciuic: not resumed exactly: %s", problem)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """After a step of the optimizer. What ends an epoch is saved after its validation."""
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._between_steps(trainer)

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """After validation; other callbacks have had their turn."""
        self.io.manager.report(_numbers(trainer.callback_metrics))
        self._between_steps(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """The end is a state like others."""
        if trainer.global_step > self._first_step:
            self._at(trainer)
            self._asked_of_manager(self.io.manager.save_snapshot)
        self.io.manager.wait()

    def _between_steps(self, trainer: Any) -> None:
        if trainer.global_step != self._checked_step:
            self._at(trainer)
            self._asked_of_manager(self.io.manager.boundary)

    def _asked_of_manager(self, save: Callable[[], object]) -> None:
        try:
            save()
        finally:
            self.io.checkpoint.forget()

    def _dump(self, trainer: Any) -> dict[str, Any]:
        self._dumping = True
        try:
            dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            return dumped
        finally:
            self._dumping = False

    def _check_latest(self, trainer: Any) -> None:
        """RuntimeError if `latest` found nothing in the first process and something here, or the other way round."""
        here = self.io.has_latest
        if trainer.strategy.broadcast(here) != here:
            raise RuntimeError(
                "the processes did not find the same snapshots: the last run was still storing one; start again"
            )

    def _at(self, trainer: Any) -> None:
        self._checked_step = self.io.manager.step = trainer.global_step
        self.io.manager.epoch = trainer.current_epoch


def resumable(loader: Any) -> Any:
    """The same loader with a `state_dict`, which the Trainer saves and loads: so that a run resumed within an epoch goes on behind the last
    batch, in the same order. For a loader that has none of its own (a StatefulDataLoader has)."""
    position = Position(loader)

    def state_dict(self: Any) -> dict[str, Any]:
        state = position.state_dict()
        return state if state["batches"] < len(self) else {**state, "at_begin": None}  # the pass is over

    own: Any = type(loader)  # of this one loader, since its position is counted
    own.state_dict = state_dict
    own.load_state_dict = lambda self, state: position.load_state_dict(state)
    return loader


def _pointed_to(path: str | os.PathLike[str]) -> str | None:
    """The tag in a file that `save_checkpoint` wrote; None for any other."""
    try:
        if os.path.getsize(path) > _LONGEST_POINTER:
            return None
        with open(path, "rb") as file:
            return str(json.loads(file.read())[_MARK])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _strategy_that_calls() -> Any:
    """The Trainer's, which calls `save_checkpoint`: a plugin is told of no other way which one it serves."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if hasattr(caller, "checkpoint_io") and hasattr(caller, "is_global_zero"):
            return caller
        frame = frame.f_back
    return None


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}
