"""Heartbeat page of the manager, by which a daemon sees that the training lives and whether it meant to end.

Guarantees: a beat costs some stores in memory and nothing that could wait or fail. Without a page or a
daemon, nothing happens. The goodbye says how the program ended: an exception that nobody caught counts as a
failure, even if a `finally` closed the manager on the way.

References:
    docs/daemon.md, Trainers; docs/decisions/watching-trainers.md
"""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Final

from ciuic.printable import one_line
from ciuic.protocol.heartbeat_page import Goodbye, HeartbeatPage
from ciuic.protocol.watch_client import MAX_TEXT_CHARACTERS, Hello
from ciuic.system.processes import start_ticks
from ciuic.training.logs import log

LOSS: Final = "loss"
"""Name of the metric that a daemon watches."""
# Exceptions by which a program is ended, and not fails.
_NO_FAILURE: Final = (KeyboardInterrupt, GeneratorExit)


class TrainerHeartbeat:
    """Heartbeat of one manager."""

    def __init__(self, name: str, where: str, seconds: float | None) -> None:
        """Create the page.

        Args:
            name: name of the training.
            where: directory of its snapshots.
            seconds: time without a beat after which the training counts as hung; None for never.

        Raises:
            ValueError: `seconds` is not positive and finite.
        """
        if seconds is not None and not 0 < seconds < float("inf"):
            raise ValueError(f"heartbeat_seconds must be a positive number of seconds, got {seconds!r}")
        self._page: HeartbeatPage | None = None
        self.hello: Hello | None = None
        """Message that announces the training to a daemon; None if there is no page."""
        self._life = -1
        self._busy: dict[object, None] = {}
        try:
            self._page = HeartbeatPage()
            self._page.append_stacks_at_signal()
            if hasattr(sys, "ps1") or sys.flags.interactive:
                # A notebook: between two cells it waits for its user, and nothing could start it again.
                self._busy[object()] = None
                self._page.set_busy(True)
            # Opened by this process: a writer that is still starting could find the pid gone, or reused.
            self._life = os.pidfd_open(os.getpid())
        except OSError as error:
            self._page = None
            log.warning("ciuic: no heartbeat, so a daemon cannot watch the training: %s", error.strerror)
            return
        self._has_goodbye = False
        self.hello = Hello(
            name=_printable(name),
            where=_printable(where),
            kind="library",
            pid=os.getpid(),
            start_ticks=start_ticks(os.getpid()),
            heartbeat_seconds=seconds or 0.0,
        )
        # Registered before the manager's `close`, and so called after it (atexit goes backwards).
        atexit.register(self._at_exit)

    @property
    def fds(self) -> tuple[int, ...]:
        """Descriptors that go with the hello: pidfd and page."""
        return () if self._page is None else (self._life, self._page.fd)

    def __del__(self) -> None:
        # Not earlier: each writer that is started gets the descriptors anew.
        if getattr(self, "_life", -1) >= 0:
            os.close(self._life)

    def beat(self, step: int) -> None:
        """Record that the training lives."""
        if self._page is not None:
            if self._has_goodbye:
                # The training was told to end and goes on: a goodbye that stays would hide its later death.
                self._set_goodbye(Goodbye.NONE)
            self._page.beat(step)

    def evaluates(self, step: int) -> None:
        """Record that the training lives, if it has made a step: one that is still to compile it may take any time."""
        if self._page is not None and self._page.has_beaten:
            self.beat(step)

    def report(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record that the training lives, and its loss if that is among the metrics."""
        loss = metrics.get(LOSS)
        if loss is not None and self._page is not None:
            self._page.report_loss(step, float(loss))
        self.beat(step)

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Record that a save or a restore, or a wait for them, is under way: there are no steps meanwhile."""
        if self._page is None:
            yield
            return
        # Not a counter, of which two threads, or a signal handler, could lose a change for good.
        token = object()
        self._busy[token] = None
        self._page.set_busy(True)
        try:
            yield
        finally:
            del self._busy[token]
            self._page.set_busy(bool(self._busy))

    def save_ended(self, error: str) -> None:
        """Record that a save is durable ("") or why it failed."""
        if self._page is not None:
            self._page.report_save(error)

    def preempted(self) -> None:
        """Record that the training was told to end, and will."""
        self._set_goodbye(Goodbye.PREEMPTED)

    def closing(self, error: BaseException | None) -> None:
        """Record that the program closes its manager.

        Args:
            error: exception because of which it does; None if there is none.
        """
        # After a preemption the exit status is whatever the platform wants, so the page keeps saying it.
        if self._page is None or self._page.goodbye is Goodbye.PREEMPTED:
            return
        failure = _failure(uncaught() if error is None else error)
        self._set_goodbye(Goodbye.FAILED if failure else Goodbye.CLOSED, failure)
        if not failure:
            # Kept after a failure: at exit it is known whether the exception was caught.
            atexit.unregister(self._at_exit)

    def _at_exit(self) -> None:
        """Record the end of the interpreter, when it is known whether an exception was caught."""
        if self._page is None or self._page.goodbye is Goodbye.PREEMPTED:
            return
        failure = _failure(uncaught())
        self._set_goodbye(Goodbye.FAILED if failure else Goodbye.CLOSED, failure)

    def _set_goodbye(self, how: Goodbye, reason: str = "") -> None:
        if self._page is not None:
            self._has_goodbye = how is not Goodbye.NONE
            self._page.say_goodbye(how, reason)


def uncaught() -> BaseException | None:
    """Return the exception by which the program ended, if any; the manager may be closed after that."""
    # An interactive session keeps the last exception for hours; it says nothing about the end.
    return None if hasattr(sys, "ps1") else getattr(sys, "last_value", None)


def _failure(error: BaseException | None) -> str:
    """Describe the exception; "" if it is none that a training fails by."""
    if error is None or isinstance(error, _NO_FAILURE):
        return ""
    if isinstance(error, SystemExit):
        return "" if error.code in (None, 0) else f"ended with status {error.code}"
    return f"{type(error).__name__}: {error}"


def _printable(text: str) -> str:
    return one_line(text)[-MAX_TEXT_CHARACTERS:] or "?"
