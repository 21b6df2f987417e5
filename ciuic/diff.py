"""What changed between two snapshots, or between a snapshot and the live files.

Guarantees: equal subtrees are not read; only what a person can see counts (content, type, mode, owner, mtime, xattrs, link
target, device number), so access and change times never make a difference.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple

from ciuic.repository import Repository
from ciuic.types import Entry, Snapshot

ChangeKind = Literal["added", "removed", "changed", "retyped"]


class Change(NamedTuple):
    """One path that differs. ``old`` and ``new`` are complete entries (of live files: without content), None on one side."""

    kind: ChangeKind
    path: bytes
    """Absolute."""
    old: Entry | None
    new: Entry | None
    details: tuple[str, ...] = ()
    """What changed: content, size, mode, owner, mtime, xattrs, target, device; or, from live files: unreadable."""


def diff_snapshots(
    repository: Repository, old: Snapshot, new: Snapshot, path: bytes | None = None
) -> Iterator[Change]:
    """Changes from ``old`` to ``new``, parents before what is below them; only at and below ``path`` if given.

    Everything below an added or removed directory comes too. NotFound when neither has ``path``; Damaged.
    """
    raise NotImplementedError


def diff_live(repository: Repository, old: Snapshot, path: bytes | None = None) -> Iterator[Change]:
    """Changes from the snapshot to what is on the disk now. Files whose size, mtime, ctime and inode are as they were are not
    read. Errors of single live files are changes with the detail ``unreadable``.
    """
    raise NotImplementedError
