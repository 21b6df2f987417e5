"""Timers for commands that take longer than they should. Imports nothing slow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

ANSWER_SECONDS: Final = 10.0
"""Time after which it is said that a remote is waited for, as where requests are repeated (ciuic.remote.reading.retry_policy)."""


@contextmanager
def if_slow(act: Callable[[], None], after_seconds: float) -> Iterator[None]:
    """Call ``act`` once, in a thread of its own, if the block takes longer than ``after_seconds``."""
    # Not at the top: most blocks of a command that is to be quick are not reached.
    import contextvars
    import threading

    timer = threading.Timer(after_seconds, contextvars.copy_context().run, [act])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
