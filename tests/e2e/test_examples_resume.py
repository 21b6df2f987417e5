"""Examples that no other test runs, unchanged: the first run trains, is killed, and the next continues."""

from __future__ import annotations

from pathlib import Path

from support.late_modules import skipped_without
from support.runs import EXAMPLES, assert_goes_on
from support.warm_python import WarmPython

pytestmark = skipped_without("torch")

ELSEWHERE = {"hf_trainer.py", "keras_fit.py", "lightning_fit.py"}
"""Examples run by tests/e2e/test_integration_*.py."""


def test_plain_pytorch_killed_twice_ends_with_the_same_bits(warm_torch: WarmPython, tmp_path: Path) -> None:
    """The plain PyTorch example, killed twice, ends with an undisturbed run's bits and nothing left to do."""
    assert_goes_on("torch", {EXAMPLES / "plain_pytorch.py": (9, 7)}, tmp_path, python=warm_torch)


TWO_RANKS = """
import os, runpy, socket, sys
with socket.create_server(("127.0.0.1", 0)) as free:
    port = free.getsockname()[1]
other = os.fork()
os.environ |= {"RANK": str(int(not other)), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
model = runpy.run_path(EXAMPLE)["model"]
if not other:
    os._exit(0)
os.waitpid(other, 0)
"""


def test_ddp_killed_in_an_epoch_continues_with_it(warm_torch: WarmPython, tmp_path: Path) -> None:
    """The DDP example of two ranks over gloo, both killed in the third epoch, continues with that epoch."""
    script = tmp_path / "two_ranks.py"
    script.write_text(TWO_RANKS.replace("EXAMPLE", repr(str(EXAMPLES / "ddp.py"))))
    found = assert_goes_on(
        "torch torch.distributed torch.nn.parallel", {script: (25,)}, tmp_path, python=warm_torch
    )
    # A snapshot that came while two were being written is left out.
    assert found[script][2]["steps"] <= 20


def test_no_example_is_left_out() -> None:
    """Every example has a test."""
    here = {"plain_pytorch.py", "ddp.py"}
    assert {path.name for path in EXAMPLES.glob("*.py")} == here | ELSEWHERE
