"""Saving and resuming a training: `SnapshotManager` and what it is made of (docs/snapshot-manager.md).

Imports no framework; each is used when the program has imported it.
"""

from __future__ import annotations

from ciuic.training.manager import SnapshotManager
from ciuic.training.notices import Metadata
from ciuic.training.outcome import Resumed, Save, State, Stats
from ciuic.training.policies import AfterIf, Automatic, Interval, OnImprovement, Rule, Steps
from ciuic.training.preemption import BeforePreemption, Preempted
from ciuic.training.preservation import Best, EverySeconds, EverySteps, Held, Latest
from ciuic.training.reading import Facts, NothingGood, PassedOver, SavedSnapshot
from ciuic.training.rehearsal import Difference, check_resume
from ciuic.training.requeue import again, requeue_slurm
from ciuic.training.tensors import Unsaveable

__all__ = [
    "AfterIf",
    "Automatic",
    "BeforePreemption",
    "Best",
    "Difference",
    "EverySeconds",
    "EverySteps",
    "Facts",
    "Held",
    "Interval",
    "Latest",
    "Metadata",
    "NothingGood",
    "OnImprovement",
    "PassedOver",
    "Preempted",
    "Resumed",
    "Rule",
    "Save",
    "SavedSnapshot",
    "SnapshotManager",
    "State",
    "Stats",
    "Steps",
    "Unsaveable",
    "again",
    "check_resume",
    "requeue_slurm",
]
