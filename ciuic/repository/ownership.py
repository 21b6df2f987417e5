"""Who may change a repository: the question behind what is believed of it.

Guarantees: a repository counts as the caller's own only if root or the caller owns the directory, all that is read
first in it and every directory on the way to it, and if nobody else may write there. Leaves to the callers what they
do with one that is not: a restore leaves special files out, a reader does without the index.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator

from ciuic.repository.config import CONFIG_NAMES

_PARTS = ("", *CONFIG_NAMES, "packs", "snapshots", "marks")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def foreign_reason(path: str | os.PathLike[str]) -> str:
    """Why somebody other than root and the caller may have written this repository; empty if nobody else may."""
    where = os.path.abspath(os.fspath(path))
    for part in _PARTS:
        problem = _problem(os.path.join(where, part) if part else where, sticky_suffices=False)
        if problem:
            return problem
    for above in _directories_above(where):
        problem = _problem(above, sticky_suffices=True)
        if problem:
            return problem
    return ""


def is_own_directory(path: str) -> bool:
    """Whether nobody but root and the caller may make or replace names in this directory."""
    return not _problem(path or ".", sticky_suffices=False)


def _directories_above(where: str) -> Iterator[str]:
    """Every directory in which a name could be replaced to lead the path elsewhere, also behind symbolic links."""
    seen = set()
    for way in (where, os.path.realpath(where)):
        while (way := os.path.dirname(way)) not in seen:
            seen.add(way)
            yield way


def _problem(path: str, *, sticky_suffices: bool) -> str:
    try:
        st = os.stat(path)
    except OSError:
        return ""  # missing or unreadable: opening it says so
    if st.st_uid not in (0, os.geteuid()):
        return f"{path} belongs to user {st.st_uid}"
    # In a directory with the sticky bit only the owner of a name can rename or remove it (rename(2), EPERM).
    if st.st_mode & _OTHERS_WRITE and not (sticky_suffices and st.st_mode & stat.S_ISVTX):
        return f"others may write to {path} (mode {stat.S_IMODE(st.st_mode):04o})"
    return ""
