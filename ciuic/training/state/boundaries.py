"""Boundaries of steps, at which the state is whole, and the batches that a step has not trained with yet.

A state that was read between `optimizer.step()` and `scheduler.step()` would resume into a run that never
was. Where a data loader is watched, the boundary of a step is the moment in which the next batch is asked
for. Otherwise it is the return of the last companion call: the calls on schedulers, gradient scalers and
averages of weights that have followed every step so far. The companions are learnt from the program: what did
not follow one step is not waited for after the next. Where the program calls `explicit`, that call is the
only boundary.

Some changes come behind the step and nothing tells of them: an average of weights that the program updates by hand, a
scheduler that follows epochs. Where one is possible, and in the first steps, in which the program may yet call
`explicit`, the boundary is the beginning of the next step, which a forward pass of a trained module tells. What the program
may have drawn for the next step by then (generators, positions, small objects) is read behind the step (`step_over`).

A prefetcher fetches a batch before it trains with the one before, so that the position of a loader is not that of
the training. The batches that a pass fetches before any gradient is added, and before any step, are read ahead; so
many are ahead until the pass ends, and each step after its end trains with some of them. Where the gradients are
out of sight (no optimizer of torch's) the steps alone are counted, and where those cannot tell, or the batches
are fetched by another thread, the position is not sure: that is logged, and again at a resume. A program that tells
(`consumed`) is believed.

The same signs tell whether a pass trains at all: one in which no step was taken and no gradient was added is a look or
an evaluation, not an epoch. Within another pass, and with gradients disabled, only a step between two fetches is such a
sign; where no optimizer is watched, every pass is an epoch.
Gradients are looked up in torch's own optimizers and those derived from them, at a few parameters of each. Another
optimizer may keep its gradients anywhere: of it nothing is known.

A call is told by a hook (`override`), for objects that have none of their own. The class of the object is replaced by a subclass in which the method reports the call. `isinstance`,
attributes and `state_dict` stay as they were (a function set on the object itself would become part of a
scheduler's state), and the object pickles and copies as an instance of its original class.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from types import FrameType
from typing import Any, Final

from ciuic.training.logs import warn_once
from ciuic.training.state import stateful

# Descriptor of the true class: some wrappers define a property ``__class__`` to hide themselves.
_CLASS: Final[Any] = object.__dict__["__class__"]


def override(value: object, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> bool:
    """Replace a method of this one object.

    Args:
        value: The object.
        name: Name of the method.
        make: Gets the method as a function of the object and returns its replacement, a function of the
            object too.

    Returns:
        Whether that was possible; not for classes written in C, or with a memory layout of their own.
    """
    base = type(value)
    method = getattr(base, name, None)
    if method is None:
        return False

    def reduce_ex(self: Any, protocol: Any) -> Any:
        derived = type(self)
        # Pickled as an instance of the original class: the derived one cannot be imported anywhere.
        _CLASS.__set__(self, base)
        try:
            reduced = self.__reduce_ex__(protocol)
        finally:
            _CLASS.__set__(self, derived)
        if isinstance(reduced, tuple) and getattr(reduced[0], "__name__", "") == "__newobj__":
            # pickle insists that __newobj__ makes an instance of the object's current class.
            return (_new, *reduced[1:])
        return reduced

    body = {
        name: make(method),
        "__reduce_ex__": reduce_ex,
        "__module__": base.__module__,
        "__doc__": base.__doc__,
    }
    # `__module__` and names of the original, so that what prints or looks up the class finds the original.
    try:
        derived = type(base.__name__, (base,), body)
        derived.__qualname__ = base.__qualname__
        _CLASS.__set__(value, derived)
    except TypeError:
        return False
    return True


def _new(cls: Any, *args: Any) -> Any:
    """Create an instance as copyreg.__newobj__ does."""
    return cls.__new__(cls, *args)


def tell_after(value: object, name: str, told: Callable[[], None]) -> bool:
    """Call ``told`` after each call of ``value.name(…)`` that returns; return whether that is possible."""

    def make(method: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = method(self, *args, **kwargs)
            told()
            return result

        wrapped.__doc__ = method.__doc__
        return wrapped

    return override(value, name, make)


# In this order, of which the first that an object has is watched: a GradScaler has `step`, within which the
# optimizer steps, and `update`, which comes last.
_COMPANION_METHODS: Final = ("update_parameters", "update", "step")
"""Methods that programs call after an optimizer step, on averages, gradient scalers and schedulers."""

NOTHING_TELLS: Final = (
    "no automatic snapshots are taken, because no registered object tells when a step of several optimizers is over: "
    "register the loader, or call boundary() after each step"
)
_OWN_POSITION: Final = (
    "a resume would not be exact: the program fetches batches before it trains with the one before, and the loader's own state "
    "counts them as done: register a DataLoader without a state_dict, whose batches are counted here"
)
_WITHIN: Final = (
    "a resume would not be exact: a registered loader with a state of its own is iterated within another pass over it, and its "
    "state is that of the inner pass: for a look use a loader of its own, `look = DataLoader(loader.dataset, "
    "batch_size=loader.batch_size)` and `batch = next(iter(look))`"
)
_NOT_SURE: Final = (
    "a resume would not be exact: the program seems to fetch batches before it trains with the one before, and how many "
    "cannot be known here: call manager.consumed() for each batch that it takes from its prefetcher"
)
_AHEAD: Final = (
    "the program fetches %d batch(es) before it trains with the first: they count as read ahead, and come again after a "
    "resume. If it has left them out instead, call manager.consumed() for each batch that it has done with"
)
_INNER_STEPS: Final = (
    "no automatic snapshots are taken: step() of the registered {0} is not called, and that of a {1} with its parameters is; "
    "register that one as well, before it, as register(inner=…, …)"
)
_CHANGES_UNSEEN: Final = (
    "a resume may not be exact: objects that are registered may change between optimizer.step() and the next step, which "
    "nothing here tells: call manager.boundary() when a step is over"
)
# The program calls `explicit` behind the first step, unless it begins so in the middle of a run.
_UNCERTAIN_STEPS: Final = 3
# Steps in a row whose forward pass was not seen, after which none is waited for.
_MAX_UNSEEN: Final = 2
# Parameters of each optimizer that are looked at, spread over all of them.
_SAMPLE: Final = 16
# Steps in a row without a boundary after which none is expected any more.
_MAX_UNCLOSED_STEPS: Final = 5


class Boundaries:
    """Detects boundaries from the calls of optimizers, companions and loaders."""

    def __init__(
        self,
        stepped: Callable[[], None],
        at_boundary: Callable[[], None],
        capturing: Callable[[], bool] = lambda: False,
        step_over: Callable[[], bool] = lambda: True,
    ) -> None:
        """Watch nothing yet.

        Args:
            stepped: Called at each step of the first optimizer that is watched.
            at_boundary: Called once after each step that is whole.
            capturing: Returns whether nothing on a device may be read now.
            step_over: Called after a step whose boundary may be the beginning of the next; returns whether it matters
                there, because something may be saved.
        """
        self._stepped = stepped
        self._at_boundary = at_boundary
        self._step_over = step_over
        self.gradients = Gradients(capturing)
        self._read_ahead: list[ReadAhead] = []
        """Batches that the program has fetched before it trains with them, for each loader."""
        self._last_asked: ReadAhead | None = None
        self._optimizers: list[Any] = []
        self._has_stepped = False
        """A registered optimizer has taken a step."""
        self._by_loader = False
        self._uses_explicit = False
        """The program calls `explicit`."""
        self._open = False
        """A step was taken, and its boundary has not come yet."""
        self._stepping = False
        self._changed_since = False
        """A companion or another optimizer was called since the last boundary."""
        self._in_batch = False
        """A batch of a watched loader was asked for, and the pass is not over."""
        self._unclosed = 0
        """Steps of the first optimizer whose boundary never came, in a row."""
        self._expected: set[int] = set()
        self._seen: set[int] = set()
        self._companions: set[int] = set()
        self._earlier: weakref.WeakKeyDictionary[Any, _EarlierSteps] = weakref.WeakKeyDictionary()
        """Optimizers that are not watched yet: the first save may be what registers them."""
        self._steps_before = 0
        _tell_every_step(self)
        self._modules: dict[int, Any] = {}
        self._known_trained: list[Any] | None = None
        self._next_step = _NextStep(self._next_begins)
        self.is_early = False
        """The last boundary came with the step, behind which something that is saved may change."""
        self.is_late = False
        """The last boundary came with the next step, for which the program may have changed what `step_over` set aside."""
        self._uncertain_steps = _UNCERTAIN_STEPS
        self._unseen_beginnings = 0
        """Steps that began without a forward pass that was seen, in a row."""

    @property
    def is_uncertain(self) -> bool:
        """True in the first steps, in which the program may yet call `explicit` for the first time."""
        return self._uncertain_steps > 0 and not self._uses_explicit

    @property
    def awaits_next(self) -> bool:
        """True if the last step is over, and its boundary is the beginning of the next."""
        return self._next_step.is_awaited

    @property
    def lacking(self) -> bool:
        """True if steps are taken, and nothing tells when they are over."""
        return self._unclosed >= _MAX_UNCLOSED_STEPS and not self._uses_explicit

    @property
    def whole(self) -> bool:
        """True if the state is whole now.

        It is so too between two passes over the data, and in an evaluation after a step.
        """
        is_open = (
            self._open and (not self._next_step.is_awaited or self._changes_behind or self._is_expecting)
        ) or (self.is_early and self._changes_behind)
        return bool(self._optimizers or self._by_loader) and not is_open and not self._in_batch

    @property
    def unchanged(self) -> bool:
        """True if the state is that of the last boundary, except for generators and evaluation metrics."""
        return self.whole and not self._changed_since and not self._stepping

    @property
    def between_passes(self) -> bool:
        """True if a watched loader has reported the end of its pass, and nothing has happened since."""
        return self._by_loader and self.unchanged

    @property
    def settled(self) -> bool:
        """True if a run can continue from the state within an evaluation: every step is whole."""
        if not (self._optimizers or self._by_loader) or self._stepping:
            return False
        if self._open:
            # With a loader the boundary of this step comes only when the next batch is asked for, after the
            # evaluation.
            return self._by_loader or not self._is_expecting
        return not self._in_batch

    def optimizer_in_step(self) -> Any | None:
        """Return an optimizer within whose step a thread is, where a signal handler may have interrupted it; None for none.

        Also one that is not watched, or has been only since its step began.
        """
        # The stacks alone tell: a step that raised an error has never reported its end.
        for frame in sys._current_frames().values():
            found = self._stepping_in(frame)
            if found is not None:
                return found
        return None

    def _stepping_in(self, frame: FrameType | None) -> Any | None:
        torch = sys.modules.get("torch")
        while frame is not None:
            # Around the method is torch's wrapper, which calls the hooks when the step is over.
            called_on = frame.f_locals.get("self") if frame.f_code.co_name == "step" else None
            if called_on is not None:
                is_watched = any(one is called_on for one in self._optimizers)
                if is_watched or (torch is not None and isinstance(called_on, torch.optim.Optimizer)):
                    return called_on
            frame = frame.f_back
        return None

    def after_step(self, optimizer: Any, call: Callable[[], None]) -> bool:
        """Call a function once when the present step of an optimizer is over; a watched one tells its boundary itself.

        Returns whether its end will be told.
        """
        if any(one is optimizer for one in self._optimizers):
            return True
        left = [call]
        try:
            # It stays, because torch goes through its hooks while they are called.
            optimizer.register_step_post_hook(lambda *_: left.pop()() if left else None)
        # A wrapper of an optimizer need not have called the constructor of its base class.
        except AttributeError:
            return False
        return True

    def watch_optimizer(self, optimizer: Any) -> bool:
        """Watch an optimizer by its own hooks (torch 2.0 and later), or by its method.

        The result tells whether that is possible.
        """
        # One optimizer may be registered under two names, and must count each step once.
        if any(one is optimizer for one in self._optimizers):
            return True
        before = getattr(optimizer, "register_step_pre_hook", None)
        try:
            if before is not None:
                before(self._before_step)
            optimizer.register_step_post_hook(lambda *_: self._after_step(optimizer))
        # A wrapper of an optimizer may have no hooks, or may not have called the constructor of its base
        # class.
        except AttributeError:
            if not tell_after(optimizer, "step", lambda: self._after_step(optimizer)):
                return False
        self._optimizers.append(optimizer)
        self._known_trained = None
        self.gradients.add(optimizer)
        if _is_of_torch(optimizer) and (earlier := self._earlier.pop(optimizer, None)) is not None:
            self.gradients.use(earlier.used)
            if optimizer is self._optimizers[0]:
                self._steps_before += earlier.steps
        # Only the first one counts steps: two optimizers of a GAN take one step of the run together.
        return True

    def pop_steps_before(self) -> int:
        """Return the steps that the first optimizer has made before it was watched, once."""
        found, self._steps_before = self._steps_before, 0
        return found

    def count_from_here(self) -> None:
        """Leave out the steps made so far: the program has told a number that includes them."""
        self._steps_before = 0
        for one in self._earlier.values():
            one.steps = 0

    def stepped_anywhere(self, optimizer: Any) -> None:
        """Count a step of an optimizer that may be watched later."""
        if all(one is not optimizer for one in self._optimizers):
            earlier = self._earlier.get(optimizer)
            if earlier is None:
                earlier = self._earlier[optimizer] = _EarlierSteps(
                    [weakref.ref(one) for one in _sample(optimizer)]
                )
            earlier.steps += 1
            if earlier.steps == _MAX_UNCLOSED_STEPS and not self._has_stepped:
                self._warn_of_inner(optimizer)
            earlier.used = _marked([one for ref in earlier.sample if (one := ref()) is not None])

    def _warn_of_inner(self, optimizer: Any) -> None:
        """Warn if an optimizer steps the parameters of a registered one that never steps itself (SAM and others that wrap one)."""
        inner = set(map(id, _sample(optimizer)))
        for one in self._optimizers:
            if inner and inner <= {id(value) for group in one.param_groups for value in group["params"]}:
                warn_once(_INNER_STEPS.format(type(one).__qualname__, type(optimizer).__qualname__))

    def forget(self, value: object) -> None:
        """Stop watching an object that is no longer registered."""
        self.gradients.remove(value)
        # Its hooks stay, and `_after_step` ignores an optimizer that is not in the list.
        self._optimizers = [one for one in self._optimizers if one is not value]
        self._expected.discard(id(value))
        self._companions.discard(id(value))
        self._modules.pop(id(value), None)
        self._known_trained = None

    def watch_module(self, module: Any) -> None:
        """Watch a module: the forward passes of one that is trained begin steps, and any other may change behind them."""
        self._modules[id(module)] = module
        self._known_trained = None

    def resumed(self) -> None:
        """Begin anew: the state is that of a snapshot."""
        self._next_step.dismiss()
        self._uncertain_steps = _UNCERTAIN_STEPS

    def watch_companion(self, value: object) -> bool:
        """Watch a scheduler, a scaler or an average of weights; return whether that is possible."""
        number = id(value)
        for name in _COMPANION_METHODS:
            if callable(getattr(value, name, None)) and tell_after(
                value, name, partial(self._companion_called, number, name)
            ):
                self._expected.add(number)
                self._companions.add(number)
                return True
        return False

    def watch_loader(self, loader: object, passes: Passes) -> bool:
        """Watch a loader, whose iterators then report and count each fetch; return whether that is possible."""
        passes.watch(self)

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any) -> Any:
                # Asked for its state before the first pass, a nodes.Loader begins one.
                if passes.is_asked_for_state:
                    passes.early = stateful.random_states()
                    return method(self)
                return passes.begun(self, method)

            return wrapped

        def remembering(method: Callable[..., Any]) -> Callable[..., Any]:
            def load_state_dict(self: Any, state: Any) -> None:
                # A nodes.Loader would go on with the pass that it has begun for its state.
                if getattr(self, "_iter_for_state_dict", False):
                    self._iter_for_state_dict = False
                method(self, state)
                passes.state_of_loader = state

            return load_state_dict

        def asking(method: Callable[..., Any]) -> Callable[..., Any]:
            def state_dict(self: Any) -> Any:
                passes.is_asked_for_state = True
                try:
                    return method(self)
                finally:
                    passes.is_asked_for_state = False

            return state_dict

        done = override(loader, "__iter__", make)
        override(loader, "load_state_dict", remembering)
        override(loader, "state_dict", asking)
        # From now on the loader tells boundaries, and the calls of companions do not.
        self._by_loader |= done
        return done

    def watch_fetches(self) -> ReadAhead:
        """Return what is told of the fetches of one more loader, and learns of each step."""
        self._read_ahead.append(
            ReadAhead(self.gradients, lambda: bool(self._optimizers or self._uses_explicit))
        )
        return self._read_ahead[-1]

    def consumed(self, batches: int) -> None:
        """Believe the program, which trains with so many more batches of each loader."""
        for one in self._read_ahead:
            one.consumed(batches)

    def asked(self, read_ahead: ReadAhead, *, begins: bool = False) -> bool:
        """Close the open step: the next batch is about to be fetched, or a pass begins; return whether one was open."""
        self._last_asked = read_ahead
        now = read_ahead.now
        if begins:
            # The program goes on: it has left the passes over other loaders that ended by `break`, too.
            self._leave_out(read_ahead, lambda other: other.is_left and other.stepped)
        else:
            now.is_left_out = False
        reads_ahead = now.ahead > 0 and (read_ahead.remaining > 0 or not now.is_over)
        if read_ahead.is_foreign() or (reads_ahead and len(self._optimizers) == 1):
            # The program may be anywhere in its step: the calls of companions tell boundaries.
            self._by_loader = self._in_batch = False
            return False
        # What is drawn in an evaluation belongs to the step before.
        if now.is_quiet:
            return False
        # Also where a `Position` calls this, which watches the loader itself.
        self._by_loader = True
        closes = self._open and not self._uses_explicit
        if closes:
            self._close()
        self._in_batch = True
        return closes

    def ended(self, read_ahead: ReadAhead) -> None:
        """Leave the pass: there was no further batch."""
        self._in_batch = False
        now = read_ahead.now
        if now.trains or now.stepped or not now.fetched:
            # `zip` takes no more batches of the others, and may have taken one in vain.
            self._leave_out(read_ahead, lambda other: not other.is_over)

    def _leave_out(self, read_ahead: ReadAhead, which: Callable[[Fetches], bool]) -> None:
        for one in self._read_ahead:
            if one is not read_ahead and which(one.now):
                one.now.is_left_out = True

    def explicit(self) -> None:
        """Close the step because the program says that it is over."""
        self._uses_explicit = True
        self._in_batch = False
        for one in self._trained_with():
            one.trained()
        self._close()

    def settle(self) -> None:
        """Close the step whose boundary is the beginning of the next, which may never come: the program waits or ends."""
        if self._next_step.is_awaited_here:
            self._close(is_late=True)

    def _trained_with(self) -> list[ReadAhead]:
        """Return the loaders whose batches the program may be training with now."""
        return [one for one in self._read_ahead if one is self._last_asked or not one.now.is_over]

    def _before_step(self, *_: object) -> None:
        if self._next_step.is_awaited_here and self._open:
            # Its forward pass was not seen (compiled functions, CUDA graphs), and may have changed buffers.
            if not any(True for module in self._trained for _ in module.buffers()):
                self._close_late()
            else:
                self._next_step.dismiss()
                self._unseen_beginnings += 1
                if self._unseen_beginnings == _MAX_UNSEEN and self._changes_behind:
                    warn_once(_CHANGES_UNSEEN)
        self._stepping = True

    def _after_step(self, optimizer: Any) -> None:
        self._has_stepped = True
        self.gradients.stepped(optimizer)
        if self._optimizers and optimizer is self._optimizers[0]:
            self._on_first()
        elif any(one is optimizer for one in self._optimizers):
            self._on_other()

    def _on_first(self) -> None:
        self._stepping = False
        self._unclosed = self._unclosed + 1 if self._open else 0
        if self._open and not self._by_loader:
            # The step before ended without a boundary: what did not follow it is no companion.
            self._expected &= self._seen
        self._open = True
        self._seen.clear()
        for one in self._trained_with():
            one.stepped()
        self._stepped()
        self.is_early = self._ends_with_next
        self.await_next()
        self._close_if_whole()

    def await_next(self) -> None:
        """Let the beginning of the next step be one more boundary of a step that was over early, if that matters by now."""
        if self.is_early and self._step_over():
            self.is_early, self._open = False, True
            self._next_step.expect(self._trained)

    def _on_other(self) -> None:
        """Count a step of another optimizer as part of the same step of the run."""
        self._stepping, self._changed_since, self._open = False, True, True
        for one in self._trained_with():
            one.trained()

    def _companion_called(self, number: int, method: str) -> None:
        self._changed_since = True
        for one in self._trained_with():
            # A gradient scaler leaves out steps, and a scheduler follows evaluations too.
            one.trained(surely=method == "update")
        if self._open:
            self._seen.add(number)
            self._close_if_whole()

    def _close_if_whole(self) -> None:
        if self._is_told_by_steps and not self._next_step.is_awaited and not self._is_expecting:
            self._close()

    def _next_begins(self) -> None:
        self._unseen_beginnings = 0
        self._close_late()

    def _close_late(self) -> None:
        # What has not followed the step by now is no companion.
        self._expected &= self._seen
        self._close(is_late=True)

    def _close(self, *, is_late: bool = False) -> None:
        self._next_step.dismiss()
        self.is_late = is_late
        self._open = self._changed_since = False
        self._at_boundary()
        self._uncertain_steps -= self._uncertain_steps > 0

    @property
    def _is_told_by_steps(self) -> bool:
        # With several optimizers nothing but a loader, or the program, can tell which of them is the last.
        return not self._by_loader and not self._uses_explicit and len(self._optimizers) == 1

    @property
    def _is_expecting(self) -> bool:
        return not self._expected <= self._seen

    @property
    def _trained(self) -> list[Any]:
        """Registered modules with a parameter that the optimizer has, none where any is sharded.

        A forward pass of FSDP has its own hooks, within which nobody may ask for the state.
        """
        if self._known_trained is None:
            found = {
                id(one)
                for optimizer in self._optimizers
                for group in optimizer.param_groups
                for one in group["params"]
            }
            self._known_trained = [
                module
                for module in self._modules.values()
                if any(id(one) in found for one in module.parameters())
            ]
            if any(
                hasattr(one, "device_mesh") for module in self._known_trained for one in module.parameters()
            ):
                self._known_trained = []
        return self._known_trained

    @property
    def _changes_behind(self) -> bool:
        """True if something that is saved may change behind the step, and no call tells of that."""
        return self._companions != self._expected or len(self._trained) < len(self._modules)

    @property
    def _ends_with_next(self) -> bool:
        """True if the boundary of a step is the beginning of the next."""
        return (
            self._is_told_by_steps
            and self._unseen_beginnings < _MAX_UNSEEN
            and bool(self._modules)
            and (self.is_uncertain or self._changes_behind)
            and bool(self._trained)
        )


@dataclass
class _EarlierSteps:
    """Steps of an optimizer before it is watched."""

    sample: list[weakref.ref[Any]]
    """Some of its parameters."""
    steps: int = 0
    used: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Gradients that the last of them has used."""


_told_of_every_step: weakref.WeakSet[Boundaries] = weakref.WeakSet()
_hooks: list[Any] = []
"""Hook for the steps of all optimizers. It stays: one that the garbage collector removes while torch iterates over its hooks
raises out of the program's step.
"""


def _tell_every_step(boundaries: Boundaries) -> None:
    """Tell of the steps of all optimizers of torch's, as long as the boundaries exist; without effect before torch is imported."""
    # Not by attributes: torch.optim has removed the name of this module.
    hook = getattr(sys.modules.get("torch.optim.optimizer"), "register_optimizer_step_post_hook", None)
    if hook is None:
        return
    _told_of_every_step.add(boundaries)
    if not _hooks:
        _hooks.append(hook(_stepped_anywhere))


def _stepped_anywhere(optimizer: Any, *_: object) -> None:
    # Constant while a step is compiled, so that nothing of this becomes part of its graph.
    if sys.modules["torch"].compiler.is_compiling():
        return
    for boundaries in list(_told_of_every_step):
        # Any optimizer of the process, of which nothing is known: what it may lack must not end its step.
        with suppress(Exception):
            boundaries.stepped_anywhere(optimizer)


class _NextStep:
    """Beginning of the next step: a forward pass, with gradients, of a module that is trained.

    A hook of all modules waits for it: one of its own would make torch.jit.script refuse the module. Only in programs
    that compile modules, which such a hook would make torch warn of, it is in the modules; a copy of a module that is
    made meanwhile, or its pickle, then gets one without effect.
    """

    def __init__(self, begins: Callable[[], None]) -> None:
        self._begins = begins
        self._handles: list[Any] = []
        self._thread = 0
        self._parameters: dict[int, list[int]] = {}
        """Identities of the parameters, by that of the module."""

    @property
    def is_awaited(self) -> bool:
        return bool(self._handles)

    @property
    def is_awaited_here(self) -> bool:
        return self.is_awaited and self._thread == threading.get_ident()

    def expect(self, modules: Iterable[Any]) -> None:
        """Wait for a forward pass of any of them."""
        self.dismiss()
        self._thread = threading.get_ident()
        known = list(modules)
        self._parameters = {id(module): [*map(id, module.parameters())] for module in known}
        if _compiles_modules():
            self._handles = [module.register_forward_pre_hook(self, prepend=True) for module in known]
        elif known:
            hooks = sys.modules["torch.nn.modules.module"]
            self._handles = [hooks.register_module_forward_pre_hook(self)]

    def dismiss(self) -> None:
        """Wait no longer."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def __call__(self, module: Any, inputs: Any) -> None:
        torch = sys.modules["torch"]
        # Constant while a module is compiled, so that nothing of this becomes part of its graph. A pass without gradients
        # is an evaluation.
        if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not self.is_awaited_here:
            return
        # A pass that is recorded, transformed (vmap, grad) or has other tensors in place of the parameters
        # (functional_call) has no state that could be saved.
        expected = self._parameters.get(id(module))
        if expected is None or torch.jit.is_tracing() or _is_transformed():
            return
        if [*map(id, module.parameters())] == expected:
            self._begins()

    def __deepcopy__(self, memo: Any) -> _NextStep:
        return _NextStep(self._begins)

    def __reduce__(self) -> Any:
        # Returns the inputs of a pass as they are, and unpickles where ciuic is not installed.
        return (getattr, ({}, "get"))


def _compiles_modules() -> bool:
    """Return whether this program has compiled something."""
    try:
        return bool(sys.modules["torch._dynamo.utils"].counters["frames"])  # type: ignore[attr-defined, unused-ignore]
    except KeyError:
        return False
    except AttributeError:
        return True


def _is_transformed() -> bool:
    """Return whether a transform of torch.func calls the program."""
    with suppress(AttributeError):
        return sys.modules["torch"]._C._functorch.peek_interpreter_stack() is not None  # type: ignore[attr-defined, unused-ignore]
    return False


@dataclass(eq=False)
class CountedPass:
    """Receiver of the fetches of one iterator."""

    epochs: Epochs
    one: Pass

    def asked(self) -> None:
        """Take the fetch for a boundary: the next batch is about to be fetched."""
        epochs = self.epochs
        if epochs.now is not self.one:
            epochs.return_to(self.one)
        epochs.read_ahead.asked()
        epochs.ask()

    def fetched(self) -> None:
        """Count a batch of this pass, and tell who watches for batches that are read ahead."""
        self.one.batches += 1
        self.epochs.read_ahead.fetched()

    def ended(self) -> None:
        """Leave the pass: there was no further batch."""
        self.one.is_over = True
        self.epochs.read_ahead.exhausted()
        self.epochs.ended()

    def left(self) -> None:
        """Note that the program has dropped the iterator before its end; the next pass ends this one where nothing else does."""


class ReportingIterator:
    """Iterator of a loader, which goes on after an error as the loader's own does, and reports each fetch."""

    def __init__(self, inner: Any, counted: CountedPass) -> None:
        self._inner = inner
        self._counted: CountedPass | None = counted

    def __iter__(self) -> ReportingIterator:
        return self

    def __next__(self) -> Any:
        """Fetch a batch."""
        counted = self._counted
        if counted is not None:
            counted.asked()
        try:
            batch = next(self._inner)
        except StopIteration:
            if counted is not None:
                self._counted = None
                counted.ended()
            raise
        if counted is not None:
            counted.fetched()
        return batch

    def __getattr__(self, name: str) -> Any:
        """Answer whatever else the program asks of the iterator by the loader's own."""
        return getattr(self._inner, name)

    def __len__(self) -> int:
        """Return the length that the loader's own iterator tells."""
        return len(self._inner)

    def __bool__(self) -> bool:
        """Return True: not every iterator has a length."""
        return True

    def __del__(self) -> None:
        """Report that the program takes no more batches."""
        counted = self.__dict__.get("_counted")
        if counted is not None:
            counted.left()


@contextmanager
def _as_begun(loader: Any, at_begin: dict[str, Any] | None) -> Iterator[None]:
    """Let a nodes.Loader draw the order of a restored pass again, and not begin the next where no batch is left."""
    restarts, before = getattr(loader, "restart_on_stop_iteration", None), None
    if restarts:
        loader.restart_on_stop_iteration = False
    if at_begin is not None:
        before = stateful.random_states()
        stateful.restore_random_states(at_begin)
    try:
        yield
    finally:
        if restarts:
            loader.restart_on_stop_iteration = restarts
        if before is not None:
            stateful.restore_random_states(before)


class Epochs:
    """Passes over one loader, of which those that train are epochs."""

    def __init__(self) -> None:
        """Begin before the first pass."""
        self.now = Pass()
        self._begins = False
        """The next pass is about to begin."""
        self.read_ahead = ReadAhead()
        self.ask: Callable[[], object] = lambda: None
        self.ended: Callable[[], None] = lambda: None

    def watch(self, boundaries: Boundaries) -> None:
        """Report each fetch to boundaries, which tell of steps."""
        read_ahead = self.read_ahead = boundaries.watch_fetches()
        self.ask = lambda: boundaries.asked(read_ahead)
        self.ended = lambda: boundaries.ended(read_ahead)

    def return_to(self, one: Pass) -> None:
        """Make a pass the current one again, after one that began within it."""
        # Otherwise the loader was restored since, and begins anew.
        if not self.now.is_loaded:
            warn_once(_WITHIN)
            # Counts on from before the inner pass, as far as that can be known: the loader's state is of one of them.
            base, one.at_begin = self.now.before or self.now, self.now.at_begin
            one.number, one.batches, one.is_over = base.number, base.batches, base.is_over
            self.now, one.before = one, None

    @property
    def passes(self) -> int:
        """Epochs begun so far, including the current one."""
        return self._epoch().number

    @property
    def epoch(self) -> int:
        """Epoch to continue with right after `load_state_dict`: the interrupted one, or the next."""
        return self.now.number - 1 if self.now.is_pending else self.now.number

    @property
    def taken(self) -> int:
        """Batches taken of epoch `epoch`; 0 where it has not begun."""
        return self.now.batches if self.now.is_pending else 0

    def _epoch(self) -> Pass:
        """Return the current pass, or the one before it while nothing is trained with the current one."""
        now = self.now
        return now.before if now.before is not None and self._is_look(ends=self._begins) else now

    def _is_look(self, *, ends: bool) -> bool:
        """Return whether the program only looks at the batches of the current pass.

        Args:
            ends: No step can follow with its batches. Otherwise it may while the pass goes on.
        """
        # The rest of an epoch may be empty.
        now = self.now.fetches
        return (now.fetched > 0 if now.is_exhausted else ends) and self.read_ahead.is_look(beside=False)


class Passes(Epochs):
    """Passes over a loader that knows its own position and not the number of its pass."""

    def __init__(self) -> None:
        """Begin before the first pass."""
        super().__init__()
        self.early: dict[str, Any] | None = None
        """Random generators when the loader began its first pass to tell its state."""
        self.is_asked_for_state = False
        """The loader is being asked for its state."""
        self.state_of_loader: Any = None
        """State that the loader was restored into."""

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the pass and of its batches."""
        if self.read_ahead.remaining:
            warn_once(_OWN_POSITION)
        # The loader's own state is that of a look until it is over.
        shown = self._epoch()
        state = {"passes": shown.number, "batches": shown.batches, "over": shown.is_over}
        return state if shown.is_over or shown.at_begin is None else {**state, "at_begin": shown.at_begin}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Let the next iterator continue at a saved position, as the loader does that was restored with it."""
        self.now = Pass(
            state["passes"],
            state["batches"],
            state.get("at_begin"),
            is_over=state["over"],
            is_loaded=True,
        )
        self.early = None

    def begun(self, loader: Any, begin: Callable[[Any], Any]) -> ReportingIterator:
        """Count a pass: the program asks the loader for an iterator, which may continue a saved pass."""
        base = self.now
        if base.before is not None and self._is_look(ends=True):
            base = base.before
            if base.at_resume is not None:
                # The look has used up what the loader was restored into.
                loader.load_state_dict(self.state_of_loader)
                stateful.restore_random_states(base.at_resume[0])
        base.before = None
        fetches = self.read_ahead.now = self.read_ahead.begin()
        now = self.now = Pass(base.number + 1, before=base, fetches=fetches, is_over=False)
        context: Any = nullcontext()
        if base.is_pending:
            base.at_resume = (stateful.random_states(), {})
            now.number, now.batches, now.at_begin = base.number, base.batches, base.at_begin
            context = _as_begun(loader, now.at_begin)
        # A loader of nodes, whose samplers may be torch's plain ones and keep no state.
        elif hasattr(loader, "root"):
            now.at_begin = self.early or stateful.random_states()
        self.early = None
        with context:
            return ReportingIterator(begin(loader), CountedPass(self, now))


@dataclass(eq=False)
class Fetches:
    """Batches of one pass that were fetched, and those that the program has trained with."""

    is_seen: bool = False
    """Training would show: the steps of an optimizer are watched, and no other thread fetches."""
    is_evaluation: bool = False
    """The pass began with gradients disabled."""
    mark: dict[int, tuple[Any, int]] = field(default_factory=dict)
    """Gradients at the last fetch before any training."""
    fetched: int = 0
    consumed: int = 0
    ahead: int = 0
    is_leading: bool = True
    """The program has not trained in this pass yet."""
    is_exhausted: bool = False
    is_left: bool = False
    """The program has left the pass before its end."""
    steps_after_end: int = 0
    at_steps: list[int] = field(default_factory=list)
    """Numbers of batches fetched at the first two steps."""
    trained: bool = False
    """Trained, or called a companion, since the last fetch."""
    stepped: bool = False
    """Trained since the first fetch."""
    trains: bool = False
    """Trained between two fetches."""
    is_within: bool = False
    """The pass began within another one over the same loader."""
    closes_step: bool = False
    """The boundary of a step was the beginning of the pass."""
    carried: int = 0
    """Batches of the pass before that were read ahead when this one began."""
    is_left_out: bool = False
    """The program has gone on without a further batch: another loader, with whose batches it takes these, had none."""

    @property
    def is_over(self) -> bool:
        """True if no further batch is fetched."""
        return self.is_exhausted or self.is_left

    @property
    def is_quiet(self) -> bool:
        """True while the pass seems to be a look or an evaluation, whose fetches are no boundaries."""
        return self.is_seen and (self.is_evaluation or self.is_within) and not (self.stepped or self.is_over)


@dataclass(eq=False)
class Pass:
    """One iteration over a loader, or a saved one that is to be continued."""

    number: int = 0
    """Epochs begun so far, including this one."""
    batches: int = 0
    """Batches taken."""
    at_begin: dict[str, Any] | None = None
    own_at_begin: dict[str, Any] = field(default_factory=dict)
    at_first: dict[str, Any] | None = None
    """The generators at the first fetch, those of the process and the loader's own; None: as the beginning left them."""
    left_by_begin: str = ""
    """Digest of what the beginning left them as."""
    before: Pass | None = None
    """The position if this pass turns out to be no epoch."""
    fetches: Fetches = field(default_factory=Fetches)
    is_over: bool = True
    """There is no further batch, or the program takes none."""
    was_left: bool = False
    """The program takes no more batches, and there may be more."""
    handled: BaseException | None = None
    """Exception that was being handled when the pass began."""
    had_workers: bool = False
    """Persistent workers had been created before the pass began."""
    looks: int = 0
    """Passes since this one that were no epochs."""
    looks_before: int | None = None
    """The same number for the epoch before this one; None: this one is the first."""
    is_loaded: bool = False
    ahead: int = 0
    """Batches of a saved pass that were read ahead."""
    follows: Pass | None = None
    """Pass after a saved one, if batches of it were read ahead too."""
    at_resume: tuple[dict[str, Any], dict[str, Any]] | None = None
    """Generators right after the resume of a saved pass: those of the process, and the loader's own."""
    looks_here: int = 0
    """Number of the `looks` of a saved pass that came after the resume."""

    @property
    def is_pending(self) -> bool:
        """True if the rest of a saved pass comes next."""
        return self.is_loaded and not self.is_over

    @property
    def is_open(self) -> bool:
        """True if the program may take a further batch from the iterator."""
        return not (self.is_loaded or self.is_over)


class ReadAhead:
    """Batches of the current pass that were fetched and not trained with, and whether the pass trains at all."""

    def __init__(
        self, gradients: Gradients | None = None, steps_are_seen: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin before the first pass.

        Args:
            gradients: Those of the training; None: the program does not train with the loader's manager.
            steps_are_seen: Returns whether the steps of the training are reported.
        """
        self._gradients = gradients or Gradients()
        self._steps_are_seen = steps_are_seen
        self._home = threading.get_ident()
        """Thread that has registered the loader."""
        self._steps_in: int | None = None
        """Thread of the last step."""
        self._is_told = False
        self._is_doubtful = False
        """The position has been found unsure."""
        self.now = Fetches()
        """The current pass; another one may be put in its place."""

    def begin(self, *, within: bool = False, after: Fetches | None = None) -> Fetches:
        """Return what is counted of a pass that begins.

        Args:
            within: Another pass over the loader goes on.
            after: The pass before, of which the program may not have trained with all batches yet.
        """
        torch = sys.modules.get("torch")
        carried = 0 if after is None else self.remaining_of(after)
        return Fetches(
            is_seen=self._steps_are_seen() and threading.get_ident() in (self._steps_in, self._home),
            is_evaluation=torch is not None and not torch.is_grad_enabled(),
            mark=self._gradients.mark(),
            is_within=within,
            ahead=carried,
            carried=carried,
            consumed=-carried,
            is_leading=after is None or not carried or after.is_leading,
        )

    def asked(self) -> None:
        """Look at what has happened since the fetch before."""
        now = self.now
        if now.is_leading and now.fetched and not now.is_exhausted:
            added = self._gradients.were_added(now.mark)
            now.trains = now.trains or now.stepped or added
            if now.trained or added:
                now.is_leading = False
            elif self._gradients.are_known:
                now.ahead += 1
        now.trains = now.trains or (now.stepped and not now.is_exhausted)
        if now.is_leading:
            now.mark = self._gradients.mark()
        now.trained = False

    def fetched(self) -> None:
        """Count a batch."""
        self.now.fetched += 1

    def exhausted(self) -> None:
        """Note that there was no further batch."""
        self.now.is_exhausted = True

    def trained(self, *, surely: bool = True) -> None:
        """Note that the batches fetched before are trained with, with or without a step.

        Args:
            surely: False for a call that also follows evaluations (a scheduler's).
        """
        self.now.trained = True
        self.now.stepped = self.now.stepped or (surely and self.now.fetched > 0)

    def stepped(self) -> None:
        """Count a step of the run."""
        now = self.now
        self.trained()
        self._steps_in = threading.get_ident()
        now.steps_after_end += now.is_exhausted
        if len(now.at_steps) < 2:
            now.at_steps.append(now.fetched)
        if self._is_told or not now.fetched:
            return
        if now.ahead:
            warn_once(_AHEAD % now.ahead)
        # Where gradients are seen, this is a step with what was accumulated of the last batches.
        if not self._gradients.are_known and (now.is_exhausted or self._ahead_by_steps() > 0):
            self._doubt()

    def consumed(self, batches: int) -> None:
        """Believe the program, which has trained with so many more batches of the pass or is about to."""
        self._is_told = True
        self.now.consumed += batches
        self.now.stepped = True

    def is_foreign(self) -> bool:
        """Return whether batches are fetched by another thread than the one that trains; then none of its fetches is a boundary."""
        here = threading.get_ident()
        # Not the thread of steps alone: an optimizer may step within the backward pass, in a thread of autograd.
        if self._steps_in is None or here in (self._steps_in, self._home):
            return False
        self._doubt()
        return True

    def is_look(self, *, beside: bool) -> bool:
        """Return whether the program has only looked at the batches of the pass: nothing was trained with them.

        Args:
            beside: The pass began within another one, whose training may have gone on since.
        """
        now = self.now
        if not now.is_seen or now.trains:
            return False
        return beside or now.is_evaluation or not (now.stepped or self._gradients.were_added(now.mark))

    @property
    def is_guess(self) -> bool:
        """True if only steps tell of training, and gradients that were accumulated do not."""
        return not self._gradients.are_known

    @property
    def is_sure(self) -> bool:
        """True if the position is that of the training."""
        if self._is_told:
            return True
        # Two batches before the first step: accumulated, or one read ahead?
        first = not self._gradients.are_known and len(self.now.at_steps) == 1 and self.now.at_steps[0] > 1
        return not self._is_doubtful and not first

    @property
    def remaining(self) -> int:
        """Number of batches that were fetched and not trained with."""
        return self.remaining_of(self.now)

    def remaining_of(self, one: Fetches) -> int:
        """Return the same of a pass."""
        if self._is_told:
            return min(one.fetched, max(0, one.fetched - one.consumed))
        per_step = one.at_steps[1] - one.at_steps[0] if len(one.at_steps) == 2 else 1
        return max(0, min(one.fetched, one.ahead) - one.steps_after_end * max(1, per_step))

    def _ahead_by_steps(self) -> int:
        """Return by how many batches the first step came later than the second."""
        at = self.now.at_steps
        return 2 * at[0] - at[1] if len(at) == 2 else 0

    def _doubt(self) -> None:
        self._is_doubtful = True
        if not self._is_told:
            warn_once(_NOT_SURE)


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
        if _is_of_torch(optimizer):
            self._sampled[id(optimizer)] = (optimizer, _sample(optimizer))
            if optimizer.state:
                # It has stepped before it was registered: the gradients that are still there were used then.
                self.stepped(optimizer)

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

    def use(self, marks: dict[int, tuple[Any, int]]) -> None:
        """Take gradients as used by a step."""
        self._used |= marks

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


def _is_of_torch(optimizer: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(optimizer, torch.optim.Optimizer)


def _sample(optimizer: Any) -> list[Any]:
    found = [one for group in optimizer.param_groups for one in group["params"] if one.requires_grad]
    return found[:: max(1, len(found) // _SAMPLE)]


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
