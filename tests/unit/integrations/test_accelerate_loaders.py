"""Loaders of Accelerate that have a state of their own are registered and go on where they were."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from support.late_modules import LateModule, torch

accelerate: Any = LateModule("ciuic.integrations.accelerate", lacking="the extra `hf` is not installed")

BATCHES, PASSES = 6, 3


class Base:
    """Stand-in for torchdata's StatefulDataLoader: a number of batches, of an order that is drawn."""

    def __init__(self) -> None:
        self.yielded = 0
        self.skip = 0

    def __iter__(self) -> Iterator[int]:
        torch.rand(1)  # the seed of workers
        skip, self.skip = self.skip, 0
        for number, batch in enumerate(torch.randperm(BATCHES).tolist()):
            self.yielded = number + 1
            if number >= skip:
                yield batch


class Loader:
    """Stand-in for Accelerate's DataLoaderShard, which reads one batch ahead."""

    use_stateful_dataloader = True

    def __init__(self, *, seedable: bool) -> None:
        self.dataset = range(BATCHES)
        self.iteration = 0
        self.base_dataloader = Base()
        self.dl_state_dict: dict[str, Any] = {"yielded": 0}
        self.end_of_dataloader = False
        self._seedable = seedable

    def set_epoch(self, epoch: int) -> None:
        self.iteration = epoch

    def state_dict(self) -> dict[str, Any]:
        return self.dl_state_dict

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.base_dataloader.skip = 0 if state.get("_iterator_finished") else state["yielded"]

    def _update_state_dict(self) -> None:
        yielded = self.base_dataloader.yielded
        self.dl_state_dict = {"yielded": yielded, "_iterator_finished": self.end_of_dataloader}

    def __iter__(self) -> Iterator[int]:
        self.end_of_dataloader = False
        batches = iter(self.base_dataloader)
        current = next(batches)
        while True:
            self._update_state_dict()
            following = next(batches, None)
            if following is None:
                break
            yield self._seeded(current)
            current = following
        self.end_of_dataloader = True
        self._update_state_dict()
        yield self._seeded(current)
        self.iteration += 1

    def _seeded(self, batch: int) -> int:
        """Return the batch of a sampler that is seeded by the number of the pass."""
        return (batch if not self._seedable else 0) + 100 * self.iteration


class Manager:
    """Stand-in for a SnapshotManager, whose snapshots are copies in memory."""

    def __init__(self, snapshot: dict[str, Any]) -> None:
        self._snapshot = snapshot
        self._objects: dict[str, Any] = {}
        self.framework = self

    def join_ranks(self) -> None:
        pass

    def register(self, **objects: Any) -> None:
        self._objects = objects

    def save(self) -> None:
        states = {name: copy.deepcopy(one.state_dict()) for name, one in self._objects.items()}
        self._snapshot.update(states=states, random=torch.get_rng_state())

    def resume(self) -> None:
        for name, state in self._snapshot.get("states", {}).items():
            self._objects[name].load_state_dict(copy.deepcopy(state))
        if self._snapshot:
            torch.set_rng_state(self._snapshot["random"])


def _run(
    snapshot: dict[str, Any], stop_after: int, *, seedable: bool, resave: bool = False
) -> list[tuple[int, float]]:
    """Train, stop in the middle, and return what was seen: the batch, and what dropout would draw."""
    torch.manual_seed(1)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = Loader(seedable=seedable)
    accelerator: Any = SimpleNamespace(
        distributed_type="NO",
        step=0,
        scaler=None,
        unwrap_model=lambda one: one,
        _models=[model],
        _optimizers=[SimpleNamespace(optimizer=optimizer)],
        _schedulers=[],
        _custom_objects=[],
        _dataloaders=[loader, Loader(seedable=seedable)],
    )
    seen: list[tuple[int, float]] = []
    manager: Any = Manager(snapshot)
    accelerate.register(manager, accelerator)
    manager.resume()
    if resave:
        manager.save()
        return seen
    while loader.iteration < PASSES:
        for batch in loader:
            seen.append((batch, float(torch.rand(1))))
            if len(seen) == stop_after:
                manager.save()
                return seen
    return seen


@pytest.mark.parametrize("seedable", [True, False])
@pytest.mark.parametrize("stops", [(2,), (6,), (8, 3), (5, 1, 1)])
def test_no_batch_comes_twice_or_never(stops: tuple[int, ...], seedable: bool) -> None:
    """Stopped within a pass, after its last batch, and at once after a resume."""
    whole = _run({}, -1, seedable=seedable)
    assert len(whole) == BATCHES * PASSES
    snapshot: dict[str, Any] = {}
    parts = [_run(snapshot, stop, seedable=seedable) for stop in (*stops, -1)]
    assert [one for part in parts for one in part] == whole


def test_a_save_right_after_a_resume_keeps_the_position() -> None:
    """A loader that has read no batch since the resume tells the position that it was given."""
    snapshot: dict[str, Any] = {}
    first = _run(snapshot, 8, seedable=False)
    _run(snapshot, -1, seedable=False, resave=True)
    assert first + _run(snapshot, -1, seedable=False) == _run({}, -1, seedable=False)
