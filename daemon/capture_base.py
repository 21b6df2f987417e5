"""What a capture builds on: the snapshot to start from, and where in it the changed things are.

Guarantee: tracking is trusted only when the snapshot that it continues is really there, whole, and made with the same
excludes; otherwise everything is compared. Reads the repository's metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged, NotFound
from ciuic.fuse_layer.sealed_format import Sealed
from ciuic.repository import Repository, Trees
from ciuic.spill import Spill
from ciuic.types import FLAG_MOUNTPOINT, TAG_INCOMPLETE, Entry, RootRecord, Snapshot

ABSENT = 0
"""In `Change.names`: the name did not exist when the epoch began."""
_THE_SAME: Final = -1
"""In `Change.names`: it leads where it led then."""
_entry_encoder: Final = msgspec.msgpack.Encoder()
_entry_decoder: Final = msgspec.msgpack.Decoder(Entry)


class Base(NamedTuple):
    """One root as an older snapshot has it."""

    snapshot_id: str
    time_ns: int
    """That snapshot's cut."""
    record: RootRecord
    trusted: bool
    """The changes of the sealed epoch are the whole difference to it."""


def choose_base(
    repository: Repository, path: bytes, sealed: Sealed | None, excludes_digest: str
) -> Base | None:
    """The snapshot that the tracking continues, else the newest one that has this root; unreadable ones are passed over."""
    newest: Base | None = None
    for info in repository.snapshots.newest_first(path):
        try:
            snapshot = repository.snapshots.load(info.id)
        except (Damaged, NotFound):
            continue
        record = next((root for root in snapshot.roots if root.path == path), None)
        if record is None:
            continue
        continued = sealed is not None and (record.session, record.epoch) == (
            sealed.head.session,
            sealed.head.since,
        )
        trusted = (
            sealed is not None
            and continued
            and sealed.head.complete
            and record.excludes_digest == excludes_digest
            and not _lacks_something(snapshot, path)
        )
        base = Base(str(snapshot.id), snapshot.time_ns, record, trusted)
        if trusted:
            return base
        newest = newest or base
        if sealed is None or not sealed.head.complete or not sealed.head.since:
            break
    return newest


def _lacks_something(snapshot: Snapshot, root: bytes) -> bool:
    """Whether something of this root could not be read: tracking would not come back to it. What another root lacks must not
    cost this one a comparison of everything; older snapshots do not say whose it is."""
    return root in snapshot.incomplete if snapshot.incomplete else TAG_INCOMPLETE in snapshot.tags


class OldPlaces:
    """Entries of the base by inode number, of what may be found elsewhere by now: what was moved, removed, or given another
    name. What has its name still is not here, so that a million changed files take no room.

    Hard-linked inodes appear as the entries that refer to the link table. Numbers that were used again are in it
    with their old meaning: ask `Change.fresh` first.
    """

    def __init__(self, trees: Trees, base: RootRecord, sealed: Sealed, spill: Spill) -> None:
        self._trees = trees
        self._changes = sealed.changes
        self._entries = spill.numbers()
        self._keep(sealed.head.root_ino, base.entry)
        below = [self._touched(sealed.head.root_ino, base.entry)]
        while below:
            found = next(below[-1], None)
            if found is None:
                below.pop()
                continue
            ino, entry, was = found
            is_dir = entry.is_dir and not entry.flags & FLAG_MOUNTPOINT
            change = self._changes.get(ino)
            if was != _THE_SAME or (not is_dir and change is not None and change.attrs):
                self._keep(ino, entry)
            if is_dir:
                below.append(self._touched(ino, entry))

    def get(self, ino: int) -> Entry | None:
        body = self._entries.get(ino)
        return None if body is None else _entry_decoder.decode(body)

    def _keep(self, ino: int, entry: Entry) -> None:
        if ino not in self._entries:
            self._entries.put(ino, _entry_encoder.encode(entry))

    def _touched(self, ino: int, directory: Entry) -> Iterator[tuple[int, Entry, int]]:
        """(inode number, entry in the base, what its name was bound to) of the touched names that the base has."""
        for name, was in self._changes.names(ino):
            entry = None if was == ABSENT else self._trees.entry(directory.content, name)
            if entry is not None:
                yield entry.link or entry.ino, entry, was


class Step:
    """A name in the base, with a link to the directory that it is in: what lies deep costs its own name and no path."""

    __slots__ = ("directory", "ino", "name", "parent")

    def __init__(self, parent: Step | None, directory: int, name: bytes, ino: int) -> None:
        self.parent = parent
        """Of the directory that the name is in; None for the root."""
        self.directory = directory
        """The inode number of that directory."""
        self.name = name
        self.ino = ino
        """The inode number that the name leads to."""


class LinkName(NamedTuple):
    """One name of a hard-linked inode in the base."""

    ino: int
    step: Step


def link_names(trees: Trees, base: RootRecord, root_ino: int, wanted: set[int]) -> Iterator[LinkName]:
    """Every name in the base of the wanted hard-linked inodes, those of one directory one after the other.

    Walks all of its directories (metadata only). Names of directories of one directory are remembered while they wait.
    """
    stack: list[tuple[Step | None, int, bytes]] = [(None, root_ino, base.entry.content)]
    while stack:
        step, ino, tree = stack.pop()
        for entry in trees.entries(tree):
            if entry.link and entry.link in wanted:
                yield LinkName(entry.link, Step(step, ino, entry.name, entry.link))
            elif entry.is_dir and entry.content:
                stack.append((Step(step, ino, entry.name, entry.ino), entry.ino, entry.content))


def levels_of(trees: Trees, tree: bytes, *, most_levels: int, most_nodes: int = 0) -> int | None:
    """How many levels of directories lie below the entries of this tree, ``most_levels`` + 1 where there are more than that.

    None where more than ``most_nodes`` directories (0: any number) would have to be read to know.
    """
    levels = nodes = 0
    stack = [(tree, 1)]
    while stack:
        tree, level = stack.pop()
        nodes += 1
        if most_nodes and nodes > most_nodes:
            return None
        for entry in trees.entries(tree):
            if entry.is_dir:
                levels = max(levels, level)
                if entry.content:
                    stack.append((entry.content, level + 1))
        if levels > most_levels:
            return most_levels + 1
    return levels


def expected_of(sealed: Sealed | None) -> tuple[int, int]:
    """How many names a tracked capture will look at, and how many bytes it will read at most; 0 when whole files changed,
    whose sizes are not known here."""
    if sealed is None:
        return 0, 0
    totals = sealed.totals
    return totals.names, 0 if totals.whole_files else totals.blocks * sealed.head.block_size
