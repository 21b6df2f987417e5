"""A process that has imported everything that a program of ours needs, and forks one whenever it is asked to.

When a worker dies the job waits for its successor, and most of that wait would be the start of an interpreter (0.2 s of
processor time, more on a busy host). So one process is kept ready for whichever root needs it: a fork takes milliseconds,
also of the second worker within a second. Captures, of which a snapshot takes one, are forked by another such process.

    python -m ciuic.fuse_layer.standby MODULE [LISTENER]     (standard input: a socket on which requests and descriptors come)

Guarantees: it ends when whoever started it goes away; what it forked does not. Each is its child, so it is asked how they
ended. Requests (JSON, one a packet): a list of arguments for ``MODULE.main`` with the descriptors → the process number, 0 where
none can be forked; a process number → its exit status as of Popen, null while it lives. With LISTENER, the descriptor of a
listening socket, it holds sessions too, and outlives the daemon with them (keeper.py).
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import structlog

from ciuic.child_process import module_command, shown_command
from ciuic.fuse_layer import urgency
from ciuic.readiness import readable

FIRST_PASSED_FD: Final = 100
"""The descriptors that come get the numbers from here on."""
_MESSAGE_BYTES: Final = 65536
_MAX_FDS: Final = 250
"""SCM_MAX_FD of the kernel is 253."""
_ANSWER_SECONDS: Final = 10.0
"""So long it may take to import everything, on a busy host."""
_POLL_SECONDS: Final = 0.005
UNKNOWN_STATUS: Final = 255
WORKER: Final = "ciuic.fuse_layer.worker"
KEEPER_PREFIX: Final = "keeper-"
"""Name of the socket of a process that holds sessions, in the runtime directory."""
if TYPE_CHECKING:
    from ciuic.fuse_layer import standby_service
log = structlog.get_logger(__name__)


class ForkedProcess:
    """A child of the standby process; to be used as a Popen."""

    def __init__(self, standby: SpareProcess, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._standby = standby
        self.pidfd = os.pidfd_open(pid)
        """Readable when it has ended."""

    def __del__(self) -> None:
        if hasattr(self, "pidfd"):
            os.close(self.pidfd)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        if self.returncode is None and readable(self.pidfd):
            self.returncode = self._standby.status_of(self.pid)
        return self.returncode

    def wait(self) -> int:
        """The same when it has ended."""
        while (status := self.poll()) is None:
            time.sleep(_POLL_SECONDS)
        return status

    def kill(self) -> None:
        """SIGKILL, if it lives."""
        if self.poll() is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)


class SpareProcess:
    """The starting side. Thread-safe."""

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
        """``prefix`` goes before the command, as slices.py has it; ``oom_score_adj`` is what it and its children start with.
        ``service``: path of the socket of standby_service.py, which systemd starts; no process is started here then.
        ``keeps``: it holds sessions, and listens in ``cwd`` for the next daemon (keeper.py).
        """
        self.service = service
        self._keeps = keeps
        self._command = [*prefix, *module_command("ciuic.fuse_layer.standby", module)]
        self._oom_score_adj = oom_score_adj
        self._cwd = cwd
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None
        self.listens_at = ""
        """Name of the socket of the process that was started here, for the next daemon."""

    def prepare(self) -> None:
        """Start it, unless there is one. Without memory or processes to spare there is none: no error."""
        with self._lock:
            if self._socket is not None and (
                self.service or (self._child is not None and self._child.poll() is None)
            ):
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
        from ciuic.fuse_layer.keeper import listen_for_daemons  # imported here because it imports this module

        listener = listen_for_daemons(self._cwd) if self._keeps else None
        self.listens_at = listener.getsockname() if listener is not None else ""
        inherited = (listener.fileno(),) if listener is not None else ()
        try:
            self._child = subprocess.Popen(
                [*self._command, *map(str, inherited)],
                stdin=connection.fileno(),
                stdout=subprocess.DEVNULL,
                pass_fds=inherited,
                start_new_session=True,
                cwd=self._cwd,
                env=self._environment,
            )
        finally:
            if listener is not None:
                listener.close()
        self._weigh(self._child.pid)

    def become(self, arguments: Sequence[str], fds: Sequence[int]) -> ForkedProcess | None:
        """A process with these arguments, in which descriptor number ``fds[i]`` is FIRST_PASSED_FD + i. None when there is
        nobody who could fork it. Waits for one that is still starting."""
        if self.service:
            self.prepare()
        pid = self._ask(list(arguments), fds) if len(fds) <= _MAX_FDS else 0
        if not pid:
            return None
        try:
            return ForkedProcess(self, pid)
        except ProcessLookupError:  # it has ended, and who forked it as well
            return None

    def await_ready(self) -> bool:
        """Start it, unless there is one, and wait until it answers; tell whether it does."""
        for _ in range(2):  # the one that is known may have ended, as a service does that is restarted
            self.prepare()
            if self._ask(os.getpid()) is not None:  # no child of its own: it collects nothing
                return True
        return False

    def status_of(self, pid: int) -> int:
        """How one that has ended did so."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (status := self._ask(pid)) is None and self._socket is not None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # its end is seen a moment before its parent may collect it
        return UNKNOWN_STATUS if status is None else status

    def tell(self, request: Mapping[str, object], fds: Sequence[int] = ()) -> bool:
        """Have a request of keeper.py carried out; whether it was."""
        return bool(self._ask(dict(request), fds))

    def open_pidfd(self) -> int | None:
        """A pidfd of the process that was started here, which is the caller's; None without one."""
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
                socket.send_fds(self._socket, [json.dumps(what).encode()], list(fds))
                answer = self._socket.recv(_MESSAGE_BYTES)
            except OSError as error:  # ended, or hangs: another one is started when it is needed again
                log.warning("spare_process_lost", command=self._command[-1], error=str(error))
                answer = b""
            if not answer:
                self._socket.close()
                self._socket = None
                if self._keeps and self._child is not None:
                    self._child.kill()  # one that hangs would go on with sessions whose workers another one forks
                return None
            status: int | None = json.loads(answer)
            return status

    def close(self, *, leave: bool = False) -> None:
        """It ends; what it forked does not. ``leave``: it lives on for as long as it holds sessions."""
        with self._lock:
            if leave and self._child is not None:
                self._child.returncode = 0  # Popen must not complain of what outlives us by design
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

    def _weigh(self, pid: int) -> None:
        if self._oom_score_adj:
            with suppress(OSError):  # it has ended, or /proc is not what it should be
                Path(f"/proc/{pid}/oom_score_adj").write_text(self._oom_score_adj)

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
        if self.listens_at:  # of a process that was killed, or could not be started
            Path(self.listens_at).unlink(missing_ok=True)


def main(module: str, listener_fd: str = "") -> int:
    """Fork processes until nobody asks any more; in one of them, its exit status."""
    if module == WORKER:  # captures, which are forked in the same way, are to yield
        urgency.raise_priority()
    # Imported here, so that whoever only starts this does not import a worker.
    program = importlib.import_module(module)
    from ciuic.fuse_layer import standby_service

    gc.collect()
    gc.freeze()  # what all of them share is not written to by their collectors
    if listener_fd or standby_service.is_activated():
        child = _keep(int(listener_fd)) if listener_fd else standby_service.serve()
        if child is None:
            return 0
        _settle(child.fds)
        arguments: list[str] | None = child.arguments
    else:
        arguments = _serve()
    if arguments is None:
        return 0
    if module == WORKER:
        rename(module, *arguments[:2])  # "--root PATH"
    status: int = program.main(arguments)
    return status


def _keep(listener_fd: int) -> standby_service.Child | None:
    from ciuic.fuse_layer.keeper import Keeper
    from ciuic.fuse_layer.worker import configure_logs

    configure_logs()
    os.set_inheritable(listener_fd, False)
    return Keeper(socket.socket(fileno=listener_fd), socket.socket(fileno=os.dup(0))).serve()


def _serve() -> list[str] | None:
    """None at the end; returns in each process that is forked as well, with its arguments."""
    with socket.socket(fileno=os.dup(0)) as come:
        while True:
            asked, fds = receive(come)
            if asked is None:
                return None
            answer: int | None
            if isinstance(asked, dict):  # nothing is held here
                answer = 0
            elif isinstance(asked, int):
                answer = collect(asked)
            else:
                answer = 0 if is_abandoned(come) else fork()
                if answer is None:
                    break
                for fd in fds:  # of a session: it would not end while we held it
                    os.close(fd)
            answer_or_end(come, answer, forked=not isinstance(asked, int))
    _settle(fds)
    return list(asked)


def receive(connection: socket.socket) -> tuple[list[str] | int | dict[str, Any] | None, list[int]]:
    """Return a request, None at the end of the connection, and its descriptors.

    Raises:
        OSError: the connection has failed.
        ValueError: the request is no JSON. Its descriptors are closed.
    """
    message, fds, _, _ = socket.recv_fds(connection, _MESSAGE_BYTES, _MAX_FDS)
    try:
        return (json.loads(message) if message else None), fds
    except ValueError:
        for fd in fds:  # one of a session would keep a mount that nobody serves from being dead
            os.close(fd)
        raise


def reply(connection: socket.socket, answer: int | None, fds: Sequence[int] = ()) -> None:
    """Answer a request."""
    socket.send_fds(connection, [json.dumps(answer).encode()], list(fds))


def answer_or_end(connection: socket.socket, answer: int | None, *, forked: bool) -> None:
    """Answer a request; end the process that was forked for it when nobody is there any more to be told of it.

    Raises:
        OSError: nobody is there.
    """
    try:
        reply(connection, answer)
    except OSError:
        if forked and answer:
            os.kill(answer, signal.SIGKILL)
        raise


def is_abandoned(connection: socket.socket) -> bool:
    """Return whether the caller has hung up: it ran out of patience, and may have had a worker forked for the session elsewhere.

    Two workers of one session would answer the same kernel, and each would know half of what has changed.
    """
    poll = select.poll()
    poll.register(connection, 0)  # hanging up is always told
    return bool(poll.poll(0))


def fork() -> int | None:
    """The new process's number, 0 where there can be none; None in the new one."""
    try:
        return os.fork() or None
    except OSError as error:
        log.warning("process_not_forked", error=str(error))
        return 0


def collect(pid: int) -> int | None:
    """Exit status of a child as of Popen; None while it lives."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return UNKNOWN_STATUS
    return os.waitstatus_to_exitcode(status) if found else None


def _settle(fds: Sequence[int]) -> None:
    """In a new process: nothing of whom it was forked from, and the descriptors where it expects them."""
    os.setsid()
    urgency.take_own_group()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for index, fd in enumerate(fds):
        os.dup2(fd, FIRST_PASSED_FD + index, inheritable=False)
        os.close(fd)


def rename(module: str, *words: str) -> None:
    """Show this process in the list of processes as ``python -m module words``, for people and their scripts.

    What the kernel shows as the command line is memory of the process itself (proc_pid_cmdline(5)), whose place and size
    are fields 48 and 49 of proc_pid_stat(5): it can be written over, and not made longer.
    """
    shown = b"\0".join(map(os.fsencode, [*shown_command(module), *words]))
    try:
        fields = Path("/proc/self/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return
    start, end = int(fields[45]), int(fields[46])
    if 0 < start < end - len(shown):
        ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
