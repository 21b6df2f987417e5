"""Boundaries of steps: moments at which the state is whole, after a step and everything that belongs to it.

A state that was read between `optimizer.step()` and `scheduler.step()` would resume into a run that never
was. Where a data loader is watched, the boundary of a step is the moment in which the next batch is asked
for. Otherwise it is the return of the last companion call: the calls on schedulers, gradient scalers and
averages of weights that have followed every step so far. The companions are learnt from the program: what did
not follow one step is not waited for after the next.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from ciuic.training.state.data_position import Gradients, Passes, ReadAhead
from ciuic.training.state.method_hooks import override, tell_after

# In this order, of which the first that an object has is watched: a GradScaler has `step`, within which the
# optimizer steps, and `update`, which comes last.
_COMPANION_METHODS: Final = ("update_parameters", "update", "step")
"""Methods that programs call after an optimizer step, on averages, gradient scalers and schedulers."""

NOTHING_TELLS: Final = (
    "no automatic snapshots are taken, because no registered object tells when a step of several optimizers is over: "
    "register the loader, or call boundary() after each step"
)
# Steps in a row without a boundary after which none is expected any more.
_MAX_UNCLOSED_STEPS: Final = 5


class Boundaries:
    """Detects boundaries from the calls of optimizers, companions and loaders."""

    def __init__(
        self,
        stepped: Callable[[], None],
        at_boundary: Callable[[], None],
        capturing: Callable[[], bool] = lambda: False,
    ) -> None:
        """Watch nothing yet.

        Args:
            stepped: Called at each step of the first optimizer that is watched.
            at_boundary: Called once after each step that is whole.
            capturing: Returns whether nothing on a device may be read now.
        """
        self._stepped = stepped
        self._at_boundary = at_boundary
        self.gradients = Gradients(capturing)
        self.read_ahead = ReadAhead(self.gradients)
        """Batches that the program has fetched before it trains with them."""
        self._optimizers: list[Any] = []
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

    @property
    def lacking(self) -> bool:
        """True if steps are taken, and nothing tells when they are over."""
        return self._unclosed >= _MAX_UNCLOSED_STEPS and not self._uses_explicit

    @property
    def whole(self) -> bool:
        """True if the state is whole now.

        It is so too between two passes over the data, and in an evaluation after a step.
        """
        return bool(self._optimizers or self._by_loader) and not self._open and not self._in_batch

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
            return self._by_loader or self._expected <= self._seen
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
        self.gradients.add(optimizer)
        # Only the first one counts steps: two optimizers of a GAN take one step of the run together.
        return True

    def forget(self, value: object) -> None:
        """Stop watching an object that is no longer registered."""
        self.gradients.remove(value)
        # Its hooks stay, and `_after_step` ignores an optimizer that is not in the list.
        self._optimizers = [one for one in self._optimizers if one is not value]
        self._expected.discard(id(value))

    def watch_companion(self, value: object) -> bool:
        """Watch a scheduler, a scaler or an average of weights; return whether that is possible."""
        number = id(value)
        for name in _COMPANION_METHODS:
            if callable(getattr(value, name, None)) and tell_after(
                value, name, lambda: self._companion_called(number)
            ):
                self._expected.add(number)
                return True
        return False

    def watch_loader(self, loader: object, passes: Passes) -> bool:
        """Watch a loader, whose iterators then report and count each fetch; return whether that is possible."""
        boundaries = self

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any) -> Any:
                inner = method(self)
                passes.begun(boundaries.read_ahead)
                return _ReportingIterator(inner, boundaries, passes)

            return wrapped

        done = override(loader, "__iter__", make)
        # From now on the loader tells boundaries, and the calls of companions do not.
        self._by_loader |= done
        return done

    def asked(self) -> None:
        """Close the open step: the next batch is about to be fetched."""
        self.read_ahead.asked()
        if self.read_ahead.is_foreign():
            # The program may be anywhere in its step: the calls of companions tell boundaries.
            self._by_loader = self._in_batch = False
            return
        # Also where a `Position` calls this, which watches the loader itself.
        self._by_loader = True
        if self._open:
            self._close()
        self._in_batch = True

    def ended(self) -> None:
        """Leave the pass: there was no further batch."""
        self._in_batch = False

    def explicit(self) -> None:
        """Close the step because the program says that it is over."""
        self._uses_explicit = True
        self._open = self._in_batch = self._changed_since = False
        self._at_boundary()

    def _before_step(self, *_: object) -> None:
        self._stepping = True

    def _after_step(self, optimizer: Any) -> None:
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
        self.read_ahead.stepped()
        self._stepped()
        self._close_if_whole()

    def _on_other(self) -> None:
        """Count a step of another optimizer as part of the same step of the run."""
        self._stepping, self._changed_since, self._open = False, True, True

    def _companion_called(self, number: int) -> None:
        self._changed_since = True
        # A gradient scaler leaves out steps.
        self.read_ahead.trained()
        if self._open:
            self._seen.add(number)
            self._close_if_whole()

    def _close_if_whole(self) -> None:
        # With several optimizers nothing but a loader, or the program, can tell which of them is the last.
        if not self._by_loader and len(self._optimizers) == 1 and self._expected <= self._seen:
            self._close()

    def _close(self) -> None:
        self._open = self._changed_since = False
        self._at_boundary()


class _ReportingIterator:
    """Iterator that reports each fetch before it happens, and the end."""

    def __init__(self, inner: Any, boundaries: Boundaries, passes: Passes) -> None:
        self._inner = inner
        self._boundaries = boundaries
        self._passes = passes

    def __iter__(self) -> _ReportingIterator:
        return self

    def __next__(self) -> Any:
        self._boundaries.asked()
        try:
            batch = next(self._inner)
        except StopIteration:
            self._passes.ended()
            self._boundaries.ended()
            raise
        self._passes.fetched()
        return batch

    def __getattr__(self, name: str) -> Any:
        # Whatever else the program asks of the iterator is answered by the loader's own.
        return getattr(self._inner, name)
