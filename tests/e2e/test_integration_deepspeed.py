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
from support.late_modules import skipped_without

pytestmark = skipped_without("torch", "deepspeed")

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


def run(script: Path, *arguments: str, ranks: int = 2) -> None:
    """Run the script on all ranks, and fail with what they printed."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = {
        "WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, str(script), *arguments],
            env={**os.environ, **given, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(ranks)
    ]
    printed = [process.communicate(timeout=280)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * ranks, "\n".join(printed)[-6000:]


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


TRAINER = """
import json, os, sys
directory, phase = sys.argv[3], sys.argv[4]
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
from ciuic.integrations.deepspeed import snapshot_checkpoints
set_seed(1)
config = {
    "zero_optimization": {"stage": 2}, "zero_allow_untested_optimizer": True, "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto", "gradient_clipping": "auto",
}
run = os.path.join(directory, "run")
args = TrainingArguments(run, num_train_epochs=2, per_device_train_batch_size=4, save_steps=3, save_strategy="steps",
                         report_to="none", disable_tqdm=True, deepspeed=config, save_total_limit=2, logging_steps=1)
model = GPT2LMHeadModel(GPT2Config(vocab_size=16, n_positions=8, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0))
counted = []
model.register_forward_hook(lambda *_: counted.append(1))
tokens = torch.arange(16)[:, None] % 16 + torch.zeros(8, dtype=torch.long)
trainer = Trainer(model, args, train_dataset=[{"input_ids": row, "labels": row} for row in tokens])
with snapshot_checkpoints(os.path.join(directory, "snapshots"), max_snapshots=2):
    trainer.train(resume_from_checkpoint=os.path.join(run, "checkpoint-6") if phase == "resume" else None)
engine = trainer.model_wrapped.checkpoint_engine
assert type(engine).__name__ == "SnapshotCheckpointEngine" and engine.last_id
if int(os.environ["RANK"]) == 0:
    total = [float(one.detach().double().sum()) for one in trainer.model.parameters()]
    losses = [one["loss"] for one in trainer.state.log_history if "loss" in one]
    with open(os.path.join(directory, phase), "w") as file:
        json.dump([len(counted), trainer.state.global_step, losses, total], file)
"""


def test_hugging_face_trainer_with_deepspeed(tmp_path: Path) -> None:
    """The Trainer saves and resumes ZeRO 2 by its own calls, takes the last steps alone, and ends with the same bits."""
    pytest.importorskip("transformers", reason="the extra `hf` is not installed")
    script = tmp_path / "train.py"
    script.write_text(TRAINER)
    for phase in ("save", "resume"):
        # One process: without an accelerator the Trainer does not distribute over several.
        run(script, "2", "fp32", str(tmp_path), phase, ranks=1)
    saved, resumed = (json.loads((tmp_path / phase).read_text()) for phase in ("save", "resume"))
    assert (saved[0], resumed[0]) == (8, 2)
    assert saved[1:] == resumed[1:]
