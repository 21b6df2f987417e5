"""Keeping a trainer known to the daemon, for as long as both live: in a thread, so that nobody waits for a daemon that does not answer.

Guarantees: no daemon is no error; one that comes later, or again, is told within some seconds. Nothing here touches the trainer: it is
for whoever stands beside it (the writer process, `ciuic watch`).
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final

from ciuic.errors import CiuicError, Unreachable
from ciuic.watch_client import Hello, introduce

ANSWER_SECONDS: Final = 10.0
KNOWN_SECONDS: Final = 1.0
"""A daemon that was there is most likely being started again."""
UNKNOWN_SECONDS: Final = 10.0
REFUSED_SECONDS: Final = 600.0
_LOOK_SECONDS: Final = 0.05
"""Pause between two looks for a daemon, which takes a second to start."""


class Acquaintance:
    """``fds``: pidfd and page, which stay the caller's and must stay open. ``on_trouble``: told once for each kind of it, in the thread."""

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
        threading.Thread(target=self._keep, name="ciuic-watched", daemon=True).start()

    def last_words(self, seconds: float) -> None:
        """Wait until a daemon knows of the trainer, which did not end as it should; at most ``seconds``, and only where there was one."""
        self._hurry.set()
        if not self._was_known or self._refused:
            self._tried.wait(ANSWER_SECONDS)
            return
        deadline = time.monotonic() + seconds
        while not self._is_known() and time.monotonic() < deadline:
            time.sleep(_LOOK_SECONDS)

    def _is_known(self) -> bool:
        """Return whether a daemon that has answered lives. Its end is asked for: the thread may not have noticed it yet."""
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
                if type(error) not in told:
                    told.add(type(error))
                    self._on_trouble(error)
                self._tried.set()
                pause = REFUSED_SECONDS if self._refused else UNKNOWN_SECONDS
            else:
                self._was_known = True
                self._connection = connection
                self._tried.set()
                told.clear()
                _until_gone(connection)
                self._connection = None
                pause = KNOWN_SECONDS
            if self._was_known and not self._refused:
                pause = KNOWN_SECONDS
            if self._hurry.wait(0 if self._hurry.is_set() else pause):
                time.sleep(KNOWN_SECONDS)


def _has_ended(connection: socket.socket) -> bool:
    """Return whether the other end is closed."""
    try:
        return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:  # closed by the thread meanwhile
        return True


def _until_gone(connection: socket.socket) -> None:
    with connection:
        try:
            while connection.recv(1):
                continue
        except OSError:
            return
