"""TensorBoard: write the saves of a `SnapshotManager` to the event file of a writer.

    writer = SummaryWriter("runs/first")                     # of torch.utils.tensorboard or tensorboardX
    ciuic.integrations.tensorboard.track(manager, writer)
    …
    manager.resume(tracker_run=os.path.abspath("runs/first"))

Of each save there are, at its step, the scalars ``ciuic/size_bytes``, ``ciuic/new_bytes``, ``ciuic/write_seconds`` and
``ciuic/good`` (1: the verdict is GOOD), and the text ``ciuic/snapshot``: id, step, verdict and sizes, as JSON.

Guarantees: those of `ciuic.training.trackers`; snapshots store the absolute path of the log directory as ``run``. Imports
neither TensorBoard nor torch: the program has the writer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Final

from ciuic.training.manager import SnapshotManager
from ciuic.training.trackers import TrackedSave

NAME: Final = "tensorboard"


class TensorBoardTracker:
    """A log directory of TensorBoard, through a writer."""

    name = NAME

    def __init__(self, writer: Callable[[], Any]) -> None:
        """Write with what a function returns; None: there is no writer yet."""
        self._writer = writer
        self._last: Any = None

    def run(self) -> Mapping[str, str]:
        """Return the log directory."""
        found = self._writer()
        if found is None:
            return {}
        self._last = found
        return {"run": _directory(found)}

    def log(self, save: TrackedSave) -> None:
        """Write a save, and have the writer write its file."""
        writer = self._last
        if writer is None or _directory(writer) != save.result.trackers[NAME]["run"]:
            return
        step = save.result.step or 0
        for key, value in save.numbers.items():
            writer.add_scalar(f"ciuic/{key}", value, step)
        writer.add_text("ciuic/snapshot", json.dumps({"id": save.result.id, **save.facts}), step)
        writer.flush()


def _directory(writer: Any) -> str:
    # `logdir` of tensorboardX, `log_dir` of torch.
    return os.path.abspath(str(getattr(writer, "log_dir", None) or writer.logdir))


def track(manager: SnapshotManager, writer: Any) -> None:
    """Write the saves that begin from now on with this writer.

    Args:
        manager: The manager.
        writer: A SummaryWriter; it is flushed after each save, and not closed.

    Raises:
        ValueError: The manager is closed.
    """
    manager.track(TensorBoardTracker(lambda: writer))
