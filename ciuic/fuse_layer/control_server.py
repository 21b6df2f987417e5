"""The worker's end of the control channel, served by plain threads, never by the thread that serves FUSE.

Guarantees: one request at a time on a connection, several connections at once; a hold belongs to one
connection and ends with it, so that a daemon that dies cannot stop a job; a request that fails is answered
and never ends the worker. The core carries out what a request asks for.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import structlog

from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.system import mounts
from ciuic.fuse_layer.tracking.gate import HoldExpired
from ciuic.protocol.worker_frames import (
    MAX_REQUEST_BYTES,
    FrameError,
    Share,
    WatchedNames,
    receive_frame,
    send_frame,
)
from ciuic.structs import convert
from ciuic.system.unix_sockets import bind, credentials, socket_address

log = structlog.get_logger(__name__)

# Each connection is a thread and a descriptor of the process that serves the job.
_MAX_CONNECTIONS = 32
# No controller may stop the job for longer, whatever timeout it asks for.
_MAX_HOLD_SECONDS = 60.0
_LAST_ANSWER_SECONDS = 2.0
_ACCEPT_PAUSE_SECONDS = 0.1


class RequestRefused(Exception):
    """A request that is answered with this text and errno."""

    def __init__(self, text: str, errno_: int) -> None:
        super().__init__(text)
        self.errno = errno_


class ControlReply(NamedTuple):
    """Fields of a successful reply, and descriptors to send with it."""

    fields: Mapping[str, Any] = {}
    fds: tuple[int, ...] = ()
    given: tuple[int, ...] = ()
    """Descriptors to send with it that are this process's no more."""


class ControlServer:
    """Server of a worker's control socket: listens from construction on, answers from ``start`` on.

    Args:
        core: carries out the requests.
        socket_path: path of the socket (0600).
        backing_fd: descriptor that the request ``backing_fd`` hands out.
        on_stop: called with the grace in seconds, from a connection's thread; returns whether the mount is gone.
        on_stay: called by the request ``stay``, which takes a ``stop`` back that waits for somebody to leave.
        session_fd: descriptor that the request ``session_fd`` hands out; None where the session cannot be
            taken over.
        on_hand_over: called by the request ``hand_over``; None where it is refused.
        on_share: called by the request ``share``; None where it is refused.
        on_snapshots_directory: called by the request ``snapshots_directory`` with the number of a thread; None where it is refused.
        extra_status: the driver's fields of a status reply.
    """

    def __init__(
        self,
        core: OverlayCore,
        socket_path: str,
        *,
        backing_fd: int,
        on_stop: Callable[[float], bool],
        on_stay: Callable[[], None] = lambda: None,
        session_fd: int | None = None,
        on_hand_over: Callable[[], None] | None = None,
        on_share: Callable[[Share, int], None] | None = None,
        on_snapshots_directory: Callable[[int], None] | None = None,
        extra_status: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._core = core
        self._path = socket_path
        self._backing_fd = backing_fd
        self._on_stop = on_stop
        self._on_stay = on_stay
        self._session_fd = session_fd
        self._on_hand_over = on_hand_over
        self._on_share = on_share
        self._on_snapshots_directory = on_snapshots_directory
        self._extra_status = extra_status
        self._connections: set[_Connection] = set()
        self._closing = False
        with socket_address(socket_path) as address:
            self._listener = bind(address, socket.SOCK_STREAM, backlog=_MAX_CONNECTIONS)
        self._inode = _inode_of(socket_path)

    def start(self) -> None:
        """Answer requests from now on."""
        threading.Thread(target=self._accept, name="control-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, remove the socket, end every connection once what it asks for now is answered."""
        self._closing = True
        # A worker that ends late, after its last open handle, must not remove its successor's socket.
        if _inode_of(self._path) == self._inode:
            os.unlink(self._path)
        # shutdown wakes the accepting thread; close alone would leave it waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        # The daemon that asked for the end waits for its answer.
        for connection in list(self._connections):
            connection.hang_up()
            connection.thread.join(_LAST_ANSWER_SECONDS)

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError as error:
                if self._closing:
                    return
                # Out of descriptors or memory, which passes. A worker that stopped accepting could never be
                # cut again.
                log.error("control_accept_failed", error=str(error))
                time.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            # The socket's mode keeps others out already. It may have been changed by mistake.
            if credentials(sock).uid not in (0, os.geteuid()):
                log.warning("control_connection_of_another_user_refused")
                sock.close()
                continue
            if len(self._connections) >= _MAX_CONNECTIONS:
                log.warning("control_connection_refused", connections=len(self._connections))
                sock.close()
                continue
            connection = _Connection(self, sock)
            self._connections.add(connection)
            try:
                connection.thread.start()
            except RuntimeError as error:
                # The limit of threads. This caller is refused, the next one may be served.
                log.error("control_connection_refused", error=str(error))
                self._connections.discard(connection)
                sock.close()

    def forget(self, connection: _Connection) -> None:
        """Forget a connection that has ended, and release its hold."""
        self._connections.discard(connection)
        self._release(connection)

    def answer(
        self, connection: _Connection, request: Mapping[str, Any], fds: Sequence[int] = ()
    ) -> ControlReply:
        """Carry out one request.

        Args:
            connection: connection that it came on.
            request: its fields.
            fds: descriptors that came with it, which the caller closes.

        Raises:
            RequestRefused: the request is unknown or malformed.
            OSError: it could not be carried out.
        """
        match request.get("do"):
            case "status":
                return ControlReply({**self._core.status(), **self._extra_status()})
            case "alive":
                # Answered without a lock and without the disk: tells a worker that hangs from one that is
                # busy.
                return ControlReply()
            case "backing_fd":
                return ControlReply(fds=(self._backing_fd,))
            case "undo_fd":
                return ControlReply(fds=(self._core.undo_fd,))
            case "writers":
                return ControlReply({"paths": self._core.writers()})
            case "name_events":
                try:
                    wanted = convert(request, WatchedNames)
                except msgspec.ValidationError as error:
                    raise RequestRefused(str(error), errno.EINVAL) from error
                return ControlReply(self._core.name_events(wanted.rules, dirty=wanted.dirty))
            case "prepare":
                self._core.prepare_cut(min(_number(request, "timeout_ms") / 1000, _MAX_HOLD_SECONDS))
                return ControlReply()
            case "hold":
                self._hold(connection, _number(request, "timeout_ms") / 1000)
                return ControlReply()
            case "cut":
                return self._cut(connection)
            case "release":
                self._release(connection)
                return ControlReply()
            case "committed":
                self._core.committed(int(_number(request, "epoch")))
                return ControlReply()
            case "abort":
                self._core.abort(int(_number(request, "epoch")))
                return ControlReply()
            case "session_fd" if self._session_fd is not None:
                return ControlReply(fds=(self._session_fd,))
            case "hand_over" if self._on_hand_over is not None:
                self._on_hand_over()
                return ControlReply()
            case "share" if self._on_share is not None:
                self._share(self._on_share, request, fds)
                return ControlReply()
            case "snapshots_directory" if self._on_snapshots_directory is not None:
                fuse_fd = mounts.open_fuse()
                try:
                    self._on_snapshots_directory(int(_number(request, "thread")))
                except BaseException:
                    os.close(fuse_fd)
                    raise
                return ControlReply(given=(fuse_fd,))
            case "stop":
                return ControlReply({"unmounted": self._on_stop(_number(request, "grace_s"))})
            case "stay":
                self._on_stay()
                return ControlReply()
            case other:
                raise RequestRefused(f"unknown request {other!r}", errno.EOPNOTSUPP)

    def _share(
        self, on_share: Callable[[Share, int], None], request: Mapping[str, Any], fds: Sequence[int]
    ) -> None:
        if len(fds) != 1:
            raise RequestRefused(f"share must come with 1 descriptor, got {len(fds)}", errno.EINVAL)
        try:
            wanted = convert(request, Share)
        except msgspec.ValidationError as error:
            raise RequestRefused(str(error), errno.EINVAL) from error
        on_share(wanted, fds[0])

    def _hold(self, connection: _Connection, timeout_seconds: float) -> None:
        # A second hold of the same connection would wait for its own first one.
        self._release(connection)
        connection.hold = self._core.hold(min(timeout_seconds, _MAX_HOLD_SECONDS))

    def _cut(self, connection: _Connection) -> ControlReply:
        if connection.hold is None:
            cut = self._core.cut()
        else:
            cut = self._core.cut_held(connection.hold)
            connection.unsealed.append(cut.epoch)
        return ControlReply({"epoch": cut.epoch, "cut_ns": cut.cut_ns, "hold_us": cut.hold_us})

    def _release(self, connection: _Connection) -> None:
        if connection.hold is not None:
            token, connection.hold = connection.hold, None
            self._core.release_hold(token)
        # Sealing takes time in proportion to the changes: after the hold, and before the reply that says it
        # is over.
        while connection.unsealed:
            self._core.seal(connection.unsealed.pop(0))


class _Connection:
    def __init__(self, server: ControlServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self.thread = threading.Thread(target=self.serve, name="control", daemon=True)
        self.hold: int | None = None
        """Token of the hold that this connection made; None without one."""
        self.unsealed: list[int] = []
        """Epochs cut under the hold whose sealed files are still to be written."""

    def serve(self) -> None:
        """Answer requests until the peer closes the connection."""
        try:
            while True:
                fds: list[int] = []
                request = receive_frame(self._sock, MAX_REQUEST_BYTES, fds.append)
                if request is None:
                    return
                try:
                    self._answer(request, fds)
                finally:
                    for fd in fds:
                        os.close(fd)
        except (OSError, FrameError) as error:
            # The daemon was killed in the middle of a request, or another program wrote to the socket.
            log.info("control_connection_lost", error=str(error))
        finally:
            self._server.forget(self)
            self._sock.close()

    def _answer(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        try:
            reply = self._server.answer(self, request, fds)
        except (HoldExpired, TimeoutError) as error:
            # A cut after the deadline would not be of the same instant as those of other roots.
            send_frame(self._sock, {"ok": False, "error": str(error), "errno": errno.ETIMEDOUT})
        except (RequestRefused, OSError) as error:
            send_frame(self._sock, {"ok": False, "error": str(error), "errno": error.errno})
        except Exception as error:
            log.exception("control_request_failed", do=request.get("do"))
            send_frame(self._sock, {"ok": False, "error": f"{type(error).__name__}: {error}", "errno": None})
        else:
            try:
                send_frame(self._sock, {"ok": True, **reply.fields}, (*reply.fds, *reply.given))
            finally:
                for fd in reply.given:
                    os.close(fd)

    def hang_up(self) -> None:
        """Take no further request; the serving thread ends once it has sent the answer that it may be at."""
        # The peer may have closed the connection first.
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_RD)


def _number(request: Mapping[str, Any], field: str) -> float:
    value = request.get(field)
    # From 2**53 on a float does not name one integer: an epoch would become another.
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        raise RequestRefused(f"{field} must be a number from 0 on, got {value!r}", errno.EINVAL)
    return value


def _inode_of(path: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino
