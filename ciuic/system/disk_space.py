"""Space of a file system: what other programs can still use of it, and the reserve that captures leave to them.

Guarantees: "free" is what an ordinary process may still use (f_bavail, as df(1) shows it), never what root alone may use (f_bfree).
ciuic.daemon.capture.space refuses writes, and ciuic.daemon.snapshots.space_watch measures growth.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import msgspec

from ciuic.units import human_size

if TYPE_CHECKING:
    from ciuic.retention import MinFree

DEFAULT_RESERVE_SHARE: Final = 0.05
"""Default reserve as a share of the file system.

ext4 reserves the same share for root, and for the same reason: programs fail on a file system that is full to the last block.
"""
MAX_SWING_SHARE: Final = 0.25
"""Limit of what is left for a swing, as a share of the file system: a disk of which a job uses most by turns must hold snapshots too."""

UNSTORED_SHARE: Final = 0.1
"""Share of the file system below which snapshots no longer wait for a remote, unless ``min_free`` is set.

Twice the default reserve: captures are refused below the reserve, and a remote that is not reached must not cost the host's own
snapshots.
"""


class Reserve(msgspec.Struct, frozen=True):
    """Space on the repository's file system that captures do not use."""

    size_bytes: int = 0
    reason: str = ""
    """Source of the figure, for the operator."""


def available_bytes(path: str | os.PathLike[str]) -> int:
    """Return how many bytes an ordinary process may still write to the file system at ``path``. OSError."""
    room = os.statvfs(path)
    # Block counts are in units of f_frsize, which may be smaller than f_bsize (statvfs(3)).
    return room.f_bavail * room.f_frsize


def writable_bytes(path: str | os.PathLike[str]) -> int:
    """Return how many bytes this process may still write there; for root including the file system's reserve for root. OSError."""
    room = os.statvfs(path)
    return (room.f_bfree if os.geteuid() == 0 else room.f_bavail) * room.f_frsize


def measurable(path: str | os.PathLike[str]) -> str:
    """Return the directory to measure for a path that may not exist yet: itself or the nearest one above, links resolved."""
    place = os.path.realpath(path)
    while not os.path.exists(place) and place != os.path.dirname(place):
        place = os.path.dirname(place)
    return place


def total_bytes(path: str | os.PathLike[str]) -> int:
    """Return the size of the file system at ``path``. OSError."""
    room = os.statvfs(path)
    return room.f_blocks * room.f_frsize


def reserve_of(setting: MinFree | None, file_system_bytes: int, swing_bytes: int = 0) -> Reserve:
    """Return the reserve on a file system of that size.

    Args:
        setting: `[repository] reserve`; None for the default.
        file_system_bytes: Size of the file system.
        swing_bytes: Space that writers other than the repository took and gave back during the last interval.
    """
    if setting is not None:
        share = f"{setting.share * 100:g}% of {human_size(file_system_bytes)}, " if setting.share else ""
        return Reserve(setting.floor_bytes(file_system_bytes), f"{share}[repository] reserve")
    share_bytes = int(DEFAULT_RESERVE_SHARE * file_system_bytes)
    limit_bytes = int(MAX_SWING_SHARE * file_system_bytes)
    if min(swing_bytes, limit_bytes) > share_bytes:
        limited = (
            f", at most {MAX_SWING_SHARE * 100:g}% of {human_size(file_system_bytes)}"
            if swing_bytes > limit_bytes
            else ""
        )
        reason = (
            f"the {human_size(swing_bytes)} that others took and gave back during the last interval{limited}"
        )
        return Reserve(min(swing_bytes, limit_bytes), reason)
    return Reserve(share_bytes, f"{DEFAULT_RESERVE_SHARE * 100:g}% of {human_size(file_system_bytes)}")


def unstored_floor_bytes(min_free: MinFree | None, file_system_bytes: int, reserve_bytes: int = 0) -> int:
    """Return the free space below which snapshots yield that stay only because a remote has not stored them.

    Args:
        min_free: `[retention] min_free`, which is the floor where it is set.
        file_system_bytes: Size of the file system.
        reserve_bytes: Free space that captures leave to others.
    """
    if min_free is not None:
        return min_free.floor_bytes(file_system_bytes)
    return max(int(UNSTORED_SHARE * file_system_bytes), 2 * reserve_bytes)
