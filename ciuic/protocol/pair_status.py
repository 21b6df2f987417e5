"""Look up the state of paired snapshots (types.Pair).

Guarantees: states are looked up now, not cached. Only directories are opened, and no lookup takes longer than `LOOK_SECONDS`,
whatever file system the other repository is on (its path comes from the trainer). A state that cannot be found is "unknown".
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from ciuic.errors import CiuicError
from ciuic.protocol.pairing import MAX_IDS, States, states_of, text_of
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
    """Return the state of each paired snapshot by its id.

    Args:
        pairs: the pairs as the snapshots of one repository record them.
        repository: path of that repository.
        names: ids of the snapshots that it has.
        socket: path of the socket on which a daemon may be asked.
    """
    wanted: dict[str, set[str]] = {}
    files: set[str] = set()
    for pair in pairs:
        if pair.id:
            wanted.setdefault(pair.repository, set()).add(pair.id)
            # The daemon takes snapshots of files only; states of trainings are not its own.
            if pair.of == "filesystem":
                files.add(pair.id)
    found: dict[str, State] = {}
    own = text_of(os.path.realpath(repository))
    for path, ids in wanted.items():
        # Each repository is listed once, however many pairs it has.
        there = set(names) if path == own else _names(path)
        if there is not None:
            found.update((id_, "committed" if id_ in there else "gone") for id_ in ids)
    # The daemon is asked about missing snapshots too: they may still be pending.
    open_ = tuple(sorted(id_ for id_ in files if found.get(id_) != "committed"))[:MAX_IDS]
    if open_:
        said = _said(socket, open_)
        for id_ in open_:
            # The daemon's word counts for its own repository only: another one may have the same ids.
            if id_ in wanted.get(said.repository, ()):
                found[id_] = _PHASES.get(said.states.get(id_, ""), "unknown")
    return {id_: found.get(id_, "unknown") for ids in wanted.values() for id_ in ids}


def _said(socket: str, ids: tuple[str, ...]) -> States:
    try:
        return states_of(socket, ids, LOOK_SECONDS)
    except CiuicError:
        return States({})


def _names(repository: str) -> set[str] | None:
    """Return the ids of a repository's snapshots; None if they cannot be read within `LOOK_SECONDS`."""
    # In a thread that is abandoned when the time is over: listing a directory on another user's FUSE mount may hang.
    found: list[set[str]] = []

    def look() -> None:
        try:
            # The names are enough: nothing in the repository of another user is decoded.
            found.append(set(os.listdir(f"{repository}/snapshots")))
        except OSError:
            return

    # A daemon thread, so that a look that hangs does not keep the process from ending.
    looking = threading.Thread(target=look, name="ciuic-pair-status", daemon=True)
    looking.start()
    looking.join(LOOK_SECONDS)
    return found[0] if found else None
