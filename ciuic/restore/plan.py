"""What a restore would do, before it does anything."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ciuic.repository import Repository
from ciuic.restore.model import Overwrite, Plan
from ciuic.types import Snapshot


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
) -> Plan:
    """Where everything would go. Reads metadata only, changes nothing.

    Each of ``paths`` (absolute, as they were at the snapshot; a root itself too) comes back as ``dest``/basename, or where
    it was when ``dest`` is None. DestinationExists names every conflict, when ``overwrite`` is None and something exists;
    with ``check=False`` they are in `Plan.conflicts` instead (for a dry run). ``keep(path, is_dir)``: what ``delete`` must
    spare besides, by its path at the snapshot, such as excluded paths. NotFound for a path that the snapshot has not;
    UsageError for paths that would collide; CiuicError when the destination cannot be used; Damaged when a tree cannot be
    read.
    """
    raise NotImplementedError
