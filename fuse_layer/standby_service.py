"""A standby process that systemd starts (ciuic-workers.service): it forks overlay workers for whichever daemon runs.

Guarantees: the daemon, which talks to every user, can do without the capabilities that only workers need; this process has
them, and answers root alone, on a socket that systemd holds: a daemon that asks while it is being restarted waits and is not
refused. The protocol is that of standby.py, on any number of connections. It collects the exit statuses of its children,
also of those whose daemon is gone, so that an adopted worker is seen to end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import structlog

from ciuic.fuse_layer import standby
from ciuic.readiness import readable

_FIRST_LISTENED_FD: Final = 3  # SD_LISTEN_FDS_START, sd_listen_fds(3)
_CREDENTIALS: Final = struct.Struct("@iII")  # struct ucred: pid, uid, gid
_BEATS_A_PERIOD: Final = 3  # of the watchdog: one that is late is not taken for the end
_MAX_KEPT_STATUSES: Final = 1024  # nobody asks for those of a daemon that is gone: the oldest are forgotten
_PAUSE_SECONDS: Final = 0.1  # a connection that cannot be accepted stays readable: no busy loop
log = structlog.get_logger(__name__)


class Child(NamedTuple):
    """In a process that was forked: what it was asked to be."""

    arguments: list[str]
    fds: list[int]


def is_activated() -> bool:
    """Whether systemd has started this very process with a socket."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def activated_listener() -> socket.socket:
    """The socket that systemd listens on for this process."""
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"):
        os.environ.pop(name, None)
    listener = socket.socket(fileno=_FIRST_LISTENED_FD)
    listener.set_inheritable(False)
    return listener


class Heartbeat:
    """Watchdog notifications to systemd (sd_notify(3), WATCHDOG=1); none without WATCHDOG_USEC.

    A process that forks workers and hangs is missed when a worker dies: the job waits until systemd has started another one.
    """

    def __init__(self, address: str = "", period_seconds: float = 0) -> None:
        self.milliseconds = (
            int(period_seconds * 1000 / _BEATS_A_PERIOD) if address and period_seconds else None
        )
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket: socket.socket | None = None
        if self.milliseconds is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)

    @classmethod
    def from_environment(cls) -> Heartbeat:
        """Take the variables out of the environment, so that workers do not speak in our name."""
        address, period = (os.environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC"))
        os.environ.pop("WATCHDOG_PID", None)
        return cls(address, int(period) / 1e6 if period.isdigit() else 0)

    def beat(self) -> None:
        """Say that this process answers. A systemd that does not read is none of a worker's business."""
        if self._socket is not None:
            with suppress(OSError):
                self._socket.sendto(b"WATCHDOG=1", self._address)

    def close(self) -> None:
        """In a process that was forked: it has nothing to say."""
        if self._socket is not None:
            self._socket.close()


def serve() -> Child | None:
    """Fork workers for ever; return in each process that is forked."""
    return Forker(activated_listener(), Heartbeat.from_environment()).serve()


class Forker:
    """Serves a listening SOCK_SEQPACKET socket. Single-threaded: a fork copies one thread alone."""

    def __init__(self, listener: socket.socket, heartbeat: Heartbeat | None = None) -> None:
        self._listener = listener
        self._heartbeat = heartbeat or Heartbeat()
        self._connections: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}
        """pidfd → process number."""
        self._statuses: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> Child | None:
        """Answer for ever; return in each process that is forked."""
        while True:
            self._heartbeat.beat()
            fd = self._next_ready(self._heartbeat.milliseconds)
            child = self._handle(fd) if fd is not None else None
            if child is not None:
                return child

    def _next_ready(self, timeout_ms: int | None) -> int | None:
        """Return one descriptor that has something to be handled; None after the timeout.

        One, because handling it may close another, whose number is then reused. The listener comes last: it stays readable while
        there is no descriptor to accept a connection with, and workers that end must not wait for that.
        """
        ready = [fd for fd, _ in self._poll.poll(timeout_ms)]
        return min(ready, key=lambda fd: fd == self._listener.fileno(), default=None)

    def _handle(self, fd: int) -> Child | None:
        """Do what a readable descriptor asks for; None but in a new process."""
        if fd == self._listener.fileno():
            self._accept()
        elif fd in self._children:
            self._collect(fd)
        elif fd in self._connections:
            child = self._answer(self._connections[fd])
            if child is not None:
                self._let_go()
                return child
        return None

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:
            # Out of descriptors, or the caller has gone: this process has others to serve.
            log.warning("connection_not_accepted", error=str(error))
            time.sleep(_PAUSE_SECONDS)
            return
        size = _CREDENTIALS.size
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid != os.geteuid():
            log.warning("stranger_refused", uid=uid)
            connection.close()
            return
        self._connected(connection)

    def _connected(self, connection: socket.socket) -> None:
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, connection: socket.socket) -> Child | None:
        """Handle one request; None but in a new process."""
        try:
            asked, fds = standby.receive(connection)
        except (OSError, ValueError) as error:  # killed, or a daemon of a version with another protocol
            log.warning("request_not_understood", error=str(error))
            asked, fds = None, []
        try:
            if isinstance(asked, int):
                standby.reply(connection, self._status(asked))
            elif isinstance(asked, list) and all(isinstance(word, str) for word in asked):
                if standby.is_abandoned(connection):
                    raise BrokenPipeError("the daemon did not wait for an answer")
                pid = standby.fork()
                if pid is None:
                    return Child(asked, fds)
                self._watch(pid)
                standby.answer_or_end(connection, pid, forked=True)
            elif isinstance(asked, dict):
                standby.reply(connection, *self._do(asked, fds))
            else:
                self._disconnect(connection)
        except (LookupError, TypeError, ValueError) as error:  # of a version with other requests
            log.warning("request_not_understood", error=repr(error))
            self._disconnect(connection)
        except OSError as error:  # the daemon was killed between question and answer
            log.warning("daemon_lost", error=str(error))
            self._disconnect(connection)
        for fd in fds:  # of a session: it would not end while they are held here
            os.close(fd)
        return None

    def _do(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[bool, list[int]]:
        """Carry out a request of another kind; its answer, with descriptors that stay ours. ``fds`` stay the caller's."""
        raise ValueError(f"expected arguments or a process number, got {request!r:.200}")

    def _watch(self, pid: int) -> None:
        """Notice the end of a child; ``pid`` 0 is none. A child that cannot be watched is ended: it would serve unknown to anybody.

        Raises:
            OSError: there is no descriptor left to watch it by.
        """
        if not pid:
            return
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            raise
        self._children[pidfd] = pid
        self._poll.register(pidfd, select.POLLIN)

    def _disconnect(self, connection: socket.socket) -> None:
        self._poll.unregister(connection)
        del self._connections[connection.fileno()]
        connection.close()

    def _collect(self, pidfd: int) -> None:
        pid = self._children.pop(pidfd)
        self._poll.unregister(pidfd)
        os.close(pidfd)
        status = standby.collect(pid)
        self._statuses[pid] = standby.UNKNOWN_STATUS if status is None else status
        while len(self._statuses) > _MAX_KEPT_STATUSES:
            del self._statuses[next(iter(self._statuses))]

    def _status(self, pid: int) -> int | None:
        for pidfd, child in list(self._children.items()):
            if child == pid:
                if not readable(pidfd):
                    return None
                self._collect(pidfd)
        return self._statuses.get(pid, standby.UNKNOWN_STATUS)

    def _let_go(self) -> None:
        for connection in (self._listener, *self._connections.values()):
            connection.close()
        for pidfd in self._children:
            os.close(pidfd)
        self._heartbeat.close()
