"""A session with the kernel on /dev/fuse: serving threads, requests and replies; before it, the negotiation.

Guarantees: every request that is read is answered once, an OSError with its errno and any other exception
with EIO and a log event; no handler ends the server; a reply that the kernel refuses is noticed. At any time
one thread reads, or a watch has another one read within milliseconds: no request waits for the disk that
another one waits for.

One thread holds the *turn*: it reads a request, carries it out and replies, without ever handing anything to
another thread. That is twice as fast as two threads that read alternately, which meet at the interpreter's
lock after every request (measured, create and write of small files: 15,100/s against 7,300/s). A thread that
is going to wait (its handler calls ``hand_on``), or is found waiting (``_watch``), gives the turn up,
finishes its request and queues for the turn again.

A program that waits for each answer sends its next request some ten microseconds after it. A server that
sleeps meanwhile has to be woken on a processor that went to sleep with it, which takes longer than the
request: with busy polling as many again were carried out on a virtual machine with idle processors (a create
and a write of a small file 2,930 and 4,870 in a second, open and read 6,400 and 9,200, stat 16,300 and
24,300; two sessions by turns). Nothing is polled unless requests come fast, processors are idle (no task of the
host waits for one), and more requests are carried out with polling than without, which is measured anew every few
seconds (`BusyPoll`). One poll takes ``POLL_SECONDS`` at most.

The negotiation (`negotiate`) settles version of the protocol and features of both sides (FUSE_INIT). Guarantees:
nothing is asked for that the kernel did not offer; a kernel with an older protocol than the session's oldest (7.31,
Linux 5.4) is refused by UnsupportedProtocol, and one with a later major version is asked for ours.
"""

from __future__ import annotations

import errno
import os
import select
import struct
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import structlog

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.system.latency_gauge import LatencyGauge
from ciuic.fuse_layer.system.pipes import MAX_SPLICED_BYTES, MIN_SPLICED_BYTES, Pipe
from ciuic.system.poll import wait_until

MAX_WRITE_BYTES: Final = 1 << 20
# DO_READDIRPLUS without READDIRPLUS_AUTO: core/directories.py chooses the names that come with attributes.
_WANTED = (
    p.ASYNC_READ
    # O_TRUNC comes with the open and not as a SETATTR after it: both are one step inside the gate
    # (core/files.py). Not beside the write cache (`negotiate`).
    | p.ATOMIC_O_TRUNC
    | p.BIG_WRITES
    # The umask comes beside the mode: only the worker knows whether a default ACL overrides it.
    | p.DONT_MASK
    | p.DO_READDIRPLUS
    | p.ASYNC_DIO
    | p.PARALLEL_DIROPS
    | p.POSIX_ACL
    | p.ABORT_ERROR
    | p.MAX_PAGES
    # The target of a link never changes.
    | p.CACHE_SYMLINKS
    # All changes pass through the worker: cached pages stay true although a time or a size has moved.
    | p.EXPLICIT_INVAL_DATA
    # Otherwise the kernel asks for security.capability before every write(2) into its cache (measured with
    # pyfuse3: 4 KiB writes at 87 instead of 259 MB/s).
    | p.HANDLE_KILLPRIV_V2
    | p.SETXATTR_EXT
    | p.INIT_EXT
    | p.SECURITY_CTX
    | p.HAS_RESEND
    # A file handle is a node id, which is an inode number. Once the kernel has forgotten the inode, the
    # number says neither where the file is nor whether it is still the same one: without this flag, the
    # handle of a removed file opened the file that got its number (tests/conformance/test_refused.py). So no
    # handle is given out.
    | p.NO_EXPORT_SUPPORT
)


class UnsupportedProtocol(Exception):
    """The kernel offers no protocol that the session supports."""


class Negotiated(NamedTuple):
    """Terms that were agreed with the kernel; a session that is taken over goes on with the same."""

    minor: int
    flags: int
    max_write_bytes: int = MAX_WRITE_BYTES

    @property
    def passthrough(self) -> bool:
        """True if the kernel may carry data to backing files by itself."""
        return bool(self.flags & p.PASSTHROUGH)

    @property
    def writeback(self) -> bool:
        """True if the kernel's write cache is on."""
        return bool(self.flags & p.WRITEBACK_CACHE)

    @property
    def resends(self) -> bool:
        """True if the kernel sends unanswered requests again, so that a successor can take the session over."""
        return bool(self.flags & p.HAS_RESEND)


def negotiate(fuse_fd: int, *, passthrough: bool, stack_depth: int = 1) -> Negotiated:
    """Answer the kernel's first request, and return what was agreed.

    Args:
        fuse_fd: descriptor of the connection.
        passthrough: use it where it is offered. Without it the kernel's write cache is turned on, which is
            next in speed.
        stack_depth: number of stacked file systems to ask for.

    Raises:
        UnsupportedProtocol: the kernel is older than 5.4.
    """
    while True:
        data = os.read(fuse_fd, p.MIN_READ_BUFFER_BYTES)
        _, opcode, unique, *_ = p.IN_HEADER.unpack_from(data)
        if opcode != p.INIT:
            raise UnsupportedProtocol(f"the kernel's first request must be INIT, got opcode {opcode}")
        major, minor, readahead, offered = p.INIT_IN.unpack_from(data, p.IN_HEADER.size)
        # The upper 32 flags are valid only with INIT_EXT (protocol 7.36).
        if offered & p.INIT_EXT:
            offered |= p.INIT_IN_EXT.unpack_from(data, p.IN_HEADER.size + p.INIT_IN.size)[0] << 32
        if major > p.KERNEL_VERSION:
            # The kernel sends a second INIT in our version.
            _send_init(fuse_fd, unique, readahead, 0, 0)
            continue
        if major < p.KERNEL_VERSION or minor < p.OLDEST_MINOR_VERSION:
            oldest = f"{p.KERNEL_VERSION}.{p.OLDEST_MINOR_VERSION}"
            raise UnsupportedProtocol(f"the kernel must speak FUSE {oldest} or later, got {major}.{minor}")
        break
    flags = _WANTED & offered
    # One or the other: the kernel turns passthrough on only without its write cache (fs/fuse/inode.c).
    if passthrough and offered & p.PASSTHROUGH:
        flags |= p.PASSTHROUGH
    else:
        stack_depth = 0
        flags |= p.WRITEBACK_CACHE & offered
        # After such an open the kernel empties the file once more by itself. With its write cache it keeps
        # that size, although another write was carried out in between.
        flags &= ~p.ATOMIC_O_TRUNC
    # Data that pass through this process do so in a pipe (session.py).
    max_write_bytes = MAX_SPLICED_BYTES if flags & p.WRITEBACK_CACHE else MAX_WRITE_BYTES
    _send_init(fuse_fd, unique, readahead, flags, stack_depth, max_write_bytes)
    return Negotiated(min(minor, p.KERNEL_MINOR_VERSION), flags, max_write_bytes)


def _send_init(
    fuse_fd: int,
    unique: int,
    readahead: int,
    flags: int,
    stack_depth: int,
    max_write_bytes: int = MAX_WRITE_BYTES,
) -> None:
    body = p.INIT_OUT.pack(
        p.KERNEL_VERSION,
        p.KERNEL_MINOR_VERSION,
        # max_readahead: the kernel takes the smaller of this value and its own.
        max(readahead, 1 << 20),
        flags & 0xFFFFFFFF,
        # max_background, congestion_threshold: twelve requests of readahead and writeback in flight, the
        # kernel's default, are too few when an undo log makes some slow.
        64,
        48,
        max_write_bytes,
        # time_gran: times are kept to the nanosecond.
        1,
        # max_pages: a write of the largest size is one request.
        max_write_bytes // os.sysconf("SC_PAGE_SIZE"),
        0,
        flags >> 32,
        stack_depth,
        0,
    )
    os.write(fuse_fd, p.OUT_HEADER.pack(p.OUT_HEADER.size + len(body), 0, unique) + body)


log = structlog.get_logger(__name__)

# A program that waits for each answer sends its next request some ten microseconds after it.
POLL_SECONDS: Final = 0.0001
# Five looks of the session's watch (WATCH_SECONDS of kernel/session.py).
WINDOW_SECONDS: Final = 0.015
MIN_REQUESTS_PER_TICK: Final = 4
"""Requests between two ticks below which nothing is polled: such programs work between requests, and gain
nothing."""
MAX_PRESSURE_SHARE: Final = 0.3
"""Limit of the share of time in which some task of the host waits for a processor: above it none is ours to
waste.

The job and the worker wait for each other a little; where each processor has a task that computes, the share
is near 1.
"""
_MAX_STALE_LOGGED: Final = 20
_MIN_GAIN: Final = 1.1
"""Requests with polling, as a multiple of those without, from which on polling pays."""
_RECHECK_SECONDS: Final = 3.0
"""Time after which polling that paid is measured again."""
_MIN_PATIENCE_SECONDS: Final = 0.25
_MAX_PATIENCE_SECONDS: Final = 2.0
"""Pause after polling that did not pay, doubled each time: it depends on where the scheduler puts job and
worker, which changes by the second."""
_BUFFER_BYTES: Final = MAX_WRITE_BYTES + 4096 + 65536
"""Size of a read: a write of the largest size with its headers; setxattr may carry 64 KiB."""
MAX_THREADS: Final = 512
"""Limit of requests that wait at once: each is a program that waits, so more than a machine has in
practice."""
_MAX_PIPES: Final = 8
"""Threads with a pipe of a megabyte at once; others copy. The kernel gives all processes of root that have no privilege for more 64 such
pipes together, and one page for each pipe after that."""
_SPARE_THREADS: Final = 4
"""Threads that wait for the turn; more than that end."""
WATCH_SECONDS: Final = 0.003
"""Interval of the watch. A request that takes longer has met a disk, and another thread reads on."""
_QUIET_SECONDS: Final = 0.1
"""Time without requests after which the watch sleeps until the next one."""
_FAILED_PAUSE_SECONDS: Final = 0.05
_COPIED_BYTES: Final = 4096
"""Size up to which one buffer is faster than two pieces (half a microsecond of every request)."""


class BusyPoll:
    """Decision whether a session polls.

    ``tick`` and ``stop`` are called by one thread; any thread may read ``on``.
    """

    def __init__(self, *, waiting_seconds: Callable[[], float | None] | None = None) -> None:
        self._waiting_seconds = waiting_seconds or processor_pressure
        self.on = False
        """True while requests are polled for instead of waited for."""
        self._requests = 0
        self._window: tuple[float, int, float] | None = None
        """Start of the running window, and the requests and the seconds of processor pressure until then."""
        self._rate_asleep = 0.0
        self._pays_until = 0.0
        """Time until which polling counts as paying; 0 where it has not been measured."""
        self._again_at = 0.0
        self._patience_seconds = _MIN_PATIENCE_SECONDS

    def tick(self, now: float, requests: int) -> None:
        """Decide anew, every few milliseconds while there are requests; ``requests`` is their count so far.

        Never raises.
        """
        came, self._requests = requests - self._requests, requests
        if came < MIN_REQUESTS_PER_TICK:
            self.stop()
            return
        if self._window is not None and now - self._window[0] < WINDOW_SECONDS:
            return
        # Without pressure figures nothing is polled: busy processors could not be told from idle ones.
        waited = self._waiting_seconds()
        if waited is None:
            return
        window, self._window = self._window, (now, requests, waited)
        if window is None:
            self.on = now < self._pays_until
            return
        seconds = now - window[0]
        self._judge(
            now, (requests - window[1]) / seconds, busy=waited - window[2] > MAX_PRESSURE_SHARE * seconds
        )

    def stop(self) -> None:
        """Stop polling, because requests have become few."""
        self.on = False
        self._window = None

    def _judge(self, now: float, rate: float, *, busy: bool) -> None:
        if busy:
            self.on, self._pays_until = False, 0.0
        elif not self.on:
            self._rate_asleep = rate
            self.on = now >= self._again_at
        elif rate < self._rate_asleep * _MIN_GAIN:
            self.on, self._pays_until = False, 0.0
            self._again_at = now + self._patience_seconds
            self._patience_seconds = min(2 * self._patience_seconds, _MAX_PATIENCE_SECONDS)
        elif not self._pays_until:
            self._patience_seconds = _MIN_PATIENCE_SECONDS
            self._pays_until = now + _RECHECK_SECONDS
        elif now >= self._pays_until:
            # One window without polling gives the rate to compare with.
            self._pays_until = 0.0
            self.on = False


def processor_pressure() -> float | None:
    """Return the seconds so far in which some task of the host waited for a processor; None where the kernel does not say.

    References:
        Documentation/accounting/psi.rst
    """
    try:
        with open("/proc/pressure/cpu", "rb") as file:
            return int(file.readline().rpartition(b"total=")[2]) / 1e6
    except (OSError, ValueError):
        return None


Reply = bytes | bytearray | memoryview | Pipe | None
"""Body of a reply, or a pipe that holds the whole reply; None where a request has no reply at all (FORGET)."""
Handler = Callable[[FuseRequest, memoryview], Reply]


class _Server(threading.Thread):
    """A serving thread, with the request that it is at."""

    def __init__(self, session: KernelSession) -> None:
        super().__init__(name="fuse", daemon=True)
        self._session = session
        self.busy = 0
        """Number of a request that was read and is not answered; 0 while there is none."""
        self.pipe: Pipe | None = None
        """The thread's pipe, empty between requests; None until one is needed, and after a failure."""
        self.expects_body = False
        """True after a large write: the next request mostly is one, too."""
        self.body: Pipe | None = None
        """The pipe while it holds the body of the request at work."""
        self._may_have_pipe = session.pipes

    def own_pipe(self) -> Pipe | None:
        """Return the thread's pipe, which is empty; None where none can be had."""
        if self.pipe is None and self._may_have_pipe.acquire(blocking=False):
            try:
                self.pipe = Pipe()
            except OSError:
                self._may_have_pipe.release()
        return self.pipe

    def close_pipe(self) -> None:
        """Close the pipe, with what is left in it."""
        pipe, self.pipe = self.pipe, None
        if pipe is not None:
            pipe.close()
            self._may_have_pipe.release()

    def run(self) -> None:
        """Serve until the session ends or this thread is not needed."""
        try:
            self._session.serve(self)
        finally:
            self.close_pipe()


class KernelSession:
    """A session over one connection.

    Args:
        fuse_fd: descriptor of the connection, which stays the caller's.
        handlers: handlers by opcode.
        refused: errno of opcodes that are always refused.
        unread: functions by opcode that undo a request whose caller was killed before the reply (an open that
            was interrupted is never released).
    """

    def __init__(
        self,
        fuse_fd: int,
        handlers: Mapping[int, Handler],
        *,
        refused: Mapping[int, int],
        unread: Mapping[int, Callable[[FuseRequest, Reply], None]],
    ) -> None:
        self._fd = fuse_fd
        self._handlers = dict(handlers)
        self._refused = dict(refused)
        self._unread = dict(unread)
        self.requests = 0
        self._stale_answers = 0
        self.pipes = threading.BoundedSemaphore(_MAX_PIPES)
        self._busy_poll = BusyPoll()
        poll = select.poll()
        poll.register(fuse_fd, select.POLLIN)
        self._poll = poll.poll
        self.latency = LatencyGauge()
        # The turn to read. Released by another thread than the one that took it, where the watch takes it
        # away.
        self._turn = threading.Lock()
        self._owner: _Server | None = None
        # Guards the fields of the turn. Nothing waits under it.
        self._lock = threading.Lock()
        self._waiting = 0
        self._servers: set[_Server] = set()
        self._over = threading.Event()
        self._finished = False
        self._active = threading.Event()
        self._parked = False
        self._local = threading.local()

    # -- life -----------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Start to serve."""
        self._spawn()
        threading.Thread(target=self._watch, name="fuse-watch", daemon=True).start()

    def wait(self, timeout_seconds: float | None = None) -> bool:
        """Wait until the connection has ended (unmounted, aborted) or ``end`` was called; return False after the timeout."""
        return self._over.wait(timeout_seconds)

    def resend(self) -> None:
        """Ask the kernel for every request again that a predecessor read and did not answer.

        Raises:
            OSError: the kernel cannot.
        """
        os.write(self._fd, p.OUT_HEADER.pack(p.OUT_HEADER.size, p.NOTIFY_RESEND, 0))

    def answer_for_predecessor(self, unique: int, reply: bytes) -> bool:
        """Answer a request that a predecessor read; return whether it was waiting for that. Before `resend`."""
        # The number has the top bit where the predecessor itself was sent the request again.
        for number in (unique, unique | p.UNIQUE_RESEND):
            try:
                os.write(self._fd, p.OUT_HEADER.pack(p.OUT_HEADER.size + len(reply), 0, number) + reply)
            except OSError as error:
                if error.errno != errno.ENOENT:
                    log.error("reply_refused", unique=unique, bytes=len(reply), error=str(error))
                continue
            return True
        return False

    @property
    def is_over(self) -> bool:
        """True if this session answers no request any more."""
        return self._over.is_set()

    def end(self) -> None:
        """End ``wait``; requests under way are left alone."""
        self._over.set()

    def park(self, timeout_seconds: float) -> bool:
        """Carry out no further request; return whether none is under way any more.

        The kernel sends requests that were read and parked to the successor again.
        """
        # Threads that read a request from now on keep it unanswered (``_one``); those at work are waited for.
        self._parked = True

        def is_idle() -> bool:
            with self._lock:
                return not any(server.busy for server in self._servers)

        return wait_until(is_idle, timeout_seconds, 0.002)

    def invalidate_attributes(self, node: int) -> None:
        """Have the kernel ask for the node's attributes again; its cache of the content stays."""
        self.invalidate_content(node, -1, 0)

    def invalidate_content(self, node: int, offset: int, length: int) -> None:
        """Have the kernel drop its attributes and its cache of the range.

        Waits for requests about these pages: not to be called by the session's own threads, nor inside the
        gate.
        """
        body = p.NOTIFY_INVAL_INODE_OUT.pack(node, offset, length)
        head = p.OUT_HEADER.pack(p.OUT_HEADER.size + len(body), p.NOTIFY_INVAL_INODE, 0)
        try:
            os.write(self._fd, head + body)
        except OSError as error:
            # The kernel has forgotten the node meanwhile, or the mount is gone.
            if error.errno not in (errno.ENOENT, errno.ENOTCONN):
                log.warning("node_not_invalidated", error=str(error))

    # -- the turn -------------------------------------------------------------------------------------

    def hand_on(self) -> None:
        """Give the turn up, because the calling thread is going to wait: another one reads on.

        To be called by handlers.
        """
        server: _Server | None = getattr(self._local, "server", None)
        if server is not None and self._owner is server:
            self._give_turn(server)

    def _give_turn(self, server: _Server) -> None:
        with self._lock:
            if self._owner is not server:
                return
            self._owner = None
            # A thread is started only where none waits for the turn.
            starved = not self._waiting and len(self._servers) < MAX_THREADS
        self._turn.release()
        if starved:
            self._spawn()

    def _spawn(self) -> None:
        server = _Server(self)
        with self._lock:
            self._servers.add(server)
        try:
            server.start()
        except RuntimeError:
            # The limit of threads. The first one that is free reads on.
            with self._lock:
                self._servers.discard(server)
            log.warning("no_more_threads", threads=len(self._servers))

    def serve(self, server: _Server) -> None:
        """Serve requests in a serving thread until it ends."""
        self._local.server = server
        # One buffer for the thread's life: a request is answered before the next is read into it.
        view = memoryview(bytearray(_BUFFER_BYTES))
        while self._queue(server):
            while self._owner is server:
                goes_on = self._one_guarded(server, view)
                server.busy = 0
                if not goes_on:
                    self._finish(server)
                    return

    def _queue(self, server: _Server) -> bool:
        """Wait for the turn; return False when enough threads wait and this one may end."""
        with self._lock:
            if self._waiting >= _SPARE_THREADS:
                self._servers.discard(server)
                return False
            self._waiting += 1
        self._turn.acquire()
        with self._lock:
            self._waiting -= 1
            if not self._finished:
                self._owner = server
                return True
            self._servers.discard(server)
        # The session is over. The next thread in the queue learns it in the same way.
        self._turn.release()
        return False

    def _finish(self, server: _Server) -> None:
        """End the threads that wait for the turn, and the watch, because the connection has ended."""
        with self._lock:
            self._finished = True
            # The turn may have been taken away while this thread read. Those in the queue end one after the
            # other.
            has_turn = self._owner is server
            if has_turn:
                self._owner = None
        self._over.set()
        self._active.set()
        if has_turn:
            self._turn.release()

    def _watch(self) -> None:
        """Take the turn from a thread that is found with the same request twice, and note which requests wait."""
        seen, quiet_since = -1, time.monotonic()
        looked_at = quiet_since
        while not self._over.is_set():
            time.sleep(WATCH_SECONDS)
            now, owner = self.requests, self._owner
            self._busy_poll.tick(time.monotonic(), now)
            # Without a lock, which every request would have to take: a look that is a request late does no
            # harm.
            waiting = frozenset(s.busy for s in list(self._servers) if s.busy and s is not owner)
            waited_since, looked_at = looked_at, time.monotonic()
            if self.latency.saw(waiting, looked_at - waited_since):
                quiet_since = looked_at
            if owner is not None and owner.busy and now == seen:
                self._give_turn(owner)
            elif now != seen:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > _QUIET_SECONDS:
                self._busy_poll.stop()
                # Cleared before the count is compared: a request between the two sets it, and the watch does
                # not sleep.
                self._active.clear()
                if self.requests == now:
                    self._active.wait()
                quiet_since = looked_at = time.monotonic()
            seen = now

    # -- bulk data ------------------------------------------------------------------------------------

    def body(self) -> Pipe | None:
        """Return the pipe with the body of the large write at work, or None where it was read; the next one comes in a pipe.

        For handlers.
        """
        server: _Server = self._local.server
        server.expects_body = True
        return server.body

    def piped(self, request: FuseRequest, fd: int, offset: int, size: int) -> Pipe | None:
        """Return a reply of a range of a file; None where that is to be read. For handlers."""
        server: _Server = self._local.server
        # The head comes first, so the length must be known.
        length = min(size, os.fstat(fd).st_size - offset)
        pipe = server.own_pipe() if MIN_SPLICED_BYTES <= length <= MAX_SPLICED_BYTES else None
        if pipe is None:
            return None
        if pipe.fill(p.OUT_HEADER.pack(p.OUT_HEADER.size + length, 0, request.unique), fd, offset, length):
            return pipe
        server.close_pipe()
        return None

    def _received(self, server: _Server, view: memoryview) -> int:
        """Read a request as readv(2), but for the body of a large write, which stays in the thread's pipe."""
        server.expects_body = False
        pipe = server.own_pipe()
        if pipe is None:
            return os.readv(self._fd, [view])
        length = pipe.receive(self._fd)
        head = min(length, p.IN_HEADER.size + p.WRITE_IN.size)
        pipe.take(view[:head])
        if len(pipe) >= MIN_SPLICED_BYTES:
            _, opcode, *_ = p.IN_HEADER.unpack_from(view)
            if opcode == p.WRITE:
                server.body = pipe
                return head
        pipe.take(view[head:length])
        return length

    # -- one request ----------------------------------------------------------------------------------

    def _one_guarded(self, server: _Server, view: memoryview) -> bool:
        """Serve one request as ``_one``; exceptions are logged."""
        # A thread that ended by an exception would keep the turn, and no request would be read any more.
        try:
            return self._one(server, view)
        except Exception:
            log.exception("request_not_finished")
            # What is left in it is of that request.
            server.body = None
            server.close_pipe()
            # Out of memory, for example, which passes.
            time.sleep(_FAILED_PAUSE_SECONDS)
            return True

    def _one(self, server: _Server, view: memoryview) -> bool:
        """Read, carry out and answer one request; return False at the end of the connection."""
        server.busy = 0
        if self._busy_poll.on:
            self._look_out()
        try:
            # Only after a large write: a small request takes two system calls more.
            length = self._received(server, view) if server.expects_body else os.readv(self._fd, [view])
        except OSError as error:
            # Unmounted, or aborted: with ABORT_ERROR the kernel tells the two apart.
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                return False
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):
                # The request was interrupted while this thread woke up.
                return True
            raise
        if self._parked:
            # Not answered: the kernel sends the request to the successor again (``park``).
            threading.Event().wait()
        self.requests += 1
        server.busy = self.requests
        if not self._active.is_set():
            self._active.set()
        _, opcode, unique, node, uid, gid, pid, extension, _ = p.IN_HEADER.unpack_from(view)
        request = FuseRequest(opcode, unique, node, uid, gid, pid, extension * 8)
        handler = self._handlers.get(opcode)
        if handler is None:
            # The kernel remembers ENOSYS where that saves requests.
            return self._answer(request, self._refused.get(opcode, errno.ENOSYS), b"")
        error_number, reply = self._carried_out(handler, request, view[p.IN_HEADER.size : length])
        if server.body is not None:
            # A write that failed has left some of it.
            if len(server.body):
                server.close_pipe()
            server.body = None
        if reply is None:
            return True
        return self._answer(request, error_number, reply)

    def _look_out(self) -> None:
        """Poll for a request, for not much longer than POLL_SECONDS (`BusyPoll`)."""
        poll = self._poll
        until = time.perf_counter() + POLL_SECONDS
        while not poll(0) and time.perf_counter() < until:
            pass

    def _carried_out(self, handler: Handler, request: FuseRequest, data: memoryview) -> tuple[int, Reply]:
        try:
            return 0, handler(request, data)
        except OSError as error:
            if error.errno == errno.ESTALE and self._stale_answers < _MAX_STALE_LOGGED:
                # The kernel asks once more by name. An answer like that may reach the job all the same, and tells nobody why.
                self._stale_answers += 1
                # Without the lines of the source: that may lie in the root, where this thread would wait for itself.
                places = [
                    f"{frame.f_code.co_name}:{line}" for frame, line in traceback.walk_tb(error.__traceback__)
                ]
                log.info("stale_answer", opcode=request.opcode, node=request.node, places=places)
            # The frames refer to the open file; in a reference cycle they would keep a removed file's space.
            if error.__context__ is not None:
                traceback.clear_frames(error.__traceback__)
            return error.errno or errno.EIO, b""
        except (p.MalformedRequest, struct.error):
            log.exception("request_malformed", opcode=request.opcode)
            return errno.EINVAL, b""
        except Exception:
            log.exception("request_failed_unexpectedly", opcode=request.opcode)
            return errno.EIO, b""

    def _answer(
        self, request: FuseRequest, error_number: int, reply: bytes | bytearray | memoryview | Pipe
    ) -> bool:
        size = p.OUT_HEADER.size + len(reply)
        head = p.OUT_HEADER.pack(size, -error_number, request.unique)
        try:
            # In one call: the kernel takes each write for a whole reply.
            if isinstance(reply, Pipe):
                reply.send(self._fd)
            elif size <= _COPIED_BYTES:
                os.write(self._fd, head + reply)
            else:
                os.writev(self._fd, [head, reply])
        except OSError as error:
            if isinstance(reply, Pipe):
                self._local.server.close_pipe()
            if error.errno == errno.ENODEV:
                return False
            # ENOENT: the caller was interrupted, and waits no more.
            if error.errno != errno.ENOENT:
                log.error("reply_refused", opcode=request.opcode, bytes=size, error=str(error))
            if error_number:
                return True
            undo = self._unread.get(request.opcode)
            if undo is not None:
                # A caller that still waits must have an answer whatever happens here.
                try:
                    undo(request, reply)
                except Exception:
                    log.exception("answer_not_undone", opcode=request.opcode)
            # The kernel refused the reply for another reason, and its caller still waits.
            if error.errno != errno.ENOENT:
                return self._answer(request, errno.EIO, b"")
        return True
