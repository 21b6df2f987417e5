"""Keras with a validation, ReduceLROnPlateau, EarlyStopping and a learning rate that falls with each epoch."""

from __future__ import annotations

from typing import Any, Final

import keras
import numpy
import tensorflow
from support.resumes.child import ResumedRun, generators

from ciuic.integrations.keras import SnapshotCallback

MODULES: Final = "tensorflow keras ciuic.integrations.keras"
WORLD: Final = 1
BY_DESIGN: Final[dict[str, str]] = {}
_BATCHES: Final = 10


class Report(keras.callbacks.Callback):  # type: ignore[misc, unused-ignore]
    """Callback that counts steps, and reports what `fit` passes to callbacks."""

    def __init__(self, run: ResumedRun) -> None:
        super().__init__()
        self._run = run
        self._epoch, self._is_skipped = 0, False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self._epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # After a resume batches that were trained on are read again.
        self._is_skipped = self.model.train_function.__name__ == "pass_by"

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if not self._is_skipped:
            self._run.report(f"batch {_BATCHES * self._epoch + batch}", logs)
            self._run.stepped()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        rate = numpy.asarray(self.model.optimizer.learning_rate)
        self._run.report(f"epoch {epoch}", {**logs, "rate": rate})


def train(run: ResumedRun) -> None:
    """Train until the loss of the validation no longer falls."""
    tensorflow.config.threading.set_intra_op_parallelism_threads(1)
    tensorflow.config.threading.set_inter_op_parallelism_threads(1)
    keras.utils.set_random_seed(1)
    x = numpy.random.default_rng(2).random((8 * _BATCHES, 8), "float32")
    y = (x.sum(axis=1) > 4).astype("float32")
    model = keras.Sequential(
        [
            keras.Input((8,)),
            keras.layers.Dense(32, activation="relu"),
            keras.layers.BatchNormalization(),
            keras.layers.Dropout(0.3),
            keras.layers.Dense(1, activation="sigmoid"),
        ]
    )
    model.compile(keras.optimizers.Adam(2e-2), loss="binary_crossentropy", metrics=["accuracy"])
    plateau = keras.callbacks.ReduceLROnPlateau("loss", factor=0.5, patience=1, min_delta=0.05)
    stopping = keras.callbacks.EarlyStopping("loss", patience=3, min_delta=0.05)
    decay = keras.callbacks.LearningRateScheduler(lambda epoch, rate: 0.98 * rate)
    history = model.fit(
        x,
        y,
        batch_size=8,
        epochs=12,
        validation_data=(x[:16], y[:16]),
        callbacks=[SnapshotCallback(run.save_dir, save_freq=4), decay, plateau, stopping, Report(run)],
        verbose=0,
    )
    state = {
        "model": model.get_weights(),
        "optimizer": [numpy.asarray(one) for one in model.optimizer.variables],
        "seeds": [numpy.asarray(one) for one in model.variables],
        "plateau": [plateau.best, plateau.wait, plateau.cooldown_counter],
        "early stopping": [stopping.best, stopping.wait, stopping.stopped_epoch],
    }
    values = {"epochs": [int(epoch) for epoch in history.epoch], "History": history.history}
    run.finish(state | generators(), values)
