"""Hugging Face's Trainer with evaluations, gradient accumulation, early stopping and a rate that follows the loss."""

from __future__ import annotations

from typing import Any, Final

import torch
from support.resumes.child import ResumedRun, generators
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from ciuic.integrations.transformers import SnapshotCallback

MODULES: Final = "torch torch._dynamo transformers transformers.trainer ciuic.integrations.transformers"
WORLD: Final = 1
_OF_THIS_PROCESS: Final = "of the steps since the resume, as transformers defines it"
BY_DESIGN: Final = {
    f"{kind}: {name}": _OF_THIS_PROCESS
    for kind in ("at the end", "log")
    for name in (
        *("train_loss", "train_runtime", "train_samples_per_second", "train_steps_per_second"),
        *("train_tokens_per_second",),
        *("eval_runtime", "eval_samples_per_second", "eval_steps_per_second"),
    )
}


class Report(TrainerCallback):  # type: ignore[misc, unused-ignore]
    """Report each line of the Trainer's log when it is written."""

    def __init__(self, run: ResumedRun) -> None:
        self._run = run

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        names = "/".join(sorted(logs))
        self._run.report(f"log {state.global_step} {names}", {**logs, "epoch": state.epoch})


def train(run: ResumedRun) -> None:
    """Train until the loss of the evaluations no longer falls."""
    set_seed(1)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )
    tokens = (torch.arange(80)[:, None] * 7 + torch.arange(16)[None, :] * 3) % 64
    data = [{"input_ids": row, "labels": row} for row in tokens]
    callback = SnapshotCallback(run.save_dir, every_steps=4, max_snapshots=4)
    stopping = EarlyStoppingCallback(2, 0.08)
    arguments = TrainingArguments(
        f"{run.save_dir}-logs",
        num_train_epochs=12,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=4e-3,
        lr_scheduler_type="reduce_lr_on_plateau",
        lr_scheduler_kwargs={"patience": 0, "factor": 0.6, "threshold": 0.2, "threshold_mode": "abs"},
        metric_for_best_model="eval_loss",
        greater_is_better=False,
        eval_strategy="steps",
        eval_steps=5,
        logging_steps=3,
        include_num_input_tokens_seen="all",
        save_strategy="no",
        restore_callback_states_from_checkpoint=True,
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    )
    trainer = Trainer(
        model,
        arguments,
        train_dataset=data,
        eval_dataset=data[:12],
        callbacks=[callback, stopping, Report(run)],
    )
    returned = trainer.train(resume_from_checkpoint=callback.resume(trainer))
    # The Trainer replaces callbacks by new ones with the state of the checkpoint.
    stopping = next(
        one for one in trainer.callback_handler.callbacks if isinstance(one, EarlyStoppingCallback)
    )
    state = {
        "model": model.state_dict(),
        "optimizer": trainer.optimizer.state_dict(),
        "scheduler": trainer.lr_scheduler.state_dict(),
        "early stopping": stopping.state(),
    }
    kept = trainer.state
    values = {
        "log_history": [
            {name: value for name, value in line.items() if f"log: {name}" not in BY_DESIGN}
            for line in kept.log_history
        ],
        **{name: getattr(kept, name) for name in ("global_step", "epoch", "best_metric", "total_flos")},
        **{name: getattr(kept, name) for name in ("best_global_step", "num_input_tokens_seen")},
        **returned.metrics,
    }
    run.finish(state | generators(), values)
