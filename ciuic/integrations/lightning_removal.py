"""Snapshots of checkpoints that Lightning has removed: their holds and their removal."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from typing import Final

from ciuic.errors import CiuicError
from ciuic.integrations.lightning_pointer import read_pointer
from ciuic.repository import Repository
from ciuic.training.manager import SnapshotManager
from ciuic.types import SnapshotId

log = logging.getLogger("ciuic")

_HOLD: Final = "checkpoint "
"""Beginning of a hold's reason; the path of the checkpoint follows."""
_LOCK_WAIT_SECONDS: Final = 60.0


def hold_reason(path: str | os.PathLike[str]) -> str:
    """Return the reason for which the snapshot of a checkpoint at this path is held."""
    return _HOLD + os.path.abspath(path)


def _is_lost(path: str, tags: Sequence[str]) -> bool:
    """Return whether the checkpoint with one of these tags is certainly no longer at this path."""
    # The hold stays where nothing tells that the checkpoint was removed: without the directory (not mounted
    # now?), and where a file is there that cannot be read as a checkpoint, perhaps because it is damaged.
    if not os.path.isdir(os.path.dirname(path)):
        return False
    pointer = read_pointer(path)
    return pointer.tag not in tags if pointer is not None else not os.path.lexists(path)


class RemovedCheckpoints:
    """Checkpoints whose snapshots are to be removed, when it is safe to."""

    def __init__(self, manager: SnapshotManager) -> None:
        """Begin with none."""
        self._manager = manager
        self._tags: list[str] = []

    def add(self, tag: str) -> None:
        """Note that the snapshot with this tag is to be removed."""
        self._tags.append(tag)

    def release_lost(self) -> None:
        """Release the holds of checkpoints whose file is gone."""
        # A run that was killed removed the file and not the snapshot, to which retention rules apply now.
        with Repository.open(self._manager.save_dir) as repository:
            held = [
                info
                for info in repository.snapshots.list()
                if info.held and info.hold_reason.startswith(_HOLD)
            ]
        for info in held:
            path = info.hold_reason.removeprefix(_HOLD)
            if _is_lost(path, info.tags):
                self._manager.release(info.id)

    def remove(self) -> None:
        """Remove the snapshots of removed checkpoints, unless a save is pending."""
        # Lightning removes a checkpoint right after it has saved the next one, which may still fail.
        if not self._tags or not self._manager.wait(0):
            return
        tags, self._tags = self._tags, []
        try:
            ids = [SnapshotId(id_) for tag in tags for id_ in self._ids(tag)]
            with (
                Repository.open(self._manager.save_dir) as repository,
                repository.writer(wait_seconds=_LOCK_WAIT_SECONDS, command="remove checkpoint") as writer,
            ):
                writer.remove_snapshots(ids)
        except (CiuicError, OSError) as error:
            # Logged only: a checkpoint that stays does not end a training.
            log.error("ciuic: checkpoints could not be removed: %s", error)

    def _ids(self, tag: str) -> list[str]:
        with Repository.open(self._manager.save_dir) as repository:
            return [info.id for info in repository.snapshots.list() if tag in info.tags]
