"""The page docs/moving.md: each code block runs as it stands, twice, and the second run continues from the first."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
from support.ci import IN_CI
from support.warm_python import WarmPython

CHECKOUT = Path(__file__).parents[2]
PAGE = CHECKOUT / "docs/moving.md"
_MAX_LINES = 10

TORCH = """
import os, torch
from torch.utils.data import DataLoader, TensorDataset
torch.manual_seed(1)
x = torch.rand(16, 4)
loader = DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
counted = []
def train_epoch(model, optimizer, loader):
    for inputs, targets in loader:
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()
        counted.append(1)
"""
LIGHTNING = """
import os, lightning, torch
from torch.utils.data import DataLoader, TensorDataset
class Line(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 1)
    def training_step(self, batch, batch_idx):
        counted.append(1)
        return self.layer(batch[0]).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=1e-2)
counted = []
lightning.seed_everything(1)
model, loader = Line(), DataLoader(TensorDataset(torch.rand(16, 4)), batch_size=4)
quiet = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
"""
TRANSFORMERS = """
import os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed
set_seed(1)
counted = []
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=8, n_embd=8, n_layer=1, n_head=1, bos_token_id=0, eos_token_id=0))
model.register_forward_hook(lambda *_: counted.append(1))
tokens = torch.arange(16)[:, None] % 8 + torch.zeros(8, dtype=torch.long)
dataset = [{"input_ids": row, "labels": row} for row in tokens]
quiet = {"per_device_train_batch_size": 4, "report_to": "none", "disable_tqdm": True, "use_cpu": True}
"""
ARRAYS = """
import os, numpy
counted = []
params, device_get = {"w": numpy.zeros(4), "layers": [{"b": numpy.ones(2)}]}, lambda tree: tree
def train_step(params):
    counted.append(1)
    return {"w": params["w"] + 1, "layers": params["layers"]}
"""
RESULT = "\nprint('counted', len(counted))\n"


class Section(NamedTuple):
    """Needs of the blocks of a section, and the steps that they count."""

    prelude: str
    modules: tuple[str, ...]
    settings: tuple[str, str]
    """Variables of the first and of the second run."""
    steps: tuple[int, int]
    """Steps that the first and the second run take: fewer in the second, which continues."""


_EPOCHS = ("epochs = 1\n", "epochs = 3\n")
SECTIONS = {
    "torch.save": Section(TORCH, ("torch",), _EPOCHS, (4, 8)),
    "Lightning": Section(LIGHTNING, ("lightning",), _EPOCHS, (4, 8)),
    "Hugging Face": Section(TRANSFORMERS, ("transformers", "accelerate"), _EPOCHS, (4, 8)),
    "torch.distributed.checkpoint": Section(TORCH, ("torch.distributed.checkpoint",), ("", ""), (4, 4)),
    "Orbax": Section(ARRAYS, ("numpy",), ("steps = 2\n", "steps = 5\n"), (2, 3)),
}


def blocks(section: str) -> list[str]:
    """Return the code blocks of a section of the page, in order."""
    text = PAGE.read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    assert found is not None, section
    return re.findall(r"^```\n(.*?)^```", found[1], re.DOTALL | re.MULTILINE)


def run(python: WarmPython, modules: Iterable[str], runs: Sequence[tuple[Path, str]]) -> list[int]:
    """Run programs one after the other; return the number of steps that each counted."""
    jobs = {"modules": list(modules), "runs": [(os.fspath(place), code) for place, code in runs]}
    done = python.run(
        ["-W", "ignore", "-m", "support.run_blocks"],
        stdin=json.dumps(jobs).encode(),
        env={
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, (CHECKOUT, CHECKOUT / "tests"))),
            "HF_HUB_OFFLINE": "1",
        },
        timeout=280,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return [int(count) for count in re.findall(r"^counted (\d+)$", done.stdout, re.MULTILINE)]


@pytest.mark.parametrize("section", SECTIONS)
def test_blocks_run_and_continue(section: str, warm_torch: WarmPython, tmp_path: Path) -> None:
    """Each block, run twice on one directory, takes in the second run only the steps that the first did not take."""
    wanted = SECTIONS[section]
    runs: list[tuple[Path, str]] = []
    expected: list[int] = []
    for number, code in enumerate(blocks(section)):
        if missing := _missing((*wanted.modules, *(("orbax.checkpoint",) if "import orbax" in code else ()))):
            # It is still Python; what it needs is offered elsewhere.
            compile(code, PAGE.name, "exec")
            assert missing == "orbax.checkpoint" or not IN_CI, f"{missing} is not installed"
            continue
        place = tmp_path / str(number)
        place.mkdir()
        runs += [(place, settings + wanted.prelude + code + RESULT) for settings in wanted.settings]
        expected += wanted.steps
        if section == "torch.distributed.checkpoint":
            loaded = "\nassert state['step'] == 2, state" + RESULT
            runs.append((place, "before = 1\n" + wanted.prelude + code + loaded))
            expected.append(4)
    assert run(warm_torch, wanted.modules, runs) == expected


def _missing(modules: Iterable[str]) -> str:
    """Return the first module that is not installed."""
    for name in modules:
        found = None
        with contextlib.suppress(ModuleNotFoundError):
            found = importlib.util.find_spec(name)
        if found is None:
            return name
    return ""


def test_every_block_is_short_and_tested() -> None:
    """Every section of the page has a test, a block before and one after, of at most ten lines each."""
    text = PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^## (.+)$", text, re.MULTILINE) == list(SECTIONS)
    assert text.count("\n```\n") == 2 * sum(len(blocks(section)) for section in SECTIONS)
    for section in SECTIONS:
        found = blocks(section)
        assert len(found) >= 2
        assert all(len(block.splitlines()) <= _MAX_LINES for block in found), section
        assert "ciuic" not in found[0]
        assert all("ciuic" in block for block in found[1:])
