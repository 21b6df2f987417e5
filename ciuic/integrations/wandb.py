"""Weights & Biases: log the saves of a `SnapshotManager` to a run, online or offline.

    run = wandb.init(mode="offline")
    ciuic.integrations.wandb.track(manager)
    …
    manager.resume(tracker_run=run.id)

Of each save the run gets ``ciuic/snapshots/ID`` in its summary (``step``, ``verdict``, sizes in bytes), and in the line of
the run's present step ``ciuic/step``, ``ciuic/snapshot``, ``ciuic/verdict``, ``ciuic/size_bytes``, ``ciuic/new_bytes``,
``ciuic/write_seconds`` and ``ciuic/good``. That line is not ended: a step further, and the program's own ``log(…, step=N)``
would be dropped. Of several saves within one line the last is there.

Guarantees: those of `ciuic.training.trackers`; snapshots store ``run`` and ``project``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

import wandb

from ciuic.training.manager import SnapshotManager
from ciuic.training.trackers import Rejected, TrackedSave

NAME: Final = "wandb"


class WandbTracker:
    """A run of Weights & Biases: a given one, or the one of this process at each save."""

    name = NAME

    def __init__(self, run: Callable[[], Any]) -> None:
        """Log to the run that a function returns; None: there is none yet."""
        self._run = run
        self._last: Any = None

    def run(self) -> Mapping[str, str]:
        """Return id and project of the run."""
        found = self._run()
        if found is None:
            return {}
        self._last = found
        return {"run": str(found.id), "project": str(found.project or "")}

    def log(self, save: TrackedSave) -> None:
        """Log a save; it is in the run's file, or on its way to the service, when the library has taken it."""
        run = self._last
        # Another run has begun since: this one is closed, and takes nothing more.
        if run is None or str(run.id) != save.result.trackers[NAME]["run"]:
            return
        name = save.result.id or "failed"
        shown = {"step": save.result.step or 0, "snapshot": name, "verdict": save.verdict}
        try:
            run.summary[f"ciuic/snapshots/{name}"] = save.facts
            run.log(
                {f"ciuic/{key}": value for key, value in {**shown, **save.numbers}.items()},
                commit=False,
            )
        except wandb.errors.UsageError as error:
            raise Rejected(str(error)) from error  # the run is finished


def track(manager: SnapshotManager, run: Any = None) -> None:
    """Log the saves that begin from now on to a run of Weights & Biases.

    Args:
        manager: The manager.
        run: What `wandb.init` returned; None: the run of this process at each save (nothing is logged of a save
            without one).

    Raises:
        ValueError: The manager is closed.
    """
    manager.track(WandbTracker((lambda: wandb.run) if run is None else lambda: run))
