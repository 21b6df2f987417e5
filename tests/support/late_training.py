"""Training on a device that works late, and the same training done at once as the reference for each state.

    python -m support.late_training SAVE_DIR SEED

trains with a snapshot after every step, as fast as the writer allows, and prints after each how many are
durable.
"""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from support.late_device import Device, Parameter, lane_of

from ciuic import SnapshotManager
from ciuic.training import save_pipeline

_NAMES = ("weight", "bias")


class Training:
    """Momentum on two parameters, statistics that the forward changes, a constant backbone, an average."""

    def __init__(self, device: Device, elements: int = 3) -> None:
        self.device = device
        made = np.random.default_rng(1)
        trained = {name: device.array(made.random(elements)) for name in _NAMES}
        self.model: dict[str, Any] = {
            **trained,
            "statistics": device.array(np.zeros(2)),
            "backbone": device.array(made.random(elements)),
        }
        self.average = {name: device.array(value) for name, value in trained.items()}
        self.optimizer = Optimizer(self)
        self.expected: dict[str, Any] = {name: np.array(value) for name, value in self.on_device().items()}
        """All of `on_device`, as it is when everything that was queued is done."""

    def on_device(self) -> dict[str, Any]:
        return {
            **{f"model.{name}": value for name, value in self.model.items()},
            **{f"average.{name}": value for name, value in self.average.items()},
            **{f"momentum.{name}": value for name, value in self.optimizer.momentum.items()},
        }

    def now(self) -> dict[str, Any]:
        return {name: value.copy() for name, value in self.expected.items()}

    def forward(self) -> None:
        """Do the forward and the backward pass."""
        self.queue("model.statistics", lambda at: at.__iadd__(1.5))

    def step(self) -> None:
        self.optimizer.step()

    def queue(self, name: str, change: Callable[[Any], Any], *, known: bool = True) -> None:
        """Queue an in-place change, made now and when the device comes to it.

        ``known``: the framework counts it.
        """
        value = self.on_device()[name]
        self.device.versions[id(value)] += known
        self.device.program.add(lambda: change(value))
        change(self.expected[name])

    def follow(self) -> None:
        """Update the average, right after a step."""
        for name in _NAMES:
            weight = np.array(self.expected[f"model.{name}"])
            self.queue(
                f"average.{name}",
                lambda at, weight=weight: np.copyto(at, 0.9 * at + 0.1 * weight),  # type: ignore[misc]
            )


class Optimizer:
    """Optimizer with torch's hooks."""

    def __init__(self, training: Training) -> None:
        self._training = training
        parameters = [Parameter(training.model[name], requires_grad=True) for name in _NAMES]
        frozen = Parameter(training.model["backbone"], requires_grad=False)
        self.param_groups: list[dict[str, Any]] = [{"params": [*parameters, frozen], "lr": 0.1}]
        self.momentum = {
            name: training.device.array(np.zeros_like(one.array))
            for name, one in zip(_NAMES, parameters, strict=True)
        }
        self.steps = 0
        self._before: list[Callable[..., None]] = []
        self._after: list[Callable[..., None]] = []

    @property
    def state(self) -> dict[str, dict[str, Any]]:
        return {name: {"momentum": value, "step": self.steps} for name, value in self.momentum.items()}

    def register_step_pre_hook(self, hook: Callable[..., None]) -> None:
        self._before.append(hook)

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        self._after.append(hook)

    def step(self, *, tells: bool = True) -> None:
        """Do one step; ``tells`` is false where it is replayed as a CUDA graph."""
        for hook in self._before if tells else []:
            hook(self, (), {})
        self.steps += 1
        number = self.steps
        for name in _NAMES:
            self._training.queue(f"momentum.{name}", lambda at: np.copyto(at, 0.9 * at + number), known=tells)
            momentum = np.array(self._training.expected[f"momentum.{name}"])
            self._training.queue(
                f"model.{name}",
                lambda at, momentum=momentum: at.__isub__(0.1 * momentum),  # type: ignore[misc]
                known=tells,
            )
        for hook in self._after if tells else []:
            hook(self, (), {})

    def state_dict(self) -> dict[str, Any]:
        return {"momentum": dict(self.momentum), "steps": self.steps}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


class State:
    """State of a model or an average."""

    def __init__(self, arrays: dict[str, Any]) -> None:
        self._arrays = arrays

    def state_dict(self) -> dict[str, Any]:
        return dict(self._arrays)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def train(
    save_dir: Path, seed: int, behaviours: set[str], on_saved: Callable[[int], None], saves: int
) -> dict[int, dict[str, Any]]:
    """Train with a snapshot at each boundary until so many are durable; return the states by step."""
    chosen = random.Random(seed)
    device = Device(chosen.randrange)
    device.goes_on = True
    training = Training(device)
    states = _recorded(training)
    save_pipeline.device_stream_of = lane_of
    with SnapshotManager(save_dir, every_steps=1) as manager:
        manager.register(
            model=State(training.model), average=State(training.average), optimizer=training.optimizer
        )
        while manager.stats.saved < saves:
            assert training.optimizer.steps < 3000, manager.stats.last_error
            _one_step(training)
            if "clamps" in behaviours:
                training.queue("model.weight", lambda at: np.copyto(at, np.clip(at, -0.5, 0.5)), known=False)
            if "asks" in behaviours and training.optimizer.steps % 10 == 3:
                step = 100_000 + training.optimizer.steps
                states[step] = training.now()
                manager.save_snapshot(step=step)
                manager.step = training.optimizer.steps
                training.queue("momentum.bias", lambda at: at.__imul__(2), known=False)
            device.run_some()
            time.sleep(0.005)
            on_saved(manager.stats.saved)
        device.run_all()
    return states


def states_of(steps: int) -> dict[int, dict[str, Any]]:
    """Return the states of `train` without snapshots and with an ordinary device."""
    training = Training(Device(lambda possibilities: 0))
    states = _recorded(training)
    for _ in range(steps):
        _one_step(training)
    return states


def _recorded(training: Training) -> dict[int, dict[str, Any]]:
    states: dict[int, dict[str, Any]] = {}

    def stepped(*_: object) -> None:
        states[training.optimizer.steps] = training.now()

    training.optimizer.register_step_post_hook(stepped)
    return states


def _one_step(training: Training) -> None:
    training.forward()
    training.device.run_some()
    training.step()
    training.follow()


def saved_state(state: dict[str, Any]) -> dict[str, Any]:
    """Return the state in a snapshot, by the names of `Training.on_device`."""
    found = {f"model.{name}": value for name, value in state["model_state_dict"].items()}
    found |= {f"average.{name}": value for name, value in state["average_state_dict"].items()}
    return found | {
        f"momentum.{name}": value for name, value in state["optimizer_state_dict"]["momentum"].items()
    }


def _print_saved(saved: int) -> None:
    sys.stdout.write(f"{saved}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    train(Path(sys.argv[1]), int(sys.argv[2]), set(), _print_saved, 1000)
