"""Look up an absolute path of the host in a snapshot.

Guarantees: the returned entry is complete (the attributes of an inode with several names are taken from the
link table), and NotFound says which part of the path is missing, what is there instead, and what to ask for.
Symbolic links in the snapshot are never followed.
"""

from __future__ import annotations

import posixpath
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ciuic.errors import Damaged, NotFound, UsageError
from ciuic.printable import one_line
from ciuic.types import FLAG_MOUNTPOINT, Entry, RootRecord, Snapshot

if TYPE_CHECKING:
    from ciuic.repository.repository import Repository


class Located(msgspec.Struct, frozen=True):
    """An entry found in a snapshot."""

    root: RootRecord
    path: bytes
    """Absolute, normalised path."""
    entry: Entry
    """Entry with the attributes of its inode; a root's own entry has an empty name."""


def normalise(path: bytes) -> bytes:
    """Return the path without ``.``, ``..``, doubled and trailing slashes.

    UsageError if relative or impossible.
    """
    if not path.startswith(b"/"):
        raise UsageError(f"{one_line(path)} must be an absolute path")
    if b"\0" in path:
        raise UsageError("a path cannot contain a NUL byte")
    # normpath keeps exactly two leading slashes, to which POSIX gives no fixed meaning.
    return b"/" + posixpath.normpath(path).lstrip(b"/")


def find(repository: Repository, snapshot: Snapshot, path: bytes) -> Located:
    """Return what the snapshot has at this absolute path.

    Raises:
        NotFound: the snapshot has nothing there.
        UsageError: the path is not absolute.
        Damaged: a tree cannot be read.
    """
    path = normalise(path)
    root = root_of(snapshot, path)
    if root is None:
        raise _no_root(snapshot, path)
    entry, walked = root.entry, root.path
    for name in path[len(root.path) :].split(b"/"):
        if not name:
            continue
        below = _child(repository, snapshot, root, Located(root, walked, entry), name, path)
        walked, entry = join(walked, name), below
    return Located(root, path, entry)


def root_of(snapshot: Snapshot, path: bytes) -> RootRecord | None:
    """Return the innermost root that is the path or contains it; None for none."""
    within = [root for root in snapshot.roots if is_within(path, root.path)]
    # The innermost, should one root lie in another.
    return max(within, key=lambda root: len(root.path), default=None)


def is_within(path: bytes, top: bytes) -> bool:
    """Return whether ``path`` is ``top`` or lies below it; both normalised."""
    return path == top or path.startswith(top.rstrip(b"/") + b"/")


def join(folder: bytes, name: bytes) -> bytes:
    """Return the path of ``name`` in ``folder``."""
    return folder.rstrip(b"/") + b"/" + name


def resolve(repository: Repository, root: RootRecord, entry: Entry) -> Entry:
    """Return the entry with all attributes, those of its inode if it has several names.

    Raises:
        Damaged: a tree cannot be read.
    """
    if not entry.link:
        return entry
    inode = repository.trees.link(root.links, entry.link) if root.links else None
    if inode is None:
        raise Damaged(
            f"inode {entry.link} of {one_line(entry.name)} is not in the link table of its snapshot"
        )
    # The directory recorded the type with the name: both must agree.
    if inode.mode >> 12 != entry.mode >> 12:
        raise Damaged(f"inode {entry.link} of {one_line(entry.name)} is of another type in the link table")
    return msgspec.structs.replace(inode, name=entry.name, link=entry.link)


def children(repository: Repository, root: RootRecord, entry: Entry) -> Iterator[Entry]:
    """Yield the entries of a directory in byte order of their names, resolved.

    Raises:
        Damaged: a tree cannot be read.
    """
    for child in repository.trees.entries(entry.content):
        yield resolve(repository, root, child)


def _child(
    repository: Repository, snapshot: Snapshot, root: RootRecord, at: Located, name: bytes, wanted: bytes
) -> Entry:
    entry, place = at.entry, one_line(at.path)
    # Never followed: the link leads to what is there today, not to what was there at the cut.
    if entry.is_symlink:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(at.path), entry.target))
        rest = wanted[len(at.path) :]
        raise NotFound(
            f"{one_line(wanted)} is not in {snapshot.id}: {place} was a symbolic link to "
            f"{one_line(entry.target)}",
            hint=f"ask for {one_line(target + rest)}",
        )
    if not entry.is_dir:
        raise NotFound(
            f"{one_line(wanted)} is not in {snapshot.id}: {place} was not a directory",
            hint=f"`ciuic show {snapshot.id} {place}` shows what it was",
        )
    found = repository.trees.entry(entry.content, name)
    if found is not None:
        return resolve(repository, root, found)
    if entry.flags & FLAG_MOUNTPOINT:
        raise NotFound(
            f"{one_line(wanted)} is not in {snapshot.id}: another file system was mounted at {place}",
            hint="protect that directory as a root of its own",
        )
    raise NotFound(
        f"{one_line(wanted)} is not in {snapshot.id}: {place} had no {one_line(name)}",
        hint=f"`ciuic show {snapshot.id} {place}` lists what it had",
    )


def _no_root(snapshot: Snapshot, path: bytes) -> NotFound:
    for lacking in snapshot.left_out:
        if is_within(path, lacking.path):
            return NotFound(
                f"{one_line(path)} is not in {snapshot.id}, which was made without {one_line(lacking.path)}: "
                f"{lacking.reason}",
                hint=f"`ciuic list --root {one_line(lacking.path)}` names the snapshots that have it",
            )
    known = ", ".join(one_line(root.path) for root in snapshot.roots)
    below = [one_line(root.path) for root in snapshot.roots if is_within(root.path, path)]
    hint = (
        f"it is above these roots, ask for them: {', '.join(below)}" if below else f"its roots are: {known}"
    )
    return NotFound(f"{one_line(path)} is not in {snapshot.id}", hint=hint)
