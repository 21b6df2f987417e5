"""Walk of a root as of the cut, which builds its new tree.

Guarantees: the tree is the root as of the cut (view.py has the reason); in tracked mode only touched names
are visited and only changed blocks are read; a tree of any shape costs bounded memory (directory.py) and one
descriptor a level. Unreadable names are reported and left out, and stop nothing else; so are directories
below the limit of levels (directory_path.py).

Each directory is visited in one of three modes: *touched* (only the names in its Change), *all* (every name;
inodes without Change are taken over from the base: new directories, and moved ones where excludes depend on
the path), *compare* (every name; an entry is taken over only with the same size, mtime, ctime and inode
number).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, NamedTuple

from ciuic import STATE_DIR_NAME
from ciuic.daemon.capture.base_snapshot import Base, RelocatedEntries, levels_of
from ciuic.daemon.capture.directory import (
    MAX_NAMES_BYTES,
    MAX_PENDING_BYTES,
    STREAMS_HELD,
    Directory,
    OldEntries,
)
from ciuic.daemon.capture.directory_path import DirectoryPath, MetDirectories, depth_limit
from ciuic.daemon.capture.entry import EntryMaker, without_access_time_change
from ciuic.daemon.capture.links import LinkTable, link_key, reference
from ciuic.daemon.capture.unreached_links import TrackingBroken, UnreachedLinks
from ciuic.daemon.capture.view import BackingUnreadable, ListedNames, PinnedInode, SealedView
from ciuic.daemon.capture.visit import Visit
from ciuic.excludes import ExcludeMatcher, Scope
from ciuic.fuse_layer.sealed_format import Changes, Sealed
from ciuic.repository import Trees, Writer
from ciuic.system.spill import Spill
from ciuic.types import FLAG_MOUNTPOINT, Entry, TreeRef, is_far_time

__all__ = ["RootWalker", "TrackingBroken", "WalkedRoot"]

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
        self._links = LinkTable(trees, writer, spill, older=older, start=older if self._tracked else b"")
        self._relocated: RelocatedEntries | None = None
        # Directories met in this walk; only where there are hard links.
        self._met: MetDirectories | None = None
        self._limit = depth_limit()
        self._deepest = 0
        # Memory of the directories from the root to the current one (directory.py).
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
            self._met = MetDirectories(self._spill, root.ino)
        old = self._base.record.entry if self._base is not None else None
        stack: list[Directory] = []
        try:
            visit = Visit.TOUCHED if self._tracked else Visit.COMPARE
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

    def _unreached_links(self, base: Base, root: PinnedInode) -> UnreachedLinks:
        return UnreachedLinks(
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
        visit: Visit,
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
        directory.old_entries = OldEntries(
            self._trees,
            previous.content if previous is not None else b"",
            ascending=visit is not Visit.TOUCHED,
        )
        directory.tree = _tree_of(previous if visit is Visit.TOUCHED else None)
        return directory

    def _names(self, inode: PinnedInode, place: DirectoryPath, visit: Visit) -> ListedNames:
        room_bytes = max(0, MAX_NAMES_BYTES - self._names_bytes)
        if visit is not Visit.TOUCHED:
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
        if directory.visit is Visit.TOUCHED:
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

    def _previous(self, inode: PinnedInode, old: Entry | None, visit: Visit) -> Entry | None:
        """Return the base's entry of the same inode, wherever it was; None if it was not there."""
        change = self._changes.get(inode.ino)
        if change is not None and change.fresh:
            return None
        found = old
        if found is None or (found.link or found.ino) != inode.ino:
            if visit is Visit.COMPARE or self._relocated is None:
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
        if parent.visit is Visit.COMPARE:
            previous = old if old is not None and old.is_dir else None
            return self._enter(inode, place, scope, Visit.COMPARE, previous, old), None
        if self._met is not None:
            self._met.put(inode.ino, parent.inode.ino, name)
        previous = self._previous(inode, old, parent.visit)
        # Of a directory that was new, or was a mount point, the base has nothing below.
        if previous is None or previous.flags & FLAG_MOUNTPOINT:
            return self._enter(inode, place, scope, Visit.ALL, None, old), None
        moved = parent.visit is Visit.ALL or old is None or old.ino != inode.ino
        is_too_deep = parent.is_too_deep or (moved and not self._fits(previous, place))
        # Patterns may match a path: what a moved directory has below is decided anew.
        if is_too_deep or (moved and self._excludes):
            directory = self._enter(inode, place, scope, Visit.ALL, previous, old)
            directory.is_too_deep = is_too_deep
            return directory, None
        change = self._changes.get(inode.ino)
        if change is not None and (change.names or change.names_apart):
            return self._enter(inode, place, scope, Visit.TOUCHED, previous, old), None
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
            return reference(name, inode)
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
            entry = self._maker.leaf(link_key(inode.ino), inode, previous)
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
