"""Where things go: the directories that lead to each target, and whether they can be used.

Guarantees: what goes back to where it was is reached from the root's own path without following a symbolic link, and
directories on the way that are gone come back with the attributes that they had. A destination that the caller chose is
taken as the caller wrote it, links included unless they mislead (restore/way.py).
"""

from __future__ import annotations

import errno
import os
import posixpath

from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.lookup import Located, find, is_within, join, normalise, readable
from ciuic.repository import Repository
from ciuic.restore.folders import NOT_THERE, Folder
from ciuic.restore.journal import new_run
from ciuic.restore.model import Target
from ciuic.restore.way import open_way
from ciuic.types import Snapshot


def make_targets(
    repository: Repository, snapshot: Snapshot, paths: list[bytes], dest: bytes | None
) -> tuple[Target, ...]:
    """NotFound, UsageError, Damaged."""
    if not paths:
        raise UsageError("nothing to restore: no path was given")
    targets: dict[bytes, Target] = {}
    for path in sorted({normalise(path) for path in paths}):
        source = find(repository, snapshot, path)
        name = posixpath.basename(path)
        if not name:
            raise UsageError("the root directory of the machine has no name to restore it under")
        parent = posixpath.dirname(path) if dest is None else normalise(os.path.abspath(dest))
        target = Target(source, join(parent, name), in_place=parent == posixpath.dirname(path))
        other = targets.get(target.path)
        if other is not None:
            raise UsageError(
                f"{readable(other.source.path)} and {readable(path)} would both become {readable(target.path)}",
                hint="restore them one by one, into different directories",
            )
        if not any(is_within(path, seen.source.path) for seen in targets.values() if target.in_place):
            targets[target.path] = target
    made = tuple(targets.values())
    for target in made:
        _outside_repository(repository, target)
    return made


def _outside_repository(repository: Repository, target: Target) -> None:
    inside = os.path.realpath(os.fsencode(repository.path))
    if is_within(os.path.realpath(target.path), inside):
        raise UsageError(
            f"{readable(target.path)} lies in the repository itself", hint="choose another directory"
        )


def check_usable(target: Target) -> None:
    """Raise UsageError where DEST is no directory, NotPermitted where it is plain that nothing can be made there."""
    if not target.in_place:
        _require_directory(posixpath.dirname(target.path))
    place = target.path if target.source.entry.is_dir else posixpath.dirname(target.path)
    while not os.path.lexists(place):
        place = posixpath.dirname(place)
    if not os.path.isdir(place):
        return  # a conflict, or something in the way: found by those who look closer
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        raise NotPermitted(
            f"{readable(place)} cannot be read", hint="run as a user who may write there"
        ) from None
    try:
        if os.access(b".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
            return
        if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            raise NotPermitted(
                f"{readable(place)} is on a read-only file system", hint="choose another destination"
            )
    finally:
        os.close(fd)
    raise NotPermitted(f"{readable(place)} cannot be written to", hint="run as a user who may, or use -d")


def _require_directory(dest: bytes) -> None:
    """Raise UsageError where the destination, or the nearest thing above it that exists, is no directory."""
    while not os.path.lexists(dest):
        dest = posixpath.dirname(dest)
    if os.path.exists(dest) and not os.path.isdir(dest):
        raise UsageError(
            f"the destination must be a directory, and {readable(dest)} is a file",
            hint="name a directory with -d; it is made if it is missing",
        )


def open_parent(
    repository: Repository, snapshot: Snapshot, target: Target, *, dry_run: bool
) -> tuple[Folder, list[Folder]]:
    """The directory that the target's name is in, and all that were opened on the way (to be released, last first).

    Missing ones are made, except in a dry run. CiuicError when something else is in the way; OSError.
    """
    parent = posixpath.dirname(target.path)
    if not target.in_place:
        opened = Folder(_open_or_none(parent, dry_run), parent, posixpath.dirname(target.source.path))
        return opened, [opened]
    base, names = _way_in(target)
    opened = Folder(_open_or_none(base, dry_run), base, base)
    chain = [opened]
    for name in names:
        below = _step(repository, snapshot, chain[-1], name, dry_run)
        chain.append(below)
    return chain[-1], chain


def _way_in(target: Target) -> tuple[bytes, list[bytes]]:
    """(path opened as it is, names from there to the target's parent that must be directories)."""
    root = target.source.root.path
    top = posixpath.dirname(root)
    parent = posixpath.dirname(target.path)
    if parent == top or not is_within(parent, root):
        return parent, []
    if os.path.isdir(root):  # a root may be reached through a link: its path is the operator's own
        return root, [name for name in parent[len(root) :].split(b"/") if name]
    return top, [name for name in parent[len(top) :].split(b"/") if name]


def _step(repository: Repository, snapshot: Snapshot, above: Folder, name: bytes, dry_run: bool) -> Folder:
    path, run = join(above.path, name), new_run()
    if above.fd == NOT_THERE:
        return Folder.make(above, name, path, run=run, dry_run=dry_run)
    try:
        return Folder.enter(above, name, path)
    except FileNotFoundError:
        made = Folder.make(above, name, path, run=run, dry_run=dry_run)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise CiuicError(
                f"{readable(path)} was a directory at {snapshot.id} and is something else now",
                hint="move it out of the way, or restore elsewhere with -d",
            ) from None
        raise
    above.leave_workplace()
    was: Located = find(repository, snapshot, path)
    made.entry, made.xattrs = was.entry, repository.trees.xattrs(was.entry)
    return made


def _open_or_none(path: bytes, dry_run: bool) -> int:
    try:
        return open_way(path, make=not dry_run)
    except FileNotFoundError:
        return NOT_THERE
