"""Position of a run in its data: the fallback for loaders that have no state of their own.

A `StatefulDataLoader` has a state_dict, which is better and is saved as that of any object (`boundaries.Passes`
counts only its passes). For any other loader the position consists of the number of passes begun, the number of
batches taken in the current pass, and the states of the random generators when that pass began. To continue,
restore those states, begin the same pass, skip the batches taken, and set the generators to their states at the snapshot. So the order is the same, and no batch
comes twice or never. Random generators that the loader, its samplers or its data set hold are saved and
restored together with those of the process. What the workers of a loader draw by themselves within a pass
cannot be repeated.

A pass that the program leaves by ``break`` is over when the next one begins. Until then it is unknown whether
the program left the pass or the run ended: what happened after an earlier pass decides. Where there was none,
or while an exception is being handled, the run is taken to have ended in the middle of the pass. Batches that the
program has fetched and not trained with (`boundaries.ReadAhead`) count as not taken.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from ciuic.training.logs import log
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import ReadAhead, override
from ciuic.training.state.stateful import load_into, state_of

# Attributes of a loader that may hold random generators, and how deep they may be nested.
_PARTS: Final = ("sampler", "batch_sampler", "dataset", "data_source")
_MAX_DEPTH: Final = 4


class Position:
    """Position in one loader, whose passes and batches are counted from now on."""

    def __init__(
        self, loader: Any, ask: Callable[[], None] = lambda: None, ended: Callable[[], None] = lambda: None
    ) -> None:
        """Count the passes and batches of a loader.

        Args:
            loader: The loader; its class is replaced by a subclass.
            ask: Called before each batch is fetched.
            ended: Called when there is no further batch.

        Raises:
            TypeError: The class of the loader cannot be derived from.
        """
        self.passes = 0
        """Passes begun so far, including the current one."""
        self.batches = 0
        """Batches taken of the current pass."""
        self._at_begin: dict[str, Any] | None = None
        self._own_at_begin: dict[str, Any] = {}
        self._broken_off = False
        """The program takes no more batches of the current pass."""
        self._breaks_off = False
        """The program has left an earlier pass before its end, and begun the next."""
        self._handled_at_begin: BaseException | None = None
        """Exception that was being handled when the pass began."""
        self._loader = loader
        self._resume: dict[str, Any] | None = None
        self._ask = ask
        self._ended = ended
        self._read_ahead = ReadAhead()
        self._is_exhausted = False
        """There was no further batch in the current pass."""
        position = self

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any) -> Iterator[Any]:
                return position._pass(lambda: method(self))

            return wrapped

        if not override(loader, "__iter__", make):
            raise TypeError(f"{type(loader).__qualname__} is a class that nothing can be derived from")

    def tell(self, ask: Callable[[], None], ended: Callable[[], None], read_ahead: ReadAhead) -> None:
        """Replace the callbacks of the constructor, and take the batches that are read ahead as not taken."""
        self._ask, self._ended, self._read_ahead = ask, ended, read_ahead

    def state_dict(self) -> dict[str, Any]:
        """Return the position; exact at a boundary of two steps."""
        # Left by `break`, and so was a pass before: then the program goes on to the next pass. While an
        # exception is handled, the run has ended in the middle.
        over = self._broken_off and self._breaks_off and sys.exc_info()[1] is self._handled_at_begin
        # What was read ahead is trained with after the end of the pass.
        remaining = self._read_ahead.remaining
        over = over or (self._is_exhausted and not remaining)
        state = {
            "passes": self.passes,
            "batches": self.batches - remaining,
            "at_begin": None if over else self._at_begin,
            "leaves": self._breaks_off,
        }
        if not self._read_ahead.is_sure:
            state["unsure"] = True
        # A loader with a generator of its own would otherwise be resumed in another order.
        own = own_generators(self._loader)
        if own:
            state |= {"own": _states(own), "own_at_begin": self._own_at_begin}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue at a saved position."""
        self.passes, self.batches = state["passes"], state["batches"]
        self._at_begin, self._own_at_begin = state["at_begin"], state.get("own_at_begin", {})
        self._broken_off, self._breaks_off = False, state.get("leaves", False)
        self._resume = state if state["at_begin"] is not None else None
        if state.get("unsure"):
            log.warning(
                "ciuic: not resumed exactly: whether the run had trained with all of the %d batches that it had fetched is "
                "not known: call manager.consumed() for each batch that the program takes from its prefetcher",
                self.batches,
            )
        _restore(own_generators(self._loader), state.get("own", {}))

    def _make_workers(
        self, begin: Callable[[], Iterator[Any]], own: dict[str, Any], *, passes_before: int
    ) -> None:
        """Create persistent workers without a trace in the random generators."""
        loader = self._loader
        persist = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0)
        # Only the first pass of a loader with persistent workers creates them, and draws random numbers for
        # it. A resumed process does so in a later pass, which drew none in the original run.
        if passes_before and persist and getattr(loader, "_iterator", loader) is None:
            before, own_before = stateful.random_states(), _states(own)
            begin()
            stateful.restore_random_states(before)
            _restore(own, own_before)

    @property
    def epoch(self) -> int:
        """Pass to continue with right after `load_state_dict`: the interrupted one, or the next."""
        return self.passes - 1 if self._resume is not None else self.passes

    @property
    def taken(self) -> int:
        """Batches taken of pass `epoch`."""
        return self.batches if self._resume is not None else 0

    def _pass(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        resume, self._resume = self._resume, None
        own = own_generators(self._loader)
        self._is_exhausted = False
        if resume is None:
            self._breaks_off = self._breaks_off or self._broken_off
            # However the pass before ended, it is over; `ask` may take a snapshot that must know so.
            self._at_begin = None
            self._ask()
            self._make_workers(begin, own, passes_before=self.passes)
            self.passes += 1
            self.batches, self._at_begin, self._own_at_begin = 0, stateful.random_states(), _states(own)
            batches = begin()
        else:
            self._make_workers(begin, own, passes_before=self.passes - 1)
            at_snapshot, own_at_snapshot = stateful.random_states(), _states(own)
            # The order of a pass follows from the generators as they were at its beginning.
            stateful.restore_random_states(resume["at_begin"])
            _restore(own, resume.get("own_at_begin", {}))
            batches = begin()
            _skip(batches, resume["batches"])
            # Now to the states of the snapshot, from which the run itself went on to draw.
            stateful.restore_random_states(at_snapshot)
            _restore(own, own_at_snapshot)
        self._read_ahead.begun()
        number, self._broken_off, self._handled_at_begin = self.passes, False, sys.exc_info()[1]
        while True:
            # The first batch of a pass was announced above, before the pass counted.
            if self.batches or resume is not None:
                self._ask()
            try:
                batch = next(batches)
            except StopIteration:
                # A snapshot from here on resumes into the next pass, unless batches were read ahead.
                self._is_exhausted = True
                self._read_ahead.exhausted()
                self._ended()
                return
            self.batches += 1
            self._read_ahead.fetched()
            try:
                yield batch
            # `break`, or an exception, in the program's loop; a generator of an earlier pass may be closed
            # late.
            except GeneratorExit:
                self._broken_off = self._broken_off or number == self.passes
                raise


def own_generators(loader: Any) -> dict[str, Any]:
    """Return the random generators that a loader, its samplers and its data set hold, by attribute path."""
    found: dict[str, Any] = {}
    # Samplers refer to their data set, which may refer back.
    seen: set[int] = set()
    _find_generators(loader, "", 0, found, seen)
    return found


def _find_generators(holder: Any, path: str, depth: int, found: dict[str, Any], seen: set[int]) -> None:
    if id(holder) in seen or depth > _MAX_DEPTH:
        return
    seen.add(id(holder))
    for name, value in list(getattr(holder, "__dict__", {}).items()):
        if id(value) not in seen and _is_generator(value):
            seen.add(id(value))
            found[f"{path}{name}"] = value
        elif name.lstrip("_") in _PARTS:
            _find_generators(value, f"{path}{name}.", depth + 1, found, seen)


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
    """Skip batches; where the loader reads in this process only the order is drawn, and nothing is loaded."""
    # Attributes and classes of torch's loader that are not public: where they are missing the batches are
    # loaded and dropped.
    order = getattr(batches, "_sampler_iter", None)
    from_map = type(batches).__name__ == "_SingleProcessDataLoaderIter" and (
        type(getattr(batches, "_dataset_fetcher", None)).__name__ == "_MapDatasetFetcher"
    )
    with suppress(StopIteration):
        for _ in range(number):
            next(order if from_map and order is not None else batches)


def is_plain_loader(value: object) -> bool:
    """Return whether a value is a loader of batches that does not know its own position."""
    return (
        hasattr(value, "__iter__")
        and not isinstance(value, (dict, list))
        and not callable(getattr(value, "state_dict", None))
        and (hasattr(value, "dataset") or hasattr(value, "__len__"))
    )
