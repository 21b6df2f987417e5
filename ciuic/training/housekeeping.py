"""What becomes of older snapshots of a trainer, and when.

Guarantees: the newest ``keep_last`` stay, and those that are held; nothing is removed before one of those that stay was read back,
byte for byte, since it was written, so the last good one is never deleted, however many bad ones came after it. What was read back
carries the tag ``verified``. Snapshots of other roots in the same repository are nobody's business here. All of it may be
interrupted at any point, and gives way to the next save.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from ciuic.errors import CiuicError
from ciuic.repository import Repository, SnapshotInfo, Walker
from ciuic.training.messages import Note, Rules
from ciuic.training.reading import damaged_chunks
from ciuic.types import SnapshotId

VERIFIED: Final = "verified"
_ASK_EVERY: Final = 64


class Housekeeping:
    def __init__(
        self,
        repository: str,
        root: bytes,
        rules: Rules,
        *,
        should_stop: Callable[[], bool],
        tell: Callable[[Note], None],
    ) -> None:
        self._repository = repository
        self._root = root
        self._rules = rules
        self._should_stop = should_stop
        self._tell = tell

    def after(self, newest: str) -> None:
        """To be called after each snapshot. CiuicError; OSError."""
        if not self._rules.keep_last:
            return
        with Repository.open(self._repository) as repository:
            known = repository.snapshots.list(root=self._root)
            keep, drop = divide(known, self._rules)
            if not drop or not self._one_is_verified(repository, keep):
                return
            with repository.writer(command="SnapshotManager: preservation") as writer:
                writer.remove_snapshots(drop)
            self._free_space(repository)

    def _one_is_verified(self, repository: Repository, keep: Sequence[SnapshotInfo]) -> bool:
        """Of those that stay; newest first, until one is."""
        for info in keep:
            if VERIFIED in info.tags:
                return True
            reason = read_back(repository, info.id, self._should_stop)
            if reason is None:
                return False
            if reason:
                self._tell(Note("snapshot_damaged", f"{info.id} cannot be read back: {reason}"))
                continue
            with repository.writer(command="SnapshotManager: verified") as writer:
                writer.set_marks(info.id, tags=(*info.tags, VERIFIED))
            return True
        return False

    def _free_space(self, repository: Repository) -> None:
        from ciuic.gc import prune

        prune(repository, None, should_stop=self._should_stop)


def divide(known: Sequence[SnapshotInfo], rules: Rules) -> tuple[list[SnapshotInfo], list[SnapshotId]]:
    """(those that stay, newest first; ids of the others, oldest first). ``known``: newest first."""
    keep = [info for at, info in enumerate(known) if at < rules.keep_last or info.held]
    stay = {info.id for info in keep}
    return keep, [info.id for info in reversed(known) if info.id not in stay]


def read_back(
    repository: Repository, id_: SnapshotId, should_stop: Callable[[], bool] = lambda: False
) -> str | None:
    """Reads and checks every byte of a snapshot. "" when all is right, else what is wrong; None when it was stopped.

    What is damaged is marked, so that the next snapshot that has the content stores it anew.
    """
    try:
        snapshot = repository.snapshots.load(id_)
        for count, reached in enumerate(Walker(repository).walk(snapshot)):
            if count % _ASK_EVERY == 0 and should_stop():
                return None
            if reached.kind == "data":
                repository.chunks.get(reached.id)
    except CiuicError as error:
        bad = damaged_chunks(repository, id_)
        if bad:
            with repository.writer(command="SnapshotManager: mark damage") as writer:
                writer.mark_damaged(bad)
        return error.message
    return ""
