"""The portable driver: carries FUSE requests from pyfuse3 (libfuse) to the overlay core, on an event loop and in threads.

Guarantees: every request is answered, an OSError with its errno and any other exception with EIO and a log
event; no handler ends the server. The core carries operations out, with every rule of POSIX that the kernel leaves
to a file system; docs/conformance.md lists the requests that libfuse 3.14 cannot carry.

A change of threads costs more than most operations (about 50 µs against 10), and an operation that waits for
a disk on the event loop stops every other request. So an operation runs on the loop, unless it is known to be
long, or a sealed epoch is pending (the operation may first have to save old state), or operations were found
waiting lately (`Dispatch`). An operation takes effect once, also when the gate refused it on the event loop.
The time that operations waited is counted (latency_gauge.py), of those in threads also while they run.

pyfuse3 lets tasks compete for a lock around "wait until readable". With trio's lock, which is handed on at
every release, each request costs two steps of the scheduler and two calls of epoll, more than most requests
themselves. Here a task that has answered a request at once keeps its turn, and looks for the next request
before it yields; the turn is handed on when a handler is about to wait (``hand_on``). Measured on a busy
machine, before and after: 12,000 and 46,000 stat/s, 3,000 and 12,000 open+read/s. pyfuse3 has a module attribute
for this very purpose (``pyfuse3.trio``, which pyfuse3.asyncio replaces likewise).

While no task reads, one that waits for its turn gets it: at once where ``hand_on`` is called, within
TURN_WATCH_SECONDS where it is not (a task that ended: the session is over, and the others must learn of it). The
loop's other work, timers and signals, waits for RUN_OF_TURNS requests at most, and for none while handlers wait
for threads.

An overlay worker that serves its mount by the portable driver: libfuse, pyfuse3 and trio.

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

import errno
import functools
import itertools
import os
import select
import stat
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from types import SimpleNamespace, TracebackType
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

import pyfuse3
import structlog
import trio
from pyfuse3 import FileHandleT, FileNameT, FlagT, InodeT, ModeT, XAttrNameT

from ciuic.fuse_layer.core.overlay_core import Attr, OverlayCore, SetAttr
from ciuic.fuse_layer.core.passthrough_core import DriverHooks
from ciuic.fuse_layer.state.passthrough_state import LIFE_NS
from ciuic.fuse_layer.system.caller import Credentials, shown_attributes
from ciuic.fuse_layer.system.latency_gauge import WAITING_SECONDS, LatencyGauge
from ciuic.fuse_layer.tracking.gate import GateHeld

if TYPE_CHECKING:
    from pyfuse3 import EntryAttributes, FileInfo, ReaddirToken, RequestContext, SetattrFields, StatvfsData


import contextlib
import gc
import signal
import socket
import struct
import sys
from collections.abc import Mapping

import ciuic
from ciuic.fuse_layer.control_server import ControlServer
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


RUN_OF_TURNS = 64
TURN_WATCH_SECONDS = 0.2
_LOOK_SECONDS = 0.0001
"""Time for which a task looks for the next request: a program with one request after the other sends it
sooner."""
_SELECT_LIMIT = 1024
"""select(2) takes descriptors below this number only."""
T = TypeVar("T")
SLOW_SECONDS = 0.02
"""Duration from which on an operation has waited for a disk (or for a processor: then little is lost)."""
CAUTIOUS_SECONDS = 1.0
"""Time after such an operation in which operations run in threads."""
WATCH_SECONDS = 0.1
"""Interval at which waiting operations in threads are counted."""
MAX_THREADS = 32
"""Limit of each pool. Changes held by a cut, reads from a slow disk and fsyncs must not use up each other's
threads."""


class ReaderTurns:
    """The turn to read of one session.

    ``waiting`` is the number of handlers that wait for a thread or have paused.
    """

    def __init__(self) -> None:
        self.waiting = 0
        self._taken = False
        self._run = 0
        self._lot = trio.lowlevel.ParkingLot()

    def install(self) -> None:
        """Make pyfuse3 use these turns."""
        lowlevel = SimpleNamespace(
            current_task=trio.lowlevel.current_task,
            current_trio_token=trio.lowlevel.current_trio_token,
            wait_readable=self.wait_readable,
            notify_closing=self.notify_closing,
        )
        seen: Any = SimpleNamespace(
            Lock=lambda: self,
            open_nursery=trio.open_nursery,
            ClosedResourceError=trio.ClosedResourceError,
            lowlevel=lowlevel,
        )
        pyfuse3.trio = seen  # type: ignore[attr-defined]

    async def __aenter__(self) -> None:
        while self._taken:
            await self._lot.park()
        self._taken = True

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._taken = False

    def hand_on(self) -> None:
        """Let another task read, because the running one is about to wait for something else than its turn."""
        if not self._taken:
            self._lot.unpark()

    async def wait_readable(self, fd: int) -> None:
        """Wait until ``fd`` is readable."""
        # Not while handlers wait for threads: their results need the loop, which a look would hold up.
        if not self.waiting and self._run < RUN_OF_TURNS and fd < _SELECT_LIMIT:
            self._run += 1
            # Not poll(2), which rounds the time up to a millisecond, in which nothing else of the session
            # would run. The number is below the limit of select(2).
            if select.select([fd], [], [], _LOOK_SECONDS)[0]:  # noqa: TID251
                return
        self._run = 0
        await trio.lowlevel.wait_readable(fd)

    def notify_closing(self, fd: int) -> None:
        """Have every task look whether the session is over (pyfuse3.terminate)."""
        trio.lowlevel.notify_closing(fd)
        self._lot.unpark_all()

    async def watch(self) -> None:
        """Wake tasks while none reads, beside pyfuse3.main; see the module's guarantees."""
        while True:
            await trio.sleep(TURN_WATCH_SECONDS)
            if not self._taken:
                # Woken without a reader: a task that ended held the turn, and the others must learn that the
                # session is over.
                self._lot.unpark_all()


class Pending(Protocol):
    """The part of the core that says whether a change may have to save old state first."""

    @property
    def pending(self) -> bool:
        """True if a sealed epoch awaits its capture."""


class Dispatch:
    """Dispatcher of operations of ``core``; to be used on one event loop only."""

    def __init__(self, core: Pending, clock: Callable[[], float] = time.perf_counter) -> None:
        self.turns = ReaderTurns()
        self.latency = LatencyGauge()
        self._core = core
        self._clock = clock
        self._cautious_until = -1.0
        self._in_threads: list[float] = []
        """Times since which operations are in a thread, or wait for one."""
        # Three pools, because requests of one kind must not use up the threads of another: changes that wait
        # for a cut, reads of a slow disk, and fsyncs of seconds go on independently.
        self._reading = trio.CapacityLimiter(MAX_THREADS)
        self._changing = trio.CapacityLimiter(MAX_THREADS)
        self._syncing = trio.CapacityLimiter(MAX_THREADS)

    async def read(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that changes nothing and is short unless it waits for a disk."""
        now = self._clock()
        if now < self._cautious_until:
            return await self.long_read(operation, *args)
        try:
            return operation(*args)
        finally:
            self._note(now)

    async def change(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that changes something and is short unless it waits or has to save old state."""
        now = self._clock()
        # While an epoch awaits its capture a change may copy old blocks first, which must not stop the loop.
        if self._core.pending or now < self._cautious_until:
            return await self.long_change(operation, *args)
        try:
            return operation(*args)
        except GateHeld:
            # Nothing has happened yet. The thread below waits for the end of the hold.
            pass
        finally:
            self._note(now)
        return await self.long_change(operation, *args)

    async def long_read(self, operation: Callable[..., T], *args: Any) -> T:
        """Run a read that is known to wait, always in a thread."""
        return await self._in_thread(operation, args, self._reading)

    async def long_change(self, operation: Callable[..., T], *args: Any) -> T:
        """Run a change that is known to be long, always in a thread."""
        return await self._in_thread(operation, args, self._changing)

    async def sync(self, operation: Callable[..., T], *args: Any) -> T:
        """Run an operation that waits until data is durable, always in a thread of a pool of its own."""
        return await self._in_thread(operation, args, self._syncing)

    async def pause(self) -> None:
        """Let other requests run in the middle of a long one."""
        self.turns.waiting += 1
        self.turns.hand_on()
        try:
            await trio.lowlevel.checkpoint()
        finally:
            self.turns.waiting -= 1

    async def _in_thread(
        self, operation: Callable[..., T], args: tuple[Any, ...], limiter: trio.CapacityLimiter
    ) -> T:
        self.turns.waiting += 1
        self.turns.hand_on()
        # The turn is handed on before the wait: otherwise the mount would be unread for up to 0.2 s.
        began = self._clock()
        self._in_threads.append(began)
        try:
            return await trio.to_thread.run_sync(operation, *args, limiter=limiter)
        finally:
            self._in_threads.remove(began)
            self.latency.lasted(began, self._clock())
            self.turns.waiting -= 1

    async def watch(self) -> None:
        """Count operations in threads as waiting before they have ended, for as long as requests are served."""
        while True:
            await trio.sleep(WATCH_SECONDS)
            if self._in_threads:
                self.latency.lasted(self._in_threads[0], self._clock())

    def _note(self, started: float) -> None:
        now = self._clock()
        if now - started > WAITING_SECONDS:
            self.latency.lasted(started, now)
            if now - started > SLOW_SECONDS:
                self._cautious_until = now + CAUTIOUS_SECONDS


TIMEOUT_SECONDS = 86_400.0
"""Life of cached names and attributes: every change passes through the worker, so they stay true."""
_WRITTEN_TIMEOUT_SECONDS = 0.1
"""Life of attributes of files that are open for writing; a getattr ten times a second costs nothing."""
_MIN_BLOCKS = 8
_INLINE_WRITE_BYTES = 128 << 10
"""Size above which a write goes to a thread: copying it takes longer than the change of threads."""
_DOTS = (b".", b"..")
_ACCESS_ACL = b"system.posix_acl_access"
_LISTING_STEP = 64
"""Directory entries between two pauses, in which other requests run."""
P = ParamSpec("P")


def entry_of(attr: Attr, *, written: bool = False, recent: bool = False) -> pyfuse3.EntryAttributes:
    """Return attributes for the kernel; a node id is its inode number.

    ``written``: it is being opened for writing just now; ``recent``: it changed lately (state/passthrough_state.py).
    """
    st = attr.st
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = attr.node
    entry.generation = attr.generation
    entry.entry_timeout = TIMEOUT_SECONDS
    entry.attr_timeout = LIFE_NS / 1e9 if recent else TIMEOUT_SECONDS
    entry.st_mode = st.st_mode
    entry.st_nlink = attr.nlink
    entry.st_uid = st.st_uid
    entry.st_gid = st.st_gid
    entry.st_rdev = st.st_rdev
    entry.st_size = st.st_size
    entry.st_blksize = st.st_blksize
    entry.st_blocks = st.st_blocks
    entry.st_atime_ns = st.st_atime_ns
    entry.st_mtime_ns = st.st_mtime_ns
    entry.st_ctime_ns = st.st_ctime_ns
    if stat.S_ISREG(st.st_mode):
        if attr.written or written:
            _being_written(entry)
        if st.st_mode & (stat.S_ISUID | stat.S_ISGID):
            # A write takes these bits away in the core; the kernel, which would run the file with them, is
            # not told.
            entry.attr_timeout = 0.0
    return entry


def _take_back(node: int) -> None:
    """Have the kernel drop the attributes of a node, and the answers to requests that it sent before."""
    try:
        pyfuse3.invalidate_inode(node, attr_only=True)
    except OSError as error:
        # The kernel has forgotten the node meanwhile, or the mount is gone.
        if error.errno not in (errno.ENOENT, errno.ENOTCONN):
            log.warning("node_not_invalidated", error=str(error))


def _being_written(entry: pyfuse3.EntryAttributes) -> None:
    """Shorten the life of a written file's attributes, and let it have blocks."""
    # Size and times of a file in the kernel's write cache are the kernel's own; the blocks are the server's,
    # and grow without a request (du). Never none, because archivers take a file without blocks for a single
    # hole and do not read it, while its data may not have been written back yet (GNU tar --sparse).
    entry.attr_timeout = min(entry.attr_timeout, _WRITTEN_TIMEOUT_SECONDS)
    entry.st_blocks = max(entry.st_blocks, _MIN_BLOCKS)


def _absent_entry() -> pyfuse3.EntryAttributes:
    """Return the entry of a name that is free, which the kernel remembers until it creates the name itself."""
    entry = pyfuse3.EntryAttributes()
    entry.st_ino = 0
    entry.entry_timeout = TIMEOUT_SECONDS
    return entry


def _statvfs_of(vfs: os.statvfs_result) -> pyfuse3.StatvfsData:
    """Return file system figures for the kernel."""
    data = pyfuse3.StatvfsData()
    data.f_bsize = vfs.f_bsize
    data.f_frsize = vfs.f_frsize
    data.f_blocks = vfs.f_blocks
    data.f_bfree = vfs.f_bfree
    data.f_bavail = vfs.f_bavail
    data.f_files = vfs.f_files
    data.f_ffree = vfs.f_ffree
    data.f_favail = vfs.f_favail
    data.f_namemax = vfs.f_namemax
    return data


Handler = Callable[Concatenate["Pyfuse3Driver", P], Coroutine[Any, Any, T]]


def _answered(handler: Handler[P, T]) -> Handler[P, T]:
    """Wrap a handler so that its exceptions become errnos of the job's system call."""

    @functools.wraps(handler)
    async def run(self: Pyfuse3Driver, /, *args: P.args, **kwargs: P.kwargs) -> T:
        self.requests += 1
        try:
            return await handler(self, *args, **kwargs)
        except pyfuse3.FUSEError:
            raise
        except OSError as error:
            # The frames refer to the open file, and crossing a thread ties them into a reference cycle: until
            # it was collected, a removed file would take its space, just when the disk is full.
            traceback.clear_frames(error.__traceback__)
            raise pyfuse3.FUSEError(error.errno or errno.EIO) from None
        except Exception:
            log.exception("request_failed_unexpectedly", operation=handler.__name__)
            raise pyfuse3.FUSEError(errno.EIO) from None

    return run


def _caller(ctx: RequestContext) -> Credentials:
    return Credentials(ctx.uid, ctx.gid, ctx.umask)


class Pyfuse3Driver(pyfuse3.Operations):
    """Driver of one mount for ``core``."""

    supports_dot_lookup = False
    enable_writeback_cache = True
    enable_acl = True

    def __init__(self, core: OverlayCore) -> None:
        super().__init__()
        self.core = core
        self.requests = 0
        """Number of requests so far."""
        self.dispatch = Dispatch(core)
        self._directories: dict[int, int] = {}
        """Nodes by handle of an open directory."""

    def init(self) -> None:
        """Register the event loop's thread with the core; called on the loop, before any request."""
        self.core.inline_thread = threading.get_ident()
        self.core.connect(DriverHooks(before_freeing=self._not_on_the_loop, take_back_attributes=_take_back))

    def _entry(self, attr: Attr, *, written: bool = False) -> pyfuse3.EntryAttributes:
        return entry_of(
            attr, written=written, recent=stat.S_ISDIR(attr.st.st_mode) and attr.node in self.core.recent
        )

    # -- names and attributes -----------------------------------------------------------------------

    @_answered
    async def lookup(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> EntryAttributes:
        try:
            return self._entry(await self.dispatch.read(self.core.names.lookup, parent_inode, name))
        except FileNotFoundError:
            return _absent_entry()

    async def forget(self, inode_list: Sequence[tuple[InodeT, int]]) -> None:
        try:
            for node, count in inode_list:
                self.core.nodes.forget(node, count)
        except Exception:
            # FORGET has no reply: there is no caller to tell.
            log.exception("forget_failed")

    @_answered
    async def getattr(self, inode: InodeT, ctx: RequestContext) -> EntryAttributes:
        return self._entry(await self.dispatch.read(self.core.attributes.getattr, inode))

    @_answered
    async def setattr(
        self,
        inode: InodeT,
        attr: EntryAttributes,
        fields: SetattrFields,
        fh: FileHandleT | None,
        ctx: RequestContext,
    ) -> EntryAttributes:
        change = SetAttr(
            mode=attr.st_mode & 0o7777 if fields.update_mode else None,
            uid=attr.st_uid if fields.update_uid else None,
            gid=attr.st_gid if fields.update_gid else None,
            size=attr.st_size if fields.update_size else None,
            atime_ns=attr.st_atime_ns if fields.update_atime else None,
            mtime_ns=attr.st_mtime_ns if fields.update_mtime else None,
            keeps_privileges=ctx.uid == 0,
        )
        # A request without any attribute is chown(2) with -1 for both.
        if change == SetAttr(keeps_privileges=ctx.uid == 0):
            change = SetAttr(chown_by=ctx.uid)
        # Freeing the blocks of a large file takes seconds on some file systems.
        run = self.dispatch.long_change if fields.update_size else self.dispatch.change
        return self._entry(await run(self.core.attributes.setattr, inode, change, fh))

    @_answered
    async def readlink(self, inode: InodeT, ctx: RequestContext) -> FileNameT:
        return await self.dispatch.read(self.core.names.readlink, inode)

    @_answered
    async def mknod(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, rdev: int, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(
            await self.dispatch.change(self.core.names.mknod, parent_inode, name, mode, rdev, _caller(ctx))
        )

    @_answered
    async def mkdir(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(
            await self.dispatch.change(self.core.names.mkdir, parent_inode, name, mode, _caller(ctx))
        )

    @_answered
    async def symlink(
        self, parent_inode: InodeT, name: FileNameT, target: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(
            await self.dispatch.change(self.core.names.symlink, parent_inode, name, target, _caller(ctx))
        )

    @_answered
    async def link(
        self, inode: InodeT, new_parent_inode: InodeT, new_name: FileNameT, ctx: RequestContext
    ) -> EntryAttributes:
        return self._entry(
            await self.dispatch.change(self.core.names.link, inode, new_parent_inode, new_name)
        )

    def _not_on_the_loop(self) -> None:
        """Have a removal that takes long run again in a thread, by the exception of an operation that meets a hold."""
        # Nothing has changed yet: the core calls this before the removal.
        if threading.get_ident() == self.core.inline_thread:
            raise GateHeld

    @_answered
    async def unlink(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self.dispatch.change(self.core.names.unlink, parent_inode, name)

    @_answered
    async def rmdir(self, parent_inode: InodeT, name: FileNameT, ctx: RequestContext) -> None:
        await self.dispatch.change(self.core.names.rmdir, parent_inode, name)

    @_answered
    async def rename(
        self,
        parent_inode_old: InodeT,
        name_old: FileNameT,
        parent_inode_new: InodeT,
        name_new: FileNameT,
        flags: FlagT,
        ctx: RequestContext,
    ) -> None:
        await self.dispatch.change(
            self.core.names.rename, parent_inode_old, name_old, parent_inode_new, name_new, flags
        )

    # -- files ----------------------------------------------------------------------------------------

    @_answered
    async def open(self, inode: InodeT, flags: FlagT, ctx: RequestContext) -> FileInfo:
        operation = functools.partial(
            self.core.files.open, inode, flags, keeps_privileges=ctx.uid == 0, uid=ctx.uid
        )
        handle = await self.dispatch.change(operation)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            # Attributes that the kernel has cached live long; those of a file that is written live shortly
            # (`entry_of`).
            _take_back(inode)
        if self.core.files.appends(handle):
            # The write cache sends whole pages, also what they had before.
            return pyfuse3.FileInfo(fh=handle, direct_io=True)
        # All changes pass through this mount, so pages that are cached stay true.
        return pyfuse3.FileInfo(fh=handle, keep_cache=self.core.files.keeps_cache(handle))

    @_answered
    async def create(
        self, parent_inode: InodeT, name: FileNameT, mode: ModeT, flags: FlagT, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        attr, handle = await self.dispatch.change(
            self.core.names.create, parent_inode, name, mode, flags, _caller(ctx)
        )
        keeps = self.core.files.keeps_cache(handle)
        return pyfuse3.FileInfo(fh=handle, keep_cache=keeps), self._entry(attr, written=True)

    @_answered
    async def read(self, fh: FileHandleT, off: int, size: int) -> bytes:
        data = self.core.files.read_nowait(fh, off, size)
        if data is None:
            return await self.dispatch.long_read(self.core.files.read, fh, off, size)
        # Not copied: pyfuse3 takes any contiguous buffer, whatever its annotation says.
        return cast(bytes, data)

    @_answered
    async def write(self, fh: FileHandleT, off: int, buf: bytes) -> int:
        # Copying more than that takes longer than the change of threads, and stops all other requests.
        run = self.dispatch.long_change if len(buf) > _INLINE_WRITE_BYTES else self.dispatch.change
        return await run(self.core.files.write, fh, off, buf)

    @_answered
    async def flush(self, fh: FileHandleT) -> None:
        await self.dispatch.change(self.core.files.flush, fh)

    @_answered
    async def release(self, fh: FileHandleT) -> None:
        await self.dispatch.change(self.core.files.release, fh)

    @_answered
    async def fsync(self, fh: FileHandleT, datasync: bool) -> None:
        await self.dispatch.sync(self.core.files.fsync, fh, datasync)

    # -- directories ----------------------------------------------------------------------------------

    @_answered
    async def opendir(self, inode: InodeT, ctx: RequestContext) -> FileHandleT:
        handle = await self.dispatch.read(
            functools.partial(self.core.directories.opendir, inode, uid=ctx.uid)
        )
        self._directories[handle] = inode
        return handle

    @_answered
    async def readdir(self, fh: FileHandleT, start_id: int, token: ReaddirToken) -> None:
        entries = await self.dispatch.read(self._entries, fh, start_id)
        while await self.dispatch.read(self._list_some, entries, token):
            await self.dispatch.pause()

    def _entries(self, handle: int, start_id: int) -> Iterator[tuple[bytes, Attr, int]]:
        """The core's entries behind "." and "..", which it leaves out; offsets are its own plus two."""
        node = self._directories[handle]
        for name in _DOTS[start_id:]:
            attr = self.core.names.lookup(node, name)
            # The kernel counts no lookup of the two.
            self.core.nodes.forget(attr.node, 1)
            start_id += 1
            yield name, attr, start_id
        at = start_id - len(_DOTS)
        while entry := self.core.directories.readdir(handle, at, lambda _, offset: offset + 1):
            ((name, found, at),) = entry
            # Where it cannot be looked at, with its error: pyfuse3 lists nothing without attributes.
            yield name, found or self.core.names.lookup(node, name), at + len(_DOTS)

    def _list_some(self, entries: Iterator[tuple[bytes, Attr, int]], token: ReaddirToken) -> bool:
        """Reply up to _LISTING_STEP entries; False when the reply is full or the directory at its end."""
        replied = 0
        for name, attr, next_id in itertools.islice(entries, _LISTING_STEP):
            if not pyfuse3.readdir_reply(token, name, self._entry(attr), next_id):
                if name not in _DOTS:
                    self.core.nodes.forget(attr.node, 1)
                return False
            replied += 1
        return replied == _LISTING_STEP

    @_answered
    async def releasedir(self, fh: FileHandleT) -> None:
        self._directories.pop(fh, None)
        self.core.directories.releasedir(fh)

    @_answered
    async def fsyncdir(self, fh: FileHandleT, datasync: bool) -> None:
        await self.dispatch.sync(self.core.directories.fsyncdir, fh, datasync)

    # -- the rest -------------------------------------------------------------------------------------

    @_answered
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        return _statvfs_of(await self.dispatch.read(self.core.statfs))

    @_answered
    async def getxattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bytes:
        return await self.dispatch.read(self.core.attributes.getxattr, inode, name)

    @_answered
    async def setxattr(self, inode: InodeT, name: XAttrNameT, value: bytes, ctx: RequestContext) -> None:
        operation = functools.partial(
            self.core.attributes.setxattr, drops_group_bit=self._is_outsider_acl(inode, name, ctx)
        )
        # pyfuse3 has already carried out XATTR_CREATE and XATTR_REPLACE by asking for the attribute first.
        await self.dispatch.change(operation, inode, name, value, 0)

    def _is_outsider_acl(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> bool:
        """Return whether a request sets the ACL of a set-group-id file of a group that the caller is not in."""
        # The kernel could say so, but libfuse does not ask it to (FUSE_SETXATTR_EXT).
        if name != _ACCESS_ACL or ctx.uid == 0:
            return False
        attr = self.core.attributes.getattr(inode)
        if not attr.st.st_mode & stat.S_ISGID or attr.st.st_gid == ctx.gid:
            return False
        try:
            return attr.st.st_gid not in pyfuse3.get_sup_groups(ctx.pid)
        except (OSError, RuntimeError):
            # The process is gone, or of another process namespace: one bit too few is safe.
            return True

    @_answered
    async def listxattr(self, inode: InodeT, ctx: RequestContext) -> Sequence[XAttrNameT]:
        names = await self.dispatch.read(self.core.attributes.listxattr, inode)
        return shown_attributes(names, ctx.uid, ctx.pid)

    @_answered
    async def removexattr(self, inode: InodeT, name: XAttrNameT, ctx: RequestContext) -> None:
        await self.dispatch.change(self.core.attributes.removexattr, inode, name)
