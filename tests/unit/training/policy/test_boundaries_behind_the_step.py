"""Boundaries of programs that change what is registered behind `optimizer.step()`, without a loader, and evaluations."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

import pytest
from support.late_modules import torch

from ciuic.training import logs
from ciuic.training.preemption import WeightSample, evaluating
from ciuic.training.state import boundaries as module
from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.registered import Registered

_Follow = tuple[Any, Callable[[int], None]]
_STEPS: Final = 9


def _by_hand(model: Any, _: Any, *, every: int = 1) -> _Follow:
    average = copy.deepcopy(model)

    def update(step: int) -> None:
        if step % every == 0:
            with torch.no_grad():
                for mine, new in zip(average.parameters(), model.parameters(), strict=True):
                    mine.lerp_(new, 0.1)

    return average, update


def _averaged(model: Any, _: Any) -> _Follow:
    average = torch.optim.swa_utils.AveragedModel(model)
    return average, lambda step: average.update_parameters(model) if step > 2 else None


def _scheduled(_: Any, optimizer: Any, *, every: int = 1) -> _Follow:
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    return scheduler, lambda step: scheduler.step() if step % every == 0 else None


FOLLOWERS: Final[dict[str, Callable[[Any, Any], _Follow]]] = {
    "average by hand": _by_hand,
    "average every third step": partial(_by_hand, every=3),
    "AveragedModel from the third step on": _averaged,
    "scheduler": _scheduled,
    "scheduler of epochs": partial(_scheduled, every=3),
}


def _train(
    make: Callable[[Any, Any], _Follow], *, boundary: bool, norm: bool, forward: str = "seen"
) -> tuple[dict[int, Any], dict[int, Any]]:
    """Train without a loader; return the states at the last boundary of each step, and at the ends of the steps."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4) if norm else torch.nn.Dropout()
    )
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    follower, follow = make(model, optimizer)
    drawn = torch.Generator().manual_seed(3)
    found: dict[int, Any] = {}
    ends: dict[int, Any] = {}
    step: list[int] = [0]
    aside: list[Any] = [None]

    def states() -> Any:
        return copy.deepcopy([one.state_dict() for one in (model, optimizer, follower)])

    def stepped() -> None:
        step[0] += 1

    def over() -> bool:
        aside[0] = torch.get_rng_state(), registered.drawn_from()["drawn"]
        return True

    def at_boundary() -> None:
        now = torch.get_rng_state(), drawn.get_state()
        found[step[0]] = states(), aside[0] if boundaries.is_late else now

    boundaries = Boundaries(stepped, at_boundary, step_over=over)
    registered = Registered(boundaries, lambda _: None)
    objects = {"model": model, "optimizer": optimizer, "follower": follower, "drawn": drawn}
    for name, value in objects.items():
        registered.add(name, value)
    for _ in range(_STEPS):
        batch = torch.randn(8, 4) + torch.randn(8, 4, generator=drawn)
        optimizer.zero_grad()
        (model if forward == "seen" else model.forward)(batch).pow(2).mean().backward()
        optimizer.step()
        follow(step[0])
        if boundary:
            boundaries.explicit()
        ends[step[0]] = states(), (torch.get_rng_state(), drawn.get_state())
    boundaries.settle()
    return found, ends


def _assert_same(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("norm", [False, True])
@pytest.mark.parametrize("boundary", [False, True])
@pytest.mark.parametrize("make", FOLLOWERS.values(), ids=FOLLOWERS)
def test_each_step_has_a_boundary_with_what_changed_behind_it(
    make: Callable[[Any, Any], _Follow], boundary: bool, norm: bool
) -> None:
    """The last boundary of each step has the state of its end, from the first step on, with and without `explicit`."""
    found, ends = _train(make, boundary=boundary, norm=norm)
    _assert_same(found, ends)


@pytest.mark.parametrize("make", FOLLOWERS.values(), ids=FOLLOWERS)
def test_a_step_whose_forward_pass_is_not_seen_begins_with_its_optimizer(
    make: Callable[[Any, Any], _Follow],
) -> None:
    """Where a forward pass changes no buffer, the boundary is as exact without a sight of it."""
    found, ends = _train(make, boundary=False, norm=False, forward="hidden")
    _assert_same(found, ends)


def test_with_explicit_every_other_boundary_is_gone() -> None:
    """A program that calls `explicit` has no other boundary, not even in its first step."""
    events: list[str] = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    boundaries = Boundaries(lambda: events.append("step"), lambda: events.append("boundary"))
    assert boundaries.watch_optimizer(optimizer)
    boundaries.watch_module(model)
    for _ in range(2):
        for _ in range(3):
            model(torch.ones(1, 2)).sum().backward()
            optimizer.step()
            events.append("behind")
            boundaries.explicit()
    assert events == ["step", "behind", "boundary"] * 6


def test_an_evaluation_behind_the_step_is_not_the_next_step() -> None:
    """A forward pass without gradients does not close the step."""
    closed: list[int] = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    boundaries = Boundaries(lambda: None, lambda: closed.append(1))
    assert boundaries.watch_optimizer(optimizer)
    boundaries.watch_module(model)
    optimizer.step()
    with torch.no_grad():
        model(torch.ones(1, 2))
    assert not closed
    model(torch.ones(1, 2))
    assert closed == [1]


def _watching(model: Any, events: list[str], *, matters: bool = True) -> tuple[Boundaries, Any]:
    """Return the boundaries of a model, and its optimizer, which has taken a step."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    boundaries = Boundaries(lambda: None, lambda: events.append("boundary"), step_over=lambda: matters)
    assert boundaries.watch_optimizer(optimizer)
    boundaries.watch_module(model)
    boundaries.watch_module(copy.deepcopy(model))
    optimizer.step()
    return boundaries, optimizer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("compiles", [False, True])
def test_a_pass_that_is_no_training_begins_no_step(compiles: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A traced, transformed or functional forward pass, in which a state cannot be saved, closes no step."""
    monkeypatch.setattr(module, "_compiles_modules", lambda: compiles)
    events: list[str] = []
    model, batch = torch.nn.Linear(2, 2), torch.ones(3, 2)
    boundaries, _ = _watching(model, events)
    noisy = {name: value + 1 for name, value in model.named_parameters()}
    torch.func.functional_call(model, noisy, (batch,))
    torch.func.vmap(model)(batch)
    torch.func.grad(lambda values: torch.func.functional_call(model, values, (batch,)).sum())(noisy)
    if not compiles:
        # With a hook of its own a module cannot be scripted.
        torch.jit.script(model)
        torch.jit.trace(model, (batch,))
        assert not model._forward_pre_hooks
    assert (events, boundaries.awaits_next) == ([], True)
    model(batch)
    assert events == ["boundary"]


def test_where_nothing_is_saved_the_step_is_over_at_once() -> None:
    """Where no snapshot may be due, no hook is left behind the step, and the boundary tells that it came early."""
    events: list[str] = []
    boundaries, optimizer = _watching(torch.nn.Linear(2, 2), events, matters=False)
    assert (events, boundaries.awaits_next, boundaries.is_early) == (["boundary"], False, True)
    # What is saved may change now.
    assert not boundaries.whole
    optimizer.step()
    assert events == ["boundary"] * 2


def test_a_manager_that_is_gone_leaves_the_hooks_of_torch_as_they_are() -> None:
    """Boundaries that the garbage collector removes within a step of an optimizer do not end it."""
    parameter = torch.nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([parameter], 0.1)
    dropped = [Boundaries(lambda: None, lambda: None) for _ in range(3)]
    handle = optimizer.register_step_post_hook(lambda *_: dropped.clear())
    hooks = dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks)
    optimizer.step()
    handle.remove()
    assert dict(sys.modules["torch.optim.optimizer"]._global_optimizer_post_hooks) == hooks


def test_an_optimizer_within_a_registered_one_is_named(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the program steps the inner optimizer and never the registered one, one warning names both."""
    monkeypatch.setattr(logs, "_warned", set())
    parameter = torch.nn.Parameter(torch.ones(1))
    inner = torch.optim.SGD([parameter], 0.1)
    outer = torch.optim.Adam([parameter], 0.1)
    other = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], 0.1)
    boundaries = Boundaries(lambda: None, lambda: None)
    assert boundaries.watch_optimizer(outer)
    for _ in range(9):
        other.step()
    assert not caplog.messages
    for _ in range(9):
        inner.step()
    (told,) = caplog.messages
    assert "registered Adam" in told
    assert "SGD" in told


def test_it_does_when_no_model_trains() -> None:
    """A program evaluates if no model trains; averages of weights do not count, and without a model it does not."""
    model, teacher = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).eval()
    average = torch.optim.swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    assert not evaluating([model, teacher, average, optimizer])
    model.eval()
    assert evaluating([model, teacher, average, optimizer])
    assert not evaluating([optimizer])


def test_weights_that_were_put_in_for_the_evaluation_are_noticed() -> None:
    """Weights that were replaced for an evaluation are noticed, though no version counter changed."""
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2))
    glimpse = WeightSample([model, {"not": "a model"}])
    assert not glimpse.is_still()
    glimpse.take()
    assert glimpse.is_still()
    own = [parameter.data.clone() for parameter in model.parameters()]
    for parameter in model.parameters():
        parameter.data.copy_(parameter.data * 0.5)
    assert not glimpse.is_still()
    for parameter, value in zip(model.parameters(), own, strict=True):
        parameter.data.copy_(value)
    assert glimpse.is_still()
