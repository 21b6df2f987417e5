"""Errors of a remote that its readers and writers share; those of the object store are in objects/model.py."""

from __future__ import annotations

from ciuic.errors import Damaged, NotPermitted


class DamagedRemote(Damaged):
    """An object of the remote is not what its name promises: altered, cut, moved, or of another remote."""

    def __init__(self, name: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{name} in the remote is damaged: {reason}", hint=hint)
        self.name = name
        self.reason = reason


class WrongKey(NotPermitted):
    """A passphrase or key does not open the key slot, or the remote is not sealed with this key."""
