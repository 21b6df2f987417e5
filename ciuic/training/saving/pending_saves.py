"""Saves whose state is still on its way from devices.

Guarantees: the writer gets a state only when all of it has arrived and nothing of it was changed on the way,
and in the order of the saves; otherwise the save fails. Nothing is raised. Only `finish` makes the host wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ciuic.training.device.async_copy import Overlap
from ciuic.training.device.device_streams import capturing
from ciuic.training.saving.staging import StagedSave

# Pause between two looks at a device while `finish` has a deadline: no device offers a wait with one.
_POLL_SECONDS: Final = 0.001


class PendingSaves:
    """Queue of staged saves, oldest first."""

    def __init__(self, overlap: Overlap, failed: Callable[[int, str], None]) -> None:
        """Create an empty queue.

        Args:
            overlap: record of the tensors that may be copied beside the training.
            failed: called with the number of a save that failed, and the reason.
        """
        self.changed = False
        """True if a state was given up because the program changed it during the copy; reset by the caller.
        """
        self._overlap = overlap
        self._failed = failed
        self._staged: deque[StagedSave] = deque()
        self._busy = False

    def __len__(self) -> int:
        """Return the number of saves in the queue."""
        return len(self._staged)

    def add(self, staged: StagedSave) -> None:
        """Append a save, and hand over what has arrived."""
        self._staged.append(staged)
        self.advance()

    def settle(self) -> None:
        """Make devices order all copies before whatever the program does next."""
        for staged in list(self._staged):
            if staged.copying is not None:
                staged.copying.settle()

    def advance(self) -> None:
        """Hand over the states that have arrived.

        Called again from within itself, by a signal handler of the program that saves, it does nothing: the
        outer call goes on.
        """
        # No thread waits for events of devices. It would share the client, signal handlers and the
        # interpreter lock with the training; whatever the program calls next looks instead
        # (docs/decisions/beside-the-next-step.md).
        if self._busy:
            return
        self._busy = True
        try:
            # Querying an event while a CUDA graph is recorded would invalidate the recording.
            while self._staged and not capturing():
                problem = self._arrival_problem(self._staged[0])
                if problem is None:
                    return
                self._hand_over(self._staged.popleft(), problem)
        finally:
            self._busy = False

    def _arrival_problem(self, staged: StagedSave) -> str | None:
        """Return what is wrong with a state that has arrived, or ""; None if it has not arrived."""
        copying = staged.copying
        if copying is None:
            return ""
        try:
            if not copying.done():
                return None
            if changed := copying.changed():
                # From now on the device waits for what changes so: a state that is half changed would load
                # without an error.
                self._overlap.distrust(changed)
                self.changed = True
            return copying.void
        except RuntimeError as error:
            return f"the device has failed: {error}"

    def _hand_over(self, staged: StagedSave, problem: str) -> None:
        """Hand the save over, or give it up if there is a problem."""
        handed_over = False
        try:
            if not problem:
                staged.hand_over()
                handed_over = True
        except OSError as error:
            problem = error.strerror or str(error)
        finally:
            # Also after a KeyboardInterrupt: the arena must be free for later saves.
            if not handed_over:
                staged.give_up()
                self._failed(staged.number, problem or "interrupted while it was handed over")

    def finish(self, timeout_seconds: float | None = None) -> bool:
        """Wait for all states and hand them over; return whether they came in time.

        Returns False at once where it may not wait: within `advance`, and while a CUDA graph is recorded.

        Args:
            timeout_seconds: time to wait; None for no limit.
        """
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._staged:
            # Waiting for a device would invalidate a CUDA graph that is being recorded.
            if self._busy or capturing():
                return False
            self.settle()
            self.advance()
            if not self._staged:
                break
            if end is not None:
                if time.monotonic() >= end:
                    return False
                time.sleep(_POLL_SECONDS)
            elif (copying := self._staged[0].copying) is not None:
                try:
                    copying.wait()
                except RuntimeError:
                    continue  # `advance` meets the same error and reports it
        return True

    def abandon(self) -> None:
        """Fail what has not arrived. Its arenas stay reserved: a device may still write to them."""
        while self._staged:
            self._failed(self._staged.popleft().number, "its copy from the device did not end in time")
