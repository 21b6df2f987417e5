"""Where a run is in its data, for loaders that do not know it themselves.

A `StatefulDataLoader` has a state_dict of its own, which is better. Of any other loader the position is: how often it was begun, how
many batches of the current pass were taken, and the random generators as they were when the pass began. To go on is to set the
generators to that, begin the same pass, skip what was taken, and set the generators to what they were at the snapshot. So the order is
the same, and no batch comes twice or never. What workers of a loader draw by themselves within a pass cannot be repeated that way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

from ciuic.training import randomness
from ciuic.training.followers import override


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
        return {"passes": self.passes, "batches": self.batches, "at_begin": self._at_begin}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The next pass goes on where that one was."""
        self.passes, self.batches = state["passes"], state["batches"]
        self._at_begin = state["at_begin"]
        self._resume = state if state["at_begin"] is not None else None

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
        if resume is None:
            self._ask()
            self.passes += 1
            self.batches, self._at_begin = 0, randomness.state()
            batches = begin()
        else:
            at_snapshot = randomness.state()
            randomness.restore(resume["at_begin"])
            batches = begin()
            _skip(batches, resume["batches"])
            randomness.restore(at_snapshot)
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
            yield batch


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
