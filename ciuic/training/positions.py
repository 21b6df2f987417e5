"""Where a run is in its data, for loaders that do not know it themselves.

A `StatefulDataLoader` has a state_dict of its own, which is better. Of any other loader the position is: how often it was begun, how
many batches of the current pass were taken, and the random generators as they were when the pass began. To go on is to set the
generators to that, begin the same pass, skip what was taken, and set the generators to what they were at the snapshot. So the order is
the same, and no batch comes twice or never. Generators of its own that the loader, its samplers or its data set hold are set with those
of the process. What workers of a loader draw by themselves within a pass cannot be repeated that way.

A pass that the program leaves by ``break`` is over when it begins the next. Before that it may be the end of the pass or of the run: it is
what it was with an earlier pass, and the end of the run where there was none, or where an exception is being handled.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from ciuic.training import randomness
from ciuic.training.followers import override
from ciuic.training.stateful import load_into, state_of

_PARTS: Final = ("sampler", "batch_sampler", "dataset", "data_source")
_DEEPEST: Final = 4


class Position:
    """Of one loader, which counts from now on."""

    def __init__(
        self, loader: Any, ask: Callable[[], None] = lambda: None, ended: Callable[[], None] = lambda: None
    ) -> None:
        """``ask``: called before each batch is fetched; ``ended``: when there is none. TypeError where the loader's class cannot be derived from."""
        self.passes = 0
        """Begun so far; the one under way included."""
        self.batches = 0
        """Taken of the pass under way."""
        self._at_begin: dict[str, Any] | None = None
        self._own_at_begin: dict[str, Any] = {}
        self._left = False
        """The program takes no more of the pass under way."""
        self._leaves = False
        """It has left one before, and begun the next."""
        self._handled: BaseException | None = None
        """Was being handled when the pass began."""
        self._loader = loader
        self._resume: dict[str, Any] | None = None
        self._ask = ask
        self._ended = ended
        position = self

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any) -> Iterator[Any]:
                return position._pass(lambda: method(self))

            return wrapped

        if not override(loader, "__iter__", make):
            raise TypeError(f"{type(loader).__qualname__} is a class that nothing can be derived from")

    def tell(self, ask: Callable[[], None], ended: Callable[[], None]) -> None:
        """Whom, from now on."""
        self._ask, self._ended = ask, ended

    def state_dict(self) -> dict[str, Any]:
        """Good at a boundary."""
        over = self._left and self._leaves and sys.exc_info()[1] is self._handled
        state = {
            "passes": self.passes,
            "batches": self.batches,
            "at_begin": None if over else self._at_begin,
            "leaves": self._leaves,
        }
        own = own_generators(self._loader)
        if own:
            state |= {"own": _states(own), "own_at_begin": self._own_at_begin}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on where that one was."""
        self.passes, self.batches = state["passes"], state["batches"]
        self._at_begin, self._own_at_begin = state["at_begin"], state.get("own_at_begin", {})
        self._left, self._leaves = False, state.get("leaves", False)
        self._resume = state if state["at_begin"] is not None else None
        _restore(own_generators(self._loader), state.get("own", {}))

    def _make_workers(
        self, begin: Callable[[], Iterator[Any]], own: dict[str, Any], *, passes_before: int
    ) -> None:
        """Where workers persist it is the first pass that makes them, and draws for it, and no later one: so not after a resume either."""
        loader = self._loader
        persist = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0)
        if passes_before and persist and getattr(loader, "_iterator", loader) is None:
            before, own_before = randomness.state(), _states(own)
            begin()
            randomness.restore(before)
            _restore(own, own_before)

    @property
    def epoch(self) -> int:
        """The pass to go on with, right after `load_state_dict`: the one that was under way, or the one after it."""
        return self.passes - 1 if self._resume is not None else self.passes

    @property
    def taken(self) -> int:
        """Batches of that."""
        return self.batches if self._resume is not None else 0

    def _pass(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        own = own_generators(self._loader)
        if resume is None:
            self._leaves = self._leaves or self._left
            self._at_begin = None  # whatever became of the pass before, it is over
            self._ask()
            self._make_workers(begin, own, passes_before=self.passes)
            self.passes += 1
            self.batches, self._at_begin, self._own_at_begin = 0, randomness.state(), _states(own)
            batches = begin()
        else:
            self._make_workers(begin, own, passes_before=self.passes - 1)
            at_snapshot, own_at_snapshot = randomness.state(), _states(own)
            randomness.restore(resume["at_begin"])
            _restore(own, resume.get("own_at_begin", {}))
            batches = begin()
            _skip(batches, resume["batches"])
            randomness.restore(at_snapshot)
            _restore(own, own_at_snapshot)
        number, self._left, self._handled = self.passes, False, sys.exc_info()[1]
        while True:
            if self.batches or resume is not None:
                self._ask()
            try:
                batch = next(batches)
            except StopIteration:
                self._at_begin = None
                self._ended()
                return
            self.batches += 1
            try:
                yield batch
            except GeneratorExit:
                self._left = self._left or number == self.passes
                raise


def own_generators(loader: Any) -> dict[str, Any]:
    """Random generators that a loader, its samplers and its data set hold as attributes, by the way to them."""
    found: dict[str, Any] = {}
    seen: set[int] = set()
    _look(loader, "", 0, found, seen)
    return found


def _look(holder: Any, path: str, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    if id(holder) in seen or depth > _DEEPEST:
        return
    seen.add(id(holder))
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if id(value) not in seen and _is_generator(value):
            seen.add(id(value))
            found[f"{path}{name}"] = value
        elif name.lstrip("_") in _PARTS:
            _look(value, f"{path}{name}.", depth + 1, found, seen)


def _is_generator(value: Any) -> bool:
    torch, numpy_random = sys.modules.get("torch"), sys.modules.get("numpy.random")
    return (
        isinstance(value, random.Random)
        or (torch is not None and isinstance(value, torch.Generator))
        or (
            numpy_random is not None and isinstance(value, (numpy_random.Generator, numpy_random.RandomState))
        )
    )


def _states(generators: Mapping[str, Any]) -> dict[str, Any]:
    return {path: copy.deepcopy(state_of(one, path)) for path, one in generators.items()}


def _restore(generators: Mapping[str, Any], states: Mapping[str, Any]) -> None:
    for path, one in generators.items():
        if path in states:
            load_into(one, states[path], path)


def _skip(batches: Iterator[Any], number: int) -> None:
    """Without loading them where the loader reads in this process: only the order is drawn."""
    order = getattr(batches, "_sampler_iter", None)
    from_map = type(batches).__name__ == "_SingleProcessDataLoaderIter" and (
        type(getattr(batches, "_dataset_fetcher", None)).__name__ == "_MapDatasetFetcher"
    )
    with suppress(StopIteration):
        for _ in range(number):
            next(order if from_map and order is not None else batches)


def is_plain_loader(value: object) -> bool:
    """Whether it is a loader of batches that does not know its own position."""
    return (
        hasattr(value, "__iter__")
        and not isinstance(value, (dict, list))
        and not callable(getattr(value, "state_dict", None))
        and (hasattr(value, "dataset") or hasattr(value, "__len__"))
    )
