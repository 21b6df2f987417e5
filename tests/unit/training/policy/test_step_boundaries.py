"""Boundaries of steps."""

from __future__ import annotations

import copy
import pickle  # noqa: TID251  a training may pickle what it watches
from collections.abc import Callable, Iterator
from typing import Any

from ciuic.training.state.boundaries import Boundaries, Passes, tell_after


class Optimizer:
    """Optimizer with the hook that torch's have."""

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
    """Records steps and boundaries."""

    def __init__(self, *followers: object) -> None:
        self.events: list[str] = []
        self.optimizer = Optimizer()
        self.boundaries = Boundaries(
            lambda: self.events.append("step"), lambda: self.events.append("boundary")
        )
        self.boundaries.watch_optimizer(self.optimizer)
        for one in followers:
            assert self.boundaries.watch_companion(one)


def test_without_anything_else_the_boundary_is_the_step() -> None:
    """Without companions each step has one boundary, at its end."""
    run = Run()
    run.optimizer.step()
    run.optimizer.step()
    assert run.events == ["step", "boundary"] * 2


def test_a_scheduler_that_follows_each_step_is_waited_for() -> None:
    """The boundary comes after the call of a scheduler that follows each step."""
    scheduler = Scheduler()
    run = Run(scheduler)
    for _ in range(3):
        run.optimizer.step()
        run.events.append("between")
        scheduler.step()
    assert run.events == ["step", "between", "boundary"] * 3
    assert scheduler.state_dict() == {"last": 3}, "watching must not become part of its state"


def test_a_scheduler_that_follows_epochs_is_not_waited_for() -> None:
    """A scheduler that follows epochs costs one boundary, after which it is not waited for."""
    scheduler = Scheduler()
    run = Run(scheduler)
    for _ in range(2):
        for _ in range(3):
            run.optimizer.step()
        scheduler.step()
    assert run.events.count("boundary") == 5


def test_a_watched_loader_sets_the_boundary_at_the_next_batch() -> None:
    """A watched loader's request of the next batch is the boundary; a batch without a step has none."""
    loader = Loader()
    run = Run(Scheduler())
    assert run.boundaries.watch_loader(loader, Passes())
    for batch in loader:
        run.events.append(f"batch {batch}")
        if batch != 1:  # gradients are accumulated
            run.optimizer.step()
    assert run.events == ["batch 0", "step", "boundary", "batch 1", "batch 2", "step", "boundary"]


def test_a_look_that_has_ended_is_in_no_number() -> None:
    """After a pass without a step the number of epochs and the saved position are those of the epoch before."""
    loader, passes, run = Loader(), Passes(), Run()
    assert run.boundaries.watch_loader(loader, passes)
    for _ in loader:
        run.optimizer.step()
    assert len(list(loader)) == 3
    assert passes.passes == 1
    assert passes.state_dict() == {"passes": 1, "batches": 3, "over": True}


def test_with_two_optimizers_only_explicit_closes_a_step() -> None:
    """A step of two optimizers without a loader is closed by `explicit` alone."""
    run = Run()
    second = Optimizer()
    run.boundaries.watch_optimizer(second)
    run.optimizer.step()
    second.step()
    assert run.events == ["step"]
    run.boundaries.explicit()
    assert run.events == ["step", "boundary"]


def test_a_watched_object_is_pickled_and_copied_as_its_own_class() -> None:
    """A watched object pickles and copies as an instance of its own class."""
    scheduler = Scheduler()
    calls: list[int] = []
    assert tell_after(scheduler, "step", lambda: calls.append(1))
    for other in (pickle.loads(pickle.dumps(scheduler)), copy.deepcopy(scheduler)):
        assert type(other) is Scheduler
        other.step()
    assert not calls
    scheduler.step()
    assert calls
    assert isinstance(scheduler, Scheduler)


def test_objects_of_classes_written_in_c_are_not_changed() -> None:
    """Objects of classes written in C are not changed, and the caller learns of it."""
    assert not tell_after(object(), "__str__", lambda: None)
    assert not tell_after(3, "bit_length", lambda: None)


def test_an_optimizer_that_takes_the_place_of_another_is_the_one_that_counts() -> None:
    """A new optimizer under the name of another one counts steps in its place."""
    run = Run()
    run.boundaries.forget(run.optimizer)
    second = Optimizer()
    run.boundaries.watch_optimizer(second)
    run.optimizer.step()
    assert run.events == []
    second.step()
    assert run.events == ["step", "boundary"]


def test_an_optimizer_that_is_watched_twice_counts_once() -> None:
    """An optimizer that is registered under two names counts each step once."""
    run = Run()
    run.boundaries.watch_optimizer(run.optimizer)
    run.optimizer.step()
    assert run.events == ["step", "boundary"]


def test_a_wrapper_of_an_optimizer_is_watched_by_its_step_method() -> None:
    """A wrapper of an optimizer without hooks is watched by its `step` method."""

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


def test_missing_boundaries_are_reported_once() -> None:
    """Missing boundaries are reported after some steps, once."""
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
