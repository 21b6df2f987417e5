"""Destinations of a restore: the directories that lead to each target, and whether they can be used.

Guarantees: an original path is reached from the root's own path without following a symbolic link, and missing directories on
the way are restored with the attributes that they had. A destination that the caller chose is opened as the caller wrote it,
links included unless they could redirect the restore (destination.py).
"""

from __future__ import annotations

import errno
import os
import posixpath

from ciuic.errors import CiuicError, NotPermitted, UsageError
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.lookup import Located, find, is_within, join, normalise
from ciuic.restore.destination import may_lift, open_way
from ciuic.restore.directory_handles import NOT_THERE, Folder
from ciuic.restore.journal import new_run
from ciuic.restore.model import RestoreTarget
from ciuic.types import Snapshot


def make_targets(
    repository: Repository, snapshot: Snapshot, paths: list[bytes], dest: bytes | None
) -> tuple[RestoreTarget, ...]:
    """Return the target of each path; a path below another one is left to that one.

    Raises:
        NotFound: the snapshot does not have a path.
        UsageError: no path was given, two would get the same destination, or one lies in the repository.
        Damaged: a tree above a path cannot be read.
    """
    if not paths:
        raise UsageError("nothing to restore: no path was given")
    targets: dict[bytes, RestoreTarget] = {}
    for path in sorted({normalise(path) for path in paths}):
        source = find(repository, snapshot, path)
        name = posixpath.basename(path)
        if not name:
            raise UsageError("the root directory of the machine has no name to restore it under")
        parent = posixpath.dirname(path) if dest is None else normalise(os.path.abspath(dest))
        target = RestoreTarget(source, join(parent, name), in_place=parent == posixpath.dirname(path))
        other = targets.get(target.path)
        if other is not None:
            raise UsageError(
                f"{one_line(other.source.path)} and {one_line(path)} would both become {one_line(target.path)}",
                hint="restore them one by one, into different directories",
            )
        # Sorted, parents come first: a path below another one is restored with it.
        if not any(is_within(path, seen.source.path) for seen in targets.values() if target.in_place):
            targets[target.path] = target
    made = tuple(targets.values())
    for target in made:
        _require_outside_repository(repository, target)
    return made


def _require_outside_repository(repository: Repository, target: RestoreTarget) -> None:
    """Raise UsageError for a destination in the repository itself."""
    # Both resolved, because a symbolic link on the way may lead into the repository.
    inside = os.path.realpath(os.fsencode(repository.path))
    if is_within(os.path.realpath(target.path), inside):
        raise UsageError(
            f"{one_line(target.path)} lies in the repository itself", hint="choose another directory"
        )


def check_usable(target: RestoreTarget) -> None:
    """Check that something can be created at the destination, as far as that can be seen without trying.

    Raises:
        UsageError: the destination that the caller chose is no directory.
        NotPermitted: it is plain that nothing can be created there.
    """
    if not target.in_place:
        _require_directory(posixpath.dirname(target.path))
    place = target.path if target.source.entry.is_dir else posixpath.dirname(target.path)
    while not os.path.lexists(place):
        place = posixpath.dirname(place)
    # Anything but a directory is a conflict, which the plan finds, or an obstacle, which `open_parent` finds.
    if not os.path.isdir(place):
        return
    try:
        fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except PermissionError:
        raise NotPermitted(
            f"{one_line(place)} cannot be read", hint="run as a user who may write there"
        ) from None
    try:
        # With effective ids, which access(2) ignores: what counts is what this process may do.
        if os.access(b".", os.W_OK | os.X_OK, dir_fd=fd, effective_ids=True):
            return
        if os.fstatvfs(fd).f_flag & os.ST_RDONLY:
            raise NotPermitted(
                f"{one_line(place)} is on a read-only file system", hint="choose another destination"
            )
        if may_lift(os.fstat(fd)):
            return
    finally:
        os.close(fd)
    raise NotPermitted(f"{one_line(place)} cannot be written to", hint="run as a user who may, or use -d")


def _require_directory(dest: bytes) -> None:
    """Raise UsageError where the destination, or the nearest thing above it that exists, is no directory."""
    while not os.path.lexists(dest):
        dest = posixpath.dirname(dest)
    if os.path.exists(dest) and not os.path.isdir(dest):
        raise UsageError(
            f"the destination must be a directory, and {one_line(dest)} is a file",
            hint="name a directory with -d; it is made if it is missing",
        )


def open_parent(
    repository: Repository, snapshot: Snapshot, target: RestoreTarget, *, dry_run: bool
) -> tuple[Folder, list[Folder]]:
    """Open the directory that the target's name is in; missing directories are created, except in a dry run.

    Returns:
        The directory, and all directories opened on the way, to be released in reverse order.

    Raises:
        CiuicError: something that is no directory is in the way.
        OSError: a directory cannot be opened or created.
    """
    parent = posixpath.dirname(target.path)
    if not target.in_place:
        chain = [Folder(_open_or_none(parent, dry_run), parent, posixpath.dirname(target.source.path))]
    else:
        base, names = _way_in(target)
        chain = [Folder(_open_or_none(base, dry_run), base, base)]
        for name in names:
            chain.append(_step(repository, snapshot, chain[-1], name, dry_run))
    if not dry_run:
        chain[-1].lift()
    return chain[-1], chain


def _way_in(target: RestoreTarget) -> tuple[bytes, list[bytes]]:
    """Return a path to open as it is, and the names from there to the target's parent, which must be directories."""
    root = target.source.root.path
    top = posixpath.dirname(root)
    parent = posixpath.dirname(target.path)
    if parent == top or not is_within(parent, root):
        return parent, []
    # The root's own path may contain symbolic links: the operator chose it.
    if os.path.isdir(root):
        return root, [name for name in parent[len(root) :].split(b"/") if name]
    return top, [name for name in parent[len(top) :].split(b"/") if name]


def _step(repository: Repository, snapshot: Snapshot, above: Folder, name: bytes, dry_run: bool) -> Folder:
    path, run = join(above.path, name), new_run()
    if above.fd == NOT_THERE:
        return Folder.make(above, name, path, run=run, dry_run=dry_run)
    if above.leads_away(name):
        raise CiuicError(
            f"another file system is mounted at {one_line(path)}: nothing was restored into it",
            hint="unmount it, or restore elsewhere with -d",
        )
    try:
        return Folder.enter(above, name, path)
    except FileNotFoundError:
        if not dry_run:
            above.lift()
        made = Folder.make(above, name, path, run=run, dry_run=dry_run)
    except OSError as error:
        if error.errno in (errno.ENOTDIR, errno.ELOOP):
            raise CiuicError(
                f"{one_line(path)} was a directory at {snapshot.id} and is something else now",
                hint="move it out of the way, or restore elsewhere with -d",
            ) from None
        raise
    above.leave_workplace()
    # A directory that is missing on the way comes back with the attributes that the snapshot has for it.
    was: Located = find(repository, snapshot, path)
    made.entry, made.xattrs = was.entry, repository.trees.xattrs(was.entry)
    return made


def _open_or_none(path: bytes, dry_run: bool) -> int:
    try:
        return open_way(path, make=not dry_run)
    except FileNotFoundError:
        if not dry_run:  # mkdir(2) in /proc and its like, or a directory that was removed meanwhile
            raise CiuicError(
                f"the directory {one_line(path)} cannot be made: no directory can be made above it",
                hint="name another with -d",
            ) from None
        return NOT_THERE
