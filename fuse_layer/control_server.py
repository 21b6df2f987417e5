"""The worker's end of the control channel, served by plain threads, never by the thread that serves FUSE.

Guarantees: one request at a time on a connection, several connections at once; a hold belongs to one connection and
ends with it, so that a daemon that dies cannot stop a job; a request that fails is answered and never ends the worker.
What a hold, a cut or a commit does is the core's business.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec
import structlog

from ciuic.fuse_layer.control_frames import (
    MAX_REQUEST_BYTES,
    FrameError,
    Share,
    receive_frame,
    send_frame,
    socket_address,
)
from ciuic.fuse_layer.gate import HoldExpired

log = structlog.get_logger(__name__)

_CREDENTIALS = struct.Struct("@iII")  # struct ucred: pid, uid, gid
_MAX_CONNECTIONS = 32
_LONGEST_HOLD_SECONDS = 60.0
_LAST_ANSWER_SECONDS = 2.0
_ACCEPT_PAUSE_SECONDS = 0.1


class CutLike(Protocol):
    """What the core's ``cut`` returns."""

    @property
    def epoch(self) -> int: ...
    @property
    def cut_ns(self) -> int: ...
    @property
    def hold_us(self) -> int: ...


class Controllable(Protocol):
    """The control half of the overlay core."""

    @property
    def undo_fd(self) -> int: ...
    def status(self) -> Mapping[str, Any]: ...
    def writers(self) -> list[bytes]: ...
    def prepare_cut(self, timeout_seconds: float) -> None: ...
    def hold(self, timeout_seconds: float) -> int: ...
    def cut(self) -> CutLike: ...
    def cut_held(self, token: int) -> CutLike: ...
    def release_hold(self, token: int) -> None: ...
    def seal(self, epoch: int) -> None: ...
    def committed(self, epoch: int) -> None: ...
    def abort(self, epoch: int) -> None: ...


class Refused(Exception):
    """The request is answered with this text and errno."""

    def __init__(self, text: str, errno_: int) -> None:
        super().__init__(text)
        self.errno = errno_


class Reply(NamedTuple):
    """Fields of a reply that says ok, and descriptors to send with it."""

    fields: Mapping[str, Any] = {}
    fds: tuple[int, ...] = ()


class ControlServer:
    """Listens on ``socket_path`` (0600) from construction on; ``start`` begins to answer.

    ``backing_fd`` is what ``backing_fd`` hands out. ``extra_status`` adds the driver's fields to a status reply.
    ``on_stop`` is called with the grace in seconds, from a connection's thread, and returns when the mount is detached.
    """

    def __init__(
        self,
        core: Controllable,
        socket_path: str,
        *,
        backing_fd: int,
        on_stop: Callable[[float], None],
        session_fd: int | None = None,
        on_hand_over: Callable[[], None] | None = None,
        on_share: Callable[[Share, int], None] | None = None,
        extra_status: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._core = core
        self._path = socket_path
        self._backing_fd = backing_fd
        self._on_stop = on_stop
        self._session_fd = session_fd
        self._on_hand_over = on_hand_over
        self._on_share = on_share
        self._extra_status = extra_status
        self._connections: set[_Connection] = set()
        self._closing = False
        self._listener = _listen(socket_path)
        self._inode = _inode_of(socket_path)

    def start(self) -> None:
        """Answer from now on."""
        threading.Thread(target=self._accept, name="control-accept", daemon=True).start()

    def close(self) -> None:
        """Stop listening, remove the socket, end every connection once what it asks for now is answered."""
        self._closing = True
        # A worker that ends late, after its last open handle, must not take its successor's socket away.
        if _inode_of(self._path) == self._inode:
            os.unlink(self._path)
        # shutdown wakes the accepting thread; close alone would leave it waiting.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
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
                # Out of descriptors or memory: that passes, and a worker that went deaf for good could never be cut again.
                log.error("control_accept_failed", error=str(error))
                time.sleep(_ACCEPT_PAUSE_SECONDS)
                continue
            if not _is_ours(sock):
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
            except (
                RuntimeError
            ) as error:  # the limit of threads: this caller is turned away, the next may be served
                log.error("control_connection_refused", error=str(error))
                self._connections.discard(connection)
                sock.close()

    def forget(self, connection: _Connection) -> None:
        """A connection ended: with it its hold."""
        self._connections.discard(connection)
        self._release(connection)

    def answer(self, connection: _Connection, request: Mapping[str, Any], fds: Sequence[int] = ()) -> Reply:
        """Carry out one request; ``fds`` came with it and are the caller's to close. Refused or OSError when it cannot be."""
        match request.get("do"):
            case "status":
                return Reply({**self._core.status(), **self._extra_status()})
            case "alive":
                return Reply()  # needs no lock and no disk
            case "backing_fd":
                return Reply(fds=(self._backing_fd,))
            case "undo_fd":
                return Reply(fds=(self._core.undo_fd,))
            case "writers":
                return Reply({"paths": self._core.writers()})
            case "prepare":
                self._core.prepare_cut(min(_number(request, "timeout_ms") / 1000, _LONGEST_HOLD_SECONDS))
                return Reply()
            case "hold":
                self._hold(connection, _number(request, "timeout_ms") / 1000)
                return Reply()
            case "cut":
                return self._cut(connection)
            case "release":
                self._release(connection)
                return Reply()
            case "committed":
                self._core.committed(int(_number(request, "epoch")))
                return Reply()
            case "abort":
                self._core.abort(int(_number(request, "epoch")))
                return Reply()
            case "session_fd" if self._session_fd is not None:
                return Reply(fds=(self._session_fd,))
            case "hand_over" if self._on_hand_over is not None:
                self._on_hand_over()
                return Reply()
            case "share" if self._on_share is not None:
                self._share(self._on_share, request, fds)
                return Reply()
            case "stop":
                self._on_stop(_number(request, "grace_s"))
                return Reply()
            case other:
                raise Refused(f"unknown request {other!r}", errno.EOPNOTSUPP)

    def _share(
        self, on_share: Callable[[Share, int], None], request: Mapping[str, Any], fds: Sequence[int]
    ) -> None:
        if len(fds) != 1:
            raise Refused(f"one descriptor is wanted, not {len(fds)}", errno.EINVAL)
        try:
            wanted = msgspec.convert(request, Share)
        except msgspec.ValidationError as error:
            raise Refused(str(error), errno.EINVAL) from error
        on_share(wanted, fds[0])

    def _hold(self, connection: _Connection, timeout_seconds: float) -> None:
        self._release(connection)
        connection.hold = self._core.hold(min(timeout_seconds, _LONGEST_HOLD_SECONDS))

    def _cut(self, connection: _Connection) -> Reply:
        if connection.hold is None:
            cut = self._core.cut()
        else:
            cut = self._core.cut_held(connection.hold)
            connection.unsealed.append(cut.epoch)
        return Reply({"epoch": cut.epoch, "cut_ns": cut.cut_ns, "hold_us": cut.hold_us})

    def _release(self, connection: _Connection) -> None:
        if connection.hold is not None:
            token, connection.hold = connection.hold, None
            self._core.release_hold(token)
        # Writing what changed takes as long as much has changed: after the hold, and before the reply that it is over.
        while connection.unsealed:
            self._core.seal(connection.unsealed.pop(0))


class _Connection:
    def __init__(self, server: ControlServer, sock: socket.socket) -> None:
        self._server = server
        self._sock = sock
        self.thread = threading.Thread(target=self.serve, name="control", daemon=True)
        self.hold: int | None = None
        """Token of the hold that this connection made, None without one."""
        self.unsealed: list[int] = []
        """Epochs cut under it whose sealed file is still to be written."""

    def serve(self) -> None:
        """Answer until the peer goes away."""
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
            # The daemon was killed in the middle of a request, or something else spoke to the socket.
            log.info("control_connection_lost", error=str(error))
        finally:
            self._server.forget(self)
            self._sock.close()

    def _answer(self, request: Mapping[str, Any], fds: Sequence[int]) -> None:
        try:
            reply = self._server.answer(self, request, fds)
        except (HoldExpired, TimeoutError) as error:
            send_frame(self._sock, {"ok": False, "error": str(error), "errno": errno.ETIMEDOUT})
        except (Refused, OSError) as error:
            send_frame(self._sock, {"ok": False, "error": str(error), "errno": error.errno})
        except Exception as error:
            log.exception("control_request_failed", do=request.get("do"))
            send_frame(self._sock, {"ok": False, "error": f"{type(error).__name__}: {error}", "errno": None})
        else:
            send_frame(self._sock, {"ok": True, **reply.fields}, reply.fds)

    def hang_up(self) -> None:
        """No further request: the serving thread ends once it has sent the answer that it may be at."""
        with contextlib.suppress(OSError):  # the peer may have gone first
            self._sock.shutdown(socket.SHUT_RD)


def _number(request: Mapping[str, Any], field: str) -> float:
    value = request.get(field)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < 2**53:
        raise Refused(f"{field}: a number is wanted, not {value!r}", errno.EINVAL)
    return value


def _is_ours(sock: socket.socket) -> bool:
    """Whether root or our own user connected. The socket's mode says the same; modes can be changed by mistake."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return uid in (0, os.geteuid())


def _inode_of(path: str) -> tuple[int, int] | None:
    try:
        facts = os.stat(path)
    except FileNotFoundError:
        return None
    return facts.st_dev, facts.st_ino


def _listen(path: str) -> socket.socket:
    """A listening socket at ``path``, 0600, in place of whatever socket a dead worker left there."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path)
        with socket_address(path) as address:
            # fchmod before bind sets the mode the name gets: no moment at which others may connect.
            os.fchmod(listener.fileno(), 0o600)
            listener.bind(address)
        listener.listen(_MAX_CONNECTIONS)
    except BaseException:
        listener.close()
        raise
    return listener
