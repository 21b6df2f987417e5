"""Saving and resuming a training: `SnapshotManager` and what it is made of (docs/snapshot-manager.md).

Imports no framework; each is used when the program has imported it.
"""

from __future__ import annotations

from typing import Final

from ciuic.system.cloud_notices import MetadataService
from ciuic.training.arguments import ManagerOptions, warn_deprecated
from ciuic.training.change_figures import ChangeFigures
from ciuic.training.check_resume import Difference, check_resume
from ciuic.training.convert.exporting import Exported
from ciuic.training.format.reading import Facts, NoUsableSnapshot, PassedOver, SavedSnapshot
from ciuic.training.format.structure import UnknownType, register_type
from ciuic.training.format.tensors import Unsaveable
from ciuic.training.framework_adapter import FrameworkAdapter
from ciuic.training.manager import SnapshotManager
from ciuic.training.preemption import BeforePreemption, Preempted, requeue_slurm, requeue_submitit
from ciuic.training.remote.copies import RemoteProgress, UploadBeforeEnd
from ciuic.training.results import Resumed, Save, SaveResult, State, Stats
from ciuic.training.rules import (
    AfterIf,
    Automatic,
    Best,
    EverySeconds,
    EverySteps,
    Held,
    Interval,
    Latest,
    OnImprovement,
    Rule,
    Steps,
)
from ciuic.training.snapshots import SnapshotTable
from ciuic.training.state_diff import StateDiff, TensorChange
from ciuic.training.state_import import Imported, import_state

_RENAMED: Final = {
    "Figures": "ChangeFigures",
    "Metadata": "MetadataService",
    "NothingGood": "NoUsableSnapshot",
    "again": "requeue_submitit",
}
"""Old names, for one version."""

__all__ = [
    "AfterIf",
    "Automatic",
    "BeforePreemption",
    "Best",
    "ChangeFigures",
    "Difference",
    "EverySeconds",
    "EverySteps",
    "Exported",
    "Facts",
    "FrameworkAdapter",
    "Held",
    "Imported",
    "Interval",
    "Latest",
    "ManagerOptions",
    "MetadataService",
    "NoUsableSnapshot",
    "OnImprovement",
    "PassedOver",
    "Preempted",
    "RemoteProgress",
    "Resumed",
    "Rule",
    "Save",
    "SaveResult",
    "SavedSnapshot",
    "SnapshotManager",
    "SnapshotTable",
    "State",
    "StateDiff",
    "Stats",
    "Steps",
    "TensorChange",
    "UnknownType",
    "Unsaveable",
    "UploadBeforeEnd",
    "check_resume",
    "import_state",
    "register_type",
    "requeue_slurm",
    "requeue_submitit",
]


def __getattr__(name: str) -> object:
    if (new := _RENAMED.get(name)) is not None:
        warn_deprecated(f"ciuic.training.{name}", f"ciuic.training.{new}")
        return globals()[new]
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
