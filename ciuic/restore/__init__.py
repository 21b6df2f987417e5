"""Bringing files back: plan what would happen, then do it.

Guarantees: nothing is changed before every conflict is known; a file appears under its final name whole, checked
against its hashes, synced and with its attributes, or not at all; what is restored already is not restored again;
interrupted or killed at any point, it can be run again. Plain file operations only, so the destination may be any
file system, a ciuic mount included. Leaves to others: the safety snapshot, and telling a person.
"""

from __future__ import annotations

from ciuic.restore.execute import execute
from ciuic.restore.model import Action, Failure, Item, Overwrite, Plan, Progress, Result, Target
from ciuic.restore.plan import plan_restore

__all__ = [
    "Action",
    "Failure",
    "Item",
    "Overwrite",
    "Plan",
    "Progress",
    "Result",
    "Target",
    "execute",
    "plan_restore",
]
