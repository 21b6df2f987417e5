"""States that are stored with codecs, and what a flipped bit in one of them costs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.stored import IDENTITIES, flip

from ciuic import SnapshotManager
from ciuic.repository import Identity, Repository
from ciuic.repository import pack_format as pf
from ciuic.repository.snapshot_walk import Walker

_SAVES = 4


def _state(number: int) -> dict[str, np.ndarray]:
    """Return weights that change a little from one save to the next."""
    weights = np.random.default_rng(1).normal(0, 0.02, 1 << 17).astype(np.float32)
    for step in range(number):
        weights *= 1 + np.random.default_rng(2 + step).normal(0, 1e-4, len(weights)).astype(np.float32)
    return {"weights": weights}


class _Model:
    def __init__(self) -> None:
        self.state = _state(0)

    def state_dict(self) -> dict[str, np.ndarray]:
        return self.state

    def load_state_dict(self, state: dict[str, np.ndarray]) -> None:
        self.state = state


@pytest.mark.parametrize("identity", IDENTITIES)
@pytest.mark.parametrize(("damaged", "good"), [("newest difference", 2), ("first base", None)])
def test_snapshots_that_rest_on_a_damaged_chunk_are_skipped(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    damaged: str,
    good: int | None,
    identity: Identity | None,
) -> None:
    """Damage of a difference costs one snapshot, of a base all that rest on it; the next save is whole.

    What is lost is told in steps.
    """
    where = tmp_path / "snapshots"
    Repository.create(where, identity=identity).close()
    model = _Model()
    with SnapshotManager(where, compression="small") as manager:
        manager.register(model=model)
        ids = []
        for number in range(_SAVES):
            model.state = _state(number)
            save = manager.save_snapshot(epoch=number, step=100 * number, wait=True)
            assert save is not None
            assert save.id is not None
            ids.append(save.id)
    with Repository.open(where) as repository:
        newest = [
            repository.chunks.locate_all(chunk.id)
            for chunk in Walker(repository).walk(repository.snapshots.load(ids[-1]))
            if repository.chunks.locate(chunk.id).flags & pf.FLAG_PLANES
        ]
        chain = max(newest, key=len)
        assert len(chain) == _SAVES  # three differences and what they rest on
        place = chain[0] if damaged == "newest difference" else chain[-1]
    flip(where / f"packs/{place.pack:016x}.pack", place.offset + place.stored_bytes // 2)
    with SnapshotManager(where, compression="small") as manager:
        resuming = _Model()
        manager.register(model=resuming)
        if good is None:
            with pytest.raises(Exception, match="whole"):
                manager.resume()
        else:
            resumed = manager.resume()
            assert resumed is not None
            assert resumed.id == ids[good]
            assert [one.id for one in resumed.passed_over] == ids[good + 1 :][::-1]
            lost = 100 * (_SAVES - 1 - good)
            told = f"{ids[good]} is loaded instead of {ids[-1]}: {lost} steps after step {100 * good} must be done again"
            assert told in caplog.text
            assert resuming.state["weights"].tobytes() == _state(good)["weights"].tobytes()
        # What was passed over is not taken for stored.
        resuming.state = _state(_SAVES - 1)
        manager.save_snapshot(epoch=_SAVES, wait=True)
        resuming.state = {}
        resumed = manager.resume()
        assert resumed is not None
        assert resumed.epoch == _SAVES
        assert resuming.state["weights"].tobytes() == _state(_SAVES - 1)["weights"].tobytes()


def test_packs_that_are_away_damage_nothing(tmp_path: Path) -> None:
    """A state whose packs were away for a time is neither marked nor passed over when they are back."""
    where = tmp_path / "snapshots"
    with SnapshotManager(where) as manager:
        manager.save_snapshot(state=_state(0), epoch=1, wait=True)
        (where / "packs").rename(tmp_path / "away")
        (where / "packs").mkdir()
        with pytest.raises(Exception, match="whole"):
            manager.load_latest_snapshot()
        (where / "packs").rmdir()
        (tmp_path / "away").rename(where / "packs")
        assert manager.load_latest_snapshot() is not None
    with Repository.open(where) as repository:
        assert [info.tags for info in repository.snapshots.list()] == [("training",)]
