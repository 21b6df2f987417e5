"""Keras 3: `model.fit` that is saved through a `SnapshotManager` and goes on by itself, like `keras.callbacks.BackupAndRestore`.

    callback = SnapshotCallback("./snapshots", save_freq=100)
    model.fit(dataset, epochs=10, callbacks=[callback])

Guarantees: weights, optimizer, metrics of the epoch under way and the seed generators of the layers come back; `fit` begins with the epoch
that was under way, and passes by the batches of it that were trained on already, which are read and not computed. So where the data come in
the same order in a new process (arrays after `keras.utils.set_random_seed`, a `PyDataset` whose order follows from the epoch) the run is the
same to the bit. A damaged snapshot is passed over for the one before it.

With the backends TensorFlow, JAX and torch. Not repeated: what is drawn without a seed generator (`tf.random.…` in a layer of one's own).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import keras

from ciuic.integrations.opening import Where, opened
from ciuic.training import randomness
from ciuic.training.manager import SnapshotManager
from ciuic.training.outcome import State

log = logging.getLogger("ciuic")


class SnapshotCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Saves by ``save_freq`` and the manager's own policy, and resumes when `fit` begins."""

    def __init__(
        self,
        where: Where = "./snapshots",
        save_freq: str | int | None = "epoch",
        double_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        """``where``: a manager, or the directory of one that is made with ``options``.

        ``save_freq``: ``epoch``, a number of batches, or None for the policy of the manager (``interval``, ``every_steps``) alone.
        ``double_checkpoint``: of a manager that is made here, the snapshot before the newest stays as well (``max_snapshots``).
        """
        super().__init__()
        if save_freq not in ("epoch", None) and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f"save_freq is 'epoch', a number of batches or None, not {save_freq!r}")
        if not isinstance(where, SnapshotManager):
            options.setdefault("max_snapshots", 2 if double_checkpoint else 1)
        self.manager: SnapshotManager = opened(where, options)
        self.save_freq = save_freq
        self._epoch = 0
        """Under way."""
        self._batches = 0
        """Done of it."""
        self._since_save = 0
        self._to_skip = 0
        self._at_begin: dict[str, Any] = {}
        """Random generators when the epoch began."""

    # -- Keras' hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Puts the newest good snapshot back, if there is one. Damaged if there are some and none is whole."""
        model, optimizer = self.model, self.model.optimizer
        if not model.built:
            raise ValueError("the model is not built: build it, or call it on a batch of data, before fit()")
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        objects = {"model": model, "progress": _Progress(self)}
        if optimizer is not None:
            objects["optimizer"] = optimizer
        self._epoch, self._batches, self._since_save, self._to_skip = 0, 0, 0, 0
        self.manager.take(objects, with_position=True)
        state = self.manager.load_latest_snapshot()
        if state is not None:
            self._resume(state)

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The position begins anew, unless it was put back; then the data come in the order that they had."""
        self._epoch = epoch
        if self._to_skip:
            randomness.restore(self._at_begin)
        else:
            self._batches, self._at_begin = 0, randomness.state()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Saves if that is due."""
        if self._to_skip:
            self._to_skip -= 1
            return
        done = batch + 1 - self._batches
        self._batches = batch + 1
        self._since_save += done
        self.manager.step += done
        if isinstance(self.save_freq, int) and self._since_save >= self.save_freq:
            self._save(logs)
        else:
            self.manager.boundary()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """The next epoch is the one to begin with."""
        self._epoch, self._batches = epoch + 1, 0
        self.manager.epoch = self._epoch
        self.manager.report(_numbers(logs))
        if self.save_freq == "epoch":
            self._save(logs)
        else:
            self.manager.boundary()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """The end is saved as well, and is durable when `fit` returns."""
        if self._since_save:
            self._save(logs)
        self.manager.wait()

    # -- inside

    def _save(self, logs: dict[str, Any] | None) -> None:
        self._since_save = 0
        self.manager.epoch = self._epoch
        self.manager.save_snapshot(metrics=_numbers(logs))

    def _resume(self, state: State) -> None:
        model = self.model
        model.set_weights(state["model_state_dict"])
        if model.optimizer is not None:
            _assign(model.optimizer.variables, state["optimizer_state_dict"], "the optimizer")
        progress = state["progress_state_dict"]
        _assign(_seeds(model), progress["seeds"], "the seed generators")
        for problem in randomness.restore(state["random_state"]):
            log.warning("ciuic: not resumed exactly: %s", problem)
        self.manager.goes_on_from(state)
        self.manager.step = progress["step"]
        self._since_save = progress["since_save"]
        model._initial_epoch = self._epoch = progress["epoch"]  # as BackupAndRestore does
        log.info("ciuic: fit goes on from %s, epoch %d, batch %d", state.id, self._epoch, progress["batches"])
        if progress["batches"]:
            self._batches = progress["batches"]
            self._at_begin = progress["at_begin"]
            self._to_skip = _skip(model, self._batches, progress["metrics"], state["random_state"])


class _Progress:
    """Where the run is, and what neither weights nor optimizer hold."""

    def __init__(self, callback: SnapshotCallback) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        callback = self._callback
        return {
            "epoch": callback._epoch,
            "batches": callback._batches,
            "since_save": callback._since_save,
            "at_begin": callback._at_begin if callback._batches else {},
            "step": callback.manager.step,
            "seeds": [variable.numpy() for variable in _seeds(callback.model)],
            "metrics": [variable.numpy() for variable in callback.model.metrics_variables],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError("fit() itself goes on from a snapshot")


def _skip(model: Any, batches: int, metrics: Sequence[Any], random: dict[str, Any]) -> int:
    """Makes the next ``batches`` be passed by; ``metrics`` of the epoch and generators are those after the last of them. Returns in how many
    calls that is."""
    per_call = int(getattr(model, "steps_per_execution", 1) or 1)
    calls = left = -(-batches // per_call)
    own = model.train_function
    backend = keras.backend.backend()

    def is_last() -> bool:
        nonlocal left
        left -= 1
        if not left:
            model.train_function = own
            randomness.restore(random)
        return not left

    def pass_by(*given: Any) -> Any:
        data = given[-1]
        batch = data[-1] if backend == "torch" else [next(data) for _ in range(per_call)][-1]
        last = is_last()
        if backend == "jax":  # where the state is handed from step to step
            metrics_now = [keras.ops.convert_to_tensor(value) for value in metrics]
            return {}, (*given[0][:-1], metrics_now) if last else given[0]
        if last:
            _put_metrics(model, batch, metrics)
        return {}

    model.train_function = pass_by
    return calls


def _put_metrics(model: Any, batch: Any, saved: Sequence[Any]) -> None:
    """Of the epoch under way, so that its logs are those of all its batches. They are made by the first batch that they see."""
    if len(model.metrics_variables) != len(saved):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model.compute_metrics(x, y, model(x, training=False), sample_weight)
    _assign(model.metrics_variables, saved, "the metrics")


def _seeds(model: Any) -> list[Any]:
    """States of the seed generators in the layers: all variables but the weights."""
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def _assign(variables: Sequence[Any], saved: Sequence[Any], what: str) -> None:
    if len(variables) != len(saved):
        raise ValueError(
            f"{what}: {len(variables)} variables, and {len(saved)} were saved; is it the same model?"
        )
    for variable, value in zip(variables, saved, strict=True):
        variable.assign(value)


def _numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    return {key: float(value) for key, value in (logs or {}).items()}
