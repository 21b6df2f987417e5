"""Position of a run in its data, for loaders that do not know it themselves.

A `StatefulDataLoader` has a state_dict of its own, which is better. For any other loader the position
consists of the number of passes begun, the number of batches taken in the current pass, and the states of the
random generators when that pass began. To continue, restore those states, begin the same pass, skip the
batches taken, and set the generators to their states at the snapshot. So the order is the same, and no batch
comes twice or never. Random generators that the loader, its samplers or its data set hold are saved and
restored together with those of the process. What the workers of a loader draw by themselves within a pass
cannot be repeated.

A pass that the program leaves by ``break`` is over when the next one begins. Until then it is unknown whether
the program left the pass or the run ended: what happened after an earlier pass decides. Where there was none,
or while an exception is being handled, the run is taken to have ended in the middle of the pass.

A prefetcher fetches a batch before it trains with the one before, so that the position of a loader is not that of
the training. The batches that a pass fetches before any gradient is added, and before any step, are read ahead; so
many are ahead until the pass ends, and each step after its end trains with some of them. Where the gradients are
out of sight (no optimizer of torch's) the steps alone are counted, and where those cannot tell, or the batches
are fetched by another thread, the position is not sure: that is logged, and again at a resume. A program that tells
(`consumed`) is believed.
Gradients are looked up in torch's own optimizers and those derived from them, at a few parameters of each. Another
optimizer may keep its gradients anywhere: of it nothing is known.
"""

from __future__ import annotations

import copy
import random
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any, Final

from ciuic.training.logs import log, warn_once
from ciuic.training.state import randomness
from ciuic.training.state.method_hooks import override
from ciuic.training.state.stateful import load_into, state_of

# Attributes of a loader that may hold random generators, and how deep they may be nested.
_PARTS: Final = ("sampler", "batch_sampler", "dataset", "data_source")
_MAX_DEPTH: Final = 4

_OWN_POSITION: Final = (
    "a resume would not be exact: the program fetches batches before it trains with the one before, and the loader's own state "
    "counts them as done: register a DataLoader without a state_dict, whose batches are counted here"
)


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
            before, own_before = randomness.state(), _states(own)
            begin()
            randomness.restore(before)
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
            self.batches, self._at_begin, self._own_at_begin = 0, randomness.state(), _states(own)
            batches = begin()
        else:
            self._make_workers(begin, own, passes_before=self.passes - 1)
            at_snapshot, own_at_snapshot = randomness.state(), _states(own)
            # The order of a pass follows from the generators as they were at its beginning.
            randomness.restore(resume["at_begin"])
            _restore(own, resume.get("own_at_begin", {}))
            batches = begin()
            _skip(batches, resume["batches"])
            # Now to the states of the snapshot, from which the run itself went on to draw.
            randomness.restore(at_snapshot)
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


class Passes:
    """Passes over a loader that knows its own position and not the number of its pass."""

    def __init__(self) -> None:
        """Begin before the first pass."""
        self.passes = 0
        """Passes begun so far, including the current one."""
        self.batches = 0
        """Batches taken of the current pass."""
        self._is_over = True
        self._continues = False
        """The next iterator is of the pass that the loader was restored into."""
        self._read_ahead = ReadAhead()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the pass and of its batches."""
        if self._read_ahead.remaining:
            warn_once(_OWN_POSITION)
        return {"passes": self.passes, "batches": self.batches, "over": self._is_over}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator continue at a saved position, as the loader does that was restored with it."""
        self.passes, self.batches, self._is_over = state["passes"], state["batches"], state["over"]
        self._continues = not self._is_over

    @property
    def epoch(self) -> int:
        """Pass to continue with right after `load_state_dict`: the interrupted one, or the next."""
        return self.passes if self._is_over else self.passes - 1

    @property
    def taken(self) -> int:
        """Batches taken of pass `epoch`."""
        return 0 if self._is_over else self.batches

    def begun(self, read_ahead: ReadAhead) -> None:
        """Count a pass: the program has asked for an iterator."""
        self._read_ahead = read_ahead
        read_ahead.begun()
        if not self._continues:
            self.passes, self.batches = self.passes + 1, 0
        self._is_over = self._continues = False

    def fetched(self) -> None:
        """Count a batch."""
        self.batches += 1
        self._read_ahead.fetched()

    def ended(self) -> None:
        """Leave the pass: there was no further batch."""
        self._is_over = True
        self._read_ahead.exhausted()


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


NOT_SURE: Final = (
    "a resume would not be exact: the program seems to fetch batches before it trains with the one before, and how many "
    "cannot be known here: call manager.consumed() for each batch that it takes from its prefetcher"
)
_AHEAD: Final = (
    "the program fetches %d batch(es) before it trains with the first: they count as read ahead, and come again after a "
    "resume. If it has left them out instead, call manager.consumed() for each batch that it has done with"
)


class ReadAhead:
    """Batches of the current pass that were fetched and not trained with."""

    def __init__(self, gradients: Gradients | None = None) -> None:
        """Begin before the first pass.

        Args:
            gradients: Those of the training; None: the program does not train with the loader's manager.
        """
        self._gradients = gradients or Gradients()
        self._home = threading.get_ident()
        """Thread that has registered the loader."""
        self._steps_in: int | None = None
        """Thread of the last step."""
        self._is_told = False
        self._is_doubtful = False
        """The position has been found unsure."""
        self.begun()
        self._mark: dict[int, tuple[Any, int]] = {}

    def begun(self) -> None:
        """Begin or continue a pass."""
        self._fetched = 0
        self._consumed = 0
        self._ahead = 0
        self._is_leading = True
        """The program has not trained in this pass yet."""
        self._is_exhausted = False
        self._steps_after_end = 0
        self._at_steps: list[int] = []
        """Numbers of batches fetched at the first two steps."""
        self._trained = False

    def asked(self) -> None:
        """Look at what has happened since the fetch before."""
        if self._is_leading and self._fetched and not self._is_exhausted:
            if self._trained or self._gradients.were_added(self._mark):
                self._is_leading = False
            elif self._gradients.are_known:
                self._ahead += 1
        if self._is_leading:
            self._mark = self._gradients.mark()
        self._trained = False

    def fetched(self) -> None:
        """Count a batch."""
        self._fetched += 1

    def exhausted(self) -> None:
        """Note that there was no further batch."""
        self._is_exhausted = True

    def trained(self) -> None:
        """Note that the batches fetched before are trained with, with or without a step."""
        self._trained = True

    def stepped(self) -> None:
        """Count a step of the run."""
        self.trained()
        self._steps_in = threading.get_ident()
        self._steps_after_end += self._is_exhausted
        if len(self._at_steps) < 2:
            self._at_steps.append(self._fetched)
        if self._is_told or not self._fetched:
            return
        if self._ahead:
            warn_once(_AHEAD % self._ahead)
        # Where gradients are seen, this is a step with what was accumulated of the last batches.
        if not self._gradients.are_known and (self._is_exhausted or self._ahead_by_steps() > 0):
            self._doubt()

    def consumed(self, batches: int) -> None:
        """Believe the program, which has trained with so many more batches of the pass or is about to."""
        self._is_told = True
        self._consumed += batches

    def is_foreign(self) -> bool:
        """Return whether batches are fetched by another thread than the one that trains; then none of its fetches is a boundary."""
        here = threading.get_ident()
        # Not the thread of steps alone: an optimizer may step within the backward pass, in a thread of autograd.
        if self._steps_in is None or here in (self._steps_in, self._home):
            return False
        self._doubt()
        return True

    @property
    def is_sure(self) -> bool:
        """True if the position is that of the training."""
        if self._is_told:
            return True
        # Two batches before the first step: accumulated, or one read ahead?
        first = not self._gradients.are_known and len(self._at_steps) == 1 and self._at_steps[0] > 1
        return not self._is_doubtful and not first

    @property
    def remaining(self) -> int:
        """Number of batches that were fetched and not trained with."""
        if self._is_told:
            return max(0, self._fetched - self._consumed)
        per_step = self._at_steps[1] - self._at_steps[0] if len(self._at_steps) == 2 else 1
        return max(0, min(self._fetched, self._ahead) - self._steps_after_end * max(1, per_step))

    def _ahead_by_steps(self) -> int:
        """Return by how many batches the first step came later than the second."""
        return 2 * self._at_steps[0] - self._at_steps[1] if len(self._at_steps) == 2 else 0

    def _doubt(self) -> None:
        self._is_doubtful = True
        if not self._is_told:
            warn_once(NOT_SURE)


# Parameters of each optimizer that are looked at, spread over all of them.
_SAMPLE: Final = 16


class Gradients:
    """Gradients of the optimizers of one training."""

    def __init__(self, capturing: Callable[[], bool] = lambda: False) -> None:
        """Begin without optimizers.

        Args:
            capturing: Returns whether nothing on a device may be read now.
        """
        self._capturing = capturing
        self._sampled: dict[int, tuple[Any, list[Any]]] = {}
        """Optimizers with the parameters that are looked at, by id."""
        self._used: dict[int, tuple[Any, int]] = {}
        """Gradients that the last step has used, by id of the parameter."""

    def add(self, optimizer: Any) -> None:
        """Look at an optimizer too."""
        torch = sys.modules.get("torch")
        if torch is None or not isinstance(optimizer, torch.optim.Optimizer):
            return
        found = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
        self._sampled[id(optimizer)] = (optimizer, found[:: max(1, len(found) // _SAMPLE)])

    def remove(self, optimizer: Any) -> None:
        """Look at an optimizer no longer."""
        self._sampled.pop(id(optimizer), None)

    @property
    def are_known(self) -> bool:
        """True if there are parameters to look at."""
        return any(parameters for _, parameters in self._sampled.values())

    def stepped(self, optimizer: Any) -> None:
        """Take the gradients of an optimizer as used: it has made its step."""
        _, parameters = self._sampled.get(id(optimizer), (None, ()))
        self._used |= _marked(parameters)

    def mark(self) -> dict[int, tuple[Any, int]]:
        """Return what `were_added` compares with."""
        return dict(mark for _, parameters in self._sampled.values() for mark in _marked(parameters).items())

    def were_added(self, since: dict[int, tuple[Any, int]]) -> bool:
        """Return whether a backward pass has added to a gradient since `mark`; setting it to zero does not count."""
        return self._capturing() or any(
            _any_added(parameters, since) for _, parameters in self._sampled.values()
        )

    def are_pending(self) -> bool:
        """Return whether gradients were added that no step has used.

        In every optimizer: the backward pass of one often adds to another's as well, which are then dropped (a GAN).
        """
        return (
            self.are_known
            and not self._capturing()
            and all(_any_added(found, self._used) for _, found in self._sampled.values() if found)
        )


def _any_added(parameters: Iterable[Any], since: Mapping[int, tuple[Any, int]]) -> bool:
    return any(
        one.grad is not None and _is_another(one.grad, since.get(id(one))) and _is_nonzero(one.grad)
        for one in parameters
    )


def _marked(parameters: Any) -> dict[int, tuple[Any, int]]:
    # Weakly: the memory of a gradient that the program drops must be free at once.
    return {
        id(one): (weakref.ref(one.grad), _version(one.grad)) for one in parameters if one.grad is not None
    }


def _is_another(gradient: Any, mark: tuple[Any, int] | None) -> bool:
    return mark is None or mark[0]() is not gradient or mark[1] != _version(gradient)


def _version(gradient: Any) -> int:
    return 0 if gradient.is_inference() else int(gradient._version)


def _is_nonzero(gradient: Any) -> bool:
    torch = sys.modules["torch"]
    # Of a sharded one the answer would be a collective call, and of a sparse one there is none.
    plain = type(gradient) is torch.Tensor and gradient.layout is torch.strided
    try:
        return not plain or bool(gradient.detach().any())
    # Not for every dtype and device, and no reason to end a training.
    except RuntimeError:
        return True
