"""The writer makes its trainer known to a daemon, where one runs: it may wait for it, and it is there when the trainer is gone."""

from __future__ import annotations

import os
from collections import deque
from typing import Final, Protocol

from ciuic.acquaintance import Acquaintance
from ciuic.errors import CiuicError, Unreachable
from ciuic.training.messages import FromWriter, Note
from ciuic.watch_client import Hello, watch_socket
from ciuic.watch_page import Goodbye, read_page

_LAST_SECONDS: Final = 30.0
"""For a daemon that is being started again to hear how the trainer ended."""


class Trainer(Protocol):
    """As the writer process has it."""

    fds: deque[int]

    def tell(self, message: FromWriter) -> None: ...


class Watched:
    """From now on, until this process ends. Takes the descriptors that came with the first message: its pidfd and its page."""

    def __init__(self, trainer: Trainer, hello: Hello) -> None:
        self._trainer = trainer
        life, self._page = trainer.fds.popleft(), trainer.fds.popleft()
        self._heartbeat = hello.heartbeat_seconds > 0
        self._known = Acquaintance(
            lambda: watch_socket(os.environ), hello, (life, self._page), on_trouble=self._trouble
        )
        self._known.start()

    def trainer_gone(self) -> None:
        """Waits only where there was a daemon, which is away, and something to tell it."""
        if read_page(self._page).goodbye not in (
            Goodbye.CLOSED,
            Goodbye.PREEMPTED,
        ):
            self._known.last_words(_LAST_SECONDS)

    def _trouble(self, error: CiuicError) -> None:
        # Who asked for a heartbeat relies on somebody to hear it.
        if self._heartbeat:
            text = f"not watched yet: {error}" if isinstance(error, Unreachable) else f"not watched: {error}"
            self._trainer.tell(Note("not_watched", text))
