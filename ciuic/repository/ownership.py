"""Who may have written a repository: the question behind what is believed of it.

Guarantees: a repository counts as the caller's own only if root or the caller owns its directory, all that is read first in it and
every directory on the way to it, and if nobody else may write there. Leaves to the callers what they do with one that is not: a
restore leaves special files out, a repair reads no live files.
"""

from __future__ import annotations

import os

from ciuic.ownership import find_flaw
from ciuic.repository.config import CONFIG_NAMES

_PARTS = ("", *CONFIG_NAMES, "packs", "snapshots", "marks")


def foreign_reason(path: str | os.PathLike[str]) -> str:
    """Why somebody other than root and the caller may have written this repository; empty if nobody else may."""
    for part in _PARTS:
        try:
            flaw = find_flaw(os.path.join(path, part) if part else path)
        except OSError:
            continue  # unreadable: opening it says so
        if flaw is not None:
            return flaw.found
    return ""
