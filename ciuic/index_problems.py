"""Whether index and packs agree, asked beside a writer that may be changing both.

Guarantees: a commit that happens meanwhile is never taken for damage; where it cannot be told, nothing is said.
"""

from __future__ import annotations

import fcntl
import os
from typing import Final

from ciuic.repository import Repository
from ciuic.repository.lock import LOCK_NAME
from ciuic.repository.opening import open_regular

_INDEX_ATTEMPTS: Final = 5
NOT_COVERED: Final = "the index does not cover"
"""How the repository says that the index is behind: after a crash, or beside a writer. Readers find those chunks anyway."""


def index_problems(repository: Repository) -> list[str] | None:
    """Where index and packs differ; None when a writer is changing them. A commit that begins after the question
    whether there is one must not be taken for damage, so what was compared must be the same afterwards."""
    for _ in range(_INDEX_ATTEMPTS):
        if _writer_at_work(repository):
            return None
        before = pack_sizes(repository)
        problems = repository.check_index()
        if not problems or (not _writer_at_work(repository) and pack_sizes(repository) == before):
            return problems
    return None


def _writer_at_work(repository: Repository) -> bool:
    """Whether the index may be changing right now."""
    try:
        fd = open_regular(repository.path / LOCK_NAME, os.O_RDONLY)
    except OSError:  # no lock file, or not ours to open: then nobody can be told apart from a writer
        return False
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # no locks on this file system
        return False
    finally:
        os.close(fd)
    return False


def pack_sizes(repository: Repository) -> dict[int, int]:
    """Number → bytes, of every pack file that is there, damaged or not."""
    sizes = {}
    with os.scandir(repository.path / "packs") as found:
        for item in found:
            number, dot, suffix = item.name.partition(".")
            if (dot, suffix) == (".", "pack"):
                try:
                    sizes[int(number, 16)] = item.stat(follow_symlinks=False).st_size
                except (ValueError, FileNotFoundError):
                    continue  # not a pack's name, or dropped meanwhile
    return sizes
