"""State of an overlay that the daemon has released: unmounted, or served while a process is in it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ciuic.cli.shared.messages import shown_text

_POLL_SECONDS: Final = 0.1
# A worker looks twice a second whether the last process has left.
_PATIENCE_SECONDS: Final = 2.0


def in_use(path: str) -> str | None:
    """Return who is in the overlay over ``path``, in words; None without an overlay.

    Empty: nobody is in it, and it should not be there.
    """
    from ciuic.config import is_ciuic_mount
    from ciuic.system import mountinfo
    from ciuic.system.open_files import describe, mount_users

    deadline = time.monotonic() + _PATIENCE_SECONDS
    while True:
        # From the kernel's table: a stat(2) of a mount whose worker is gone fails, and of one that hangs never
        # returns.
        if not is_ciuic_mount(Path(path), mountinfo.read()):
            return None
        users = describe(mount_users(path))
        if users or time.monotonic() > deadline:
            return (
                ", ".join([users, *(f"{name} (a mount)" for name in mounted_inside(path))]) if users else ""
            )
        time.sleep(_POLL_SECONDS)


def mounted_inside(path: str) -> list[str]:
    """Return what others have mounted inside the overlay over ``path``: it may not be unmounted lazily."""
    from ciuic.system import mountinfo

    return [os.fsdecode(name) for name in mountinfo.mounted_inside(os.fsencode(path), mountinfo.read())]


def remedy(paths: Sequence[str], daemon_does: str) -> str:
    """Return what to do about overlays that no daemon serves; never a lazy unmount of what others have mounted inside.

    Args:
        paths: the roots.
        daemon_does: what a daemon that is started does about them, as a relative clause.
    """
    inside = [name for path in paths for name in mounted_inside(path)]
    if inside:
        return f"unmount {shown_text(', '.join(inside))}, which is mounted inside, then start the daemon, {daemon_does}"
    return f"start the daemon, {daemon_does}; or: umount -l {shown_text(' '.join(paths))}"


def overlay_fate(path: str) -> str:
    """Return the words about the overlay of a root that is no longer protected."""
    users = in_use(path)
    if users is None:
        return "unmounted"
    return f"its overlay stays until nobody is in it: {shown_text(users or 'unknown')}"
