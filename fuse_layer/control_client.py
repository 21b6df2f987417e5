"""The daemon's end of the worker control channel: blocking, thread-safe, small.

One client is one connection, made at the first call and again after a failure. A hold lives and dies with the
connection it was made on: take, use and release it through the same client, and use another client for everything
that must go on meanwhile.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ciuic.errors import CiuicError, Unreachable
from ciuic.fuse_layer.control_frames import (
    MAX_REPLY_BYTES,
    CutReply,
    FrameError,
    Share,
    WorkerStatus,
    connect,
    receive_frame,
    send_frame,
)

DEFAULT_TIMEOUT_SECONDS = 30.0


class WorkerRefused(CiuicError):
    """The worker answered, and said no; ``errno`` where it gave one."""

    def __init__(self, message: str, errno_: int | None) -> None:
        super().__init__(message)
        self.errno = errno_


class WorkerUnreachable(Unreachable):
    """No worker answers on its socket. Whether the request was carried out is unknown."""


class ControlClient:
    """Requests to one overlay worker. Every method blocks for ``timeout_seconds`` at most.

    Raises WorkerUnreachable when the worker does not answer and WorkerRefused when it says no.
    """

    def __init__(
        self, socket_path: str | os.PathLike[str], *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ):
        self.socket_path = os.fspath(socket_path)
        self.timeout_seconds = timeout_seconds
        self._lock = threading.Lock()
        self._sock: socket.socket | None = None

    def __enter__(self) -> ControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it a hold made on it."""
        with self._lock:
            self._drop()

    def status(self) -> WorkerStatus:
        """What the worker says about itself."""
        return msgspec.convert(self._ask("status"), WorkerStatus, strict=False)

    def alive(self) -> None:
        """The worker answers, whatever its disk does. One of an older version says that it does not know the question."""
        with suppress(WorkerRefused):
            self._ask("alive")

    def backing_fd(self) -> int:
        """A new descriptor of the backing directory, O_PATH and close-on-exec; the caller closes it."""
        return self._one_fd("backing_fd")

    def undo_fd(self) -> int:
        """Return a new descriptor of the directory that holds the undo log, for a capture; the caller closes it.

        Raises:
            WorkerRefused: the worker is of a version that does not hand it out.
        """
        return self._one_fd("undo_fd")

    def session_fd(self) -> int:
        """A new descriptor of the worker's connection with the kernel: while anybody has it open, the mount outlives the
        worker. WorkerRefused where no successor could go on with it."""
        return self._one_fd("session_fd")

    def hand_over(self) -> None:
        """The worker leaves its session to a successor and ends. WorkerRefused where there can be none."""
        self._ask("hand_over")

    def _one_fd(self, do: str) -> int:
        fds: list[int] = []
        self._ask(do, fds=fds)
        if not fds:
            raise WorkerRefused("the worker sent no descriptor", None)
        for extra in fds[1:]:
            os.close(extra)
        return fds[0]

    def writers(self) -> list[bytes]:
        """Paths, relative to the root, of the files that are open for writing."""
        return [bytes(path) for path in self._ask("writers")["paths"]]

    def prepare(self, timeout_seconds: float) -> bool:
        """Before a hold: give those who write past the overlay up to ``timeout_seconds`` to finish, and start what a cut
        would wait for. False from an older worker, which knows no such writers."""
        try:
            self._ask("prepare", timeout_ms=max(1, round(timeout_seconds * 1000)))
        except WorkerRefused as error:
            if error.errno != errno.EOPNOTSUPP:
                raise
            return False
        return True

    def hold(self, timeout_seconds: float) -> None:
        """Stop every changing operation; on return none is in flight.

        Ends with ``release``, with this connection, or after ``timeout_seconds``.
        """
        self._ask("hold", timeout_ms=max(1, round(timeout_seconds * 1000)))

    def cut(self) -> CutReply:
        """End the epoch, within the hold of this connection if there is one.

        WorkerRefused with ETIMEDOUT when that hold has run out: the cut is then not made, because it would no longer be
        one instant with the cuts of other roots.
        """
        return msgspec.convert(self._ask("cut"), CutReply, strict=False)

    def release(self) -> None:
        """End the hold of this connection; nothing happens without one."""
        self._ask("release")

    def committed(self, epoch: int) -> None:
        """A snapshot of ``epoch`` is durable: the worker may drop what it kept for it."""
        self._ask("committed", epoch=epoch)

    def abort(self, epoch: int) -> None:
        """Capture of ``epoch`` gave up: its changes count as not yet captured."""
        self._ask("abort", epoch=epoch)

    def stop(self, grace_seconds: float) -> None:
        """Detach the mount and end, once open handles have closed or ``grace_seconds`` are over.

        Returns when the mount is detached; the process ends later.
        """
        self._ask("stop", grace_s=grace_seconds)

    def share(self, wanted: Share, source_fd: int) -> None:
        """The range has the extents of ``source_fd``, open for reading, on return, and everybody sees that. WorkerRefused with
        the errno of what stands against it."""
        self._ask("share", send=(source_fd,), **msgspec.structs.asdict(wanted))

    def _ask(
        self, do: str, *, send: Sequence[int] = (), fds: list[int] | None = None, **fields: Any
    ) -> dict[str, Any]:
        with self._lock:
            try:
                sock = self._connected()
                send_frame(sock, {"do": do, **fields}, send)
                reply = receive_frame(sock, MAX_REPLY_BYTES, None if fds is None else fds.append)
                if reply is None:
                    raise FrameError("the worker closed the connection")
            except (OSError, FrameError) as error:
                self._drop()
                raise WorkerUnreachable(
                    f"the overlay worker on {self.socket_path} does not answer: {error}",
                    hint="ask `ciuic status`; the daemon restarts a worker that died",
                ) from error
        if not reply.get("ok"):
            raise WorkerRefused(str(reply.get("error", "refused")), reply.get("errno"))
        return reply

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connect(sock, self.socket_path, self.timeout_seconds)
            except BaseException:
                sock.close()
                raise
            self._sock = sock
        return self._sock

    def _drop(self) -> None:
        if self._sock is not None:
            with suppress(OSError):  # the peer may be gone already; the descriptor is closed either way
                self._sock.close()
            self._sock = None


def is_timeout(error: WorkerRefused) -> bool:
    """Whether a refused ``cut`` came after its hold had run out."""
    return error.errno == errno.ETIMEDOUT


def peer_pid(socket_path: Path) -> int | None:
    """Number of the process that listens on a unix socket (SO_PEERCRED); None when none does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            connect(probe, str(socket_path), 2.0)
        except (ConnectionRefusedError, FileNotFoundError):
            return None
        except TimeoutError:
            return None
        credentials = probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    pid, _, _ = struct.unpack("3i", credentials)
    return int(pid)
