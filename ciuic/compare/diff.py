"""Compare two snapshots, or a snapshot with the live files.

Guarantees: equal subtrees are not read. Only visible properties count (content, type, mode, owner, mtime, xattrs, link target,
device number), so access and change times never make a difference. The mtime of directories is ignored too: it says no more
than the names below. Hard links are compared by the content and attributes that they lead to. The caller prints the result.

Of live files, no symbolic link is followed, and the reserved state directory is not shown. A file that cannot be read raises
`UnreadableFile` with the reason. Nothing is changed, not even access times where the caller may use O_NOATIME (open(2)).
"""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Literal, NamedTuple

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.errors import NotFound
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.lookup import Located, find, is_within, join, normalise, resolve, root_of
from ciuic.restore.content import BlockWorker, batches
from ciuic.restore.destination import open_way, proc_path, stat_at
from ciuic.system.disk import PIN, READ_DIRECTORY, READ_FILE, LinkedPath, read_xattrs
from ciuic.system.mountinfo import MountBorders
from ciuic.types import FLAG_MOUNTPOINT, Entry, RootRecord, Snapshot, recorded_time

_NOTHING = -1


class UnreadableFile(Exception):
    """A live file or directory exists and cannot be read."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


@contextmanager
def _reading() -> Iterator[None]:
    """Turn OSError into `UnreadableFile`."""
    try:
        yield
    except OSError as error:
        raise UnreadableFile(error.strerror or str(error)) from error


class LiveNode:
    """An open directory of the live files."""

    def __init__(self, fd: int, name: bytes = b"") -> None:
        self._fd = fd
        self._borders = None if fd == _NOTHING else MountBorders(fd)
        self.name = name
        """Last component of the path given to `at`; empty otherwise."""

    @classmethod
    def at(cls, path: bytes) -> LiveNode:
        """Open the directory that a path is in. Symbolic links above it are followed as a restore follows them.

        Raises:
            CiuicError: another user's link leads to a directory of somebody else.
        """
        parent, name = posixpath.split(path)
        try:
            return cls(open_way(parent), name)
        except OSError:
            # A directory that does not exist or that the caller may not read shows nothing.
            return cls(_NOTHING, name)

    @classmethod
    def nothing(cls) -> LiveNode:
        """Return the live side of a directory that does not exist."""
        return cls(_NOTHING)

    def __enter__(self) -> LiveNode:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the directory."""
        if self._fd != _NOTHING:
            os.close(self._fd)
            self._fd = _NOTHING

    @property
    def entry(self) -> Entry | None:
        """Attributes of the path given to `at`; None if it does not exist."""
        return self.child_entry(self.name)

    def child_entry(self, name: bytes) -> Entry | None:
        """Return the attributes of a name, without xattrs and content; None if it does not exist."""
        if self._fd == _NOTHING:
            return None
        with _reading():
            st = stat_at(self._fd, name)
            if st is None:
                return None
            target = os.readlink(name, dir_fd=self._fd) if stat.S_ISLNK(st.st_mode) else b""
        return _live_entry(name, st, target)

    def leads_away(self, name: bytes) -> bool:
        """Return whether another file system is mounted at a name."""
        return self._borders is not None and self._borders.at(name)

    def child_xattrs(self, name: bytes) -> tuple[tuple[bytes, bytes], ...]:
        """Return the extended attributes of a name, sorted."""
        with _reading():
            fd = os.open(name, PIN, dir_fd=self._fd)
            try:
                # Through /proc, because fgetxattr(2) takes no O_PATH descriptor. Sorted, as snapshots have
                # them.
                return tuple(sorted(read_xattrs(proc_path(fd)).items()))
            finally:
                os.close(fd)

    def descend(self, name: bytes) -> LiveNode:
        """Open a subdirectory."""
        with _reading():
            return LiveNode(os.open(name, READ_DIRECTORY, dir_fd=self._fd))

    def names(self) -> list[bytes]:
        """Return the names in the directory, in byte order."""
        with _reading():
            found = map(os.fsencode, os.listdir(self._fd))
            # In byte order, because they are merged with the entries of a tree.
            return sorted(name for name in found if name != STATE_DIR_NAME)

    @contextmanager
    def open_file(self, name: bytes) -> Iterator[int]:
        """Open a file for reading; the context is its descriptor."""
        with _reading():
            try:
                fd = os.open(name, READ_FILE | os.O_NOATIME, dir_fd=self._fd)
            except PermissionError:
                # open(2): only the owner and root may use O_NOATIME.
                fd = os.open(name, READ_FILE, dir_fd=self._fd)
        try:
            with _reading():
                yield fd
        finally:
            os.close(fd)


def _live_entry(name: bytes, st: os.stat_result, target: bytes = b"") -> Entry:
    """Return a live file's attributes as an entry."""
    is_device = stat.S_ISCHR(st.st_mode) or stat.S_ISBLK(st.st_mode)
    return Entry(
        name=name,
        mode=st.st_mode,
        uid=st.st_uid,
        gid=st.st_gid,
        rdev=st.st_rdev if is_device else 0,
        ino=st.st_ino,
        size_bytes=st.st_size if stat.S_ISREG(st.st_mode) else len(target),
        mtime_ns=recorded_time(st.st_mtime_ns),
        ctime_ns=recorded_time(st.st_ctime_ns),
        atime_ns=recorded_time(st.st_atime_ns),
        target=target,
    )


ChangeKind = Literal["added", "removed", "changed", "retyped"]


class PathChange(NamedTuple):
    """A path that differs."""

    kind: ChangeKind
    path: bytes
    """Absolute path."""
    old: Entry | None
    """Complete entry of the old side; None if the path was added."""
    new: Entry | None
    """Complete entry of the new side, for live files without content; None if the path was removed."""
    details: tuple[str, ...] = ()
    """Names of what changed: content, size, mode, owner, mtime, xattrs, target, device; for live files also unreadable."""


_Pairs = Iterator[tuple[bytes, Entry | None, Entry | None]]


class _Side(NamedTuple):
    """Side of a comparison: a root as one snapshot has it."""

    repository: Repository
    root: RootRecord

    def resolved(self, entry: Entry) -> Entry:
        """Return the entry with the attributes of its inode, if it is one of several names."""
        return resolve(self.repository, self.root, entry)


def diff_snapshots(
    repository: Repository, old: Snapshot, new: Snapshot, path: bytes | None = None
) -> Iterator[PathChange]:
    """Yield the changes from ``old`` to ``new``, parents before what is below them; only at and below ``path`` if given.

    Everything below an added or removed directory is included. A root that one of the snapshots was made without is not
    compared, because its content at that time is not known.

    Raises:
        NotFound: neither snapshot has ``path``, or one was made without its root.
        Damaged: a tree cannot be read.
    """
    if path is not None:
        before, after = _find(repository, old, path), _find(repository, new, path)
        for snapshot in (old, new):
            if any(is_within(normalise(path), root.path) for root in snapshot.left_out):
                # Raises NotFound, which says that the snapshot was made without that root.
                find(repository, snapshot, path)
        if before is None and after is None:
            raise NotFound(f"{one_line(normalise(path))} is neither in {old.id} nor in {new.id}")
        yield from _between(repository, before, after)
        return
    # A root that was left out of a snapshot would seem to have been removed or added as a whole.
    lacking = {root.path for root in (*old.left_out, *new.left_out)}
    for root_path in sorted({root.path for root in (*old.roots, *new.roots)} - lacking):
        yield from _between(repository, _find(repository, old, root_path), _find(repository, new, root_path))


def _find(repository: Repository, snapshot: Snapshot, path: bytes) -> Located | None:
    try:
        return find(repository, snapshot, path)
    except NotFound:
        return None


def _between(repository: Repository, before: Located | None, after: Located | None) -> Iterator[PathChange]:
    located = after or before
    if located is None:
        return
    old = _Side(repository, before.root) if before else None
    new = _Side(repository, after.root) if after else None
    walk = _SnapshotWalk(repository, old, new)
    yield from walk.pair(located.path, before.entry if before else None, after.entry if after else None)


class _SnapshotWalk:
    """Walk of two trees of one repository, side by side, with a stack of directories instead of recursion."""

    def __init__(self, repository: Repository, old: _Side | None, new: _Side | None) -> None:
        self._trees = repository.trees
        self._old = old
        self._new = new
        self._relinked = self._changed_inodes()

    def _changed_inodes(self) -> set[int]:
        """Return the inodes with several names that differ: equal trees may lead to different content through them."""
        if self._old is None or self._new is None or self._old.root.links == self._new.root.links:
            return set()
        pairs = self._trees.diff(self._old.root.links, self._new.root.links, links=True)
        return {int.from_bytes(entry.name, "big") for pair in pairs for entry in pair if entry is not None}

    def pair(self, path: bytes, old: Entry | None, new: Entry | None) -> Iterator[PathChange]:
        above: LinkedPath | None = None
        stack: list[tuple[LinkedPath | None, _Pairs]] = [(None, iter([(path, old, new)]))]
        # Raise Damaged for a tree that contains itself, which only a crafted repository has.
        sides = (Lineage(), Lineage())
        while stack:
            above, pairs = stack[-1]
            item = next(pairs, None)
            if item is None:
                stack.pop()
                # The first frame holds the top alone and entered no directory.
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
            # Equal ids mean equal trees, which need not be read; except where a linked inode below them differs.
            if below_old != below_new or (below_new and self._relinked):
                sides[0].enter(below_old)
                sides[1].enter(below_new)
                stack.append((LinkedPath(path, above), self._below(below_old, below_new)))

    def _below(self, old: bytes, new: bytes) -> _Pairs:
        """Yield (name, old entry, new entry) of two directories."""
        if not self._relinked:
            for left, right in self._trees.diff(old, new):
                named = left or right
                assert named is not None
                yield named.name, left, right
            return
        # Names of changed inodes have equal entries, which the comparison of trees skips: every name has to be read here.
        theirs = {entry.name: entry for entry in self._trees.entries(new)}
        for left in self._trees.entries(old):
            yield left.name, left, theirs.pop(left.name, None)
        for right in theirs.values():
            yield right.name, None, right

    def _change(self, path: bytes, old: Entry | None, new: Entry | None) -> PathChange | None:
        if old is None or new is None:
            return _one_sided(path, old, new)
        if stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
            return PathChange("retyped", path, old, new)
        details = attribute_details(old, new)
        if self._trees.xattrs(old) != self._trees.xattrs(new):
            details.append("xattrs")
        if old.is_file and (old.content, old.map_height) != (new.content, new.map_height):
            details.insert(0, "content")
        elif old.is_file and old.size_bytes != new.size_bytes:
            # The same blocks, with more or fewer zeros at the end.
            details.insert(0, "content")
        return PathChange("changed", path, old, new, tuple(details)) if details else None


def attribute_details(old: Entry, new: Entry) -> list[str]:
    """Return the names of what differs between two entries of the same type, except content and xattrs."""
    details = []
    if old.is_file and old.size_bytes != new.size_bytes:
        details.append("size")
    # symlink(7): the permissions of a symbolic link have no meaning.
    if stat.S_IMODE(old.mode) != stat.S_IMODE(new.mode) and not old.is_symlink:
        details.append("mode")
    if (old.uid, old.gid) != (new.uid, new.gid):
        details.append("owner")
    # A directory's time says no more than the names below it, which are compared themselves.
    if old.mtime_ns != new.mtime_ns and not old.is_dir:
        details.append("mtime")
    if old.target != new.target:
        details.append("target")
    if old.rdev != new.rdev:
        details.append("device")
    return details


def _one_sided(path: bytes, old: Entry | None, new: Entry | None) -> PathChange | None:
    if old is not None:
        return PathChange("removed", path, old, None)
    return PathChange("added", path, None, new) if new is not None else None


def _mounted(path: bytes, old: Entry | None, new: Entry | None) -> PathChange | None:
    """Return the change of a name at which another file system is mounted now."""
    if old is None:
        return _one_sided(path, None, new)
    if old.flags & FLAG_MOUNTPOINT:
        return None
    return PathChange("changed", path, old, None, ("unreadable", "another file system is mounted there"))


def diff_live(
    repository: Repository,
    old: Snapshot,
    path: bytes | None = None,
    check: Callable[[], None] = lambda: None,
) -> Iterator[PathChange]:
    """Yield the changes from the snapshot to what is on the disk now, parents before what is below them.

    A file with the same size, mtime, ctime and inode is not read. A file that cannot be read is a change with the detail
    ``unreadable``. Paths that were excluded from the snapshot show as added.

    Args:
        repository: Repository of the snapshot.
        old: The snapshot.
        path: Only what is at and below this path; None for all roots.
        check: Called between names and blocks.

    Raises:
        NotFound: neither side has ``path``.
        Damaged: a tree cannot be read.
    """
    if path is None:
        for root in sorted(old.roots, key=lambda root: root.path):
            yield from _LiveWalk(repository, root, check).pair(root.path, root.entry)
        return
    path = normalise(path)
    in_root = root_of(old, path)
    if in_root is None:
        # Raises NotFound, which says why the snapshot does not have the path.
        find(repository, old, path)
        return
    before = _find(repository, old, path)
    with LiveNode.at(path) as live:
        if before is None and live.entry is None:
            raise NotFound(f"{one_line(path)} is not in {old.id}, nor on the disk now")
    yield from _LiveWalk(repository, in_root, check).pair(path, before.entry if before else None)


def diff_restored(
    repository: Repository, source: Located, path: bytes, check: Callable[[], None] = lambda: None
) -> Iterator[PathChange]:
    """Yield the changes from a file or directory of a snapshot to what was restored from it, as `diff_live` does.

    Args:
        repository: Repository of the snapshot.
        source: File or directory in the snapshot.
        path: Absolute path at which it was restored; the paths of the changes are this one and those below it.
        check: Called between names and blocks.

    Raises:
        Damaged: a tree or block map cannot be read.
    """
    yield from _LiveWalk(repository, source.root, check).pair(path, source.entry)


_Names = Iterator[tuple[bytes, Entry | None]]


class _LiveWalk:
    """Walk of a snapshot's tree and the files below a directory, side by side."""

    def __init__(
        self, repository: Repository, root: RootRecord, check: Callable[[], None] = lambda: None
    ) -> None:
        self._repository = repository
        self._side = _Side(repository, root)
        self._root_path = root.path
        self._check = check
        self._worker = BlockWorker(repository, check)

    def pair(self, path: bytes, old: Entry | None) -> Iterator[PathChange]:
        with LiveNode.at(path) as top:
            first: _Names = iter([(top.name, old)])
            frames: list[tuple[LinkedPath | None, LiveNode, _Names]] = [(None, top, first)]
            lineage = Lineage()
            # For the frame of the top, which is left like every other.
            lineage.enter(b"")
            try:
                while frames:
                    self._check()
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
    ) -> tuple[PathChange | None, tuple[LiveNode, _Names] | None]:
        """Return the change of this name, and the directory (on either side) to descend into."""
        try:
            new = node.child_entry(name)
            old = old and self._side.resolved(old)
            # Another file system is not part of the root, whether it was mounted at the snapshot or later.
            if path != self._root_path and node.leads_away(name):
                return _mounted(path, old, new), None
            change = self._change(node, path, name, old, new)
            goes_on = new is not None and new.is_dir
            # The content of a mount point never was part of the snapshot.
            if old is not None and old.flags & FLAG_MOUNTPOINT:
                goes_on = False
            below = node.descend(name) if goes_on else None
            live = below.names() if below is not None else []
        except UnreadableFile as error:
            return PathChange(
                "changed" if old else "added", path, old, None, ("unreadable", error.reason)
            ), None
        # What the snapshot has below shows as removed, also where the live side cannot be entered.
        tree = old.content if old is not None and old.is_dir else b""
        if below is None and not tree:
            return change, None
        return change, (below or LiveNode.nothing(), self._merged(tree, live))

    def _merged(self, tree: bytes, live: list[bytes]) -> _Names:
        """Yield (name, old entry) for the names of both sides, in byte order."""
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
    ) -> PathChange | None:
        if old is None or new is None:
            return _one_sided(path, old, new)
        if stat.S_IFMT(old.mode) != stat.S_IFMT(new.mode):
            return PathChange("retyped", path, old, new)
        # Another file system's top directory says nothing about the directory that it covers.
        if old.flags & FLAG_MOUNTPOINT:
            return None
        details = attribute_details(old, new)
        # Read only for names that both sides have: of an added file no attribute is compared.
        new = msgspec.structs.replace(new, xattrs=node.child_xattrs(name))
        if tuple(sorted(self._repository.trees.xattrs(old))) != new.xattrs:
            details.append("xattrs")
        if old.is_file and self._content_differs(node, name, old, new):
            details.insert(0, "content")
        return PathChange("changed", path, old, new, tuple(details)) if details else None

    def _content_differs(self, node: LiveNode, name: bytes, old: Entry, new: Entry) -> bool:
        if old.size_bytes != new.size_bytes:
            return True
        # A program cannot set the change time: if it is equal, the content is taken to be unchanged.
        if (old.mtime_ns, old.ctime_ns, old.ino) == (new.mtime_ns, new.ctime_ns, new.ino):
            return False
        # patient, because a restore gives up on a file of many stored zeros and writes it anew; here that
        # would be a difference that is none.
        with node.open_file(name) as fd:
            return not all(
                self._worker.equal(fd, old, batch, patient=True) for batch in batches(self._repository, old)
            )


__all__ = ["ChangeKind", "PathChange", "attribute_details", "diff_live", "diff_restored", "diff_snapshots"]
