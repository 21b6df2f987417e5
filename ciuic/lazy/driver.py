"""Driver of a lazily restored tree: our own session with the kernel, whose requests can be interrupted while they wait.

Guarantee: a request whose caller was killed or got a signal while it waited for the store is answered with EINTR.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any, Final

from ciuic.fuse_layer.formats import fuse_protocol as p
from ciuic.fuse_layer.formats.fuse_protocol import FuseRequest
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.negotiation import Negotiated
from ciuic.fuse_layer.kernel.session import Handler, Reply
from ciuic.lazy.core import LazyCore
from ciuic.lazy.pending import PendingFiles
from ciuic.lazy.turnstile import Turnstile

_CAN_WAIT: Final = (p.OPEN, p.READ, p.SETATTR, p.COPY_FILE_RANGE, p.COPY_FILE_RANGE_64)


class LazyDriver(KernelDriver):
    """Driver of the connection ``fuse_fd`` for ``core``."""

    def __init__(
        self,
        core: LazyCore,
        fuse_fd: int,
        negotiated: Negotiated,
        pending: PendingFiles,
        turnstile: Turnstile,
    ) -> None:
        self._lazy = core
        self._pending = pending
        self._turnstile = turnstile
        self._local = threading.local()
        self._active: dict[int, bool] = {}
        """Requests that may wait: True if their caller was interrupted."""
        super().__init__(core, fuse_fd, negotiated)
        core.interrupted = self._is_interrupted
        core.before_wait = self.session.hand_on

    def _handlers(self) -> Mapping[int, Any]:
        handlers = {
            opcode: self._interruptible(handler) if opcode in _CAN_WAIT else self._counted(handler)
            for opcode, handler in super()._handlers().items()
        }
        handlers[p.OPEN] = self._prepared(handlers[p.OPEN])
        handlers[p.INTERRUPT] = self._interrupt
        return handlers

    def _counted(self, handler: Handler) -> Handler:
        def handle(request: FuseRequest, data: memoryview) -> Reply:
            self._turnstile.enter()
            try:
                return handler(request, data)
            finally:
                self._turnstile.leave()

        return handle

    def _interruptible(self, handler: Handler) -> Handler:
        counted = self._counted(handler)

        def handle(request: FuseRequest, data: memoryview) -> Reply:
            self._active[request.unique] = False
            self._local.unique = request.unique
            try:
                return counted(request, data)
            finally:
                self._active.pop(request.unique, None)

        return handle

    def _prepared(self, handler: Handler) -> Handler:
        """Complete a file before it is opened for writing: before the locks of an open, which others need."""

        def prepare(request: FuseRequest, data: memoryview) -> Reply:
            flags, _ = p.OPEN_IN.unpack_from(data)
            self._lazy.prepare_open(request.node, flags)
            return b""

        prepared = self._interruptible(prepare)

        def handle(request: FuseRequest, data: memoryview) -> Reply:
            prepared(request, data)
            return handler(request, data)

        return handle

    def _interrupt(self, request: FuseRequest, data: memoryview) -> Reply:
        # struct fuse_interrupt_in: the number of the request.
        (unique,) = p.FORGET_IN.unpack_from(data)
        with self._pending.changed:
            if unique in self._active:
                self._active[unique] = True
                self._pending.changed.notify_all()
        # No answer: the interrupted request is answered.
        return None

    def _is_interrupted(self) -> bool:
        return self._active.get(getattr(self._local, "unique", 0), False)
