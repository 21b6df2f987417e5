"""Saves whose state is still on its way from devices, and what becomes of them.

Guarantees: the writer is given a state when all of it has arrived and nothing of it was changed on the way, and in the order of the
saves; else there is no such save. Nothing is raised. The host waits in `finish` alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import Final

from ciuic.training.lanes import capturing
from ciuic.training.overlap import Overlap
from ciuic.training.staging import Staged

_LOOK_SECONDS: Final = 0.001


class Underway:
    def __init__(self, overlap: Overlap, failed: Callable[[int, str], None]) -> None:
        """``failed``: called with the number of a save that will not be, and why."""
        self.changed = False
        """A state was given up because the program changed it under its copy: the next one will not be."""
        self._overlap = overlap
        self._failed = failed
        self._staged: deque[Staged] = deque()
        self._busy = False

    def __len__(self) -> int:
        return len(self._staged)

    def add(self, staged: Staged) -> None:
        self._staged.append(staged)
        self.advance()

    def settle(self) -> None:
        """The program is about to change what is saved: from here on its device waits where it has to."""
        for staged in list(self._staged):
            if staged.copying is not None:
                staged.copying.settle()

    def advance(self) -> None:
        """Hands over what has arrived. Within itself, in a handler of the program's that saves, it does nothing: the outer one will."""
        if self._busy:
            return
        self._busy = True
        try:
            while self._staged and not capturing():
                problem = self._arrived(self._staged[0])
                if problem is None:
                    return
                self._let_go(self._staged.popleft(), problem)
        finally:
            self._busy = False

    def _arrived(self, staged: Staged) -> str | None:
        """None where it has not; else what is wrong with it, or ""."""
        copying = staged.copying
        if copying is None:
            return ""
        try:
            if not copying.done():
                return None
            if changed := copying.changed():
                self._overlap.distrust(changed)
                self.changed = True
            return copying.void
        except RuntimeError as error:
            return f"the device has failed: {error}"

    def _let_go(self, staged: Staged, problem: str) -> None:
        handed_over = False
        try:
            if not problem:
                staged.hand_over()
                handed_over = True
        except OSError as error:
            problem = error.strerror or str(error)
        finally:
            if not handed_over:
                staged.give_up()
                self._failed(staged.number, problem or "interrupted while it was handed over")

    def finish(self, timeout_seconds: float | None = None) -> bool:
        """Waits until all has arrived, so long or for ever, and hands it over; whether it came in time. False at once where it may not
        wait: within `advance`, and while a CUDA graph is recorded."""
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        while self._staged:
            if self._busy or capturing():
                return False
            self.settle()
            self.advance()
            if not self._staged:
                break
            if end is not None:
                if time.monotonic() >= end:
                    return False
                time.sleep(_LOOK_SECONDS)
            elif (copying := self._staged[0].copying) is not None:
                try:
                    copying.wait()
                except RuntimeError:
                    continue  # `advance` finds the same
        return True

    def abandon(self) -> None:
        """What has not arrived will not be saved. Its memory stays as it is: a device may still write there."""
        while self._staged:
            self._failed(self._staged.popleft().number, "its copy from the device did not end in time")
