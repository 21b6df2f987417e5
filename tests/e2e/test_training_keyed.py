"""Trainings that save to a repository with an identity of its own, as one that was made for a remote."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.stored import IDENTITIES, KEYED

from ciuic import SnapshotManager
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Identity, Repository

_SAVES = 4


class _Model:
    def __init__(self) -> None:
        self.weights = np.random.default_rng(1).normal(0, 0.02, 1 << 17).astype(np.float32)
        self.counts = np.arange(5)

    def train(self, step: int) -> None:
        self.weights *= 1 + np.random.default_rng(step).normal(0, 1e-4, len(self.weights)).astype(np.float32)
        self.counts += step

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights, "counts": self.counts}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights, self.counts = np.array(state["weights"]), np.array(state["counts"])


@pytest.mark.parametrize("compression", ["none", "small"])
@pytest.mark.parametrize("identity", IDENTITIES)
def test_a_state_is_saved_and_loaded_to_the_bit(
    tmp_path: Path, identity: Identity | None, compression: str
) -> None:
    """Every saved state loads to the bit, in another manager too, and a resumed model is the one that was."""
    where = tmp_path / "snapshots"
    Repository.create(where, identity=identity).close()
    model = _Model()
    wanted = []
    with SnapshotManager(where, compression=compression) as manager:
        manager.register(model=model)
        for step in range(_SAVES):
            model.train(step)
            save = manager.save_snapshot(epoch=step, step=step, wait=True)
            assert save is not None
            wanted.append((save.id, model.weights.tobytes(), model.counts.tobytes()))
    resumed = _Model()
    with SnapshotManager(where, compression=compression) as manager:
        manager.register(model=resumed)
        assert manager.resume() is not None
        for id_, weights, counts in wanted:
            assert id_ is not None
            state = manager.load_snapshot(id_)["model_state_dict"]
            assert (state["weights"].tobytes(), state["counts"].tobytes()) == (weights, counts)
    assert (resumed.weights.tobytes(), resumed.counts.tobytes()) == wanted[-1][1:]
    with Repository.open(where) as repository:
        assert verify_snapshots(repository, checksum=True).damages == []
        assert (repository.identity == KEYED) == (identity is not None)
        assert repository.config.format == (3 if identity else 2 if compression == "small" else 1)
