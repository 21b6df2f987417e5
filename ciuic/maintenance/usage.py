"""Space that each snapshot takes alone: the stored bytes that prune could free if it were forgotten.

Guarantees: exact, as of the moment of the call: the stored bytes of every chunk, in all its copies, that the named snapshots refer to
and no other does, bases of chunks stored as differences included. The structure of packs, and the snapshot files, are not counted.
The cost follows the distinct nodes of trees and block maps, each read once, and again each time that one more grouping is found to share it; memory is
about 20 bytes a distinct chunk. Read-only, without a lock. Nothing is estimated: what cannot be read ends the count with an error, or is
named, if the caller asks for that. What only unreadable parts refer to then counts as needed by nothing.

Each chunk has a label: for every way of grouping (by snapshot, root, period, and the set asked about) the one group that refers to it,
or that several do. The walk passes a chunk over if its label already covers the one with which it is reached.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Collection
from datetime import datetime, timedelta, tzinfo
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged
from ciuic.maintenance.chunkset import ChunkTable, fingerprint
from ciuic.maintenance.sweep import StopCheck, SweepStopped, each_list
from ciuic.repository import PackRecord, Repository, Walker
from ciuic.repository.snapshot_walk import OnDamage
from ciuic.types import ChunkId, SnapshotId, is_safety

_SHARED: Final = -1
"""Group of a chunk that several groups refer to."""
_BY_SNAPSHOT, _BY_ROOT, _BY_PERIOD, _BY_SET = range(4)
_NS: Final = 10**9

PERIODS: Final = ("day", "week", "month")


class SnapshotUse(NamedTuple):
    """Space of one snapshot."""

    id: SnapshotId
    time_ns: int
    roots: tuple[bytes, ...]
    tags: tuple[str, ...]
    is_safety: bool
    size_bytes: int
    """Logical size."""
    alone_bytes: int
    """Stored bytes that no other snapshot needs."""


class GroupUse(NamedTuple):
    """Space of all snapshots of a root, or of a period."""

    name: str
    """Path of the root, or first day of the period: YYYY-MM-DD; of a month YYYY-MM."""
    snapshots: int
    size_bytes: int
    """Sum of the logical sizes."""
    alone_bytes: int
    """Stored bytes that nothing outside the group needs."""


class Usage(NamedTuple):
    """Space of a repository."""

    snapshots: list[SnapshotUse]
    """Newest first."""
    roots: list[GroupUse]
    """Sorted by path."""
    periods: list[GroupUse]
    """Newest first."""
    together_bytes: int
    """Stored bytes that only the snapshots of the set need; 0 without a set."""
    size_bytes: int
    """Sum of the logical sizes of all snapshots."""
    raw_bytes: int
    """Size of the needed chunks before compression."""
    stored_bytes: int
    """Size of the needed chunks as stored."""
    garbage_bytes: int
    """Stored bytes that no snapshot needs: the next prune may free them."""
    packs_bytes: int
    """Size of all packs."""


class _Labels(ChunkTable):
    """Labels of the chunks reached so far; the set of seen chunks of a walk, whose members depend on the label that it walks with."""

    def __init__(self) -> None:
        super().__init__()
        # Label 0 is that of a chunk that nothing refers to.
        self.groups: list[tuple[int, ...]] = [()]
        self._numbers: dict[tuple[int, ...], int] = {}
        self._joined: dict[tuple[int, int], int] = {}
        self._current = 0
        # Whether a label covers the current one. Each entry of each directory is looked up: it is the cost of all.
        self._covers: dict[int, bool] = {}

    def walk_with(self, groups: tuple[int, ...]) -> None:
        """Take the groups for which chunks are reached from now on."""
        self._current = self._number(groups)
        self._covers = {0: False}

    def __contains__(self, chunk: object) -> bool:
        """Return whether the current label adds nothing to that of the chunk."""
        label = self.get(fingerprint(chunk))  # type: ignore[arg-type]
        covers = self._covers.get(label)
        if covers is None:
            covers = self._covers[label] = self._join(label, self._current) == label
        return covers

    def add(self, chunk: ChunkId) -> None:
        """Add the current label to that of the chunk."""
        key = fingerprint(chunk)
        self.put(key, self._join(self.get(key), self._current))

    def of(self, chunk: ChunkId) -> int:
        """Return the label of a chunk; 0 for none."""
        return self.get(fingerprint(chunk))

    def close_over(self, bases: array[int]) -> None:
        """Add the label of each chunk to its base. ``bases``: fingerprints of a chunk and its base, one after the other."""
        changed = True
        while changed:
            changed = False
            for at in range(0, len(bases), 2):
                label = self.get(bases[at])
                known = self.get(bases[at + 1])
                joined = self._join(known, label)
                if joined != known:
                    self.put(bases[at + 1], joined)
                    changed = True

    def _number(self, groups: tuple[int, ...]) -> int:
        number = self._numbers.get(groups)
        if number is None:
            number = self._numbers[groups] = len(self.groups)
            self.groups.append(groups)
        return number

    def _join(self, one: int, other: int) -> int:
        if not one or one == other:
            return other
        if not other:
            return one
        joined = self._joined.get((one, other))
        if joined is None:
            pairs = zip(self.groups[one], self.groups[other], strict=True)
            joined = self._number(tuple(a if a == b else _SHARED for a, b in pairs))
            self._joined[one, other] = joined
        return joined


def measure_usage(
    repository: Repository,
    together: Collection[SnapshotId] = (),
    *,
    period: str = "day",
    tz: tzinfo | None = None,
    progress: Callable[[int, int], None] | None = None,
    should_stop: StopCheck | None = None,
    unread: Callable[[str], None] | None = None,
) -> Usage:
    """Return the space that each snapshot, root and period takes alone, and the snapshots ``together``.

    Args:
        repository: the open repository, or a remote read as one.
        together: set of snapshots that is looked at as a whole.
        period: day, week (from Monday) or month.
        tz: time zone of the periods; None: the machine's.
        progress: called with the number of snapshots walked, and of all.
        should_stop: asked after each snapshot.
        unread: called with a sentence for each snapshot, tree, block map and pack that cannot be read, and the count goes on. A
            damaged part that three snapshots share or more is named of two of them at least.

    Raises:
        Damaged: one of them cannot be read, and ``unread`` is None.
        SweepStopped: ``should_stop`` returned True.
    """
    snapshots, unreadable = repository.snapshots.load_all()
    if unread is not None:
        for bad in unreadable:
            unread(f"{bad.id}: {bad.reason}")
    elif unreadable:
        raise Damaged(
            f"space cannot be counted: snapshot {unreadable[0].id} cannot be read: {unreadable[0].reason}",
            hint="ciuic check says more",
        )
    paths = sorted({root.path for snapshot in snapshots for root in snapshot.roots})
    names = [_period(snapshot.time_ns, period, tz) for snapshot in snapshots]
    periods = sorted(set(names), reverse=True)
    root_numbers = {path: number for number, path in enumerate(paths)}
    period_numbers = {name: number for number, name in enumerate(periods)}
    labels = _Labels()
    walker = Walker(repository, seen=labels)
    # Oldest first: what a snapshot shares with the one before it is then mostly labelled once and passed over.
    for number in range(len(snapshots) - 1, -1, -1):
        snapshot = snapshots[number]
        if progress is not None:
            progress(len(snapshots) - 1 - number, len(snapshots))
        if should_stop is not None and should_stop():
            raise SweepStopped
        for root in snapshot.roots:
            labels.walk_with(
                (
                    number,
                    root_numbers[root.path],
                    period_numbers[names[number]],
                    int(snapshot.id in together),
                )
            )
            told = None if unread is None else _naming(snapshot.id, unread)
            for _ in walker.walk(msgspec.structs.replace(snapshot, roots=(root,)), on_damage=told):
                pass
    labels.close_over(_bases(repository, unread))
    stored = _Stored(repository, labels, unread)
    return Usage(
        [
            SnapshotUse(
                snapshot.id,
                snapshot.time_ns,
                tuple(root.path for root in snapshot.roots),
                snapshot.tags,
                is_safety(snapshot.tags, snapshot.message),
                snapshot.size_bytes,
                stored.alone(_BY_SNAPSHOT, number),
            )
            for number, snapshot in enumerate(snapshots)
        ],
        [
            GroupUse(
                path.decode("utf-8", "surrogateescape"),
                sum(any(root.path == path for root in snapshot.roots) for snapshot in snapshots),
                sum(
                    root.entry.total_bytes + root.links_bytes
                    for snapshot in snapshots
                    for root in snapshot.roots
                    if root.path == path
                ),
                stored.alone(_BY_ROOT, number),
            )
            for number, path in enumerate(paths)
        ],
        [
            GroupUse(
                name,
                names.count(name),
                sum(one.size_bytes for one, its in zip(snapshots, names, strict=True) if its == name),
                stored.alone(_BY_PERIOD, number),
            )
            for number, name in enumerate(periods)
        ],
        stored.alone(_BY_SET, 1),
        sum(snapshot.size_bytes for snapshot in snapshots),
        stored.raw_bytes,
        stored.stored_bytes,
        stored.garbage_bytes,
        sum(pack.size_bytes for pack in repository.packs()),
    )


def _period(time_ns: int, period: str, tz: tzinfo | None) -> str:
    day = datetime.fromtimestamp(time_ns // _NS, tz).date()
    if period == "month":
        return f"{day:%Y-%m}"
    return (day if period == "day" else day - timedelta(days=day.weekday())).isoformat()


def _naming(id_: SnapshotId, unread: Callable[[str], None]) -> OnDamage:
    return lambda reached, error: unread(f"{id_}: {error.message}")


def _each_record(
    repository: Repository, take: Callable[[PackRecord], None], unread: Callable[[str], None] | None
) -> None:
    for _, records in each_list(repository):
        if not isinstance(records, Damaged):
            for record in records:
                take(record)
        elif unread is None:
            raise records
        else:
            unread(records.message)


def _bases(repository: Repository, unread: Callable[[str], None] | None) -> array[int]:
    found = array("Q")
    if repository.may_have_bases:

        def take(record: PackRecord) -> None:
            if record.base:
                found.append(fingerprint(record.id))
                found.append(fingerprint(record.base))

        _each_record(repository, take, unread)
    return found


class _Stored:
    """Sizes of the chunks in the packs, by label."""

    def __init__(self, repository: Repository, labels: _Labels, unread: Callable[[str], None] | None) -> None:
        self.raw_bytes = self.stored_bytes = self.garbage_bytes = 0
        self._labels = labels
        self._alone: dict[tuple[int, int], int] = {}
        _each_record(repository, self._add, unread)

    def alone(self, grouping: int, group: int) -> int:
        """Return the stored bytes that only this group needs."""
        return self._alone.get((grouping, group), 0)

    def _add(self, record: PackRecord) -> None:
        label = self._labels.of(record.id)
        if not label:
            self.garbage_bytes += record.stored_bytes
            return
        self.raw_bytes += record.raw_bytes
        self.stored_bytes += record.stored_bytes
        for key in enumerate(self._labels.groups[label]):
            self._alone[key] = self._alone.get(key, 0) + record.stored_bytes
