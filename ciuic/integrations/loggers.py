"""Loggers that a framework's trainer has: saves are logged to them without configuration.

Looked up by the names of their classes, so that no tracker is imported that the program has not imported. A logger
that cannot be used is passed over, which is logged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping
from types import FrameType
from typing import Any, Final

from ciuic.training.logs import quietly
from ciuic.training.manager import SnapshotManager
from ciuic.training.trackers import Tracker

_Found = Callable[[], Any]


def track_lightning_loggers(manager: SnapshotManager, loggers: Iterable[Any]) -> None:
    """Log saves to the loggers of a Lightning Trainer: MLFlowLogger, WandbLogger, TensorBoardLogger. Creates no run."""
    for logger in loggers:
        # Private, because all public properties, also `version`, create the run where there is none, and wait for a server.
        of: dict[str, Callable[[Any], Tracker]] = {
            "MLFlowLogger": lambda logger: _mlflow(
                lambda: {"run": logger._run_id, "experiment": logger._experiment_id}, logger._tracking_uri
            ),
            "WandbLogger": lambda logger: _wandb(lambda: logger._experiment),
            "TensorBoardLogger": lambda logger: _tensorboard(lambda: logger._experiment),
        }
        _track(manager, logger, of)


def track_transformers_callbacks(manager: SnapshotManager) -> None:
    """Log saves to what the Trainer of transformers reports to: its MLflowCallback, WandbCallback, TensorBoardCallback.

    Called by a callback in one of its hooks, because no hook is told of the others.
    """
    handler = _calling("CallbackHandler")
    of: dict[str, Callable[[Any], Tracker]] = {
        "MLflowCallback": lambda _: _mlflow(_remembered(_active_mlflow_run)),
        "WandbCallback": lambda _: _wandb(_remembered(lambda: sys.modules["wandb"].run)),
        "TensorBoardCallback": lambda one: _tensorboard(_remembered(lambda: one.tb_writer)),
    }
    for callback in () if handler is None else handler.callbacks:
        _track(manager, callback, of)


_WHAT: Final = "saves are not logged to a logger of the Trainer"


def _track(manager: SnapshotManager, logger: Any, of: Mapping[str, Callable[[Any], Tracker]]) -> None:
    for kind in type(logger).__mro__:
        if kind.__name__ in of:
            with quietly(_WHAT):
                manager.track(of[kind.__name__](logger))
            return


def _remembered(find: _Found) -> _Found:
    """Return a function that returns what ``find`` found last, also when it is gone.

    The Trainer ends runs and closes writers before the last snapshot is taken; each takes what comes later.
    """
    last = find()

    def found() -> Any:
        nonlocal last
        last = find() or last
        return last

    return found


def _active_mlflow_run() -> dict[str, str] | None:
    active = sys.modules["mlflow"].active_run()
    return active and {"run": active.info.run_id, "experiment": active.info.experiment_id}


def _mlflow(run: _Found, tracking_uri: str | None = None) -> Tracker:
    from ciuic.integrations.mlflow import MlflowTracker

    return MlflowTracker(run, tracking_uri=tracking_uri)


def _wandb(run: _Found) -> Tracker:
    from ciuic.integrations.wandb import WandbTracker

    return WandbTracker(run)


def _tensorboard(writer: _Found) -> Tracker:
    from ciuic.integrations.tensorboard import TensorBoardTracker

    return TensorBoardTracker(writer)


def _calling(kind: str) -> Any:
    """Return the object of a class of this name whose method is among the callers; None if there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        own = frame.f_locals.get("self")
        if any(one.__name__ == kind for one in type(own).__mro__):
            return own
        frame = frame.f_back
    return None
