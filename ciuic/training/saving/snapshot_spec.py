"""Values that describe a snapshot before it is taken."""

from __future__ import annotations

import os
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from ciuic.training.ranks.rank_state import RankState
from ciuic.training.state import validation
from ciuic.training.writer.filesystem import Roots


class RunProgress:
    """Progress of the run."""

    def __init__(self) -> None:
        self.id = os.urandom(16).hex()
        """Id of the run; a resumed run keeps it."""
        self.step = 0
        self.epoch: int | None = None
        """Epoch that the program named last."""


class BoundaryState(NamedTuple):
    """State at the last boundary, as far as an evaluation changes it."""

    random: dict[str, Any]
    positions: dict[str, Any]
    epoch: int | None


class SnapshotSpec(NamedTuple):
    """Properties of a snapshot that is to be taken."""

    reason: str
    epoch: int | None = None
    metrics: Mapping[str, float] = MappingProxyType({})
    plain: Mapping[str, Any] = MappingProxyType({})
    tags: tuple[str, ...] = ()
    hold: str = ""
    """Reason for which the snapshot is held; empty if it is not."""
    filesystem: Roots | None = None
    """Directories whose files are wanted with it; None for the manager's default."""
    is_explicit: bool = False
    """True if the program asked for it, perhaps on this rank alone."""
    may_wait: bool = False
    """True if it may wait for the writer to finish an earlier one."""
    boundary_state: BoundaryState | None = None
    """State to save in place of the current generators and positions."""


def explicit_request(
    model: Any,
    optimizer: Any,
    epoch: Any,
    others: Mapping[str, Any],
    metrics: Mapping[str, Any],
    tags: Any,
    hold: Any,
    filesystem: Roots | None,
) -> tuple[dict[str, Any], SnapshotSpec]:
    """Validate the arguments of `save_snapshot`.

    Returns:
        The objects by name, and the properties of the snapshot.

    Raises:
        TypeError: an argument has the wrong type.
    """
    objects, plain = validation.objects_and_values(model, optimizer, others)
    return objects, SnapshotSpec(
        "asked for",
        None if epoch is None else validation.whole_number(epoch, "epoch"),
        validation.numbers(metrics),
        plain,
        validation.texts(tags),
        validation.reason(hold),
        filesystem,
        is_explicit=True,
        may_wait=True,
    )


class SkippedSave(NamedTuple):
    """The last save that was due and was skipped because the writer was busy."""

    step: int
    request: SnapshotSpec
    """Properties of the snapshot, with the generators and positions of its boundary."""
    parts: list[RankState] | None
    """States of the ranks at that boundary; None: of this process alone, or sharded."""


class RanksGone(NamedTuple):
    """Another rank has ended, or cannot be reached."""

    problem: str
