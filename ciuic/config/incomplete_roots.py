"""Directories that a lazy restore has not completed: they cannot be protected before they are whole."""

from __future__ import annotations

import os
from collections.abc import Sequence

from ciuic import STATE_DIR_NAME
from ciuic.config.model import Problem, RootConfig
from ciuic.errors import UsageError
from ciuic.system.mountinfo import LAZY_FS_TYPE, LAZY_RESTORE, Mount


def incomplete_root(root: RootConfig, path: bytes, mounts: Sequence[Mount]) -> Problem | None:
    """Return the problem of a root that is, contains or lies in a directory which is being restored lazily."""
    for mount in mounts:
        if mount.fs_type == LAZY_FS_TYPE and _meet(path, mount.mount_point):
            return _problem(root, os.fsdecode(mount.mount_point))
    # Not mounted: its process was killed, or the machine was started anew.
    if os.path.lexists(os.path.join(path, STATE_DIR_NAME, LAZY_RESTORE)):
        return _problem(root, os.fsdecode(path))
    return None


def _problem(root: RootConfig, restored: str) -> Problem:
    message = f"{restored} is being restored lazily, and cannot be protected before it is complete and nobody works in it"
    hint = "ciuic restore --status shows it and who works in it; an interrupted one goes on with the same ciuic restore --lazy"
    return Problem("error", message, hint, root.origin, UsageError)


def _meet(one: bytes, other: bytes) -> bool:
    """Return whether one of the paths is the other or lies in it."""
    first, second = (path.rstrip(b"/") + b"/" for path in (one, other))
    return first.startswith(second) or second.startswith(first)
