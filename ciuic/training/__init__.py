"""Saving and resuming a training: `SnapshotManager` and what it is made of (docs/snapshot-manager.md).

Imports no framework; each is used when the program has imported it.
"""

from __future__ import annotations

from ciuic.training.manager import Resumed, Save, SnapshotManager, State, Stats
from ciuic.training.policies import AfterIf, Automatic, Interval, OnImprovement, Rule, Steps
from ciuic.training.preservation import Best, EverySeconds, EverySteps, Held, Latest
from ciuic.training.reading import Facts, NothingGood, PassedOver, SavedSnapshot
from ciuic.training.rehearsal import Difference, check_resume
from ciuic.training.tensors import Unsaveable

__all__ = [
    "AfterIf",
    "Automatic",
    "Best",
    "Difference",
    "EverySeconds",
    "EverySteps",
    "Facts",
    "Held",
    "Interval",
    "Latest",
    "NothingGood",
    "OnImprovement",
    "PassedOver",
    "Resumed",
    "Rule",
    "Save",
    "SavedSnapshot",
    "SnapshotManager",
    "State",
    "Stats",
    "Steps",
    "Unsaveable",
    "check_resume",
]
