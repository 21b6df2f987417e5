"""Saving with a full disk or too little memory: existing snapshots stay, and saving resumes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training import arena
from ciuic.training.writer import housekeeping

STATE_BYTES = 12 << 20

needs_mount = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


class Noise:
    """State of random numbers, of which the repository holds no chunk."""

    def __init__(self) -> None:
        self.value = np.zeros(0, "u1")
        self.change()

    def change(self) -> None:
        self.value = np.frombuffer(os.urandom(STATE_BYTES), "u1")

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@contextmanager
def _disk(point: Path, size: str) -> Iterator[Path]:
    point.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(point)], check=True, timeout=60
    )
    try:
        yield point
    finally:
        subprocess.run(["umount", "-l", str(point)], check=True, timeout=60)


def _assert_undamaged(save_dir: Path, epochs: list[int]) -> None:
    with SnapshotManager(save_dir) as manager:
        listed = manager.list_snapshots()
        assert [one.facts.epoch for one in listed] == epochs
    with Repository.open(save_dir) as repository:
        for one in repository.snapshots.list():
            assert housekeeping.read_back(repository, one.id) == ""


@needs_mount
def test_a_full_disk_takes_nothing_away_and_is_got_over(tmp_path: Path) -> None:
    """Existing snapshots survive a disk filled by another program, and saving resumes with free space."""
    with _disk(tmp_path / "disk", "64m") as disk:
        manager = SnapshotManager(disk / "snapshots")
        state = Noise()
        ballast = disk / "ballast"
        for epoch in range(4):
            state.change()
            if epoch == 2:
                ballast.write_bytes(bytes(32 << 20))
            if epoch == 3:
                ballast.unlink()
            save = manager.save_snapshot(state, epoch=epoch, wait=True)
            assert save is not None
            assert (save.error or "") == ("No space left on device" if epoch == 2 else "")
        manager.close()
        assert (manager.stats.saved, manager.stats.failed) == (3, 1)
        _assert_undamaged(disk / "snapshots", [3, 1, 0])


@needs_mount
def test_expired_snapshots_are_removed_on_a_full_disk(tmp_path: Path) -> None:
    """Expired snapshots are removed for room in the middle of rapid saves, and nothing is lost."""
    with _disk(tmp_path / "disk", "70m") as disk:
        manager = SnapshotManager(disk / "snapshots", max_snapshots=3)
        state = Noise()
        for epoch in range(9):
            state.change()
            save = manager.save_snapshot(state, epoch=epoch, wait=True)
            assert save is not None
            assert save.error is None
        manager.close()
        _assert_undamaged(disk / "snapshots", [8, 7, 6])


def test_memory_that_is_not_there_costs_a_snapshot_and_not_the_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory that cannot be had costs a snapshot and not the training, and is not requested at every step."""
    left: list[int | None] = [1 << 20]
    queries = []

    def memory_left() -> int | None:
        queries.append(1)
        return left[0]

    monkeypatch.setattr(arena, "memory_left", memory_left)
    model = Model()
    optimizer = Optimizer(model)
    with SnapshotManager(tmp_path / "snapshots", every_steps=2) as manager:
        manager.register(model=model, optimizer=optimizer)
        for _ in range(12):
            optimizer.step()
        assert manager.stats.failed >= 1
        assert "not enough memory" in manager.stats.last_error
        assert len(queries) < 6
        left[0] = None
        assert manager.save_snapshot(wait=True) is not None
    assert [one.facts.step for one in manager.list_snapshots()] == [12]


def test_a_retention_that_will_not_fit_is_reported_after_the_first_step(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A retention that will not fit the disk is reported after the first step, not when the disk is full."""
    model = Model()
    optimizer = Optimizer(model)
    with SnapshotManager(tmp_path / "snapshots", interval="1h", max_snapshots=10**9) as manager:
        manager.register(model=model, optimizer=optimizer)
        optimizer.step()
        found = manager.forecast
    assert found is not None
    assert found.size_bytes > 200_000 * 8 * 3
    assert "1000000001 snapshots of" in caplog.text
