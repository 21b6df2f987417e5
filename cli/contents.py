"""What lies at a path in a snapshot, for showing and completing it; a path above the roots shows the way to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ciuic.lookup import children, find, is_within, join, root_of
from ciuic.types import Entry, Snapshot

if TYPE_CHECKING:
    from ciuic.repository import Repository


def children_of(repository: Repository, snapshot: Snapshot, path: bytes) -> Iterator[Entry]:
    """The entries of the directory at ``path``, by name; above the roots, the directories that lead to them. NotFound."""
    leading = roots_below(snapshot, path)
    if leading:
        yield from leading
        return
    found = find(repository, snapshot, path)
    if found.entry.is_dir:
        yield from children(repository, found.root, found.entry)


def roots_below(snapshot: Snapshot, path: bytes) -> list[Entry]:
    """For a path strictly above roots: one directory entry for each next step to a root; else none."""
    steps: dict[bytes, Entry] = {}
    for root in snapshot.roots:
        if root.path != path and is_within(root.path, path):
            name, slash, _ = root.path[len(join(path, b"")) :].partition(b"/")
            entry = Entry(name=name, mode=stat.S_IFDIR | 0o755) if slash else root.entry
            steps[name] = msgspec.structs.replace(entry, name=name)
    return [steps[name] for name in sorted(steps)]


def as_recorded(snapshot: Snapshot, path: bytes) -> bytes:
    """The path under which the snapshot knows what the caller calls ``path``.

    Roots are recorded with symbolic links resolved. A path that is below no root as it is written may lead to one through
    a link: its shortest beginning that does is replaced by where it leads today. What follows is taken as it is written:
    below a root a link of today says nothing about the snapshot.
    """
    if root_of(snapshot, path) is not None or roots_below(snapshot, path):
        return path
    for end in [at for at in range(1, len(path)) if path[at : at + 1] == b"/"] + [len(path)]:
        real = os.path.realpath(path[:end])
        if root_of(snapshot, real) is not None:
            return real + path[end:]
    return path
