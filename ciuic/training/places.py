"""Where the snapshots of a training lie."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

from ciuic.errors import CiuicError, UsageError
from ciuic.repository import Repository

_OF_REPOSITORY: Final = frozenset(("config", "packs", "snapshots", "marks"))
"""Some of it is there while another rank makes it."""
_OTHERS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.02


def ensure_repository(path: Path) -> None:
    """There is one at ``path`` on return, parents included. CiuicError or OSError when there can be none.

    All ranks of a run may ask at once: one of them makes it.
    """
    if Repository.exists(path):
        Repository.open(path).close()
        return
    if path.exists() and not path.is_dir():
        raise UsageError(f"{path} is a file: give save_dir a directory that is empty, or is not there yet")
    names = {one.name for one in path.iterdir()} if path.exists() else set()
    if names and names.isdisjoint(_OF_REPOSITORY):
        raise UsageError(
            f"{path} has other files ({min(names)} …): give save_dir a directory that is empty, or is not there yet"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        Repository.create(path).close()
    except (CiuicError, FileExistsError):
        end = time.monotonic() + _OTHERS_SECONDS
        while not Repository.exists(path):
            if time.monotonic() > end:
                raise
            time.sleep(_POLL_SECONDS)
