"""Contents of a path in a snapshot. A path above the roots contains the directories that lead to them."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from typing import TYPE_CHECKING

import msgspec

from ciuic.repository.lookup import children, find, is_within, join, root_of
from ciuic.types import Entry, Snapshot

if TYPE_CHECKING:
    from ciuic.repository import Repository


def children_of(repository: Repository, snapshot: Snapshot, path: bytes) -> Iterator[Entry]:
    """Return the entries of the directory at ``path``, by name. Raises NotFound."""
    leading = roots_below(snapshot, path)
    if leading:
        yield from leading
        return
    found = find(repository, snapshot, path)
    if found.entry.is_dir:
        yield from children(repository, found.root, found.entry)


def roots_below(snapshot: Snapshot, path: bytes) -> list[Entry]:
    """Return a directory entry for each next step from ``path`` to a root below it."""
    steps: dict[bytes, Entry] = {}
    for root in snapshot.roots:
        if root.path != path and is_within(root.path, path):
            name, slash, _ = root.path[len(join(path, b"")) :].partition(b"/")
            entry = Entry(name=name, mode=stat.S_IFDIR | 0o755) if slash else root.entry
            steps[name] = msgspec.structs.replace(entry, name=name)
    return [steps[name] for name in sorted(steps)]


def as_recorded(snapshot: Snapshot, path: bytes) -> bytes:
    """Return the recorded path for ``path``: roots are recorded with symbolic links resolved.

    A path that is below no root as it is written may lead to one through a link: its shortest beginning that does is
    replaced by where it leads today.
    """
    # As it is written first: what the snapshot has by this name is meant, wherever a link of today leads.
    if root_of(snapshot, path) is not None or roots_below(snapshot, path):
        return path
    for end in [at for at in range(1, len(path)) if path[at : at + 1] == b"/"] + [len(path)]:
        # The shortest beginning: below a root a link of today says nothing about the snapshot, and what
        # follows is taken as it is written.
        real = os.path.realpath(path[:end])
        if root_of(snapshot, real) is not None:
            return real + path[end:]
    return path


def owner_name(database: str, number: int) -> str:
    """Return the name that this machine has for a user or group; the number where it has none."""
    import grp
    import pwd

    try:
        return pwd.getpwuid(number).pw_name if database == "pwd" else grp.getgrgid(number).gr_name
    except KeyError:
        return str(number)
