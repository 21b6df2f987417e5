"""Prune: apply the retention policy, then free the space that no snapshot needs any more.

Guarantees, in this order:

* **What cannot be read is never a reason to delete.** If one snapshot file, tree or block map cannot be read, nothing at all is
  removed: CollectionRefused says what it is and what to do. The same holds for a repository that has packs and no snapshot,
  unless the index says that none is missing (a first capture failed, or the last snapshot was forgotten).
* A chunk is removed only when no remaining snapshot refers to it or to a chunk that is stored as a difference from it. That is
  decided under the repository's lock. Most of the marking is done before the lock is taken, so that captures wait for the sweep
  and not for the walk.
* A run that is stopped or killed anywhere leaves a sound repository, and the next run frees the rest.
* The cost follows the distinct trees and block maps, not snapshots times files. Memory is about 16 bytes a data chunk and 98 a
  node of trees and block maps, of which there are few.
* Removing snapshots and dropping dead packs need no free space.

ciuic.retention decides which snapshots are kept, except that ``min_free`` may go further (``_Run.make_room``), and that snapshots
which only wait for a remote yield when space becomes short. Never given up are the newest snapshot of each root, held and tagged ones,
states of trainings, and a safety snapshot while the restore that it can undo is the newest change. A hold for an ordinary user stands
against the rules, and yields.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from functools import partial
from types import MappingProxyType

from ciuic.compare.restore_records import undoes_newest_change
from ciuic.errors import Busy, CiuicError, Damaged, NotFound
from ciuic.maintenance.chunkset import NeededChunks
from ciuic.maintenance.sweep import (
    HURRIED,
    USUAL,
    PackUse,
    Progress,
    StopCheck,
    SweepResult,
    SweepStopped,
    Thresholds,
    add_bases,
    survey,
    sweep,
    worth_rewriting,
)
from ciuic.repository import Repository, Writer
from ciuic.repository.locks import is_claimed
from ciuic.retention import (
    NEWEST,
    TRAINING,
    UNDOES,
    Decision,
    MinFree,
    RetentionPlan,
    RetentionPolicy,
    plan_retention,
    snapshots_having,
)
from ciuic.system.disk_space import available_bytes, total_bytes, unstored_floor_bytes
from ciuic.types import Snapshot, SnapshotId
from ciuic.units import human_size

_CHUNKS_BETWEEN_STOP_CHECKS = 4096


class LiveChunks(NeededChunks):
    """Chunks that the snapshots walked so far refer to."""

    def __init__(self, repository: Repository) -> None:
        super().__init__()
        self._repository = repository
        self.snapshots: set[SnapshotId] = set()

    def add_bases(self, should_stop: StopCheck | None = None) -> None:
        """Mark the bases of marked chunks, from which these are stored as differences. Called when all snapshots are walked."""
        add_bases(self._repository, self.__contains__, self.add, should_stop)

    def mark(self, snapshot: Snapshot, should_stop: StopCheck | None = None, *, measure: bool = False) -> int:
        """Walk one snapshot; with ``measure`` return the stored bytes of the chunks that no snapshot before it refers to."""
        walker = self.walker(self._repository)
        chunks = self._repository.chunks
        new_bytes = 0
        for count, reached in enumerate(walker.walk(snapshot)):
            if should_stop is not None and count % _CHUNKS_BETWEEN_STOP_CHECKS == 0 and should_stop():
                raise SweepStopped
            # A chunk that no pack holds takes no space; `ciuic check` reports it.
            if measure and chunks.has(reached.id):
                new_bytes += chunks.locate(reached.id).stored_bytes
        self.snapshots.add(snapshot.id)
        return new_bytes


def space_order(
    plan: RetentionPlan, held_for_users: Container[SnapshotId], *, only_unstored: bool = False
) -> tuple[list[SnapshotId], list[SnapshotId]]:
    """Return the kept snapshots that never yield, and the others, of which the last yields first.

    First go the snapshots that only a user's hold keeps: holds must not cost other users what the rules keep for them. Then those
    that every remote has, then those that a remote lacks, which would be lost for good. Each group goes oldest first.

    Args:
        plan: decisions, newest first.
        held_for_users: snapshots held for ordinary users.
        only_unstored: only snapshots yield that nothing keeps but a remote that has not stored them yet.
    """
    safe: list[SnapshotId] = []
    others: list[Decision] = []
    for decision in plan.kept:
        if _stays(decision, held_for_users) or (only_unstored and decision.local_reasons):
            safe.append(decision.id)
        else:
            others.append(decision)
    # Sorting is stable: within a group the order stays newest first.
    others.sort(key=lambda decision: (not decision.remotes, decision.local_reasons == ("held",)))
    return safe, [decision.id for decision in others]


def _stays(decision: Decision, held_for_users: Container[SnapshotId]) -> bool:
    return any(
        reason in (TRAINING, UNDOES)
        or reason.startswith((NEWEST, "tag "))
        or (reason == "held" and decision.id not in held_for_users)
        for reason in decision.local_reasons
    )


# Snapshots removed with one sync of the directory, which costs the same for one as for many.
_REMOVAL_BATCH_SNAPSHOTS = 256


class CollectionRefused(Damaged):
    """Nothing was deleted, because something cannot be read and what it needs is not known."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    """Options of one prune."""

    policy: RetentionPolicy | None
    min_free: MinFree | None
    dry_run: bool
    thresholds: Thresholds
    now_ns: int
    tz: tzinfo | None
    remotes: Mapping[str, Container[str] | None]
    reserve_bytes: int


@dataclass
class PruneResult:
    """Result of a prune; with ``dry_run`` an estimate of it."""

    plan: RetentionPlan
    removed: list[SnapshotId] = field(default_factory=list)
    removed_for_space: list[SnapshotId] = field(default_factory=list)
    """Removed snapshots that a rule kept and that were given up for free space."""
    removed_unstored: list[Decision] = field(default_factory=list)
    """Those of ``removed_for_space`` that some remote had not stored yet."""
    dropped_packs: int = 0
    rewritten_packs: int = 0
    freed_bytes: int = 0
    garbage_bytes: int = 0
    """Dead bytes that stay in packs that are not worth rewriting yet."""
    stopped: bool = False
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)

    def add(self, swept: SweepResult) -> None:
        """Add the result of a sweep."""
        self.dropped_packs += swept.dropped_packs
        self.rewritten_packs += swept.rewritten_packs
        self.freed_bytes += swept.freed_bytes
        self.garbage_bytes = swept.garbage_bytes
        self.stopped |= swept.stopped
        self.notes += swept.notes


def prune(
    repository: Repository,
    policy: RetentionPolicy | None = None,
    *,
    min_free: MinFree | None = None,
    dry_run: bool = False,
    wait_seconds: float = 0,
    thresholds: Thresholds = USUAL,
    progress: Progress | None = None,
    should_stop: StopCheck | None = None,
    now_ns: int | None = None,
    tz: tzinfo | None = None,
    remotes: Mapping[str, Container[str] | None] = MappingProxyType({}),
    reserve_bytes: int = 0,
) -> PruneResult:
    """Remove the snapshots that the policy does not keep, and free their space. Removals are durable on return.

    Args:
        repository: the open repository.
        policy: rules of retention; None removes no snapshot and only frees space.
        min_free: free space to reach, even against rules.
        dry_run: change nothing, and return an estimate.
        wait_seconds: time to wait for the repository's lock.
        thresholds: which packs are worth rewriting.
        progress: called with the progress.
        should_stop: called often; True ends the work early and cleanly (`PruneResult.stopped`).
        now_ns: present time; None: the clock's.
        tz: time zone of the rules; None: the machine's.
        remotes: what each remote needs no more (`plan_retention`); the other snapshots stay for it while there is space.
        reserve_bytes: free space that captures leave to others.

    Raises:
        CollectionRefused: something cannot be read.
        Busy: the lock could not be taken, or several processes are storing one snapshot.
        OSError: a file cannot be removed.
    """
    options = _Options(
        policy=policy,
        min_free=min_free,
        dry_run=dry_run,
        thresholds=thresholds,
        now_ns=time.time_ns() if now_ns is None else now_ns,
        tz=tz,
        remotes=remotes,
        reserve_bytes=reserve_bytes,
    )
    run = _Run(repository, options, progress, should_stop)
    report = PruneResult(run.plan(), dry_run=dry_run)
    try:
        # The walk takes long, so it is done before the lock is taken. Marks made without the lock can only be too many: an id names
        # its content, so what lies below a marked node stays below it, whatever other processes commit or remove.
        run.mark_ahead([decision.id for decision in report.plan.kept])
        if dry_run:
            run.estimate(report)
        else:
            with repository.writer(wait_seconds=wait_seconds, command="prune") as writer:
                run.collect(writer, report)
    except SweepStopped:
        report.stopped = True
    return report


def forget(repository: Repository, ids: Sequence[SnapshotId], *, wait_seconds: float = 0) -> None:
    """Delete these snapshots, durably on return; their space is freed by the next prune. Needs no free space.

    Held snapshots (except those held for an ordinary user) and unknown ones are refused before anything is deleted. A snapshot
    that cannot be read can be forgotten: naming it is the way out of CollectionRefused.
    """
    with repository.writer(wait_seconds=wait_seconds, command="forget") as writer:
        unreadable = {snapshot.id for snapshot in repository.snapshots.unreadable()}
        for id_ in ids:
            # Whether it was held cannot be known, and naming it is the operator's decision.
            if id_ in unreadable:
                continue
            snapshot = repository.snapshots.load(id_)
            if snapshot.held and snapshot.hold_uid is None:
                raise CiuicError(
                    f"{id_} is held and cannot be forgotten", hint=f"`ciuic release {id_}` first"
                )
        writer.remove_snapshots(ids)


class _Run:
    """A prune from beginning to end."""

    def __init__(
        self,
        repository: Repository,
        options: _Options,
        progress: Progress | None,
        should_stop: StopCheck | None,
    ) -> None:
        self.repository = repository
        self.options = options
        self.progress = progress
        self.should_stop = should_stop
        self.marks = LiveChunks(repository)
        self.known: dict[SnapshotId, Snapshot] = {}
        """Snapshots as their own files have them."""
        self.planned: tuple[tuple[object, ...], RetentionPlan] | None = None
        """The last plan, with the state of the snapshots that it was made from."""

    def plan(self) -> RetentionPlan:
        """Return the decision about every snapshot that exists now. CollectionRefused when one cannot be read."""
        state = self.repository.snapshots.state()
        if self.planned is None or self.planned[0] != state:
            # The plan is made before and under the lock; from unchanged files it is the same, so they are not
            # read again: 0.25 s of processor time in place of 0.29 for half of 200 snapshots.
            self.planned = state, self._plan()
        return self.planned[1]

    def _plan(self) -> RetentionPlan:
        # Read from the files, which carry checksums: a flipped bit in the catalogue's copy of a time or a hold must not decide
        # what is deleted.
        snapshots, unreadable = self.repository.snapshots.load_all()
        if unreadable:
            what = "; ".join(f"{snapshot.path}: {snapshot.reason}" for snapshot in unreadable)
            raise _refused(f"a snapshot cannot be read ({what})", unreadable[0].id)
        self.known = {snapshot.id: snapshot for snapshot in snapshots}
        # Packs without a snapshot: the snapshots/ directory may be lost, unless the index has recorded that none is missing.
        if not snapshots and self.repository.packs() and not self.repository.misses_no_snapshot():
            raise CollectionRefused(
                "nothing was deleted: the repository has packs but no snapshot, and no record that none is missing",
                hint="restore its snapshots/ from a copy; if nothing in it is wanted, prune frees the space after the next snapshot",
            )
        if self.options.policy is None:
            return RetentionPlan(tuple(Decision(s.id, s.time_ns, ("no policy",)) for s in snapshots))
        return plan_retention(
            snapshots,
            self.options.policy,
            now_ns=self.options.now_ns,
            tz=self.options.tz,
            states={snapshot.id for snapshot in snapshots if snapshot.is_state},
            having=snapshots_having(
                {snapshot.id: [root.path for root in snapshot.roots] for snapshot in snapshots},
                [root.path for snapshot in snapshots for root in snapshot.left_out],
            ),
            undoes=partial(undoes_newest_change, self.repository, snapshots),
            remotes=self.options.remotes,
        )

    def mark_ahead(self, ids: Sequence[SnapshotId]) -> None:
        """Mark without the lock."""
        try:
            self.mark(ids)
        except (Damaged, NotFound):
            # Another process may have removed a snapshot during the walk: what counts is the marking under the lock. The marks of a
            # walk that did not end are wrong (a node counts as seen whose children were not), so they are thrown away.
            self.marks = LiveChunks(self.repository)
            # A dry run has no second marking under the lock.
            if self.options.dry_run:
                self.mark(ids)

    def mark(self, ids: Iterable[SnapshotId]) -> None:
        wanted = [id_ for id_ in ids if id_ not in self.marks.snapshots]
        for done, id_ in enumerate(wanted):
            if self.progress is not None:
                self.progress("reading snapshots", done, len(wanted))
            self.mark_one(self.marks, id_)

    def mark_one(self, marks: LiveChunks, id_: SnapshotId, *, measure: bool = False) -> int:
        try:
            return marks.mark(self.known[id_], self.should_stop, measure=measure)
        except Damaged as error:
            raise _refused(f"the snapshot {id_} cannot be read completely ({error})", id_) from error

    def estimate(self, report: PruneResult) -> None:
        """Compute the figures of a dry run."""
        self.marks.add_bases(self.should_stop)
        found = survey(self.repository, self.marks.__contains__, self.should_stop)
        uses = found.uses
        report.notes += [f"a pack cannot be listed completely: {error}" for error in found.damaged.values()]
        dead = [use for use in uses if use.dead]
        chosen = worth_rewriting(uses, self.options.thresholds)
        report.removed = list(report.plan.removed)
        report.dropped_packs, report.rewritten_packs = len(dead), len(chosen)
        report.freed_bytes = sum(use.size_bytes for use in dead) + _dead_bytes(chosen)
        report.garbage_bytes = _dead_bytes(uses) - _dead_bytes(dead) - _dead_bytes(chosen)
        # Without the harder sweep of `make_room`, so more snapshots may be named than would be removed.
        missing_bytes = self.missing_bytes(report.plan) - report.freed_bytes
        if missing_bytes > 0:
            given_up = self.choose_for_space(report.plan, missing_bytes)[0]
            self.note_given_up(report, given_up)
            report.removed += given_up

    def collect(self, writer: Writer, report: PruneResult) -> None:
        """Decide again under the lock, mark snapshots that were added since, remove, and sweep."""
        # The chunks of a snapshot that several processes are storing belong to no snapshot yet, and would seem dead.
        if is_claimed(str(self.repository.path)):
            raise Busy(
                "several processes are storing a snapshot whose chunks do not belong to it yet, or `ciuic copy` is copying the repository",
                hint="run prune again after that",
            )
        report.plan = self.plan()
        self.mark(decision.id for decision in report.plan.kept)
        self.remove(writer, report, report.plan.removed)
        report.add(self.sweep(writer, self.options.thresholds))
        if not report.stopped:
            self.make_room(writer, report)

    def remove(self, writer: Writer, report: PruneResult, ids: Iterable[SnapshotId]) -> None:
        """Remove snapshots in batches."""
        chosen = list(ids)
        for first in range(0, len(chosen), _REMOVAL_BATCH_SNAPSHOTS):
            if self.should_stop is not None and self.should_stop():
                raise SweepStopped
            batch = chosen[first : first + _REMOVAL_BATCH_SNAPSHOTS]
            writer.remove_snapshots(batch)
            report.removed += batch

    def sweep(self, writer: Writer, thresholds: Thresholds) -> SweepResult:
        self.marks.add_bases(self.should_stop)
        return sweep(
            writer,
            self.marks.__contains__,
            thresholds,
            live_chunks=len(self.marks),
            progress=self.progress,
            should_stop=self.should_stop,
        )

    # --- min_free

    def missing_bytes(self, plan: RetentionPlan) -> int:
        """Return how many bytes of free space are missing; 0 or less if none are."""
        path, min_free = self.repository.path, self.options.min_free
        # Without min_free, only snapshots that wait for a remote and for nothing else ever yield.
        if min_free is None and not any(d.remotes and not d.local_reasons for d in plan.kept):
            return 0
        floor_bytes = unstored_floor_bytes(min_free, total_bytes(path), self.options.reserve_bytes)
        return floor_bytes - available_bytes(path)

    def make_room(self, writer: Writer, report: PruneResult) -> None:
        """Reach ``min_free``: rewrite more packs first, then give up the oldest snapshots that only rules of time keep.

        `space_order` says which snapshots stay even if ``min_free`` cannot be reached; the report says so.
        """
        # Garbage before snapshots: copying costs time, a removed snapshot is gone.
        if self.missing_bytes(report.plan) > 0 and report.garbage_bytes > 0:
            report.add(self.sweep(writer, HURRIED))
        if report.stopped or self.missing_bytes(report.plan) <= 0:
            return
        chosen, marks = self.choose_for_space(report.plan, self.missing_bytes(report.plan))
        # The set of live chunks has no removal, so a new one is marked without the snapshots to be given up.
        if chosen:
            self.marks = marks
            self.remove(writer, report, chosen)
            self.note_given_up(report, chosen)
            report.add(self.sweep(writer, HURRIED))
        still_missing = self.missing_bytes(report.plan)
        if still_missing > 0 and not report.stopped and self.options.min_free is not None:
            report.notes.append(
                f"{human_size(still_missing)} more would have to be free for min_free; "
                "the remaining snapshots are the newest, held or tagged ones, and other files use the rest"
            )

    def note_given_up(self, report: PruneResult, chosen: Sequence[SnapshotId]) -> None:
        """Add snapshots that are given up for space to the report."""
        report.removed_for_space += chosen
        report.notes += [
            f"{id_} was held for user {self.known[id_].hold_uid}, and yielded to min_free"
            for id_ in chosen
            if id_ in self.held_for_users()
        ]
        decisions = {decision.id: decision for decision in report.plan.kept}
        report.removed_unstored += [decisions[id_] for id_ in chosen if decisions[id_].remotes]

    def held_for_users(self) -> frozenset[SnapshotId]:
        """Return the snapshots held for ordinary users: such a hold stands against the rules, and yields to ``min_free``."""
        return frozenset(snapshot.id for snapshot in self.known.values() if snapshot.hold_uid is not None)

    def choose_for_space(
        self, plan: RetentionPlan, missing_bytes: int
    ) -> tuple[list[SnapshotId], LiveChunks]:
        """Return the fewest oldest snapshots that free ``missing_bytes``, oldest first, and the live chunks of all others.

        The snapshots are walked in `space_order`, so each one's count is what it adds to those before it: the bytes freed when it
        and everything after it in that order are removed.
        """
        safe, others = space_order(plan, self.held_for_users(), only_unstored=self.options.min_free is None)
        marks = LiveChunks(self.repository)
        for id_ in safe:
            self.mark_one(marks, id_)
        alone = [self.mark_one(marks, id_, measure=True) for id_ in others]
        freed_bytes, first = 0, len(others)
        # From the last on: each count is right only if everything after it goes too.
        while first > 0 and freed_bytes < missing_bytes:
            first -= 1
            freed_bytes += alone[first]
        rest = LiveChunks(self.repository)
        for id_ in (*safe, *others[:first]):
            self.mark_one(rest, id_)
        return others[first:][::-1], rest


def _dead_bytes(uses: Iterable[PackUse]) -> int:
    return sum(use.dead_bytes for use in uses)


def _refused(what: str, id_: str) -> CollectionRefused:
    return CollectionRefused(
        f"{what}: nothing was deleted",
        hint=f"`ciuic check --repair` may repair it; otherwise `ciuic forget {id_}` gives up that snapshot",
    )
