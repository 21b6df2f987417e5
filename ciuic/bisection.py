"""`Bisection`: which of a row of snapshots is the first bad one, with as few trials as there can be.

A trial says good, bad, or that the snapshot cannot be tried. All before the first bad one are taken to be good, and all from it on to be
bad. Where none is skipped, ``n`` snapshots take at most ``ceil(log2(n))`` trials.

References:
    git-bisect(1), whose words and exit codes these are
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, Literal, TypeVar

Trial = Literal["good", "bad", "skip"]
T = TypeVar("T")


class Bisection(Generic[T]):
    """Search for the first bad one.

    Args:
        row: What there is to try, oldest first, after the one that is known to be good; the last is known to be bad.
    """

    def __init__(self, row: Sequence[T]) -> None:
        if not row:
            raise ValueError("a bisection needs one that is bad")
        self._row = row
        self._first = 0
        self._last = len(row) - 1
        self._skipped: set[int] = set()

    @property
    def suspects(self) -> Sequence[T]:
        """Those of which any may be the first bad one, oldest first; the last of them is bad."""
        return self._row[self._first : self._last + 1]

    def next(self) -> T | None:
        """Return which one to try: that nearest to the middle which was not skipped; None if no trial can tell more."""
        at = self._next()
        return None if at is None else self._row[at]

    def _next(self) -> int | None:
        middle = (self._first + self._last - 1) / 2
        left = (at for at in range(self._first, self._last) if at not in self._skipped)
        return min(left, key=lambda at: abs(at - middle), default=None)

    def note(self, trial: Trial) -> None:
        """Take the outcome of the trial of `next`."""
        at = self._next()
        if at is None:
            raise ValueError("there is none to try")
        if trial == "skip":
            self._skipped.add(at)
        elif trial == "bad":
            self._last = at
        else:
            self._first = at + 1
