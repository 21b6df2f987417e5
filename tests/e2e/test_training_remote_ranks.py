"""Sharded states whose snapshots are on a remote: saved by the ranks of one host, loaded by those of another."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
if not torch.distributed.is_available():
    pytest.skip("this PyTorch has no torch.distributed", allow_module_level=True)

from support import sharded_remote  # noqa: E402
from support.sharded_training import Ranks  # noqa: E402

from ciuic.remote.sealing.key_slots import make_key_file  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore")


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
