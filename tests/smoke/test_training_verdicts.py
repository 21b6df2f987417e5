"""Verdicts on checkpoints that torch and its distributed checkpoints write."""

from __future__ import annotations

import io
import os
import random
from pathlib import Path

import pytest
from support.checkpoint_files import FORMATS, MODES, MemoryFile, damaged, watch
from support.live_source import LiveDirectory

from ciuic.verdicts.verdict import checkpoints_in, judge_file

torch = pytest.importorskip("torch")


@pytest.mark.parametrize("name", ["torch", "old-torch"])
def test_whole_files_of_torch_are_good_and_damaged_ones_are_not(name: str) -> None:
    """What torch.save writes, in both formats, is GOOD; cut, allocated or with a hole it is not."""
    one = FORMATS[name]
    for seed in range(20):
        rng = random.Random(seed)
        whole = one.make(rng)
        assert judge_file(MemoryFile(b"a" + one.suffix, whole)).is_good
        for what, data in damaged(rng, whole):
            assert data == whole or not judge_file(MemoryFile(b"a" + one.suffix, data)).is_good, (seed, what)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["torch", "old-torch"])
def test_no_file_of_a_killed_torch_is_called_good(name: str, mode: str, tmp_path: Path) -> None:
    """No torn file of a killed writer is GOOD, and every whole one that no process had open is."""
    found = watch(name, mode, 3, 6, tmp_path)
    assert not found.wrong
    assert found.whole_good == found.whole


def test_a_torch_file_without_checksums_is_judged_by_its_structure() -> None:
    """With checksums switched off a file is GOOD, and one with a hole is not."""
    import io

    torch.serialization.set_crc32_options(False)
    try:
        into = io.BytesIO()
        torch.save({"a": torch.rand(9000) + 1}, into)
    finally:
        torch.serialization.set_crc32_options(True)
    whole = into.getvalue()
    assert judge_file(MemoryFile(b"a.pt", whole)).is_good
    assert judge_file(MemoryFile(b"a.pt", whole[:8192] + bytes(8192) + whole[16384:])).state == "UNKNOWN"


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_distributed_checkpoint_needs_its_metadata_and_data(tmp_path: Path) -> None:
    """What torch.distributed.checkpoint writes is GOOD, and TORN without its metadata or the end of its data."""
    import torch.distributed.checkpoint as dcp

    state = {"a": torch.rand(50, 50) + 1, "nested": {"b": torch.rand(3) + 1}, "step": 5}
    dcp.save(state, checkpoint_id=str(tmp_path), no_dist=True)
    here = LiveDirectory(os.fsencode(tmp_path))
    (found,) = checkpoints_in(here)
    assert found.verdict[::2] == ("GOOD", "dcp"), found.verdict
    data = tmp_path / "__0_0.distcp"
    data.write_bytes(data.read_bytes()[:-1])
    (found,) = checkpoints_in(here)
    assert found.verdict.state == "TORN"
    (tmp_path / ".metadata").unlink()
    (found,) = checkpoints_in(here)
    assert found.verdict.state == "TORN"


@pytest.mark.parametrize("is_zip", [True, False])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16", "bfloat16", "complex64"])
def test_numbers_of_torch_that_are_not_finite_are_counted(kind: str, is_zip: bool) -> None:
    """In weights and states of optimizers of every kind; not in masks, nor the best score of a training that begins."""
    from ciuic.verdicts.not_finite import NumberBudget

    weights = torch.nn.Parameter(torch.ones(100, 3, dtype=getattr(torch, kind)))
    optimizer = torch.optim.Adam([weights])
    weights.real.sum().backward()
    optimizer.step()
    mask = torch.full((8, 8), -float("inf")).triu(1)
    state = {
        "model": {"w": weights, "mask": mask},
        "optimizer": optimizer.state_dict(),
        "callbacks": {"best_score": torch.tensor(float("inf")), "rng": torch.get_rng_state()},
    }
    for expected in (0, 4):
        into = io.BytesIO()
        torch.save(state, into, _use_new_zipfile_serialization=is_zip)
        verdict = judge_file(MemoryFile(b"a.pt", into.getvalue()), budget=NumberBudget(1 << 30))
        # Old files end with one of their tensors, which may have zeros there.
        assert verdict.state != "TORN"
        assert verdict.not_finite == expected
        moments = optimizer.state[weights]["exp_avg"]
        moments.real[:2, 0] = float("nan")
        weights.data.real[5:7, 1] = float("inf")
