"""Hugging Face's Trainer, killed and resumed, ends with the same bits and the same log."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.late_modules import skipped_without
from support.runs import EXAMPLES, assert_goes_on, on_two_ranks
from support.warm_python import WarmPython

pytestmark = [pytest.mark.slow, skipped_without("transformers", "accelerate")]

MODULES = "torch transformers transformers.trainer ciuic.integrations.transformers"
EXAMPLE = EXAMPLES / "hf_trainer.py"
COUNTING = """
from transformers.trainer_callback import ExportableState
class Counting(TrainerCallback, ExportableState):
    def __init__(self): self.evaluations = 0
    def on_evaluate(self, *args, **kwargs): self.evaluations += 1
    def state(self): return {"args": {}, "attributes": {"evaluations": self.evaluations}}
"""
RICHER = {
    "callbacks=[callback]": "callbacks=[callback, Counting()], eval_dataset=dataset[:8]",
    "import GPT2Config": "import TrainerCallback, GPT2Config",
    "callback = Snap": COUNTING + "callback = Snap",
    "num_train_epochs=3": "num_train_epochs=3, restore_callback_states_from_checkpoint=True, gradient_accumulation_steps=2, eval_strategy='steps', eval_steps=3,"
    "metric_for_best_model='eval_loss'",
    "every_steps=4": "every_steps=5",
    # A snapshot follows each checkpoint of the Trainer's own.
    'save_strategy="no"': "save_strategy='steps', save_steps=4",
}
FACTS = """
TIMES = ("runtime", "per_second", "train_loss")
FACTS = [{key: value for key, value in line.items() if not key.endswith(TIMES)} for line in trainer.state.log_history]
FACTS += [one.evaluations for one in trainer.callback_handler.callbacks if isinstance(one, Counting)]
"""


def test_a_trainer_that_is_killed_goes_on_to_the_same_bits(warm_torch: WarmPython, tmp_path: Path) -> None:
    """The example resumes to the same bits, with each line of the log once.

    Also with gradients of several batches a step, evaluations between steps and a callback that counts, and
    as two processes, each with batches and dropout of its own.
    """
    source = EXAMPLE.read_text()
    for old, new in RICHER.items():
        assert old in source
        source = source.replace(old, new)
    richer = tmp_path / "richer.py"
    richer.write_text(source + FACTS)
    two_ranks = on_two_ranks(EXAMPLE, tmp_path)
    found = assert_goes_on(
        MODULES,
        {EXAMPLE: (10, 13), richer: (6,), two_ranks: (6,)},
        tmp_path,
        elsewhere=(EXAMPLE, 10),
        python=warm_torch,
    )
    assert found[two_ranks][0]["steps"] == 15, "half as many as one process takes"
    uninterrupted, *_, last, _ = found[richer]
    assert last["facts"] == uninterrupted["facts"]
    assert any("eval_loss" in line for line in uninterrupted["facts"][:-1])
