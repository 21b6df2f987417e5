"""When a state is whole: after a step, and after everything that belongs to it.

A state that was read between `optimizer.step()` and `scheduler.step()` would resume into a run that never was. So the boundary of a
step is, where a data loader is watched, the moment in which the next batch is asked for; else the return of the last of those calls
that have followed every step so far: schedulers, gradient scalers, averages of weights. Which of them do is learnt from what the
program does: what did not follow one step is not waited for after the next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from ciuic.training.followers import override, tell_after

_FOLLOWERS: Final = ("update_parameters", "update", "step")
"""What is called on those that follow an optimizer's step: averaged models, gradient scalers and averages, schedulers."""

NOTHING_TELLS: Final = (
    "nothing that is registered tells when a step of several optimizers is over, so no snapshot is taken by itself: register the loader, "
    "or call boundary() there"
)
_UNCLOSED: Final = 5
"""After so many steps without a boundary there will be none."""


class Boundaries:
    """Calls ``at_boundary`` once after each step that is whole, and ``stepped`` at each step of the first optimizer watched."""

    def __init__(self, stepped: Callable[[], None], at_boundary: Callable[[], None]) -> None:
        self._stepped = stepped
        self._at_boundary = at_boundary
        self._optimizers: list[Any] = []
        self._by_loader = False
        self._told = False
        """The program says it itself."""
        self._open = False
        """A step was taken and its boundary did not come yet."""
        self._stepping = False
        self._touched = False
        """Something followed since the last boundary."""
        self._in_batch = False
        """A batch of a watched loader was asked for, and the pass is not over."""
        self._unclosed = 0
        """Steps of the first optimizer whose boundary never came, in a row."""
        self._expected: set[int] = set()
        self._seen: set[int] = set()

    @property
    def lacking(self) -> bool:
        """Whether steps are taken and nothing tells when they are over."""
        return self._unclosed >= _UNCLOSED and not self._told

    @property
    def whole(self) -> bool:
        """Whether the state is whole now, outside of a boundary too: between two passes over the data, in an evaluation after a step."""
        return bool(self._optimizers or self._by_loader) and not self._open and not self._in_batch

    @property
    def unchanged(self) -> bool:
        """Whether the state is that of the last boundary, but for generators and what evaluates."""
        return self.whole and not self._touched and not self._stepping

    @property
    def between_passes(self) -> bool:
        """Whether a loader that is watched has told that its pass is over, and nothing has happened since."""
        return self._by_loader and self.unchanged

    @property
    def settled(self) -> bool:
        """Whether, within an evaluation, the state is one that a run can go on from: every step is whole, with what belongs to it."""
        if not (self._optimizers or self._by_loader) or self._stepping:
            return False
        if self._open:
            return self._by_loader or self._expected <= self._seen
        return not self._in_batch

    def watch_optimizer(self, optimizer: Any) -> bool:
        """By its own hooks (torch 2.0 and later), or by its method."""
        if any(one is optimizer for one in self._optimizers):
            return True
        before = getattr(optimizer, "register_step_pre_hook", None)
        try:
            if before is not None:
                before(self._before_step)
            optimizer.register_step_post_hook(lambda *_: self._after_step(optimizer))
        except (
            AttributeError
        ):  # what wraps another one may have none, or have been made without its base class
            if not tell_after(optimizer, "step", lambda: self._after_step(optimizer)):
                return False
        self._optimizers.append(optimizer)
        return True

    def forget(self, value: object) -> None:
        """Something that was watched is registered no more."""
        self._optimizers = [one for one in self._optimizers if one is not value]
        self._expected.discard(id(value))

    def watch_follower(self, value: object) -> bool:
        """A scheduler, a scaler, an average of weights."""
        number = id(value)
        for name in _FOLLOWERS:
            if callable(getattr(value, name, None)) and tell_after(
                value, name, lambda: self._followed(number)
            ):
                self._expected.add(number)
                return True
        return False

    def watch_loader(self, loader: object) -> bool:
        """Its iterators ask before they fetch."""
        boundaries = self

        def make(method: Callable[..., Any]) -> Callable[..., Any]:
            def wrapped(self: Any) -> Any:
                return _Asking(method(self), boundaries.asked, boundaries.ended)

            return wrapped

        done = override(loader, "__iter__", make)
        self._by_loader |= done
        return done

    def asked(self) -> None:
        """The next batch is about to be fetched."""
        self._by_loader = True
        if self._open:
            self._close()
        self._in_batch = True

    def ended(self) -> None:
        """There was no further batch."""
        self._in_batch = False

    def explicit(self) -> None:
        """The program itself says that a step is over."""
        self._told = True
        self._open = self._in_batch = self._touched = False
        self._at_boundary()

    def _before_step(self, *_: object) -> None:
        self._stepping = True

    def _after_step(self, optimizer: Any) -> None:
        if self._optimizers and optimizer is self._optimizers[0]:
            self._on_first()
        elif any(one is optimizer for one in self._optimizers):
            self._on_other()

    def _on_first(self) -> None:
        self._stepping = False
        self._unclosed = self._unclosed + 1 if self._open else 0
        if self._open and not self._by_loader:
            self._expected &= self._seen  # what did not follow the step before
        self._open = True
        self._seen.clear()
        self._stepped()
        self._close_if_whole()

    def _on_other(self) -> None:
        """A step of another optimizer belongs to the same step of the run."""
        self._stepping, self._touched, self._open = False, True, True

    def _followed(self, number: int) -> None:
        self._touched = True
        if self._open:
            self._seen.add(number)
            self._close_if_whole()

    def _close_if_whole(self) -> None:
        # With several optimizers nothing but a loader, or the program, can tell which of them is the last.
        if not self._by_loader and len(self._optimizers) == 1 and self._expected <= self._seen:
            self._close()

    def _close(self) -> None:
        self._open = self._touched = False
        self._at_boundary()


class _Asking:
    """An iterator that tells before each fetch, and when there is nothing more."""

    def __init__(self, inner: Any, ask: Callable[[], None], ended: Callable[[], None]) -> None:
        self._inner = inner
        self._ask = ask
        self._ended = ended

    def __iter__(self) -> _Asking:
        return self

    def __next__(self) -> Any:
        self._ask()
        try:
            return next(self._inner)
        except StopIteration:
            self._ended()
            raise

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)
