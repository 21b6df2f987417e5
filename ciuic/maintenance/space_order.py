"""Order in which snapshots yield when space is short: a pure function of the plan of retention.

Never given up: the newest snapshot of each root, held and tagged ones, states of trainings, and a safety snapshot while the restore
that it can undo is the newest change. A hold for an ordinary user stands against the rules, and yields.
"""

from __future__ import annotations

from collections.abc import Container

from ciuic.retention import NEWEST, TRAINING, UNDOES, Decision, RetentionPlan
from ciuic.types import SnapshotId


def space_order(
    plan: RetentionPlan, held_for_users: Container[SnapshotId], *, only_unstored: bool = False
) -> tuple[list[SnapshotId], list[SnapshotId]]:
    """Return the kept snapshots that never yield, and the others, of which the last yields first.

    First go the snapshots that only a user's hold keeps: holds must not cost other users what the rules keep for them. Then those
    that every remote has, then those that a remote lacks, which would be lost for good. Each group goes oldest first.

    Args:
        plan: decisions, newest first.
        held_for_users: snapshots held for ordinary users.
        only_unstored: only snapshots yield that nothing keeps but a remote that has not stored them yet.
    """
    safe: list[SnapshotId] = []
    others: list[Decision] = []
    for decision in plan.kept:
        if _stays(decision, held_for_users) or (only_unstored and decision.local_reasons):
            safe.append(decision.id)
        else:
            others.append(decision)
    # Sorting is stable: within a group the order stays newest first.
    others.sort(key=lambda decision: (not decision.remotes, decision.local_reasons == ("held",)))
    return safe, [decision.id for decision in others]


def _stays(decision: Decision, held_for_users: Container[SnapshotId]) -> bool:
    return any(
        reason in (TRAINING, UNDOES)
        or reason.startswith((NEWEST, "tag "))
        or (reason == "held" and decision.id not in held_for_users)
        for reason in decision.local_reasons
    )
