"""Tests of asynchronous copies from a device: in whatever order it works, a state is whole or void."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.late_device import Choose, Device, lane_of
from support.late_training import Training

from ciuic.training.arena import Arena
from ciuic.training.device_copy import AsyncCopy, DeviceTensor, Overlap
from ciuic.training.format.tensors import ArrayBuffer, describe

pytestmark = pytest.mark.keeps_descriptors(
    "threads of the simulated device keep arenas of examples that failed"
)

_BEHAVIOURS = (
    "clamps behind the framework's back",
    "clamps",
    "replays steps that do not tell",
    "changes the backbone in the forward",
    "memory is full",
    "records a graph at the next step",
)


class Saved:
    """State that was staged, and its expected content."""

    def __init__(self, training: Training, overlap: Overlap, *, beside: bool) -> None:
        arrays = training.on_device()
        self.expected = training.now()
        size_bytes = sum(value.nbytes for value in arrays.values())
        self.arena = Arena(size_bytes)
        items, at = [], 0
        for name, value in arrays.items():
            place = ArrayBuffer(self.arena.memory[at : at + value.nbytes], describe(value))
            items.append(DeviceTensor(name, place, value, value.nbytes))
            at += value.nbytes
        self._items = items
        self.copying = AsyncCopy(self.arena, items, overlap, beside=beside)

    def torn(self) -> list[str]:
        """Return the tensors that differ from the expected state."""
        return [
            item.name
            for item in self._items
            if not np.array_equal(item.place.target(item.value), self.expected[item.name])
        ]


def _lazy(possibilities: int) -> int:
    """Run our copies last, when they are waited for."""
    return 0


def _hasty(possibilities: int) -> int:
    """Run our copies first."""
    return possibilities - 1


def _train(
    choose: Choose, steps: int, saves: set[int], behaviours: frozenset[str], change: Callable[[Device], None]
) -> list[Saved]:
    """Train and save after some of the steps; all saves are done on return."""
    device = Device(choose)
    change(device)
    under_way: list[Saved] = []
    training = Training(device)
    overlap = Overlap(lane_of, before_step=lambda: [one.copying.settle() for one in under_way].clear())
    overlap.watch(training.optimizer)
    device.full = "memory is full" in behaviours
    for number in range(steps):
        training.forward()
        device.run_some()
        if "changes the backbone in the forward" in behaviours:
            training.queue("model.backbone", lambda at: at.__iadd__(1))
        device.records = "records a graph at the next step" in behaviours and number in saves
        training.optimizer.step(tells="replays steps that do not tell" not in behaviours or number < 1)
        device.records = False
        training.follow()
        for one in under_way:
            if one.copying.done():
                overlap.distrust(one.copying.changed())
        if number in saves:
            under_way.append(Saved(training, overlap, beside=True))
        overlap.boundary()
        if behaviours & {"clamps", "clamps behind the framework's back"}:
            training.queue(
                "model.weight", lambda at: np.copyto(at, np.clip(at, -0.5, 0.5)), known="clamps" in behaviours
            )
        device.run_some()
    for one in under_way:
        one.copying.settle()
    device.run_all()
    assert all(one.copying.done() for one in under_way)
    return under_way


def _no_effect(device: Device) -> None:
    """Leave the device as it is."""


@given(st.data(), st.integers(1, 7), st.sets(st.integers(0, 6)), st.frozensets(st.sampled_from(_BEHAVIOURS)))
def test_a_state_is_whole_or_void(
    data: st.DataObject, steps: int, saves: set[int], behaviours: frozenset[str]
) -> None:
    """A state is whole or void, whatever the program does, in any order of the device's work."""
    choices = data.draw(st.randoms(use_true_random=False))
    for saved in _train(choices.randrange, steps, saves, behaviours, _no_effect):
        assert saved.copying.void or not saved.torn()


@given(st.data(), st.integers(1, 7), st.sets(st.integers(0, 6)))
def test_nothing_is_void_where_only_steps_change_the_weights(
    data: st.DataObject, steps: int, saves: set[int]
) -> None:
    """A state is not void where only steps change weights; statistics and averages may change at any time."""
    choices = data.draw(st.randoms(use_true_random=False))
    behaviours = data.draw(
        st.frozensets(st.sampled_from(["changes the backbone in the forward", "memory is full"]))
    )
    saved = _train(choices.randrange, steps, saves, behaviours, _no_effect)
    assert [one.copying.void or one.torn() for one in saved] == [[] for _ in saved]


@pytest.mark.parametrize("missing", ["hold", "follow", "clone"])
def test_a_wait_that_is_missing_would_be_noticed(missing: str) -> None:
    """The device of these tests is late enough that a missing wait would be noticed."""

    def change(device: Device) -> None:
        def nothing(*_: object) -> Any:
            return None

        setattr(device, missing, nothing if missing != "clone" else lambda value: value)

    torn = [
        one.torn() for choose in (_lazy, _hasty) for one in _train(choose, 4, {1, 2}, frozenset(), change)
    ]
    assert any(torn)


def test_the_forward_does_not_wait_for_the_copy_and_the_step_does() -> None:
    """The forward pass does not wait for the copy, and the optimizer's step does."""
    device = Device(_lazy)
    under_way: list[Saved] = []
    training = Training(device)
    overlap = Overlap(lane_of, before_step=lambda: [one.copying.settle() for one in under_way].clear())
    overlap.watch(training.optimizer)
    training.step()
    saved = Saved(training, overlap, beside=True)
    under_way.append(saved)
    overlap.boundary()
    training.forward()
    while device.program.can_run():
        device.program.run_one()
    assert not device.program.waiting
    assert device.ours.waiting
    training.step()
    while device.program.can_run():
        device.program.run_one()
    assert device.program.waiting
    device.run_all()
    assert saved.copying.done()
    assert not saved.copying.void
    assert saved.torn() == []


def test_tensor_changed_under_a_copy_is_waited_for_from_then_on() -> None:
    """A tensor changed under a copy makes one snapshot void, is named, and is waited for from then on."""
    first, second, third = _train(
        _hasty, 4, {0, 1, 2}, frozenset(["clamps behind the framework's back"]), _no_effect
    )
    del second
    assert "model.weight was changed" in first.copying.void
    assert not third.copying.void
    assert third.torn() == []


def test_synchronous_copies_make_later_work_wait() -> None:
    """Work queued after a copy comes after all of it without asynchronous copies."""
    device = Device(_lazy)
    training, overlap = Training(device), Overlap(lane_of)
    overlap.watch(training.optimizer)
    training.step()
    saved = Saved(training, overlap, beside=False)
    training.queue("model.weight", lambda at: at.__imul__(0), known=False)
    device.run_all()
    assert saved.copying.done()
    assert saved.torn() == []


def test_a_device_that_breaks_makes_no_state() -> None:
    """A failing device raises an error at once, or makes the running save void."""
    device = Device(_lazy)
    training, overlap = Training(device), Overlap(lane_of)
    overlap.watch(training.optimizer)
    training.step()
    saved = Saved(training, overlap, beside=True)
    device.broken = True
    saved.copying.settle()
    assert "not certain" in saved.copying.void
    with pytest.raises(RuntimeError):
        saved.copying.done()
    with pytest.raises(RuntimeError, match="broken"):
        Saved(training, overlap, beside=True)


def test_large_numbers_of_tensors_are_looked_at_by_turns() -> None:
    """Large numbers of tensors are all checked in the first saves, and later in turns over several saves."""
    overlap = Overlap(lane_of)
    assert [len(overlap.checked(100)) for _ in range(3)] == [100, 100, 32]
    seen = {at for _ in range(4) for at in overlap.checked(100)}
    assert seen == set(range(100))
