"""DeepSpeed on the CPU over gloo: ZeRO 1 to 3 save to a repository, and resume to the bits of a run without a break."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")
pytest.importorskip("deepspeed", reason="DeepSpeed is not installed")

SCRIPT = """
import hashlib, json, os, sys
stage, half, directory, phase = int(sys.argv[1]), sys.argv[2] == "bf16", sys.argv[3], sys.argv[4]
rank = int(os.environ["RANK"])
import torch, deepspeed
from ciuic.integrations.deepspeed import export_checkpoint, save_in, snapshot_checkpoints
torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(64, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 7))
deepspeed.init_distributed("gloo")
config = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
    "zero_optimization": {"stage": stage},
    "bf16": {"enabled": half},
}
repository = os.path.join(directory, "repository")
with snapshot_checkpoints(repository):
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
assert type(engine.checkpoint_engine).__name__ == "SnapshotCheckpointEngine"
save_in(engine, repository, max_snapshots=3)

def step(number):
    x = torch.randn(4, 64, generator=torch.Generator().manual_seed(100 * number + rank))
    loss = engine(x.bfloat16() if half else x).float().square().mean()
    engine.backward(loss)
    engine.step()
    return float(loss.detach())

def digest():
    hasher = hashlib.sha256()
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        for parameter in engine.module.parameters():
            hasher.update(parameter.detach().float().numpy().tobytes())
    return hasher.hexdigest()

begun = 0
if phase == "resume":
    path, client = engine.load_checkpoint(os.path.join(directory, "run"))
    assert path and client["mine"] == [1, (2, 3)], client
    begun = engine.global_steps
else:
    for number in range(3):
        step(number)
    engine.save_checkpoint(os.path.join(directory, "run"), client_state={"mine": [1, (2, 3)]})
    begun = 3
at = digest()
losses = [step(number) for number in range(begun, 6)]
end = digest()
if rank == 0:
    if phase == "resume":
        export_checkpoint(os.path.join(directory, "run/global_step3"), os.path.join(directory, "exported/global_step3"))
    with open(os.path.join(directory, phase), "w") as file:
        json.dump([begun, at, losses, end], file)
"""


def run(script: Path, *arguments: str) -> None:
    """Run the script on two ranks, and fail with what they printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = {
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    printed = [rank.communicate(timeout=280)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], "\n".join(printed)[-6000:]


@pytest.mark.parametrize(
    ("stage", "dtype"), [(0, "fp32"), (1, "bf16"), (2, "fp32"), (3, "fp32"), (3, "bf16")]
)
def test_a_run_resumes_to_the_same_bits(stage: int, dtype: str, tmp_path: Path) -> None:
    """Two ranks resume at the step that was saved, with its weights, and end with the bits of the first run."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    found: dict[str, Any] = {}
    for phase in ("save", "resume"):
        run(script, str(stage), dtype, str(tmp_path), phase)
        found[phase] = json.loads((tmp_path / phase).read_text())
    assert found["resume"] == found["save"]
    assert found["save"][0] == 3
    files = {file.name for file in (tmp_path / "exported/global_step3").iterdir()}
    assert files == {file.name for file in (tmp_path / "run/global_step3").glob("*.pt")}
    if stage:
        from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

        weights = get_fp32_state_dict_from_zero_checkpoint(str(tmp_path / "exported"), tag="global_step3")
        assert weights["2.weight"].shape == (7, 1024)
