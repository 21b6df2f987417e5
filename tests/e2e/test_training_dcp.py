"""States sharded over ranks through torch.distributed.checkpoint: FSDP2 on the CPU, gloo, real processes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule, torch
from support.rank_processes import Ranks

from ciuic.errors import NotFound
from ciuic.repository import Repository
from ciuic.training.writer.housekeeping import read_back

sharded_training: Any = LateModule("support.sharded_training")
storage: Any = LateModule("ciuic.training.dcp.storage")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_saved_by_two_ranks_it_is_loaded_by_one_and_by_four(tmp_path: Path) -> None:
    """Weights, moments and values saved by two ranks come back to the bit on one and on four."""
    save_dir, result = str(tmp_path / "snapshots"), tmp_path / "result"
    Ranks(tmp_path / "save", 2, sharded_training.save_in_both_ways, save_dir, str(result)).check()
    saved = json.loads(result.read_text())
    first, second = saved["digests"]
    expected = [["'later'", second], ["(1, 2.5, inf, 'x')", first]]
    Ranks(tmp_path / "load", 4, sharded_training.load_both, save_dir, str(tmp_path / "four")).check()
    assert json.loads((tmp_path / "four").read_text()) == expected
    sharded_training.load_both(0, 1, save_dir, str(tmp_path / "one"))
    assert json.loads((tmp_path / "one").read_text()) == expected
    with Repository.open(save_dir) as repository:
        infos = repository.snapshots.list()
        assert [info.tags for info in infos] == [("dcp", "second"), ("dcp", "first")]
        assert infos[0].id == saved["id"]
        assert not read_back(repository, infos[0].id)


def test_a_rank_that_dies_in_the_middle_leaves_no_snapshot(tmp_path: Path) -> None:
    """A rank that dies leaves no snapshot, and the one before is loaded."""
    save_dir = str(tmp_path / "snapshots")
    ranks = Ranks(tmp_path / "ranks", 2, sharded_training.die_in_the_middle, save_dir, timeout_seconds=20)
    statuses = ranks.wait()
    assert statuses[1] == -9, ranks.log_of(1)
    assert statuses[0] != 0, ranks.log_of(0)
    with Repository.open(save_dir) as repository:
        assert [info.tags for info in repository.snapshots.list()] == [("dcp", "whole")]
    assert sharded_training.Sharded(1).load(storage.CiuicStorageReader(save_dir)) == 0


def test_a_damaged_checkpoint_is_passed_over(tmp_path: Path) -> None:
    """A damaged checkpoint is passed over with the reason; named, or without another, it is an error."""
    from torch.distributed import checkpoint as dcp

    writer = storage.CiuicStorageWriter(tmp_path / "snapshots")
    with pytest.raises(NotFound):
        storage.CiuicStorageReader(tmp_path / "snapshots").read_metadata()
    for number in range(2):
        state = {"weights": torch.full((70_000,), float(number)), "number": number}
        dcp.save(state, checkpoint_id=f"n{number}", storage_writer=writer, no_dist=True)
    writer.close()
    with Repository.open(tmp_path / "snapshots") as repository:
        newest = repository.snapshots.list()[0]
    Path(tmp_path, "snapshots", "snapshots", newest.id).write_bytes(b"torn")
    reader = storage.CiuicStorageReader(tmp_path / "snapshots")
    state = {"weights": torch.zeros(70_000), "number": -1}
    dcp.load(state, storage_reader=reader, no_dist=True)
    assert state["number"] == 0
    assert state["weights"].eq(0).all()
    assert [one.id for one in reader.passed_over] == [newest.id]


def test_nothing_that_was_stored_is_unpickled(tmp_path: Path) -> None:
    """Values that only pickle could store are refused by name, and no file of a checkpoint is a pickle."""
    from torch.distributed import checkpoint as dcp

    writer = storage.CiuicStorageWriter(tmp_path / "snapshots")
    with pytest.raises(dcp.CheckpointException, match=r"object\.thing"):
        dcp.save({"object": {"thing": object()}}, storage_writer=writer, no_dist=True)
    state = {"plain": {"a": torch.ones(3), "b": [1, {"c": (2, torch.full((2,), 7.0))}]}}
    dcp.save(state, storage_writer=writer, no_dist=True)
    writer.close()
    loaded = {"plain": {"a": torch.zeros(3), "b": [0, {"c": None}]}}
    dcp.load(loaded, storage_reader=storage.CiuicStorageReader(tmp_path / "snapshots"), no_dist=True)
    assert loaded["plain"]["b"][0] == 1
    assert loaded["plain"]["b"][1]["c"][1].eq(7).all()
    for file in (tmp_path / "snapshots" / "packs").iterdir():
        assert b"ctorch" not in file.read_bytes()
    assert "torch" in sys.modules
