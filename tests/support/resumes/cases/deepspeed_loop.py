"""DeepSpeed on two ranks that differ in data and dropout; the variant is the stage of ZeRO."""

from __future__ import annotations

from typing import Any, Final

import deepspeed  # type: ignore[import-not-found, unused-ignore]
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state  # type: ignore[import-not-found, unused-ignore]
from support.resumes.child import ResumedRun, generators

from ciuic.integrations.deepspeed import save_in

MODULES: Final = "torch torch._dynamo deepspeed ciuic.integrations.deepspeed"
WORLD: Final = 2
BY_DESIGN: Final[dict[str, str]] = {}
_STEPS: Final = 56


def train(run: ResumedRun) -> None:
    """Train with a checkpoint after every fourth step, and a list of losses in its `client_state`."""
    # DeepSpeed builds it at the start under a file lock, which a killed process leaves behind.
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    torch.manual_seed(1)
    model = torch.nn.Sequential(
        torch.nn.Linear(8, 64), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(64, 3)
    )
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "gradient_clipping": 1.0,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "torch_adam": True}},
        "scheduler": {"type": "WarmupDecayLR", "params": {"warmup_num_steps": 10, "total_num_steps": 100}},
        "zero_optimization": {"stage": int(run.variant)},
        "bf16": {"enabled": run.variant == "2"},
    }
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    save_in(engine, run.save_dir, name="training", max_snapshots=4)
    checkpoints = f"{run.save_dir}-checkpoints"
    path, client = engine.load_checkpoint(checkpoints)
    losses: list[float] = client["losses"] if path else []
    run.begin(engine.global_steps if path else None)
    dtype = torch.bfloat16 if run.variant == "2" else torch.float32
    while engine.global_steps < _STEPS:
        for half in range(2):
            # DeepSpeed saves neither generators nor `micro_steps`: each batch has seeds of its own.
            torch.manual_seed(run.world * (2 * engine.global_steps + half) + run.rank)
            loss = engine(torch.rand(4, 8, dtype=dtype)).float().square().mean()
            engine.backward(loss)
            engine.step()
        total = loss.detach().clone()
        torch.distributed.all_reduce(total)
        losses.append(float(total))
        run.report(
            f"step {engine.global_steps}", {"loss": loss.detach(), "rate": engine.get_lr()[0], "total": total}
        )
        if engine.global_steps % 4 == 0:
            engine.save_checkpoint(checkpoints, client_state={"losses": losses})
    engine.checkpoint_engine.cleanup()
    parameters = list(engine.module.parameters())
    # Whole tensors: the padding of a rank's part of ZeRO 3 is memory that nobody has written.
    with deepspeed.zero.GatheredParameters(parameters):
        weights = [one.detach().clone() for one in parameters]
    state = {
        "model": weights,
        "masters": [safe_get_full_fp32_param(one) for one in parameters],
        **{
            f"moments {name}": [safe_get_full_optimizer_state(one, name) for one in parameters]
            for name in ("exp_avg", "exp_avg_sq")
        },
        "steps of the optimizer": [one["step"] for one in engine.optimizer.optimizer.state.values()],
        "scheduler": engine.lr_scheduler.state_dict(),
    }
    torch.distributed.destroy_process_group()
    run.finish(state | generators(), {"losses": losses, "steps": engine.global_steps})
