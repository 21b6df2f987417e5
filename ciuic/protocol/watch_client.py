"""Register a process with the daemon, which then watches it, and keep it registered in a background thread.

The daemon listens on `watch.sock` in its runtime directory, which every user may open; it decides by the kernel's credentials of
the caller whom it accepts. One message carries a pidfd of the trainer and its heartbeat page (heartbeat_page.py), if it has one. It
therefore works from a container, too, if the socket is mounted there. After its answer the daemon needs nothing more of the caller;
a caller that keeps the connection open sees by its end that the daemon is gone.

Guarantees: no caller waits for a daemon that does not answer, and a missing daemon is no error. A daemon that is started later, or
again, is told within some seconds. The code runs in a process beside the trainer (the writer process, `ciuic watch`) and does not
touch the trainer itself.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

import msgspec

from ciuic.errors import CiuicError, NotPermitted, Unreachable
from ciuic.protocol.peer_socket import Refused, runtime_dir
from ciuic.structs import decode_msgpack
from ciuic.system import service_manager
from ciuic.system.poll import readable, receive_queued, wait_until
from ciuic.system.unix_sockets import rights

SOCKET_NAME: Final = "watch.sock"
MAX_MESSAGE_BYTES: Final = 16 << 10
MAX_TEXT_CHARACTERS: Final = 400
MAX_FDS: Final = 2
# Pauses between two attempts to send while the daemon decides, which takes about a millisecond.
_FIRST_PAUSE_SECONDS: Final = 0.001
_MAX_PAUSE_SECONDS: Final = 0.05

Kind = Literal["library", "command", "pid", "file"]
"""Origin of a registration: SnapshotManager; `ciuic watch -- COMMAND`; `ciuic watch --pid`; a [[trainer]] of the configuration."""


class Hello(msgspec.Struct, tag=True, frozen=True, kw_only=True):
    """Registration of a trainer."""

    name: str
    where: str
    """Directory that it saves to, or was started in. Together with the name it identifies a training that is started again."""
    kind: Kind
    # The pidfd that comes with the message identifies the process; the number may belong to another one by now.
    pid: int
    """Process id as the sender sees it, for a process that has ended before the daemon looks."""
    start_ticks: int
    """Start time of the process in clock ticks, as in proc_pid_stat(5); tells it from a later one with the same pid."""
    heartbeat_seconds: float = 0.0
    """Time without a heartbeat after which it counts as hung; 0: never."""


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Answer: the trainer is watched from now on."""


Answer = Welcome | Refused


def watch_socket(environment: Mapping[str, str]) -> str:
    """Return the path of the socket of the daemon whose configuration is in force."""
    return f"{runtime_dir(environment)}/{SOCKET_NAME}"


def introduce(path: str | Path, hello: Hello, fds: Sequence[int], *, seconds: float) -> socket.socket:
    """Register a trainer; return the connection to the daemon that watches it from now on.

    Args:
        path: the daemon's socket.
        hello: the message.
        fds: pidfd and, if there is one, heartbeat page.
        seconds: longest time until the answer.

    Raises:
        Unreachable: no daemon, or none that answers in time.
        NotPermitted: the socket may not be opened.
        CiuicError: the daemon refused, with the class of its exit code.
    """
    # SOCK_SEQPACKET keeps messages apart, so the descriptors arrive with their message, and no framing is needed.
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        connection.settimeout(seconds)
        connection.connect(os.fspath(path))
        _send(connection, msgspec.msgpack.encode(hello), fds, time.monotonic() + seconds)
        data = receive_queued(lambda: connection.recv(MAX_MESSAGE_BYTES))
        answer: Answer | None = decode_msgpack(data, Answer) if data else None
    except PermissionError as error:
        connection.close()
        raise NotPermitted(f"not permitted to open {os.fspath(path)}") from error
    except (OSError, msgspec.DecodeError) as error:
        connection.close()
        raise Unreachable(
            f"no daemon answers on {os.fspath(path)}", hint=service_manager.start_hint()
        ) from error
    if isinstance(answer, Welcome):
        # The caller reads until the daemon's end, without a timeout.
        connection.settimeout(None)
        return connection
    connection.close()
    if answer is None:
        raise Unreachable(f"the daemon behind {os.fspath(path)} did not answer")
    raise answer.raised()


def _send(connection: socket.socket, data: bytes, fds: Sequence[int], deadline: float) -> None:
    """Send the message once the daemon accepts descriptors of this caller; return without sending after a refusal. OSError."""
    pause_seconds = _FIRST_PAUSE_SECONDS
    while True:
        try:
            connection.sendmsg([data], rights(fds), socket.MSG_NOSIGNAL)
            return
        except (BrokenPipeError, ConnectionResetError):
            # The daemon has refused and closed its end already; its refusal can still be received.
            return
        except PermissionError:
            # Linux 6.16 and later: descriptors can be sent only after the daemon has checked the caller's credentials. No event
            # reports that, so sending is retried.
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                raise TimeoutError("the daemon did not accept or refuse the caller in time") from None
            # A refusal, or the end of the connection: the caller receives it.
            if readable(connection.fileno(), min(pause_seconds, remaining_seconds)):
                return
            pause_seconds = min(2 * pause_seconds, _MAX_PAUSE_SECONDS)


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
        wait_until(self.is_known, seconds, _POLL_SECONDS)

    def is_known(self) -> bool:
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
