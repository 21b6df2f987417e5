"""An overlay worker that serves its mount by the portable driver: libfuse, pyfuse3 and trio.

libfuse (3.14) and pyfuse3 (3.5) decide alone how they answer the kernel's first request, FUSE_INIT. Their reply
passes through here once, over a socket, before libfuse is given the real connection. Only these fields are changed
(include/uapi/linux/fuse.h):

* FUSE_HANDLE_KILLPRIV → FUSE_HANDLE_KILLPRIV_V2, where the kernel offers it (5.11). Without the latter it
  asks for the attribute ``security.capability`` before every single write(2) into its cache: measured, 4 KiB
  writes at 22,000/s.
* FUSE_ATOMIC_O_TRUNC is taken out: after an open with O_TRUNC the kernel empties the file once more by itself,
  and with its write cache it keeps that size, although another write was carried out in between.
* FUSE_CACHE_SYMLINKS: the target of a link never changes.
* max_background: twelve requests of readahead and writeback in flight are too few when an undo log makes some
  slow.

Guarantees: a flag that the kernel did not offer is never set; nothing but the fields named here differs.
"""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import socket
import struct
import sys
import time
from collections.abc import Mapping
from typing import Any

import pyfuse3
import structlog
import trio

import ciuic
from ciuic.fuse_layer.control_server import ControlServer
from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.pyfuse3_driver import Pyfuse3Driver
from ciuic.fuse_layer.system import mounts
from ciuic.fuse_layer.worker_lifecycle import (
    SIGNAL_GRACE_SECONDS,
    STOP_SIGNALS,
    Departure,
    WorkerContext,
    detach_own,
)
from ciuic.system.io_throttle import WAITS_SUFFIX

_READ_BYTES = 1 << 16
"""The kernel refuses reads into less than FUSE_MIN_READ_BUFFER (8 KiB)."""
_HANDSHAKE_SECONDS = 30

_IN_HEADER_BYTES = 40
_OPCODE = struct.Struct("<4xI")
_FUSE_INIT = 26
_IN_FLAGS = struct.Struct("<12xI")
_OUT_HEADER = struct.Struct("<IiQ")
# struct fuse_init_out: u32 major, minor, max_readahead, flags, then u16 max_background, congestion_threshold.
_OUT_FLAGS_AT = _OUT_HEADER.size + 12
_OUT_BACKGROUND_AT = _OUT_HEADER.size + 16
_OUT_MIN_BYTES = _OUT_HEADER.size + 24

_ATOMIC_O_TRUNC = 1 << 3
_HANDLE_KILLPRIV = 1 << 19
_CACHE_SYMLINKS = 1 << 23
_HANDLE_KILLPRIV_V2 = 1 << 28
_MAX_BACKGROUND, _CONGESTION_THRESHOLD = 64, 48


class HandshakeFailed(Exception):
    """Kernel and libfuse did not agree; the mount does not work."""


def completed_reply(request: bytes, reply: bytes) -> bytes:
    """Return libfuse's reply to the kernel's INIT request with the module's changes; request and replies have their headers."""
    _, error, _ = _OUT_HEADER.unpack_from(reply)
    if error or len(reply) < _OUT_MIN_BYTES:
        raise HandshakeFailed(f"libfuse answered FUSE_INIT with error {-error}, {len(reply)} bytes")
    (offered,) = _IN_FLAGS.unpack_from(request, _IN_HEADER_BYTES)
    (flags,) = struct.unpack_from("<I", reply, _OUT_FLAGS_AT)
    # Measured on a loaded machine: 4 KiB writes at 87 MB/s became 259, 64 KiB writes at 213 MB/s became 797.
    if offered & _HANDLE_KILLPRIV_V2:
        flags = flags & ~_HANDLE_KILLPRIV | _HANDLE_KILLPRIV_V2
    flags = flags & ~_ATOMIC_O_TRUNC | offered & _CACHE_SYMLINKS
    completed = bytearray(reply)
    struct.pack_into("<I", completed, _OUT_FLAGS_AT, flags)
    struct.pack_into("<HH", completed, _OUT_BACKGROUND_AT, _MAX_BACKGROUND, _CONGESTION_THRESHOLD)
    return bytes(completed)


class _Handshake:
    """An exchange over a socket that libfuse takes for the connection, and that becomes the connection afterwards.

    ``fuse_fd`` is the mounted connection's descriptor; it is closed when libfuse has its own.
    """

    def __init__(self, fuse_fd: int) -> None:
        self._fuse_fd = fuse_fd
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._ours = ours
        self.session_fd = theirs.detach()
        """Descriptor for libfuse; from ``run`` on, the connection itself."""

    async def run(self) -> None:
        """Carry out the exchange; pyfuse3.init was called on ``session_fd``.

        Afterwards pyfuse3.main serves the mount.

        Raises:
            HandshakeFailed: kernel or libfuse sent something else.
            trio.TooSlowError: one of them sent nothing in time.
        """
        with trio.fail_after(_HANDSHAKE_SECONDS):
            request = await trio.to_thread.run_sync(os.read, self._fuse_fd, _READ_BYTES)
            if _OPCODE.unpack_from(request) != (_FUSE_INIT,):
                raise HandshakeFailed("the kernel's first request is not FUSE_INIT")
            reply = await self._answer_of_libfuse(request)
        # The number that libfuse and pyfuse3 remember leads to the kernel from now on.
        os.dup2(self._fuse_fd, self.session_fd, inheritable=False)
        self._ours.close()
        os.write(self._fuse_fd, completed_reply(request, reply))
        os.close(self._fuse_fd)

    async def _answer_of_libfuse(self, request: bytes) -> bytes:
        self._ours.setblocking(False)
        self._ours.send(request)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(pyfuse3.main)
            await trio.lowlevel.wait_readable(self._ours)
            reply = self._ours.recv(_READ_BYTES)
            # Its task waits for the next request. It is started anew afterwards.
            nursery.cancel_scope.cancel()
        return reply


if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup

log = structlog.get_logger(__name__)

_SESSION_TASKS = 64
"""Limit of requests at once; a task that has received a large write keeps its buffer of a MiB."""
_COLLECT_SECONDS = 10.0


class Pyfuse3Worker:
    """Worker of one mount, from start to end. ``run`` blocks until it is over."""

    def __init__(self, core: OverlayCore, context: WorkerContext) -> None:
        self._core = core
        self._context = context
        self._root = context.root
        self._backing_fd = context.backing_fd
        self._mounted_ns = 0
        self._device = ""
        self._has_served = False
        self._token: trio.lowlevel.TrioToken | None = None
        self._stopping = trio.Event()
        self._departure = Departure(context, lambda: self._device, self._unmounted)
        self._grace_seconds = SIGNAL_GRACE_SECONDS
        self._driver = Pyfuse3Driver(core)
        self._server = ControlServer(
            core,
            context.control,
            backing_fd=context.backing_fd,
            on_stop=self.stop,
            on_stay=self._departure.stay,
            extra_status=self._driver_status,
        )

    def run(self) -> None:
        """Mount, serve, and return when the mount is gone and the tracking is saved."""
        fuse_fd = mounts.mount_fuse(self._backing_fd)
        try:
            entry = mounts.overlay_over(self._backing_fd)
            self._device = entry.device if entry is not None else ""
            self._mounted_ns = time.time_ns()
            handshake = _Handshake(fuse_fd)
            # By this form of name libfuse accepts a connection that is mounted already (fuse_session_mount).
            pyfuse3.init(self._driver, f"/dev/fd/{handshake.session_fd}", set())
            try:
                self._driver.dispatch.latency.publish(f"{self._context.control}{WAITS_SUFFIX}")
                trio.run(self._serve, handshake)
                self._has_served = True
            finally:
                self._detach()
                self._driver.dispatch.latency.unpublish()
                # libfuse has not made the mount, which is detached already.
                pyfuse3.close(unmount=False)
        except BaseException:
            self._detach()
            raise
        finally:
            self._server.close()
        # The last save has begun, which a second signal must not interrupt.
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        self._core.save_tracking()
        self._core.close()

    async def _serve(self, handshake: _Handshake) -> None:
        self._token = trio.lowlevel.current_trio_token()
        self._driver.dispatch.turns.install()
        await handshake.run()
        async with trio.open_nursery() as nursery:
            await nursery.start(self._watch_signals)
            self._announce()
            nursery.start_soon(self._end_after_grace)
            nursery.start_soon(_collect_garbage)
            nursery.start_soon(self._driver.dispatch.turns.watch)
            nursery.start_soon(self._driver.dispatch.watch)
            await serve_requests()
            nursery.cancel_scope.cancel()

    def _announce(self) -> None:
        self._server.start()
        log.info("overlay_mounted", root=self._root, driver="pyfuse3")
        self._context.announce()

    def _driver_status(self) -> Mapping[str, Any]:
        return {
            "driver": "pyfuse3",
            "driver_why": self._context.driver_why,
            "filtered": self._context.filtered,
            "passthrough": False,
            "version": ciuic.__version__,
            "mounted_ns": self._mounted_ns,
            "requests": self._driver.requests,
            "waited_us": self._driver.dispatch.latency.microseconds,
        }

    async def _watch_signals(self, task_status: trio.TaskStatus[None]) -> None:
        with trio.open_signal_receiver(*STOP_SIGNALS) as signals:
            task_status.started()
            async for number in signals:
                log.info("stop_signal", signal=signal.Signals(number).name)
                try:
                    await trio.to_thread.run_sync(self.stop, SIGNAL_GRACE_SECONDS)
                except OSError as error:
                    log.error("overlay_not_unmounted", root=self._root, error=str(error))

    def stop(self, grace_seconds: float) -> bool:
        """Unmount and end as soon as nobody is in the mount or the grace is over (Departure.stop).

        Not for the event loop's thread.
        """
        return self._departure.stop(grace_seconds)

    def _unmounted(self, seconds: float) -> None:
        self._grace_seconds = seconds
        if self._token is not None:
            # With nothing open, the end of the mount has already ended the loop.
            with contextlib.suppress(trio.RunFinishedError):
                trio.from_thread.run_sync(self._stopping.set, trio_token=self._token)

    async def _end_after_grace(self) -> None:
        await self._stopping.wait()
        await trio.sleep(self._grace_seconds)
        log.warning("handles_left_open", open_files=self._core.open_files)
        pyfuse3.terminate()

    def _detach(self) -> None:
        detach_own(self._context, self._device, has_served=self._has_served)


async def serve_requests() -> None:
    """Serve requests with libfuse until the mount is gone.

    Raises:
        BaseExceptionGroup: reading or answering requests failed otherwise.
    """
    try:
        # A task ends only with the session: one that ended for idleness would end without handing its turn
        # on.
        await pyfuse3.main(min_tasks=_SESSION_TASKS, max_tasks=_SESSION_TASKS)
    except (ConnectionAbortedError, BaseExceptionGroup) as error:
        # fuse_dev_do_read (fs/fuse/dev.c) answers ENODEV after the unmount, which libfuse takes for the end,
        # but ECONNABORTED where the unmount comes while it hands a request over (a late RELEASE or FORGET).
        if not _is_abort(error):
            raise


def _is_abort(error: BaseException) -> bool:
    if isinstance(error, BaseExceptionGroup):
        return all(_is_abort(one) for one in error.exceptions)
    return isinstance(error, ConnectionAbortedError)


async def _collect_garbage() -> None:
    """Collect young garbage only: a full collection walks a million nodes, and the job would wait for it."""
    # What exists already is never looked at again, and full collections are off: they would stop the loop.
    gc.freeze()
    gc.disable()
    while True:
        await trio.sleep(_COLLECT_SECONDS)
        gc.collect(1)
