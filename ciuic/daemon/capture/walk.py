"""Walk of a root as of the cut, which builds its new tree and its link table.

Guarantees: the tree is the root as of the cut (view.py has the reason); in tracked mode only touched names
are visited and only changed blocks are read. Unreadable names are reported and left out, and stop nothing
else; so are directories below the limit of levels (`depth_limit`).

A tree of any shape costs bounded memory and one descriptor a level: `MAX_NAMES_BYTES` and
`MAX_PENDING_BYTES` for all directories from the root to the current one, and a few kilobytes for each level,
whatever names, entries and attributes the owner of the root has created. A path costs its own name
(`DirectoryPath`): full paths would cost the square of the depth, and a root with 9,003 levels of names of 250
bytes made a capture hold 3.4 GB of them.

Each directory is visited in one of three modes: *touched* (only the names in its Change), *all* (every name;
inodes without Change are taken over from the base: new directories, and moved ones where excludes depend on
the path), *compare* (every name; an entry is taken over only with the same size, mtime, ctime and inode
number).

The link table has one entry for each inode with several names, keyed by its number. A tree entry that refers
to the table (`Entry.link`) must find its inode there, so an inode leaves the table only when its last
reference is gone or has become an ordinary entry.

The overlay records the name that it knows; of a hard-linked inode that name may have been removed while
others, never looked up, remain. Changed inodes of the link table that no touched name leads to are therefore
searched in the base, which has all names, and each name is followed to where it leads at the cut. Names of
one directory, which come in sequence, cost one walk to that directory, however deep it is.
"""

from __future__ import annotations

import enum
import errno
import resource
import stat
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ciuic import STATE_DIR_NAME
from ciuic.daemon.capture.entries import (
    Base,
    BaseName,
    EntryMaker,
    LinkName,
    RelocatedEntries,
    levels_of,
    link_names,
    without_access_time_change,
)
from ciuic.daemon.capture.view import BackingUnreadable, ListedNames, PinnedInode, SealedView
from ciuic.excludes import ExcludeMatcher, Scope
from ciuic.fuse_layer.sealed_format import Changes, Sealed
from ciuic.repository import Trees, Writer
from ciuic.system.spill import Spill
from ciuic.types import FLAG_MOUNTPOINT, Entry, TreeRef, is_far_time

# Entries of the table that are written at once: with fewer, nodes are written several times.
_BATCH_LINKS: Final = 8192


def _link_key(ino: int) -> bytes:
    """Return the name of an inode's entry in a link table."""
    return ino.to_bytes(8, "big")


def _reference(name: bytes, inode: PinnedInode) -> Entry:
    """Return the tree entry of one of several names: name, type and number; the rest is in the table."""
    return Entry(name=name, mode=stat.S_IFMT(inode.stat.mode), ino=inode.ino, link=inode.ino)


class _LinkTable:
    """The table that is built, over an older one (`start`) or from nothing (b"").

    `previous` looks in `older`, whether or not the new table starts from it.
    """

    def __init__(self, trees: Trees, writer: Writer, spill: Spill, *, older: bytes, start: bytes) -> None:
        self._trees = trees
        self._writer = writer
        self._older = older
        self._tree = TreeRef(id=start)  # type: ignore[arg-type]
        self._pending: dict[bytes, Entry | None] = {}
        # In a table that spills: a tree may have millions of hard-linked files.
        self._settled = spill.numbers()

    @property
    def has_older(self) -> bool:
        """True if there is an older table."""
        return bool(self._older)

    def previous(self, ino: int) -> Entry | None:
        """Return the inode's entry in the older table."""
        return self._trees.link(self._older, ino) if self._older else None

    def is_settled(self, ino: int) -> bool:
        """Return whether this capture has already decided on the inode's entry."""
        return ino in self._settled

    def keep(self, ino: int) -> None:
        """Keep the older table's entry."""
        self._settled.put(ino, b"")

    def put(self, entry: Entry) -> None:
        """Set the entry of an inode."""
        self._set(entry.ino, entry)

    def drop(self, ino: int) -> None:
        """Remove the entry of an inode to which no name refers any more."""
        self._set(ino, None)

    def finish(self) -> TreeRef:
        """Store the table and return its tree; id b"" when there are no hard links."""
        self._flush()
        return self._tree

    def _set(self, ino: int, entry: Entry | None) -> None:
        self._settled.put(ino, b"")
        self._pending[_link_key(ino)] = entry
        if len(self._pending) >= _BATCH_LINKS:
            self._flush()

    def _flush(self) -> None:
        self._tree = self._writer.update_tree(self._tree.id, self._pending, links=True)
        self._pending = {}


# Levels of directories below a root that are captured. A path of PATH_MAX (4,096) bytes has 2,047 components
# at most; deeper directories are reached only by changing directory step by step, and only hostile programs
# are known to create them. They are reported as not readable.
MAX_DEPTH: Final = 2048
# Descriptors of the limit that the walk leaves for packs, index, temporary files and the descriptors that
# were passed in.
_SPARE_DESCRIPTORS: Final = 256
# Longest path in a message. Of a longer one the end is shown.
_MAX_SHOWN_BYTES: Final = 4096


def depth_limit() -> int:
    """Return the number of levels that this process can walk: each costs one descriptor."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_DEPTH if soft == resource.RLIM_INFINITY else max(1, min(MAX_DEPTH, soft - _SPARE_DESCRIPTORS))


class DirectoryPath:
    """Path of a directory of a root, as a linked list of names."""

    __slots__ = ("depth", "name", "parent")

    def __init__(self, parent: DirectoryPath | None = None, name: bytes = b"") -> None:
        self.parent = parent
        """Path of the parent; None for the root."""
        self.name = name
        self.depth: int = parent.depth + 1 if parent is not None else 0

    def path_of(self, name: bytes = b"") -> bytes:
        """Return the path of `name` in this directory, relative to the root, for messages.

        A long path is cut to its end.
        """
        parts = [name] if name else []
        length, at = len(name), self
        while at.parent is not None:
            parts.append(at.name)
            length += 1 + len(at.name)
            at = at.parent
            if length > _MAX_SHOWN_BYTES:
                parts.append(b"...")
                break
        return b"/".join(reversed(parts))


class _MetDirectories:
    """Directories that a walk has met, by inode number."""

    def __init__(self, spill: Spill, root_ino: int) -> None:
        self._root_ino = root_ino
        self._met = spill.numbers()

    def put(self, ino: int, parent_ino: int, name: bytes) -> None:
        """Note a directory, its parent and its name."""
        self._met.put(ino, parent_ino.to_bytes(8, "big") + name)

    def names(self, ino: int) -> tuple[bytes, ...] | None:
        """Return the names that lead from the root to a directory; None where it was not met."""
        names: list[bytes] = []
        while ino != self._root_ino:
            found = self._met.get(ino)
            if found is None or len(names) > MAX_DEPTH:
                return None
            names.append(found[8:])
            ino = int.from_bytes(found[:8], "big")
        return tuple(reversed(names))


# Inodes that one walk through the base searches for: a set of so many takes some megabytes.
_WANTED_AT_ONCE: Final = 32 << 10


class TrackingBroken(Exception):
    """The changes do not fit the base, so that everything has to be compared."""


class _UnreachedLinks:
    """Search after the end of one walk. `root` stays the caller's."""

    def __init__(
        self,
        view: SealedView,
        trees: Trees,
        base: Base,
        changes: Changes,
        *,
        root: PinnedInode,
        links: _LinkTable,
        maker: EntryMaker,
        met: _MetDirectories | None,
        failed: Callable[[bytes, OSError], None],
    ) -> None:
        self._view = view
        self._trees = trees
        self._base = base
        self._changes = changes
        self._root = root
        self._links = links
        self._maker = maker
        self._met = met
        self._failed = failed
        # Directory of the base that was searched last, and the names that lead to it now.
        self._found: tuple[BaseName | None, tuple[bytes, ...] | None] = (None, ())
        # Directory that was opened last.
        self._opened: tuple[tuple[bytes, ...], PinnedInode] = ((), root)

    def settle(self) -> None:
        """Set or remove the entry of each such inode in the link table.

        Raises:
            TrackingBroken: the changes do not fit the base; errors of view and writer may be raised too.
        """
        wanted: set[int] = set()
        try:
            for ino, change in self._changes.items():
                if self._links.is_settled(ino) or self._links.previous(ino) is None:
                    continue
                if change.fresh:  # another inode has the number now, so all names of the older one are gone
                    self._links.drop(ino)
                    continue
                wanted.add(ino)
                if len(wanted) >= _WANTED_AT_ONCE:
                    self._settle(wanted)
                    wanted = set()
            if wanted:
                self._settle(wanted)
        finally:
            # Closes the directory that is open.
            self._open(())

    def _settle(self, wanted: set[int]) -> None:
        """Settle these inodes by a walk through all names in the base."""
        for found in link_names(self._trees, self._base.record, self._root.ino, wanted):
            if self._links.is_settled(found.ino):
                continue
            directory = self._directory_of(found)
            if directory is not None:
                self._settle_in(directory, found.step.name, found.ino)
        # No name of these was found, so nothing refers to them any more.
        for ino in wanted:
            if not self._links.is_settled(ino):
                self._links.drop(ino)

    def _directory_of(self, found: LinkName) -> tuple[bytes, ...] | None:
        """Return the names that lead to the link's directory at the cut.

        Return None when the link was removed or leads elsewhere now.
        """
        step = found.step
        if self._found[0] is not step.parent:
            self._found = (step.parent, self._names_to(step.parent))
        if self._changes.is_touched(step.directory, step.name):
            return None
        own = self._changes.get(step.ino)
        if own is not None and own.fresh:
            return None  # a new inode has the number; the one in the base is gone
        return self._found[1]

    def _names_to(self, directory: BaseName | None) -> tuple[bytes, ...] | None:
        """Return the names that lead to a directory of the base at the cut; None where it is gone.

        They begin with the current path of the deepest parent that this walk has met, and go on with
        untouched names.
        """
        untouched: list[bytes] = []
        while directory is not None:
            own = self._changes.get(directory.ino)
            is_fresh = own is not None and own.fresh
            met = self._met.names(directory.ino) if self._met is not None and not is_fresh else None
            if met is not None:
                return met + tuple(reversed(untouched))
            if is_fresh or self._changes.is_touched(directory.directory, directory.name):
                return None
            untouched.append(directory.name)
            directory = directory.parent
        return tuple(reversed(untouched))

    def _settle_in(self, directory: tuple[bytes, ...], name: bytes, ino: int) -> None:
        path = (*directory, name)
        try:
            found = self._view.child(self._open(directory), name)
            if found is None:
                raise _broken(path, ino, "is not there")
            with found:
                if found.ino != ino:
                    raise _broken(path, ino, f"is {found.ino}")
                self._links.put(self._maker.leaf(_link_key(ino), found, self._links.previous(ino)))
        except BackingUnreadable as error:
            self._failed(b"/".join(path)[-_MAX_SHOWN_BYTES:], error.error)

    def _open(self, directory: tuple[bytes, ...]) -> PinnedInode:
        """Return a directory, which stays open until another one is opened. May raise BackingUnreadable."""
        if self._opened[0] == directory:
            return self._opened[1]
        last, self._opened = self._opened[1], ((), self._root)
        if last is not self._root:
            last.close()
        at = self._root
        for name in directory:
            try:
                below = self._view.child(at, name)
            finally:
                if at is not self._root:
                    at.close()
            if below is None:
                raise _broken(directory, 0, "is not there")
            at = below
        self._opened = (directory, at)
        return at


def _broken(path: tuple[bytes, ...], ino: int, found: str) -> TrackingBroken:
    shown = b"/".join(path)[-_MAX_SHOWN_BYTES:]
    return TrackingBroken(f"{shown!r} should be {f'inode {ino}' if ino else 'a directory'} and {found}")


class _Visit(enum.Enum):
    """Names of a directory that are visited."""

    TOUCHED = "touched"
    ALL = "all"
    COMPARE = "compare"


# Entries of a directory that are written into its tree at once: with fewer, nodes are written several times.
_BATCH_ENTRIES: Final = 8192
# The same limit in bytes: the target of a symbolic link takes up to 4 KiB.
_MAX_BATCH_BYTES: Final = 16 << 20
# Names that wait in memory to be visited, of all directories on the path together; further names wait in a
# temporary file.
MAX_NAMES_BYTES: Final = 32 << 20
# Entries that wait to be written, of all directories on the path together.
MAX_PENDING_BYTES: Final = 32 << 20
# Levels that keep an open stream of older entries: each holds a node of about 64 entries. Usual trees have
# fewer levels.
STREAMS_HELD: Final = 64
# Memory of an entry beyond its names, target and attributes (measured: 540).
_ENTRY_OVERHEAD_BYTES: Final = 600


class _OldEntries:
    """Older entries of a directory, by name.

    With `ascending` they are asked for in byte order, and read in one pass.
    """

    def __init__(self, trees: Trees, tree: bytes, *, ascending: bool) -> None:
        self._trees = trees
        self._tree = tree
        self._ascending = ascending
        self._stream: Iterator[Entry] | None = None
        self._next: Entry | None = None

    def get(self, name: bytes) -> Entry | None:
        """Return the entry of this name; None where there is none."""
        if not self._tree:
            return None
        if not self._ascending:
            return self._trees.entry(self._tree, name)
        # After a pause the stream begins behind the entry that was read last.
        if self._stream is None:
            after = self._next.name if self._next is not None else b""
            self._stream = self._trees.entries(self._tree, after=after)
        while self._next is None or self._next.name < name:
            self._next = next(self._stream, None)
            if self._next is None:
                self._tree = b""
                return None
        return self._next if self._next.name == name else None

    def pause(self) -> None:
        """Release the nodes in memory; the next `get` reads them again."""
        self._stream = None


class Directory:
    """A directory being rebuilt."""

    __slots__ = (
        "attributes",
        "inode",
        "is_too_deep",
        "names",
        "old",
        "old_entries",
        "pending",
        "pending_bytes",
        "place",
        "scope",
        "tree",
        "visit",
    )

    def __init__(
        self,
        inode: PinnedInode,
        place: DirectoryPath,
        scope: Scope,
        visit: _Visit,
        attributes: Entry,
        old: Entry | None,
    ) -> None:
        self.inode = inode
        self.place = place
        self.scope = scope
        self.visit = visit
        self.attributes = attributes
        """New entry of the directory, without its tree."""
        self.old = old
        """Entry that the base has under the same path."""
        self.names: ListedNames
        self.old_entries: _OldEntries
        self.tree: TreeRef
        self.pending: dict[bytes, Entry | None] = {}
        self.pending_bytes = 0
        self.is_too_deep = False
        """True if it was moved and a directory in it is deeper than the limit now, so that everything in
        it is visited."""

    def put(self, name: bytes, entry: Entry | None) -> None:
        """Note an entry (None: removed) for the next batch."""
        self.pending[name] = entry
        self.pending_bytes += _size_of(name, entry)

    @property
    def is_batch_full(self) -> bool:
        """True if the noted entries should be written."""
        return len(self.pending) >= _BATCH_ENTRIES or self.pending_bytes >= _MAX_BATCH_BYTES


def _size_of(name: bytes, entry: Entry | None) -> int:
    if entry is None:
        return len(name) + _ENTRY_OVERHEAD_BYTES // 4
    attributes = sum(len(key) + len(value) for key, value in entry.xattrs)
    return 2 * len(name) + len(entry.target) + attributes + _ENTRY_OVERHEAD_BYTES


# Directories that are read to find the depth of a moved one; beyond that the depth of the whole older
# snapshot is used.
_MEASURED_NODES: Final = 256


class WalkedRoot(NamedTuple):
    """New tree of a root."""

    entry: Entry
    links: TreeRef
    depth: int
    """Levels of the deepest directory, or more; 0: not known."""
    not_held: int
    """Number of files whose content may be later than the cut."""


class RootWalker:
    """Walk of one root."""

    def __init__(
        self,
        view: SealedView,
        writer: Writer,
        trees: Trees,
        maker: EntryMaker,
        *,
        base: Base | None,
        sealed: Sealed | None,
        excludes: ExcludeMatcher,
        spill: Spill,
        skip: tuple[int, int],
        visited: Callable[[DirectoryPath, bytes], None],
        failed: Callable[[bytes, OSError], None],
        far_time: Callable[[bytes], None],
    ) -> None:
        """Prepare the walk.

        Args:
            view: the root as of the cut.
            writer: stores the tree.
            trees: reader of older trees.
            maker: makes entries.
            base: older snapshot of the root.
            sealed: sealed epoch; None offline.
            excludes: excludes of the root.
            spill: temporary storage.
            skip: device and inode number of the repository, which is not captured.
            visited: called with directory and name of each visited name.
            failed: called with the path (of a long one the end) and the error of each unreadable name.
            far_time: called with the path of each visited name whose modification time is not stored exactly.
        """
        self._view = view
        self._writer = writer
        self._trees = trees
        self._maker = maker
        self._base = base
        self._sealed = sealed
        self._excludes = excludes
        self._skip = skip
        self._visited = visited
        self._failed = failed
        self._far_time = far_time
        self._changes = sealed.changes if sealed is not None else Changes(spill)
        self._spill = spill
        self._tracked = base is not None and base.trusted
        older = base.record.links if base is not None else b""
        self._links = _LinkTable(trees, writer, spill, older=older, start=older if self._tracked else b"")
        self._relocated: RelocatedEntries | None = None
        # Directories met in this walk; only where there are hard links.
        self._met: _MetDirectories | None = None
        self._limit = depth_limit()
        self._deepest = 0
        # Memory of the directories from the root to the current one (`Directory`).
        self._names_bytes = self._pending_bytes = 0

    def run(self) -> WalkedRoot:
        """Walk the root and return its new tree.

        Raises:
            BackingUnreadable: the root itself cannot be read.
            TrackingBroken: the changes do not fit the base; errors of view and writer may be raised too.
        """
        if self._tracked and self._base is not None and self._sealed is not None:
            self._relocated = RelocatedEntries(self._trees, self._base.record, self._sealed, self._spill)
        root = self._view.root()
        if self._tracked and self._links.has_older:
            self._met = _MetDirectories(self._spill, root.ino)
        old = self._base.record.entry if self._base is not None else None
        stack: list[Directory] = []
        try:
            visit = _Visit.TOUCHED if self._tracked else _Visit.COMPARE
            # A stack of our own instead of recursion: a tree may be 2,048 levels deep.
            stack.append(self._enter(root, DirectoryPath(), self._excludes.top, visit, old, old))
            while True:
                directory = stack[-1]
                name = next(directory.names, None)
                if name is not None:
                    below = self._visit(directory, name)
                    if below is not None:
                        self._make_room(directory)
                        stack.append(below)
                    continue
                entry = self._leave(directory)
                stack.pop()
                if not stack:
                    break
                self._set(stack[-1], directory.place.name, entry, directory.old)
            if self._tracked and self._base is not None and self._links.has_older:
                self._unreached_links(self._base, root).settle()
        finally:
            for directory in stack:
                directory.inode.close()
            root.close()
        return WalkedRoot(entry, self._links.finish(), self._depth(), self._maker.not_held)

    def _unreached_links(self, base: Base, root: PinnedInode) -> _UnreachedLinks:
        return _UnreachedLinks(
            *(self._view, self._trees, base, self._changes),
            root=root,
            links=self._links,
            maker=self._maker,
            met=self._met,
            failed=self._failed,
        )

    def _depth(self) -> int:
        """Return `WalkedRoot.depth`: parts that were not walked are as deep as in the base."""
        if not self._tracked or self._base is None:
            return self._deepest
        older = self._base.record.depth
        return max(older, self._deepest) if older else 0

    # -- directories

    def _enter(
        self,
        inode: PinnedInode,
        place: DirectoryPath,
        scope: Scope,
        visit: _Visit,
        previous: Entry | None,
        old: Entry | None,
    ) -> Directory:
        """Begin a directory.

        Args:
            inode: the directory.
            place: its path.
            scope: state of the excludes at this path.
            visit: mode.
            previous: its own entry in the base, wherever it was.
            old: entry of the base under this path.

        Raises:
            BackingUnreadable: it cannot be read, or is below the limit of levels.
        """
        if place.depth > self._limit:
            raise BackingUnreadable(
                OSError(
                    errno.ENAMETOOLONG, f"directories more than {self._limit} levels deep are not captured"
                )
            )
        names = self._names(inode, place, visit)
        attributes = self._maker.directory(place.name, inode)
        # They are in `attributes`; kept here too they could be megabytes for each level.
        inode.xattrs = {}
        directory = Directory(inode, place, scope, visit, attributes, old)
        directory.names = names
        self._names_bytes += names.held_bytes
        self._deepest = max(self._deepest, place.depth)
        directory.old_entries = _OldEntries(
            self._trees,
            previous.content if previous is not None else b"",
            ascending=visit is not _Visit.TOUCHED,
        )
        directory.tree = _tree_of(previous if visit is _Visit.TOUCHED else None)
        return directory

    def _names(self, inode: PinnedInode, place: DirectoryPath, visit: _Visit) -> ListedNames:
        room_bytes = max(0, MAX_NAMES_BYTES - self._names_bytes)
        if visit is not _Visit.TOUCHED:
            return self._view.names(inode, is_root=not place.depth, room_bytes=room_bytes)
        names = self._spill.names()
        for name, _ in self._changes.names(inode.ino):
            names.put(name)
        return ListedNames(names, left_out=b"" if place.depth else STATE_DIR_NAME, room_bytes=room_bytes)

    def _make_room(self, directory: Directory) -> None:
        """Reduce the memory of a directory while one below it is walked."""
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._flush(directory)
        if directory.place.depth >= STREAMS_HELD:
            directory.old_entries.pause()

    def _leave(self, directory: Directory) -> Entry:
        self._flush(directory)
        self._names_bytes -= directory.names.held_bytes
        # The root stays open for the search for unreached links.
        if directory.place.depth:
            directory.inode.close()
        return self._maker.with_tree(directory.attributes, directory.tree)

    def _set(self, directory: Directory, name: bytes, entry: Entry | None, old: Entry | None) -> None:
        if entry is not None:
            entry = without_access_time_change(entry, old)
        # The new tree starts from the old one, where an unchanged entry need not be written, or from nothing,
        # where there is none to remove.
        if directory.visit is _Visit.TOUCHED:
            if entry is old:
                return
        elif entry is None:
            return
        before = directory.pending_bytes
        directory.put(name, entry)
        self._pending_bytes += directory.pending_bytes - before
        if directory.is_batch_full:
            self._flush(directory)

    def _flush(self, directory: Directory) -> None:
        if directory.pending:
            directory.tree = self._writer.update_tree(directory.tree.id, directory.pending)
            self._pending_bytes -= directory.pending_bytes
            directory.pending, directory.pending_bytes = {}, 0

    # -- names

    def _visit(self, directory: Directory, name: bytes) -> Directory | None:
        """Make the entry of one name; for a directory that must be walked, begin it and return it."""
        self._visited(directory.place, name)
        old = directory.old_entries.get(name)
        inode: PinnedInode | None = None
        below: Directory | None = None
        entry: Entry | None = None
        try:
            inode = self._view.child(directory.inode, name)
            if inode is not None and not self._is_left_out(directory, name, inode):
                if is_far_time(inode.stat.mtime_ns):
                    self._far_time(directory.place.path_of(name))
                if inode.mountpoint:
                    entry = self._maker.mountpoint(name, inode)
                elif inode.is_dir:
                    below, entry = self._directory(directory, inode, name, old)
                else:
                    entry = self._leaf(name, inode, self._previous(inode, old, directory.visit))
        except BackingUnreadable as error:
            # Left out, and named: its entry in the base is of another instant.
            self._failed(directory.place.path_of(name), error.error)
        # A value that no entry, record or system call holds. Whatever it is, it costs this name alone.
        except (ValueError, OverflowError) as error:
            self._failed(directory.place.path_of(name), OSError(errno.EOVERFLOW, str(error)))
        finally:
            if inode is not None and below is None:
                inode.close()
        if below is None:
            self._set(directory, name, entry, old)
        return below

    def _is_left_out(self, directory: Directory, name: bytes, inode: PinnedInode) -> bool:
        # The repository itself, by its inode: under a bind mount it has another name.
        if inode.is_dir and inode.ino == self._skip[1] and self._view.device == self._skip[0]:
            return True
        return bool(self._excludes) and self._excludes.excludes(directory.scope, name, inode.is_dir)

    def _previous(self, inode: PinnedInode, old: Entry | None, visit: _Visit) -> Entry | None:
        """Return the base's entry of the same inode, wherever it was; None if it was not there."""
        change = self._changes.get(inode.ino)
        if change is not None and change.fresh:
            return None
        found = old
        if found is None or (found.link or found.ino) != inode.ino:
            if visit is _Visit.COMPARE or self._relocated is None:
                return None
            found = self._relocated.get(inode.ino)
            if found is None:
                return None
        # An inode of another type was given the number since.
        return found if found.mode >> 12 == inode.stat.mode >> 12 else None

    def _directory(
        self, parent: Directory, inode: PinnedInode, name: bytes, old: Entry | None
    ) -> tuple[Directory | None, Entry | None]:
        """Return a directory to walk, or its entry where nothing below it has to be visited."""
        place = DirectoryPath(parent.place, name)
        scope = self._excludes.below(parent.scope, name) if self._excludes else parent.scope
        if parent.visit is _Visit.COMPARE:
            previous = old if old is not None and old.is_dir else None
            return self._enter(inode, place, scope, _Visit.COMPARE, previous, old), None
        if self._met is not None:
            self._met.put(inode.ino, parent.inode.ino, name)
        previous = self._previous(inode, old, parent.visit)
        # Of a directory that was new, or was a mount point, the base has nothing below.
        if previous is None or previous.flags & FLAG_MOUNTPOINT:
            return self._enter(inode, place, scope, _Visit.ALL, None, old), None
        moved = parent.visit is _Visit.ALL or old is None or old.ino != inode.ino
        is_too_deep = parent.is_too_deep or (moved and not self._fits(previous, place))
        # Patterns may match a path: what a moved directory has below is decided anew.
        if is_too_deep or (moved and self._excludes):
            directory = self._enter(inode, place, scope, _Visit.ALL, previous, old)
            directory.is_too_deep = is_too_deep
            return directory, None
        change = self._changes.get(inode.ino)
        if change is not None and (change.names or change.names_apart):
            return self._enter(inode, place, scope, _Visit.TOUCHED, previous, old), None
        return None, self._maker.with_tree(self._maker.directory(name, inode), _tree_of(previous))

    def _fits(self, moved: Entry, place: DirectoryPath) -> bool:
        """Return whether a directory that was moved to `place` has nothing below the limit there."""
        # Without this check, moves of directories that are not visited could make trees of any depth.
        left = self._limit - place.depth
        levels = levels_of(self._trees, moved.content, max_levels=left, max_nodes=_MEASURED_NODES)
        if levels is None:
            older = self._base.record.depth if self._base is not None else 0
            if 0 < older <= left:
                levels = older
            else:
                levels = levels_of(self._trees, moved.content, max_levels=left) or 0
        if levels > left:
            return False
        self._deepest = max(self._deepest, place.depth + levels)
        return True

    def _leaf(self, name: bytes, inode: PinnedInode, previous: Entry | None) -> Entry:
        linked = self._links.previous(inode.ino) if previous is not None and previous.link else None
        if inode.stat.nlink > 1:
            if not self._links.is_settled(inode.ino):
                self._put_link(inode, linked or (previous if previous is None or not previous.link else None))
            return _reference(name, inode)
        if previous is not None and previous.link:
            previous = linked
            if self._tracked:
                # This name is the last one; the others are gone from the tree as well.
                self._links.drop(inode.ino)
        return self._maker.leaf(name, inode, previous)

    # -- hard links

    def _put_link(self, inode: PinnedInode, previous: Entry | None) -> None:
        """Set the entry of an inode in the link table.

        Args:
            inode: the inode.
            previous: its entry in the base, from the table or from a tree.
        """
        change = self._changes.get(inode.ino)
        if previous is None and not (change is not None and change.fresh):
            previous = self._links.previous(inode.ino)
        if self._tracked and change is None and self._links.previous(inode.ino) is not None:
            self._links.keep(inode.ino)
        else:
            entry = self._maker.leaf(_link_key(inode.ino), inode, previous)
            self._links.put(without_access_time_change(entry, self._links.previous(inode.ino)))


def _tree_of(directory: Entry | None) -> TreeRef:
    """Return the stored tree of a directory's entry."""
    if directory is None:
        return TreeRef(id=b"")  # type: ignore[arg-type]
    return TreeRef(
        id=directory.content,  # type: ignore[arg-type]
        total_files=directory.total_files,
        total_bytes=directory.total_bytes,
    )
