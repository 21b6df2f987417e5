"""Signal that wakes one task again and again."""

from __future__ import annotations

import trio


class Wakeup:
    """Signal to one task. Setting it while the task works wakes the task once more; belongs to the trio thread."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def set(self) -> None:
        """Wake the task, now or when it waits next."""
        self._event.set()

    async def wait(self) -> None:
        """Wait until the signal is set, and reset it."""
        await self._event.wait()
        # Reset before the task looks at what it has to do, so that what comes during the look wakes it again.
        self._event = trio.Event()
