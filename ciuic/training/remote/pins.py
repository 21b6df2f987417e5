"""Snapshots that retention leaves alone because a remote has not stored them yet.

Guarantees: a snapshot is removed only if each remote has stored it or does not want it, as the record of the
process that uploads says (`ciuic.protocol.stored_remotely`); a record that cannot be read lets none go. Two
exceptions keep the disk from filling: less than a tenth of the file system is free, or the disk was full; and
of a remote that has never stored anything only the snapshots of the last seven days are kept.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Final

from ciuic.protocol.stored_remotely import remotes_done
from ciuic.repository import SnapshotInfo
from ciuic.training.remote.uploads import state_dir
from ciuic.types import SnapshotId

MIN_FREE_SHARE: Final = 0.1
"""Free share of the file system below which nothing is kept for a remote."""
FORGOTTEN_AFTER_NS: Final = 7 * 86400 * 10**9
"""Age from which snapshots are not kept for a remote that has never stored any, as ciuic.retention has it."""


def free_share(directory: str) -> float:
    """Return the share of the file system that this user may still fill; 1.0 where that is unknown."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return 1.0
    return found.f_bavail / found.f_blocks if found.f_blocks else 1.0


class RemotePins:
    """Snapshots that the remotes of one training still need."""

    def __init__(
        self,
        repository: str,
        remotes: Sequence[str],
        free_share: Callable[[str], float] = free_share,
        now_ns: Callable[[], int] = time.time_ns,
    ) -> None:
        """Take the path of the repository and the names of the remotes."""
        self._repository = repository
        self._remotes = tuple(remotes)
        self._free_share = free_share
        self._now_ns = now_ns
        self.off = False
        """True while the disk is full."""

    def removable(
        self, known: Sequence[SnapshotInfo], drop: Sequence[SnapshotId], repository_id: str
    ) -> tuple[list[SnapshotId], set[SnapshotId]]:
        """Return those of ``drop`` that may go, and which of these a remote would still have needed.

        Args:
            known: All snapshots of the training.
            drop: Those that no rule keeps, oldest first.
            repository_id: Id of the repository.
        """
        if not self._remotes or not drop:
            return list(drop), set()
        done = remotes_done(self._remotes, repository_id, state_dir=state_dir(self._repository)).done
        times = {info.id: info.time_ns for info in known}
        since_ns = self._now_ns() - FORGOTTEN_AFTER_NS
        needed = {
            id_
            for id_ in drop
            if any(times[id_] >= since_ns if ids is None else id_ not in ids for ids in done.values())
        }
        if self.off or self._free_share(self._repository) < MIN_FREE_SHARE:
            return list(drop), needed
        return [id_ for id_ in drop if id_ not in needed], set()
