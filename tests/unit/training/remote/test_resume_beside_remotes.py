"""What a training resumes from where its remotes answer, answer late, or do not answer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from ciuic import SnapshotManager
from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError, Damaged
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.repository import Repository
from ciuic.training import loading
from ciuic.training.format.reading import NoUsableSnapshot
from ciuic.training.remote.copies import RemoteCandidate

_REMOTES = (RemoteConfig(name="r", url="file:///unused"),)


def _save(place: Path, *steps: int) -> bytes:
    """Save states, and return the path of the training in its snapshots."""
    with SnapshotManager(place, name="job") as manager:
        for step in steps:
            manager.save_snapshot(model={"w": np.full(10, float(step))}, step=step, wait=True)
    with Repository.open(place) as repository:
        newest = repository.snapshots.load(repository.snapshots.list()[0].id)
    return newest.roots[0].path


class _Remote:
    """Remote with the states of a repository, whose newest cannot be read for a reason."""

    def __init__(self, place: Path, error: CiuicError | None, root: bytes) -> None:
        self._place, self._error = place, error
        with Repository.open(place) as repository:
            infos = repository.snapshots.list(root=root)
        self._candidates = [RemoteCandidate("r", 0, info.time_ns, str(info.id)) for info in infos]

    def offered(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(loading, "RemoteTraining", lambda remotes, root: self)

    def __enter__(self) -> _Remote:
        return self

    def __exit__(self, *exception: object) -> None:
        pass

    def candidates(self) -> list[RemoteCandidate]:
        return self._candidates

    def member_of(self, candidate: RemoteCandidate) -> None:
        return None

    def opener(self, candidate: RemoteCandidate) -> Callable[[], Repository]:
        if self._error is not None and candidate == self._candidates[0]:
            raise self._error
        return lambda: Repository.open(self._place)


class _Ranks:
    """The only rank of a training."""

    rank, world_size, saves = 0, 1, True
    directories = SimpleNamespace(groups=((0,),))

    def first_problem(self, problem: str) -> str:
        return problem

    def tell(self, value: object = None) -> object:
        return value


@pytest.mark.parametrize("among_ranks", [False, True])
@pytest.mark.parametrize(
    ("error", "step"),
    [(None, 3), (Damaged("gone"), 2), (RemoteUnreachable("away"), None), (RemoteRefused("no"), None)],
)
def test_an_older_state_is_loaded_only_where_a_newer_one_is_damaged(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    error: CiuicError | None,
    step: int | None,
    among_ranks: bool,
) -> None:
    """A remote that is silent or refuses while the newest state is read is an error, never an older state."""
    _save(tmp_path / "here", 1)
    root = _save(tmp_path / "there", 2, 3)
    _Remote(tmp_path / "there", error, root).offered(monkeypatch)

    def resume() -> int | None:
        ranks = _Ranks() if among_ranks else None
        state = loading.load_newest(tmp_path / "here", root, ranks=ranks, remotes=_REMOTES)  # type: ignore[arg-type]
        return None if state is None else state.facts.step

    if step is None:
        with pytest.raises(CiuicError, match=str(error)):
            resume()
    else:
        assert resume() == step


def test_an_own_state_between_those_of_a_remote_is_the_newest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A state of the remote that is older than an own one is loaded only where all own ones are damaged."""
    _save(tmp_path / "here", 1)
    _save(tmp_path / "there", 2)
    root = _save(tmp_path / "here", 3)
    _Remote(tmp_path / "there", None, root).offered(monkeypatch)
    state = loading.load_newest(tmp_path / "here", root, remotes=_REMOTES)
    assert state is not None
    assert state.facts.step == 3
    for pack in (tmp_path / "here").rglob("*.pack"):
        pack.write_bytes(b"")
    state = loading.load_newest(tmp_path / "here", root, remotes=_REMOTES)
    assert state is not None
    assert state.facts.step == 2


def test_a_run_does_not_begin_anew_beside_a_silent_or_damaged_remote(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing is here, and nobody knows what a remote has or can read it, that is an error."""
    root = _save(tmp_path / "there", 2)
    Repository.create(tmp_path / "here").close()
    remote = _Remote(tmp_path / "there", Damaged("gone"), root)
    remote.offered(monkeypatch)
    with pytest.raises(NoUsableSnapshot):
        loading.load_newest(tmp_path / "here", root, remotes=_REMOTES)
    monkeypatch.setattr(remote, "candidates", Mock(side_effect=RemoteUnreachable("away")))
    with pytest.raises(RemoteUnreachable):
        loading.load_newest(tmp_path / "here", root, remotes=_REMOTES)
