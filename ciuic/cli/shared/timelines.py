"""Timelines as the commands use them: every repository that is read, and the snapshots of each root in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ciuic.cli.shared.messages import plural, shown, shown_text, warn
from ciuic.cli.shared.session import Session
from ciuic.errors import Damaged, NotFound, Partial

if TYPE_CHECKING:
    from ciuic.history import Timeline
    from ciuic.repository import Repository
    from ciuic.repository.model import UnreadableSnapshot
    from ciuic.types import Snapshot


Readable = list[tuple["Repository", list["Snapshot"]]]


class PassedOver:
    """Damaged parts that a command over many snapshots has left out of its answer."""

    def __init__(self) -> None:
        self._files: list[UnreadableSnapshot] = []
        self._paths: dict[tuple[bytes, str], list[Snapshot]] = {}
        self._long_paths = 0

    def add(self, snapshot: Snapshot, path: bytes, error: Damaged) -> None:
        """Note a path that cannot be read in a snapshot, or that is too long to be looked at."""
        from ciuic.history import PathTooLong

        if isinstance(error, PathTooLong):
            self._long_paths += 1
            return
        self._paths.setdefault((path, error.message), []).append(snapshot)

    def add_files(self, files: list[UnreadableSnapshot]) -> None:
        """Note snapshot files that cannot be read."""
        self._files += files

    def tell(self) -> int:
        """Name everything on stderr, and return the command's exit code."""
        for bad in self._files:
            warn(f"snapshot file {shown_text(bad.path)} cannot be read: {shown_text(bad.reason)}")
        for (path, reason), snapshots in self._paths.items():
            others = f" and {plural(len(snapshots) - 1, 'other')}" if len(snapshots) > 1 else ""
            warn(
                f"{shown(path)} cannot be read in snapshot {snapshots[0].id}{others}: {shown_text(reason)}",
                hint="the answer is without it; ciuic check says what can be done",
            )
        if self._long_paths:
            warn(
                f"{plural(self._long_paths, 'directory', 'directories')} with a path of more than 4,096 bytes: not looked into",
                hint="ciuic restore brings back everything, whatever its depth",
            )
        return Partial.exit_code if self._files or self._paths or self._long_paths else 0


def readable(session: Session, passed_over: PassedOver) -> Readable:
    """Return every repository that is read with its snapshots, newest first."""
    found: Readable = []
    for repository in session.repositories:
        snapshots, unreadable = repository.snapshots.load_all()
        passed_over.add_files(list(unreadable))
        found.append((repository, snapshots))
    return found


def all_timelines(
    session: Session, root: bytes | None, passed_over: PassedOver
) -> Iterator[tuple[Repository, Timeline]]:
    """Yield the timelines of all roots, or those of one root.

    Raises:
        NotFound: there is no snapshot of this root.
    """
    yield from _chosen(readable(session, passed_over), lambda path: root is None or path == root, root)


class Places(NamedTuple):
    """A path as the snapshots have it, and the timelines of the innermost root with it."""

    path: bytes
    timelines: list[tuple[Repository, Timeline]]


def timelines_with(session: Session, path: bytes, passed_over: PassedOver) -> Places:
    """Return where a path is to be looked up. A path through a symbolic link of today is one to where it leads.

    Raises:
        NotFound: no snapshot has a root that contains it.
    """
    from ciuic.cli.shared.contents import as_recorded
    from ciuic.repository.lookup import is_within

    found = readable(session, passed_over)
    for _, snapshots in found:
        for snapshot in snapshots[:1]:
            try:
                path = as_recorded(snapshot, path)
            except Damaged as error:
                passed_over.add(snapshot, path, error)
    chosen = list(_chosen(found, lambda root: is_within(path, root), path))
    innermost = max(len(timeline.path) for _, timeline in chosen)
    return Places(path, [one for one in chosen if len(one[1].path) == innermost])


def _chosen(
    found: Readable, wanted: Callable[[bytes], bool], path: bytes | None
) -> Iterator[tuple[Repository, Timeline]]:
    from ciuic.history import timelines

    is_empty = True
    roots: set[bytes] = set()
    for repository, snapshots in found:
        roots.update(root.path for snapshot in snapshots for root in snapshot.roots)
        for timeline in timelines(snapshots, wanted):
            is_empty = False
            yield repository, timeline
    if is_empty and path is not None:
        known = ", ".join(map(shown, sorted(roots))) or "none"
        raise NotFound(f"no snapshot has {shown(path)}", hint=f"roots of the snapshots: {known}")
