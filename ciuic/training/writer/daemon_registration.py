"""Registration of the trainer with a daemon by the writer process, which can wait.

The writer also outlives the trainer, so it can tell the daemon how the trainer ended.
"""

from __future__ import annotations

import os
from collections import deque
from typing import Final, Protocol

from ciuic.errors import CiuicError, Unreachable
from ciuic.protocol.heartbeat_page import Goodbye, read_page
from ciuic.protocol.watch_client import Hello, Registration, watch_socket
from ciuic.training.protocol.messages import FromWriter, Note

# Time for a restarting daemon to come back and hear how the trainer ended.
_LAST_SECONDS: Final = 30.0


class TrainerChannel(Protocol):
    """Connection to the trainer, as the writer process has it."""

    fds: deque[int]
    """Descriptors received with messages and not yet taken."""

    def tell(self, message: FromWriter) -> None:
        """Send the trainer a message."""


class DaemonRegistration:
    """Registration of the trainer, renewed by a background thread until this process ends."""

    def __init__(self, trainer: TrainerChannel, hello: Hello) -> None:
        """Start the background thread.

        Args:
            trainer: connection to the trainer; the pidfd and the page that came with its first message are
                taken from it.
            hello: name, process and heartbeat of the trainer.
        """
        self._trainer = trainer
        # In the order of `TrainerHeartbeat.fds`.
        life, self._page = trainer.fds.popleft(), trainer.fds.popleft()
        self._heartbeat = hello.heartbeat_seconds > 0
        self._registration = Registration(
            lambda: watch_socket(os.environ), hello, (life, self._page), on_trouble=self._report_trouble
        )
        self._registration.start()

    def trainer_gone(self) -> None:
        """Tell the daemon how the trainer ended; waits only where a daemon was there before and is away."""
        # A daemon reports nothing of an end that was announced.
        if read_page(self._page).goodbye not in (Goodbye.CLOSED, Goodbye.PREEMPTED):
            self._registration.wait_until_known(_LAST_SECONDS)

    def _report_trouble(self, error: CiuicError) -> None:
        # A missing daemon is normal and not reported, unless heartbeat_seconds says that the user counts on
        # one.
        if self._heartbeat:
            text = f"not watched yet: {error}" if isinstance(error, Unreachable) else f"not watched: {error}"
            self._trainer.tell(Note("not_watched", text))
