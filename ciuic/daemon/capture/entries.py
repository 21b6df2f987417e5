"""Entries of inodes as of the cut, with content that is taken over from the base snapshot or read.

Guarantees: tracking is trusted only when the snapshot that it continues is there, complete, and made with the
same excludes; otherwise everything is compared. This module alone chooses the base, and decides whether
content must be read and whether what was read is the content of the cut. Of the base it reads only metadata.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ciuic.daemon.capture.content import EMPTY_MAP, ContentReader, Stored
from ciuic.daemon.capture.view import BackingUnreadable, PinnedInode
from ciuic.errors import Damaged, NotFound
from ciuic.fuse_layer.sealed_format import Sealed, Unheld
from ciuic.repository import Repository, Trees, Writer
from ciuic.repository.tree_format import attributes_problem
from ciuic.structs import msgpack_decoder
from ciuic.system.spill import Spill
from ciuic.types import (
    FLAG_MOUNTPOINT,
    FLAG_NOT_HELD,
    FLAG_OPEN_FOR_WRITING,
    TAG_INCOMPLETE,
    Entry,
    MapRef,
    RootRecord,
    Snapshot,
    TreeRef,
    not_held,
    recorded_time,
)

# Value in `Change.names`: the name did not exist when the epoch began.
_ABSENT = 0
# Value in `Change.names`: the name leads to the same inode as when the epoch began.
_THE_SAME: Final = -1
_entry_encoder: Final = msgspec.msgpack.Encoder()
_entry_decoder: Final = msgpack_decoder(Entry)


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
            entry = None if was == _ABSENT else self._trees.entry(directory.content, name)
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


# Distance from the older cut within which a ctime may hide a later change, because file system clocks tick
# coarsely.
_RACY_NS: Final = 1_000_000_000


class EntryMaker:
    """Maker of the entries of one root."""

    def __init__(
        self, writer: Writer, content: ContentReader, base: Base | None, sealed: Sealed | None
    ) -> None:
        self._writer = writer
        self._content = content
        self._trusted = base is not None and base.trusted
        self._settled_before_ns = base.time_ns - _RACY_NS if base is not None else 0
        self._changes = sealed.changes if sealed is not None else None
        self._open_for_write = frozenset(sealed.head.open_for_write) if sealed is not None else frozenset()
        self._cut_ns = sealed.head.cut_ns if sealed is not None else time.time_ns()
        self._unheld = _unheld_of(sealed) if sealed is not None else {}
        self.not_held = 0
        """Number of files whose content may be later than the cut."""

    def leaf(self, name: bytes, inode: PinnedInode, previous: Entry | None) -> Entry:
        """Return the entry of anything but a directory.

        Args:
            name: its name in the entry.
            inode: the inode.
            previous: entry of the same inode in the base; None where there is none.

        Raises:
            BackingUnreadable: it cannot be read.
        """
        flags = FLAG_OPEN_FOR_WRITING if inode.ino in self._open_for_write else 0
        stored = Stored(EMPTY_MAP, False)
        if inode.is_file:
            stored = self._file_content(inode, previous)
            flags |= self._not_held(inode, stored)
        entry = self._attributes(name, inode, flags)
        return msgspec.structs.replace(
            entry, content=stored.map.content, map_height=stored.map.map_height, target=inode.target
        )

    def _not_held(self, inode: PinnedInode, stored: Stored) -> int:
        """Return the flags of a file that was read just now.

        Return 0 where its content is proved to be that of the cut.
        """
        unheld = self._unheld.get(inode.ino)
        if not stored.changed_unseen and (unheld is None or _is_as_held(inode, unheld)):
            return 0
        self.not_held += 1
        until_ns = (
            unheld.until_ns if unheld is not None and not stored.changed_unseen else 0
        ) or time.time_ns()
        # Rounded up: the entry says by how much its content may be later at most.
        return not_held(-(-(until_ns - self._cut_ns) // 1_000_000))

    def directory(self, name: bytes, inode: PinnedInode) -> Entry:
        """Return the entry of a directory without its tree. May raise BackingUnreadable."""
        return self._attributes(name, inode, 0)

    def with_tree(self, directory: Entry, tree: TreeRef) -> Entry:
        """Return a directory's entry with its tree."""
        return msgspec.structs.replace(
            directory, content=tree.id, total_files=tree.total_files, total_bytes=tree.total_bytes
        )

    def mountpoint(self, name: bytes, inode: PinnedInode) -> Entry:
        """Return the entry of a mount point: an empty directory (or file) with a flag.

        Its inode number is 0, because the number belongs to the other file system and could be confused with
        one of the root's.
        """
        return msgspec.structs.replace(
            self._attributes(name, inode, FLAG_MOUNTPOINT), ino=0, size_bytes=0, total_files=0
        )

    def _attributes(self, name: bytes, inode: PinnedInode, flags: int) -> Entry:
        st = inode.stat
        try:
            xattrs, xattrs_flag = self._writer.put_xattrs(inode.xattrs.items()) if inode.xattrs else ((), 0)
        # More than a chunk holds: XFS and others let an owner set any number of attributes.
        except ValueError as error:
            raise BackingUnreadable(OSError(errno.E2BIG, f"extended attributes: {error}")) from error
        size_bytes = st.size if inode.is_file else len(inode.target)
        is_device = stat.S_ISCHR(st.mode) or stat.S_ISBLK(st.mode)
        entry = Entry(
            name=name,
            mode=st.mode,
            uid=st.uid,
            gid=st.gid,
            rdev=st.rdev if is_device else 0,
            ino=inode.ino,
            size_bytes=size_bytes,
            mtime_ns=st.mtime_ns,
            ctime_ns=st.ctime_ns,
            atime_ns=st.atime_ns,
            flags=flags | xattrs_flag,
            xattrs=xattrs,
        )
        # Found out later, it would cost the whole batch of names and with it the root.
        if problem := attributes_problem(entry):
            raise BackingUnreadable(OSError(errno.EOVERFLOW, problem))
        return entry

    def _file_content(self, inode: PinnedInode, previous: Entry | None) -> Stored:
        if inode.stat.size == 0:
            return Stored(EMPTY_MAP, False)
        change = self._changes.get(inode.ino) if self._changes is not None else None
        if previous is None:
            return self._whole(inode)
        taken_over = Stored(MapRef(previous.content, previous.map_height), False)
        if not self._trusted:
            if change is None and self._is_same(inode, previous):
                return taken_over
            return self._whole(inode)
        data = change.data if change is not None else 0
        if isinstance(data, bytes):
            return self._content.changed(inode, previous, data)
        # No block changed. A size that differs without one would contradict the tracking, so the file is
        # read.
        if data == 0 and inode.stat.size == previous.size_bytes:
            return taken_over
        return self._whole(inode)

    def _whole(self, inode: PinnedInode) -> Stored:
        # A file that is open for writing is probably written further, and each write to a shared extent needs
        # new space.
        return self._content.whole(inode, may_share=inode.ino not in self._open_for_write)

    def _is_same(self, inode: PinnedInode, previous: Entry) -> bool:
        st = inode.stat
        return (
            (st.size, st.mtime_ns, st.ctime_ns, inode.ino)
            == (previous.size_bytes, previous.mtime_ns, previous.ctime_ns, previous.ino)
            and st.ctime_ns <= self._settled_before_ns
            # Equal times prove nothing of such a file: a store through a mapping moves them when its page
            # fault begins, not when it lands (docs/decisions/sharing-extents.md).
            and not previous.flags & (FLAG_OPEN_FOR_WRITING | FLAG_NOT_HELD)
        )


def _unheld_of(sealed: Sealed) -> dict[int, Unheld]:
    """Return the files that are not known to be held, by inode number.

    These are all open files for a worker of an older version.
    """
    if sealed.head.unheld is None:
        return {ino: Unheld(ino) for ino in sealed.head.open_for_write}
    return {unheld.ino: unheld for unheld in sealed.head.unheld}


def _is_as_held(inode: PinnedInode, unheld: Unheld) -> bool:
    """Return whether the file, read just now, is proved to be what it was under the hold.

    See fuse_layer/core/passthrough_writers.py.
    """
    if not unheld.provable:
        return False
    if not unheld.size_bytes:
        return True  # no more than this size is captured
    try:
        st = os.fstat(inode.fd)
    except OSError:
        return False
    return (st.st_size, recorded_time(st.st_mtime_ns), recorded_time(st.st_ctime_ns)) == (
        unheld.size_bytes,
        unheld.mtime_ns,
        unheld.ctime_ns,
    )


def without_access_time_change(entry: Entry, old: Entry | None) -> Entry:
    """Return `old` when only the access time differs, so that reading a file does not make a new tree.

    Return `entry` otherwise.
    """
    if old is not None and msgspec.structs.replace(entry, atime_ns=old.atime_ns) == old:
        return old
    return entry
