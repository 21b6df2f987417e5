"""A standby process that systemd starts (ciuic-workers.service): it forks overlay workers for whichever daemon runs.

Guarantees: the daemon, which talks to every user, can do without the capabilities that only workers need; this process has
them, and answers root alone, on a socket that systemd holds: a daemon that asks while it is being restarted waits and is not
refused. The protocol is that of standby.py, on any number of connections. It collects the exit statuses of its children,
also of those whose daemon is gone, so that an adopted worker is seen to end.
"""

from __future__ import annotations

import os
import select
import socket
import struct
from typing import Final, NamedTuple

import structlog

from ciuic.fuse_layer import standby
from ciuic.readiness import readable

_FIRST_LISTENED_FD: Final = 3  # SD_LISTEN_FDS_START, sd_listen_fds(3)
_CREDENTIALS: Final = struct.Struct("@iII")  # struct ucred: pid, uid, gid
_MAX_KEPT_STATUSES: Final = 1024  # nobody asks for those of a daemon that is gone: the oldest are forgotten
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


class Forker:
    """Serves a listening SOCK_SEQPACKET socket. Single-threaded: a fork copies one thread alone."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self._connections: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}
        """pidfd → process number."""
        self._statuses: dict[int, int] = {}
        self._poll = select.poll()
        self._poll.register(listener, select.POLLIN)

    def serve(self) -> Child:
        """Answer for ever; return in each process that is forked."""
        while True:
            for fd, _ in self._poll.poll():
                if fd == self._listener.fileno():
                    self._accept()
                elif fd in self._children:
                    self._collect(fd)
                elif fd in self._connections:
                    child = self._answer(self._connections[fd])
                    if child is not None:
                        self._let_go()
                        return child

    def _accept(self) -> None:
        connection, _ = self._listener.accept()
        size = _CREDENTIALS.size
        _, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        if uid != os.geteuid():
            log.warning("stranger_refused", uid=uid)
            connection.close()
            return
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
                pid = standby.fork()
                if pid is None:
                    return Child(asked, fds)
                self._watch(pid)
                standby.reply(connection, pid)
            else:
                self._disconnect(connection)
        except OSError as error:  # the daemon was killed between question and answer
            log.warning("daemon_lost", error=str(error))
            self._disconnect(connection)
        for fd in fds:  # of a session: it would not end while they are held here
            os.close(fd)
        return None

    def _watch(self, pid: int) -> None:
        if pid:
            pidfd = os.pidfd_open(pid)
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
