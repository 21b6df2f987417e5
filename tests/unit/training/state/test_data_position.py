"""Position in the data: a counted loader continues after the last batch, whatever draws its order."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.late_modules import LateModule, torch

from ciuic.training.format.structure import pack, unpack
from ciuic.training.state import stateful
from ciuic.training.state.data_position import Position, own_generators

data: Any = LateModule("torch.utils.data")
_SIZE = 11


class Shuffled:
    """A sampler with a generator of its own."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)

    def __iter__(self) -> Iterator[int]:
        return iter(self.rng.permutation(_SIZE).tolist())

    def __len__(self) -> int:
        return _SIZE


class Noisy:
    """Data set whose items are drawn while they are read."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __len__(self) -> int:
        return _SIZE

    def __getitem__(self, at: int) -> float:
        return at + self.rng.random()


class Jitter:
    """Transform, or `collate_fn`, that draws."""

    def __init__(self, rng: Any) -> None:
        self.rng = rng

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list):
            value = torch.tensor(value)
        return value + float(self.rng.random())


class Transformed:
    """Data set with a list of transforms."""

    def __init__(self, *transforms: Callable[[Any], Any]) -> None:
        self.transforms = list(transforms)

    def __len__(self) -> int:
        return _SIZE

    def __getitem__(self, at: int) -> Any:
        value: Any = float(at)
        for one in self.transforms:
            value = one(value)
        return value


class Counting:
    """Sampler whose order follows from the number of its epoch, which it counts itself."""

    def __init__(self) -> None:
        self.epoch = 0

    def __iter__(self) -> Iterator[int]:
        self.epoch += 1
        return iter(random.Random(self.epoch).sample(range(_SIZE), _SIZE))

    def __len__(self) -> int:
        return _SIZE


def _in_closure(rng: random.Random) -> Callable[[list[float]], Any]:
    def collate(values: list[float]) -> Any:
        return torch.tensor(values) + rng.random()

    return collate


def _collated(collate: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: data.DataLoader(range(_SIZE), batch_size=2, collate_fn=collate())


def _of(dataset: Callable[[], Any]) -> Callable[[], Any]:
    return lambda: data.DataLoader(dataset(), batch_size=2, shuffle=True)


def _generator() -> Any:
    return torch.Generator().manual_seed(5)


LOADERS: dict[str, Callable[[], Any]] = {
    "in order": lambda: data.DataLoader(range(_SIZE), batch_size=2),
    "shuffled": lambda: data.DataLoader(range(_SIZE), batch_size=2, shuffle=True),
    "a generator": lambda: data.DataLoader(range(_SIZE), batch_size=2, shuffle=True, generator=_generator()),
    "a sampler's": lambda: data.DataLoader(
        range(_SIZE), batch_size=2, sampler=data.RandomSampler(range(_SIZE), True, 40, generator=_generator())
    ),
    "weighted": lambda: data.DataLoader(
        range(_SIZE),
        batch_size=2,
        sampler=data.WeightedRandomSampler([1.0] * _SIZE, 9, generator=_generator()),
    ),
    "batches": lambda: data.DataLoader(
        range(_SIZE),
        batch_sampler=data.BatchSampler(data.RandomSampler(range(_SIZE), generator=_generator()), 3, True),
    ),
    "numpy's": lambda: data.DataLoader(range(_SIZE), batch_size=2, sampler=Shuffled(7)),
    "noisy data": lambda: data.DataLoader(Noisy(), batch_size=2, shuffle=True),
    "transforms": _of(lambda: Transformed(abs, Jitter(np.random.default_rng(3)), Jitter(random.Random(4)))),
    "a bound method": _of(lambda: Transformed(Jitter(random.Random(4)).__call__)),
    "parts": _of(lambda: data.ConcatDataset([data.Subset(Noisy(), range(5)), Noisy()])),
    "collate_fn": _collated(lambda: Jitter(random.Random(6))),
    "collate_fn of partial": _collated(lambda: functools.partial(Jitter(random.Random(6)))),
    "collate_fn in a closure": _collated(lambda: _in_closure(random.Random(7))),
    "counts epochs": lambda: data.DataLoader(range(_SIZE), batch_size=2, sampler=Counting()),
    "counts epochs within": lambda: data.DataLoader(
        range(_SIZE), batch_sampler=data.BatchSampler(Counting(), 3, False)
    ),
}


class Run:
    """Takes batches, and leaves passes after so many of them."""

    def __init__(self, kind: str, leave_after: int) -> None:
        torch.manual_seed(1)
        self.loader = LOADERS[kind]()
        self.taken: list[list[float]] = []
        self.saved: Any = None
        self.position = Position(self.loader, self._boundary)
        self._leave_after = leave_after
        self._save_at = -1

    def go(self, until: int, save_at: int = -1) -> None:
        self._save_at = save_at
        while True:
            for number, batch in enumerate(self.loader, self.position.taken):
                self.taken.append(batch.tolist())
                torch.rand(1)
                if len(self.taken) == until:
                    return
                if number + 1 == self._leave_after:
                    break

    def _boundary(self) -> None:
        if len(self.taken) == self._save_at:
            self.saved = _round_trip(
                {"position": self.position.state_dict(), "random": stateful.random_states()}
            )


def _round_trip(value: Any) -> Any:
    packed = pack(value, "state")
    arrays = {
        leaf.name: leaf.value.clone() if hasattr(leaf.value, "clone") else leaf.value.copy()
        for leaf in packed.leaves
    }
    return unpack(json.loads(json.dumps(packed.skeleton)), lambda name, _: arrays[name])


@given(st.sampled_from(sorted(LOADERS)), st.integers(1, 12), st.sampled_from([2, 3, 100]))
def test_a_resumed_run_continues_after_the_last_saved_batch(
    kind: str, save_at: int, leave_after: int
) -> None:
    """A resumed run takes the same batches as an uninterrupted one, also with own generators and broken-off passes."""
    run = Run(kind, leave_after)
    run.go(save_at + 8, save_at)
    again = Run(kind, leave_after)
    again.position.load_state_dict(run.saved["position"])
    stateful.restore_random_states(run.saved["random"])
    again.go(8)
    assert again.taken == run.taken[save_at:]


def test_workers_that_persist_change_nothing_of_it() -> None:
    """Persistent workers, which a resumed run creates again, do not change the order of batches."""
    # A process of its own: workers inherit whatever the tests before have left.
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3])}
    done = subprocess.run(
        [sys.executable, __file__],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env=environment,
    )
    assert done.returncode == 0, done.stderr


def _with_workers() -> None:
    for generator, (save_at, leave_after) in ((None, (8, 100)), (_generator, (3, 2)), (_generator, (6, 100))):
        LOADERS["workers"] = lambda make=generator: data.DataLoader(  # type: ignore[misc]
            range(_SIZE),
            batch_size=2,
            shuffle=True,
            num_workers=1,
            persistent_workers=True,
            generator=make and make(),
        )
        run = Run("workers", leave_after)
        run.go(save_at + 3, save_at)
        again = Run("workers", leave_after)
        again.position.load_state_dict(run.saved["position"])
        stateful.restore_random_states(run.saved["random"])
        again.go(3)
        assert again.taken == run.taken[save_at:], (save_at, leave_after, again.taken, run.taken)


def test_an_earlier_pass_decides_whether_an_abandoned_one_is_over() -> None:
    """Before the next pass begins, an earlier pass decides whether one that was left is over."""
    run = Run("in order", 100)
    is_over = []
    for _ in range(3):
        for _ in run.loader:
            break
        is_over.append(run.position.state_dict()["at_begin"] is None)
    assert is_over == [False, True, True]
    try:
        for _ in run.loader:
            raise ValueError("the training fails")
    except ValueError:
        assert run.position.state_dict()["at_begin"] is not None


def test_settings_of_a_sampler_are_those_of_the_new_program() -> None:
    """Only numbers that have changed since they were watched are restored, not a size that a program chose anew."""
    states: list[Any] = []
    for size in (2, 3):
        loader = data.DataLoader(range(_SIZE), batch_sampler=data.BatchSampler(Counting(), size, False))
        position = Position(loader)
        if states:
            position.load_state_dict(states[0])
        next(iter(loader))
        states.append(position.state_dict())
        assert (loader.batch_sampler.batch_size, loader.batch_sampler.sampler.epoch) == (size, 1)


def test_generators_in_workers_that_persist_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """Their states are out of reach, and the log names where they are."""
    for workers in ({}, {"num_workers": 1}, {"num_workers": 1, "persistent_workers": True}):
        assert not caplog.records
        Position(data.DataLoader(Noisy(), **workers)).state_dict()
    assert "dataset.rng" in caplog.text


def test_what_leads_back_or_is_large_is_no_burden() -> None:
    """An object that refers to itself ends, and data is not searched."""
    noisy: Any = Noisy()
    noisy.itself, noisy.items = [noisy], [random.Random(at) for at in range(1000)]
    assert set(own_generators(data.DataLoader(noisy))) == {"dataset.rng"}


if __name__ == "__main__":
    _with_workers()
