"""Base of a capture: the snapshot that it builds on, and the entries of changed inodes in it.

Guarantees: tracking is trusted only when the snapshot that it continues is there, complete, and made with the
same excludes; otherwise everything is compared. Reads only metadata of the repository.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged, NotFound
from ciuic.fuse_layer.sealed_format import Sealed
from ciuic.repository import Repository, Trees
from ciuic.system.spill import Spill
from ciuic.types import FLAG_MOUNTPOINT, TAG_INCOMPLETE, Entry, RootRecord, Snapshot

# Value in `Change.names`: the name did not exist when the epoch began.
ABSENT = 0
# Value in `Change.names`: the name leads to the same inode as when the epoch began.
_THE_SAME: Final = -1
_entry_encoder: Final = msgspec.msgpack.Encoder()
_entry_decoder: Final = msgspec.msgpack.Decoder(Entry)


class Base(NamedTuple):
    """Root in an older snapshot."""

    snapshot_id: str
    time_ns: int
    """Cut of that snapshot."""
    record: RootRecord
    trusted: bool
    """True if the changes of the sealed epoch are the whole difference to it."""


def choose_base(
    repository: Repository, path: bytes, sealed: Sealed | None, excludes_digest: str
) -> Base | None:
    """Return the snapshot that the tracking continues, else the newest one that has this root.

    Unreadable snapshots are skipped.

    Args:
        repository: repository to search.
        path: path of the root.
        sealed: sealed epoch; None offline.
        excludes_digest: digest of the excludes of this capture.
    """
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
        # Without complete tracking since a committed epoch no older snapshot can be the one that it
        # continues, and for a comparison the newest is the best.
        if sealed is None or not sealed.head.complete or not sealed.head.since:
            break
    return newest


def _lacks_something(snapshot: Snapshot, root: bytes) -> bool:
    """Return whether a part of this root could not be read, which tracking alone would never read again."""
    # What another root lacks must not cost this one a comparison of everything; older snapshots do not say
    # which root lacks something.
    return root in snapshot.incomplete if snapshot.incomplete else TAG_INCOMPLETE in snapshot.tags


class RelocatedEntries:
    """Entries of the base, by inode number, of inodes that may have another name now.

    These are moved, removed and linked inodes.

    Inodes that still have their name are not here, so that a million changed files take no memory.
    Hard-linked inodes appear as the entries that refer to the link table. A number that was reused is here
    with its old inode: check `Change.fresh` first.
    """

    def __init__(self, trees: Trees, base: RootRecord, sealed: Sealed, spill: Spill) -> None:
        self._trees = trees
        self._changes = sealed.changes
        self._entries = spill.numbers()
        self._keep(sealed.head.root_ino, base.entry)
        # Iterators instead of recursion: touched names may be 2,048 levels deep.
        below = [self._touched(sealed.head.root_ino, base.entry)]
        while below:
            found = next(below[-1], None)
            if found is None:
                below.pop()
                continue
            ino, entry, was = found
            is_dir = entry.is_dir and not entry.flags & FLAG_MOUNTPOINT
            change = self._changes.get(ino)
            # The attributes of an inode also change when link(2) gives it a further name, under which the
            # base has no entry of it.
            if was != _THE_SAME or (not is_dir and change is not None and change.attrs):
                self._keep(ino, entry)
            if is_dir:
                below.append(self._touched(ino, entry))

    def get(self, ino: int) -> Entry | None:
        """Return the base's entry of an inode; None where it is not here."""
        body = self._entries.get(ino)
        return None if body is None else _entry_decoder.decode(body)

    def _keep(self, ino: int, entry: Entry) -> None:
        if ino not in self._entries:
            self._entries.put(ino, _entry_encoder.encode(entry))

    def _touched(self, ino: int, directory: Entry) -> Iterator[tuple[int, Entry, int]]:
        """Yield inode number, entry in the base and old binding of each touched name that the base has."""
        for name, was in self._changes.names(ino):
            entry = None if was == ABSENT else self._trees.entry(directory.content, name)
            if entry is not None:
                yield entry.link or entry.ino, entry, was


class BaseName:
    """A name in the base, with a link to its directory's name.

    So a deep entry costs the memory of its own name, and not of a full path.
    """

    __slots__ = ("directory", "ino", "name", "parent")

    def __init__(self, parent: BaseName | None, directory: int, name: bytes, ino: int) -> None:
        self.parent = parent
        """Name of its directory; None for the root."""
        self.directory = directory
        """Inode number of its directory."""
        self.name = name
        self.ino = ino
        """Inode number that the name leads to."""


class LinkName(NamedTuple):
    """Name of a hard-linked inode in the base."""

    ino: int
    step: BaseName


def link_names(trees: Trees, base: RootRecord, root_ino: int, wanted: set[int]) -> Iterator[LinkName]:
    """Yield every name in the base of the wanted hard-linked inodes, those of one directory in sequence.

    Walks all directories of the base, metadata only. The subdirectories of one directory at a time wait in
    memory.
    """
    stack: list[tuple[BaseName | None, int, bytes]] = [(None, root_ino, base.entry.content)]
    while stack:
        step, ino, tree = stack.pop()
        for entry in trees.entries(tree):
            if entry.link and entry.link in wanted:
                yield LinkName(entry.link, BaseName(step, ino, entry.name, entry.link))
            elif entry.is_dir and entry.content:
                stack.append((BaseName(step, ino, entry.name, entry.ino), entry.ino, entry.content))


def levels_of(trees: Trees, tree: bytes, *, max_levels: int, max_nodes: int = 0) -> int | None:
    """Return the number of directory levels below the entries of a tree.

    `max_levels` + 1 where there are more.

    Args:
        trees: reader of trees.
        tree: id of the tree.
        max_levels: levels that matter.
        max_nodes: return None where more directories would have to be read; 0: read any number.
    """
    levels = nodes = 0
    stack = [(tree, 1)]
    while stack:
        tree, level = stack.pop()
        nodes += 1
        if max_nodes and nodes > max_nodes:
            return None
        for entry in trees.entries(tree):
            if entry.is_dir:
                levels = max(levels, level)
                if entry.content:
                    stack.append((entry.content, level + 1))
        if levels > max_levels:
            return max_levels + 1
    return levels


def expected_of(sealed: Sealed | None) -> tuple[int, int]:
    """Return the number of names that a tracked capture visits, and a bound of the bytes that it reads.

    The bound is 0 (unknown) when whole files changed, whose sizes are not known here.
    """
    if sealed is None:
        return 0, 0
    totals = sealed.totals
    return totals.names, 0 if totals.whole_files else totals.blocks * sealed.head.block_size
