"""What all integrations take as their first argument: a manager, or where one is to be made."""

from __future__ import annotations

import os
from typing import Any

from ciuic.training.manager import SnapshotManager

Where = SnapshotManager | str | os.PathLike[str]


def opened(where: Where, options: dict[str, Any]) -> SnapshotManager:
    """``options``: of a manager that is made here (`SnapshotManager`). TypeError for options of one that exists already."""
    if not isinstance(where, SnapshotManager):
        return SnapshotManager(where, **options)
    if options:
        raise TypeError(f"{', '.join(options)}: set where the manager was made")
    return where
