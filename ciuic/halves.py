"""Whether the other halves of snapshots are there (types.Pair), as far as it can be known from here.

Guarantees: looked up now, not remembered; nothing is opened but directories, nothing is waited for longer than `LOOK_SECONDS`, whatever the
other repository is on (its path is what a trainer said). What cannot be known is said to be unknown.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from ciuic.errors import CiuicError
from ciuic.pairing import MOST_IDS, States, states_of, text_of
from ciuic.types import Pair

State = Literal["committed", "pending", "failed", "gone", "unknown"]
LOOK_SECONDS: Final = 1.0
_PHASES: Final[dict[str, State]] = {
    "committed": "committed",
    "pending": "pending",
    "capturing": "pending",
    "failed": "failed",
    "gone": "gone",
}


def states(
    pairs: Iterable[Pair], repository: str | Path, names: Iterable[str], socket: str
) -> Mapping[str, State]:
    """By id of the other half. ``repository`` and ``names``: what snapshots the one has that these were found in. ``socket``: where a
    daemon may be asked."""
    wanted: dict[str, set[str]] = {}
    files: set[str] = set()
    for pair in pairs:
        if pair.id:
            wanted.setdefault(pair.repository, set()).add(pair.id)
            if pair.of == "filesystem":
                files.add(pair.id)
    found: dict[str, State] = {}
    own = text_of(os.path.realpath(repository))
    for path, ids in wanted.items():
        there = set(names) if path == own else _names(path)
        if there is not None:
            found.update((id_, "committed" if id_ in there else "gone") for id_ in ids)
    # Also for what is not there: it may be on its way.
    open_ = tuple(sorted(id_ for id_ in files if found.get(id_) != "committed"))[:MOST_IDS]
    if open_:
        said = _said(socket, open_)
        for id_ in open_:
            if id_ in wanted.get(said.repository, ()):
                found[id_] = _PHASES.get(said.states.get(id_, ""), "unknown")
    return {id_: found.get(id_, "unknown") for ids in wanted.values() for id_ in ids}


def _said(socket: str, ids: tuple[str, ...]) -> States:
    try:
        return states_of(socket, ids, LOOK_SECONDS)
    except CiuicError:
        return States({})


def _names(repository: str) -> set[str] | None:
    """Of the snapshots there; None where that cannot be read, or not now: a directory of somebody else's file system may hang."""
    found: list[set[str]] = []

    def look() -> None:
        try:
            found.append(set(os.listdir(f"{repository}/snapshots")))
        except OSError:
            return

    looking = threading.Thread(target=look, name="ciuic-halves", daemon=True)
    looking.start()
    looking.join(LOOK_SECONDS)
    return found[0] if found else None
