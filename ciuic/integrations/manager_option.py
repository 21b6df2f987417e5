"""First argument of all integrations: a manager, or the directory in which to open one."""

from __future__ import annotations

import os
from typing import Any

from ciuic.training.manager import SnapshotManager

ManagerOrDir = SnapshotManager | str | os.PathLike[str]


def open_manager(where: ManagerOrDir, options: dict[str, Any]) -> SnapshotManager:
    """Return the manager, opening one if a directory is given.

    Args:
        where: a manager, or a directory.
        options: arguments of `SnapshotManager`.

    Raises:
        TypeError: options are given for a manager that exists already.
    """
    if not isinstance(where, SnapshotManager):
        return SnapshotManager(where, **options)
    if options:
        raise TypeError(f"{', '.join(options)} must be set where the manager is created, not here")
    return where
