"""Accelerate's `save_state` and `load_state` over a repository: calls, directories and results as without it."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import skipped_without
from support.warm_python import WarmPython

pytestmark = [pytest.mark.slow, skipped_without("torch", "accelerate")]

SCRIPT = """
import hashlib, json, os, sys
import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

project, phase, ours = sys.argv[1], sys.argv[2], sys.argv[3] == "ciuic"

class Seen:
    total = 0.0
    def state_dict(self): return {"total": self.total}
    def load_state_dict(self, state): self.total = state["total"]

set_seed(1)
accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration(project, automatic_checkpoint_naming=True, total_limit=2))
if ours:
    from ciuic.integrations.accelerate import store_states
    manager = store_states(os.path.join(project, "snapshots"), accelerator, max_snapshots=5)
x = torch.rand(48, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 4).long()), batch_size=4)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
seen, hooked = Seen(), []
accelerator.register_for_checkpointing(seen)
accelerator.register_save_state_pre_hook(lambda models, weights, where: hooked.append(os.path.basename(where)))

def train(first, last):
    for number, (inputs, targets) in enumerate(loader):
        if first <= number < last:
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step(); scheduler.step(); optimizer.zero_grad()
            seen.total += float(loss.detach())

def digest():
    weights = b"".join(one.detach().numpy().tobytes() for one in accelerator.unwrap_model(model).parameters())
    return [hashlib.sha256(weights).hexdigest(), seen.total, scheduler.get_last_lr(), torch.rand(1).item()]

if phase == "save":
    for number in range(3):
        train(number, number + 1)
        returned = accelerator.save_state()
    result = {"returned": os.path.basename(returned), "hooked": hooked}
else:
    accelerator.load_state(os.path.join(project, "checkpoints", "checkpoint_1") if phase == "named" else None)
    result = {}
    if phase == "named":
        train(2, 3)
train(3, 5)
result["end"] = digest()
if ours:
    manager.close()
if accelerator.is_main_process:
    with open(os.path.join(project, f"{phase}.json"), "w") as file:
        json.dump(result, file)
accelerator.wait_for_everyone()
accelerator.end_training()
"""


@pytest.fixture(scope="module")
def python() -> Iterator[WarmPython]:
    with WarmPython("torch", "torch._dynamo", "accelerate", "ciuic.training.manager") as one:
        yield one


def run(
    python: WarmPython, script: Path, project: Path, phase: str, how: str, processes: int
) -> dict[str, Any]:
    """Run a phase on one or more processes and return its result."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    given = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "WORLD_SIZE": str(processes),
        "LOCAL_WORLD_SIZE": str(processes),
    }
    ranks = []
    for rank in range(processes):
        own = {**given, "RANK": str(rank), "LOCAL_RANK": str(rank)} if processes > 1 else {}
        ranks.append(
            python.start(
                ["-W", "ignore", script, project, phase, how],
                env={**os.environ, "OMP_NUM_THREADS": "1", **own},
            )
        )
    printed = ["".join(rank.communicate(timeout=240)) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * processes, "\n".join(printed)[-6000:]
    result: dict[str, Any] = json.loads((project / f"{phase}.json").read_text())
    return result


@pytest.fixture
def script(tmp_path: Path) -> Path:
    made = tmp_path / "train.py"
    made.write_text(SCRIPT)
    return made


@pytest.mark.parametrize("processes", [1, 2])
def test_calls_work_as_without_ciuic(
    python: WarmPython, processes: int, script: Path, tmp_path: Path
) -> None:
    """The same program saves, loads the newest and a named state, and ends with the bits that Accelerate's files give."""
    found = {}
    phases = ("save", "newest", "named")
    for how in ("accelerate", "ciuic"):
        project = tmp_path / how
        found[how] = {phase: run(python, script, project, phase, how, processes) for phase in phases}
        assert sorted(os.listdir(project / "checkpoints")) == ["checkpoint_1", "checkpoint_2"]
    assert found["ciuic"] == found["accelerate"]
    assert all(found["ciuic"][phase]["end"] == found["ciuic"]["save"]["end"] for phase in phases)
    assert found["ciuic"]["save"]["hooked"] == ["checkpoint_0", "checkpoint_1", "checkpoint_2"]
    files = os.listdir(tmp_path / "ciuic/checkpoints/checkpoint_2")
    assert sorted(files) == ["ciuic.json", "custom_checkpoint_0.pkl"]


def test_directories_of_accelerate_are_loaded_too(python: WarmPython, script: Path, tmp_path: Path) -> None:
    """A state that Accelerate has saved by itself is loaded by the same call after the program has moved."""
    saved = run(python, script, tmp_path / "run", "save", "accelerate", 1)
    assert run(python, script, tmp_path / "run", "newest", "ciuic", 1)["end"] == saved["end"]


PREPARED_LATER = """
import pickle, sys
import torch
from accelerate import Accelerator
from ciuic.integrations.accelerate import store_states

class Count:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]

top, how = sys.argv[1], sys.argv[2]
accelerator = Accelerator(cpu=True)
manager = store_states(top + "/snapshots", accelerator)
first = accelerator.prepare(torch.nn.Linear(2, 2))
accelerator.save_state(top + "/one")
if how == "more":
    second, count = accelerator.prepare(torch.nn.Linear(3, 3)), Count()
    accelerator.register_for_checkpointing(count)
    count.value = 7
else:
    accelerator.free_memory()
    second, count = accelerator.prepare(torch.nn.Linear(2, 2)), Count()
    count.value = 7
weights = second.weight.detach().clone()
accelerator.save_state(top + "/two")
torch.nn.init.zeros_(second.weight)
if how == "more":
    count.value = 0
accelerator.load_state(top + "/two")
assert torch.equal(second.weight, weights)
assert count.value == 7
# Fewer than in the snapshot before.
if how == "more":
    accelerator.free_memory()
    accelerator._custom_objects.clear()
    third = accelerator.prepare(torch.nn.Linear(5, 5))
    accelerator.save_state(top + "/three")
    accelerator.load_state(top + "/three")
copied = pickle.loads(pickle.dumps(accelerator))
assert type(copied) is Accelerator
assert len(copied._models) == 1
try:
    accelerator.load_state(top + "/two", map_location="nowhere")
except TypeError as error:
    assert "nowhere" in str(error)
else:
    raise SystemExit("an unknown place was accepted")
manager.close()
"""


@pytest.mark.parametrize("how", ["more", "others"])
def test_what_is_prepared_between_two_saves_is_saved(python: WarmPython, how: str, tmp_path: Path) -> None:
    """A save has what the accelerator knows at that moment; the accelerator pickles, and checks its arguments."""
    done = python.run(["-W", "ignore", "-c", PREPARED_LATER, tmp_path, how], timeout=240)
    assert done.returncode == 0, done.stderr
