"""Arguments of save_snapshot as programs write them, under clock changes and beside other processes."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ciuic import SnapshotManager
from ciuic.training import snapshot_taker


class Model:
    def __init__(self, value: float = 0.0) -> None:
        self.weights = np.full(40_000, value)

    def state_dict(self) -> dict[str, Any]:
        return {"weights": self.weights}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.weights[...] = state["weights"]


def test_states_and_numbers_are_taken_as_programs_have_them(tmp_path: Path) -> None:
    """A state_dict as the model, NumPy's numbers for Python's, and a single tag are accepted."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        save = manager.save_snapshot(
            Model(2.0).state_dict(),
            {"lr": 0.1},
            np.int64(3),
            step=np.int32(70),  # type: ignore[arg-type]
            metrics={"loss": np.float32(0.5)},  # type: ignore[dict-item]
            tags="best",
            wait=True,
        )
        assert save is not None
        state = manager.load_latest_snapshot()
        assert state is not None
        assert state["model_state_dict"]["weights"][0] == 2.0
        assert state["optimizer_state_dict"] == {"lr": 0.1}
        assert (state["epoch"], state["step"], state["metrics"]) == (3, 70, {"loss": 0.5})
        assert "best" in manager.list_snapshots()[0].tags


REFUSED: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"model": "a path"}, TypeError),
    ({"model": Model}, TypeError),
    ({"model": Model(), "epoch": 2.5}, TypeError),
    ({"model": Model(), "step": "7"}, TypeError),
    ({"model": Model(), "epoch": 1 << 70}, ValueError),
    ({"values": [1]}, ValueError),
    ({"random_state": 1}, ValueError),
    ({"a/b": 1}, ValueError),
    ({"model": Model(), "model_state_dict": {}}, ValueError),
    ({"model": Model(), "metrics": {"loss": "low"}}, TypeError),
]


def test_a_value_that_cannot_be_loaded_is_refused_at_once(tmp_path: Path) -> None:
    """A value that could not be loaded is refused at once, and the next save works."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        for refused, kind in REFUSED:
            with pytest.raises(kind):
                manager.save_snapshot(**refused)
        save = manager.save_snapshot(Model(), wait=True)
        assert save is not None
        assert save.id


def test_the_last_snapshot_is_the_newest_despite_clock_steps(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last snapshot taken is the newest for resume and retention, whatever the clock says."""
    with SnapshotManager(tmp_path / "snapshots", max_snapshots=2) as manager:
        model = Model()
        for number in range(4):
            monkeypatch.setattr(
                snapshot_taker.time,
                "time_ns",
                lambda back=number: 10**18 + time.monotonic_ns() - back * 10**15,
            )
            model.weights[...] = number
            assert manager.save_snapshot(model, epoch=number, wait=True) is not None
        assert manager.wait()
        state = manager.load_latest_snapshot()
        assert state is not None
        assert state["epoch"] == 3
    with SnapshotManager(tmp_path / "snapshots") as manager:
        assert [one.facts.epoch for one in manager.list_snapshots()] == [3, 2]


def test_the_newest_can_be_read_while_a_training_saves_and_removes(tmp_path: Path) -> None:
    """An evaluation can read the newest snapshot while a training saves and removes others."""
    with SnapshotManager(tmp_path / "snapshots", max_snapshots=1, compression="none") as manager:
        model = Model()
        manager.save_snapshot(model, epoch=0, wait=True)
        end = threading.Event()
        found: list[int] = []
        problems: list[BaseException] = []

        def evaluate() -> None:
            reader = SnapshotManager(tmp_path / "snapshots")
            try:
                while not end.is_set():
                    state = reader.load_latest_snapshot()
                    assert state is not None
                    assert not state.passed_over
                    assert set(state["model_state_dict"]["weights"]) == {state["epoch"]}
                    found.append(state["epoch"])
            except BaseException as error:
                problems.append(error)
            finally:
                reader.close()

        thread = threading.Thread(target=evaluate)
        thread.start()
        for number in range(1, 25):
            model.weights[...] = number
            manager.save_snapshot(model, epoch=number, wait=True)
        end.set()
        thread.join()
        assert not problems
        assert found == sorted(found)
