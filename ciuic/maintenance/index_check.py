"""Compare the index with the packs while a writer may be changing both.

Guarantees: a commit that happens meanwhile is never taken for damage. Where the two cannot be told apart, nothing is reported.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from ciuic.repository import Repository
from ciuic.repository.disk.lock import LOCK_NAME
from ciuic.repository.disk.opening import open_regular

# Comparisons that a commit may disturb before the result is given up as unknown.
_MAX_ATTEMPTS: Final = 5
NOT_COVERED: Final = "the index does not cover"
"""Beginning of the repository's message for an index that is missing, or behind the packs after a crash or beside a writer.

It is no damage: readers find those chunks without the index.
"""


def index_problems(repository: Repository) -> list[str] | None:
    """Return the differences between index and packs; None when a writer is changing them."""
    # A commit may begin right after the check for a writer, so the packs must have the same sizes after the comparison.
    for _ in range(_MAX_ATTEMPTS):
        if _writer_at_work(repository):
            return None
        before = repository.pack_sizes()
        problems = repository.check_index()
        if not problems or (not _writer_at_work(repository) and repository.pack_sizes() == before):
            return problems
    return None


def _writer_at_work(repository: Repository) -> bool:
    """Return whether a writer holds the repository's lock, so that the index may be changing."""
    try:
        fd = open_regular(repository.path / LOCK_NAME, os.O_RDONLY)
    except OSError:
        # No lock file, or the caller may not open it: a writer cannot be seen.
        return False
    try:
        # Shared: two checks at once do not take each other for a writer.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        # A file system without locks.
        return False
    finally:
        os.close(fd)
    return False
