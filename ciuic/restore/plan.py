"""Plan a restore: find the destination of each path and everything that is in the way, without changing anything."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ciuic.errors import Damaged, DestinationExists, NotFound
from ciuic.repository import Repository
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.lookup import is_within, join, resolve
from ciuic.restore import journal
from ciuic.restore.destination import open_directory, stat_at
from ciuic.restore.destination_directories import (
    NOT_THERE,
    check_usable,
    make_targets,
    many_descriptors,
    open_parent,
)
from ciuic.restore.model import Kept, Overwrite, RestorePlan, RestoreTarget, Selection, believed_equal
from ciuic.system.disk import LinkedPath
from ciuic.system.mountinfo import MountBorders
from ciuic.system.shell_quoting import shown
from ciuic.types import Entry, Snapshot

# For a terminal: `DestinationExists.conflicts` has them all.
_MAX_SHOWN_CONFLICTS = 20


def plan_restore(
    repository: Repository,
    snapshot: Snapshot,
    paths: Sequence[bytes],
    dest: bytes | None = None,
    *,
    overwrite: Overwrite | None = None,
    delete: bool = False,
    check: bool = True,
    keep: Callable[[bytes, bool], bool] | None = None,
    special: bool | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
) -> RestorePlan:
    """Return the plan of a restore. Reads metadata only, changes nothing.

    Args:
        repository: the repository of the snapshot.
        snapshot: the snapshot to restore from.
        paths: absolute paths as they were at the snapshot; a root itself is allowed.
        dest: directory in which each path gets its base name; None: the original paths.
        overwrite: rule for files that exist; None: they are conflicts.
        delete: remove what the snapshot does not have from restored directories.
        check: raise DestinationExists for conflicts. False: list them in `RestorePlan.conflicts`, for a dry run.
        keep: ``keep(path, is_dir)`` returns True for what ``delete`` must spare, by its path at the snapshot; for excluded paths.
        special: restore special files and attributes (attributes.py). None: restore them unless another user may have
            written to the repository; what is left out counts as a failure then.
        include: patterns of what is restored below each path (model.py); none: everything.
        exclude: patterns of what is left alone.

    Raises:
        ValueError: a pattern cannot match anything.
        DestinationExists: ``overwrite`` is None and something exists; names every conflict.
        NotFound: the snapshot does not have a path, or nothing at any matches ``include``.
        UsageError: two paths would get the same destination.
        NotPermitted: it is plain that nothing can be written to the destination.
        Damaged: a tree above a path cannot be read. A damaged tree below it is left to `execute`, which restores the rest.
    """
    targets = make_targets(repository, snapshot, list(paths), dest)
    for target in targets:
        check_usable(target)
    if include or exclude:
        targets = tuple(
            msgspec.structs.replace(target, selection=Selection(repository, target.source, include, exclude))
            for target in targets
        )
        if not any(_has_something(target) for target in targets):
            paths_shown = ", ".join(shown(target.source.path) for target in targets)
            raise NotFound(
                f"nothing below {paths_shown} matches {', '.join(map(repr, include))} in {snapshot.id}",
                hint="a pattern with a slash is relative to PATH, also one that begins with it",
            )
    conflicts: list[bytes] = []
    if overwrite is None:
        with many_descriptors():
            for target in targets:
                conflicts += _conflicts(repository, snapshot, target)
    if conflicts and check:
        raise _exists(conflicts)
    # A repository that lies in a restored directory is no part of the snapshot, and --delete must not remove it.
    own = os.stat(repository.path)
    foreign = repository.foreign_reason() if special is None else ""
    return RestorePlan(
        repository=repository,
        snapshot=snapshot,
        targets=targets,
        overwrite=overwrite,
        delete=delete,
        kept=Kept(
            frozenset({(own.st_dev, own.st_ino)}),
            _keeps(targets, keep),
            _keeps_directories(targets) if include else None,
        ),
        conflicts=tuple(conflicts),
        # Not known where there is a choice.
        bytes_total=0 if include or exclude else sum(_bytes(target) for target in targets),
        files_total=0 if include or exclude else sum(_files(target) for target in targets),
        special=not foreign if special is None else special,
        foreign_reason=foreign,
    )


def _has_something(target: RestoreTarget) -> bool:
    return target.selection is None or not target.source.entry.is_dir or not target.selection.is_empty


def _keeps(
    targets: Sequence[RestoreTarget], keep: Callable[[bytes, bool], bool] | None
) -> Callable[[bytes, bool], bool] | None:
    """Return the rule for what ``delete`` spares: what the caller keeps, and what the targets' selections leave out."""
    chosen = [target for target in targets if target.selection is not None]
    if not chosen:
        return keep

    def spares(path: bytes, is_dir: bool) -> bool:
        if keep is not None and keep(path, is_dir):
            return True
        return any(
            target.selection is not None and target.selection.spares(path, is_dir)
            for target in chosen
            if is_within(path, target.source.path)
        )

    return spares


def _keeps_directories(targets: Sequence[RestoreTarget]) -> Callable[[bytes], bool]:
    """Return the rule for directories that are not chosen, below which ``delete`` removes what is."""

    def stays(path: bytes) -> bool:
        return any(
            target.selection is not None and target.selection.spares_directory(path)
            for target in targets
            if is_within(path, target.source.path)
        )

    return stays


def plan_nothing(repository: Repository, snapshot: Snapshot) -> RestorePlan:
    """Return a plan without targets, for a caller that has only removals to add to its result."""
    return RestorePlan(
        repository=repository,
        snapshot=snapshot,
        targets=(),
        overwrite=Overwrite.ALWAYS,
        delete=True,
        kept=Kept(frozenset(), None),
    )


def _bytes(target: RestoreTarget) -> int:
    entry, root = target.source.entry, target.source.root
    # Files with several names are counted once, in the link table of the whole root: below it their number is
    # not known.
    linked = root.links_bytes if target.source.path == root.path else 0
    return entry.total_bytes + linked if entry.is_dir else entry.size_bytes


def _files(target: RestoreTarget) -> int:
    entry, root = target.source.entry, target.source.root
    linked = root.links_files if target.source.path == root.path else 0
    return entry.total_files + linked if entry.is_dir else 1


def _exists(conflicts: list[bytes]) -> DestinationExists:
    listed = [shown(path) for path in conflicts[:_MAX_SHOWN_CONFLICTS]]
    more = (
        [f"and {len(conflicts) - _MAX_SHOWN_CONFLICTS} more"] if len(conflicts) > _MAX_SHOWN_CONFLICTS else []
    )
    error = DestinationExists(
        "\n  ".join(["nothing was restored, because these exist already:", *listed, *more]),
        hint="--overwrite replaces them; -d restores into another directory",
    )
    error.conflicts = tuple(conflicts)
    return error


def _conflicts(repository: Repository, snapshot: Snapshot, target: RestoreTarget) -> Iterator[bytes]:
    """Yield every path that exists where a file is to be restored, or is no directory where one is to be restored."""
    # As a dry run, which makes no directory on the way.
    parent, chain = open_parent(repository, snapshot, target, dry_run=True)
    try:
        if parent.fd == NOT_THERE:
            return
        entry = msgspec.structs.replace(target.source.entry, name=posixpath.basename(target.path))
        # Results of an earlier run of the same restore are no conflicts.
        resumed = _is_resumed(parent.fd, entry.name, str(snapshot.id), target.mark)
        yield from _in_the_way(repository, target, parent.fd, entry, resumed)
    finally:
        for folder in chain:
            folder.drop()


def _is_resumed(parent: int, name: bytes, snapshot: str, source: bytes) -> bool:
    """Return whether the same restore was begun in this directory and cut short."""
    try:
        fd = open_directory(parent, name)
    except OSError:
        # It does not exist or is no directory, so nothing was begun.
        return False
    try:
        mark = journal.read_mark(fd)
    finally:
        os.close(fd)
    return mark is not None and mark.is_of(snapshot, source)


def _in_the_way(
    repository: Repository, target: RestoreTarget, parent: int, top: Entry, resumed: bool
) -> Iterator[bytes]:
    """Walk snapshot and destination side by side, only where both have a directory; yield the conflicts."""
    stack: list[tuple[int, MountBorders, LinkedPath, Iterator[Entry]]] = []
    fd, path, entries = parent, LinkedPath(posixpath.dirname(target.path)), iter((top,))
    borders = MountBorders(fd)
    # Raises Damaged for a tree that contains itself, which only a crafted repository has.
    lineage = Lineage()
    try:
        while True:
            entry = _next(repository, target, entries)
            if entry is None:
                if not stack:
                    return
                os.close(fd)
                fd, borders, path, entries = stack.pop()
                lineage.leave()
                continue
            # What does not exist is no conflict; nor is the journal of an earlier restore at the top.
            st = stat_at(fd, entry.name)
            if st is None or (len(stack) == 1 and entry.name == journal.JOURNAL_NAME):
                continue
            here = join(bytes(path), entry.name)
            if stack and not target.wants(target.source.path + here[len(target.path) :], entry.is_dir):
                continue
            # Left alone by the restore, which says so; nothing in it is in the way.
            if (stack or not target.is_root) and borders.at(entry.name):
                continue
            if entry.is_dir and stat.S_ISDIR(st.st_mode):
                lineage.enter(entry.content)
                # Opened before the push: if that fails, the descriptor must not be closed twice below.
                below = open_directory(fd, entry.name)
                stack.append((fd, borders, path, entries))
                fd, borders, path = below, MountBorders(below), LinkedPath(here, path)
                entries = repository.trees.entries(entry.content)
            elif not (resumed and believed_equal(entry, st)):
                yield here
    finally:
        for opened in [fd, *(level[0] for level in stack)]:
            if opened != parent:
                os.close(opened)


def _next(repository: Repository, target: RestoreTarget, entries: Iterator[Entry]) -> Entry | None:
    """Return the next entry that can be read; a damaged one is left to the restore, which reports it."""
    while True:
        try:
            entry = next(entries, None)
            return entry and resolve(repository, target.source.root, entry)
        except Damaged:
            continue
