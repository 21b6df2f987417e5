"""Objects prepared by Accelerate, killed and resumed, end with the same bits."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.late_modules import skipped_without
from support.runs import assert_goes_on, on_two_ranks
from support.warm_python import WarmPython

pytestmark = skipped_without("torch", "accelerate")

SCRIPT = """
import sys, torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset
from ciuic import SnapshotManager
from ciuic.integrations.accelerate import register

class Seen:
    total = 0.0
    def state_dict(self): return {"total": self.total}
    def load_state_dict(self, state): self.total = state["total"]

set_seed(1)
x = torch.rand(40, 8)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.Dropout(0.3), torch.nn.Linear(32, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)
loader = DataLoader(TensorDataset(x, (x.sum(1) > 4).long()), batch_size=4, shuffle=True)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2,
                          dataloader_config=DataLoaderConfiguration(use_seedable_sampler=SEEDABLE))
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
seen = Seen()
accelerator.register_for_checkpointing(seen)
manager = SnapshotManager(sys.argv[1], every_steps=2)
register(manager, accelerator)
resumed = manager.resume()
for epoch in range(resumed.epoch if resumed else 0, 4):
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            seen.total += float(loss.detach())
if not resumed or manager.step > resumed.step:
    manager.save_snapshot(wait=True)
FACTS = [manager.step, seen.total, scheduler.get_last_lr(), accelerator.step]
"""


def test_prepared_objects_resume_to_the_same_bits(warm_torch: WarmPython, tmp_path: Path) -> None:
    """Accumulated gradients, schedule, custom object and shuffled loaders resume to the same bits.

    On one process and on two.
    """
    scripts = {}
    for seedable in (True, False):
        script = tmp_path / f"seedable_{seedable}.py"
        script.write_text(SCRIPT.replace("SEEDABLE", str(seedable)))
        scripts[script] = (7, 5)
    two = on_two_ranks(script, tmp_path)
    scripts[two] = (4,)
    found = assert_goes_on(
        "torch accelerate ciuic.integrations.accelerate",
        scripts,
        tmp_path,
        elsewhere=(script, 7),
        python=warm_torch,
    )
    for uninterrupted, *_, last, again in found.values():
        assert uninterrupted["facts"] == last["facts"] == again["facts"]
    assert [uninterrupted["steps"] for uninterrupted, *_ in found.values()] == [20, 20, 12]


def test_loaders_with_a_state_of_their_own_continue_at_their_position(
    warm_torch: WarmPython, tmp_path: Path
) -> None:
    """The position is the loader's own with use_stateful_dataloader, and the pass that seeds its sampler."""
    pytest.importorskip("torchdata.stateful_dataloader", reason="torchdata is not installed")
    scripts = {}
    for seedable in (True, False):
        script = tmp_path / f"stateful_{seedable}.py"
        text = SCRIPT.replace("SEEDABLE", f"{seedable}, use_stateful_dataloader=True")
        # No pass is counted by the manager: the loader's own number of it has come back.
        script.write_text(
            text.replace("range(resumed.epoch if resumed else 0, 4)", "range(loader.iteration, 4)")
        )
        scripts[script] = (7, 5)
    found = assert_goes_on(
        "torch accelerate torchdata ciuic.integrations.accelerate", scripts, tmp_path, python=warm_torch
    )
    for uninterrupted, *_, last, again in found.values():
        assert uninterrupted["facts"] == last["facts"] == again["facts"]
