"""Trainings of several ranks, some killed at any instant and all restarted, continue bit for bit."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule
from support.ranks_kill import WORLD, Trial

from ciuic import SnapshotManager

ddp_training: Any = LateModule("support.ddp_training")
ranks_apart: Any = LateModule("support.ranks_apart")
sharded_training: Any = LateModule("support.sharded_training")
pytestmark = pytest.mark.usefixtures("torch_distributed")


@pytest.mark.slow
def test_ranks_that_are_killed_go_on_with_their_own_state(tmp_path: Path) -> None:
    """Each rank resumes a whole snapshot with its own generators and data after any ranks are killed.

    One rank, the one that saves, or all are killed. Batch statistics are each rank's own too.
    """
    trial = Trial(tmp_path, ddp_training.train, random.Random(3), longest_seconds=4.0)
    expected = trial.uninterrupted()
    assert expected[0]["digest"] != expected[1]["digest"], "the ranks do not differ, so this says nothing"
    for victims in ((0,), (1,), (0, 1)):
        trial.killed(victims)
    assert trial.finished() == expected


@pytest.mark.full
@pytest.mark.slow
def test_ranks_that_are_killed_while_they_store_shards_go_on(tmp_path: Path) -> None:
    """Ranks killed while shards are stored leave no partial snapshot, and the run ends with the same bits."""
    trial = Trial(tmp_path, sharded_training.train, random.Random(4), longest_seconds=4.0)
    expected = trial.uninterrupted()
    for victims in ((0,), (1,)):
        trial.killed(victims)
        assert not trial.read_back()[1]
    assert trial.finished() == expected


@pytest.mark.slow
@pytest.mark.full
def test_ranks_that_are_killed_while_they_share_a_snapshot_go_on(tmp_path: Path) -> None:
    """Killed ranks leave no partial snapshot with `SnapshotManager` over FSDP2, and resume exactly."""
    trial = Trial(tmp_path, sharded_training.train_managed, random.Random(5), longest_seconds=3.0)
    expected = trial.uninterrupted()
    assert expected[0]["own"] != expected[1]["own"]
    for victims in ((0,), (1,), (0, 1)):
        trial.killed(victims)
        assert not trial.read_back()[1]
    assert trial.finished() == expected


@pytest.mark.full
@pytest.mark.slow
def test_ranks_that_are_killed_on_hosts_of_their_own_go_on(tmp_path: Path) -> None:
    """Killed ranks that store on hosts of their own resume a whole set exactly, whatever the others have stored since."""
    trial = Trial(tmp_path, ranks_apart.train_apart, random.Random(6), longest_seconds=3.0)
    expected = trial.uninterrupted()
    for victims in ((0,), (1,)):
        trial.killed(victims)
        assert not trial.read_back()[1]
    assert trial.finished() == expected


def test_no_snapshot_lacks_a_rank_that_died(tmp_path: Path) -> None:
    """A rank that ends during a save leaves the previous snapshot the newest, which resumes exactly."""
    result = tmp_path / "result"
    ranks = sharded_training.Ranks(
        tmp_path / "logs",
        WORLD,
        ddp_training.dies_in_a_save,
        str(tmp_path / "snapshots"),
        str(result),
    )
    assert ranks.wait() == [0, 9], ranks.log_of(0)
    found = json.loads(result.read_text())
    assert [world for _, world in found["snapshots"]] == [WORLD], ranks.log_of(0)
    assert found["failed"] >= 1
    assert "the other ranks are gone" in ranks.log_of(0)


def test_ranks_agree_on_the_step_of_a_snapshot(tmp_path: Path) -> None:
    """A snapshot due on one rank is saved by all at the next boundary; a requested one is of all ranks."""
    result = tmp_path / "result"
    sharded_training.Ranks(
        tmp_path / "logs", WORLD, ddp_training.agree, str(tmp_path / "snapshots"), str(result)
    ).check()
    for rank in range(WORLD):
        found = json.loads(Path(f"{result}-{rank}").read_text())
        assert found == {"steps": [6], "saves": rank == 0, "epoch": 9, "world": WORLD}


def test_rank_0_alone_may_ask_for_snapshots(tmp_path: Path) -> None:
    """A save on rank 0 alone waits for the others once and holds rank 0's state.

    Automatic snapshots hold every rank's state.
    """
    save_dir, result = str(tmp_path / "snapshots"), tmp_path / "result"
    logs = sharded_training.Ranks(
        tmp_path / "logs", WORLD, ddp_training.rank_0_asks, save_dir, str(result)
    ).check()
    saved = json.loads(result.read_text())
    assert [world for tags, world in saved if "asked" in tags] == [1, 1, 1]
    assert [world for tags, world in saved if "asked" not in tags] == [WORLD] * 3
    assert logs[0].count("is called on rank 0 alone at ddp_training.py") == 1


def test_rank_0_alone_may_register(tmp_path: Path) -> None:
    """Rank 0, if it alone registers, saves on request and by its rules, and no rank waits for another."""
    result = tmp_path / "result"
    sharded_training.Ranks(
        tmp_path / "logs",
        WORLD,
        ddp_training.rank_0_registers,
        str(tmp_path / "snapshots"),
        str(result),
    ).check(60)
    assert len(json.loads(result.read_text())) > 4


def test_rank_0_alone_may_have_a_manager(tmp_path: Path) -> None:
    """A manager with distributed=False waits for no rank."""
    result = tmp_path / "result"
    sharded_training.Ranks(
        tmp_path / "logs",
        WORLD,
        ddp_training.manager_on_rank_0,
        str(tmp_path / "snapshots"),
        str(result),
    ).check()
    with SnapshotManager(tmp_path / "snapshots") as manager:
        assert manager.list_snapshots()[0].id == result.read_text()
