"""Operations on open directories: list, sync; and the choice of listings that carry attributes.

A listing is a snapshot of the names taken at its first read (and again after a rewind): offsets are indexes
into it, so they are stable however the directory changes, and nothing is listed twice. Names that have vanished
by a later reply are left out of it; as long as the directory is unchanged regular files and links are listed as they were read.

A program such as rsync or du lists a directory and then looks at each entry, which costs a request each. A
reply to READDIRPLUS may carry the attributes of entries, and the kernel asks for none of those again. For
programs that want names and types alone (find, os.walk, a shell's glob) they would be read for nothing, and be
remembered by the kernel and by the worker: with attributes in the first reply of each directory, as the kernel's own
choice has it (FUSE_READDIRPLUS_AUTO), a find over directories of a hundred files took five times as long on
Linux 6.18, whose first request has room for two hundred. So every request is READDIRPLUS, and the choice is made
here, from the process's lookups after it opened its last directories (`ListingHabits`). The kernel's own copy of a listing
has no attributes: a process that wants them does not get that. The choice affects the
attributes that are sent along, never the names; memory is bounded. There is no lock: two threads at the same time
may miscount, which costs a request more or less.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
import weakref
from array import array
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from ciuic.fuse_layer.journal.journal_writer import LISTING_KEPT_FROM
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.passthrough_state import (
    Attr,
    CopyReader,
    PassthroughState,
    Quota,
    WatchedDirectory,
    is_reserved,
)
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle

_LATEST_KEPT: Final = 256
"""Number of directories whose last listing is compared with the next one."""
Fitting = Callable[[Sequence[bytes], int], int]
"""Function that is told the names of a listing and an offset, and returns the offset behind the last name that fits in the reply."""
_LISTING_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
UNKNOWN_NUMBER: Final = 0xFFFFFFFF
"""Inode number of an entry that cannot be looked at (libfuse's FUSE_UNKNOWN_INO)."""
MIN_LOOKED_UP: Final = 8
"""Entries of one directory that a process looks up before its listings carry attributes."""
BELIEVED_LISTINGS: Final = 64
"""Number of further directories that are listed with attributes. The choice is made anew then, because a
process that gets attributes looks nothing up any more."""
MAX_PROCESSES: Final = 256
"""Limit of processes that are remembered."""


class _OpenDirectory:
    __slots__ = ("__weakref__", "descriptor", "names", "node", "uid", "watched")

    def __init__(self, node: Node, descriptor: Descriptor, uid: int, watched: WatchedDirectory) -> None:
        self.node = node
        self.descriptor = descriptor
        """O_PATH descriptor; the one that the node table caches, if it does, which many handles of one
        directory share."""
        self.uid = uid
        self.watched = watched
        self.names: _Names | None = None


class _Found(NamedTuple):
    """What the file system tells beside each name of a listing. In arrays, because a directory may have a million names."""

    inos: array[int]
    modes: array[int]
    """Kinds as of `stat.S_IFMT`; 0 where the name has to be looked at."""
    state: tuple[int, int, int]
    """State of the directory before it was read (`_state_of`)."""


class _Names(list[bytes]):
    """The names of a listing.

    Handles that see the same names share them, and the user's quota counts them once.
    """

    __slots__ = ("_quota", "_uid", "found")

    def __init__(self, names: list[bytes], quota: Quota, uid: int) -> None:
        super().__init__(names)
        self.found: _Found | None = None
        self._quota = quota
        self._uid = uid
        quota.add(uid, len(names))

    def __del__(self) -> None:
        # Given back by the last of the handles that share the names, in whatever thread that is closed.
        self._quota.give_back(self._uid, len(self))


def _everything(names: Sequence[bytes], offset: int) -> int:
    return len(names)


def _mode_of(entry: os.DirEntry[bytes]) -> int:
    # No system call, where the file system tells the kind with the name. Directories are looked at: another file
    # system may be mounted on one.
    if entry.is_file(follow_symlinks=False):
        return stat.S_IFREG
    return stat.S_IFLNK if entry.is_symlink() else 0


def _state_of(opened: _OpenDirectory) -> tuple[int, int, int]:
    # Changes past the overlay show in the times alone, from the file system's next tick on; those of its own are counted.
    changes, st = opened.watched.changes, os.fstat(opened.descriptor.fd)
    return changes, st.st_mtime_ns, st.st_ctime_ns


def _offset_without_copy(reader: CopyReader, offset: int, changes: int, count: int) -> int:
    """Return where a handle goes on that was in the middle of a copy, whose listing is not known any more.

    A change since it was opened may have taken a name before its offset away. Rather is a name listed twice than left out.
    """
    if reader.changes is not None:
        return max(0, offset - (changes - reader.changes))
    # Opened in a predecessor's time, which has left every listing that is read by more than one request and not from a copy. One of
    # few names was read by a single request, which nobody would want to be repeated.
    if max(offset, count) < LISTING_KEPT_FROM:
        return offset
    return 0 if reader.removed is None else max(0, offset - reader.removed - changes)


class Directories:
    """Operations of one root on open directories."""

    def __init__(self, state: PassthroughState) -> None:
        self._state = state
        self._nodes = state.nodes
        self._open: dict[int, _OpenDirectory] = {}
        self._watch_lock = threading.Lock()
        # Weak references: a listing of a million names ends with its last handle.
        self._latest: OrderedDict[tuple[int, int], weakref.ref[_OpenDirectory]] = OrderedDict()
        """Handle that listed last, by node and user."""
        self.on_listing: Callable[[int, list[bytes]], None] = lambda handle, names: None
        """Called with a handle and the names that its offsets count from now on."""

    def inherit(
        self,
        handle: int,
        node_id: int,
        names: list[bytes] | None,
        *,
        uid: int = 0,
        removed: int | None = None,
    ) -> None:
        """Open a directory that a predecessor had open.

        Args:
            handle: handle of the predecessor.
            node_id: node of the directory.
            names: names that the handle's offsets count; None where they are not known.
            uid: user who opened it.
            removed: number of names that may have gone since it was opened; None where that is not known.
        """
        opened = self._put(handle, node_id, uid, CopyReader(None, None, removed))
        if names is not None:
            opened.names = _Names(names, self._state.allowances.names, uid)

    def has(self, handle: int) -> bool:
        """Return whether a handle is an open directory."""
        return handle in self._open

    def opendir(self, node_id: int, *, uid: int = 0) -> int:
        """Open a directory for a user, and return its handle.

        Raises:
            OSError: as of `Quota.check`.
        """
        self._state.allowances.descriptors.check(uid)
        handle = self._state.new_handle()
        self._put(handle, node_id, uid)
        return handle

    def _put(self, handle: int, node_id: int, uid: int, reader: CopyReader | None = None) -> _OpenDirectory:
        node = self._nodes.get(node_id)
        descriptor = self._nodes.directory(node)
        with self._watch_lock:
            watched = self._state.watched.setdefault(node_id, WatchedDirectory())
            watched.handles += 1
            if reader is not None:
                watched.readers[handle] = reader
        opened = _OpenDirectory(node, descriptor, uid, watched)
        self._state.allowances.descriptors.add(uid)
        self._open[handle] = opened
        return opened

    def readdir(
        self, handle: int, offset: int, fitting: Fitting = _everything, *, rewinds: bool | None = None
    ) -> list[tuple[bytes, Attr | None, int]]:
        """Return name, attributes and next offset of entries from ``offset``, without "." and ".."; none at the end.

        A lookup of each entry with attributes is counted; one that cannot be looked at has none.

        Args:
            handle: handle of the directory.
            offset: number of names to leave out.
            fitting: tells how many names the reply has room for.
            rewinds: read the directory anew; None: where the offset is 0.
        """
        opened, names, offset = self._names_from(handle, offset, rewinds)
        while offset < len(names):
            end = fitting(names, offset)
            entries = self._state.adopt_listed(opened.node, opened.descriptor, names[offset:end], offset)
            # A reply without entries would end the listing.
            if entries or end == offset:
                return entries
            offset = end
        return []

    def list_names(
        self, handle: int, offset: int, fitting: Fitting = _everything, *, rewinds: bool | None = None
    ) -> list[tuple[bytes, int, int, int]]:
        """Return name, number, mode and next offset of entries from ``offset``, without "." and ".."; none at the end.

        Arguments as of `readdir`.
        """
        opened, names, offset = self._names_from(handle, offset, rewinds)
        # Without a look at each name, which is half of the time of a listing otherwise.
        found = names.found
        if found is not None and (offset or rewinds is False) and _state_of(opened) != found.state:
            found = names.found = None
        while offset < len(names):
            end = fitting(names, offset)
            entries = self._numbered(opened, names, found, offset, end)
            if entries or end == offset:
                return entries
            offset = end
        return []

    # Without making nodes: the kernel is told a number and remembers nothing, so it would never have a
    # node forgotten. With nodes, a program that listed a million names left a million of them in the
    # worker.
    def _numbered(
        self, opened: _OpenDirectory, names: _Names, found: _Found | None, offset: int, end: int
    ) -> list[tuple[bytes, int, int, int]]:
        modes: Sequence[int] = [0] * (end - offset)
        numbers: Sequence[int | None] = [None] * len(modes)
        if found is not None:
            modes = found.modes[offset:end]
            numbers = self._nodes.ids_of(opened.node.dev, found.inos[offset:end], modes)
        entries = []
        numbered = zip(range(offset + 1, end + 1), names[offset:end], numbers, modes, strict=True)
        for at, name, number, mode in numbered:
            if number is not None:
                entries.append((name, number, mode, at))
                continue
            entry = PathHandle(opened.descriptor, name)
            try:
                st = entry.stat()
                seen = self._nodes.ids_of(st.st_dev, [st.st_ino], [st.st_mode])[0]
                if seen is None:
                    seen = self._state.adopt(opened.node, name, entry.stat, count=0)[1].node
            except FileNotFoundError:
                continue
            except OSError:
                # It is there, as in a plain directory; whoever looks at it gets the error.
                entries.append((name, UNKNOWN_NUMBER, 0, at))
                continue
            entries.append((name, seen, st.st_mode, at))
        return entries

    def _names_from(
        self, handle: int, offset: int, rewinds: bool | None
    ) -> tuple[_OpenDirectory, _Names, int]:
        """Return an open directory with its names, read anew for a rewind, and the offset in them."""
        opened = self._directory(handle)
        # rewinddir(3) shows the directory as it is now. seekdir(3) to the first name keeps the positions of the others.
        is_rewind = not offset if rewinds is None else rewinds
        if not is_rewind and opened.names is not None:
            return opened, opened.names, offset
        reader = opened.watched.readers.get(handle)
        if offset and reader is not None and reader.names is not None:
            opened.names = self._listed(opened, list(reader.names))
        else:
            names, found = self._read(opened)
            opened.names = self._listed(opened, names)
            opened.names.found = found
            if offset and reader is not None:
                offset = _offset_without_copy(reader, offset, opened.watched.changes, len(names))
        self.on_listing(handle, opened.names)
        return opened, opened.names, offset

    # Offsets in the kernel's copy of a listing count in the listing that it was made of. A handle that finds the directory changed at
    # its first read has the kernel make another copy, in which one that was in the middle would go on at its old offset: beside a
    # single ``ls`` a program that removed what it read missed 500 of 3,000 names. Copies go where memory is short, too.

    def may_read_copy(self, handle: int) -> bool:
        """Return whether a handle that is just opened may read the kernel's copy: not where another one may be in an older copy."""
        opened = self._directory(handle)
        watched = opened.watched
        with self._watch_lock:
            watched.readers.pop(handle, None)
            if any(reader.changes != watched.changes for reader in watched.readers.values()):
                return False
            watched.readers[handle] = CopyReader(watched.changes, self._state.copied.of(opened.node.id))
        return True

    def copied(self, handle: int) -> bool:
        """Note that the kernel has a copy of the listing that a handle has read to its end; return whether it is to drop that.

        It is where the directory has changed since another handle was told that it may read the copy, which was of an older listing.
        """
        opened = self._directory(handle)
        watched = opened.watched
        with self._watch_lock:
            reader = watched.readers.get(handle)
            if reader is None or opened.names is None:
                return False
            others = (one for other, one in watched.readers.items() if other != handle)
            if any(one.changes != watched.changes for one in others):
                return True
            self._state.copied.keep(opened.node.id, opened.names)
            # Asked afterwards: a change counts first, and then has the listing forgotten.
            if reader.changes != watched.changes:
                self._state.copied.forget(opened.node.id)
        return False

    def _listed(self, opened: _OpenDirectory, names: list[bytes]) -> _Names:
        # Before the quota is asked for the new names: those of this handle are given back.
        opened.names = None
        key = opened.node.id, opened.uid
        before = self._latest.get(key)
        other = before() if before is not None else None
        # A directory of a million names that a hundred programs list is in memory once.
        if other is not None and other.names == names:
            return other.names
        quota = self._state.allowances.names
        quota.check(opened.uid, len(names))
        self._latest[key] = weakref.ref(opened)
        if len(self._latest) > _LATEST_KEPT:
            self._latest.popitem(last=False)
        return _Names(names, quota, opened.uid)

    def _read(self, opened: _OpenDirectory) -> tuple[list[bytes], _Found]:
        names, inos, modes = [], array("Q"), array("I")
        before, is_root = _state_of(opened), opened.node is self._nodes.root
        # By a path of bytes, whose entries have names of bytes. The node's descriptor is O_PATH, which cannot be listed.
        with os.scandir(b"/proc/self/fd/%d" % opened.descriptor.fd) as entries:
            for entry in entries:
                name = entry.name
                if not is_root or not is_reserved(self._nodes, opened.node, name):
                    names.append(name)
                    inos.append(entry.inode())
                    modes.append(_mode_of(entry))
        return names, _Found(inos, modes, before)

    def releasedir(self, handle: int) -> None:
        """Close a handle; unknown handles are ignored."""
        opened = self._open.pop(handle, None)
        if opened is not None:
            self._state.allowances.descriptors.remove(opened.uid)
            with self._watch_lock:
                opened.watched.readers.pop(handle, None)
                opened.watched.handles -= 1
                if not opened.watched.handles:
                    self._state.watched.pop(opened.node.id, None)

    def fsyncdir(self, handle: int, datasync: bool) -> None:
        """Make the directory's names durable."""
        fd = os.open(b".", _LISTING_FLAGS, dir_fd=self._directory(handle).descriptor.fd)
        try:
            (os.fdatasync if datasync else os.fsync)(fd)
        finally:
            os.close(fd)

    def _directory(self, handle: int) -> _OpenDirectory:
        opened = self._open.get(handle)
        if opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened


class _Habit:
    __slots__ = ("believed", "directory", "looked_up")

    def __init__(self) -> None:
        self.directory = 0
        """Node of the directory that was opened last."""
        self.looked_up = 0
        """Number of its entries that were looked up since."""
        self.believed = 0
        """Number of directories still to be listed with attributes."""


class ListingHabits:
    """Habits of the processes that use one mount."""

    def __init__(self) -> None:
        self._by_pid: dict[int, _Habit] = {}

    def opens(self, pid: int, directory: int) -> bool:
        """Note that a process opens a directory; return whether it is to be listed with attributes."""
        habit = self._by_pid.get(pid)
        if habit is None:
            if len(self._by_pid) >= MAX_PROCESSES:
                # Most of them have ended; the others are known again after one directory.
                self._by_pid.clear()
            habit = self._by_pid[pid] = _Habit()
        if habit.looked_up >= MIN_LOOKED_UP:
            habit.believed = BELIEVED_LISTINGS
        elif habit.believed:
            habit.believed -= 1
        habit.directory, habit.looked_up = directory, 0
        return habit.believed > 0

    def wants_attributes(self, pid: int) -> bool:
        """Return whether the next names of a listing are to come with attributes."""
        habit = self._by_pid.get(pid)
        if habit is None:
            return False
        if habit.looked_up >= MIN_LOOKED_UP:
            habit.believed, habit.looked_up = BELIEVED_LISTINGS, 0
        return habit.believed > 0

    def looked_up(self, pid: int, directory: int) -> None:
        """Note that a process looked up an entry of a directory."""
        habit = self._by_pid.get(pid)
        if habit is not None and habit.directory == directory:
            habit.looked_up += 1
