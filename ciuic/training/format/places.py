"""Place that a snapshot is read from: a directory, or a repository that is open elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from ciuic.repository import Repository

ReadFrom: TypeAlias = "str | Callable[[], Repository]"
"""Path of a repository, or a function that opens it once more; any thread may call it."""


def open_repository(place: ReadFrom) -> Repository:
    """Open a repository for the calling thread."""
    return Repository.open(place) if isinstance(place, str) else place()
