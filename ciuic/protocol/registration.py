"""Keep a trainer registered with the daemon in a background thread, so that no caller waits for a daemon that does not answer.

Guarantees: a missing daemon is no error. A daemon that is started later, or again, is told within some seconds. The code runs in a
process beside the trainer (the writer process, `ciuic watch`) and does not touch the trainer itself.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from ciuic.errors import CiuicError, Unreachable
from ciuic.protocol.watch_client import Hello, introduce

ANSWER_SECONDS: Final = 10.0
KNOWN_SECONDS: Final = 1.0
"""Pause before the next attempt when a daemon was there before: most likely it is being restarted."""
UNKNOWN_SECONDS: Final = 10.0
"""Pause before the next attempt when no daemon was there yet."""
REFUSED_SECONDS: Final = 600.0
"""Pause before the next attempt after a refusal."""
# Short beside the second that a daemon takes to start.
_POLL_SECONDS: Final = 0.05


class Registration:
    """The registration of one trainer.

    Args:
        path: returns the path of the daemon's socket; asked before each attempt.
        hello: the message that describes the trainer.
        fds: pidfd and heartbeat page, which belong to the caller and must stay open.
        on_trouble: called in the thread, once for each kind of error.
    """

    def __init__(
        self,
        path: Callable[[], str],
        hello: Hello,
        fds: Sequence[int],
        *,
        on_trouble: Callable[[CiuicError], None] = lambda error: None,
    ) -> None:
        self._path = path
        self._hello = hello
        self._fds = tuple(fds)
        self._on_trouble = on_trouble
        self._hurry = threading.Event()
        self._was_known = False
        self._refused = False
        self._tried = threading.Event()
        self._connection: socket.socket | None = None
        """Connection to the daemon that has answered; None while no daemon is known to live."""

    def start(self) -> None:
        """Start the thread."""
        # A daemon thread: it never ends by itself, and must not keep the process alive.
        threading.Thread(target=self._keep, name="ciuic-watched", daemon=True).start()

    def wait_until_known(self, seconds: float) -> None:
        """Wait until a daemon knows of the trainer, for a trainer that has failed: the daemon then reports its end.

        Waits at most ``seconds`` for a daemon that was there before, and otherwise only for the end of the first attempt.
        """
        # From now on the thread does not pause between attempts for longer than a second.
        self._hurry.set()
        if not self._was_known or self._refused:
            self._tried.wait(ANSWER_SECONDS)
            return
        deadline = time.monotonic() + seconds
        while not self._is_known() and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)

    def _is_known(self) -> bool:
        """Return whether a daemon that has answered lives."""
        # The connection itself is asked: the thread may not have noticed its end yet.
        connection = self._connection
        return connection is not None and not _has_ended(connection)

    def _keep(self) -> None:
        told: set[type[CiuicError]] = set()
        while True:
            self._refused = False
            try:
                connection = introduce(self._path(), self._hello, self._fds, seconds=ANSWER_SECONDS)
            except CiuicError as error:
                self._refused = not isinstance(error, Unreachable)
                # Retried for ever, reported once: a daemon that refuses every ten minutes must not fill the log.
                if type(error) not in told:
                    told.add(type(error))
                    self._on_trouble(error)
                self._tried.set()
                # A refusal stands until the configuration changes; a missing daemon may be started at any time.
                pause = REFUSED_SECONDS if self._refused else UNKNOWN_SECONDS
            else:
                self._was_known = True
                self._connection = connection
                self._tried.set()
                # A refusal after this is of another daemon, or of another configuration, and is reported
                # again.
                told.clear()
                # The end of the connection is the end of the daemon: its successor must be told.
                _until_gone(connection)
                self._connection = None
                pause = KNOWN_SECONDS
            if self._was_known and not self._refused:
                pause = KNOWN_SECONDS
            # Once somebody is in a hurry the wait returns at once, and this sleep is the pause between
            # attempts.
            if self._hurry.wait(0 if self._hurry.is_set() else pause):
                time.sleep(KNOWN_SECONDS)


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other end is closed."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        # Closed by the thread meanwhile.
        return True


def _until_gone(connection: socket.socket) -> None:
    with connection:
        try:
            # The daemon sends nothing after its answer, so that this returns at its end.
            while connection.recv(1):
                continue
        except OSError:
            return
