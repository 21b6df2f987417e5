"""Decide whether upkeep has something to do, from the catalogue alone: upkeep itself is a process of its own.

Guarantees: the plan is that of `ciuic.maintenance.prune`, or upkeep would be started in vain, or not at all.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ciuic.compare.restore_records import undoes_newest_change
from ciuic.protocol.stored_remotely import remotes_done
from ciuic.repository import Repository
from ciuic.retention import MinFree, RetentionPolicy, plan_retention, snapshots_having
from ciuic.system.disk_space import unstored_floor_bytes
from ciuic.types import STATE_TAGS, TAG_PARTIAL


class UpkeepRules(NamedTuple):
    """Facts that decide which snapshots stay."""

    policy: RetentionPolicy
    min_free: MinFree | None = None
    remotes: tuple[str, ...] = ()
    """Names of the remotes to which snapshots go."""
    reserve_bytes: int = 0
    """Free space that captures leave to others."""


class UpkeepNeed(NamedTuple):
    """Answer to the question if upkeep has something to do."""

    is_due: bool
    """Some snapshot is kept by no rule, or free space is below the floor of snapshots that may yield."""
    unstored: int = 0
    """Number of snapshots that stay because a remote has not stored them."""


def upkeep_need(
    repository: Repository, rules: UpkeepRules, free_bytes: int, file_system_bytes: int, *, now_ns: int
) -> UpkeepNeed:
    """Return whether upkeep has something to do.

    Args:
        repository: the open repository.
        rules: what decides.
        free_bytes: free space of its file system.
        file_system_bytes: size of its file system.
        now_ns: the current time.
    """
    infos = repository.snapshots.list()
    states = {
        info.id
        for info in infos
        if not STATE_TAGS.isdisjoint(info.tags) and repository.snapshots.load(info.id).is_state
    }
    lacking = [repository.snapshots.load(info.id) for info in infos if TAG_PARTIAL in info.tags]
    plan = plan_retention(
        infos,
        rules.policy,
        now_ns=now_ns,
        states=states,
        having=snapshots_having(
            {info.id: info.roots for info in infos},
            [root.path for snapshot in lacking for root in snapshot.left_out],
        ),
        undoes=partial(undoes_newest_change, repository, infos),
        remotes=remotes_done(rules.remotes, repository.id).done,
    )
    floor_bytes = unstored_floor_bytes(rules.min_free, file_system_bytes, rules.reserve_bytes)
    # Without min_free, only snapshots yield that nothing but a remote keeps.
    may_yield = rules.min_free is not None or any(
        decision.remotes and not decision.local_reasons for decision in plan.kept
    )
    return UpkeepNeed(
        bool(plan.removed) or (may_yield and free_bytes < floor_bytes),
        sum(bool(decision.remotes) for decision in plan.kept),
    )
