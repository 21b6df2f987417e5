"""torch's own modules and optimizers, copied as late as a device might copy them.

The tensors are on the host. A lane holds each copy back until it is waited for; the program's work is done at
once. What changes a state between two steps, and how, is up to torch.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager
from ciuic.training import save_pipeline
from ciuic.training.arena import Arena
from ciuic.training.device_copy import Overlap, TorchDeviceStream

_WIDTH = 16


@contextlib.contextmanager
def _stream(stream: object) -> Iterator[None]:
    yield


_MODULE = SimpleNamespace(
    Event=None, Stream=lambda device: None, stream=_stream, current_stream=lambda device: None
)


class LateLane(TorchDeviceStream):
    def __init__(self, seed: int) -> None:
        super().__init__(torch, _MODULE, torch.device("cpu"))
        self._random = random.Random(seed)
        self._queued: list[Callable[[], object]] = []
        self._ran = 0

    def follow(self) -> None: ...

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        self._queued.append(lambda: target.copy_(value.detach()))

    def mark(self) -> Mark:
        return Mark(self, len(self._queued))

    def hold(self, mark: Any) -> None:
        mark.wait()

    def unequal(self, one: Any, other: Any) -> Any:
        on_host = torch.zeros(one.shape, dtype=torch.bool)
        self._queued.append(lambda: on_host.copy_(one != other))
        return on_host, None

    def run(self, count: int) -> None:
        for work in self._queued[self._ran : count]:
            work()
            self._ran += 1

    def reached(self, at: int) -> bool:
        self.run(min(len(self._queued), self._ran + self._random.randrange(4)))
        return self._ran >= at


class Mark:
    def __init__(self, lane: LateLane, at: int) -> None:
        self._lane = lane
        self._at = at

    def done(self) -> bool:
        return self._lane.reached(self._at)

    def wait(self) -> None:
        self._lane.run(self._at)


class Loop:
    """A training loop: `objects` are registered, `step` is called for each batch."""

    def __init__(self, optimizer: str = "AdamW", **options: Any) -> None:
        torch.manual_seed(1)
        self.model = torch.nn.Sequential(
            torch.nn.utils.parametrizations.spectral_norm(torch.nn.Linear(_WIDTH, _WIDTH)),
            torch.nn.BatchNorm1d(_WIDTH),
            torch.nn.Linear(_WIDTH, _WIDTH),
        )
        self.model[2].bias.requires_grad_(False)
        self.optimizer = getattr(torch.optim, optimizer)(self.model.parameters(), **{"lr": 0.01, **options})
        self.objects: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer}

    def loss(self) -> Any:
        return (self.model(torch.randn(8, _WIDTH)) ** 2).mean()

    def step(self) -> None:
        def closure() -> Any:
            self.optimizer.zero_grad()
            loss = self.loss()
            loss.backward()
            return loss

        if isinstance(self.optimizer, torch.optim.LBFGS):
            self.optimizer.step(closure)
        else:
            closure()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()


class WithScheduleAndAverage(Loop):
    def __init__(self) -> None:
        super().__init__(foreach=True)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, 0.1, total_steps=1000)
        self.average = torch.optim.swa_utils.AveragedModel(self.model, use_buffers=True)
        self.objects |= {"scheduler": self.scheduler, "average": self.average}

    def step(self) -> None:
        super().step()
        self.scheduler.step()
        self.average.update_parameters(self.model)


class WithMomentumEncoder(Loop):
    """Encoder with a momentum copy, changed in the forward pass, as in MoCo."""

    def __init__(self) -> None:
        super().__init__("SGD", momentum=0.9)
        self.key = torch.nn.Linear(_WIDTH, _WIDTH).requires_grad_(False)
        self.objects["key"] = self.key

    def loss(self) -> Any:
        for key, query in zip(self.key.parameters(), self.model[2].parameters(), strict=True):
            key.data.mul_(0.9).add_(query.data, alpha=0.1)
        return super().loss()


class Clamped(Loop):
    """Model with clamped weights, as in WGAN."""

    def step(self) -> None:
        super().step()
        for parameter in self.model.parameters():
            parameter.data.clamp_(-0.05, 0.05)


class ClampedOpenly(Loop):
    def step(self) -> None:
        super().step()
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.clamp_(-0.05, 0.05)


class Adversaries(Loop):
    """Two adversaries with one optimizer each, of which one steps every third time."""

    def __init__(self) -> None:
        super().__init__("Adam", betas=(0.0, 0.9))
        self.other = torch.nn.Linear(_WIDTH, 1)
        self.second = torch.optim.RMSprop(self.other.parameters(), lr=0.01)
        self.objects |= {"other": self.other, "second": self.second}
        self._steps = 0

    def step(self) -> None:
        self._steps += 1
        if self._steps % 3 == 0:
            self.second.zero_grad()
            self.other(self.model(torch.randn(8, _WIDTH)).detach()).mean().backward()
            self.second.step()
        super().step()


LOOPS: dict[str, Callable[[], Loop]] = {
    "AdamW": Loop,
    "AdamW, fused": lambda: Loop(fused=True),
    "Adafactor": lambda: Loop("Adafactor"),
    "LBFGS": lambda: Loop("LBFGS", max_iter=2),
    "schedule and average": WithScheduleAndAverage,
    "momentum encoder": WithMomentumEncoder,
    "clamped behind torch's back": Clamped,
    "clamped": ClampedOpenly,
    "two optimizers": Adversaries,
}


@pytest.mark.parametrize("kind", LOOPS)
def test_every_snapshot_is_the_state_of_its_time(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every snapshot is the state of the time it was taken, though its copies are done long after."""
    loop, lane = LOOPS[kind](), LateLane(5)
    batches = torch.utils.data.DataLoader(torch.arange(1000), batch_size=1)
    taken: dict[int, dict[str, Any]] = {}
    distrusted: set[str] = set()
    inner, distrust = save_pipeline.SavePipeline._copy_to_arena, Overlap.distrust

    def copy_to_arena(pipeline: Any, state: Any, facts: Any, *arguments: Any, **options: Any) -> Any:
        taken[facts.step] = {
            f"{name}.{leaf.name}": leaf.value.detach().clone()
            for name, leaves in state.leaves.items()
            for leaf in leaves
            if isinstance(leaf.value, torch.Tensor)
        }
        return inner(pipeline, state, facts, *arguments, **options)

    def note(overlap: Overlap, names: Any) -> None:
        distrusted.update(names)
        distrust(overlap, names)

    monkeypatch.setattr(save_pipeline.SavePipeline, "_copy_to_arena", copy_to_arena)
    monkeypatch.setattr(Overlap, "distrust", note)
    monkeypatch.setattr(
        save_pipeline, "device_stream_of", lambda value: lane if isinstance(value, torch.Tensor) else None
    )
    with SnapshotManager(tmp_path, every_steps=2, compression="none") as manager:
        manager.register(**loop.objects, **({"loader": batches} if kind == "two optimizers" else {}))
        for _ in batches:
            loop.step()
            if manager.stats.saved >= 3:
                break
        manager.wait()
        for one in manager.list_snapshots():
            _check(manager.load_snapshot(one.id), taken[one.facts.step or 0], loop)
        clamped = kind.startswith("clamped")
        assert bool(distrusted) == clamped
        assert (manager.stats.failed > 0) == clamped
        assert manager.stats.saved >= 3


def _check(state: dict[str, Any], taken: dict[str, Any], loop: Loop) -> None:
    found = {
        f"{name}.{key}": value
        for name, one in loop.objects.items()
        if hasattr(one, "named_parameters")
        for key, value in state[f"{name}_state_dict"].items()
    }
    found |= {
        f"optimizer.state.{number}.{key}": value
        for number, kept in state["optimizer_state_dict"]["state"].items()
        for key, value in kept.items()
        if isinstance(value, torch.Tensor)
    }
    assert len(found) > 8
    # Values that alias one another (tied, or views of the same memory) are stored once.
    missing = found.keys() - taken.keys()
    assert not [name for name in missing if not any(found[name].equal(value) for value in taken.values())]
    assert [name for name in found.keys() & taken.keys() if not found[name].equal(taken[name])] == []
