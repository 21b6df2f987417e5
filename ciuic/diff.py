"""What changed between two snapshots, or between a snapshot and the live files.

Guarantees: equal subtrees are not read; only what a person can see counts (content, type, mode, owner, mtime, xattrs, link
target, device number), so access and change times never make a difference. Of directories the mtime is left out too: it
says no more than the names below. Hard links are compared by what they show. Leaves to others how it is printed.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import Literal, NamedTuple

import msgspec

from ciuic.errors import NotFound
from ciuic.linked_path import LinkedPath
from ciuic.live import LiveNode, Unreadable
from ciuic.lookup import Located, find, is_within, join, normalise, readable, resolve, root_of
from ciuic.repository import Repository
from ciuic.repository.trees import Lineage
from ciuic.restore.content import Worker, batches
from ciuic.types import FLAG_MOUNTPOINT, Entry, RootRecord, Snapshot

ChangeKind = Literal["added", "removed", "changed", "retyped"]


class Change(NamedTuple):
    """One path that differs. ``old`` and ``new`` are complete entries (of live files: without content), None on one side."""

    kind: ChangeKind
    path: bytes
    """Absolute."""
    old: Entry | None
    new: Entry | None
    details: tuple[str, ...] = ()
    """What changed: content, size, mode, owner, mtime, xattrs, target, device; or, of live files: unreadable."""


_Pairs = Iterator[tuple[bytes, Entry | None, Entry | None]]


class _Side(NamedTuple):
    """One snapshot's half of a comparison."""

    repository: Repository
    root: RootRecord

    def resolved(self, entry: Entry) -> Entry:
        return resolve(self.repository, self.root, entry)

    def xattrs(self, entry: Entry) -> tuple[tuple[bytes, bytes], ...]:
        return self.repository.trees.xattrs(entry)


def diff_snapshots(
    repository: Repository, old: Snapshot, new: Snapshot, path: bytes | None = None
) -> Iterator[Change]:
    """Changes from ``old`` to ``new``, parents before what is below them; only at and below ``path`` if given.

    Everything below an added or removed directory comes too. A root that one of them was made without is not compared: what was
    in it then is not known. NotFound when neither has ``path``, or one was made without its root; Damaged.
    """
    if path is not None:
        before, after = _find(repository, old, path), _find(repository, new, path)
        for snapshot in (old, new):
            if any(is_within(normalise(path), root.path) for root in snapshot.left_out):
                find(repository, snapshot, path)  # says that it was made without that root
        if before is None and after is None:
            raise NotFound(f"{readable(normalise(path))} is neither in {old.id} nor in {new.id}")
        yield from _between(repository, before, after)
        return
    lacking = {root.path for root in (*old.left_out, *new.left_out)}
    for root_path in sorted({root.path for root in (*old.roots, *new.roots)} - lacking):
        yield from _between(repository, _find(repository, old, root_path), _find(repository, new, root_path))


def _find(repository: Repository, snapshot: Snapshot, path: bytes) -> Located | None:
    try:
        return find(repository, snapshot, path)
    except NotFound:
        return None


def _between(repository: Repository, before: Located | None, after: Located | None) -> Iterator[Change]:
    located = after or before
    if located is None:
        return
    old = _Side(repository, before.root) if before else None
    new = _Side(repository, after.root) if after else None
    walk = _SnapshotWalk(repository, old, new)
    yield from walk.pair(located.path, before and before.entry, after and after.entry)


class _SnapshotWalk:
    """Two trees of one repository, side by side. Directories wait on a stack, not in recursion."""

    def __init__(self, repository: Repository, old: _Side | None, new: _Side | None) -> None:
        self._trees = repository.trees
        self._old = old
        self._new = new
        self._relinked = self._changed_inodes()

    def _changed_inodes(self) -> set[int]:
        """Inodes with several names that differ: they change what equal trees show."""
        if self._old is None or self._new is None or self._old.root.links == self._new.root.links:
            return set()
        pairs = self._trees.diff(self._old.root.links, self._new.root.links, links=True)
        return {int.from_bytes(entry.name, "big") for pair in pairs for entry in pair if entry is not None}

    def pair(self, path: bytes, old: Entry | None, new: Entry | None) -> Iterator[Change]:
        above: LinkedPath | None = None
        stack: list[tuple[LinkedPath | None, _Pairs]] = [(None, iter([(path, old, new)]))]
        sides = (Lineage(), Lineage())
        while stack:
            above, pairs = stack[-1]
            item = next(pairs, None)
            if item is None:
                stack.pop()
                for side in sides if stack else ():
                    side.leave()
                continue
            path = item[0] if above is None else join(bytes(above), item[0])
            _, old, new = item
            old = old and self._old and self._old.resolved(old)
            new = new and self._new and self._new.resolved(new)
            change = self._change(path, old, new)
            if change is not None:
                yield change
            below_old = old.content if old is not None and old.is_dir else b""
            below_new = new.content if new is not None and new.is_dir else b""
            if below_old != below_new or (below_new and self._relinked):
                sides[0].enter(below_old)
                sides[1].enter(below_new)
                stack.append((LinkedPath(path, above), self._below(below_old, below_new)))

    def _below(self, old: bytes, new: bytes) -> _Pairs:
        """Names with what the two directories have under them."""
        if not self._relinked:
            for left, right in self._trees.diff(old, new):
                named = left or right
                assert named is not None
                yield named.name, left, right
            return
        # Names of changed inodes have equal entries, so here every name has to be looked at.
        theirs = {entry.name: entry for entry in self._trees.entries(new)}
        for left in self._trees.entries(old):
            yield left.name, left, theirs.pop(left.name, None)
        for right in theirs.values():
            yield right.name, None, right

    def _change(self, path: bytes, old: Entry | None, new: Entry | None) -> Change | None:
        if old is None or new is None:
            return _one_sided(path, old, new)
        if stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
            return Change("retyped", path, old, new)
        details = attribute_details(old, new)
        assert self._old is not None
        assert self._new is not None
        if self._old.xattrs(old) != self._new.xattrs(new):
            details.append("xattrs")
        if old.is_file and (old.content, old.map_height) != (new.content, new.map_height):
            details.insert(0, "content")
        elif old.is_file and old.size_bytes != new.size_bytes:
            details.insert(0, "content")  # more or fewer zeros at its end
        return Change("changed", path, old, new, tuple(details)) if details else None


def attribute_details(old: Entry, new: Entry) -> list[str]:
    """What differs of two things of the same type, content and xattrs aside."""
    details = []
    if old.is_file and old.size_bytes != new.size_bytes:
        details.append("size")
    if stat.S_IMODE(old.mode) != stat.S_IMODE(new.mode) and not old.is_symlink:
        details.append("mode")
    if (old.uid, old.gid) != (new.uid, new.gid):
        details.append("owner")
    if old.mtime_ns != new.mtime_ns and not old.is_dir:
        details.append("mtime")
    if old.target != new.target:
        details.append("target")
    if old.rdev != new.rdev:
        details.append("device")
    return details


def _one_sided(path: bytes, old: Entry | None, new: Entry | None) -> Change | None:
    if old is not None:
        return Change("removed", path, old, None)
    return Change("added", path, None, new) if new is not None else None


def diff_live(repository: Repository, old: Snapshot, path: bytes | None = None) -> Iterator[Change]:
    """Changes from the snapshot to what is on the disk now, parents before what is below them.

    Files whose size, mtime, ctime and inode are as they were are not read; what cannot be read is a change with the detail
    ``unreadable``. Paths that were excluded from the snapshot show as added. NotFound when neither side has ``path``.
    """
    if path is None:
        for root in sorted(old.roots, key=lambda root: root.path):
            yield from _LiveWalk(repository, root).pair(root.path, root.entry)
        return
    path = normalise(path)
    in_root = root_of(old, path)
    if in_root is None:
        find(repository, old, path)  # says why
        return
    before = _find(repository, old, path)
    with LiveNode.at(path) as live:
        if before is None and live.entry is None:
            raise NotFound(f"{readable(path)} is not in {old.id}, nor on the disk now")
    yield from _LiveWalk(repository, in_root).pair(path, before and before.entry)


_Names = Iterator[tuple[bytes, Entry | None]]


class _LiveWalk:
    """A snapshot's tree and the files below a directory, side by side."""

    def __init__(self, repository: Repository, root: RootRecord) -> None:
        self._repository = repository
        self._side = _Side(repository, root)
        self._worker = Worker(repository, lambda: None)
        self._device = -1

    def pair(self, path: bytes, old: Entry | None) -> Iterator[Change]:
        with LiveNode.at(path) as top:
            self._device = top.device
            first: _Names = iter([(top.name, old)])
            frames: list[tuple[LinkedPath | None, LiveNode, _Names]] = [(None, top, first)]
            lineage = Lineage()
            lineage.enter(b"")
            try:
                while frames:
                    above, node, names = frames[-1]
                    item = next(names, None)
                    if item is None:
                        frames.pop()
                        node.close()
                        lineage.leave()
                        continue
                    name, old = item
                    here = path if above is None else join(bytes(above), name)
                    change, below = self._visit(node, here, name, old)
                    if change is not None:
                        yield change
                    if below is not None:
                        lineage.enter(old.content if old is not None and old.is_dir else b"")
                        frames.append((LinkedPath(here, above), *below))
            finally:
                for _, node, _ in frames:
                    node.close()

    def _visit(
        self, node: LiveNode, path: bytes, name: bytes, old: Entry | None
    ) -> tuple[Change | None, tuple[LiveNode, _Names] | None]:
        """What to say of this name, and the directory to go on in (of either side)."""
        try:
            new = node.child_entry(name)
            old = old and self._side.resolved(old)
            change = self._change(node, path, name, old, new)
            goes_on = new is not None and new.is_dir and node.child_device(name) == self._device
            if old is not None and old.flags & FLAG_MOUNTPOINT:
                goes_on = False  # what was below it never was in the snapshot
            below = node.descend(name) if goes_on else None
            live = below.names() if below is not None else []
        except Unreadable as error:
            return Change("changed" if old else "added", path, old, None, ("unreadable", error.reason)), None
        tree = old.content if old is not None and old.is_dir else b""
        if below is None and not tree:
            return change, None
        return change, (below or LiveNode.nothing(), self._merged(tree, live))

    def _merged(self, tree: bytes, live: list[bytes]) -> _Names:
        """Names of both sides, in byte order."""
        position = 0
        for entry in self._repository.trees.entries(tree):
            while position < len(live) and live[position] < entry.name:
                yield live[position], None
                position += 1
            if position < len(live) and live[position] == entry.name:
                position += 1
            yield entry.name, entry
        for name in live[position:]:
            yield name, None

    def _change(
        self, node: LiveNode, path: bytes, name: bytes, old: Entry | None, new: Entry | None
    ) -> Change | None:
        if old is None or new is None:
            return _one_sided(path, old, new)
        if stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
            return Change("retyped", path, old, new)
        if old.flags & FLAG_MOUNTPOINT:
            return None  # the directory of another file system
        details = attribute_details(old, new)
        new = msgspec.structs.replace(new, xattrs=node.child_xattrs(name))
        if tuple(sorted(self._side.xattrs(old))) != new.xattrs:
            details.append("xattrs")
        if old.is_file and self._content_differs(node, name, old, new):
            details.insert(0, "content")
        return Change("changed", path, old, new, tuple(details)) if details else None

    def _content_differs(self, node: LiveNode, name: bytes, old: Entry, new: Entry) -> bool:
        if old.size_bytes != new.size_bytes:
            return True
        if (old.mtime_ns, old.ctime_ns, old.ino) == (new.mtime_ns, new.ctime_ns, new.ino):
            return False
        with node.open_file(name) as fd:
            return not all(
                self._worker.equal(fd, old, batch, patient=True) for batch in batches(self._repository, old)
            )


__all__ = ["Change", "ChangeKind", "attribute_details", "diff_live", "diff_snapshots"]
