"""Keras 3: save `model.fit` through a `SnapshotManager` and resume it.

It works like `keras.callbacks.BackupAndRestore`.

    callback = SnapshotCallback("./snapshots", save_freq=100)
    model.fit(dataset, epochs=10, callbacks=[callback])

Guarantees: weights, optimizer, metrics of the current epoch and the seed generators of the layers are
restored; `fit` begins with the epoch that was interrupted, and skips the batches of it that were trained on,
which are read and not computed. So where the data come in the same order in a new process (arrays after
`keras.utils.set_random_seed`, a `PyDataset` whose order follows from the epoch) the run is the same to the
bit. A damaged snapshot is passed over for the one before it.

Keras resets the other callbacks when `fit` begins, so that after a resume EarlyStopping and ReduceLROnPlateau would
count anew, and `History` would lack the epochs before. So the attributes named in `_ATTRIBUTES` are saved and restored,
by class and by place among the callbacks of that class. Callbacks of other classes are left as they are.

Backends: TensorFlow, JAX and torch. Not repeated: what is drawn without a seed generator (`tf.random.…` in a
layer of one's own).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any, Final

import keras

from ciuic.integrations.preconditions import ManagerOrDir, open_manager
from ciuic.training.logs import log
from ciuic.training.manager import SnapshotManager
from ciuic.training.results import State
from ciuic.training.state import stateful


class SnapshotCallback(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Save by ``save_freq`` and the manager's own policy, and resume when `fit` begins."""

    def __init__(
        self,
        where: ManagerOrDir = "./snapshots",
        save_freq: str | int | None = "epoch",
        double_checkpoint: bool = True,
        **options: Any,
    ) -> None:
        """Open the manager.

        Args:
            where: a manager, or the directory of one that is opened with ``options``.
            save_freq: ``epoch``, a number of batches, or None for the manager's policy (``interval``,
                ``every_steps``) alone.
            double_checkpoint: keep the snapshot before the newest as well (``max_snapshots``), if the manager
                is opened here.
            options: arguments of `SnapshotManager`.

        Raises:
            ValueError: ``save_freq`` is something else.
        """
        super().__init__()
        if save_freq not in ("epoch", None) and not (isinstance(save_freq, int) and save_freq > 0):
            raise ValueError(f"save_freq must be 'epoch', a number of batches or None, got {save_freq!r}")
        if not isinstance(where, SnapshotManager):
            # As many as BackupAndRestore keeps.
            options.setdefault("max_snapshots", 2 if double_checkpoint else 1)
        self.manager: SnapshotManager = open_manager(where, options)
        self.save_freq = save_freq
        self._epoch = 0
        """Current epoch."""
        self._batches = 0
        """Batches of the current epoch that are done."""
        self._since_save = 0
        self._to_skip = 0
        self._at_begin: dict[str, Any] = {}
        """Random generators when the epoch began."""
        self._others = _OtherCallbacks([])
        self._resumed_optimizer: Sequence[Any] = ()
        """Optimizer in the middle of the epoch that is resumed."""
        self._stops = False
        """True if a callback had stopped the run in the middle of the epoch that is resumed."""
        self._first_step = 0
        """Step at which this `fit` began."""

    # -- Keras' hooks

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Load the newest good snapshot, if there is one.

        Raises:
            Damaged: there are snapshots, and none is whole.
            ValueError: the model is not built.
        """
        model, optimizer = self.model, self.model.optimizer
        # Before fit() has built it, the model has no variables to restore.
        if not model.built:
            raise ValueError("the model is not built: build it, or call it on a batch of data, before fit()")
        if optimizer is not None and not optimizer.built:
            optimizer.build(model.trainable_variables)
        objects = {"model": model, "progress": _Progress(self)}
        if optimizer is not None:
            objects["optimizer"] = optimizer
        self._epoch, self._batches, self._since_save, self._to_skip = 0, 0, 0, 0
        self._others, self._resumed_optimizer, self._stops = _other_callbacks(self), (), False
        # Not `register`: Keras optimizers have no hooks that could be watched.
        self.manager.framework.set_objects(objects, with_position=True)
        state = self.manager.load_latest_snapshot()
        if state is not None:
            self._resume(state)
        self._first_step = self.manager.step

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Reset the position, or prepare the resumed epoch.

        The random generators of a resumed epoch are restored, so that the data come in the same order.
        """
        self._epoch = epoch
        self._others.load()
        if self._to_skip:
            stateful.restore_random_states(self._at_begin)
            # Set again: a schedule of epochs has changed the learning rate, as it did when the epoch began.
            if self._resumed_optimizer:
                _assign(self.model.optimizer.variables, self._resumed_optimizer, "the optimizer")
        else:
            self._batches, self._at_begin = 0, stateful.random_states()

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Save if due."""
        if self._to_skip:
            # Batches that are skipped are part of the resumed state already.
            self._to_skip -= 1
            if not self._to_skip:
                self.model.stop_training |= self._stops
            return
        # With `steps_per_execution` Keras calls this once for several batches.
        done = batch + 1 - self._batches
        self._batches = batch + 1
        self._since_save += done
        self.manager.step += done
        if isinstance(self.save_freq, int) and self._since_save >= self.save_freq:
            self._save(logs)
        else:
            self.manager.boundary()

    def on_test_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Tell that the training lives while it evaluates."""
        self.manager.framework.evaluates()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count the epoch as done, report its metrics, and save if due."""
        self._epoch, self._batches = epoch + 1, 0
        self.manager.epoch = self._epoch
        self.manager.report(_numbers(logs))
        if self.save_freq == "epoch":
            self._save(logs)
        else:
            self.manager.boundary()

    def on_train_end(self, logs: dict[str, Any] | None = None) -> None:
        """Save the final state and wait until it is durable."""
        self._others.end()
        has_other_weights = self._others.change_weights_at_end and self.manager.step > self._first_step
        if self._since_save or has_other_weights:
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
        for problem in stateful.restore_random_states(state["random_state"]):
            log.warning("ciuic: not resumed exactly: %s", problem)
        self.manager.framework.continue_from(state)
        self.manager.step = progress["step"]
        self._since_save = progress["since_save"]
        self._others.load_later(progress.get("callbacks", {}))
        model._initial_epoch = self._epoch = progress["epoch"]  # as BackupAndRestore does
        self._stops = progress.get("stops", False)
        if self._stops and not progress["batches"]:
            # The run was stopped early: nothing is left to do, as after the last epoch.
            model._initial_epoch = max(self.params["epochs"], self._epoch)
        log.info("ciuic: fit resumes from %s, epoch %d, batch %d", state.id, self._epoch, progress["batches"])
        if progress["batches"]:
            self._batches = progress["batches"]
            self._at_begin = progress["at_begin"]
            self._resumed_optimizer = state.get("optimizer_state_dict", ())
            self._to_skip = _skip(model, self._batches, progress["metrics"], state["random_state"])


class _Progress:
    """Progress of the run, and state that neither weights nor optimizer hold."""

    def __init__(self, callback: SnapshotCallback) -> None:
        self._callback = callback

    def state_dict(self) -> dict[str, Any]:
        """Return the progress."""
        callback = self._callback
        return {
            "epoch": callback._epoch,
            "batches": callback._batches,
            "since_save": callback._since_save,
            "at_begin": callback._at_begin if callback._batches else {},
            "step": callback.manager.step,
            "callbacks": callback._others.state(),
            "stops": bool(callback.model.stop_training),
            "seeds": [variable.numpy() for variable in _seeds(callback.model)],
            "metrics": [variable.numpy() for variable in callback.model.metrics_variables],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Refuse to load: `fit` resumes by itself.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError("fit() resumes by itself")


def _skip(model: Any, batches: int, metrics: Sequence[Any], random: dict[str, Any]) -> int:
    """Make `fit` skip the next batches.

    Args:
        model: the model; its train function is replaced until they are skipped.
        batches: number of batches.
        metrics: metrics of the epoch after the last of them.
        random: random generators after the last of them.

    Returns:
        The number of calls of the train function that are skipped.
    """
    per_call = int(getattr(model, "steps_per_execution", 1) or 1)
    # One call of the train function runs `steps_per_execution` batches.
    calls = left = -(-batches // per_call)
    own = model.train_function
    backend = keras.backend.backend()

    def is_last() -> bool:
        nonlocal left
        left -= 1
        if not left:
            model.train_function = own
            stateful.restore_random_states(random)
        return not left

    def pass_by(*given: Any) -> Any:
        data = given[-1]
        # With torch the train function gets the batches of one call, with TensorFlow and JAX an iterator.
        batch = data[-1] if backend == "torch" else [next(data) for _ in range(per_call)][-1]
        last = is_last()
        # JAX passes the state from call to call.
        if backend == "jax":
            if not last:
                return {}, given[0]
            metrics_now = [keras.ops.convert_to_tensor(value) for value in metrics]
            # Not assigned to the variables: while JAX trains, they have no values.
            with keras.StatelessScope(zip(model.metrics_variables, metrics_now, strict=True)):
                logs = model.get_metrics_result()
            return logs, (*given[0][:-1], metrics_now)
        if not last:
            return {}
        _put_metrics(model, batch, metrics)
        # If this was the last batch of the epoch, Keras takes the names in the logs of the epoch from here.
        return model.get_metrics_result()

    # In place of training, `fit` now only takes the batches from the data.
    model.train_function = pass_by
    return calls


def _put_metrics(model: Any, batch: Any, saved: Sequence[Any]) -> None:
    """Restore the metrics of the current epoch, so that its logs cover all batches."""
    # Metrics create their variables at the first batch, so that one is needed.
    if len(model.metrics_variables) != len(saved):
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(batch)
        model.compute_metrics(x, y, model(x, training=False), sample_weight)
    _assign(model.metrics_variables, saved, "the metrics")


def _seeds(model: Any) -> list[Any]:
    """Return the states of the seed generators in the layers: all variables but the weights."""
    # By identity: variables of Keras compare by value.
    weights = {id(variable) for variable in model.weights}
    return [variable for variable in model.variables if id(variable) not in weights]


def _assign(variables: Sequence[Any], saved: Sequence[Any], what: str) -> None:
    if len(variables) != len(saved):
        raise ValueError(
            f"{what}: expected {len(saved)} variables as saved, got {len(variables)}; is it the same model?"
        )
    for variable, value in zip(variables, saved, strict=True):
        variable.assign(value)


def _numbers(logs: dict[str, Any] | None) -> dict[str, float]:
    return {key: float(value) for key, value in (logs or {}).items()}


_ATTRIBUTES: Final[Mapping[str, tuple[str, ...]]] = {
    "EarlyStopping": ("wait", "best", "best_epoch", "best_weights", "stopped_epoch"),
    "ReduceLROnPlateau": ("wait", "best", "cooldown_counter"),
    "ModelCheckpoint": ("best",),
    "History": ("epoch", "history"),
}


class _OtherCallbacks:
    """The callbacks of a `fit` beside our own."""

    def __init__(self, callbacks: list[Any]) -> None:
        self._named: dict[str, Any] = {}
        for name in _ATTRIBUTES:
            known = [one for one in callbacks if isinstance(one, getattr(keras.callbacks, name))]
            self._named |= {f"{name}-{place}": one for place, one in enumerate(known)}
        self._loaded: dict[str, Any] = {}
        """State to restore when Keras has reset the callbacks."""

    @property
    def change_weights_at_end(self) -> bool:
        """True if one of them puts back the best weights when `fit` ends."""
        return any(
            getattr(one, "restore_best_weights", False) and one.best_weights is not None
            for one in self._named.values()
        )

    def state(self) -> dict[str, Any]:
        """Return the saved attributes by callback."""
        return {
            name: {key: getattr(one, key) for key in _attributes_of(name) if hasattr(one, key)}
            for name, one in self._named.items()
        }

    def load_later(self, state: dict[str, Any]) -> None:
        """Keep a state until `load`: Keras resets the callbacks behind us when `fit` begins."""
        self._loaded = state

    def load(self) -> None:
        """Restore the state that was kept, once."""
        loaded, self._loaded = self._loaded, {}
        for name, values in loaded.items():
            for key in _attributes_of(name):
                if name in self._named and key in values:
                    setattr(self._named[name], key, values[key])

    def end(self) -> None:
        """Restore the state at the end of a `fit` that had nothing left to do."""
        if not self._loaded:
            return
        self.load()
        for name, callback in self._named.items():
            if name.startswith("EarlyStopping"):
                # It was told of the end before it had its state, which may have the best weights.
                callback.on_train_end()


def _other_callbacks(own: Any) -> _OtherCallbacks:
    """Return the other callbacks of the `fit` that has just begun, and have ``own`` called after them.

    A snapshot at the end of an epoch has what they did there, such as a reduced learning rate.
    """
    # Keras does not tell a callback of the others, but their list is calling it.
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if isinstance(caller, keras.callbacks.CallbackList) and any(one is own for one in caller.callbacks):
            others = [one for one in caller.callbacks if one is not own]
            # A new list: Keras iterates over the old one at this moment.
            caller.callbacks = [*others, own]
            return _OtherCallbacks(others)
        frame = frame.f_back
    log.warning("ciuic: no list of callbacks was found: their states are not saved")
    return _OtherCallbacks([])


def _attributes_of(name: str) -> tuple[str, ...]:
    return _ATTRIBUTES.get(name.partition("-")[0], ())
