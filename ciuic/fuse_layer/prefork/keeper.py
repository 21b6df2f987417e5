"""The keeper: holds the sessions of mounted roots, so that any two of daemon, worker and keeper may be killed.

A FUSE mount lives for as long as a process has its connection open. Where systemd does not start the daemon,
this process holds the connections, beside the daemon and each worker: it is the process that forks workers
(service.py), in a session of its own, and outlives the daemon.

Guarantees:

* While a daemon is connected, this process starts nothing by itself: a worker that ends is the daemon's to
  replace.
* While none is, a worker that ends is followed within milliseconds by one forked here, with the arguments
  that the daemon left: the job goes on, with the same open files, and no snapshot is taken until a daemon
  comes and adopts that worker.
* Meanwhile, a worker that answers no three probes in a row is killed, as the daemon would do.
* A daemon that connects is answered when no successor is being started: it finds either a worker that serves
  or none.
* The keeper ends when no daemon is connected and nothing is held: a daemon that stops in order has released
  every session.
* A session that is over, or whose overlay was detached, or whose workers keep crashing, is released: files
  that are still open in it answer ENOTCONN instead of hanging.

Decided elsewhere: two workers never serve one session (succession.py); when to mount and unmount (the
daemon).
"""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from ciuic.fuse_layer.journal.succession import (
    PLAIN_AFTER_DEATHS,
    SERVED_ELSEWHERE,
    counted_deaths,
    pause_seconds,
)
from ciuic.fuse_layer.prefork import messages
from ciuic.fuse_layer.prefork.messages import ForkedChild
from ciuic.fuse_layer.prefork.service import Forker
from ciuic.fuse_layer.system import mounts
from ciuic.protocol.worker_client import peer_pid
from ciuic.protocol.worker_frames import send_frame
from ciuic.system.unix_sockets import connect

START_SECONDS: Final = 20.0
"""Time limit of a successor's start, after which it is killed. A daemon that connects waits a little longer
than this."""
_AGAIN_SECONDS: Final = 0.5
"""Pause before another attempt where no process or descriptor could be had."""
_ELSEWHERE_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before a session is looked at again whose claim is held by a worker that does not answer yet."""
_PROBE_SECONDS: Final = 5.0
"""Time in which a worker answers a probe, for which it needs no lock and no disk; and the pause between two probes."""
_CONNECT_SECONDS: Final = 1.0
"""Time for which a worker's queue of connections may be full."""
_SILENCES: Final = 3
"""Probes in a row without an answer, after which a worker counts as hung."""
log = structlog.get_logger(__name__)


def is_over(session_fd: int) -> bool:
    """Return whether the kernel has ended the session's connection."""
    # Asked when a worker has ended, and never waited for: the descriptor is readable at each request of the
    # job, so that a poll which waits would wake for every one of them.
    poll = select.poll()
    poll.register(session_fd, 0)
    return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


class _Kept:
    """A root's session and the worker that serves it."""

    def __init__(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        """Hold duplicates of ``fds``: session, backing directory and pidfd of the worker.

        Raises:
            LookupError, TypeError, ValueError: the request is of another version. Nothing is held then.
        """
        self.root = str(request["root"])
        self.control = Path(request["control"])
        self.arguments = [str(word) for word in request["arguments"]]
        """Arguments of a successor; its backing, ready and session descriptors have the numbers from
        FIRST_PASSED_FD on."""
        self.pid = int(request["pid"])
        session_fd, backing_fd, pidfd = fds
        # Duplicates, because the request's own descriptors are closed after the answer.
        self.session_fd, self.backing_fd = os.dup(session_fd), os.dup(backing_fd)
        self.pidfd: int | None = os.dup(pidfd)
        """Pidfd of the worker; None when it has ended."""
        self.ready_fd: int | None = None
        """Pipe that tells when a worker serves or has ended; None unless one is being started."""
        self.since = time.monotonic()
        """Time at which the worker began to serve, or to start (monotonic)."""
        self.deaths = 0
        """Deaths in a row (succession.counted_deaths)."""
        self.refused = 0
        """Number of successors that have found the session claimed by another worker."""
        self.due = 0.0
        """Time of the next attempt to find a successor, or of the next probe or its end (monotonic)."""
        self.probe: socket.socket | None = None
        """Connection on which the worker's answer to a probe is awaited."""
        self.silences = 0
        """Number of probes in a row without an answer."""

    @property
    def fds(self) -> list[int]:
        own = (self.session_fd, self.backing_fd, self.pidfd, self.ready_fd)
        return [fd for fd in own if fd is not None]


class Keeper(Forker):
    """Holder of sessions, and forker of workers.

    Single-threaded, because fork(2) copies the calling thread alone.
    """

    def __init__(self, listener: socket.socket, daemon: socket.socket) -> None:
        """Serve ``daemon``, the connection of the one that started this process, and those that connect to ``listener``."""
        super().__init__(listener, daemon)
        self._socket = listener
        # The daemon has called listen(2) before. SO_PEERCRED tells a client which process did so last: it
        # must be this one.
        listener.listen()
        self._kept: dict[str, _Kept] = {}
        self._listens = True

    def serve(self) -> ForkedChild | None:
        """Answer requests until no daemon is left and nothing is held; return in each process that is forked."""
        while self._connections or self._kept:
            # No daemon is accepted while a successor starts: it would find neither a worker that serves nor
            # none.
            self._listen(not any(kept.ready_fd is not None for kept in self._kept.values()))
            fd = self._next_ready(self._wait_ms())
            child = self._handle(fd) if fd is not None else None
            if child is None:
                child = self._guard()
            if child is not None:
                return child
        with suppress(OSError):
            os.unlink(self._socket.getsockname())
        self._let_go()
        return None

    # -- requests

    def _do(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[bool, list[int]]:
        what, root = request["do"], str(request.get("root", ""))
        if what == "keep":
            # Made before the old one is dropped: a request that is not understood leaves that as it is.
            new = _Kept(request, fds)
            self._drop(root)
            self._keep(new)
            return True, []
        if what == "take":
            kept = self._kept.get(root)
            return kept is not None, [kept.session_fd, kept.backing_fd] if kept is not None else []
        if what == "drop":
            self._drop(root)
            return True, []
        if what == "end":
            for name in list(self._kept):
                self._drop(name)
            return True, []
        return super()._do(request, fds)

    def _keep(self, kept: _Kept) -> None:
        self._kept[kept.root] = kept
        assert kept.pidfd is not None
        self._poll.register(kept.pidfd, select.POLLIN)

    def _drop(self, root: str) -> None:
        kept = self._kept.pop(root, None)
        if kept is None:
            return
        self._end_probe(kept)
        for fd in (kept.pidfd, kept.ready_fd):
            if fd is not None:
                self._poll.unregister(fd)
        for fd in kept.fds:
            os.close(fd)

    # -- events

    def _handle(self, fd: int) -> ForkedChild | None:
        for kept in self._kept.values():
            if fd == kept.ready_fd:
                self._started(kept)
                return None
            if fd == kept.pidfd:
                self._ended(kept)
                return None
            if kept.probe is not None and fd == kept.probe.fileno():
                self._end_probe(kept)
                kept.silences = 0
                return None
        return super()._handle(fd)

    def _started(self, kept: _Kept) -> None:
        """Note that the successor serves, or has ended before it could; its pidfd tells which."""
        assert kept.ready_fd is not None
        self._poll.unregister(kept.ready_fd)
        os.close(kept.ready_fd)
        kept.ready_fd = None
        kept.since = time.monotonic()

    def _ended(self, kept: _Kept) -> None:
        """Note the end of a worker, and when to look for its successor."""
        assert kept.pidfd is not None
        if kept.ready_fd is not None:
            self._started(kept)
        self._end_probe(kept)
        self._poll.unregister(kept.pidfd)
        os.close(kept.pidfd)
        kept.pidfd = None
        now, status = time.monotonic(), self._status(kept.pid)
        if status == SERVED_ELSEWHERE:
            kept.due = now + _ELSEWHERE_SECONDS[min(kept.refused, len(_ELSEWHERE_SECONDS) - 1)]
            kept.refused += 1
            return
        kept.deaths = counted_deaths(kept.deaths, status, now - kept.since)
        kept.due = now + (pause_seconds(kept.deaths) or 0.0)

    # -- while no daemon is connected

    def _guard(self) -> ForkedChild | None:
        """Start a successor where a worker has ended, unless a daemon is there to do it."""
        now = time.monotonic()
        for kept in list(self._kept.values()):
            if kept.ready_fd is not None and now - kept.since > START_SECONDS:
                self._kill(kept)
            if self._connections:
                self._end_probe(kept)
                kept.silences = 0
                continue
            if kept.ready_fd is not None or kept.due > now:
                continue
            try:
                if kept.pidfd is not None:
                    self._probe(kept, kept.pidfd, now)
                    continue
                child = self._go_on(kept)
            except OSError as error:
                # Out of descriptors. The session outlives that, and is looked at again.
                log.error("session_not_taken_over", root=kept.root, error=str(error))
                kept.due = now + _AGAIN_SECONDS
                continue
            if child is not None:
                return child
        return None

    def _probe(self, kept: _Kept, pidfd: int, now: float) -> None:
        """Begin a probe of a worker, or note that it has not answered one in time, and kill it after the last.

        Raises:
            OSError: there is no descriptor left.
        """
        kept.due = now + _PROBE_SECONDS
        if kept.probe is not None:
            self._end_probe(kept)
            kept.silences += 1
        # A worker whose overlay was detached may have left the socket to another one.
        if kept.silences >= _SILENCES and peer_pid(kept.control) == kept.pid:
            log.error("worker_hangs", root=kept.root, pid=kept.pid, silences=kept.silences)
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            return
        probe = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connect(probe, str(kept.control), _CONNECT_SECONDS)
            send_frame(probe, {"do": "alive"})
        except OSError as error:
            probe.close()
            # It has no socket where it is ending, and a full queue where it hangs.
            kept.silences += isinstance(error, TimeoutError)
            return
        kept.probe = probe
        self._poll.register(probe, select.POLLIN)

    def _end_probe(self, kept: _Kept) -> None:
        if kept.probe is not None:
            self._poll.unregister(kept.probe)
            kept.probe.close()
            kept.probe = None

    def _go_on(self, kept: _Kept) -> ForkedChild | None:
        """Adopt the worker that serves the session, start one, or release the session; return as `_start` does."""
        if is_over(kept.session_fd) or mounts.overlay_at(kept.root) is None:
            log.info("session_ended", root=kept.root)
            self._drop(kept.root)
            return None
        pid = peer_pid(kept.control)
        if pid is not None:
            # It was started by a daemon that was killed before it could tell the keeper.
            with suppress(ProcessLookupError):
                self._watch_worker(kept, pid)
            return None
        if pause_seconds(kept.deaths) is None:
            log.error("session_given_up", root=kept.root, deaths=kept.deaths)
            self._drop(kept.root)
            return None
        return self._start(kept)

    def _start(self, kept: _Kept) -> ForkedChild | None:
        """Fork a successor; return None, and in the new process its request."""
        # The successor writes to the pipe when it serves. Its end closes the pipe as well, so the reader is
        # woken in any case.
        reader, writer = os.pipe2(os.O_CLOEXEC)
        plain = ["--plain"] if kept.deaths >= PLAIN_AFTER_DEATHS else []
        pid = messages.fork()
        if pid is None:
            # The new process: nothing may fail before it returns, or it would go on as a second keeper.
            os.close(reader)
            del self._kept[kept.root]
            self._let_go()
            return ForkedChild([*kept.arguments, *plain], [kept.backing_fd, writer, kept.session_fd])
        os.close(writer)
        if not pid:
            # No memory or processes to spare.
            os.close(reader)
            kept.due = time.monotonic() + _AGAIN_SECONDS
            return None
        log.warning("successor_without_daemon", root=kept.root, pid=pid, deaths=kept.deaths)
        try:
            self._watch(pid)
            self._watch_worker(kept, pid)
        except OSError:
            os.close(reader)
            raise
        kept.ready_fd = reader
        self._poll.register(reader, select.POLLIN)
        return None

    def _watch_worker(self, kept: _Kept, pid: int) -> None:
        kept.pidfd = os.pidfd_open(pid)
        kept.pid, kept.since = pid, time.monotonic()
        self._poll.register(kept.pidfd, select.POLLIN)

    def _kill(self, kept: _Kept) -> None:
        """Kill a successor that does not come up; its end is an event like any other."""
        log.error("successor_not_ready", root=kept.root, pid=kept.pid)
        assert kept.pidfd is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(kept.pidfd, signal.SIGKILL)
        # Counted as started at once: one that cannot be killed (in a system call on a dead disk) must keep no
        # daemon waiting.
        self._started(kept)

    def _wait_ms(self) -> int | None:
        """Return the milliseconds until the next deadline; None when there is none."""
        now, moments = time.monotonic(), []
        for kept in self._kept.values():
            if kept.ready_fd is not None:
                moments.append(kept.since + START_SECONDS)
            elif not self._connections:
                moments.append(kept.due)
        return max(0, int((min(moments) - now) * 1000) + 1) if moments else None

    def _listen(self, wanted: bool) -> None:
        if wanted != self._listens:
            self._listens = wanted
            if wanted:
                self._poll.register(self._socket, select.POLLIN)
            else:
                self._poll.unregister(self._socket)

    def _let_go(self) -> None:
        super()._let_go()
        for kept in self._kept.values():
            for fd in kept.fds:
                os.close(fd)
        self._kept.clear()
