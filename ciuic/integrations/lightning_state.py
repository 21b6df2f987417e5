"""States of a Lightning Trainer as objects that a manager saves, among them the values that it has logged in an epoch so far.

Lightning's own checkpoints have none of these values: after a resume within an epoch `self.log(…, on_epoch=True)` would
average over the batches since the resume only, and early stopping, ReduceLROnPlateau and ModelCheckpoint
would decide by that.

Guarantees: the value of each key at the end of the epoch is the one of the uninterrupted run, to the bit,
because the sums continue in the same order. Reads private attributes of Lightning (`_results` of the loop,
`_logger_connector`); where a version has none of them, nothing is continued, and a warning says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any, Final

from ciuic.training.convert.export_state import LOOPS
from ciuic.training.logs import log
from ciuic.training.state import rank_state

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
        """Return the loops, what was logged, and the small buffers."""
        buffers = {} if self.model is None else rank_state.small_buffers(self.model)
        logged = {} if self.trainer is None else _results_state(self.trainer, self.continued.pending)
        return {LOOPS: self._checkpoint.whole().get(LOOPS, {}), "buffers": buffers, RESULTS: logged}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to load: the Trainer loads by itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("resume with trainer.fit(ckpt_path=…)")
