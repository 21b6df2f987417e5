"""Errors of logs: an older state was brought back, commits are lost, or a listing lacks what is there."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from ciuic.errors import Damaged
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.objects.model import Objects, RemoteUnreachable
from ciuic.units import plural


class RolledBack(DamagedRemote):
    """The remote lacks something that this host has seen in it: somebody brought back an older state."""

    def __init__(self, name: str, reason: str, directory: str = "") -> None:
        """Take the object that is missing, what was expected, and where this host remembers what it saw; empty for unknown."""
        memory = shlex.quote(directory) if directory else "this host's cache of the remote"
        super().__init__(
            name,
            f"the remote is older than it was: {reason}",
            hint=f"somebody deleted in it, or restored it from a copy; to go on with what is there now, remove {memory}, "
            "and commit again what was lost: ciuic check --remote --repair",
        )
        self.expected = reason


@contextmanager
def naming_memory(directory: str) -> Iterator[None]:
    """Name the directory with what this host remembers of a remote in the hint of a RolledBack."""
    try:
        yield
    except RolledBack as error:
        raise RolledBack(error.name, error.expected, directory) from None


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


def missing_object_error(
    objects: Objects, prefix: str, name: str, reason: str
) -> IncompleteListing | RolledBack:
    """Return the error for a known object that a listing lacks: of the listing if the object is there, else of the remote.

    Args:
        objects: The remote.
        prefix: Prefix that was listed.
        name: Object that this host has seen.
        reason: What was expected and found, for people.
    """
    return IncompleteListing(prefix, name) if objects.info(name) else RolledBack(name, reason)
