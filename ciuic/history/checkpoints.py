"""Checkpoints in the snapshots of a root, each with its verdict, and the newest snapshot from which a training can go on.

That is the one whose newest checkpoint is whole.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator, Sequence
from typing import Final, NamedTuple

from ciuic.errors import Damaged, NotFound
from ciuic.history.versions import MAX_PATH_BYTES, OnDamage, PathTooLong, Timeline, raise_damage
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.lookup import Located, find, is_within, join
from ciuic.types import Snapshot
from ciuic.verdicts.sources import SnapshotDirectory
from ciuic.verdicts.verdict import Checkpoint, checkpoints_in, may_hold_checkpoints


class StoredCheckpoint(NamedTuple):
    """A checkpoint in a snapshot."""

    checkpoint: Checkpoint
    mtime_ns: int
    """Latest change of one of its files."""
    snapshot: Snapshot
    host: str


def checkpoints(
    repository: Repository,
    timeline: Timeline,
    snapshot: Snapshot | None = None,
    *,
    path: bytes | None = None,
    on_damage: OnDamage = raise_damage,
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints in a snapshot of a root, by directory.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to search.
        snapshot: One of its snapshots; None for the newest.
        path: Only what is at or below this absolute path in the root; None for all.
        on_damage: Called for directories that cannot be read. Content that cannot be read is UNKNOWN.
    """
    snapshot = snapshot or timeline.snapshots[0]
    root = timeline.root_of(snapshot)
    lineage = Lineage()
    # For the frame of the root alone.
    lineage.enter(b"")
    stack = [iter([_start(repository, timeline, snapshot, path)])]
    while stack:
        at = next(stack[-1], None)
        if at is None:
            stack.pop()
            lineage.leave()
            continue
        try:
            children = list(repository.trees.entries(at.entry.content))
            lineage.enter(at.entry.content)
        except Damaged as error:
            on_damage(snapshot, at.path, error)
            continue
        covered: set[bytes] = set()
        if may_hold_checkpoints([child.name for child in children]):
            directory = SnapshotDirectory(repository, snapshot, at, timeline.before)
            try:
                times = {child.name: child.mtime_ns for child in directory.entries()}
                for found in checkpoints_in(directory):
                    covered.update(found.files)
                    if path is not None and not is_within(found.path, path):
                        continue
                    mtime_ns = max((times.get(name, 0) for name in found.files), default=0)
                    yield StoredCheckpoint(found, mtime_ns, snapshot, timeline.host)
            except Damaged as error:
                on_damage(snapshot, at.path, error)
        below = [child for child in children if child.is_dir and child.name not in covered and child.content]
        deeper = []
        for child in below:
            inside = join(at.path, child.name)
            if path is not None and not is_within(inside, path):
                continue
            if len(inside) > MAX_PATH_BYTES:
                on_damage(snapshot, inside, PathTooLong(inside))
            else:
                deeper.append(Located(root, inside, child))
        stack.append(iter(deeper))


def _start(repository: Repository, timeline: Timeline, snapshot: Snapshot, path: bytes | None) -> Located:
    """Return the directory to begin with. A directory may be a checkpoint itself, which the one above it tells."""
    if path is None or path == timeline.path:
        root = timeline.root_of(snapshot)
        return Located(root, timeline.path, root.entry)
    above = find(repository, snapshot, posixpath.dirname(path))
    if not above.entry.is_dir:
        raise NotFound(f"{one_line(above.path)} is no directory in snapshot {snapshot.id}")
    return above


_STEP: Final = re.compile(rb"step[-_=]?([0-9]{1,18})")
_NUMBER: Final = re.compile(rb"([0-9]{1,18})")


class PassedOver(NamedTuple):
    """A snapshot newer than the chosen one, and why it was not chosen."""

    snapshot: Snapshot
    reason: str
    checkpoint: StoredCheckpoint | None
    """Its newest checkpoint, if it has any."""
    good: StoredCheckpoint | None = None
    """Its newest GOOD checkpoint, an older one."""


class LastGood(NamedTuple):
    """The newest snapshot whose newest checkpoint is GOOD; where there is none, the one with the newest GOOD checkpoint."""

    repository: Repository
    snapshot: Snapshot
    checkpoint: StoredCheckpoint
    passed_over: tuple[PassedOver, ...]
    """Newest first."""
    not_good: tuple[StoredCheckpoint, ...] = ()
    """Newer checkpoints beside the chosen one that are not GOOD: a program that looks for its newest one would take them."""

    @property
    def lost_steps(self) -> int | None:
        """Steps between the newest checkpoint that was passed over and the chosen one, by their names; None if these do not tell."""
        newest = next((one.checkpoint for one in self.passed_over if one.checkpoint), None) or next(
            iter(self.not_good), None
        )
        if newest is None:
            return None
        there, here = step_of(newest.checkpoint.path), step_of(self.checkpoint.checkpoint.path)
        return None if there is None or here is None else max(0, there - here)

    @property
    def newer_good(self) -> StoredCheckpoint | None:
        """The newest GOOD checkpoint of the snapshots that were passed over, if it is newer than the chosen one.

        A program that looks for its newest checkpoint would take the one beside it, so it is to be restored alone.
        """
        found = [
            one.good for one in self.passed_over if one.good and one.good.mtime_ns > self.checkpoint.mtime_ns
        ]
        return max(found, key=lambda one: one.mtime_ns, default=None)


def step_of(path: bytes) -> int | None:
    """Return the step that the name of a checkpoint tells: the number behind "step", else its only number."""
    name = posixpath.basename(path)
    if found := _STEP.findall(name):
        return int(found[-1])
    numbers = _NUMBER.findall(name)
    return int(numbers[0]) if len(numbers) == 1 else None


def last_good(places: Sequence[tuple[Repository, Timeline]], path: bytes) -> LastGood:
    """Return the newest snapshot whose newest checkpoint at or below a path is GOOD.

    Where the newest one of every snapshot is torn, as of a program that was killed at each save, the choice is the snapshot with
    the newest GOOD one. The newest checkpoint is the one with the latest change of a file. A snapshot of which something there cannot be read is
    passed over, and so are safety snapshots, silently.

    Args:
        places: Timelines of the root with the path.
        path: Absolute path, as the snapshots have it.

    Raises:
        NotFound: no snapshot has any GOOD one; the message has the reasons.
    """
    passed_over: list[PassedOver] = []
    second: LastGood | None = None
    for repository, timeline, snapshot in _newest_first(places):
        if snapshot.is_safety:
            continue
        try:
            found = list(checkpoints(repository, timeline, snapshot, path=path))
        except NotFound:
            passed_over.append(PassedOver(snapshot, "it has nothing there", None))
            continue
        except Damaged as error:
            passed_over.append(PassedOver(snapshot, one_line(error.message), None))
            continue
        newest = max(found, key=lambda one: (one.mtime_ns, one.checkpoint.path), default=None)
        if newest is None:
            passed_over.append(PassedOver(snapshot, "it has no checkpoint of a known format there", None))
        elif newest.checkpoint.verdict.is_good:
            return LastGood(repository, snapshot, newest, tuple(passed_over))
        else:
            verdict = newest.checkpoint.verdict
            reason = f"{one_line(newest.checkpoint.path)} is {verdict.state}: {one_line(verdict.reason)}"
            good = max(
                (one for one in found if one.checkpoint.verdict.is_good),
                key=lambda one: one.mtime_ns,
                default=None,
            )
            if good is not None and (second is None or good.mtime_ns > second.checkpoint.mtime_ns):
                newer = [one for one in found if one.mtime_ns > good.mtime_ns]
                newer.sort(key=lambda one: -one.mtime_ns)
                second = LastGood(repository, snapshot, good, tuple(passed_over), tuple(newer))
            passed_over.append(PassedOver(snapshot, reason, newest, good))
    if second is not None:
        return second
    raise NotFound(
        f"no snapshot has a GOOD checkpoint at {one_line(path)}"
        + "".join(f"\n  {one.snapshot.id}: {one.reason}" for one in passed_over[:5])
        + (f"\n  and {len(passed_over) - 5} more" if len(passed_over) > 5 else ""),
        hint="ciuic checkpoints ID shows all checkpoints of a snapshot; -s ID restores from any",
    )


def _newest_first(
    places: Sequence[tuple[Repository, Timeline]],
) -> Iterator[tuple[Repository, Timeline, Snapshot]]:
    found = [
        (snapshot.order_ns, repository, timeline, snapshot)
        for repository, timeline in places
        for snapshot in timeline.snapshots
    ]
    for _, repository, timeline, snapshot in sorted(found, key=lambda one: -one[0]):
        yield repository, timeline, snapshot
