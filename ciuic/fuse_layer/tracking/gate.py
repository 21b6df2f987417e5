"""The gate: changing operations pass it shared, a cut holds it exclusively.

Guarantees: between the return of ``hold`` and the end of the hold, no operation is inside the gate, so that
an epoch ends between two operations and never within one. A hold ends by ``release`` or by its own deadline,
whichever comes first: a controller that dies while it holds cannot stop a job for longer than its timeout.
Reads do not pass the gate.

The event loop of a driver must not wait here, because the release may depend on its progress elsewhere: a
thread that is registered as ``inline_thread`` gets GateHeld instead, and runs the operation again in another
thread.
"""

from __future__ import annotations

import threading
import time
from types import TracebackType


class GateHeld(Exception):
    """A cut holds the gate, and the calling thread must not wait: run the operation again in another thread."""


class HoldExpired(Exception):
    """The hold ended by its deadline before it was used."""


class Gate:
    """Shared/exclusive lock with a deadline on the exclusive side; the exclusive side is preferred."""

    def __init__(self) -> None:
        self.inline_thread: int | None = None
        # Of the condition below. Entered by itself where nobody is woken: a Condition's own methods cost as much
        # as the rest of an entry.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._inside = 0
        self._deadline: float | None = None
        self._token = 0

    def __enter__(self) -> None:
        # The lock is held for a few bytecodes: about 0.3 µs when not contended.
        with self._lock:
            if self._deadline is not None:
                self._wait_for_release()
            self._inside += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            self._inside -= 1
            # Only a hold waits for the last operation to leave.
            if self._deadline is not None and not self._inside:
                self._changed.notify_all()

    def _wait_for_release(self) -> None:
        if threading.get_ident() == self.inline_thread:
            raise GateHeld
        while self._deadline is not None:
            left = self._deadline - time.monotonic()
            # The operation ends an expired hold itself: the controller that should release it may be dead.
            if left <= 0:
                self._end()
            else:
                self._changed.wait(left)

    def _end(self) -> None:
        self._deadline = None
        self._changed.notify_all()

    @property
    def held(self) -> bool:
        """True if a hold is in force."""
        return self._deadline is not None

    def hold(self, timeout_seconds: float) -> int:
        """Stop changing operations and wait until none is inside; return a token for ``extend`` and ``release``.

        Raises:
            TimeoutError: the operations inside do not finish in time, or another hold does not end. The gate
                is open again.
        """
        deadline = time.monotonic() + timeout_seconds
        with self._changed:
            while self._deadline is not None:
                left = min(self._deadline, deadline) - time.monotonic()
                if left > 0:
                    self._changed.wait(left)
                elif time.monotonic() >= deadline:
                    raise TimeoutError("another hold is in force")
                else:
                    self._end()
            # From here on no operation enters. Those inside go on; waiting for them is part of the hold.
            self._deadline = deadline
            if not self._changed.wait_for(lambda: not self._inside, deadline - time.monotonic()):
                self._end()
                raise TimeoutError(f"{self._inside} changing operations did not finish in time")
            # A token names one hold: a release that comes after the deadline must not end the hold of another
            # controller.
            self._token += 1
            return self._token

    def extend(self, token: int, timeout_seconds: float) -> None:
        """Give a hold that is still in force a new deadline, which the following cut does not outlast.

        Raises:
            HoldExpired: the hold is over.
        """
        with self._changed:
            deadline = self._deadline
            if token != self._token or deadline is None or deadline <= time.monotonic():
                raise HoldExpired("the hold ended before the cut")
            self._deadline = time.monotonic() + timeout_seconds

    def release(self, token: int) -> None:
        """End the hold; a hold that is over already is left alone."""
        with self._changed:
            if token == self._token and self._deadline is not None:
                self._end()
