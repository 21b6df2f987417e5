"""`SnapshotManager` with a state that is sharded over ranks: FSDP2 on the CPU, gloo, real processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule
from support.rank_processes import Ranks

from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training.writer.housekeeping import read_back

pipelined_training: Any = LateModule("support.pipelined_training")
sharded_training: Any = LateModule("support.sharded_training")

pytestmark = pytest.mark.filterwarnings("ignore")


def test_saved_by_two_ranks_it_is_resumed_by_three_by_one_and_by_none(tmp_path: Path) -> None:
    """Weights and moments come back to the bit on other numbers of ranks, and without ranks as a whole."""
    save_dir, result = str(tmp_path / "snapshots"), tmp_path / "result"
    Ranks(tmp_path / "save", 2, sharded_training.save_managed, save_dir, str(result)).check()
    saved = json.loads(result.read_text())
    assert saved["world"] == 2
    for world in (3, 1):
        here = tmp_path / f"by-{world}"
        Ranks(here, world, sharded_training.resume_managed, save_dir, str(result)).check()
        found = json.loads(result.read_text())
        assert found == {"id": saved["id"], "step": 12, "digest": saved["digest"]}
    sharded_training.resume_managed(0, 0, save_dir, str(result))
    assert json.loads(result.read_text())["digest"] == saved["digest"]
    with SnapshotManager(save_dir) as manager:
        state = manager.load_latest_snapshot()
    assert state is not None
    assert state["note"] == {"a": 1.5}
    assert state["epoch"] == 7
    assert state["model_state_dict"]["0.weight"].shape == (1026, 16)
    with Repository.open(save_dir) as repository:
        assert not read_back(repository, saved["id"])


def test_a_sharded_state_goes_through_a_compiled_model(tmp_path: Path) -> None:
    """Ranks resume their parts of a compiled model from a plain one, and the other way round, to the bit."""
    result = tmp_path / "result"
    Ranks(
        tmp_path / "ranks", 2, sharded_training.through_a_compiled_model, str(tmp_path / "s"), str(result)
    ).check()
    assert len(set(json.loads(result.read_text()))) == 1


@pytest.mark.parametrize("alike", [True, False])
def test_stages_of_a_pipeline_train_on_and_are_not_saved(tmp_path: Path, alike: bool) -> None:
    """Stages with equal or other parameters are refused at each save, and the training goes on to its end."""
    result = tmp_path / "result"
    Ranks(
        tmp_path / "ranks", 2, pipelined_training.train, str(tmp_path / "snapshots"), str(result), alike
    ).check()
    found = [json.loads(Path(f"{result}-{rank}").read_text()) for rank in range(2)]
    assert [(one["steps"], one["resumed"], one["saved"]) for one in found] == [(6, False, 0)] * 2
    assert "on rank 1 than on rank 0" in found[0]["error"]
