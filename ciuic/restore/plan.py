"""What a restore would do, before it does anything: where things go, and what is in the way."""

from __future__ import annotations

import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence

import msgspec

from ciuic.errors import Damaged, DestinationExists
from ciuic.linked_path import LinkedPath
from ciuic.lookup import join, readable, resolve
from ciuic.repository import Repository
from ciuic.repository.ownership import foreign_reason
from ciuic.repository.trees import Lineage
from ciuic.restore import journal
from ciuic.restore.destination import open_directory, stat_at
from ciuic.restore.folders import NOT_THERE
from ciuic.restore.limits import many_descriptors
from ciuic.restore.model import Kept, Overwrite, Plan, Target
from ciuic.restore.run import believed_equal
from ciuic.restore.targets import check_usable, make_targets, open_parent
from ciuic.types import Entry, Snapshot

_SHOWN = 20


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
) -> Plan:
    """Where everything would go. Reads metadata only, changes nothing.

    Each of ``paths`` (absolute, as they were at the snapshot; a root itself too) comes back as ``dest``/basename, or where
    it was when ``dest`` is None. DestinationExists names every conflict, when ``overwrite`` is None and something exists;
    with ``check=False`` they are in `Plan.conflicts` instead (for a dry run). ``keep(path, is_dir)``: what ``delete`` must
    spare besides, by its path at the snapshot, such as excluded paths. NotFound for a path that the snapshot has not;
    ``special``: whether special files and attributes (special.py) are restored; None restores them unless somebody else may
    have written the repository, and then counts what was left out as a failure. UsageError for paths that would collide; NotPermitted when it is plain that nothing can be written there; Damaged when
    a tree on the way to a path cannot be read (one below it is left to `execute`, which restores the rest).
    """
    targets = make_targets(repository, snapshot, list(paths), dest)
    for target in targets:
        check_usable(target)
    conflicts: list[bytes] = []
    if overwrite is None:
        with many_descriptors():
            for target in targets:
                conflicts += _conflicts(repository, snapshot, target)
    if conflicts and check:
        raise _exists(conflicts)
    own = os.stat(repository.path)
    foreign = foreign_reason(repository.path) if special is None else ""
    return Plan(
        repository=repository,
        snapshot=snapshot,
        targets=targets,
        overwrite=overwrite,
        delete=delete,
        kept=Kept(frozenset({(own.st_dev, own.st_ino)}), keep),
        conflicts=tuple(conflicts),
        bytes_total=sum(_bytes(target) for target in targets),
        files_total=sum(_files(target) for target in targets),
        special=not foreign if special is None else special,
        foreign_reason=foreign,
    )


def _bytes(target: Target) -> int:
    entry, root = target.source.entry, target.source.root
    linked = root.links_bytes if target.source.path == root.path else 0
    return entry.total_bytes + linked if entry.is_dir else entry.size_bytes


def _files(target: Target) -> int:
    entry, root = target.source.entry, target.source.root
    linked = root.links_files if target.source.path == root.path else 0
    return entry.total_files + linked if entry.is_dir else 1


def _exists(conflicts: list[bytes]) -> DestinationExists:
    shown = [readable(path) for path in conflicts[:_SHOWN]]
    more = [f"and {len(conflicts) - _SHOWN} more"] if len(conflicts) > _SHOWN else []
    error = DestinationExists(
        "\n  ".join(["nothing was restored, because these exist already:", *shown, *more]),
        hint="--overwrite replaces them; -d restores into another directory",
    )
    error.conflicts = tuple(conflicts)
    return error


def _conflicts(repository: Repository, snapshot: Snapshot, target: Target) -> Iterator[bytes]:
    """Everything that exists where a file is to come, or is no directory where one is to come."""
    parent, chain = open_parent(repository, snapshot, target, dry_run=True)
    try:
        if parent.fd == NOT_THERE:
            return
        entry = msgspec.structs.replace(target.source.entry, name=posixpath.basename(target.path))
        resumed = _is_resumed(parent.fd, entry.name, str(snapshot.id), target.source.path)
        yield from _in_the_way(repository, target, parent.fd, entry, resumed)
    finally:
        for folder in chain:
            folder.drop()


def _is_resumed(parent: int, name: bytes, snapshot: str, source: bytes) -> bool:
    """Whether the same restore was begun here and cut short."""
    try:
        fd = open_directory(parent, name)
    except OSError:  # not there, or not a directory: nothing was begun
        return False
    try:
        mark = journal.read_mark(fd)
    finally:
        os.close(fd)
    return mark is not None and (mark.snapshot, mark.source) == (snapshot, source)


def _in_the_way(
    repository: Repository, target: Target, parent: int, top: Entry, resumed: bool
) -> Iterator[bytes]:
    """Walks snapshot and destination side by side, only where both have a directory."""
    stack: list[tuple[int, LinkedPath, Iterator[Entry]]] = []
    fd, path, entries = parent, LinkedPath(posixpath.dirname(target.path)), iter((top,))
    lineage = Lineage()
    try:
        while True:
            entry = _next(repository, target, entries)
            if entry is None:
                if not stack:
                    return
                os.close(fd)
                fd, path, entries = stack.pop()
                lineage.leave()
                continue
            st = stat_at(fd, entry.name)
            if st is None or (len(stack) == 1 and entry.name == journal.JOURNAL_NAME):
                continue
            here = join(bytes(path), entry.name)
            if entry.is_dir and stat.S_ISDIR(st.st_mode):
                lineage.enter(entry.content)
                stack.append((fd, path, entries))
                fd = open_directory(fd, entry.name)
                path, entries = LinkedPath(here, path), repository.trees.entries(entry.content)
            elif not (resumed and believed_equal(entry, st)):
                yield here
    finally:
        for opened in [fd, *(level[0] for level in stack)]:
            if opened != parent:
                os.close(opened)


def _next(repository: Repository, target: Target, entries: Iterator[Entry]) -> Entry | None:
    """The next entry that can be read; what cannot is left to the restore, which names it."""
    while True:
        try:
            entry = next(entries, None)
            return entry and resolve(repository, target.source.root, entry)
        except Damaged:
            continue
