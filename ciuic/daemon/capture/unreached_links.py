"""Changed inodes of the link table that no touched name leads to: they have other names, or are gone.

The overlay records the name that it knows; of a hard-linked inode that name may have been removed while
others, never looked up, remain. The base has all names: they are searched there, and each is followed to
where it leads at the cut.

Guarantees: names of one directory, which come in sequence, cost one walk to that directory, however deep it
is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from ciuic.daemon.capture.base_snapshot import Base, BaseName, LinkName, link_names
from ciuic.daemon.capture.directory_path import MAX_SHOWN_BYTES, MetDirectories
from ciuic.daemon.capture.entry import EntryMaker
from ciuic.daemon.capture.links import LinkTable, link_key
from ciuic.daemon.capture.view import BackingUnreadable, PinnedInode, SealedView
from ciuic.fuse_layer.sealed_format import Changes
from ciuic.repository import Trees

# Inodes that one walk through the base searches for: a set of so many takes some megabytes.
_WANTED_AT_ONCE: Final = 32 << 10


class TrackingBroken(Exception):
    """The changes do not fit the base, so that everything has to be compared."""


class UnreachedLinks:
    """Search after the end of one walk. `root` stays the caller's."""

    def __init__(
        self,
        view: SealedView,
        trees: Trees,
        base: Base,
        changes: Changes,
        *,
        root: PinnedInode,
        links: LinkTable,
        maker: EntryMaker,
        met: MetDirectories | None,
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
                self._links.put(self._maker.leaf(link_key(ino), found, self._links.previous(ino)))
        except BackingUnreadable as error:
            self._failed(b"/".join(path)[-MAX_SHOWN_BYTES:], error.error)

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
    shown = b"/".join(path)[-MAX_SHOWN_BYTES:]
    return TrackingBroken(f"{shown!r} should be {f'inode {ino}' if ino else 'a directory'} and {found}")
