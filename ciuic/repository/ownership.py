"""Ownership of a repository: who may have written it, and so how far its content is believed.

Guarantees: a repository counts as the caller's own only if root or the caller owns its directory, all that is
read first in it and every directory on the way to it, and if no other user may write there. The callers decide
what to do with another one: a restore leaves special files out, a repair reads no live files.
"""

from __future__ import annotations

import os

from ciuic.repository.config import CONFIG_NAMES
from ciuic.system.ownership import find_flaw

_PARTS = ("", *CONFIG_NAMES, "packs", "snapshots", "marks")


def foreign_reason(path: str | os.PathLike[str]) -> str:
    """Return why a user other than root and the caller may have written this; empty if none may."""
    for part in _PARTS:
        try:
            flaw = find_flaw(os.path.join(path, part) if part else path)
        except OSError:
            # Unreadable: the caller's open reports it.
            continue
        if flaw is not None:
            return flaw.found
    return ""
