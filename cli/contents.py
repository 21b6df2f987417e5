"""What lies at a path in a snapshot, for showing it: entries with hard links looked through.

Guarantees: NotFound names the path and what there is instead; a path above the roots shows the way to them.
"""

from __future__ import annotations

import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ciuic.cli.names import shown
from ciuic.errors import NotFound
from ciuic.types import Entry, RootRecord, Snapshot

if TYPE_CHECKING:
    from ciuic.repository import Repository


def entry_at(repository: Repository, snapshot: Snapshot, path: bytes) -> tuple[RootRecord, Entry]:
    """The root that holds ``path`` (absolute), and the entry there. NotFound."""
    root = _root_of(snapshot, path)
    if root is None:
        known = ", ".join(shown(record.path) for record in snapshot.roots)
        raise NotFound(f"{shown(path)} is not in {snapshot.id}", hint=f"its roots are: {known}")
    entry, walked = root.entry, root.path
    for name in filter(None, path[len(root.path) :].split(b"/")):
        found = repository.trees.entry(entry.content, name) if entry.is_dir else None
        if found is None:
            raise NotFound(
                f"{shown(path)} is not in {snapshot.id}: there is no {shown(name)} in {shown(walked)}",
                hint=f"see: ciuic show {snapshot.id} {shown(walked)}",
            )
        entry, walked = resolved(repository, root, found), walked.rstrip(b"/") + b"/" + name
    return root, entry


def resolved(repository: Repository, root: RootRecord, entry: Entry) -> Entry:
    """The entry with the attributes of its inode, under its own name."""
    if not entry.link:
        return entry
    inode = repository.trees.link(root.links, entry.link)
    return entry if inode is None else msgspec.structs.replace(inode, name=entry.name, link=entry.link)


def children_of(repository: Repository, snapshot: Snapshot, path: bytes) -> Iterator[Entry]:
    """The entries of the directory at ``path``, by name; above the roots, the directories that lead to them."""
    leading = roots_below(snapshot, path)
    if leading:
        yield from leading
        return
    root, entry = entry_at(repository, snapshot, path)
    if entry.is_dir:
        for child in repository.trees.entries(entry.content):
            yield resolved(repository, root, child)


def roots_below(snapshot: Snapshot, path: bytes) -> list[Entry]:
    """For a path strictly above roots: one directory entry for each next step to a root; else none."""
    prefix = path.rstrip(b"/") + b"/"
    steps: dict[bytes, Entry] = {}
    for root in snapshot.roots:
        if root.path.startswith(prefix):
            name, slash, _ = root.path[len(prefix) :].partition(b"/")
            entry = Entry(name=name, mode=stat.S_IFDIR | 0o755) if slash else root.entry
            steps[name] = msgspec.structs.replace(entry, name=name)
    return [steps[name] for name in sorted(steps)]


def _root_of(snapshot: Snapshot, path: bytes) -> RootRecord | None:
    for root in snapshot.roots:
        if path == root.path or path.startswith(root.path.rstrip(b"/") + b"/"):
            return root
    return None
