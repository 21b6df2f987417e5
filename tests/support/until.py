"""Wait for what processes, mounts and threads of others do, which send this program no event."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final

import trio

DEFAULT_SECONDS: Final = 120.0
_MAX_PAUSE_SECONDS: Final = 0.05


def until(what: str, condition: Callable[[], Any], seconds: float = DEFAULT_SECONDS) -> Any:
    """Return the first true value of a condition.

    Raises:
        TimeoutError: ``what`` did not happen in time.
    """
    deadline = time.monotonic() + seconds
    pause = 0.001
    while True:
        asked = time.monotonic()
        if value := condition():
            return value
        now = time.monotonic()
        if now > deadline:
            raise TimeoutError(f"{what} did not happen within {seconds:.0f} s")
        # A command that is asked all the time takes a processor from what is waited for.
        time.sleep(max(pause, now - asked))
        pause = min(2 * pause, _MAX_PAUSE_SECONDS)


async def until_async(condition: Callable[[], object], seconds: float = DEFAULT_SECONDS) -> None:
    """Return when a condition holds that other tasks or threads bring about.

    Raises:
        trio.TooSlowError: It did not hold in time.
    """
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110
            await trio.sleep(0.005)
