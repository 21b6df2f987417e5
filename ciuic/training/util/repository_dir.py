"""Creation of the repository in which a training saves."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.errors import CiuicError, UsageError
from ciuic.repository import Identity, Repository

# While another rank creates the repository some of these names exist already.
_OF_REPOSITORY: Final = frozenset(("config", "packs", "snapshots", "marks"))
_OTHERS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02


class Naming(NamedTuple):
    """Identity and block size of a new repository."""

    identity: Identity
    block_size: int


def ensure_repository(path: Path, naming: Callable[[], Naming] | None = None) -> None:
    """Make sure that there is a repository at ``path``; create it, parents included, if there is none.

    All ranks of a run may call this at once: one of them creates it, and the others wait for that.

    Args:
        path: Directory of the repository.
        naming: Asked only for a new repository; None: names of its own.

    Raises:
        CiuicError: There can be none.
        OSError: The same, as the file system says it.
    """
    if Repository.exists(path):
        # Opened, so that one of a later version is an error here and not at the first save.
        Repository.open(path).close()
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: give save_dir a directory that is empty, or is not there yet")
    # A mistaken save_dir, such as the home directory, must not be filled with packs.
    names = {one.name for one in path.iterdir()} if path.exists() else set()
    if names and names.isdisjoint(_OF_REPOSITORY):
        raise UsageError(
            f"{path} has other files ({min(names)} …): "
            "give save_dir a directory that is empty, or is not there yet"
        )
    chosen = None if naming is None else naming()
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        if chosen is None:
            Repository.create(path).close()
        else:
            Repository.create(path, identity=chosen.identity, block_size=chosen.block_size).close()
    # Another rank was first: it may need some time until the repository is complete.
    except (CiuicError, FileExistsError):
        end = time.monotonic() + _OTHERS_SECONDS
        while not Repository.exists(path):
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)
