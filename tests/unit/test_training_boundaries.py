"""When a state is whole."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  a training may pickle what it watches
from collections.abc import Callable, Iterator
from typing import Any

from ciuic.training.boundaries import Boundaries
from ciuic.training.followers import tell_after


class Optimizer:
    """With torch's hook."""

    def __init__(self) -> None:
        self.hooks: list[Callable[..., None]] = []

    def register_step_post_hook(self, hook: Callable[..., None]) -> None:
        self.hooks.append(hook)

    def step(self) -> None:
        for hook in self.hooks:
            hook(self, (), {})


class Scheduler:
    def __init__(self) -> None:
        self.last = 0

    def step(self) -> None:
        self.last += 1

    def state_dict(self) -> dict[str, Any]:
        return dict(self.__dict__)


class Loader:
    def __iter__(self) -> Iterator[int]:
        return iter(range(3))


class Run:
    """Writes down what happens."""

    def __init__(self, *followers: object) -> None:
        self.events: list[str] = []
        self.optimizer = Optimizer()
        self.boundaries = Boundaries(
            lambda: self.events.append("step"), lambda: self.events.append("boundary")
        )
        self.boundaries.watch_optimizer(self.optimizer)
        for one in followers:
            assert self.boundaries.watch_follower(one)


def test_without_anything_else_the_boundary_is_the_step() -> None:
    """Once each."""
    run = Run()
    run.optimizer.step()
    run.optimizer.step()
    assert run.events == ["step", "boundary"] * 2


def test_a_scheduler_that_follows_each_step_is_waited_for() -> None:
    """Its state belongs to the step."""
    scheduler = Scheduler()
    run = Run(scheduler)
    for _ in range(3):
        run.optimizer.step()
        run.events.append("between")
        scheduler.step()
    assert run.events == ["step", "between", "boundary"] * 3
    assert scheduler.state_dict() == {"last": 3}, "watching must not become part of its state"


def test_a_scheduler_that_follows_epochs_is_not_waited_for() -> None:
    """One boundary is lost to learning that."""
    scheduler = Scheduler()
    run = Run(scheduler)
    for _ in range(2):
        for _ in range(3):
            run.optimizer.step()
        scheduler.step()
    assert run.events.count("boundary") == 5


def test_a_watched_loader_tells_when_the_next_batch_is_asked_for() -> None:
    """Whatever is between the step and that belongs to the step; a batch without a step is no boundary."""
    loader = Loader()
    run = Run(Scheduler())
    assert run.boundaries.watch_loader(loader)
    for batch in loader:
        run.events.append(f"batch {batch}")
        if batch != 1:  # gradients are accumulated
            run.optimizer.step()
    assert run.events == ["batch 0", "step", "boundary", "batch 1", "batch 2", "step", "boundary"]


def test_with_two_optimizers_only_the_program_or_a_loader_can_tell() -> None:
    """The last of them in a step is not known."""
    run = Run()
    second = Optimizer()
    run.boundaries.watch_optimizer(second)
    run.optimizer.step()
    second.step()
    assert run.events == ["step"]
    run.boundaries.explicit()
    assert run.events == ["step", "boundary"]


def test_a_watched_object_is_pickled_and_copied_as_what_it_was() -> None:
    """Also by programs that store it whole."""
    scheduler = Scheduler()
    told: list[int] = []
    assert tell_after(scheduler, "step", lambda: told.append(1))
    for other in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert type(other) is Scheduler
        other.step()
    assert not told
    scheduler.step()
    assert told
    assert isinstance(scheduler, Scheduler)


def test_what_cannot_be_derived_from_is_left_alone() -> None:
    """Classes written in C."""
    assert not tell_after(object(), "__str__", lambda: None)
    assert not tell_after(3, "bit_length", lambda: None)


def test_an_optimizer_that_takes_the_place_of_another_is_the_one_that_counts() -> None:
    """As where a backbone is thawed and its optimizer is made anew."""
    run = Run()
    run.boundaries.forget(run.optimizer)
    second = Optimizer()
    run.boundaries.watch_optimizer(second)
    run.optimizer.step()
    assert run.events == []
    second.step()
    assert run.events == ["step", "boundary"]


def test_an_optimizer_that_is_watched_twice_counts_once() -> None:
    """It may be registered under two names."""
    run = Run()
    run.boundaries.watch_optimizer(run.optimizer)
    run.optimizer.step()
    assert run.events == ["step", "boundary"]


def test_what_wraps_an_optimizer_is_watched_by_its_method() -> None:
    """It need not have hooks."""

    class Lookahead:
        param_groups: tuple[()] = ()

        def step(self) -> str:
            return "stepped"

    run = Run()
    run.boundaries.forget(run.optimizer)
    wrapper = Lookahead()
    assert run.boundaries.watch_optimizer(wrapper)
    assert wrapper.step() == "stepped"
    assert run.events == ["step", "boundary"]


def test_that_nothing_tells_of_boundaries_is_found_out_after_some_steps() -> None:
    """And the program is told, once."""
    run = Run()
    second = Optimizer()
    run.boundaries.watch_optimizer(second)
    assert not run.boundaries.lacking
    for _ in range(10):
        run.optimizer.step()
        second.step()
    assert run.boundaries.lacking
    run.boundaries.explicit()
    assert not run.boundaries.lacking
