"""The keeper: holds the sessions of mounted roots, so that any two of daemon, worker and keeper may be killed.

A FUSE mount lives for as long as anybody has its connection open. Where systemd does not start the daemon, this process
holds the connections, beside the daemon and each worker: it is the process that forks workers (standby_service.py), in a
session of its own, and outlives the daemon.

Guarantees:

* While a daemon is connected, this process starts nothing by itself: a worker that ends is the daemon's to replace.
* While none is, a worker that ends is followed within milliseconds by one forked here, with the arguments that the daemon
  left: the job goes on, with the same open files, and no snapshot is taken until a daemon comes and adopts that worker.
* A daemon that connects is answered when no successor is being started: it finds either a worker that serves or none.
* It ends when no daemon is connected and nothing is held: a daemon that stops in order has let go of every session.
* A session that is over, or whose overlay was taken off, or whose workers keep crashing, is let go of: what is still open in
  it answers ENOTCONN instead of hanging.

Leaves to others: that two workers never serve one session (session_claim.py); when to mount and unmount (the daemon).
"""

from __future__ import annotations

import os
import secrets
import select
import signal
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import structlog

from ciuic.fuse_layer import mounts, standby
from ciuic.fuse_layer.control_client import peer_pid
from ciuic.fuse_layer.standby_service import Child, Forker
from ciuic.fuse_layer.succession import (
    PLAIN_AFTER_DEATHS,
    SERVED_ELSEWHERE,
    counted_deaths,
    pause_seconds,
)

START_SECONDS: Final = 20.0
"""A successor that is not ready by then is killed. A daemon that connects waits for that, and a little longer than this."""
_AGAIN_SECONDS: Final = 0.5
"""Pause before another attempt where no process or descriptor was to be had."""
_ELSEWHERE_SECONDS: Final = (0.5, 1.0, 2.0, 5.0, 10.0)
"""Pauses before another look at a session that is claimed by a worker which does not answer yet."""
log = structlog.get_logger(__name__)


def listen_for_daemons(directory: Path) -> socket.socket:
    """Return a listening socket of a new name in ``directory``, for the daemon that comes after this one.

    Raises:
        OSError: there is no room for it, or no descriptor.
    """
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        os.fchmod(listener.fileno(), 0o600)  # bind(2) gives the name this mode from its first moment
        listener.bind(str(directory / f"{standby.KEEPER_PREFIX}{secrets.token_hex(4)}.sock"))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def is_over(session_fd: int) -> bool:
    """Return whether the kernel has ended the session's connection.

    Asked where a worker has ended, and not waited for: a poll that waits would wake at each request of the job.
    """
    poll = select.poll()
    poll.register(session_fd, 0)
    return any(events & (select.POLLERR | select.POLLNVAL) for _, events in poll.poll(0))


class _Kept:
    """One root's session and the worker that serves it."""

    def __init__(self, request: dict[str, Any], fds: Sequence[int]) -> None:
        """``fds``: session, backing directory and pidfd, which stay the caller's. Raises LookupError, TypeError or ValueError for a
        request of another version, and holds nothing then."""
        self.root = str(request["root"])
        self.control = Path(request["control"])
        self.arguments = [str(word) for word in request["arguments"]]
        """Arguments of a successor, whose backing, ready and session descriptors follow in this order from FIRST_PASSED_FD on."""
        self.pid = int(request["pid"])
        session_fd, backing_fd, pidfd = fds
        self.session_fd, self.backing_fd = os.dup(session_fd), os.dup(backing_fd)
        self.pidfd: int | None = os.dup(pidfd)
        """Pidfd of the worker; None when it has ended."""
        self.ready_fd: int | None = None
        """Pipe of a worker that is being started."""
        self.since = time.monotonic()
        """When the worker began to serve, or to start."""
        self.deaths = 0
        """Deaths in a row (succession.counted_deaths)."""
        self.refused = 0
        """Number of successors that have found the session claimed by another worker."""
        self.due = 0.0
        """When to look for a successor (monotonic)."""

    @property
    def fds(self) -> list[int]:
        own = (self.session_fd, self.backing_fd, self.pidfd, self.ready_fd)
        return [fd for fd in own if fd is not None]


class Keeper(Forker):
    """Holds sessions and forks workers. Single-threaded: a fork copies one thread alone."""

    def __init__(self, listener: socket.socket, daemon: socket.socket) -> None:
        """``listener``: where the next daemon connects; ``daemon``: connection of the one that started this process."""
        super().__init__(listener)
        listener.listen()  # again: the kernel tells those who connect the number of the process that did so last
        self._kept: dict[str, _Kept] = {}
        self._listens = True
        self._connected(daemon)

    def serve(self) -> Child | None:
        """Answer until no daemon is left and nothing is held; return in each process that is forked."""
        while self._connections or self._kept:
            self._listen(not any(kept.ready_fd is not None for kept in self._kept.values()))
            fd = self._next_ready(self._wait_ms())
            child = self._handle(fd) if fd is not None else None
            if child is None:
                child = self._guard()
            if child is not None:
                return child
        with suppress(OSError):
            os.unlink(self._listener.getsockname())
        self._let_go()
        return None

    # -- requests

    def _do(self, request: dict[str, Any], fds: Sequence[int]) -> tuple[bool, list[int]]:
        what, root = request["do"], str(request.get("root", ""))
        if what == "keep":
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
        for fd in (kept.pidfd, kept.ready_fd):
            if fd is not None:
                self._poll.unregister(fd)
        for fd in kept.fds:
            os.close(fd)

    # -- events

    def _handle(self, fd: int) -> Child | None:
        for kept in self._kept.values():
            if fd == kept.ready_fd:
                self._started(kept)
                return None
            if fd == kept.pidfd:
                self._ended(kept)
                return None
        return super()._handle(fd)

    def _started(self, kept: _Kept) -> None:
        """The successor serves, or has ended before it could: its pidfd says which."""
        assert kept.ready_fd is not None
        self._poll.unregister(kept.ready_fd)
        os.close(kept.ready_fd)
        kept.ready_fd = None
        kept.since = time.monotonic()

    def _ended(self, kept: _Kept) -> None:
        assert kept.pidfd is not None
        if kept.ready_fd is not None:
            self._started(kept)
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

    def _guard(self) -> Child | None:
        """Start a successor where a worker has ended, unless a daemon is there to do it."""
        now = time.monotonic()
        for kept in list(self._kept.values()):
            if kept.ready_fd is not None and now - kept.since > START_SECONDS:
                self._kill(kept)
            if self._connections or kept.pidfd is not None or kept.due > now:
                continue
            try:
                child = self._go_on(kept)
            except OSError as error:  # out of descriptors: the session outlives that, and is looked at again
                log.error("session_not_taken_over", root=kept.root, error=str(error))
                kept.due = now + _AGAIN_SECONDS
                continue
            if child is not None:
                return child
        return None

    def _go_on(self, kept: _Kept) -> Child | None:
        """Adopt the worker that serves the session, start one, or let go of the session. None but in a new process."""
        if is_over(kept.session_fd) or mounts.overlay_at(kept.root) is None:
            log.info("session_ended", root=kept.root)
            self._drop(kept.root)
            return None
        pid = peer_pid(kept.control)
        if pid is not None:  # started by a daemon that was killed before it could say so
            with suppress(ProcessLookupError):
                self._watch_worker(kept, pid)
            return None
        if pause_seconds(kept.deaths) is None:
            log.error("session_given_up", root=kept.root, deaths=kept.deaths)
            self._drop(kept.root)
            return None
        return self._start(kept)

    def _start(self, kept: _Kept) -> Child | None:
        reader, writer = os.pipe2(os.O_CLOEXEC)
        plain = ["--plain"] if kept.deaths >= PLAIN_AFTER_DEATHS else []
        pid = standby.fork()
        if pid is None:  # nothing here may fail: what goes on must not take itself for the keeper
            os.close(reader)
            del self._kept[kept.root]
            self._let_go()
            return Child([*kept.arguments, *plain], [kept.backing_fd, writer, kept.session_fd])
        os.close(writer)
        if not pid:  # no memory or processes to spare
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
        """End a successor that does not come up; its end is an event like any other."""
        log.error("successor_not_ready", root=kept.root, pid=kept.pid)
        assert kept.pidfd is not None
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(kept.pidfd, signal.SIGKILL)
        self._started(kept)  # one that cannot be killed keeps no daemon waiting

    def _wait_ms(self) -> int | None:
        """Return the milliseconds until the next deadline, which no descriptor tells of; None when there is none."""
        now, moments = time.monotonic(), []
        for kept in self._kept.values():
            if kept.ready_fd is not None:
                moments.append(kept.since + START_SECONDS)
            elif kept.pidfd is None and not self._connections:
                moments.append(kept.due)
        return max(0, int((min(moments) - now) * 1000) + 1) if moments else None

    def _listen(self, wanted: bool) -> None:
        if wanted != self._listens:
            self._listens = wanted
            if wanted:
                self._poll.register(self._listener, select.POLLIN)
            else:
                self._poll.unregister(self._listener)

    def _let_go(self) -> None:
        super()._let_go()
        for kept in self._kept.values():
            for fd in kept.fds:
                os.close(fd)
        self._kept.clear()
