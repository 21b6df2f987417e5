"""What becomes of older snapshots of a trainer, and when.

Guarantees: what any rule keeps stays (preservation.py); nothing is removed before one of those that stay was read back, byte for
byte, since it was written, so the last good one is never deleted, however many bad ones came after it. What was read back
carries the tag ``verified``. Snapshots of other roots in the same repository are nobody's business here. All of it may be
interrupted at any point, and gives way to the next save, but not for ever: where saves come as fast as they are written, snapshots must
not pile up.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ciuic.errors import CiuicError
from ciuic.repository import Repository, SnapshotInfo, Walker
from ciuic.sweep import HURRIED, USUAL, Thresholds
from ciuic.training.marks import DAMAGED, VERIFIED, mark_damage_of
from ciuic.training.messages import Note, Rules
from ciuic.training.preservation import Known, kept, needs_facts
from ciuic.training.reading import Facts, read_facts
from ciuic.types import SnapshotId

DAMAGE_NOTE: Final = "snapshot_damaged"
"""Event of the note that one of the trainer's snapshots cannot be read back."""
_ASK_EVERY: Final = 64
_LOCK_WAIT_SECONDS: Final = 5.0
"""For who else writes: the daemon, which may have the same repository, or another trainer. The next save would wait for him, too."""
_MOST_GIVEN_WAY: Final = 4
"""So often in a row."""


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
        self._given_way = 0
        self._undone = False
        """Snapshots that are to go are there."""
        self._unswept = False
        """Some went, and their space is not free yet."""
        self._read: dict[str, Facts | None] = {}

    def finish(self, seconds: float) -> None:
        """What was left undone, for so long: there will be no next save. CiuicError; OSError."""
        end = time.monotonic() + seconds
        self._given_way, self._should_stop = 0, lambda: time.monotonic() > end
        if self._undone or self._unswept:
            self.after()

    def make_room(self) -> None:
        """The disk is full: what is due to be removed, and everything that nothing refers to, goes now. CiuicError; OSError."""
        self._given_way = _MOST_GIVEN_WAY
        try:
            self.after()
            with Repository.open(self._repository) as repository:
                self._free_space(repository, HURRIED)
        finally:
            self._given_way = 0

    def after(self) -> None:
        """To be called after each snapshot. CiuicError; OSError."""
        if not self._rules.keep:
            return
        with Repository.open(self._repository) as repository:
            known = repository.snapshots.list(root=self._root)
            keep, drop = divide(known, self._rules, self._facts(repository, known))
            self._undone = bool(drop)
            if drop and not self._one_is_verified(repository, keep):
                return
            if not drop and not self._unswept:
                return
            if drop:
                with repository.writer(
                    wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager: preservation"
                ) as writer:
                    writer.remove_snapshots(drop)
            self._undone = False
            self._free_space(repository, USUAL)

    def _facts(self, repository: Repository, infos: Sequence[SnapshotInfo]) -> dict[str, Facts]:
        """As far as the rules look at them. Of what cannot be read there are none, and `divide` keeps it."""
        if not needs_facts(self._rules.keep):
            return {}
        for info in infos:
            if info.id not in self._read:
                try:
                    self._read[info.id] = read_facts(repository, info.id)
                except (CiuicError, ValueError):
                    self._read[info.id] = None
        self._read = {info.id: self._read[info.id] for info in infos}
        return {id_: facts for id_, facts in self._read.items() if facts is not None}

    def _one_is_verified(self, repository: Repository, keep: Sequence[SnapshotInfo]) -> bool:
        """Of those that stay; newest first, until one is."""
        for info in keep:
            if VERIFIED in info.tags and _is_there(repository, info.id):
                return True
            reason = read_back(repository, info.id, self._gives_way)
            if reason is None:
                self._given_way += 1
                return False
            if reason:
                self._tell(Note(DAMAGE_NOTE, f"{info.id} cannot be read back: {reason}"))
                continue
            with repository.writer(
                wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager: verified"
            ) as writer:
                writer.set_marks(info.id, tags=(*info.tags, VERIFIED))
            return True
        return False

    def _gives_way(self) -> bool:
        return self._given_way < _MOST_GIVEN_WAY and self._should_stop()

    def _free_space(self, repository: Repository, thresholds: Thresholds) -> None:
        from ciuic.gc import prune

        report = prune(
            repository,
            None,
            thresholds=thresholds,
            wait_seconds=_LOCK_WAIT_SECONDS,
            should_stop=self._gives_way,
        )
        self._unswept = report.stopped
        self._given_way = self._given_way + 1 if report.stopped else 0


def divide(
    infos: Sequence[SnapshotInfo], rules: Rules, facts: Mapping[str, Facts]
) -> tuple[list[SnapshotInfo], list[SnapshotId]]:
    """(those that stay, newest first; ids of the others, oldest first). ``infos``: newest first. ``facts``: as far as rules need them.

    Where rules need facts of a snapshot and there are none, it stays: that something cannot be read is no reason to delete it. Damaged
    snapshots take the place of no good one, and stay as long as if they were whole: a repair may still heal them.
    """
    needed = needs_facts(rules.keep)
    good = [info for info in infos if DAMAGED not in info.tags]
    stay = {
        id_
        for counted in (infos, good)
        for id_ in kept([_known(info, facts.get(info.id), needed) for info in counted], rules.keep)
    }
    return [info for info in infos if info.id in stay], [
        info.id for info in reversed(infos) if info.id not in stay
    ]


def _is_there(repository: Repository, id_: SnapshotId) -> bool:
    """Return whether the snapshot's own file can be read."""
    try:
        repository.snapshots.load(id_)
    except CiuicError:
        return False
    return True


def _known(info: SnapshotInfo, facts: Facts | None, needed: bool) -> Known:
    if facts is None:
        return Known(info.id, info.time_ns, info.held or needed)
    return Known(info.id, info.time_ns, info.held, facts.run, facts.step, facts.metrics)


def read_back(
    repository: Repository, id_: SnapshotId, should_stop: Callable[[], bool] = lambda: False
) -> str | None:
    """Reads and checks every byte of a snapshot. "" when all is right, else what is wrong; None when it was stopped.

    What is damaged is marked (`marks.mark_damage`).
    """
    try:
        snapshot = repository.snapshots.load(id_)
        for count, reached in enumerate(Walker(repository).walk(snapshot)):
            if count % _ASK_EVERY == 0 and should_stop():
                return None
            if reached.kind == "data":
                repository.chunks.get(reached.id)
    except CiuicError as error:
        mark_damage_of(repository, id_, _LOCK_WAIT_SECONDS, "SnapshotManager: mark damage")
        return error.message
    return ""
