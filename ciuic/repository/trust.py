"""Whether root may put everybody's files into a repository: owner and mode of its directory and of all directories above it.

A repository that somebody else owns, or may replace, lets that user read every file of every snapshot, and write what a restore brings
back. Guarantees: asked by root alone, because others can give no more than what is theirs; nothing is opened or changed. Reading
such a repository is not refused: it is what rescue is made of. Leaves it to commands and daemon to ask before they write.
"""

from __future__ import annotations

import os

from ciuic.errors import NotPermitted
from ciuic.ownership import Flaw, find_flaw

THE_WORD = "set [repository] trust_owner = true (or give --trust-repository)"


class ForeignRepository(NotPermitted):
    """The repository belongs to another user, or others may replace it."""


def foreign_flaw(path: str | os.PathLike[str]) -> Flaw | None:
    """What makes the repository another user's, for root; None for nothing, and for everybody else."""
    if os.geteuid() != 0:
        return None
    try:
        return find_flaw(path)
    except OSError:
        return None  # whoever opens it says why it cannot be


def require_own(path: str | os.PathLike[str], *, trusted: bool) -> None:
    """Raise ForeignRepository where root is to write into a repository that others may change, unless it was told to."""
    flaw = None if trusted else foreign_flaw(path)
    if flaw is not None:
        raise ForeignRepository(refusal(path, flaw), hint=hint(flaw))


def refusal(path: str | os.PathLike[str], flaw: Flaw) -> str:
    """What was expected, and what was found."""
    return (
        f"the repository {os.fspath(path)} must be root's own, and so must every directory above it, before files of all "
        f"users are put there; the {flaw.found}"
    )


def hint(flaw: Flaw) -> str:
    """What to do."""
    return f"{flaw.remedy}; or name another place; or, if that user may read and change all snapshots, {THE_WORD}"
