"""The manager's page: by which a daemon, where one runs, sees that the training lives, and whether it meant to end (docs/daemon.md, Trainers).

Guarantees: a beat costs some stores in memory and nothing that could wait or fail; where there is no page, or no daemon, nothing happens.
What is said at the end is what the program's end was: an exception that nobody caught is no goodbye, also where a `finally` closed the
manager on its way.
"""

from __future__ import annotations

import atexit
import os
import sys
from typing import Final

from ciuic.processes import start_ticks
from ciuic.training.logs import log
from ciuic.watch_client import MOST_TEXT, Hello
from ciuic.watch_page import Goodbye, Page

_NO_FAILURE: Final = (KeyboardInterrupt, GeneratorExit)


class Heartbeat:
    """One for a manager."""

    def __init__(self, name: str, where: str, seconds: float | None) -> None:
        """``seconds``: without a beat for so long the training counts as hung; None: however long. ValueError."""
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"heartbeat_seconds is a positive number, not {seconds!r}")
        self._page: Page | None = None
        self.hello: Hello | None = None
        """What a daemon is to be told; None where there is nothing to be watched by."""
        self._life = -1
        try:
            self._page = Page()
            # Ours to open: a writer that has just begun would look for it when it is gone already.
            self._life = os.pidfd_open(os.getpid())
        except OSError as error:
            self._page = None
            log.warning("ciuic: no daemon will see whether the training lives: %s", error.strerror)
            return
        self._said = False
        self.hello = Hello(
            name=_printable(name),
            where=_printable(where),
            kind="library",
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()),
            heartbeat_seconds=seconds or 0.0,
        )
        atexit.register(self._at_exit)

    @property
    def fds(self) -> tuple[int, ...]:
        """To go with the hello."""
        return () if self._page is None else (self._life, self._page.fd)

    def __del__(self) -> None:
        if getattr(self, "_life", -1) >= 0:
            os.close(self._life)

    def beat(self, step: int) -> None:
        """The training lives."""
        if self._page is not None:
            if self._said:  # it was told to end, and goes on
                self._say(Goodbye.NONE)
            self._page.beat(step)

    def preempted(self) -> None:
        """It was told to end, and will."""
        self._say(Goodbye.PREEMPTED)

    def closing(self, error: BaseException | None) -> None:
        """The program needs its manager no more; ``error``: because of that."""
        if self._page is None or self._page.goodbye is Goodbye.PREEMPTED:
            return
        failure = _failure(_uncaught() if error is None else error)
        self._say(Goodbye.FAILED if failure else Goodbye.CLOSED, failure)
        if not failure:
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """The interpreter ends: by now it is known whether an exception was caught."""
        if self._page is None or self._page.goodbye is Goodbye.PREEMPTED:
            return
        failure = _failure(_uncaught())
        self._say(Goodbye.FAILED if failure else Goodbye.CLOSED, failure)

    def _say(self, how: Goodbye, reason: str = "") -> None:
        if self._page is not None:
            self._said = how is not Goodbye.NONE
            self._page.say_goodbye(how, reason)


def _uncaught() -> BaseException | None:
    """What the program ended by; the manager is closed after that, too."""
    # In an interactive session the last exception may be hours old.
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _failure(error: BaseException | None) -> str:
    """The exception in words, if it is one of those that a training fails by."""
    if error is None or isinstance(error, _NO_FAILURE):
        return ""
    if isinstance(error, SystemExit):
        return "" if error.code in (None, 0) else f"ended with status {error.code}"
    return f"{type(error).__name__}: {error}"


def _printable(text: str) -> str:
    shown = text if text.isprintable() else text.encode("unicode_escape").decode("ascii")
    return shown[-MOST_TEXT:] or "?"
