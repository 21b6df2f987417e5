"""Prune: apply the retention policy, then free the space that no snapshot needs any more.

Guarantees, in this order:

* **What cannot be read is never a reason to delete.** One snapshot file, tree or block map that cannot be read,
  and nothing at all is removed: CollectionRefused says what and what to do. So does a repository that has packs
  and no snapshot, unless the index says that none is missing: a first capture failed, or the last one was forgotten.
* A chunk is removed only when no remaining snapshot refers to it, nor to one that is stored as a difference from it, decided under the repository's lock. Most of the
  marking is done before the lock is taken, so that captures wait for the sweep and not for the walk.
* Stopped or killed anywhere, the repository is whole, and the next run frees the rest.
* The cost follows the distinct trees and block maps, not snapshots times files; memory is about 16 bytes a data chunk
  and 98 a node of trees and block maps, of which there are few.
* Removing snapshots and dropping dead packs need no free space.

What is kept is ciuic.retention's decision, except that ``min_free`` may go further: see ``_Run.make_room``.
"""

from __future__ import annotations

import time
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import tzinfo
from functools import partial

from ciuic.chunkset import ChunkSet
from ciuic.disk_space import available_bytes, total_bytes
from ciuic.errors import Busy, CiuicError, Damaged, NotFound
from ciuic.repository import Repository, Walker, Writer
from ciuic.repository.claim import is_claimed
from ciuic.restores import undoes_newest_change
from ciuic.retention import (
    NEWEST,
    TRAINING,
    UNDOES,
    Decision,
    MinFree,
    Plan,
    RetentionPolicy,
    plan_retention,
    snapshots_having,
)
from ciuic.sweep import (
    HURRIED,
    USUAL,
    PackUse,
    Progress,
    StopCheck,
    Stopped,
    SweepResult,
    Thresholds,
    add_bases,
    survey,
    sweep,
    worth_rewriting,
)
from ciuic.types import ChunkId, Snapshot, SnapshotId
from ciuic.units import human_size

_ASK_EVERY = 4096
_REMOVED_TOGETHER = 256


class CollectionRefused(Damaged):
    """Something cannot be read, so what it needs is not known: nothing was deleted."""


@dataclass(frozen=True, kw_only=True)
class _Options:
    policy: RetentionPolicy | None
    min_free: MinFree | None
    dry_run: bool
    thresholds: Thresholds
    now_ns: int
    tz: tzinfo | None


@dataclass
class PruneReport:
    """What was done, or with ``dry_run`` what would be."""

    plan: Plan
    removed: list[SnapshotId] = field(default_factory=list)
    removed_for_space: list[SnapshotId] = field(default_factory=list)
    """Of those, the ones that a rule kept and ``min_free`` took."""
    dropped_packs: int = 0
    rewritten_packs: int = 0
    freed_bytes: int = 0
    garbage_bytes: int = 0
    """Dead bytes that stay in packs which are not worth rewriting yet."""
    stopped: bool = False
    dry_run: bool = False
    notes: list[str] = field(default_factory=list)

    def add(self, swept: SweepResult) -> None:
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
) -> PruneReport:
    """Remove what the policy does not keep and free its space. Each snapshot in ``removed`` is gone durably.

    ``policy`` None removes no snapshot and only frees space. ``wait_seconds``: for the repository's lock, then
    Busy. ``should_stop`` is asked often, and ends the work early and cleanly (``report.stopped``). Raises
    CollectionRefused, Busy, and OSError when removing fails.
    """
    moment_ns = time.time_ns() if now_ns is None else now_ns
    options = _Options(
        policy=policy, min_free=min_free, dry_run=dry_run, thresholds=thresholds, now_ns=moment_ns, tz=tz
    )
    run = _Run(repository, options, progress, should_stop)
    report = PruneReport(run.plan(), dry_run=dry_run)
    try:
        run.mark_ahead([decision.id for decision in report.plan.kept])
        if dry_run:
            run.estimate(report)
        else:
            with repository.writer(wait_seconds=wait_seconds, command="prune") as writer:
                run.collect(writer, report)
    except Stopped:
        report.stopped = True
    return report


def forget(repository: Repository, ids: Sequence[SnapshotId], *, wait_seconds: float = 0) -> None:
    """Delete these snapshots, durably on return; their space is freed by the next prune. Needs no free space.

    Refuses held ones, except those held for an ordinary user, and unknown ones, before anything is deleted. A snapshot that cannot be read can be
    forgotten: asking for it by name is the way out of CollectionRefused.
    """
    with repository.writer(wait_seconds=wait_seconds, command="forget") as writer:
        unreadable = {snapshot.id for snapshot in repository.snapshots.unreadable()}
        for id_ in ids:
            if id_ in unreadable:
                continue
            snapshot = repository.snapshots.load(id_)
            if snapshot.held and snapshot.hold_uid is None:
                raise CiuicError(f"{id_} is held and stays", hint=f"`ciuic release {id_}` first")
        writer.remove_snapshots(ids)


class Marks:
    """What the snapshots walked so far refer to.

    After a walk that did not come to its end these marks must be thrown away: a node whose children were not
    all reached counts as seen, and would be skipped by the next walk.
    """

    def __init__(self, repository: Repository) -> None:
        self._repository = repository
        self._nodes: set[ChunkId] = set()
        self._data = ChunkSet()
        self.snapshots: set[SnapshotId] = set()

    def live(self, chunk: ChunkId) -> bool:
        """Whether a marked snapshot refers to ``chunk``."""
        return chunk in self._nodes or chunk in self._data

    def add_bases(self, should_stop: StopCheck | None = None) -> None:
        """Marks what the marked ones are stored as the difference from. To be called when all snapshots are walked."""
        add_bases(self._repository, self.live, self._data.add, should_stop)

    def __len__(self) -> int:
        """How many distinct chunks are live."""
        return len(self._nodes) + len(self._data)

    def mark(self, snapshot: Snapshot, should_stop: StopCheck | None = None, *, measure: bool = False) -> int:
        """Walk one snapshot; with ``measure`` the stored bytes of what it refers to and none before it did."""
        walker = Walker(self._repository, seen=self._nodes, seen_data=self._data)
        chunks = self._repository.chunks
        new_bytes = 0
        for count, reached in enumerate(walker.walk(snapshot)):
            if should_stop is not None and count % _ASK_EVERY == 0 and should_stop():
                raise Stopped
            # A chunk that no pack holds is check's business; it takes no space.
            if measure and chunks.has(reached.id):
                new_bytes += chunks.locate(reached.id).stored_bytes
        self.snapshots.add(snapshot.id)
        return new_bytes


class _Run:
    """One prune from beginning to end."""

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
        self.marks = Marks(repository)
        self.known: dict[SnapshotId, Snapshot] = {}
        """As their own files have them."""
        self.planned: tuple[tuple[object, ...], Plan] | None = None
        """The state of the snapshots that a plan was made from."""

    def plan(self) -> Plan:
        """The decision about every snapshot there is now. CollectionRefused when one cannot be read."""
        state = self.repository.snapshots.state()
        if self.planned is None or self.planned[0] != state:
            self.planned = state, self._plan()
        return self.planned[1]

    def _plan(self) -> Plan:
        # From the files themselves, which carry checksums: a bit that flipped in the catalogue's copy of a time or
        # a hold must not decide what is deleted.
        snapshots, unreadable = self.repository.snapshots.load_all()
        if unreadable:
            what = "; ".join(f"{snapshot.path}: {snapshot.reason}" for snapshot in unreadable)
            raise _refused(f"a snapshot cannot be read ({what})", unreadable[0].id)
        self.known = {snapshot.id: snapshot for snapshot in snapshots}
        if not snapshots and self.repository.packs() and not self.repository.misses_no_snapshot():
            raise CollectionRefused(
                "the repository has packs, no snapshot, and no record that none is missing: nothing was deleted",
                hint="put its snapshots/ back from a copy; if nothing of it is wanted, the next snapshot lets prune free the space",
            )
        if self.options.policy is None:
            return Plan(tuple(Decision(s.id, s.time_ns, ("no policy",)) for s in snapshots))
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
        )

    def mark_ahead(self, ids: Sequence[SnapshotId]) -> None:
        """Mark without the lock. Whatever goes wrong, somebody may just have removed a snapshot: begin again later."""
        try:
            self.mark(ids)
        except (Damaged, NotFound):
            self.marks = Marks(self.repository)
            if self.options.dry_run:
                self.mark(ids)

    def mark(self, ids: Iterable[SnapshotId]) -> None:
        wanted = [id_ for id_ in ids if id_ not in self.marks.snapshots]
        for done, id_ in enumerate(wanted):
            if self.progress is not None:
                self.progress("reading snapshots", done, len(wanted))
            self.mark_one(self.marks, id_)

    def mark_one(self, marks: Marks, id_: SnapshotId, *, measure: bool = False) -> int:
        try:
            return marks.mark(self.known[id_], self.should_stop, measure=measure)
        except Damaged as error:
            raise _refused(f"the snapshot {id_} cannot be read as a whole ({error})", id_) from error

    def estimate(self, report: PruneReport) -> None:
        """The figures of a dry run."""
        self.marks.add_bases(self.should_stop)
        found = survey(self.repository, self.marks.live, self.should_stop)
        uses = found.uses
        report.notes += [f"a pack cannot be listed as a whole: {error}" for error in found.damaged.values()]
        dead = [use for use in uses if use.dead]
        chosen = worth_rewriting(uses, self.options.thresholds)
        report.removed = list(report.plan.removed)
        report.dropped_packs, report.rewritten_packs = len(dead), len(chosen)
        report.freed_bytes = sum(use.size_bytes for use in dead) + _dead_bytes(chosen)
        report.garbage_bytes = _dead_bytes(uses) - _dead_bytes(dead) - _dead_bytes(chosen)
        missing_bytes = self.missing_bytes() - report.freed_bytes
        if missing_bytes > 0:
            for id_ in self.sacrifices(report.plan, missing_bytes)[0]:
                report.removed_for_space.append(id_)
                report.removed.append(id_)

    def collect(self, writer: Writer, report: PruneReport) -> None:
        """Under the lock: decide again, mark what has come since, remove, sweep. Busy while somebody has a claim."""
        if is_claimed(str(self.repository.path)):
            raise Busy(
                "several processes are storing one snapshot, and what they have stored belongs to none yet",
                hint="The next prune, after it, frees the space.",
            )
        report.plan = self.plan()
        self.mark(decision.id for decision in report.plan.kept)
        self.remove(writer, report, report.plan.removed)
        report.add(self.sweep(writer, self.options.thresholds))
        if not report.stopped:
            self.make_room(writer, report)

    def remove(self, writer: Writer, report: PruneReport, ids: Iterable[SnapshotId]) -> None:
        """Batch by batch: what makes a removal durable costs the same for one as for many."""
        chosen = list(ids)
        for first in range(0, len(chosen), _REMOVED_TOGETHER):
            if self.should_stop is not None and self.should_stop():
                raise Stopped
            batch = chosen[first : first + _REMOVED_TOGETHER]
            writer.remove_snapshots(batch)
            report.removed += batch

    def sweep(self, writer: Writer, thresholds: Thresholds) -> SweepResult:
        self.marks.add_bases(self.should_stop)
        return sweep(
            writer,
            self.marks.live,
            thresholds,
            live_chunks=len(self.marks),
            progress=self.progress,
            should_stop=self.should_stop,
        )

    # --- min_free

    def missing_bytes(self) -> int:
        """How far free space is below the floor; ≤ 0 when it is not."""
        if self.options.min_free is None:
            return 0
        path = self.repository.path
        return self.options.min_free.floor_bytes(total_bytes(path)) - available_bytes(path)

    def make_room(self, writer: Writer, report: PruneReport) -> None:
        """Below the floor, first rewrite harder, then give up the oldest snapshots that only rules of time keep.

        The newest (of each root), held and tagged ones and states of trainings stay even if the floor cannot be reached: the
        report says so. What is held for an ordinary user goes, first of all where nothing else keeps it.
        """
        if self.missing_bytes() > 0 and report.garbage_bytes > 0:
            report.add(self.sweep(writer, HURRIED))
        if report.stopped or self.missing_bytes() <= 0:
            return
        chosen, marks = self.sacrifices(report.plan, self.missing_bytes())
        if chosen:
            self.marks = marks
            self.remove(writer, report, chosen)
            report.removed_for_space += chosen
            report.notes += [self._yielded(id_) for id_ in chosen if id_ in self.held_for_users()]
            report.add(self.sweep(writer, HURRIED))
        still_missing = self.missing_bytes()
        if still_missing > 0 and not report.stopped:
            report.notes.append(
                f"{human_size(still_missing)} less is free than min_free asks for; "
                "what remains is the newest, held or tagged, or not of this repository"
            )

    def held_for_users(self) -> frozenset[SnapshotId]:
        """Those held for ordinary users: such a hold binds the rules, and yields to ``min_free``."""
        return frozenset(snapshot.id for snapshot in self.known.values() if snapshot.hold_uid is not None)

    def _yielded(self, id_: SnapshotId) -> str:
        return f"{id_} was held for user {self.known[id_].hold_uid}, and yielded to min_free"

    def sacrifices(self, plan: Plan, missing_bytes: int) -> tuple[list[SnapshotId], Marks]:
        """The fewest oldest snapshots that free ``missing_bytes``, oldest first, and the marks of all others.

        Walked newest first, each snapshot's count is what it alone adds to those before it: what goes when it
        and everything after it in that order go.
        """
        users = self.held_for_users()
        safe = [decision.id for decision in plan.kept if _stays(decision, users)]
        others = [decision.id for decision in plan.kept if not _stays(decision, users)]
        # At the end, so that they go first: a user's holds must not cost others what the rules keep for them.
        alone_held = {decision.id for decision in plan.kept if decision.reasons == ("held",)}
        others.sort(key=lambda id_: id_ in alone_held)
        marks = Marks(self.repository)
        for id_ in safe:
            self.mark_one(marks, id_)
        alone = [self.mark_one(marks, id_, measure=True) for id_ in others]
        freed_bytes, first = 0, len(others)
        while first > 0 and freed_bytes < missing_bytes:
            first -= 1
            freed_bytes += alone[first]
        rest = Marks(self.repository)
        for id_ in (*safe, *others[:first]):
            self.mark_one(rest, id_)
        return others[first:][::-1], rest


def _stays(decision: Decision, held_for_users: Container[SnapshotId]) -> bool:
    return any(
        reason in (TRAINING, UNDOES)
        or reason.startswith((NEWEST, "tag "))
        or (reason == "held" and decision.id not in held_for_users)
        for reason in decision.reasons
    )


def _dead_bytes(uses: Iterable[PackUse]) -> int:
    return sum(use.dead_bytes for use in uses)


def _refused(what: str, id_: str) -> CollectionRefused:
    return CollectionRefused(
        f"{what}: nothing was deleted",
        hint=f"`ciuic check --repair` may mend it; otherwise `ciuic forget {id_}` gives that snapshot up",
    )
