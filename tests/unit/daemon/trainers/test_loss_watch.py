"""Losses that are no numbers and spikes: what is told, and what is noise."""

from __future__ import annotations

import math
import random

import pytest

from ciuic.daemon.trainers.loss_watch import LossWatch


def watch(losses: list[float]) -> LossWatch:
    watched = LossWatch()
    for step, loss in enumerate(losses):
        watched.add(step, loss)
    return watched


def ordinary(seed: int, count: int = 2000) -> list[float]:
    """Return the losses of a training that converges, with noise of a tenth."""
    chance = random.Random(seed)
    return [2 + 8 * math.exp(-step / 300) + chance.gauss(0, 0.2) for step in range(count)]


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_no_spike(seed: int) -> None:
    """A training that converges with noise has no trouble at any step."""
    watched = LossWatch()
    for step, loss in enumerate(ordinary(seed)):
        watched.add(step, loss)
        assert watched.trouble is None


@pytest.mark.parametrize("seed", range(20))
def test_a_spike_is_told_with_its_step(seed: int) -> None:
    """A single loss of twice the usual one is a spike, though outliers were before it."""
    losses = ordinary(seed)
    for at in range(1000, 1500, 100):
        losses[at] = 4.0
    trouble = watch([*losses[:1501], 7.0]).trouble
    assert trouble is not None
    assert (trouble.kind, trouble.step, trouble.value) == ("spike", 1501, 7.0)
    assert 1.5 < trouble.usual < 3


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_no_number_is_told_from_the_first_value_on(loss: float) -> None:
    """NaN and Inf need no history, and outrank a spike."""
    trouble = watch([loss]).trouble
    assert trouble is not None
    assert (trouble.kind, trouble.step) == ("not finite", 0)
    losses = [*ordinary(1)[:100], 90.0, loss, 90.0]
    trouble = watch(losses).trouble
    assert trouble is not None
    assert (trouble.kind, trouble.step) == ("not finite", 101)


def test_trouble_ends_with_ten_ordinary_losses() -> None:
    """Nine do not end it."""
    before = [*ordinary(3), math.nan]
    assert watch([*before, *[2.0] * 9]).trouble is not None
    assert watch([*before, *[2.0] * 10]).trouble is None


def test_a_loss_that_jumps_between_two_values_does_not_spike() -> None:
    """Where half of the values are alike, the median absolute deviation is 0; the range between the quartiles is not."""
    for count in range(31, 150):
        assert watch([2.0, 2.5] * (count // 2) + [2.0] * (count % 2) + [2.5]).trouble is None


def test_a_new_level_is_no_spike_for_ever() -> None:
    """A loss that stays at a higher level is the usual one after some time."""
    assert watch([*ordinary(4), *[20.0] * 5]).trouble is not None
    assert watch([*ordinary(4), *[20.0] * 100]).trouble is None


def test_a_flat_loss_does_not_spike_at_noise() -> None:
    """Where the loss does not move, a change of a few percent is none."""
    assert watch([1.0] * 100 + [1.09]).trouble is None
    assert watch([1.0] * 100 + [1.11]).trouble is not None
    assert watch([1.0] * 29 + [50.0]).trouble is None
