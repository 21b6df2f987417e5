"""Small training that is deterministic to the last bit and needs NumPy alone.

    python tiny_training.py SAVE_DIR STEPS RESULT [seconds a step]

Resumes by itself, saves after every third step, and writes digest and history to RESULT when all steps are
done.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import sys
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from ciuic import SnapshotManager

BIG = 200_000
"""Number of elements, enough for a file of its own."""


class Model:
    def __init__(self, elements: int = BIG) -> None:
        made = np.random.default_rng(1)
        self.weights = {
            "layer.weight": made.standard_normal(elements),
            "bias": np.zeros(7),
            "frozen": made.random(elements),
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self.weights)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name, value in state.items():
            self.weights[name][...] = value


class Optimizer:
    """Momentum optimizer with torch's hook."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.momentum = {name: np.zeros_like(value) for name, value in model.weights.items()}
        self.steps = 0
        self.param_groups: list[dict[str, Any]] = [{"params": [], "lr": 0.01}]
        self._hooks: list[Callable[..., None]] = []

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        self._hooks.append(hook)

    def step(self) -> float:
        loss = 0.0
        for name in ("layer.weight", "bias"):
            weight = self.model.weights[name]
            noise = np.random.standard_normal(weight.shape) * random.random()
            self.momentum[name] = 0.9 * self.momentum[name] + weight + noise
            weight -= self.param_groups[0]["lr"] * self.momentum[name]
            loss += float((weight**2).sum())
        self.steps += 1
        self.announce()
        return loss

    def announce(self) -> None:
        """Tell the hooks of a step."""
        for hook in self._hooks:
            hook(self, (), {})

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": self.momentum, "steps": self.steps, "groups": self.param_groups}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.momentum = {name: value.copy() for name, value in state["momentum"].items()}
        self.steps = state["steps"]
        self.param_groups[0]["lr"] = state["groups"][0]["lr"]


def main(save_dir: str, steps: int, result: str, step_seconds: float) -> None:
    random.seed(5)
    np.random.seed(5)
    model = Model()
    optimizer = Optimizer(model)
    losses: dict[int, float] = {}
    manager = SnapshotManager(save_dir, every_steps=3, max_snapshots=4)
    manager.register(model=model, optimizer=optimizer, losses=losses)
    manager.resume()
    began = optimizer.steps
    while optimizer.steps < steps:
        # Before the step: what is written at its boundary must be whole.
        losses[optimizer.steps] = float(np.random.random())
        optimizer.step()
        time.sleep(step_seconds)
    digest = hashlib.sha256()
    for value in (*model.weights.values(), *optimizer.momentum.values()):
        digest.update(value.tobytes())
    manager.close()
    with open(f"{result}.tmp", "w") as file:
        found = {"digest": digest.hexdigest(), "losses": losses, "stats": manager.stats.saved, "began": began}
        json.dump(found, file)
    os.replace(f"{result}.tmp", result)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]) if len(sys.argv) > 4 else 0.0)
