"""Loading of the newest whole state of a training: from the local directory, or on another host from a remote.

Guarantees: of the snapshots of the training that are whole, the newest is loaded, wherever it is; a remote is read
only for one that the local directory lacks. Where the local directory has none, a remote that cannot be reached
is an error: a run never begins anew because a remote did not answer. Where it has some, that is a warning.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ciuic.errors import CiuicError
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.repository import Repository
from ciuic.training.format.reading import Loaded, NothingGood, PassedOver, load
from ciuic.training.format.results import State
from ciuic.training.format.shards import TemplateLookup
from ciuic.training.loading import first_on_all_ranks, load_latest, load_on_all_ranks, told_by_rank_0
from ciuic.training.ranks.group import Ranks
from ciuic.training.remote.finding import RemoteCandidate, RemoteTraining
from ciuic.training.remote.place import RemoteList
from ciuic.training.util.logs import log

Templates = Mapping[str, TemplateLookup]


def load_newest(
    save_dir: Path,
    root: bytes,
    templates: Templates | None = None,
    *,
    ranks: Ranks | None = None,
    remotes: RemoteList = (),
    find: Callable[[], State | None] | None = None,
) -> State | None:
    """Return the newest state that is whole; None if there is no snapshot. Collective where there are ranks.

    Args:
        save_dir: Local repository.
        root: Path of the training in its snapshots.
        templates: Templates of the objects of which this rank has a part.
        ranks: The ranks, all of which get the same snapshot.
        remotes: Remotes that may have newer ones.
        find: Called on rank 0 to find the state instead, in the local repository alone.

    Raises:
        NothingGood: There are snapshots, and none is whole.
        CiuicError: A remote cannot be reached or opened.
    """

    def load_local() -> State | None:
        if ranks is not None:
            return load_on_all_ranks(ranks, save_dir, root, templates or {}, find)
        return find() if find is not None else load_latest(save_dir, root, templates)

    if not remotes or find is not None:
        return load_local()
    with RemoteTraining(remotes, root) as training:
        loading = _RemoteLoading(training, templates, ranks)
        # First those that this host does not have: it may have come back with what it had days ago.
        newer = loading.candidates(lambda: _newer_than_local(training, save_dir, root))
        damage: NothingGood | None = None
        try:
            if newer:
                return loading.first_good(newer)
        except NothingGood as error:
            damage = error
        try:
            state = load_local()
        except NothingGood as error:
            others = loading.candidates(lambda: [one for one in training.candidates() if one not in newer])
            if not others:
                raise
            log.warning("ciuic: no snapshot here is whole, so that a remote is read: %s", error.message)
            return loading.first_good(others)
        if state is None and damage is not None:
            raise damage
        return state


def _newer_than_local(training: RemoteTraining, save_dir: Path, root: bytes) -> list[RemoteCandidate]:
    """Return the snapshots on remotes that are newer than every one here.

    Raises:
        CiuicError: There is none here, and a remote cannot be read.
    """
    with Repository.open(save_dir) as repository:
        here = repository.snapshots.list(root=root)
    try:
        found = training.candidates()
    except CiuicError as error:
        if not here:
            raise
        # Without the network a run must go on where it can; the error is an error only where nothing is here.
        log.warning("ciuic: resuming from this directory without looking at the remote: %s", error.message)
        return []
    return [one for one in found if not here or one.time_ns > here[0].time_ns]


class _RemoteLoading:
    """Loading from remotes, on one rank or on all; every method is collective where there are several."""

    def __init__(self, training: RemoteTraining, templates: Templates | None, ranks: Ranks | None) -> None:
        self._training = training
        self._templates = templates
        self._ranks = ranks

    def candidates(self, find: Callable[[], Sequence[RemoteCandidate]]) -> list[RemoteCandidate]:
        """Return what rank 0 finds."""
        if self._ranks is None:
            return list(find())
        return [
            RemoteCandidate(*one)
            for one in told_by_rank_0(self._ranks, lambda: [tuple(one) for one in find()])
        ]

    def first_good(self, candidates: Sequence[RemoteCandidate]) -> State | None:
        """Return the first that is whole. NothingGood if none is."""
        if self._ranks is not None:
            return first_on_all_ranks(self._ranks, candidates, self._load)
        passed_over: list[PassedOver] = []
        for candidate in candidates:
            try:
                loaded = self._load(*candidate)
            # They say nothing about the snapshot, so no older one may be taken for the newest.
            except (RemoteUnreachable, RemoteRefused):
                raise
            except (CiuicError, ValueError) as error:
                log.warning("ciuic: snapshot %s is passed over: %s", candidate.id, error)
                passed_over.append(PassedOver(candidate.id, str(error)))
                continue
            loaded.passed_over = passed_over
            return State(loaded)
        raise NothingGood(passed_over)

    def _load(self, *candidate: Any) -> Loaded:
        found = RemoteCandidate(*candidate)
        loaded = load(self._training.opener(found), found.id, self._templates)
        log.info("ciuic: loaded %s from remote %s", found.id, found.remote)
        return loaded
