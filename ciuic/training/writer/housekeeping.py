"""Retention in the writer process: remove snapshots of this trainer that no rule keeps, and free their space.

Guarantees: a snapshot that any rule keeps stays (rules.py). Nothing is removed unless one of the
snapshots that stay was read back byte for byte since it was written, and every tensor of its state found, so the last good snapshot is never
deleted, however many damaged ones follow it. A snapshot that was read back is tagged ``verified``. Snapshots
of other roots in the repository are not touched. Every step may be interrupted at any point. The work yields
to the next save, but only a limited number of times in a row: where saves come as fast as they are written,
snapshots must not pile up. What a remote has not stored yet stays until it has, unless the disk is nearly full
(ciuic.training.remote.uploads).

Where the training uses all processors, reading a snapshot back slows it. There a sample of the newest one is
read, and the newest that was read back wholly stays beside those that the rules keep; every
``FULL_READ_EVERY``-th snapshot is read back wholly all the same.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Final

from ciuic.errors import CiuicError
from ciuic.maintenance.sweep import HURRIED, USUAL, Thresholds
from ciuic.protocol.stored_remotely import ConfiguredRemote
from ciuic.repository import Repository, SnapshotInfo, Walker
from ciuic.training.format.reading import Facts, check_resolves, read_facts
from ciuic.training.remote.uploads import RemotePins, free_share
from ciuic.training.rules import RetentionCandidate, kept, needs_facts
from ciuic.training.writer.marks import DAMAGED, VERIFIED, mark_damage_of
from ciuic.training.writer.messages import Note, RetentionRules
from ciuic.types import SnapshotId

DAMAGE_NOTE: Final = "snapshot_damaged"
"""Event of the note that one of the trainer's snapshots cannot be read back."""
REMOVED_UNSTORED_NOTE: Final = "removed_before_upload"
"""Event of the note that a snapshot was removed although a remote had not stored it yet."""
_STOP_CHECK_EVERY: Final = 64
"""Objects of a snapshot that are read between two checks whether to stop."""
# Time to wait for another holder of the repository's lock (the daemon, another trainer); the next save waits
# behind it.
_LOCK_WAIT_SECONDS: Final = 5.0
FULL_READ_EVERY: Final = 16
"""Number of removals on a busy machine of which one reads the newest snapshot wholly."""
_SAMPLE_EVERY: Final = 16
"""Number of chunks of which one is read, from a random one on, in a sample."""
_MAX_YIELDS: Final = 4
"""Consecutive times that housekeeping yields to the next save before it runs to its end."""


class WriterHousekeeping:
    """Retention and sweep for one trainer's snapshots."""

    def __init__(
        self,
        repository: str,
        root: bytes,
        rules: RetentionRules,
        *,
        should_stop: Callable[[], bool],
        is_busy: Callable[[], bool] = lambda: False,
        tell: Callable[[Note], None],
        remotes: Sequence[ConfiguredRemote] = (),
        free_share: Callable[[str], float] = free_share,
    ) -> None:
        """Prepare housekeeping.

        Args:
            repository: path of the repository.
            root: path under which the trainer's snapshots keep their state.
            rules: retention rules; without any, everything stays.
            should_stop: whether the next save is waiting.
            is_busy: whether the training uses all processors.
            tell: called with a note for the trainer's log.
            remotes: remotes that still need some of the snapshots.
            free_share: returns the free share of the file system of a directory.
        """
        self._repository = repository
        self._root = root
        self._rules = rules
        self._should_stop = should_stop
        self._is_busy = is_busy
        self._tell = tell
        self._pins = RemotePins(repository, remotes, free_share)
        self._yields = 0
        self._samples = 0
        """Number of removals since a snapshot was last read back wholly."""
        self._removal_due = False
        """True while snapshots that are to be removed are still there."""
        self._sweep_due = False
        """True while the space of removed snapshots is not free yet."""
        self._read: dict[str, Facts | None] = {}

    def finish(self, seconds: float) -> None:
        """Do what was left undone, for at most `seconds`: there will be no next save.

        Raises:
            CiuicError: as of `after`.
            OSError: as of `after`.
        """
        end = time.monotonic() + seconds
        # No further save will come: only the time limit stops the work.
        self._yields, self._should_stop = 0, lambda: time.monotonic() > end
        # The training waits, so its processors are free.
        self._is_busy = lambda: False
        if self._removal_due or self._sweep_due:
            self.after()

    def make_room(self) -> None:
        """Remove what is due and free everything unreferenced now, because the disk is full.

        Raises:
            CiuicError: as of `after`.
            OSError: as of `after`.
        """
        # A full disk blocks every save: do not yield to one, and keep none only because a sample is cheaper.
        self._yields, is_busy = _MAX_YIELDS, self._is_busy
        self._is_busy, self._pins.off = (lambda: False), True
        try:
            self.after()
            with Repository.open(self._repository) as repository:
                self._free_space(repository, HURRIED)
        finally:
            self._yields, self._is_busy, self._pins.off = 0, is_busy, False

    def after(self) -> None:
        """Apply the rules after a snapshot.

        Raises:
            CiuicError: the repository is locked or damaged.
            OSError: the repository cannot be read or written.
        """
        if not self._rules.keep:
            return
        with Repository.open(self._repository) as repository:
            known = repository.snapshots.list(root=self._root)
            keep, drop = split_by_rules(known, self._rules, self._facts(repository, known))
            drop, given_up = self._pins.removable(known, drop, repository.id)
            self._removal_due = bool(drop)
            # Verification before removal: otherwise the last good snapshot could go while only damaged ones
            # stay.
            spared: set[SnapshotId] = set()
            if drop:
                verified = self._verified(repository, known, keep)
                if verified is None:
                    return
                spared = {verified} & set(drop)
                drop = [id_ for id_ in drop if id_ not in spared]
            if not drop and not self._sweep_due:
                return
            if drop:
                with repository.writer(
                    wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager: preservation"
                ) as writer:
                    writer.remove_snapshots(drop)
                self._tell_lost(given_up & set(drop))
            self._removal_due = bool(spared)
            self._free_space(repository, USUAL)

    def _tell_lost(self, ids: Set[SnapshotId]) -> None:
        if ids:
            self._tell(
                Note(
                    REMOVED_UNSTORED_NOTE,
                    f"the disk is nearly full: removed {', '.join(sorted(ids))}, which a remote has not stored",
                )
            )

    def _facts(self, repository: Repository, infos: Sequence[SnapshotInfo]) -> dict[str, Facts]:
        """Return the facts that rules need, by id.

        Snapshots that cannot be read are left out, and `split_by_rules` keeps them.
        """
        if not needs_facts(self._rules.keep):
            return {}
        for info in infos:
            if info.id not in self._read:
                try:
                    self._read[info.id] = read_facts(repository, info.id)
                except (CiuicError, ValueError):
                    self._read[info.id] = None
        # Facts of a snapshot never change; those of removed ones leave the cache.
        self._read = {info.id: self._read[info.id] for info in infos}
        return {id_: facts for id_, facts in self._read.items() if facts is not None}

    def _verified(
        self, repository: Repository, known: Sequence[SnapshotInfo], keep: Sequence[SnapshotInfo]
    ) -> SnapshotId | None:
        """Return a snapshot that was read back wholly and is to stay; None if there is none yet.

        It is one of those that stay, or, on a busy machine, the newest one that was read back.

        Args:
            repository: the opened repository.
            known: all snapshots, newest first.
            keep: those that stay, newest first.
        """
        if self._is_busy() and self._samples < FULL_READ_EVERY:
            earlier = next((info.id for info in known if _is_verified(repository, info)), None)
            if earlier is not None and self._read_sample(repository, keep[0]):
                self._samples += 1
                return earlier
        for info in keep:
            if _is_verified(repository, info):
                return info.id
            reason = read_back(repository, info.id, self._should_yield)
            if reason is None:
                # Stopped by the next save: the removal waits for the next turn.
                self._yields += 1
                return None
            if reason:
                self._tell(Note(DAMAGE_NOTE, f"{info.id} cannot be read back: {reason}"))
                continue
            with repository.writer(
                wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager: verified"
            ) as writer:
                writer.set_marks(info.id, tags=(*info.tags, VERIFIED))
            self._samples = 0
            return info.id
        return None

    def _read_sample(self, repository: Repository, info: SnapshotInfo) -> bool:
        """Read a sample of a snapshot; return whether it is good, as far as that tells."""
        if VERIFIED in info.tags or DAMAGED in info.tags:
            return True
        # Not interrupted by the next save: it takes a sixteenth of a second for a gigabyte.
        reason = read_back(repository, info.id, one_in=_SAMPLE_EVERY)
        if reason:
            self._tell(Note(DAMAGE_NOTE, f"{info.id} cannot be read back: {reason}"))
        return not reason

    def _should_yield(self) -> bool:
        """Return whether the next save waits and housekeeping may still yield to it."""
        # Bounded: where saves come as fast as they are written, housekeeping would never finish and snapshots
        # pile up.
        return self._yields < _MAX_YIELDS and self._should_stop()

    def _free_space(self, repository: Repository, thresholds: Thresholds) -> None:
        """Sweep what nothing refers to."""
        from ciuic.maintenance.prune import prune

        report = prune(
            repository,
            None,
            thresholds=thresholds,
            wait_seconds=_LOCK_WAIT_SECONDS,
            should_stop=self._should_yield,
        )
        self._sweep_due = report.stopped
        self._yields = self._yields + 1 if report.stopped else 0


def split_by_rules(
    infos: Sequence[SnapshotInfo], rules: RetentionRules, facts: Mapping[str, Facts]
) -> tuple[list[SnapshotInfo], list[SnapshotId]]:
    """Return the snapshots that stay (newest first) and the ids of the others (oldest first).

    A snapshot whose facts are needed and missing stays: a read error is no reason to delete. Damaged
    snapshots take the place of no good one, and stay as long as if they were whole: a repair may still heal
    them.

    Args:
        infos: all snapshots, newest first.
        rules: retention rules.
        facts: facts by id, where the rules need them.
    """
    needed = needs_facts(rules.keep)
    good = [info for info in infos if DAMAGED not in info.tags]
    stay = {
        id_
        # Counted twice, with and without the damaged ones: a damaged snapshot must not push a good one out of
        # Latest(n).
        for counted in (infos, good)
        for id_ in kept([_candidate(info, facts.get(info.id), needed) for info in counted], rules.keep)
    }
    return [info for info in infos if info.id in stay], [
        info.id for info in reversed(infos) if info.id not in stay
    ]


def _is_verified(repository: Repository, info: SnapshotInfo) -> bool:
    """Return whether a snapshot was read back wholly, and its own file can still be read."""
    # The tag tells of the content; the snapshot's own file may have been damaged since.
    if VERIFIED not in info.tags:
        return False
    try:
        repository.snapshots.load(info.id)
    except CiuicError:
        return False
    return True


def _candidate(info: SnapshotInfo, facts: Facts | None, needed: bool) -> RetentionCandidate:
    """Return what the rules look at; a snapshot without the facts that are needed counts as held."""
    if facts is None:
        return RetentionCandidate(info.id, info.time_ns, info.held or needed)
    return RetentionCandidate(info.id, info.time_ns, info.held, facts.run, facts.step, facts.metrics)


def read_back(
    repository: Repository,
    id_: SnapshotId,
    should_stop: Callable[[], bool] = lambda: False,
    *,
    one_in: int = 1,
) -> str | None:
    """Read and check every byte of a snapshot, and that a reader finds every tensor of its state.

    What is damaged is marked (`marks.mark_damage`); a snapshot whose state cannot be loaded is tagged `DAMAGED`.

    Args:
        repository: the opened repository.
        id_: the snapshot.
        should_stop: whether to stop, asked again and again.
        one_in: number of chunks of which one is read, from a random one on; its trees are read wholly.

    Returns:
        "" if all is right, else what is wrong; None if it was stopped.
    """
    try:
        snapshot = repository.snapshots.load(id_)
        for count, reached in enumerate(Walker(repository).walk(snapshot), start=random.randrange(one_in)):
            if count % _STOP_CHECK_EVERY == 0 and should_stop():
                return None
            if reached.kind == "data" and count % one_in == 0:
                repository.chunks.get(reached.id)
    except CiuicError as error:
        mark_damage_of(repository, id_, _LOCK_WAIT_SECONDS, "SnapshotManager: mark damage")
        return error.message
    if one_in > 1:
        return ""
    try:
        check_resolves(repository, id_)
    except CiuicError as error:
        with repository.writer(
            wait_seconds=_LOCK_WAIT_SECONDS, command="SnapshotManager: mark damage"
        ) as writer:
            if id_ in repository.snapshots.names():
                tags = set(repository.snapshots.load(id_).tags)
                writer.set_marks(id_, tags=tuple(sorted(tags - {VERIFIED} | {DAMAGED})))
        return error.message
    return ""
