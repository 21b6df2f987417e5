"""Walking a root at the cut and building its new tree.

Guarantees: the tree is the root as it was at the cut (capture_view says why); in tracked mode only touched names are looked
at and only changed blocks are read; a tree of any shape costs bounded memory (capture_directory) and one descriptor a level.
Names that cannot be read are reported, left out, and stop nothing else; so are directories below the limit of levels
(capture_place).

Three ways to visit a directory, decided one by one: *touched* (only the names in its Change), *all* (every name; what has no
Change is taken over by its inode: new directories, and moved ones where excludes depend on the path), *compare* (every name;
nothing is taken over without the same size, mtime, ctime and inode number).
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from typing import Final, NamedTuple

from ciuic import STATE_DIR_NAME
from ciuic.daemon.capture_base import Base, OldPlaces, levels_of
from ciuic.daemon.capture_directory import (
    MAX_NAMES_BYTES,
    MAX_PENDING_BYTES,
    STREAMS_HELD,
    Directory,
    OldEntries,
)
from ciuic.daemon.capture_entry import EntryMaker, without_access_time_change
from ciuic.daemon.capture_far_links import FarLinks, TrackingBroken
from ciuic.daemon.capture_links import LinkTable, link_key, reference
from ciuic.daemon.capture_place import MetDirectories, Place, depth_limit
from ciuic.daemon.capture_view import ListedNames, SealedView, Thing, Unreadable
from ciuic.daemon.capture_visit import Visit
from ciuic.excludes import ExcludeMatcher, Scope
from ciuic.fuse_layer.sealed_format import Changes, Sealed
from ciuic.repository import Trees, Writer
from ciuic.spill import Spill
from ciuic.types import FLAG_MOUNTPOINT, Entry, TreeRef

__all__ = ["TrackingBroken", "Walked", "Walker"]

_MEASURED_NODES: Final = 256
"""Directories that are read to know how deep a moved one is before the older snapshot's own depth is asked."""


class Walked(NamedTuple):
    """A root's new tree."""

    entry: Entry
    links: TreeRef
    depth: int
    """No directory lies more levels below the root; 0: not known."""
    not_held: int
    """Files whose content may be later than the cut."""


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
        visited: Callable[[Place, bytes], None],
        failed: Callable[[bytes, OSError], None],
    ) -> None:
        """`skip` is (device, inode) of the repository; `visited` hears directory and name of what is looked at, `failed` the path
        (of a long one the end) of what could not be read."""
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
        self._met: MetDirectories | None = None
        """Asked where there are hard links."""
        self._limit = depth_limit()
        self._deepest = 0
        self._names_bytes = self._pending_bytes = 0
        """What the directories on the way hold (capture_directory)."""

    def run(self) -> Walked:
        """Walks the root. Unreadable when the root itself cannot be read; TrackingBroken; what view and writer raise."""
        if self._tracked and self._base is not None and self._sealed is not None:
            self._old_places = OldPlaces(self._trees, self._base.record, self._sealed, self._spill)
        root = self._view.root()
        if self._tracked and self._links.has_older:
            self._met = MetDirectories(self._spill, root.ino)
        old = self._base.record.entry if self._base is not None else None
        stack: list[Directory] = []
        try:
            visit = Visit.TOUCHED if self._tracked else Visit.COMPARE
            stack.append(self._enter(root, Place(), self._excludes.top, visit, old, old))
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
                self._far_links(self._base, root).settle()
        finally:
            for directory in stack:
                directory.thing.close()
            root.close()
        return Walked(entry, self._links.finish(), self._depth(), self._maker.not_held)

    def _far_links(self, base: Base, root: Thing) -> FarLinks:
        return FarLinks(
            *(self._view, self._trees, base, self._changes),
            root=root,
            links=self._links,
            maker=self._maker,
            met=self._met,
            failed=self._failed,
        )

    def _depth(self) -> int:
        """See `Walked.depth`: what was not walked is as deep as it was."""
        if not self._tracked or self._base is None:
            return self._deepest
        older = self._base.record.depth
        return max(older, self._deepest) if older else 0

    # -- directories

    def _enter(
        self,
        thing: Thing,
        place: Place,
        scope: Scope,
        visit: Visit,
        previous: Entry | None,
        old: Entry | None,
    ) -> Directory:
        """Begin a directory; `previous` is its own older entry, `old` what the base has under its path. Unreadable."""
        if place.depth > self._limit:
            raise Unreadable(
                OSError(
                    errno.ENAMETOOLONG, f"directories more than {self._limit} levels deep are not captured"
                )
            )
        names = self._names(thing, place, visit)
        attributes = self._maker.directory(place.name, thing)
        thing.xattrs = {}  # they are in `attributes`; kept here they could be megabytes for each level
        directory = Directory(thing, place, scope, visit, attributes, old)
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

    def _names(self, thing: Thing, place: Place, visit: Visit) -> ListedNames:
        room_bytes = max(0, MAX_NAMES_BYTES - self._names_bytes)
        if visit is not Visit.TOUCHED:
            return self._view.names(thing, is_root=not place.depth, room_bytes=room_bytes)
        names = self._spill.names()
        for name, _ in self._changes.names(thing.ino):
            names.put(name)
        return ListedNames(names, left_out=b"" if place.depth else STATE_DIR_NAME, room_bytes=room_bytes)

    def _make_room(self, directory: Directory) -> None:
        """Let a directory hold less while something below it is walked, where those on the way hold much."""
        if self._pending_bytes > MAX_PENDING_BYTES:
            self._flush(directory)
        if directory.place.depth >= STREAMS_HELD:
            directory.old_entries.pause()

    def _leave(self, directory: Directory) -> Entry:
        self._flush(directory)
        self._names_bytes -= directory.names.held_bytes
        if directory.place.depth:
            directory.thing.close()
        return self._maker.with_tree(directory.attributes, directory.tree)

    def _set(self, directory: Directory, name: bytes, entry: Entry | None, old: Entry | None) -> None:
        if entry is not None:
            entry = without_access_time_change(entry, old)
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
        """Settles one name; for a directory that must be walked, returns it begun."""
        self._visited(directory.place, name)
        old = directory.old_entries.get(name)
        thing: Thing | None = None
        below: Directory | None = None
        entry: Entry | None = None
        try:
            thing = self._view.child(directory.thing, name)
            if thing is not None and not self._is_left_out(directory, name, thing):
                if thing.mountpoint:
                    entry = self._maker.mountpoint(name, thing)
                elif thing.is_dir:
                    below, entry = self._directory(directory, thing, name, old)
                else:
                    entry = self._leaf(name, thing, self._previous(thing, old, directory.visit))
        except Unreadable as error:
            self._failed(directory.place.path_of(name), error.error)
        finally:
            if thing is not None and below is None:
                thing.close()
        if below is None:
            self._set(directory, name, entry, old)
        return below

    def _is_left_out(self, directory: Directory, name: bytes, thing: Thing) -> bool:
        if thing.is_dir and thing.ino == self._skip[1] and self._view.device == self._skip[0]:
            return True
        return bool(self._excludes) and self._excludes.excludes(directory.scope, name, thing.is_dir)

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
        self, parent: Directory, thing: Thing, name: bytes, old: Entry | None
    ) -> tuple[Directory | None, Entry | None]:
        """A directory to walk, or its entry where nothing below it needs to be looked at."""
        place = Place(parent.place, name)
        scope = self._excludes.below(parent.scope, name) if self._excludes else parent.scope
        if parent.visit is Visit.COMPARE:
            previous = old if old is not None and old.is_dir else None
            return self._enter(thing, place, scope, Visit.COMPARE, previous, old), None
        if self._met is not None:
            self._met.put(thing.ino, parent.thing.ino, name)
        previous = self._previous(thing, old, parent.visit)
        if previous is None or previous.flags & FLAG_MOUNTPOINT:
            return self._enter(thing, place, scope, Visit.ALL, None, old), None
        moved = parent.visit is Visit.ALL or old is None or old.ino != thing.ino
        is_too_deep = parent.is_too_deep or (moved and not self._fits(previous, place))
        if is_too_deep or (moved and self._excludes):
            directory = self._enter(thing, place, scope, Visit.ALL, previous, old)
            directory.is_too_deep = is_too_deep
            return directory, None
        change = self._changes.get(thing.ino)
        if change is not None and (change.names or change.names_apart):
            return self._enter(thing, place, scope, Visit.TOUCHED, previous, old), None
        return None, self._maker.with_tree(self._maker.directory(name, thing), _tree_of(previous))

    def _fits(self, moved: Entry, place: Place) -> bool:
        """Whether a directory that was moved to `place` has nothing below the limit there. Unlimited moves of what is not
        looked at would make trees as deep as their owner likes."""
        left = self._limit - place.depth
        levels = levels_of(self._trees, moved.content, most_levels=left, most_nodes=_MEASURED_NODES)
        if levels is None:
            older = self._base.record.depth if self._base is not None else 0
            if 0 < older <= left:
                levels = older
            else:
                levels = levels_of(self._trees, moved.content, most_levels=left) or 0
        if levels > left:
            return False
        self._deepest = max(self._deepest, place.depth + levels)
        return True

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


def _tree_of(directory: Entry | None) -> TreeRef:
    """The stored tree of a directory's entry."""
    if directory is None:
        return TreeRef(id=b"")  # type: ignore[arg-type]
    return TreeRef(
        id=directory.content,  # type: ignore[arg-type]
        total_files=directory.total_files,
        total_bytes=directory.total_bytes,
    )
