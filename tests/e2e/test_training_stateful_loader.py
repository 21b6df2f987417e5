"""A loader with a state of its own: the epoch is known at a resume, and each batch comes once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from support.tiny_training import Model, Optimizer

from ciuic import SnapshotManager

BATCHES, EPOCHS = 2, 2


class StatefulDataLoader:
    """Stand-in with the interface and the states of torchdata 0.11's."""

    def __init__(self) -> None:
        self.dataset = range(BATCHES)
        self.next_iter_state: dict[str, Any] | None = None
        self._iterator: _Batches | None = None
        self._initial_iter_for_state_dict = False

    def _get_iterator(self) -> _Batches:
        state, self.next_iter_state = self.next_iter_state, None
        return _Batches(self, state)

    def __iter__(self) -> Iterator[int]:
        if self._initial_iter_for_state_dict:
            self._initial_iter_for_state_dict = False
            assert self._iterator is not None
        else:
            self._iterator = self._get_iterator()
        if self._iterator.finished:
            self._iterator = self._get_iterator()
        return self._iterator

    def __len__(self) -> int:
        return BATCHES

    def state_dict(self) -> dict[str, Any]:
        if self._iterator is None:
            self._iterator = self._get_iterator()
            self._initial_iter_for_state_dict = True
        return {"_num_yielded": self._iterator.yielded, "_iterator_finished": self._iterator.finished}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._iterator, self._initial_iter_for_state_dict = None, False
        self.next_iter_state = state


class _Batches:
    def __init__(self, loader: StatefulDataLoader, state: dict[str, Any] | None) -> None:
        self.yielded = 0 if state is None else state["_num_yielded"]
        self.finished = state is not None and state["_iterator_finished"]
        self._loader = loader

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        if self.yielded == len(self._loader):
            self.finished = True
            raise StopIteration
        self.yielded += 1
        return self.yielded - 1


def test_a_resumed_loop_takes_each_batch_of_each_epoch_once(tmp_path: Path) -> None:
    """README's loop, resumed from the snapshot of each of its steps, goes on in the epoch where it was."""
    expected = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(BATCHES)]
    with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
        assert train(manager, None) == expected
    with SnapshotManager(tmp_path / "snapshots") as manager:
        saved = manager.list_snapshots()
        assert sorted({one.facts.step for one in saved}) == [1, 2, 3, 4]
        for one in saved:
            assert one.facts.epoch is not None
            assert train(manager, one.id) == expected[one.facts.step :]


def test_a_look_before_each_epoch_is_no_epoch_and_takes_nothing(tmp_path: Path) -> None:
    """A batch that is only looked at comes again, in the same epoch."""
    expected = [(epoch, batch) for epoch in range(EPOCHS) for batch in range(BATCHES)]
    with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
        assert train(manager, None, looks=True) == expected
    with SnapshotManager(tmp_path / "snapshots") as manager:
        for one in manager.list_snapshots():
            assert one.facts.step is not None
            # At the end of an epoch there is no batch to look at.
            if one.facts.step % BATCHES:
                assert train(manager, one.id, looks=True) == expected[one.facts.step :]


def train(manager: SnapshotManager, id_: str | None, *, looks: bool = False) -> list[tuple[int, int]]:
    """Train as README does, with new objects, from a snapshot; return the epoch and the batch of each step."""
    model, loader, seen = Model(elements=3), StatefulDataLoader(), []
    optimizer = Optimizer(model)
    manager.register(model=model, optimizer=optimizer, loader=loader)
    # As `resume`, which takes the newest.
    state = manager.framework.load_state(lambda: None if id_ is None else manager.load_snapshot(id_))
    resumed = None if state is None else manager.framework.restore(state)
    if resumed is not None:
        assert resumed.epoch == resumed.step // BATCHES or resumed.batch == BATCHES
    for epoch in range(resumed.epoch if resumed else 0, EPOCHS):  # type: ignore[arg-type]
        if looks:
            next(iter(loader))
        for batch in loader:
            assert manager.wait()
            optimizer.step()
            seen.append((epoch, batch))
    return seen


def test_an_epoch_that_the_program_gives_is_the_one_that_is_resumed(tmp_path: Path) -> None:
    """A program that numbers its epochs itself gets its own number back."""
    with SnapshotManager(tmp_path / "snapshots") as manager:
        for resumed_epoch in (None, 7):
            loader, manager.epoch = StatefulDataLoader(), None
            manager.register(weights={"w": np.zeros(3)}, loader=loader)
            resumed = manager.resume()
            assert (None if resumed is None else resumed.epoch) == resumed_epoch
            assert next(iter(loader)) == (0 if resumed is None else 1)
            manager.save_snapshot(epoch=7)
