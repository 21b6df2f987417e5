"""A session with the kernel on /dev/fuse: the threads that read requests, replies. What was agreed on before: kernel_negotiation.py.

Guarantees: every request that is read is answered once, an OSError with its errno and anything unexpected with EIO and a
log event; no handler ends the server; a reply that the kernel refuses is noticed. At any time one thread reads, or a
watch sees to it within milliseconds that another does: no request waits for the disk that another one waits for.

One thread holds the *turn*: it reads a request, carries it out and replies, without ever handing anything to another
thread. That is twice as fast as two threads that read alternately, which meet at the interpreter's lock after every
request (measured, create and write of small files: 15,100/s against 7,300/s). Who is going to wait (a handler calls
``hand_on``), or is found waiting (``_watch``), gives the turn up, finishes its request and queues for the turn again.
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
from typing import Final

import structlog

from ciuic.fuse_layer import kernel_protocol as p
from ciuic.fuse_layer.busy_poll import POLL_SECONDS, BusyPoll
from ciuic.fuse_layer.kernel_negotiation import MAX_WRITE_BYTES
from ciuic.fuse_layer.kernel_protocol import Request
from ciuic.fuse_layer.waits import Waits

log = structlog.get_logger(__name__)

_BUFFER_BYTES: Final = MAX_WRITE_BYTES + 4096 + 65536
"""A write of the largest size with its headers; setxattr may carry 64 KiB."""
MAX_THREADS: Final = 512
"""Requests that wait at once: each is a program that waits, so more than a machine has in practice."""
_SPARE_THREADS: Final = 4
WATCH_SECONDS: Final = 0.003
"""A request that takes longer than this has met a disk: somebody else reads on."""
_QUIET_SECONDS: Final = 0.1
_FAILED_PAUSE_SECONDS: Final = 0.05
_COPIED_BYTES: Final = 4096
"""Up to here one buffer costs less than two pieces (half a microsecond of every request)."""

Reply = bytes | bytearray | memoryview | None
"""What follows the header; None is no reply at all (FORGET)."""
Handler = Callable[[Request, memoryview], Reply]


class _Server(threading.Thread):
    """One serving thread and what the watch wants to know of it."""

    def __init__(self, session: Session) -> None:
        super().__init__(name="fuse", daemon=True)
        self._session = session
        self.busy = 0
        """The number of a request that was read and is not answered; 0 while there is none."""

    def run(self) -> None:
        self._session.serve(self)


class Session:
    """Serves the connection ``fuse_fd``, which stays the caller's, with ``handlers`` by opcode.

    ``refused``: opcodes that are answered with an errno, whatever is asked.

    ``unread``: opcodes whose replies the kernel may find nobody waiting for, with what is to be undone then (an open that
    was interrupted is never released).
    """

    def __init__(
        self,
        fuse_fd: int,
        handlers: Mapping[int, Handler],
        *,
        refused: Mapping[int, int],
        unread: Mapping[int, Callable[[Request, Reply], None]],
    ) -> None:
        self._fd = fuse_fd
        self._handlers = dict(handlers)
        self._refused = dict(refused)
        self._unread = dict(unread)
        self.requests = 0
        self._busy_poll = BusyPoll()
        poll = select.poll()
        poll.register(fuse_fd, select.POLLIN)
        self._poll = poll.poll
        self.waits = Waits()
        self._turn = threading.Lock()
        self._owner: _Server | None = None
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
        """Serves from now on."""
        self._spawn()
        threading.Thread(target=self._watch, name="fuse-watch", daemon=True).start()

    def wait(self) -> None:
        """Returns when the connection has ended (unmounted, aborted) or ``end`` was called."""
        self._over.wait()

    def resend(self) -> None:
        """Asks the kernel for every request again that a predecessor read and did not answer. OSError where it cannot."""
        os.write(self._fd, p.OUT_HEADER.pack(p.OUT_HEADER.size, p.NOTIFY_RESEND, 0))

    @property
    def is_over(self) -> bool:
        """Nobody answers requests of this connection any more."""
        return self._over.is_set()

    def end(self) -> None:
        """``wait`` returns; requests in work are left alone."""
        self._over.set()

    def park(self, timeout_seconds: float) -> bool:
        """Carries out no further request. True when none is in work any more: what is read and parked is sent again to
        whoever takes the session over."""
        self._parked = True
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            with self._lock:
                working = any(server.busy for server in self._servers)
            if not working:
                return True
            time.sleep(0.002)
        return False

    def invalidate_attributes(self, node: int) -> None:
        """The kernel asks for the node's attributes again; what it caches of the content stays."""
        self._invalidate(node, -1, 0)

    def invalidate_content(self, node: int, offset: int, length: int) -> None:
        """The same, and what the kernel caches of the range is dropped. Waits for requests about these pages: for none of the
        session's own threads, and not inside the gate."""
        self._invalidate(node, offset, length)

    def _invalidate(self, node: int, offset: int, length: int) -> None:
        body = p.NOTIFY_INVAL_INODE_OUT.pack(node, offset, length)
        head = p.OUT_HEADER.pack(p.OUT_HEADER.size + len(body), p.NOTIFY_INVAL_INODE, 0)
        try:
            os.write(self._fd, head + body)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ENOTCONN):  # forgotten meanwhile; unmounted
                log.warning("node_not_invalidated", error=str(error))

    # -- the turn -------------------------------------------------------------------------------------

    def hand_on(self) -> None:
        """The calling thread is going to wait: another one reads from now on. To be called by handlers."""
        server: _Server | None = getattr(self._local, "server", None)
        if server is not None and self._owner is server:
            self._give_turn(server)

    def _give_turn(self, server: _Server) -> None:
        with self._lock:
            if self._owner is not server:
                return
            self._owner = None
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
        except RuntimeError:  # the limit of threads: whoever is free first reads on
            with self._lock:
                self._servers.discard(server)
            log.warning("no_more_threads", threads=len(self._servers))

    def serve(self, server: _Server) -> None:
        """A serving thread's life."""
        self._local.server = server
        view = memoryview(bytearray(_BUFFER_BYTES))
        while self._queue(server):
            while self._owner is server:
                goes_on = self._one_guarded(server, view)
                server.busy = 0
                if not goes_on:
                    self._finish(server)
                    return

    def _queue(self, server: _Server) -> bool:
        """Waits for the turn; False when there are threads enough and this one may go."""
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
        self._turn.release()  # for the next one to find that it is over
        return False

    def _finish(self, server: _Server) -> None:
        """The connection has ended: so do those who wait for their turn, and the watch."""
        with self._lock:
            self._finished = True
            has_turn = self._owner is server
            if has_turn:
                self._owner = None
        self._over.set()
        self._active.set()
        if has_turn:
            self._turn.release()

    def _watch(self) -> None:
        """Takes the turn away from whoever is found with the same request twice, and looks who waits without one."""
        seen, quiet_since = -1, time.monotonic()
        looked_at = quiet_since
        while not self._over.is_set():
            time.sleep(WATCH_SECONDS)
            now, owner = self.requests, self._owner
            self._busy_poll.tick(time.monotonic(), now)
            waiting = frozenset(s.busy for s in list(self._servers) if s.busy and s is not owner)
            waited_since, looked_at = looked_at, time.monotonic()
            if self.waits.saw(waiting, looked_at - waited_since):
                quiet_since = looked_at
            if owner is not None and owner.busy and now == seen:
                self._give_turn(owner)
            elif now != seen:
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > _QUIET_SECONDS:
                self._busy_poll.stop()
                self._active.clear()
                if self.requests == now:
                    self._active.wait()
                quiet_since = looked_at = time.monotonic()
            seen = now

    # -- one request ----------------------------------------------------------------------------------

    def _one_guarded(self, server: _Server, view: memoryview) -> bool:
        """As ``_one``. A thread that ended here would keep its turn, and nobody would read any more."""
        try:
            return self._one(server, view)
        except Exception:
            log.exception("request_not_finished")
            time.sleep(_FAILED_PAUSE_SECONDS)  # out of memory, say: that passes
            return True

    def _one(self, server: _Server, view: memoryview) -> bool:
        """Reads, carries out and answers one request; False at the end of the connection."""
        server.busy = 0
        if self._busy_poll.on:
            self._look_out()
        try:
            length = os.readv(self._fd, [view])
        except OSError as error:
            if error.errno in (errno.ENODEV, errno.ECONNABORTED):
                return False
            if error.errno in (errno.ENOENT, errno.EINTR, errno.EAGAIN):  # taken back while we woke up
                return True
            raise
        if self._parked:
            threading.Event().wait()  # unanswered on purpose, see ``park``
        self.requests += 1
        server.busy = self.requests
        if not self._active.is_set():
            self._active.set()
        _, opcode, unique, node, uid, gid, pid, extension, _ = p.IN_HEADER.unpack_from(view)
        request = Request(opcode, unique, node, uid, gid, pid, extension * 8)
        handler = self._handlers.get(opcode)
        if handler is None:  # ENOSYS is remembered by the kernel where that saves requests
            return self._answer(request, self._refused.get(opcode, errno.ENOSYS), b"")
        error_number, reply = self._carried_out(handler, request, view[p.IN_HEADER.size : length])
        if reply is None:
            return True
        return self._answer(request, error_number, reply)

    def _look_out(self) -> None:
        """Returns when there is something to read, or not much later than after a moment (busy_poll.py)."""
        poll = self._poll
        until = time.perf_counter() + POLL_SECONDS
        while not poll(0) and time.perf_counter() < until:
            pass

    def _carried_out(self, handler: Handler, request: Request, data: memoryview) -> tuple[int, Reply]:
        try:
            return 0, handler(request, data)
        except OSError as error:
            # The frames name what the request was about; in a cycle they would keep a removed file's space.
            if error.__context__ is not None:
                traceback.clear_frames(error.__traceback__)
            return error.errno or errno.EIO, b""
        except (p.Malformed, struct.error):
            log.exception("request_malformed", opcode=request.opcode)
            return errno.EINVAL, b""
        except Exception:
            log.exception("request_failed_unexpectedly", opcode=request.opcode)
            return errno.EIO, b""

    def _answer(self, request: Request, error_number: int, reply: bytes | bytearray | memoryview) -> bool:
        size = p.OUT_HEADER.size + len(reply)
        head = p.OUT_HEADER.pack(size, -error_number, request.unique)
        try:
            if size <= _COPIED_BYTES:
                os.write(self._fd, head + reply)
            else:
                os.writev(self._fd, [head, reply])
        except OSError as error:
            if error.errno == errno.ENODEV:
                return False
            if error.errno != errno.ENOENT:  # nobody waits for it any more: interrupted
                log.error("reply_refused", opcode=request.opcode, bytes=size, error=str(error))
            if error_number:
                return True
            undo = self._unread.get(request.opcode)
            if undo is not None:
                try:
                    undo(request, reply)
                except Exception:  # whoever waits must have his answer all the same
                    log.exception("answer_not_undone", opcode=request.opcode)
            if error.errno != errno.ENOENT:
                return self._answer(request, errno.EIO, b"")
        return True
