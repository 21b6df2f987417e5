"""The read model as the commands use it: every repository that is read, and the timelines in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, NamedTuple

from ciuic.cli.shared.messages import warn
from ciuic.cli.shared.names import shown, shown_text
from ciuic.cli.shared.session import Session
from ciuic.errors import NotFound

if TYPE_CHECKING:
    from ciuic.history.timeline import Timeline
    from ciuic.repository import Repository
    from ciuic.types import Snapshot

Readable = list[tuple["Repository", list["Snapshot"]]]


def readable(session: Session) -> Readable:
    """Return every repository that is read with its snapshots, newest first. Those that cannot be read are named on stderr."""
    found: Readable = []
    for repository in session.repositories:
        snapshots, unreadable = repository.snapshots.load_all()
        for bad in unreadable:
            warn(f"snapshot file {shown_text(bad.path)} cannot be read: {shown_text(bad.reason)}")
        found.append((repository, snapshots))
    return found


def all_timelines(session: Session, root: bytes | None) -> Iterator[tuple[Repository, Timeline]]:
    """Yield the timelines of all roots, or those of one root.

    Raises:
        NotFound: there is no snapshot of this root.
    """
    yield from _chosen(readable(session), lambda path: root is None or path == root, root)


class Places(NamedTuple):
    """A path as the snapshots have it, and the timelines of the innermost root with it."""

    path: bytes
    timelines: list[tuple[Repository, Timeline]]


def timelines_with(session: Session, path: bytes) -> Places:
    """Return where a path is to be looked up. A path through a symbolic link of today is one to where it leads.

    Raises:
        NotFound: no snapshot has a root that contains it.
    """
    from ciuic.cli.shared.contents import as_recorded
    from ciuic.repository.lookup import is_within

    found = readable(session)
    for _, snapshots in found:
        for snapshot in snapshots[:1]:
            path = as_recorded(snapshot, path)
    chosen = list(_chosen(found, lambda root: is_within(path, root), path))
    innermost = max(len(timeline.path) for _, timeline in chosen)
    return Places(path, [one for one in chosen if len(one[1].path) == innermost])


def _chosen(
    found: Readable, wanted: Callable[[bytes], bool], path: bytes | None
) -> Iterator[tuple[Repository, Timeline]]:
    from ciuic.history.timeline import timelines

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
