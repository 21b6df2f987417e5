"""The repository of a host that joins a remote: made with the remote's identity, so that hosts share chunks."""

from __future__ import annotations

import os
from enum import Enum
from pathlib import Path

from ciuic.remote.access.remote import Remote
from ciuic.repository import Repository
from ciuic.repository.new_directory import unmake_empty


class RepositoryChoice(Enum):
    """Outcome for the repository of a host that joined a remote."""

    MADE = "made"
    """There was none."""
    REPLACED = "replaced"
    """There was one that held nothing, with another identity."""
    SHARES = "shares"
    """It has the identity of the remote already."""
    OWN_IDENTITY = "own-identity"
    """It holds snapshots under an identity of its own, and keeps it."""


def join_repository(path: Path, remote: Remote, *, refuse_foreign: bool = True) -> RepositoryChoice:
    """Have a repository at the path that shares chunks with the remote, if nothing is stored there; durable on return.

    No daemon may use the repository meanwhile.

    Args:
        path: The repository; its parent directories are made.
        remote: Open remote.
        refuse_foreign: As in `Repository.create`.

    Raises:
        Busy: another process writes to the repository.
        NotPermitted: the directory cannot be written.
    """
    choice = RepositoryChoice.MADE
    if Repository.exists(path):
        with Repository.open(path) as repository:
            if shares_chunks(repository, remote):
                return RepositoryChoice.SHARES
        if not unmake_empty(os.path.abspath(path)):
            return RepositoryChoice.OWN_IDENTITY
        choice = RepositoryChoice.REPLACED
    path.parent.mkdir(parents=True, exist_ok=True)
    Repository.create(
        path, block_size=remote.stored.block_size, identity=remote.identity, refuse_foreign=refuse_foreign
    ).close()
    return choice


def shares_chunks(repository: Repository, remote: Remote) -> bool:
    """Return whether chunks of the repository have the ids that they have in the remote."""
    return repository.identity == remote.identity and repository.block_size == remote.stored.block_size
