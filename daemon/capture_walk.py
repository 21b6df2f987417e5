"""Walking a root at the cut and building its new tree.

Guarantees: the tree is the root as it was at the cut (capture_view says why); in tracked mode only touched names are looked
at and only changed blocks are read; a directory of any size costs one list of names and one batch of entries in memory, a
tree of any depth one descriptor a level. Names that cannot be read are reported, left out, and stop nothing else.

Three ways to visit a directory, decided one by one: *touched* (only the names in its Change), *all* (every name; what has no
Change is taken over by its inode: new directories, and moved ones where excludes depend on the path), *compare* (every name;
nothing is taken over without the same size, mtime, ctime and inode number).
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

from ciuic import STATE_DIR_NAME
from ciuic.daemon.capture_base import Base, OldPlaces, link_names
from ciuic.daemon.capture_entry import EntryMaker, without_access_time_change
from ciuic.daemon.capture_links import LinkTable, link_key, reference
from ciuic.daemon.capture_view import SealedView, Thing, Unreadable
from ciuic.excludes import ExcludeMatcher
from ciuic.fuse_layer.sealed_format import Changes, Sealed
from ciuic.repository import Trees, Writer
from ciuic.spill import NumberTable, Spill
from ciuic.types import FLAG_MOUNTPOINT, Entry, TreeRef

_BATCH_ENTRIES: Final = 8192
_WANTED_AT_ONCE: Final = 32 << 10


class TrackingBroken(Exception):
    """The changes do not fit the base: only comparing everything gives a true snapshot."""


class Visit(enum.Enum):
    TOUCHED = "touched"
    ALL = "all"
    COMPARE = "compare"


class Walked(NamedTuple):
    """A root's new tree."""

    entry: Entry
    links: TreeRef


class OldEntries:
    """The older entries of a directory by name. `ascending`: asked for in byte order, they are read once, in passing."""

    def __init__(self, trees: Trees, tree: bytes, *, ascending: bool) -> None:
        self._trees = trees
        self._tree = tree
        self._stream = trees.entries(tree) if ascending and tree else None
        self._next: Entry | None = None

    def get(self, name: bytes) -> Entry | None:
        if not self._tree:
            return None
        if self._stream is None:
            return self._trees.entry(self._tree, name)
        while self._next is None or self._next.name < name:
            self._next = next(self._stream, None)
            if self._next is None:
                self._tree = b""
                return None
        return self._next if self._next.name == name else None


class _Directory:
    """A directory being rebuilt."""

    __slots__ = ("name", "names", "old", "old_entries", "path", "pending", "thing", "tree", "visit")

    def __init__(self, thing: Thing, path: bytes, name: bytes, visit: Visit, old: Entry | None) -> None:
        self.thing = thing
        self.path = path
        """Relative to the root."""
        self.name = name
        self.visit = visit
        self.old = old
        """What the base has under the same path."""
        self.names: Iterator[bytes]
        self.old_entries: OldEntries
        self.tree: TreeRef
        self.pending: dict[bytes, Entry | None] = {}


class Walker:
    """One walk of one root."""

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
        visited: Callable[[bytes], None],
        failed: Callable[[bytes, OSError], None],
    ) -> None:
        """`skip` is (device, inode) of the repository; `visited` hears each path, `failed` each that could not be read."""
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
        self._changes = sealed.changes if sealed is not None else Changes(spill)
        self._spill = spill
        self._tracked = base is not None and base.trusted
        older = base.record.links if base is not None else b""
        self._links = LinkTable(trees, writer, spill, older=older, start=older if self._tracked else b"")
        self._old_places: OldPlaces | None = None
        self._places: NumberTable | None = spill.numbers() if self._tracked and older else None
        """Where directories were met; asked for where there are hard links."""

    def run(self) -> Walked:
        """Walks the root. Unreadable when the root itself cannot be read; TrackingBroken; what view and writer raise."""
        if self._tracked and self._base is not None and self._sealed is not None:
            self._old_places = OldPlaces(self._trees, self._base.record, self._sealed, self._spill)
        root = self._view.root()
        old = self._base.record.entry if self._base is not None else None
        stack: list[_Directory] = []
        try:
            stack.append(
                self._enter(root, b"", b"", Visit.TOUCHED if self._tracked else Visit.COMPARE, old, old)
            )
            while True:
                directory = stack[-1]
                name = next(directory.names, None)
                if name is not None:
                    below = self._visit(directory, name)
                    if below is not None:
                        stack.append(below)
                    continue
                entry = self._leave(directory)
                stack.pop()
                if not stack:
                    break
                self._set(stack[-1], directory.name, entry, directory.old)
            if self._tracked:
                self._settle_links_out_of_reach(root)
        finally:
            for directory in stack:
                directory.thing.close()
            root.close()
        return Walked(entry, self._links.finish())

    # -- directories

    def _enter(
        self, thing: Thing, path: bytes, name: bytes, visit: Visit, previous: Entry | None, old: Entry | None
    ) -> _Directory:
        """Begin a directory; `previous` is its own older entry, `old` what the base has under its path. Unreadable."""
        directory = _Directory(thing, path, name, visit, old)
        older_tree = previous.content if previous is not None else b""
        if visit is Visit.TOUCHED:
            touched = (name for name, _ in self._changes.names(thing.ino))
            directory.names = (name for name in touched if path or name != STATE_DIR_NAME)
            start = previous
        else:
            directory.names = self._view.names(thing, is_root=not path)
            start = None
        directory.old_entries = OldEntries(self._trees, older_tree, ascending=visit is not Visit.TOUCHED)
        directory.tree = _tree_of(start)
        return directory

    def _leave(self, directory: _Directory) -> Entry:
        self._flush(directory)
        if directory.path:
            directory.thing.close()
        return self._maker.directory(directory.name, directory.thing, directory.tree)

    def _set(self, directory: _Directory, name: bytes, entry: Entry | None, old: Entry | None) -> None:
        if entry is not None:
            entry = without_access_time_change(entry, old)
        if directory.visit is Visit.TOUCHED:
            if entry is old:
                return
        elif entry is None:
            return
        directory.pending[name] = entry
        if len(directory.pending) >= _BATCH_ENTRIES:
            self._flush(directory)

    def _flush(self, directory: _Directory) -> None:
        if directory.pending:
            directory.tree = self._writer.update_tree(directory.tree.id, directory.pending)
            directory.pending = {}

    # -- names

    def _visit(self, directory: _Directory, name: bytes) -> _Directory | None:
        """Settles one name; for a directory that must be walked, returns it begun."""
        path = directory.path + b"/" + name if directory.path else name
        self._visited(path)
        old = directory.old_entries.get(name)
        thing: Thing | None = None
        below: _Directory | None = None
        entry: Entry | None = None
        try:
            thing = self._view.child(directory.thing, name)
            if thing is not None and not self._is_left_out(path, thing):
                if thing.mountpoint:
                    entry = self._maker.mountpoint(name, thing)
                elif thing.is_dir:
                    below, entry = self._directory(directory, thing, path, name, old)
                else:
                    entry = self._leaf(name, thing, self._previous(thing, old, directory.visit))
        except Unreadable as error:
            self._failed(path, error.error)
        finally:
            if thing is not None and below is None:
                thing.close()
        if below is None:
            self._set(directory, name, entry, old)
        return below

    def _is_left_out(self, path: bytes, thing: Thing) -> bool:
        if thing.is_dir and thing.ino == self._skip[1] and self._view.device == self._skip[0]:
            return True
        return bool(self._excludes) and self._excludes.match(path, thing.is_dir)

    def _previous(self, thing: Thing, old: Entry | None, visit: Visit) -> Entry | None:
        """The base's entry of the same inode, wherever it was; None if it was not there."""
        change = self._changes.get(thing.ino)
        if change is not None and change.fresh:
            return None
        found = old
        if found is None or (found.link or found.ino) != thing.ino:
            if visit is Visit.COMPARE or self._old_places is None:
                return None
            found = self._old_places.get(thing.ino)
            if found is None:
                return None
        return found if found.mode >> 12 == thing.stat.mode >> 12 else None

    def _directory(
        self, parent: _Directory, thing: Thing, path: bytes, name: bytes, old: Entry | None
    ) -> tuple[_Directory | None, Entry | None]:
        """A directory to walk, or its entry where nothing below it needs to be looked at."""
        if parent.visit is Visit.COMPARE:
            previous = old if old is not None and old.is_dir else None
            return self._enter(thing, path, name, Visit.COMPARE, previous, old), None
        if self._places is not None:
            self._places.put(thing.ino, path)
        previous = self._previous(thing, old, parent.visit)
        if previous is None or previous.flags & FLAG_MOUNTPOINT:
            return self._enter(thing, path, name, Visit.ALL, None, old), None
        moved = parent.visit is Visit.ALL or old is None or old.ino != thing.ino
        if moved and self._excludes:
            return self._enter(thing, path, name, Visit.ALL, previous, old), None
        change = self._changes.get(thing.ino)
        if change is not None and (change.names or change.names_apart):
            return self._enter(thing, path, name, Visit.TOUCHED, previous, old), None
        return None, self._maker.directory(name, thing, _tree_of(previous))

    def _leaf(self, name: bytes, thing: Thing, previous: Entry | None) -> Entry:
        linked = self._links.previous(thing.ino) if previous is not None and previous.link else None
        if thing.stat.nlink > 1:
            if not self._links.is_settled(thing.ino):
                self._put_link(thing, linked or (previous if previous is None or not previous.link else None))
            return reference(name, thing)
        if previous is not None and previous.link:
            previous = linked
            if self._tracked:
                self._links.drop(
                    thing.ino
                )  # this name is the last: the others are gone from the tree as well
        return self._maker.leaf(name, thing, previous)

    # -- hard links

    def _put_link(self, thing: Thing, previous: Entry | None) -> None:
        """What the link table says of an inode. `previous`: its entry in the base, from the table or from a tree."""
        change = self._changes.get(thing.ino)
        if previous is None and not (change is not None and change.fresh):
            previous = self._links.previous(thing.ino)
        if self._tracked and change is None and self._links.previous(thing.ino) is not None:
            self._links.keep(thing.ino)
        else:
            entry = self._maker.leaf(link_key(thing.ino), thing, previous)
            self._links.put(without_access_time_change(entry, self._links.previous(thing.ino)))

    def _settle_links_out_of_reach(self, root: Thing) -> None:
        """Changed inodes of the link table to which no touched name leads: by another name, or gone.

        The overlay touches the name that it knows; of a hard-linked inode that one may have been removed while others, never
        looked up, remain. The base knows them all.
        """
        if not self._links.has_older:
            return
        wanted: set[int] = set()
        for ino, change in self._changes.items():
            if not self._links.is_settled(ino) and self._links.previous(ino) is not None:
                if change.fresh:
                    self._links.drop(
                        ino
                    )  # the number went to another inode: all names of the older one are gone
                else:
                    wanted.add(ino)
                    if len(wanted) >= _WANTED_AT_ONCE:
                        self._settle_links(root, wanted)
                        wanted = set()
        if wanted:
            self._settle_links(root, wanted)

    def _settle_links(self, root: Thing, wanted: set[int]) -> None:
        """These inodes of the link table, by a look at all names in the base."""
        assert self._base is not None
        assert self._sealed is not None
        for found in link_names(self._trees, self._base.record, self._sealed.head.root_ino, wanted):
            path = self._place_of(found.steps)
            if path is not None and not self._links.is_settled(found.ino):
                self._settle_by_path(root, path, found.ino)
        for ino in wanted:
            if not self._links.is_settled(ino):
                self._links.drop(ino)

    def _place_of(self, steps: tuple[tuple[int, bytes, int], ...]) -> tuple[bytes, ...] | None:
        """The names that lead there at the cut; None when one of them was removed or leads elsewhere now.

        From the deepest directory on the way that was met in this walk, wherever it is now, by names that are untouched.
        """
        met = max((i for i, (_, _, ino) in enumerate(steps) if self._place(ino) is not None), default=-1)
        place = self._place(steps[met][2]) if met >= 0 else None
        path = tuple(place.split(b"/")) if place is not None else ()
        for parent, name, ino in steps[met + 1 :]:
            if self._changes.is_touched(parent, name):
                return None
            own = self._changes.get(ino)
            if own is not None and own.fresh:
                return None  # the number belongs to something new; what the base means is gone
            path = (*path, name)
        return path

    def _place(self, ino: int) -> bytes | None:
        """Where a directory of the base was met in this walk."""
        own = self._changes.get(ino)
        if self._places is None or (own is not None and own.fresh):
            return None
        return self._places.get(ino)

    def _settle_by_path(self, root: Thing, path: tuple[bytes, ...], ino: int) -> None:
        at = root
        try:
            for name in path:
                below = self._view.child(at, name)
                if at is not root:
                    at.close()
                if below is None:
                    raise TrackingBroken(f"{b'/'.join(path)!r} should be inode {ino} and is not there")
                at = below
            if at.ino != ino:
                raise TrackingBroken(f"{b'/'.join(path)!r} should be inode {ino} and is {at.ino}")
            self._links.put(self._maker.leaf(link_key(ino), at, self._links.previous(ino)))
        except Unreadable as error:
            self._failed(b"/".join(path), error.error)
        finally:
            if at is not root:
                at.close()


def _tree_of(directory: Entry | None) -> TreeRef:
    """The stored tree of a directory's entry."""
    if directory is None:
        return TreeRef(id=b"")  # type: ignore[arg-type]
    return TreeRef(
        id=directory.content,  # type: ignore[arg-type]
        total_files=directory.total_files,
        total_bytes=directory.total_bytes,
    )
