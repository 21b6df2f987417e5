"""Client of a forking process: start or reach it, have it fork, ask how a child ended.

Guarantees: a forking process that hangs or ends costs one request, which the caller then serves in another
way; the next `prepare` starts another one. What it forked lives on. It is killed first when it held sessions:
it would go on with those whose workers its successor forks.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import structlog

from ciuic.fuse_layer.prefork.messages import (
    MAX_FDS,
    MESSAGE_BYTES,
    UNKNOWN_STATUS,
    WORKER,
    listen_for_daemons,
    send,
)
from ciuic.system.child_process import module_command
from ciuic.system.poll import readable

_ANSWER_SECONDS: Final = 10.0
"""Timeout of an answer. The process may still be importing everything, on a busy host."""
_POLL_SECONDS: Final = 0.005
log = structlog.get_logger(__name__)


class ForkedProcess:
    """A child of the forking process, with the interface of Popen."""

    def __init__(self, parent: SpareProcess, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._parent = parent
        try:
            self.pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            # It has ended, and its parent has collected it and keeps the status (service.py).
            self.returncode = parent.status_of(pid)
            self.pidfd = os.eventfd(1, os.EFD_CLOEXEC)
        """Readable when the process has ended."""

    def __del__(self) -> None:
        if hasattr(self, "pidfd"):
            os.close(self.pidfd)

    def poll(self) -> int | None:
        """Return the exit status, negative for a signal; None while the process lives."""
        if self.returncode is None and readable(self.pidfd):
            self.returncode = self._parent.status_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """Wait for the end of the process, and return its exit status."""
        while (status := self.poll()) is None:
            readable(self.pidfd, -1)
        return status

    def kill(self) -> None:
        """Send SIGKILL, if the process lives."""
        if self.poll() is None:
            # By pidfd: the number may belong to another process once its parent has collected this one.
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class SpareProcess:
    """Client of one forking process, which it starts (standby.py) or reaches (service.py). Thread-safe."""

    def __init__(
        self,
        cwd: Path,
        environment: Mapping[str, str],
        module: str = WORKER,
        *,
        prefix: Sequence[str] = (),
        oom_score_adj: str = "",
        service: str = "",
        keeps: bool = False,
    ) -> None:
        """Describe the forking process; `prepare` starts it.

        Args:
            cwd: its current directory.
            environment: its environment.
            module: module whose ``main`` its children run.
            prefix: words before the command (daemon/base/process_priority.py).
            oom_score_adj: OOM score that it and its children start with.
            service: path of the socket of a forking process that systemd starts (service.py); none is started
                here then.
            keeps: it holds sessions, and listens in ``cwd`` for the next daemon (keeper.py).
        """
        self.service = service
        self._keeps = keeps
        self._command = [*prefix, *module_command("ciuic.fuse_layer.standby", module)]
        self._oom_score_adj = oom_score_adj
        self._cwd = cwd
        self._environment = dict(environment)
        # One request at a time: answers carry no number that would tell whose they are.
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.listens_at = ""
        """Path of the socket on which the process that was started here waits for the next daemon."""

    def prepare(self) -> None:
        """Start the process, unless it runs.

        Without memory or processes to spare there is none, which is no error.
        """
        with self._lock:
            runs = self._child is not None and self._child.poll() is None
            if self._socket is not None and (self.service or runs):
                return
            if self.service:
                self._connect()
                return
            self._let_go()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_ANSWER_SECONDS)
            try:
                self._start(theirs)
                self._socket = ours
            except OSError as error:
                ours.close()
                self._remove_name()
                log.warning("no_spare_process", command=self._command[-1], error=str(error))
            finally:
                theirs.close()

    def _start(self, connection: socket.socket) -> None:
        listener = listen_for_daemons(self._cwd) if self._keeps else None
        self.listens_at = listener.getsockname() if listener is not None else ""
        inherited = (listener.fileno(),) if listener is not None else ()
        try:
            self._child = subprocess.Popen(
                [*self._command, *map(str, inherited)],
                stdin=connection.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                # A signal to the daemon's process group (ctrl-C, kill -- -PGID) must not end the keeper with
                # it.
                start_new_session=True,
                cwd=self._cwd,
                env=self._environment,
            )
        finally:
            if listener is not None:
                listener.close()
        if self._oom_score_adj:
            # Best effort: the process may have ended, or /proc may be read-only (containers).
            with suppress(OSError):
                Path(f"/proc/{self._child.pid}/oom_score_adj").write_text(self._oom_score_adj)

    def become(self, arguments: Sequence[str], fds: Sequence[int]) -> ForkedProcess | None:
        """Fork a process with these arguments, in which descriptor ``fds[i]`` has the number FIRST_PASSED_FD + i.

        Waits for a forking process that is still starting. Returns None where none can fork it.
        """
        if self.service:
            self.prepare()
        pid = self._ask(list(arguments), fds) if len(fds) <= MAX_FDS else 0
        process = ForkedProcess(self, pid) if pid else None
        # One that has ended, with its parent: that was killed just now, and another one can fork it.
        return None if process is not None and process.returncode == UNKNOWN_STATUS else process

    def await_ready(self) -> bool:
        """Start the process, unless it runs, and wait until it answers; return whether it does."""
        # Twice: the process that is known may have ended, as a service that is restarted does.
        for _ in range(2):
            self.prepare()
            # Asked about a process that is not its child, it answers and collects nothing.
            if self._ask(os.getpid()) is not None:
                return True
        return False

    def status_of(self, pid: int) -> int:
        """Return the exit status of a child that has ended."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        # Its pidfd is readable a moment before its parent may collect it: ask until the parent knows.
        while (status := self._ask(pid)) is None and self._socket is not None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
        return UNKNOWN_STATUS if status is None else status

    def tell(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> bool:
        """Send a request to the keeper; return whether it was carried out."""
        return bool(self._ask(dict(request), fds))

    def open_pidfd(self) -> int | None:
        """Return a pidfd of the process that was started here, which is the caller's; None without one."""
        pid = self.pid
        try:
            return os.pidfd_open(pid) if pid is not None else None
        except ProcessLookupError:
            return None

    @property
    def pid(self) -> int | None:
        """Number of the process that was started here; None without one."""
        child = self._child
        return child.pid if child is not None else None

    def _ask(self, what: list[str] | int | dict[str, object], fds: Sequence[int] = ()) -> int | None:
        with self._lock:
            if self._socket is None:
                return None
            try:
                send(self._socket, what, fds)
                # SOCK_SEQPACKET: an answer is one packet, and an empty one is the end of the connection.
                answer = self._socket.recv(MESSAGE_BYTES)
            except OSError as error:
                # It has ended or hangs. Another one is started when it is needed again.
                log.warning("spare_process_lost", command=self._command[-1], error=str(error))
                answer = b""
            if not answer:
                self._socket.close()
                self._socket = None
                if self._keeps and self._child is not None:
                    # A keeper that hangs would go on with sessions whose workers another one forks.
                    self._child.kill()
                return None
            status: int | None = json.loads(answer)
            return status

    def close(self, *, leave: bool = False) -> None:
        """End the process; what it forked lives on.

        With ``leave`` it lives on itself for as long as it holds sessions.
        """
        with self._lock:
            if leave and self._child is not None:
                # Popen warns of a child that it has not seen end; this one outlives us by design.
                self._child.returncode = 0
                self._child = None
            self._let_go()

    def _connect(self) -> None:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.settimeout(_ANSWER_SECONDS)
        try:
            connection.connect(self.service)
        except OSError as error:
            connection.close()
            log.warning("no_spare_process", service=self.service, error=str(error))
            return
        self._socket = connection

    def _let_go(self) -> None:
        child, self._child = self._child, None
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if child is not None:
            try:
                child.wait(_ANSWER_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            self._remove_name()

    def _remove_name(self) -> None:
        """Remove the socket's name, which a process that was killed or could not be started leaves behind."""
        if self.listens_at:
            Path(self.listens_at).unlink(missing_ok=True)
