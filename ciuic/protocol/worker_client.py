"""Client of the worker control channel, blocking and thread-safe; used by the daemon and by restores.

One client is one connection, made at the first call and again after a failure. A hold ends with the connection that it was
taken on: take, use and release it through the same client, and use another client for everything that must go on meanwhile.
"""

from __future__ import annotations

import errno
import os
import socket
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec

from ciuic.errors import CiuicError, Unreachable
from ciuic.protocol.worker_frames import (
    MAX_REPLY_BYTES,
    CutReply,
    FrameError,
    NameCounts,
    Share,
    WatchedNames,
    WorkerStatus,
    receive_frame,
    send_frame,
)
from ciuic.structs import convert
from ciuic.system.unix_sockets import connect, listener_of

DEFAULT_TIMEOUT_SECONDS = 30.0


class WorkerRefused(CiuicError):
    """The worker refused the request; ``errno`` is set where the worker gave one."""

    def __init__(self, message: str, errno_: int | None) -> None:
        super().__init__(message)
        self.errno = errno_


class WorkerUnreachable(Unreachable):
    """The worker did not answer. It is unknown whether the request was carried out."""


class WorkerControlClient:
    """Requests to one overlay worker. Every method blocks for ``timeout_seconds`` at most.

    Every method raises WorkerUnreachable when the worker does not answer, and WorkerRefused when it refuses.
    """

    def __init__(
        self, socket_path: str | os.PathLike[str], *, timeout_seconds: float = DEFAULT_TIMEOUT_SECONDS
    ):
        self.socket_path = os.fspath(socket_path)
        self.timeout_seconds = timeout_seconds
        # One request at a time: requests and replies have no numbers, only their order on the connection.
        self._lock = threading.Lock()
        # Guards the three below. Held for moments only and never while waiting for the worker, unlike `_lock`,
        # so that `close` returns at once.
        self._guard = threading.Lock()
        self._sock: socket.socket | None = None
        self._is_asking = False
        # Set by `close` during a request, whose thread then drops the connection.
        self._is_ended = False

    def __enter__(self) -> WorkerControlClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the connection, and with it a hold made on it. Never blocks.

        A request that is under way in another thread raises WorkerUnreachable there.
        """
        # The daemon calls this on its event loop, and the request of an abandoned thread may wait for 30 s.
        with self._guard:
            self._is_ended = True
            if not self._is_asking:
                self._drop()
            elif self._sock is not None:
                # Not close(2), which wakes no thread that waits for the socket, and frees a descriptor that
                # the thread goes on to use.
                with suppress(OSError):
                    self._sock.shutdown(socket.SHUT_RDWR)

    def status(self) -> WorkerStatus:
        """Return the worker's status."""
        return convert(self._ask("status"), WorkerStatus, strict=False)

    def alive(self) -> None:
        """Return if the worker answers, which it does without touching its disk."""
        # A worker of an older version refuses the request as unknown, and has answered by that.
        with suppress(WorkerRefused):
            self._ask("alive")

    def backing_fd(self) -> int:
        """Return a new descriptor of the backing directory, O_PATH and close-on-exec; the caller closes it."""
        return self._one_fd("backing_fd")

    def undo_fd(self) -> int:
        """Return a new descriptor of the directory that holds the undo log, for a capture; the caller closes it.

        Raises:
            WorkerRefused: the worker is of a version that does not hand it out.
        """
        return self._one_fd("undo_fd")

    def session_fd(self) -> int:
        """Return a new descriptor of the worker's connection with the kernel; the caller closes it.

        While any process has it open, the mount outlives the worker.

        Raises:
            WorkerRefused: no successor could continue the session.
        """
        return self._one_fd("session_fd")

    def snapshots_directory(self, thread: int) -> int:
        """Let a thread find the directory `.snapshots` of the root once, to mount on it; 0: nobody, and hide it from others.

        Returns:
            A new descriptor of /dev/fuse for that mount; the caller closes it. The worker opens it, because the daemon's service
            may open no device.

        Raises:
            WorkerRefused: with EOPNOTSUPP where the worker has no such directory.
        """
        return self._one_fd("snapshots_directory", thread=thread)

    def hand_over(self) -> None:
        """Make the worker leave its session to a successor and end. WorkerRefused where there can be no successor."""
        self._ask("hand_over")

    def _one_fd(self, do: str, **fields: Any) -> int:
        fds: list[int] = []
        self._ask(do, fds=fds, **fields)
        if not fds:
            raise WorkerRefused("the worker replied without a descriptor", None)
        # A reply has one descriptor; a second one would be a defect of the worker, and must not stay open
        # here.
        for extra in fds[1:]:
            os.close(extra)
        return fds[0]

    def writers(self) -> list[bytes]:
        """Return the paths, relative to the root, of the files that are open for writing."""
        return [bytes(path) for path in self._ask("writers")["paths"]]

    def name_events(self, wanted: WatchedNames) -> NameCounts:
        """Have what happens to names counted, and return the counts since the last call with the same rules."""
        reply = self._ask("name_events", **msgspec.to_builtins(wanted))
        return convert(reply, NameCounts, strict=False)

    def prepare(self, timeout_seconds: float) -> bool:
        """Prepare a hold: give passthrough writers up to ``timeout_seconds`` to finish, and start what a cut would wait for.

        Returns:
            False from a worker of an older version, which has no such writers.
        """
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
        # At least a millisecond: 0 would leave the operations in flight no time to end.
        self._ask("hold", timeout_ms=max(1, round(timeout_seconds * 1000)))

    def cut(self) -> CutReply:
        """End the epoch, within the hold of this connection if there is one.

        Raises:
            WorkerRefused: with ETIMEDOUT when the hold has run out. The cut is then not made, because it would not show the
                same instant as the cuts of other roots.
        """
        return convert(self._ask("cut"), CutReply, strict=False)

    def release(self) -> None:
        """End the hold of this connection; does nothing without one."""
        self._ask("release")

    def committed(self, epoch: int) -> None:
        """Report that the snapshot of ``epoch`` is durable: the worker may drop what it kept for it."""
        self._ask("committed", epoch=epoch)

    def abort(self, epoch: int) -> None:
        """Report that the capture of ``epoch`` gave up: its changes count as not yet captured."""
        self._ask("abort", epoch=epoch)

    def stop(self, grace_seconds: float) -> bool:
        """Unmount and end as soon as nobody is in the mount, or when ``grace_seconds`` are over.

        Returns:
            True if the mount is gone; the process ends later. False if somebody is in it, and it is served until then.
        """
        # A worker of an older version detaches the mount in every case.
        return bool(self._ask("stop", grace_s=grace_seconds).get("unmounted", True))

    def stay(self) -> None:
        """Serve on, although a ``stop`` waits for somebody to leave the mount. WorkerRefused where it is unmounted already."""
        try:
            self._ask("stay")
        except WorkerRefused as error:
            # A worker of an older version, which detaches at once and never waits.
            if error.errno != errno.EOPNOTSUPP:
                raise

    def share(self, wanted: Share, source_fd: int) -> None:
        """Give a range of a file the extents of ``source_fd``, which is open for reading; on return every reader sees them.

        Raises:
            WorkerRefused: with the errno of the reason.
        """
        self._ask("share", send=(source_fd,), **msgspec.structs.asdict(wanted))

    def _ask(
        self, do: str, *, send: Sequence[int] = (), fds: list[int] | None = None, **fields: Any
    ) -> dict[str, Any]:
        with self._lock:
            with self._guard:
                self._is_asking, self._is_ended = True, False
            keep = False
            try:
                sock = self._connected()
                send_frame(sock, {"do": do, **fields}, send)
                reply = receive_frame(sock, MAX_REPLY_BYTES, None if fds is None else fds.append)
                if reply is None:
                    raise FrameError("the connection was closed")
                keep = True
            except (OSError, FrameError) as error:
                raise WorkerUnreachable(
                    f"the overlay worker on {self.socket_path} does not answer: {error}",
                    hint="ask `ciuic status`; the daemon restarts a worker that died",
                ) from error
            finally:
                with self._guard:
                    self._is_asking = False
                    # After a failure a late reply could be taken for that of the next request: the connection
                    # is given up.
                    if self._is_ended or not keep:
                        self._drop()
        if not reply.get("ok"):
            raise WorkerRefused(str(reply.get("error", "refused")), reply.get("errno"))
        return reply

    def _connected(self) -> socket.socket:
        if self._sock is None:
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                connect(sock, self.socket_path, self.timeout_seconds)
                with self._guard:
                    # A connect(2) that waits for the worker's queue cannot be interrupted by `close`.
                    if self._is_ended:
                        raise ConnectionAbortedError(errno.ECONNABORTED, os.strerror(errno.ECONNABORTED))
                    self._sock = sock
            except BaseException:
                sock.close()
                raise
        return self._sock

    def _drop(self) -> None:
        """Close the socket. For holders of `_guard`."""
        if self._sock is not None:
            # close(2) may report an error of the peer; the descriptor is closed either way.
            with suppress(OSError):
                self._sock.close()
            self._sock = None


def peer_pid(socket_path: Path) -> int | None:
    """Return the pid of the process that listens on a Unix socket (SO_PEERCRED); None when none does."""
    try:
        found = listener_of(str(socket_path))
    except TimeoutError:
        return None
    return None if found is None else found.pid
