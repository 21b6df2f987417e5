"""States that are sharded over ranks (FSDP2 on the CPU, gloo, real processes): by `SnapshotManager`, and by a remote to ranks of another host."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import LateModule
from support.rank_processes import Ranks

from ciuic import SnapshotManager
from ciuic.remote.sealing.key_slots import make_key_file
from ciuic.repository import Repository
from ciuic.training.writer.housekeeping import read_back

pipelined_training: Any = LateModule("support.pipelined_training")
sharded_remote: Any = LateModule("support.sharded_remote")
sharded_training: Any = LateModule("support.sharded_training")
pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("torch_distributed")]


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


@pytest.fixture
def remote(tmp_path: Path) -> tuple[str, str]:
    """Provide the URL of a place for a remote, and a key file."""
    (tmp_path / "nas").mkdir()
    make_key_file(str(tmp_path / "key"))
    return f"file://{tmp_path / 'nas'}", str(tmp_path / "key")


def test_ranks_resume_elsewhere_each_from_its_own_part(tmp_path: Path, remote: tuple[str, str]) -> None:
    """FSDP2 ranks that made the remote at once, two or three, resume from the URL alone to the bit, and none reads the whole state.

    As many ranks as before have their own state back too.
    """
    lost, result = tmp_path / "lost", tmp_path / "result"
    Ranks(tmp_path / "save", 2, sharded_remote.save_managed, str(lost), *remote, str(result)).check()
    saved = json.loads(result.read_text())
    own = [(tmp_path / f"result-{rank}").read_text() for rank in range(2)]
    shutil.rmtree(lost)
    for world in (2, 3):
        host = tmp_path / f"host-{world}"
        Ranks(
            host / "logs", world, sharded_remote.resume_managed, str(host), *remote, str(host / "found")
        ).check()
        found = [json.loads((host / f"found-{rank}").read_text()) for rank in range(world)]
        for one in found:
            assert (one["id"], one["step"], one["digest"]) == (saved["id"], 12, saved["digest"])
        assert world == 3 or [one["own"] for one in found] == own
        # A rank reads its part and the first block of each file, which has the header; blocks are read whole.
        assert all(0 < one["wanted"] < saved["size"] for one in found), [one["wanted"] for one in found]


def test_checkpoints_are_loaded_elsewhere(tmp_path: Path, remote: tuple[str, str]) -> None:
    """What both writers of torch.distributed.checkpoint saved is loaded by another number of ranks, without a directory."""
    lost, result = tmp_path / "lost", tmp_path / "result"
    Ranks(tmp_path / "save", 2, sharded_remote.save_checkpoints, str(lost), *remote, str(result)).check()
    saved = json.loads(result.read_text())
    shutil.rmtree(lost)
    host = tmp_path / "host"
    Ranks(
        host / "logs", 1, sharded_remote.load_checkpoints, str(host), str(lost), *remote, str(result)
    ).check()
    newest, named, at_path = json.loads(result.read_text())
    assert newest[0] in (saved["id"], saved["path"])
    assert named == [saved["id"], saved["digest"]]
    assert at_path == [saved["path"], saved["digest"]]
    assert newest[1] == saved["digest"]
