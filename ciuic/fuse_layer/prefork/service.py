"""The forking process that systemd starts (ciuic-workers.service): it forks overlay workers for whichever daemon runs.

The daemon, which talks to every user, can do without the capabilities that only workers need: this process
has them. The unit's command becomes this process by `exec_standby`.

Guarantees: it answers root alone, on a socket that systemd holds, so that a daemon which asks while this
process is being restarted waits and is not refused. The protocol is that of messages.py, on any number of
connections. It collects the exit statuses of its children, also of those whose daemon is gone, so that an
adopted worker is seen to end.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any, Final, NoReturn

import structlog

from ciuic.errors import UsageError
from ciuic.fuse_layer.prefork import messages
from ciuic.fuse_layer.prefork.messages import WORKER
from ciuic.system.child_process import environment, module_command
from ciuic.system.poll import readable
from ciuic.system.sd_daemon import Notifier, take_stored_fds
from ciuic.system.unix_sockets import credentials

_BEATS_PER_PERIOD: Final = 3
"""Notifications in a period of the watchdog: one that is late does not end this process."""
_MAX_KEPT_STATUSES: Final = 1024
"""Limit of exit statuses that are kept; beyond it the oldest go, which are those of daemons that are gone."""
_PAUSE_SECONDS: Final = 0.1
"""Pause after a connection that could not be accepted: it stays readable, and the loop would spin."""
log = structlog.get_logger(__name__)


def is_activated() -> bool:
    """Return whether systemd has started this very process with a socket (LISTEN_PID of sd_listen_fds(3))."""
    return os.environ.get("LISTEN_PID") == str(os.getpid())


def serve() -> messages.ForkedChild | None:
    """Fork workers for ever; return in each process that is forked."""
    # Their variables are removed, so that workers take no socket for theirs and notify nobody in our name.
    (listener_fd,) = take_stored_fds(os.environ, os.getpid()).values()
    notifier = Notifier.from_environment(os.environ, os.getpid())
    return Forker(socket.socket(fileno=listener_fd), notifier=notifier).serve()


class Forker:
    """Server of SOCK_SEQPACKET sockets.

    Single-threaded, because fork(2) copies the calling thread alone.
    """

    def __init__(
        self,
        listener: socket.socket | None,
        connection: socket.socket | None = None,
        *,
        notifier: Notifier | None = None,
    ) -> None:
        """Serve those that connect to ``listener``, if there is one, and a caller that is connected already.

        Args:
            listener: listening socket.
            connection: connection of the process that has started this one.
            notifier: connection to systemd, if that has started this one.
        """
        self._listener = listener
        self._notifier = notifier or Notifier()
        self._connections: dict[int, socket.socket] = {}
        self._children: dict[int, int] = {}
        """Process number by pidfd."""
        self._statuses: dict[int, int] = {}
        self._poll = select.poll()
        if listener is not None:
            self._poll.register(listener, select.POLLIN)
        if connection is not None:
            self._connected(connection)

    def serve(self) -> messages.ForkedChild | None:
        """Answer requests until nobody can ask any more, and return None; return in each process that is forked."""
        period_seconds = self._notifier.watchdog_seconds
        pause_ms = int(period_seconds * 1000 / _BEATS_PER_PERIOD) if period_seconds else None
        while self._listener is not None or self._connections:
            # While this process hangs, the job of a worker that dies waits: systemd ends it, and starts another one.
            if pause_ms is not None:
                self._notifier.watchdog()
            fd = self._next_ready(pause_ms)
            child = self._handle(fd) if fd is not None else None
            if child is not None:
                return child
        return None

    def _next_ready(self, timeout_ms: int | None) -> int | None:
        """Return one descriptor that has something to be handled; None after the timeout."""
        # One, because handling it may close another, whose number is then reused. The listener comes last: it
        # stays readable while there is no descriptor to accept a connection with, and the end of a worker
        # must be seen meanwhile.
        ready = [fd for fd, _ in self._poll.poll(timeout_ms)]
        return min(ready, key=self._is_listener, default=None)

    def _is_listener(self, fd: int) -> bool:
        return self._listener is not None and fd == self._listener.fileno()

    def _handle(self, fd: int) -> messages.ForkedChild | None:
        """Handle a readable descriptor; return None, and in a process that was forked its request."""
        if self._listener is not None and self._is_listener(fd):
            self._accept(self._listener)
        elif fd in self._children:
            self._collect(fd)
        elif fd in self._connections:
            child = self._answer(self._connections[fd])
            if child is not None:
                self._let_go()
                return child
        return None

    def _accept(self, listener: socket.socket) -> None:
        try:
            connection, _ = listener.accept()
        except OSError as error:
            # Out of descriptors, or the caller has gone. Other connections are to be served all the same.
            log.warning("connection_not_accepted", error=str(error))
            time.sleep(_PAUSE_SECONDS)
            return
        uid = credentials(connection).uid
        # The socket's mode keeps others out already. What answers here hands out processes with the
        # capabilities of a worker and, in a keeper, the sessions of mounted roots.
        if uid != os.geteuid():
            log.warning("stranger_refused", uid=uid)
            connection.close()
            return
        self._connected(connection)

    def _connected(self, connection: socket.socket) -> None:
        self._connections[connection.fileno()] = connection
        self._poll.register(connection, select.POLLIN)

    def _answer(self, connection: socket.socket) -> messages.ForkedChild | None:
        """Handle one request; return None, and in a process that was forked its request."""
        try:
            asked, fds = messages.receive(connection)
        except (OSError, ValueError) as error:
            # The daemon was killed, or its version has another protocol.
            log.warning("request_not_understood", error=str(error))
            asked, fds = None, []
        try:
            if isinstance(asked, int):
                messages.send(connection, self._status(asked))
            elif isinstance(asked, list) and all(isinstance(word, str) for word in asked):
                # Asked before the fork: a daemon whose timeout is over may have had a worker forked
                # elsewhere.
                if messages.is_abandoned(connection):
                    raise BrokenPipeError("the daemon did not wait for an answer")
                pid = messages.fork()
                if pid is None:
                    return messages.ForkedChild(asked, fds)
                self._watch(pid)
                messages.answer_or_end(connection, pid)
            elif isinstance(asked, dict):
                messages.send(connection, *self._do(asked, fds))
            else:
                self._disconnect(connection)
        except (LookupError, TypeError, ValueError) as error:
            # A daemon of a version with other requests.
            log.warning("request_not_understood", error=repr(error))
            self._disconnect(connection)
        except OSError as error:
            # The daemon was killed between request and answer.
            log.warning("daemon_lost", error=str(error))
            self._disconnect(connection)
        # A session does not end while one of its descriptors is open here.
        for fd in fds:
            os.close(fd)
        return None

    def _do(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[bool, list[int]]:
        """Carry out a request of another kind; return its answer, with descriptors that stay ours.

        ``fds`` stay the caller's.
        """
        raise ValueError(f"expected arguments or a process number, got {request!r:.200}")

    def _watch(self, pid: int) -> None:
        """Watch for the end of a child; 0 is none.

        A child that cannot be watched is killed, because its end would go unseen.

        Raises:
            OSError: there is no descriptor left for its pidfd.
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
        status = messages.collect(pid)
        self._statuses[pid] = messages.UNKNOWN_STATUS if status is None else status
        while len(self._statuses) > _MAX_KEPT_STATUSES:
            del self._statuses[next(iter(self._statuses))]

    def _status(self, pid: int) -> int | None:
        for pidfd, child in list(self._children.items()):
            if child == pid:
                if not readable(pidfd):
                    return None
                self._collect(pidfd)
        return self._statuses.get(pid, messages.UNKNOWN_STATUS)

    def _let_go(self) -> None:
        if self._listener is not None:
            self._listener.close()
        for connection in self._connections.values():
            connection.close()
        for pidfd in self._children:
            os.close(pidfd)
        # A process that was forked must not notify for its parent.
        self._notifier.close()


# Variables by which systemd passes sockets to a process (sd_listen_fds(3)) and asks it for notifications
# (sd_notify(3)).
_SYSTEMD_VARIABLES = (
    *("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"),
    *("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"),
)


def exec_standby() -> NoReturn:
    """Replace this process by one that forks workers for a daemon that asks on the socket passed by systemd."""
    if not is_activated():
        raise UsageError(
            "expected a listening socket from systemd (LISTEN_PID), got none",
            hint="systemctl start ciuic-workers.socket; `ciuic daemon` alone needs no such process",
        )
    # As every child of root (docs/decisions/children.md).
    os.chdir("/")
    command = module_command("ciuic.fuse_layer.standby", WORKER)
    # `environment` keeps harmless variables only, and drops these with the rest.
    told = {name: os.environ[name] for name in _SYSTEMD_VARIABLES if name in os.environ}
    os.execve(command[0], command, {**environment(), **told})
