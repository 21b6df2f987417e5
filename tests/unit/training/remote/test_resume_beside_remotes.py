"""What a training resumes from where its remotes answer, answer late, or do not answer."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import numpy as np
import pytest

from ciuic import SnapshotManager
from ciuic.config import RemoteConfig
from ciuic.errors import CiuicError, Damaged
from ciuic.remote.documents import LiveManifest
from ciuic.remote.object_names import manifest_name
from ciuic.remote.objects.model import RemoteRefused, RemoteUnreachable
from ciuic.remote.reading.remote_snapshots import CommittedEntry, RemoteSnapshots
from ciuic.repository import Repository
from ciuic.repository.errors import DamagedSnapshot
from ciuic.training import coordinator, loading
from ciuic.training.format import tensors
from ciuic.training.format.reading import NoUsableSnapshot
from ciuic.training.json_documents import raise_shortage
from ciuic.training.remote.copies import RemoteCandidate, RemoteTraining
from ciuic.training.results import State

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


def _damage(place: Path, *, of: bytes) -> None:
    """Make the snapshot files of a training unreadable, and remove the index that has what they said."""
    with Repository.open(place) as repository:
        for info in repository.snapshots.list(root=of):
            Path(repository.snapshots.path(info.id)).write_bytes(b"damaged")
    for index in place.glob("index.sqlite*"):
        index.unlink()


@pytest.mark.parametrize("where", ["here", "in parts", "remote"])
@pytest.mark.parametrize("others", [False, True])
def test_a_run_does_not_begin_anew_where_its_snapshots_cannot_be_listed(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    where: str,
    others: bool,
) -> None:
    """Unreadable snapshots alone are an error, and beside those of another training a warning, which names them."""
    place = tmp_path / ("there" if where == "remote" else "here")
    root = _save(place, 2)
    _damage(place, of=root)
    if others:
        with SnapshotManager(place, name="another") as manager:
            manager.save_snapshot(model={"w": np.zeros(1)}, wait=True)
    monkeypatch.setattr(RemoteTraining, "_open", lambda *_: [Repository.open(tmp_path / "there")])
    monkeypatch.setattr(loading, "are_in_parts", lambda *_: where == "in parts")
    remotes = _REMOTES if where == "remote" else ()
    if where == "remote":
        Repository.create(tmp_path / "here").close()

    def resume() -> State | None:
        return loading.load_newest(tmp_path / "here", root, remotes=remotes)

    if others:
        assert resume() is None
        assert "may be one of this training" in caplog.text
    else:
        with pytest.raises(Damaged, match="is damaged"):
            resume()
    _save(tmp_path / "here", 3)
    assert (state := resume()) is not None
    assert state.facts.step == 3


@pytest.mark.parametrize(("job", "begins"), [("job", False), ("another", True)])
def test_the_name_of_a_manifest_tells_of_which_training_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, begins: bool
) -> None:
    """A remote manifest that is missing keeps from a fresh start the training that its name has, and no other."""
    live = LiveManifest("1" * 32, "cs-000001", manifest_name(job=job, epoch=1, step=2, host="h"), "d" * 64)
    manifests = Mock()
    manifests.read.side_effect = DamagedSnapshot("cs-000001", "it is missing")
    snapshots = RemoteSnapshots({"cs-000001": CommittedEntry(live, manifests)})
    monkeypatch.setattr(RemoteTraining, "_open", lambda *_: [SimpleNamespace(snapshots=snapshots)])
    Repository.create(tmp_path / "here").close()
    if begins:
        assert loading.load_newest(tmp_path / "here", b"/job", remotes=_REMOTES) is None
    else:
        with pytest.raises(NoUsableSnapshot, match="it is missing"):
            loading.load_newest(tmp_path / "here", b"/job", remotes=_REMOTES)


@pytest.mark.parametrize("where", ["empty_buffer", "from_buffer"])
@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("can't start new thread"), RuntimeError("can't allocate memory")]
)
def test_a_process_that_lacks_memory_loads_no_older_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str, error: Exception
) -> None:
    """Where memory or threads do not suffice for the newest state, that is an error, and the state is not damaged."""
    root = _save(tmp_path, 1, 2)
    enough, calls = getattr(tensors, where), iter([error])

    def short(*args: object) -> object:
        for one in calls:
            raise one
        return enough(*args)

    monkeypatch.setattr(tensors, where, short)
    with pytest.raises(OSError, match="not enough memory"):
        loading.load_newest(tmp_path, root)
    assert (state := loading.load_newest(tmp_path, root)) is not None
    assert (state.facts.step, state.passed_over) == (2, [])


@pytest.mark.parametrize("error", [KeyError("can't start new thread"), ValueError("can't allocate memory")])
def test_text_of_a_document_is_no_shortage(error: Exception) -> None:
    """A malformed document cannot pass for a lack of memory, which would keep an older state from being loaded."""
    raise_shortage(error)


@pytest.mark.parametrize("resumes", [True, False], ids=["resume", "load_latest_snapshot"])
def test_a_clock_that_is_behind_makes_no_earlier_state_the_newest(
    resumes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save after loading another host's state is dated later than it, even if the clock is a day behind."""
    root = _save(tmp_path / "there", 4)
    there = coordinator.load_newest(tmp_path / "there", root)
    assert there is not None
    monkeypatch.setattr(coordinator, "load_newest", lambda *_, **__: there)
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() - 24 * 3600 * 10**9)
    with SnapshotManager(tmp_path / "here", name="job") as manager:
        if resumes:
            manager.framework.continue_from(there)
        else:
            assert manager.load_latest_snapshot() is there
        manager.save_snapshot(model={"w": np.zeros(3)}, step=5, wait=True)
        assert manager.list_snapshots()[0].time_ns > there.time_ns
