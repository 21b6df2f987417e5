"""Decide whether root may store all users' files in a repository, by owner and mode of the directories.

The owner of a repository, and users who may replace it, can read every file of every snapshot, and write what a
restore brings back. Guarantees: the check applies to root alone, because other users can disclose only what
is theirs; nothing is opened or changed. Reading such a repository is not refused, for the sake of rescue.
Commands and daemon ask before they write.
"""

from __future__ import annotations

import os

from ciuic.errors import NotPermitted
from ciuic.system.ownership import Flaw, find_flaw

TRUST_OPTIONS = "set [repository] trust_owner = true (or give --trust-repository)"


class ForeignRepository(NotPermitted):
    """The repository belongs to another user, or others may replace it."""


def foreign_flaw(path: str | os.PathLike[str]) -> Flaw | None:
    """Return why the repository counts as another user's; None if it does not, or if this is not root."""
    if os.geteuid() != 0:
        return None
    try:
        return find_flaw(path)
    except OSError:
        # The caller that opens it reports why it cannot.
        return None


def require_own(path: str | os.PathLike[str], *, trusted: bool) -> None:
    """Raise ForeignRepository if root would write into a repository that others may change."""
    flaw = None if trusted else foreign_flaw(path)
    if flaw is not None:
        raise ForeignRepository(refusal(path, flaw), hint=hint(flaw))


def refusal(path: str | os.PathLike[str], flaw: Flaw) -> str:
    """Return the error message: what was expected, and what was found."""
    return (
        f"the repository {os.fspath(path)} must be root's own, and so must every directory above it, "
        f"before files of all users are put there; the {flaw.found}"
    )


def hint(flaw: Flaw) -> str:
    """Return the hint: what to do."""
    return (
        f"{flaw.remedy}; or name another place; or, if that user may read and change all snapshots, "
        f"{TRUST_OPTIONS}"
    )
