"""Hugging Face's Trainer, killed and resumed from the store: the same bits, and the same log."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.runs import EXAMPLES, assert_goes_on

pytest.importorskip("transformers", reason="the extra `hf` is not installed")
pytest.importorskip("accelerate", reason="the extra `hf` is not installed")

MODULES = "torch transformers transformers.trainer ciuic.integrations.transformers"
EXAMPLE = EXAMPLES / "hf_trainer.py"
RICHER = {
    "callbacks=[callback]": "callbacks=[callback, EarlyStoppingCallback(20)], eval_dataset=dataset[:8]",
    "import GPT2Config": "import EarlyStoppingCallback, GPT2Config",
    "num_train_epochs=3": "num_train_epochs=3, gradient_accumulation_steps=2, eval_strategy='steps', eval_steps=3,"
    "metric_for_best_model='eval_loss'",
    "every_steps=4": "every_steps=5",
    'save_strategy="no"': "save_strategy='steps', save_steps=4",  # a snapshot follows each checkpoint of the Trainer's own
}
FACTS = """
TIMES = ("runtime", "per_second", "train_loss", "total_flos")
FACTS = [{key: value for key, value in line.items() if not key.endswith(TIMES)} for line in trainer.state.log_history]
"""


def test_a_trainer_that_is_killed_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    """The example: order of the data, dropout, schedule. And with gradients of several batches a step, evaluations between steps, a callback
    that counts: each line of the log is there once, equal to that of the run that was not killed."""
    source = EXAMPLE.read_text()
    for old, new in RICHER.items():
        assert old in source
        source = source.replace(old, new)
    richer = tmp_path / "richer.py"
    richer.write_text(source + FACTS)
    found = assert_goes_on(MODULES, {EXAMPLE: (10, 13), richer: (6,)}, tmp_path)
    whole, *_, last, _ = found[richer]
    assert last["facts"] == whole["facts"]
    assert any("eval_loss" in line for line in whole["facts"])
