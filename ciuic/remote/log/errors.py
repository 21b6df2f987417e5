"""Errors of logs."""

from __future__ import annotations

from ciuic.errors import Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects.model import Objects, RemoteUnreachable
from ciuic.units import plural


class RolledBack(DamagedRemote):
    """The remote lacks something that this host has seen in it: somebody brought back an older state."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            name,
            f"the remote is older than it was: {reason}",
            hint="if it was restored from a copy on purpose, remove this host's cache of the remote and try again",
        )


class NothingCommitted(Damaged):
    """A remote has packs, and no log says that there is or was a snapshot: logs may be lost."""

    def __init__(self, url: str, packs: int) -> None:
        super().__init__(
            f"{url} has {plural(packs, 'pack')}, and no log commits a snapshot or removes one; nothing was deleted",
            hint="logs may have been deleted, or the first upload has not ended: ciuic check --remote",
        )


class LostCommits(DamagedRemote):
    """A manifest is stored, and the log that must have committed it is gone or cut."""

    def __init__(self, name: str, reason: str, more: int) -> None:
        others = f", and {plural(more, 'other manifest')} like it" if more else ""
        super().__init__(
            name,
            f"no log commits or removes it{others}: {reason}; nothing was deleted",
            hint="ciuic check --remote --repair commits it again; then ciuic forget --remote gives up what is not wanted",
        )


class IncompleteListing(RemoteUnreachable):
    """A listing lacks an object that is there: the store lists late, or something between it and this host answered."""

    def __init__(self, prefix: str, name: str) -> None:
        super().__init__(
            f"the listing of {prefix} lacks {name}, which is there; nothing was decided by it",
            hint="the store must list an object as soon as it is created, and no proxy may answer in its place",
        )


def missing(objects: Objects, prefix: str, name: str, reason: str) -> IncompleteListing | RolledBack:
    """Return the error for a known object that a listing lacks: of the listing if the object is there, else of the remote.

    Args:
        objects: The remote.
        prefix: Prefix that was listed.
        name: Object that this host has seen.
        reason: What was expected and found, for people.
    """
    return IncompleteListing(prefix, name) if objects.info(name) else RolledBack(name, reason)
