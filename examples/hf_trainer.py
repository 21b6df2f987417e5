"""Hugging Face `Trainer` that resumes by itself: run it, kill it, run it again.

python examples/hf_trainer.py [directory for snapshots]
"""

import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ciuic.integrations.transformers import SnapshotCallback

save_dir = sys.argv[1] if len(sys.argv) > 1 else "./snapshots"
set_seed(1)
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=64, n_positions=16, n_embd=32, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0)
)
tokens = (torch.arange(40)[:, None] * 7 + torch.arange(16)[None, :] * 3) % 64
dataset = [{"input_ids": row, "labels": row} for row in tokens]

callback = SnapshotCallback(save_dir, every_steps=4, max_snapshots=10)
trainer = Trainer(
    model,
    TrainingArguments(
        f"{save_dir}-logs",
        num_train_epochs=3,
        per_device_train_batch_size=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        logging_steps=3,
        save_strategy="no",  # snapshots replace checkpoints
        report_to="none",
        disable_tqdm=True,
        use_cpu=True,
    ),
    train_dataset=dataset,
    callbacks=[callback],
)
trainer.train(resume_from_checkpoint=callback.resume(trainer))
print("trained to step", trainer.state.global_step, "loss", trainer.state.log_history[-1]["train_loss"])
