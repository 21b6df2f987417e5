"""A process that has imported everything that a worker needs, and forks one whenever it is asked to.

When a worker dies the job waits for its successor, and most of that wait would be the start of an interpreter (0.2 s of
processor time, more on a busy host). So one process is kept ready for whichever root needs it: a fork takes milliseconds,
also of the second worker within a second.

    python -m ciuic.fuse_layer.standby        (standard input: a socket on which requests and descriptors come)

Guarantees: it ends when whoever started it goes away; its workers do not. Each is its child, so it is asked how they ended.
Requests (JSON, one a packet): a list of arguments with the descriptors → the worker's process number, 0 where none can be
forked; a process number → its exit status as of Popen, null while it lives.
"""

from __future__ import annotations

import gc
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
from pathlib import Path
from typing import Final

import structlog

FIRST_PASSED_FD: Final = 100
"""The descriptors that come get the numbers from here on."""
_MESSAGE_BYTES: Final = 65536
_MAX_FDS: Final = 8
_ANSWER_SECONDS: Final = 10.0
"""So long it may take to import everything, on a busy host."""
_POLL_SECONDS: Final = 0.005
_UNKNOWN_STATUS: Final = 255
log = structlog.get_logger(__name__)


class ForkedWorker:
    """A child of the standby process; to be used as a Popen."""

    def __init__(self, standby: SpareProcess, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._standby = standby
        self._pidfd = os.pidfd_open(pid)

    def __del__(self) -> None:
        if hasattr(self, "_pidfd"):
            os.close(self._pidfd)

    def poll(self) -> int | None:
        """Its exit status, negative for a signal; None while it lives."""
        if self.returncode is None and select.select([self._pidfd], [], [], 0)[0]:
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
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)


class SpareProcess:
    """The starting side. Thread-safe."""

    def __init__(self, cwd: Path, environment: Mapping[str, str]) -> None:
        self._cwd = cwd
        self._environment = dict(environment)
        self._lock = threading.Lock()
        self._child: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def prepare(self) -> None:
        """Start it, unless there is one. Without memory or processes to spare there is none: no error."""
        with self._lock:
            if self._socket is not None and self._child is not None and self._child.poll() is None:
                return
            self._let_go()
            ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            ours.settimeout(_ANSWER_SECONDS)
            try:
                self._child = subprocess.Popen(
                    [sys.executable, "-m", "ciuic.fuse_layer.standby"],
                    stdin=theirs.fileno(),
                    stdout=subprocess.DEVNULL,
                    start_new_session=True,
                    cwd=self._cwd,
                    env=self._environment,
                )
                self._socket = ours
            except OSError as error:
                ours.close()
                log.warning("no_spare_worker", error=str(error))
            finally:
                theirs.close()

    def become(self, arguments: Sequence[str], fds: Sequence[int]) -> ForkedWorker | None:
        """A worker with these arguments, in which descriptor number ``fds[i]`` is FIRST_PASSED_FD + i. None when there is
        nobody who could fork it. Waits for one that is still starting."""
        pid = self._ask(list(arguments), fds)
        if not pid:
            return None
        try:
            return ForkedWorker(self, pid)
        except ProcessLookupError:  # it has ended, and who forked it as well
            return None

    def status_of(self, pid: int) -> int:
        """How a worker that has ended did so."""
        deadline = time.monotonic() + _ANSWER_SECONDS
        while (status := self._ask(pid)) is None and self._socket is not None and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)  # its end is seen a moment before its parent may collect it
        return _UNKNOWN_STATUS if status is None else status

    def _ask(self, what: list[str] | int, fds: Sequence[int] = ()) -> int | None:
        with self._lock:
            if self._socket is None:
                return None
            try:
                socket.send_fds(self._socket, [json.dumps(what).encode()], list(fds))
                answer = self._socket.recv(_MESSAGE_BYTES)
            except OSError as error:  # ended, or hangs: another one is started when it is needed again
                log.warning("spare_worker_lost", error=str(error))
                answer = b""
            if not answer:
                self._socket.close()
                self._socket = None
                return None
            status: int | None = json.loads(answer)
            return status

    def close(self) -> None:
        """It ends; its workers do not."""
        with self._lock:
            self._let_go()

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


def main() -> int:
    """Fork workers until nobody asks any more; in a worker, its exit status."""
    # Imported here, so that whoever only starts this does not import a worker.
    from ciuic.fuse_layer import worker

    gc.collect()
    gc.freeze()  # what all workers share is not written to by their collectors
    arguments = _serve()
    return 0 if arguments is None else worker.main(arguments)


def _serve() -> list[str] | None:
    """None at the end; returns in each worker as well, with its arguments."""
    with socket.socket(fileno=os.dup(0)) as come:
        while True:
            message, fds, _, _ = socket.recv_fds(come, _MESSAGE_BYTES, _MAX_FDS)
            if not message:
                return None
            asked = json.loads(message)
            answer: int | None
            if isinstance(asked, int):
                answer = _status(asked)
            else:
                answer = _forked()
                if answer is None:
                    break
                for fd in fds:  # of a session: it would not end while we held it
                    os.close(fd)
            come.send(json.dumps(answer).encode())
    _settle(fds)
    return list(asked)


def _forked() -> int | None:
    """The worker's process number, 0 where there can be none; None in the worker."""
    try:
        return os.fork() or None
    except OSError as error:
        log.warning("worker_not_forked", error=str(error))
        return 0


def _status(pid: int) -> int | None:
    """Of a child."""
    try:
        found, status = os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return _UNKNOWN_STATUS
    return os.waitstatus_to_exitcode(status) if found else None


def _settle(fds: Sequence[int]) -> None:
    """In a new worker: nothing of whom it was forked from, and the descriptors where it expects them."""
    os.setsid()
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    for index, fd in enumerate(fds):
        os.dup2(fd, FIRST_PASSED_FD + index, inheritable=False)
        os.close(fd)


if __name__ == "__main__":
    sys.exit(main())
