"""What a capture builds on: the snapshot to start from, and where in it the changed things are.

Guarantee: tracking is trusted only when the snapshot that it continues is really there, whole, and made with the same
excludes; otherwise everything is compared. Reads the repository's metadata alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ciuic.daemon.capture_job import TAG_INCOMPLETE
from ciuic.errors import Damaged
from ciuic.fuse_layer.undo_format import Change, Sealed
from ciuic.repository import Repository, Trees
from ciuic.types import FLAG_MOUNTPOINT, Entry, RootRecord

ABSENT = 0
"""In `Change.names`: the name did not exist when the epoch began."""


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
    for info in repository.snapshots.list(root=path):
        try:
            snapshot = repository.snapshots.load(info.id)
        except Damaged:
            continue
        record = next((root for root in snapshot.roots if root.path == path), None)
        if record is None:
            continue
        continued = sealed is not None and (record.session, record.epoch) == (sealed.session, sealed.since)
        trusted = (
            sealed is not None
            and continued
            and sealed.complete
            and record.excludes_digest == excludes_digest
            and TAG_INCOMPLETE not in snapshot.tags
        )
        base = Base(str(snapshot.id), snapshot.time_ns, record, trusted)
        if trusted:
            return base
        newest = newest or base
        if sealed is None or not sealed.complete or not sealed.since:
            break
    return newest


def index_touched(trees: Trees, base: RootRecord, sealed: Sealed) -> dict[int, Entry]:
    """Inode number → entry in the base, for everything that has a touched name there: also what was moved or removed.

    Hard-linked inodes appear as the entries that refer to the link table. Numbers that were used again are in it
    with their old meaning: ask `Change.fresh` first.
    """
    index: dict[int, Entry] = {sealed.root_ino: base.entry}
    stack = [(sealed.root_ino, base.entry)]
    while stack:
        ino, directory = stack.pop()
        change = sealed.changes.get(ino)
        for name, was in (change.names or {}).items() if change is not None else ():
            entry = None if was == ABSENT else trees.entry(directory.content, name)
            if entry is None:
                continue
            number = entry.link or entry.ino
            if number not in index:
                index[number] = entry
                if entry.is_dir and not entry.flags & FLAG_MOUNTPOINT:
                    stack.append((number, entry))
    return index


class LinkName(NamedTuple):
    """One name of a hard-linked inode in the base, with the directories that lead there."""

    ino: int
    steps: tuple[tuple[int, bytes, int], ...]
    """(directory's inode number, name, inode number of what the name is), from the root down, the last is the link."""


def link_names(trees: Trees, base: RootRecord, root_ino: int, wanted: set[int]) -> Iterator[LinkName]:
    """Every name in the base of the wanted hard-linked inodes. Walks all of its directories (metadata only)."""
    stack: list[tuple[int, Entry, tuple[tuple[int, bytes, int], ...]]] = [(root_ino, base.entry, ())]
    while stack:
        ino, directory, steps = stack.pop()
        for entry in trees.entries(directory.content):
            if entry.link in wanted and entry.link:
                yield LinkName(entry.link, (*steps, (ino, entry.name, entry.link)))
            elif entry.is_dir and entry.content:
                stack.append((entry.ino, entry, (*steps, (ino, entry.name, entry.ino))))


def touched_names(sealed: Sealed | None) -> int:
    """How many names a tracked capture will look at."""
    changes: dict[int, Change] = sealed.changes if sealed is not None else {}
    return sum(len(change.names) for change in changes.values() if change.names)


def changed_bytes(sealed: Sealed | None) -> int:
    """How many bytes a tracked capture will read at most; 0 when whole files changed, whose sizes are not known here."""
    blocks = 0
    for change in sealed.changes.values() if sealed is not None else ():
        if isinstance(change.data, bytes):
            blocks += int.from_bytes(change.data, "little").bit_count()
        elif change.data and not change.names:
            return 0
    return blocks * (sealed.block_size if sealed is not None else 0)
