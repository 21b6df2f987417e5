"""Restores: plan what would happen (`plan_restore`), then carry the plan out (`execute`).

Guarantees: nothing is changed before every conflict is known. A file appears under its final name whole, checked against its
hashes, synced and with its attributes, or not at all. What is restored already is not restored again, so a restore that was
interrupted or killed at any point can be run again. Only plain file operations are used, so the destination may be any file
system, a ciuic mount included. The caller makes the safety snapshot and reports to the operator.

The package may import the repository, `ciuic.protocol` and `ciuic.system`. Neither of `plan` and
`run` imports the other.

Names are imported when they are first used, because verification and comparison use only a part of the package.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ciuic.deferred_imports import lazy_attributes

if TYPE_CHECKING:
    from ciuic.restore.model import (
        Action,
        Failure,
        OmittedSpecial,
        Overwrite,
        RestoreItem,
        RestorePlan,
        RestoreProgress,
        RestoreTarget,
        Result,
    )
    from ciuic.restore.plan import plan_restore
    from ciuic.restore.run import execute

_HOMES = {
    "model": "Action Failure OmittedSpecial Overwrite RestoreItem RestorePlan RestoreProgress RestoreTarget Result",
    "plan": "plan_restore",
    "run": "execute",
}

__all__ = [
    "Action",
    "Failure",
    "OmittedSpecial",
    "Overwrite",
    "RestoreItem",
    "RestorePlan",
    "RestoreProgress",
    "RestoreTarget",
    "Result",
    "execute",
    "plan_restore",
]


__getattr__ = lazy_attributes(
    __name__,
    _HOMES,
    renamed={
        "Item": "RestoreItem",
        "LeftOut": "OmittedSpecial",
        "Plan": "RestorePlan",
        "Progress": "RestoreProgress",
        "Target": "RestoreTarget",
    },
)
