"""Errors of a remote that its readers and writers share; those of the object store are in objects/model.py."""

from __future__ import annotations

from ciuic.errors import CiuicError, Damaged, NotPermitted


class DamagedRemote(Damaged):
    """An object of the remote is not what its name promises: altered, cut, moved, or of another remote."""

    def __init__(self, name: str, reason: str, *, hint: str = "") -> None:
        super().__init__(f"{name} in the remote is damaged: {reason}", hint=hint)
        self.name = name
        self.reason = reason


class PacksElsewhere(CiuicError):
    """The packs of the remote lie in another place than its log, where an earlier version put them."""

    def __init__(self, packs_url: str) -> None:
        super().__init__(
            f"the remote has its packs in another place than its log, {packs_url!r}, which this version of ciuic does not read",
            hint="the earlier version reads it; to use it with this one copy packs, tables and manifests beside the log and make "
            "remote.json anew (docs/remote.md, Packs apart from the log)",
        )


class WrongKey(NotPermitted):
    """A passphrase or key does not open the key slot, or the remote is not sealed with this key."""
