"""`CheckpointIO` and callback of `lightning` and `pytorch_lightning`, one package under two names.

While a training runs, the file at a checkpoint's path is a pointer to its snapshot (`checkpoint_pointer`). At the end of
`fit` the chosen ones are replaced by the checkpoint itself, which torch and Lightning open without ciuic: a file of
torch.save, with the pointer as an extra member of the archive. Guarantees: at any moment the path has the whole pointer
or the whole checkpoint; a checkpoint that cannot be written stays a pointer, which is logged. A snapshot is held as long
as Lightning keeps its checkpoint, and removed with it.

A `CheckpointIO` is told neither strategy nor Trainer; Lightning calls it through both, so they are found in the call
stack. In a thread, as of `AsyncCheckpointIO`, none is found.

The states of a Trainer are objects that a manager saves, among them the values that it has logged in an epoch so far.
Lightning's own checkpoints have none of these values: after a resume within an epoch `self.log(…, on_epoch=True)` would
average over the batches since the resume only, and early stopping, ReduceLROnPlateau and ModelCheckpoint
would decide by that.
The value of each key at the end of the epoch is the one of the uninterrupted run, to the bit,
because the sums continue in the same order. Reads private attributes of Lightning (`_results` of the loop,
`_logger_connector`); where a version has none of them, nothing is continued, and a warning says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, Final

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.integrations.checkpoint_pointer import (
    Pointer,
    encode_pointer,
    load_pointed,
    read_pointer,
    write_pointer,
)
from ciuic.integrations.loggers import track_lightning_loggers
from ciuic.integrations.preconditions import (
    ManagerOrDir,
    open_manager,
    refuse_remote,
    refuse_sharded,
    refuse_strategy,
)
from ciuic.repository import Repository
from ciuic.system.disk import remove_leftovers
from ciuic.training.convert.export_state import LOOPS, lightning_checkpoint
from ciuic.training.convert.exporting import write_torch
from ciuic.training.logs import log, quietly
from ciuic.training.manager import SnapshotManager
from ciuic.training.results import State
from ciuic.training.state import rank_state, stateful
from ciuic.training.state.data_position import Position
from ciuic.types import SnapshotId

_CONNECTOR_METRICS: Final = ("_callback_metrics", "_logged_metrics", "_progress_bar_metrics")
"""Newest value of each key, as callbacks see it."""
_OPTIONS: Final = (
    *("prog_bar", "logger", "on_step", "on_epoch", "add_dataloader_idx"),
    *("sync_dist", "rank_zero_only"),
)
"""Arguments of `log` that an entry keeps."""


def _results_state(trainer: Any, pending: Mapping[str, Any]) -> dict[str, Any]:
    """Return what was logged, as plain values and tensors: this process's own.

    Args:
        trainer: Trainer that fits.
        pending: sums of before a resume that the Trainer has not got back yet (`ContinuedResults.pending`).
    """
    try:
        connector, results = trainer._logger_connector, trainer.fit_loop.epoch_loop._results
        latest = {name: dict(getattr(connector, name)) for name in _CONNECTOR_METRICS}
        # At the end of an epoch everything was computed, and the next epoch begins anew.
        if trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            progress = trainer.fit_loop.epoch_progress.current
            # Callbacks save in `on_train_epoch_end`, and Lightning steps ReduceLROnPlateau after that.
            return {
                "latest": latest,
                "sums": {},
                "metrics": {},
                "plateau": progress.processed > progress.completed,
            }
        # A key that is logged in the first batches only stays pending to the end of the epoch. Without it here
        # a second resume in the same epoch would lose it.
        sums = dict(pending)
        sums |= {key: _sum_of(item) for key, item in results.items() if item.is_tensor and not item.has_reset}
        metrics = {path: _metric_state(one) for path, one in _metrics_of(trainer.lightning_module)}
    except AttributeError as error:
        log.warning("ciuic: a resume would not continue what was logged in the epoch: %s", error)
        return {}
    return {"latest": latest, "sums": sums, "metrics": metrics}


class ContinuedResults:
    """Values that were logged before a resume, until the resumed epoch has taken them."""

    def __init__(self, state: dict[str, Any]) -> None:
        """Take the state that `_results_state` returned."""
        self._state = state
        self._sums: dict[str, dict[str, Any]] = dict(state.get("sums", {}))
        self._made: list[str] = []

    @property
    def pending(self) -> Mapping[str, Any]:
        """Sums of the keys that were logged before the resume and not since."""
        return self._sums

    def start(self, trainer: Any) -> None:
        """Restore the newest values and the metrics of the model, before the first batch."""
        for name, values in self._state.get("latest", {}).items():
            getattr(trainer._logger_connector, name).update(values)
        kept = self._state.get("metrics", {})
        for path, metric in _metrics_of(trainer.lightning_module):
            if path in kept:
                _load_metric(metric, kept[path])
        if self._state.get("plateau"):
            trainer.fit_loop.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)

    def epoch_ends(self, trainer: Any) -> None:
        """Let Lightning step ReduceLROnPlateau at the end of a resumed epoch.

        It does not otherwise: to its knowledge the values of that epoch are not whole.
        """
        if self._state.get("sums") or self._state.get("metrics"):
            trainer.fit_loop._restarting = False

    def epoch_starts(self, trainer: Any) -> None:
        """Remove the entries that were made here: the next `log` of a key makes its own."""
        for key in self._made:
            trainer.fit_loop.epoch_loop._results.pop(key, None)
        self._made.clear()

    def batch_ended(self, trainer: Any) -> None:
        """Add the sums of the keys that were logged since; after the last batch those of the others."""
        if not self._sums:
            return
        results = trainer.fit_loop.epoch_loop._results
        # A key has an entry only from its first `log` on, which also says how it is reduced.
        for key in [key for key in self._sums if key in results]:
            _add(results[key], self._sums.pop(key))
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            return
        for kept in self._sums.values():
            if kept["on_epoch"]:
                self._made += _log_anew(trainer, results, kept)
        self._sums.clear()


def _sum_of(item: Any) -> dict[str, Any]:
    meta = item.meta
    kept = {
        "value": item.value.detach().clone(),
        "fx": meta.fx,
        "name": meta.name,
        "reduce_fx": getattr(meta.reduce_fx, "__name__", ""),
        "sync_dist": meta.sync.should,
        "rank_zero_only": meta.sync.rank_zero_only,
        "count": None,
    }
    kept |= {name: getattr(meta, name) for name in _OPTIONS if name not in kept}
    if meta.is_mean_reduction:
        kept["count"] = item.cumulated_batch_size.detach().clone()
    return kept


def _add(item: Any, kept: dict[str, Any]) -> None:
    """Put what was logged before the resume in front of what was logged since."""
    if not item.is_tensor or not item.meta.on_epoch:
        return
    value = kept["value"].to(item.value.device)
    if item.meta.is_max_reduction or item.meta.is_min_reduction:
        item.value = item.meta.reduce_fx(value, item.value)
    else:
        # In this order: only one batch was added since, so that the sum has the bits of the whole run's.
        item.value = value + item.value
    if kept["count"] is not None:
        item.cumulated_batch_size = kept["count"].to(item.value.device) + item.cumulated_batch_size
    item._computed = None


def _log_anew(trainer: Any, results: Any, kept: dict[str, Any]) -> set[str]:
    """Make an entry for a key that was logged before the resume and not since; return its name."""
    before = set(results)
    results.log(
        kept["fx"],
        kept["name"],
        kept["value"],
        reduce_fx=kept["reduce_fx"],
        sync_dist_fn=trainer.strategy.reduce,
        batch_size=1,
        **{name: kept[name] for name in _OPTIONS},
    )
    made = set(results) - before
    for key in made:
        item = results[key]
        item.value = kept["value"].to(item.value.device)
        if kept["count"] is not None:
            item.cumulated_batch_size = kept["count"].to(item.value.device)
        item._computed = None
    return made


def _metrics_of(module: Any) -> list[tuple[str, Any]]:
    """Return the torchmetrics of a model by path; their sums are in no state_dict by default."""
    torchmetrics = sys.modules.get("torchmetrics")
    if torchmetrics is None:
        return []
    return [(path, one) for path, one in module.named_modules() if isinstance(one, torchmetrics.Metric)]


def _metric_state(metric: Any) -> dict[str, Any]:
    return {
        "count": metric._update_count,
        "values": {name: _detached(getattr(metric, name)) for name in metric._defaults},
    }


def _load_metric(metric: Any, state: dict[str, Any]) -> None:
    metric._update_count, metric._computed = state["count"], None
    for name, value in state["values"].items():
        if name in metric._defaults:
            setattr(metric, name, _on_device(value, metric.device))


def _detached(value: Any) -> Any:
    """Return a copy, because a metric adds to its tensors in place."""
    if isinstance(value, (list, tuple)):
        return [_detached(one) for one in value]
    return value.detach().clone()


def _on_device(value: Any, device: Any) -> Any:
    if isinstance(value, list):
        return [_on_device(one, device) for one in value]
    return value.to(device)


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
        """Return the loops, what was logged, and the buffers."""
        buffers = {} if self.model is None else rank_state.own_buffers(self.model)
        logged = {} if self.trainer is None else _results_state(self.trainer, self.continued.pending)
        return {LOOPS: self._checkpoint.whole().get(LOOPS, {}), "buffers": buffers, RESULTS: logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to load: the Trainer loads by itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("resume with trainer.fit(ckpt_path=…)")


_AFTER_TEARDOWN: Final = ("on_fit_end", "teardown")
"""Hooks that the Trainer calls after the plugin's teardown, while its status still is that of a run."""


def calling_strategy() -> Any:
    """Return the strategy; None if there is none."""
    return _calling("checkpoint_io", "is_global_zero")


def _is_outside_run(trainer: Any) -> bool:
    """Return whether the Trainer will not tear its plugins down before it returns to the program.

    Args:
        trainer: The Trainer; None, if it is not known: False.
    """
    if trainer is None:
        return False
    if trainer.state.status != "running":
        return True
    # A private attribute of Lightning, without which such a checkpoint stays a pointer until the next teardown.
    return getattr(trainer.lightning_module, "_current_fx_name", None) in _AFTER_TEARDOWN


def _calling(*attributes: str) -> Any:
    """Return the innermost caller whose method is running and that has these attributes."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if all(hasattr(caller, name) for name in attributes):
            return caller
        frame = frame.f_back
    return None


_KINDS: Final = ("best", "last")


def parse_kinds(materialize: str) -> frozenset[str]:
    """Return which checkpoints are to become files.

    Args:
        materialize: ``all``, ``none``, or some of ``best`` and ``last``, separated by commas.

    Raises:
        ValueError: The option is anything else.
    """
    if materialize in ("all", "none"):
        return frozenset({"all", *_KINDS} if materialize == "all" else ())
    kinds = frozenset(one.strip() for one in materialize.split(","))
    if not kinds <= set(_KINDS):
        raise ValueError(f'materialize must be "all", "none" or of {", ".join(_KINDS)}, got {materialize!r}')
    return kinds


class _CheckpointFiles:
    """Checkpoints that a plugin has saved, and those of them that become files."""

    def __init__(self, save_dir: Path, materialize: str) -> None:
        """Begin with none; raises as `parse_kinds`.

        Args:
            save_dir: Repository of the plugin's manager.
            materialize: Which checkpoints are to become files.
        """
        self._save_dir = save_dir
        self._kinds = parse_kinds(materialize)
        self._written: list[str] = []

    def wrote(self, path: str | os.PathLike[str]) -> None:
        """Note a checkpoint that was saved; the newest is the last one."""
        self.removed(path)
        self._written.append(os.path.abspath(path))

    def removed(self, path: str | os.PathLike[str]) -> None:
        """Forget a checkpoint that Lightning has removed."""
        self._written = [one for one in self._written if one != os.path.abspath(path)]

    def write_chosen(self, trainer: Any) -> None:
        """Write the chosen checkpoints that are still pointers, each durably, and log what fails.

        Args:
            trainer: Lightning's Trainer, whose callbacks know the best and the last one; None: unknown.
        """
        # A symbolic link (save_last="link") keeps leading to its checkpoint.
        for path in dict.fromkeys(os.path.realpath(one) for one in self._chosen(trainer)):
            pointer = read_pointer(path)
            if pointer is not None and not pointer.is_whole:
                with quietly(
                    f"{path} stays a pointer to its snapshot, which `ciuic export` can write as a file"
                ):
                    _write_checkpoint(path, pointer, self._save_dir)

    def _chosen(self, trainer: Any) -> Iterator[str]:
        for callback in getattr(trainer, "checkpoint_callbacks", ()):
            if "best" in self._kinds:
                yield str(getattr(callback, "best_model_path", ""))
            if "last" in self._kinds:
                yield str(getattr(callback, "last_model_path", ""))
            if "all" in self._kinds:
                yield from map(str, getattr(callback, "best_k_models", ()))
        if "all" in self._kinds:
            yield from self._written
        elif "last" in self._kinds:
            # Without save_last no callback names it.
            yield from self._written[-1:]


def _write_checkpoint(path: str, pointer: Pointer, save_dir: Path) -> int:
    """Replace a pointer by the checkpoint, atomically and durably; return its size.

    Args:
        path: The pointer's file, no symbolic link.
        pointer: Its content.
        save_dir: Repository to look in where the one that the pointer names is not there.

    Raises:
        NotFound: The snapshot is not there.
        Damaged: It is not as it was saved.
        OSError: The file cannot be written; the pointer stays.
    """
    state = load_pointed(path, pointer, save_dir)
    checkpoint = lightning_checkpoint(state["checkpoint_state_dict"], state["of_rank_state_dict"])
    # Of a process that was killed while it wrote this checkpoint.
    remove_leftovers(path)
    return write_torch(Path(path), checkpoint, overwrite=True, record=encode_pointer(pointer))


_HOLD: Final = "checkpoint "
"""Beginning of a hold's reason; the path of the checkpoint follows."""
_LOCK_WAIT_SECONDS: Final = 60.0


def hold_reason(path: str | os.PathLike[str]) -> str:
    """Return the reason for which the snapshot of a checkpoint at this path is held."""
    return _HOLD + os.path.abspath(path)


def _is_lost(path: str, tags: Sequence[str]) -> bool:
    """Return whether the checkpoint with one of these tags is certainly no longer at this path."""
    # The hold stays where nothing tells that the checkpoint was removed: without the directory (not mounted
    # now?), and where a file is there that cannot be read as a checkpoint, perhaps because it is damaged.
    if not os.path.isdir(os.path.dirname(path)):
        return False
    pointer = read_pointer(path)
    return pointer.tag not in tags if pointer is not None else not os.path.lexists(path)


class _RemovedCheckpoints:
    """Checkpoints whose snapshots are to be removed, when it is safe to."""

    def __init__(self, manager: SnapshotManager) -> None:
        """Begin with none."""
        self._manager = manager
        self._tags: list[str] = []

    def add(self, tag: str) -> None:
        """Note that the snapshot with this tag is to be removed."""
        self._tags.append(tag)

    def release_lost(self) -> None:
        """Release the holds of checkpoints whose file is gone."""
        # A run that was killed removed the file and not the snapshot, to which retention rules apply now.
        with Repository.open(self._manager.save_dir) as repository:
            held = [
                info
                for info in repository.snapshots.list()
                if info.held and info.hold_reason.startswith(_HOLD)
            ]
        for info in held:
            path = info.hold_reason.removeprefix(_HOLD)
            if _is_lost(path, info.tags):
                self._manager.release(info.id)

    def remove(self) -> None:
        """Remove the snapshots of removed checkpoints, unless a save is pending."""
        # Lightning removes a checkpoint right after it has saved the next one, which may still fail.
        if not self._tags or not self._manager.wait(0):
            return
        tags, self._tags = self._tags, []
        try:
            ids = [SnapshotId(id_) for tag in tags for id_ in self._ids(tag)]
            with (
                Repository.open(self._manager.save_dir) as repository,
                repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="remove checkpoint") as writer,
            ):
                writer.remove_snapshots(ids)
        except (CiuicError, OSError) as error:
            # Logged only: a checkpoint that stays does not end a training.
            log.error("ciuic: checkpoints could not be removed: %s", error)

    def _ids(self, tag: str) -> list[str]:
        with Repository.open(self._manager.save_dir) as repository:
            return [info.id for info in repository.snapshots.list() if tag in info.tags]


# Private attributes of Lightning are read for that: a version that has changed them must not end a training.
_NOT_CONTINUED: Final = "values that were logged before the resume are not continued"


class SnapshotIOBase:
    """Implementation of `CheckpointIO` over a repository.

    It precedes the framework's TorchCheckpointIO among the bases, to which files that are no snapshots are
    left.
    """

    def __init__(
        self, where: ManagerOrDir = "./snapshots", *, materialize: str = "best,last", **options: Any
    ) -> None:
        """Open the manager.

        Args:
            where: a manager, or the directory of one that is opened with ``options``.
            materialize: which checkpoints are files that torch and Lightning open without ciuic when `fit`
                has ended: ``best,last``, one of these, ``all`` or ``none``. Until then, and for the others, the
                file names the snapshot, and this plugin loads it.
            options: arguments of `SnapshotManager`.

        Raises:
            ValueError: ``materialize`` is anything else.
        """
        super().__init__()
        parse_kinds(materialize)
        self.manager: SnapshotManager = open_manager(where, options)
        self.checkpoint = TrainerCheckpoint()
        self.of_rank = RankLocalState(self.checkpoint)
        # Not `register`: Lightning's hooks say when a step is over.
        self.manager.framework.set_objects(
            {"checkpoint": self.checkpoint, "of_rank": self.of_rank}, with_position=True
        )
        self.random: dict[str, Any] | None = None
        """Random generators of the loaded snapshot, until they are restored."""
        self.results: dict[str, Any] = {}
        """Values that the loaded snapshot's run had logged, until they are restored."""
        self.loads_together = False
        """True while all processes load at once, and the same snapshot."""
        self._parts: Any = None
        """States of all processes for the save that the first one is about to make."""
        self._latest: State | None = None
        self._finds_newest = False
        """True if `latest` was asked for the newest snapshot of all."""
        self._files = _CheckpointFiles(self.manager.save_dir, materialize)
        self._removed = _RemovedCheckpoints(self.manager)

    @property
    def has_latest(self) -> bool:
        """True if `latest` found a snapshot that was not loaded yet."""
        return self._latest is not None

    def latest(self, *, tracker_run: str | None = None) -> str | None:
        """Return the path of the newest whole snapshot, for `fit(ckpt_path=…)`; None if there is no snapshot.

        Args:
            tracker_run: Id of a run of MLflow, Weights & Biases or TensorBoard: only snapshots that were logged to it
                (docs/trackers.md).

        Raises:
            Damaged: there are snapshots, and none is whole.
            NotFound: none that was logged to ``tracker_run`` is left.
        """
        # Before the Trainer exists only the environment tells the first process.
        if os.environ.get("RANK", os.environ.get("LOCAL_RANK", "0")) == "0":
            self._removed.release_lost()
        self._finds_newest = tracker_run is None
        self._latest = (
            self.manager.load_latest_snapshot()
            if tracker_run is None
            else self.manager.load_snapshot(tracker_run=tracker_run)
        )
        return None if self._latest is None else self._path_of(self._latest.id)

    def save_checkpoint(
        self, checkpoint: dict[str, Any], path: str | os.PathLike[str], storage_options: Any | None = None
    ) -> None:
        """Store a checkpoint as a snapshot; the file at ``path`` names it until `teardown`.

        Outside of a run of the Trainer, as after `fit`, it is durable on return, and a file if ``materialize`` has
        ``last`` or ``all``. The snapshot is held until the checkpoint is removed, or saved again at the same path, through this
        object.

        Raises:
            TypeError: a value cannot be stored; the text names it.
            ValueError: ``path`` is a URL.
        """
        if storage_options is not None:
            raise TypeError(f"storage_options is not supported, got {storage_options!r}")
        refuse_remote(path)
        refuse_strategy(calling_strategy())
        self._removed.remove()
        tag = f"checkpoint-{os.urandom(6).hex()}"
        parts, self._parts = self._parts, None
        self.checkpoint.given = checkpoint
        try:
            save = self.manager.framework.save_gathered(
                parts,
                epoch=checkpoint.get("epoch"),
                step=checkpoint.get("global_step"),
                tags=(tag,),
                hold=hold_reason(path),
            )
        finally:
            self.checkpoint.forget()
        # No pointer is written then: a checkpoint without a snapshot could not be loaded.
        if save is None:
            return  # logged by the manager; a failed save does not end the training
        # A link's target is a checkpoint of its own.
        replaced = None if os.path.islink(path) else read_pointer(path)
        write_pointer(path, Pointer(tag, str(self.manager.save_dir)))
        self._files.wrote(path)
        if replaced is not None and self._is_own(replaced):
            self._removed.add(replaced.tag)
        if _is_outside_run(trainer := _calling("fit_loop", "strategy")):
            # No teardown follows that would write the file.
            self._finish(trainer)

    def load_checkpoint(
        self, path: str | os.PathLike[str], map_location: Any | None = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Return the checkpoint of a snapshot, verified, on the CPU.

        A file that names a snapshot of another repository is read from there. One that has the checkpoint itself
        is read where its snapshot is not there any more; random generators are not restored then.

        Args:
            path: file that `save_checkpoint` or `export` wrote, or path that `latest` returned.
            map_location: applies to files that are no snapshots.
            weights_only: applies to files that are no snapshots.

        Raises:
            NotFound: the snapshot was removed, or never stored; the message names those that are left.
        """
        finds_newest = self._finds_newest and self._latest is not None
        find = self._finder(path)
        if find is None:
            # A file of torch.save, for the framework's own plugin (the next base class).
            own: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)  # type: ignore[misc]
            return own
        try:
            state: State | None
            if not self.loads_together:
                state = find()
            elif finds_newest and not self.manager.framework.shares_directory:
                # Each process has looked on its own host: what all of them have is found together.
                state = self.manager.framework.load_state()
            else:
                state = self.manager.framework.load_state(find)
        except (NotFound, Damaged) as error:
            pointer = read_pointer(path)
            # The same on all processes: they see the same file, and what fails on one is raised on all.
            if pointer is None or not pointer.is_whole:
                raise
            log.warning("ciuic: %s is read instead of its snapshot: %s", os.fspath(path), error)
            whole: dict[str, Any] = super().load_checkpoint(path, map_location, weights_only)  # type: ignore[misc]
            return whole
        assert state is not None
        self.manager.framework.continue_from(state)
        self.random = state["random_state"]
        of_rank = state["of_rank_state_dict"]
        self.results = of_rank.get(RESULTS, {})
        found: dict[str, Any] = {**state["checkpoint_state_dict"], LOOPS: of_rank[LOOPS]}
        # The checkpoint has rank 0's buffers; each process gets its own.
        for name, buffer in of_rank["buffers"].items():
            if name in found["state_dict"]:
                found["state_dict"][name] = buffer
        return found

    def hand_over(self, checkpoint: dict[str, Any]) -> None:
        """Collect the states of all processes, on each of them, before the first one saves."""
        self.checkpoint.given = checkpoint
        try:
            self._parts = self.manager.framework.gather_states()
        finally:
            self.checkpoint.forget()

    def remove_checkpoint(self, path: str | os.PathLike[str]) -> None:
        """Remove the file now, and the snapshot when all that was saved after it is durable."""
        pointer = read_pointer(path)
        if pointer is None:
            super().remove_checkpoint(path)  # type: ignore[misc]
            return
        os.unlink(path)
        self._files.removed(path)
        if self._is_own(pointer):
            self._removed.add(pointer.tag)
        self._removed.remove()

    def teardown(self) -> None:
        """Wait until everything that was staged is durable, and write the chosen checkpoints as files."""
        strategy = calling_strategy()
        module = getattr(strategy, "lightning_module", None)
        self._finish(getattr(module, "_trainer", None), is_first=strategy is None or strategy.is_global_zero)
        super().teardown()  # type: ignore[misc]

    # -- inside

    def _finish(self, trainer: Any, *, is_first: bool = True) -> None:
        """Wait until everything is durable, and let the first process write the chosen checkpoints as files."""
        self.manager.wait()
        self._removed.remove()
        if is_first:
            self._files.write_chosen(trainer)

    def _finder(self, path: str | os.PathLike[str]) -> Callable[[], State] | None:
        """Return the function that reads the snapshot at ``path``; None for another kind of file.

        The result is the same on all processes.
        """
        latest, self._latest = self._latest, None
        if latest is not None and os.fspath(path) == self._path_of(latest.id):
            # Read and verified by `latest` already.
            return lambda: latest
        if os.path.dirname(os.path.abspath(path)) == os.path.dirname(self._path_of("x")):
            # A path that `latest` returned earlier, or in another process.
            return lambda: self.manager.load_snapshot(os.path.basename(path))
        pointer = read_pointer(path)
        return None if pointer is None else lambda: self._state_at(path, pointer)

    def _path_of(self, id_: str) -> str:
        return os.path.join(self.manager.save_dir, "snapshots", id_)

    def _is_own(self, pointer: Pointer) -> bool:
        return pointer.is_in(self.manager.save_dir)

    def _state_at(self, path: str | os.PathLike[str], pointer: Pointer) -> State:
        if self._is_own(pointer):
            # It may still be on its way to the disk.
            self.manager.wait()
        return load_pointed(path, pointer, self.manager.save_dir)


class SnapshotCallbackBase:
    """Implementation of the callback.

    It saves by the manager's policy after steps and epochs, and at the end of the training.
    """

    def __init__(self, io: SnapshotIOBase) -> None:
        super().__init__()
        self.io = io
        self._checked_step = 0
        self._first_step = 0
        self._continued = ContinuedResults({})
        self._dumping = False
        """True while the Trainer dumps a checkpoint for a snapshot of this callback."""

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Check the Trainer and meet the other processes.

        Raises:
            ValueError: the Trainer loads from another CheckpointIO.
            NotImplementedError: the state is sharded.
        """
        refuse_strategy(trainer.strategy)
        if trainer.strategy.checkpoint_io is not self.io:
            raise ValueError(
                "plugin and callback must share one SnapshotCheckpointIO: "
                "Trainer(plugins=[io], callbacks=[SnapshotCallback(io)])"
            )
        self.io.checkpoint.attach(lambda: self._dump(trainer))
        if stage == "fit" and trainer.world_size > 1:
            self._check_latest(trainer)
            # prepare=False: dumping a checkpoint calls hooks that may be collective.
            self.io.manager.framework.join_ranks(prepare=False)
            self.io.of_rank.model, self.io.loads_together = pl_module, True

    def on_save_checkpoint(self, trainer: Any, pl_module: Any, checkpoint: dict[str, Any]) -> None:
        """Collect the states of all processes for a checkpoint of the Trainer.

        Only the first process stores it.
        """
        if not self._dumping and trainer.world_size > 1:
            self.io.hand_over(checkpoint)

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Restore the random generators before the first batch is fetched."""
        refuse_sharded(pl_module)
        self.io.loads_together = False
        self._first_step = self._checked_step = trainer.global_step
        if trainer.is_global_zero:
            track_lightning_loggers(self.io.manager, trainer.loggers)
        self.io.of_rank.trainer = trainer
        self._continued, self.io.results = ContinuedResults(self.io.results), {}
        self.io.of_rank.continued = self._continued
        with quietly(_NOT_CONTINUED):
            self._continued.start(trainer)
        found, self.io.random = self.io.random, None
        for problem in stateful.restore_random_states(found) if found is not None else ():
            log.warning("ciuic: not resumed exactly: %s", problem)
        if found is not None and trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            # Resumed between two epochs: Lightning has begun the next pass already, with the generators of before.
            with quietly("the next epoch would not have the order of an undisturbed run"):
                iter(trainer.fit_loop._data_fetcher)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Let the epoch begin without what an earlier one had logged."""
        with quietly(_NOT_CONTINUED):
            self._continued.epoch_starts(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Save after an optimizer step if due.

        The last batch of an epoch is left to `on_train_epoch_end`, after validation.
        """
        with quietly(_NOT_CONTINUED):
            self._continued.batch_ended(trainer)
        if not trainer.fit_loop.epoch_loop.batch_progress.is_last_batch:
            self._between_steps(trainer)

    def on_validation_batch_end(self, *_: Any) -> None:
        """Tell that the training lives while it validates."""
        self.io.manager.framework.evaluates()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Save after validation if due; other callbacks have run by then."""
        with quietly(_NOT_CONTINUED):
            self._continued.epoch_ends(trainer)
        self.io.manager.report(_numbers(trainer.callback_metrics))
        self._between_steps(trainer)

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Save the final state."""
        if trainer.global_step > self._first_step:
            self._record_progress(trainer)
            self._save_and_forget(self.io.manager.save_snapshot)
        self.io.of_rank.trainer = None
        self.io.manager.wait()

    def _between_steps(self, trainer: Any) -> None:
        if trainer.global_step != self._checked_step:
            self._record_progress(trainer)
            self._save_and_forget(self.io.manager.boundary)

    def _save_and_forget(self, save: Callable[[], object]) -> None:
        try:
            save()
        finally:
            self.io.checkpoint.forget()

    def _dump(self, trainer: Any) -> dict[str, Any]:
        self._dumping = True
        try:
            # Private API of Lightning: the whole checkpoint, without writing a file.
            dumped: dict[str, Any] = trainer._checkpoint_connector.dump_checkpoint(weights_only=False)
            return dumped
        finally:
            self._dumping = False

    def _check_latest(self, trainer: Any) -> None:
        """Check that all processes found a snapshot, or none.

        Raises:
            RuntimeError: `latest` found one in some processes only.
        """
        here = self.io.has_latest
        # A load is collective: by some processes only it would wait for the others for ever.
        if trainer.strategy.broadcast(here) != here:
            raise RuntimeError(
                "some processes found a snapshot and some none: start again if the last run was still storing one; "
                "where hosts do not share save_dir, give SnapshotCheckpointIO a remote, in which each finds it"
            )

    def _record_progress(self, trainer: Any) -> None:
        self._checked_step = self.io.manager.step = trainer.global_step
        self.io.manager.epoch = trainer.current_epoch


def resumable(loader: Any) -> Any:
    """Give a loader a `state_dict`, which the Trainer saves and loads.

    A run resumed within an epoch then continues behind the last batch, in the same order. Not needed for a
    loader that has a state of its own, such as StatefulDataLoader.

    Returns:
        The same loader.
    """
    position = Position(loader)

    def state_dict(self: Any) -> dict[str, Any]:
        state = position.state_dict()
        # A finished pass is not begun again with its generators.
        return state if state["batches"] < len(self) else {**state, "at_begin": None}

    # Set on the class, which belongs to this loader alone once its position is counted.
    own: Any = type(loader)
    own.state_dict = state_dict
    own.load_state_dict = lambda self, state: position.load_state_dict(state)
    return loader


def _numbers(metrics: dict[str, Any]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}
