"""Position of a run in its data: the fallback for loaders that have no state of their own.

A `StatefulDataLoader` has a state_dict, which is better and is saved as that of any object (`boundaries.Passes`
counts only its passes). For any other loader the position consists of the number of passes begun, the number of
batches taken in the current pass, and the states of the random generators when that pass began. To continue,
restore those states, begin the same pass, skip the batches taken, and set the generators to their states at the snapshot. So the order is the same, and no batch
comes twice or never. Random generators that the loader, its samplers, data sets, transforms or `collate_fn` hold are
saved and restored together with those of the process, as are numbers by which samplers count epochs. What the workers of a loader draw by themselves within a pass
cannot be repeated.

A pass that the program leaves by ``break`` is over when the next one begins. Until then it is unknown whether
the program left the pass or the run ended: what happened after an earlier pass decides. Where there was none,
or while an exception is being handled, the run is taken to have ended in the middle of the pass. Batches that the
program has fetched and not trained with (`boundaries.ReadAhead`) count as not taken.

A pass in which nothing is trained (a look at a batch, an evaluation on the training's data) is no epoch: it turns out
when the next pass begins, and the position is again that of the epoch before. After a resume such a pass gets the
next batches of the interrupted epoch, or, with gradients disabled, all batches; the epoch then continues as if it had
not been, with the random generators of the snapshot. Between two epochs the looks that an undisturbed run would have
made as well (those before or after each epoch) draw from the generators, and those at the start of the program do not.
"""

from __future__ import annotations

import copy
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from types import FunctionType, MethodType, ModuleType, NoneType
from typing import Any, Final

from ciuic.training.logs import log, warn_once
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import (
    Boundaries,
    CountedPass,
    Epochs,
    Fetches,
    Pass,
    ReportingIterator,
    override,
)
from ciuic.training.state.rank_state import digest_of
from ciuic.training.state.stateful import load_into, state_of

# Attributes of a loader that may hold random generators.
_PARTS: Final = ("sampler", "batch_sampler", "dataset", "data_source", "collate_fn", "pipeline")
_SAMPLERS: Final = ("sampler", "batch_sampler")
# How deep generators may be nested, and how much is looked at: this is done at each boundary. A longer container
# is taken for data.
_MAX_DEPTH: Final = 10
_MAX_OBJECTS: Final = 500
_MAX_ITEMS: Final = 64


_HINT: Final = (
    "for a look or an evaluation use a loader of its own: `look = DataLoader({0}.dataset, batch_size={0}.batch_size)` "
    "and `for batch in look: …`"
)
_COUNTED: Final = (
    "a pass over {0} that ended after one batch counts as an epoch, which a resumed run does not repeat: no registered "
    "optimizer shows whether the program trained; "
) + _HINT
_NOT_COUNTED: Final = (
    "a pass over {0} in which no step was taken does not count as an epoch: if the program only accumulates gradients "
    "in it, a resumed run repeats it; "
) + _HINT
_NESTED: Final = (
    "a resume is not exact: {0} is iterated within another pass over it, in a way that a resume cannot repeat; "
) + _HINT
_REPEATED: Final = (
    "not resumed exactly: the snapshot was taken at the end of an epoch, and the program has begun without the look at "
    "{0} that came first when it was new: one epoch comes too many; "
) + _HINT
_AFTER_LEFT: Final = (
    "the snapshot after an epoch that the program leaves by `break` is taken before the pass over {0} that follows and trains "
    "nothing: a resume is exact only if the program makes that pass before each epoch; evaluate under torch.no_grad(), or "
) + _HINT
_IN_WORKERS: Final = (
    "a resume would not be exact: persistent workers of {0} have random generators of their own ({1}), whose states cannot be "
    "read: use persistent_workers=False, or draw from the global generators"
)
_UNKNOWN_LOOKS: Final = (
    "perhaps not resumed exactly: whether the program looks at {0} before each epoch or only at its start is not known "
    "after one epoch, and the order of the next epochs follows from it; "
) + _HINT


class Position(Epochs):
    """Position in one loader, whose passes and batches are counted from now on."""

    def __init__(self, loader: Any, ask: Callable[[], object] = lambda: None) -> None:
        """Count the passes and batches of a loader.

        Args:
            loader: The loader; its class is replaced by a subclass.
            ask: Called before each batch is fetched.

        Raises:
            TypeError: The class of the loader cannot be derived from.
        """
        super().__init__()
        self._breaks_off = False
        """The program has left an earlier epoch before its end, and begun the next."""
        self._first_looks = 0
        """Passes before the first epoch."""
        self._loader = loader
        self._name = ""
        self.ask = ask
        self._ask_to_begin: Callable[[], object] = ask
        self._numbers = {path: one.get_state() for path, one in _counts(_walk(loader)).items()}
        """Numbers that the samplers held at first."""
        self._counting: set[str] = set()
        """Those that have changed since: others are settings, which a resumed program may choose anew."""
        position = self

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any) -> Iterator[Any]:
                return position._iterate(lambda: method(self))

            return wrapped

        if not override(loader, "__iter__", make):
            raise TypeError(f"{type(loader).__qualname__} is a class that nothing can be derived from")

    def watch(self, boundaries: Boundaries, name: str = "") -> None:
        """Report each fetch, and take the batches that are read ahead as not taken.

        Args:
            boundaries: Told of fetches; tells of steps.
            name: What warnings call the loader.
        """
        super().watch(boundaries)
        self._name = name
        self._ask_to_begin = lambda: boundaries.asked(self.read_ahead, begins=True)

    def state_dict(self) -> dict[str, Any]:
        """Return the position; exact at a boundary of two steps."""
        shown, now = self._epoch(), self.now
        remaining = self.read_ahead.remaining_of(shown.fetches)
        ahead = remaining
        behind = now.fetches.carried - now.fetches.fetched
        follows = None
        if shown is now and now.before is not None and behind > 0:
            # The program trains with the last batches of the pass before.
            shown, follows, remaining, ahead = now.before, now, behind, now.fetches.carried
        leaves = self._breaks_off or _follows_left(shown) or (self._begins and shown.was_left)
        # Left by `break`, and so was an epoch before: then the program goes on to the next one. While an
        # exception is handled, the run has ended in the middle.
        over = shown.was_left and (
            self._begins
            or shown.fetches.is_left_out
            or shown is not now
            or (leaves and sys.exc_info()[1] is shown.handled)
        )
        # What was read ahead is trained with after the end of the pass.
        over = over or (shown.is_over and not shown.was_left and not remaining)
        state = {
            "passes": shown.number,
            "batches": shown.batches - remaining,
            "at_begin": None if over else shown.at_begin,
            "leaves": leaves,
            "workers": self._has_workers() if over else shown.had_workers,
            "looks": shown.looks + (shown is not now and follows is None and shown.is_over),
            "looks_before": shown.looks_before,
            "first_looks": self._first_looks,
        }
        if ahead:
            state["ahead"] = ahead
        if follows is not None:
            state["follows"] = {
                "passes": follows.number,
                "batches": 0,
                "at_begin": follows.at_begin,
                "own_at_begin": follows.own_at_begin,
                "at_first": follows.at_first,
                "ahead": follows.fetches.fetched,
            }
        if not self.read_ahead.is_sure:
            state["unsure"] = True
        # A loader with a generator of its own would otherwise be resumed in another order.
        own = self._own()
        if own:
            self._warn_of_workers(own)
            self._counting |= {
                path
                for path, number in self._numbers.items()
                if path in own and own[path].get_state() != number
            }
            state |= {"own": self._changing(_states(own)), "own_at_begin": self._changing(shown.own_at_begin)}
        if not over and shown.at_first is not None:
            state["at_first"] = {**shown.at_first, "own": self._changing(shown.at_first["own"])}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Let the next pass continue at a saved position."""
        self.now = _saved(state)
        self._breaks_off, self._first_looks = state.get("leaves", False), state.get("first_looks", 0)
        if state.get("unsure"):
            log.warning(
                "ciuic: not resumed exactly: whether the run had trained with all of the %d batches that it had fetched is "
                "not known: call manager.consumed() for each batch that the program takes from its prefetcher",
                state["batches"],
            )
        self._counting |= state.get("own", {}).keys() & self._numbers.keys()
        _restore(self._own(), state.get("own", {}))

    def _own(self) -> dict[str, Any]:
        """Return what the loader holds and changes by itself: random generators, and numbers of samplers."""
        parts = list(_walk(self._loader))
        return {path: one for path, one in parts if _is_generator(one)} | _counts(parts)

    def _changing(self, states: Mapping[str, Any]) -> dict[str, Any]:
        return {
            path: state
            for path, state in states.items()
            if path not in self._numbers or path in self._counting
        }

    def _warn_of_workers(self, own: Mapping[str, Any]) -> None:
        """Warn of generators whose copies live in workers for longer than an epoch, out of reach."""
        loader = self._loader
        held = [one for one in own if one.split(".")[0] in ("dataset", "collate_fn")]
        if held and getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0):
            warn_once(_IN_WORKERS.format(self._name or "the loader", ", ".join(held[:3])))

    def _is_look(self, *, ends: bool) -> bool:
        now, before = self.now, self.now.before
        if before is None:
            return False
        # The rest of a saved epoch may be empty, as that of another loader with which it is taken, or read ahead.
        is_rest = before.is_pending and now.number == before.number
        fetches = now.fetches
        if is_rest and (fetches.is_left_out or (fetches.is_exhausted and fetches.fetched <= before.ahead)):
            return False
        # An iterator that a framework makes to see whether it can is no epoch.
        if now.was_left and not fetches.fetched:
            return True
        if not (ends or now.is_over or before.is_open):
            return False
        return self.read_ahead.is_look(beside=before.is_open)

    def _settle(self) -> Pass:
        """Return the last epoch, after which another pass begins."""
        now = self.now
        before = now.before
        if before is None:
            return now
        if not self._is_look(ends=True):
            if before.is_pending and now.number != before.number:
                warn_once(_REPEATED.format(self._name))
            self._breaks_off = self._breaks_off or _follows_left(now)
            now.before = None
            return now
        if now.fetches.closes_step:
            warn_once(_AFTER_LEFT.format(self._name))
        if self.read_ahead.is_guess and now.fetches.fetched:
            warn_once(_NOT_COUNTED.format(self._name))
        if not before.is_open:
            self._count_look(before, 1)
        return before

    def _count_look(self, before: Pass, number: int) -> None:
        before.looks, before.looks_here = before.looks + number, before.looks_here + number
        if not before.number:
            self._first_looks = before.looks

    def return_to(self, one: Pass) -> None:
        """Make a pass the current one again, after one that began within it."""
        within, self.now = self.now, one
        is_inexact, before = within.fetches.trains, one.before
        if before is not None and before is within.before:
            # Until its first step it was taken for a look before the other one.
            self._count_look(before, -1)
            is_inexact = is_inexact or before.is_pending
        if self._name and is_inexact:
            warn_once(_NESTED.format(self._name))
        self.read_ahead.now = one.fetches
        if within.fetches.stepped:
            self.read_ahead.trained()

    def _continues(self, base: Pass, fetches: Fetches) -> bool:
        """Return whether the pass that begins is the rest of a saved epoch."""
        # An evaluation takes all batches, and leaves the rest to the training.
        if not base.is_pending or (fetches.is_seen and fetches.is_evaluation):
            return False
        # Of an empty rest nobody can look at a batch, and the program is taken to begin as it did at first.
        length: float = math.inf
        with suppress(TypeError):
            length = len(self._loader)
        return base.batches < length or base.looks_here >= self._first_looks or not fetches.is_seen

    def _has_workers(self) -> bool:
        return getattr(self._loader, "_iterator", None) is not None

    def _make_workers(self, begin: Callable[[], Iterator[Any]], own: dict[str, Any], base: Pass) -> None:
        """Create persistent workers without a trace in the random generators."""
        loader = self._loader
        persist = getattr(loader, "persistent_workers", False) and getattr(loader, "num_workers", 0)
        # Only the first pass of a loader with persistent workers creates them, and draws random numbers for
        # it. A resumed process does so in a later pass, which drew none in the original run.
        if base.is_loaded and base.had_workers and persist and not self._has_workers():
            before, own_before = stateful.random_states(), _states(own)
            begin()
            stateful.restore_random_states(before)
            _restore(own, own_before)

    def _rewind(self, base: Pass, own: dict[str, Any], *, continues: bool) -> None:
        """Take back what was drawn since the resume for looks that the run had made before the snapshot."""
        if base.at_resume is None:
            base.at_resume = (stateful.random_states(), _states(own))
            return
        if continues or (not base.is_pending and 0 < base.looks_here == self._extra_looks(base)):
            stateful.restore_random_states(base.at_resume[0])
            _restore(own, base.at_resume[1])

    def _extra_looks(self, base: Pass) -> int:
        """Return how many looks after a resume between two epochs an undisturbed run would not have made."""
        looks_saved = base.looks - base.looks_here
        if not base.number:
            return looks_saved
        if self._first_looks and base.looks_before is None:
            warn_once(_UNKNOWN_LOOKS.format(self._name))
        # A program begins with the same looks again, of which some come with every epoch.
        to_come = 0 if base.looks_before is None else base.looks_before - looks_saved
        return self._first_looks - to_come

    def _begin(self, begin: Callable[[], Iterator[Any]], base: Pass, fetches: Fetches) -> Iterator[Any]:
        """Begin a pass after the last epoch, or continue that."""
        own = self._own()
        continues = self._continues(base, fetches)
        if base.is_loaded:
            self._rewind(base, own, continues=continues)
        now = self.now = Pass(
            number=base.number if continues else base.number + 1,
            before=base,
            fetches=fetches,
            is_over=False,
            handled=sys.exc_info()[1],
            had_workers=base.had_workers if continues else self._has_workers(),
            looks_before=base.looks_before if continues else (base.looks if base.number else None),
        )
        self._make_workers(begin, own, base)
        at_now, own_now = stateful.random_states(), _states(own)
        if not continues:
            now.at_begin, now.own_at_begin = at_now, own_now
            batches = begin()
            now.left_by_begin = digest_of(_draws(own))
            return batches
        now.batches, now.at_begin, now.own_at_begin = base.batches, base.at_begin, base.own_at_begin
        now.at_first, now.follows = base.at_first, base.follows
        assert base.at_begin is not None
        # The order of a pass follows from the generators as they were at its beginning.
        stateful.restore_random_states(base.at_begin)
        _restore(own, base.own_at_begin)
        batches = begin()
        at_first = base.at_first or _draws(own)
        if not (base.batches or base.ahead):
            now.left_by_begin = digest_of(at_first)
        # Now to the states of the snapshot, from which the run itself went on to draw.
        stateful.restore_random_states(at_now)
        _restore(own, own_now)
        return self._rest(batches, base, at_first) if base.batches or base.ahead else batches

    def _rest(self, batches: Iterator[Any], base: Pass, at_first: dict[str, Any]) -> Iterator[Any]:
        """Skip what was taken, at the first fetch: a sampler may be told its epoch until then."""
        own = self._own()
        here = _draws(own)
        stateful.restore_random_states(at_first["random"])
        _restore(own, at_first["own"])
        _skip(batches, base.batches)
        # The first fetch decides the order.
        first = list(islice(batches, 0 if base.batches else 1))
        stateful.restore_random_states(here["random"])
        _restore(own, here["own"])
        yield from first
        yield from batches

    def _iterate(self, begin: Callable[[], Iterator[Any]]) -> Iterator[Any]:
        """Begin a pass at once, as the loader itself does: it may draw here, and at the first fetch."""
        around = self.now
        base = self.now = self._settle()
        # In a look all batches of the pass before are trained with, or never.
        after = base.fetches if base is around and base.fetches.is_exhausted else None
        if base.follows is not None and after is not None:
            base = self.now = base.follows
        fetches = self.read_ahead.begin(within=base.is_open, after=after)
        # Within another pass it may be a look, from which no program continues.
        if not (base.is_pending or base.is_open or fetches.is_quiet):
            # However the pass before ended, it is over; `ask` may take a snapshot that must know so.
            self._begins = True
            try:
                fetches.closes_step = bool(self._ask_to_begin())
            finally:
                self._begins = False
        self.read_ahead.now = fetches
        batches = self._begin(begin, base, fetches)
        return ReportingIterator(batches, _Counted(self, self.now, base, around))

    def _note_first(self, now: Pass) -> None:
        """Note the random generators at the first fetch, if they are not as the beginning of the pass has left them."""
        here = _draws(self._own())
        if now.left_by_begin != digest_of(here):
            now.at_first = here

    def _leave(self, one: Pass, around: Pass) -> bool:
        """Return to the pass within which the program has looked at batches; return whether it has."""
        if one is not self.now or not around.is_open or not self._is_look(ends=True):
            return False
        self.return_to(around)
        return True


def _saved(state: Mapping[str, Any]) -> Pass:
    return Pass(
        number=state["passes"],
        batches=state["batches"],
        at_begin=state["at_begin"],
        own_at_begin=state.get("own_at_begin", {}),
        at_first=state.get("at_first"),
        is_over=state["at_begin"] is None,
        had_workers=state.get("workers", state["passes"] > (state["at_begin"] is not None)),
        looks=state.get("looks", 0),
        looks_before=state.get("looks_before"),
        ahead=state.get("ahead", 0),
        follows=_saved(state["follows"]) if "follows" in state else None,
        is_loaded=True,
    )


@dataclass(eq=False)
class _Counted(CountedPass):
    """Iterator over one pass."""

    epochs: Position
    base: Pass
    """The epoch before, or the saved one that is continued."""
    around: Pass
    """The pass within which the program may look at batches."""

    def asked(self) -> None:
        """Note the generators at the first fetch, too."""
        super().asked()
        if not self.one.batches and self.one.left_by_begin:
            self.epochs._note_first(self.one)

    def fetched(self) -> None:
        """Warn of a second batch after an epoch of one."""
        super().fetched()
        name, base = self.epochs._name, self.base
        if (
            name
            and self.one.batches == 2
            and base.was_left
            and base.batches == 1
            and not base.fetches.is_seen
        ):
            warn_once(_COUNTED.format(name))

    def ended(self) -> None:
        """Leave the pass; a snapshot from here on resumes into the next, unless batches were read ahead."""
        self.one.is_over = True
        self.epochs.read_ahead.exhausted()
        if not self.epochs._leave(self.one, self.around):
            self.epochs.ended()

    def left(self) -> None:
        """Leave the pass by `break`, or an exception; the iterator of an earlier pass may be dropped late."""
        self.one.is_over = self.one.was_left = self.one.fetches.is_left = True
        self.epochs._leave(self.one, self.around)


def _follows_left(one: Pass) -> bool:
    return one.before is not None and one.before.was_left


def own_generators(loader: Any) -> dict[str, Any]:
    """Return the random generators that a loader, its samplers, data sets, transforms and `collate_fn` hold.

    Returns:
        Each generator by the path of attributes, items of containers and variables of closures that leads to it.
    """
    return {path: value for path, value in _walk(loader) if _is_generator(value)}


def _walk(loader: Any) -> Iterator[tuple[str, Any]]:
    """Yield what the parts of a loader consist of, each object once, with its path."""
    seen = {id(loader)}
    for name, value in _members(loader):
        if name.lstrip("_") in _PARTS or _is_generator(value):
            # A large part leaves room for the others.
            yield from _walk_within(name, value, 1, seen, len(seen) + _MAX_OBJECTS)


def _walk_within(path: str, value: Any, depth: int, seen: set[int], limit: int) -> Iterator[tuple[str, Any]]:
    # Samplers refer to their data set, which may refer back.
    if id(value) in seen or len(seen) > limit or depth > _MAX_DEPTH:
        return
    seen.add(id(value))
    yield path, value
    if not _is_generator(value):
        for name, member in _members(value):
            yield from _walk_within(f"{path}.{name}", member, depth + 1, seen, limit)


def _members(value: Any) -> list[tuple[str, Any]]:
    """Return what an object holds, as far as that may lead to a random generator."""
    found: list[tuple[str, Any]] = []
    if isinstance(value, (list, tuple, dict)):
        items = list(value.items() if isinstance(value, dict) else enumerate(value))
        found = [(str(key), item) for key, item in items] if len(items) <= _MAX_ITEMS else []
    elif isinstance(value, FunctionType):
        # The cell of a variable that has no value yet is empty.
        names = zip(value.__code__.co_freevars, value.__closure__ or (), strict=True)
        found = [(name, cell.cell_contents) for name, cell in names if _is_filled(cell)]
    elif isinstance(value, MethodType):
        found = [("__self__", value.__self__)]
    elif isinstance(value, partial):
        found = [("func", value.func), ("args", value.args), ("keywords", value.keywords)]
    else:
        # Not by getattr, with which a proxy may load what it stands for.
        with suppress(AttributeError):
            found = list(object.__getattribute__(value, "__dict__").items())
    # An iterator of a loader has queues and processes.
    return [(name, one) for name, one in found if not isinstance(one, _LEAVES) and name != "_iterator"]


# Modules and classes lead to the whole program.
_LEAVES: Final = (int, float, complex, str, bytes, NoneType, ModuleType, type)


def _is_filled(cell: Any) -> bool:
    try:
        return cell.cell_contents is not cell
    except ValueError:
        return False


class _Count:
    """A number that a sampler may count its epochs with."""

    def __init__(self, holder: Any, name: str) -> None:
        self._holder, self._name = holder, name

    def get_state(self) -> int:
        return int(vars(self._holder)[self._name])

    def set_state(self, state: int) -> None:
        vars(self._holder)[self._name] = state


def _counts(parts: Iterable[tuple[str, Any]]) -> dict[str, _Count]:
    """Return the numbers that the samplers hold that are among the parts of a loader, by path."""
    return {
        f"{path}.{name}": _Count(holder, name)
        for path, holder in parts
        if path.split(".")[0] in _SAMPLERS
        for name, value in getattr(holder, "__dict__", {}).items()
        if type(value) is int
    }


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


def _draws(own: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all random generators, those of the process and a loader's own."""
    return {"random": stateful.random_states(), "own": _states(own)}


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
        # A WebLoader has neither, and is an IterableDataset of torch's.
        and (hasattr(value, "dataset") or hasattr(value, "__len__") or hasattr(value, "pipeline"))
    )
