"""Bringing files back: plan what would happen, then do it.

Guarantees: nothing is changed before every conflict is known; a file appears under its final name whole, checked
against its hashes, synced and with its attributes, or not at all; what is restored already is not restored again;
interrupted or killed at any point, it can be run again. Plain file operations only, so the destination may be any
file system, a ciuic mount included. Leaves to others: the safety snapshot, and telling a person.

Names are imported when first used, because verification and comparison use a part of this only.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ciuic.restore.carrying_out import execute
    from ciuic.restore.model import (
        Action,
        Failure,
        Item,
        LeftOut,
        Overwrite,
        Plan,
        Progress,
        Result,
        Target,
    )
    from ciuic.restore.plan import plan_restore

_HOME = {
    "execute": "carrying_out",
    "plan_restore": "plan",
    **dict.fromkeys(
        ("Action", "Failure", "Item", "LeftOut", "Overwrite", "Plan", "Progress", "Result", "Target"), "model"
    ),
}

__all__ = [
    "Action",
    "Failure",
    "Item",
    "LeftOut",
    "Overwrite",
    "Plan",
    "Progress",
    "Result",
    "Target",
    "execute",
    "plan_restore",
]


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
