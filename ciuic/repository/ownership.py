"""Who may change a repository: the question behind what is believed of it.

Guarantees: a repository counts as the caller's own only if root or the caller owns the directory, all that is read
first in it and every directory on the way to it, and if nobody else may write there. Leaves to the callers what they
do with one that is not: a restore leaves special files out, a reader does without the index.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from ciuic.repository.config import CONFIG_NAMES
from ciuic.repository.opening import who_else_writes

_PARTS = ("", *CONFIG_NAMES, "packs", "snapshots", "marks")


def foreign_reason(path: str | os.PathLike[str]) -> str:
    """Why somebody other than root and the caller may have written this repository; empty if nobody else may."""
    where = os.path.abspath(os.fspath(path))
    for part in _PARTS:
        problem = who_else_writes(os.path.join(where, part) if part else where, sticky_suffices=False)
        if problem:
            return problem
    for above in _directories_above(where):
        problem = who_else_writes(above, sticky_suffices=True)
        if problem:
            return problem
    return ""


def _directories_above(where: str) -> Iterator[str]:
    """Every directory in which a name could be replaced to lead the path elsewhere, also behind symbolic links."""
    seen = set()
    for way in (where, os.path.realpath(where)):
        while (way := os.path.dirname(way)) not in seen:
            seen.add(way)
            yield way
