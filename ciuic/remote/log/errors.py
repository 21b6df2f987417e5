"""Errors of logs."""

from __future__ import annotations

from ciuic.remote.errors import DamagedRemote


class RolledBack(DamagedRemote):
    """The remote lacks something that this host has seen in it: somebody brought back an older state."""

    def __init__(self, name: str, reason: str) -> None:
        super().__init__(
            name,
            f"the remote is older than it was: {reason}",
            hint="if it was restored from a copy on purpose, remove this host's cache of the remote and try again",
        )
