"""File system of a lazily restored tree: a passthrough file system whose requests wait for what is not there yet.

Guarantees: a read is answered from blocks that are there; a write and a new size wait for nothing, and are journaled (changes.py)
before they are answered; fallocate(2) waits until the file is complete; a file that is cut to nothing or loses its last name is not
filled any more. Link counts, sizes, blocks and times are shown as if the file was complete. A request
whose caller was killed or got a signal while it waited for the store is answered with EINTR.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final

from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.core.directories import Directories
from ciuic.fuse_layer.core.files import Attributes, Files, KernelTimes, SetAttr
from ciuic.fuse_layer.core.names import Names
from ciuic.fuse_layer.core.passthrough_core import PassthroughCore
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.kernel.driver import KernelDriver
from ciuic.fuse_layer.kernel.session import Handler, Negotiated, Reply
from ciuic.fuse_layer.state.node_table import Node, NodeTable
from ciuic.fuse_layer.state.open_rules import OpenPreference
from ciuic.fuse_layer.state.passthrough_state import Attr, PassthroughState
from ciuic.fuse_layer.system.pipes import Pipe
from ciuic.lazy.filling import Settler
from ciuic.lazy.incomplete_files import PendingFile, PendingFiles

_BLOCK_BYTES: Final = 512
_MAX_COPY_BYTES: Final = 64 << 20
_NAMED: Final = (
    *("st_atime", "st_mtime", "st_ctime", "st_atime_ns", "st_mtime_ns", "st_ctime_ns"),
    *("st_blksize", "st_blocks", "st_rdev"),
)
_CAN_WAIT: Final = (p.READ, p.FALLOCATE, p.COPY_FILE_RANGE, p.COPY_FILE_RANGE_64)


class LazyState(PassthroughState):
    """State in which incomplete files look as if they were complete."""

    def __init__(self, nodes: NodeTable, pending: PendingFiles) -> None:
        super().__init__(nodes, pending.hidden)
        self._pending = pending

    def shown(self, st: os.stat_result) -> os.stat_result:
        """Return the attributes of a file as if it was complete."""
        if not stat.S_ISREG(st.st_mode) or st.st_dev != self.nodes.device:
            return st
        file = self._pending.by_ino.get(st.st_ino)
        if file is None:
            return st
        # Archivers take a file without blocks for one hole, which they do not read. Filling moves the time.
        blocks = max(st.st_blocks, -(-st.st_size // _BLOCK_BYTES))
        seconds, _ = divmod(file.mtime_ns, 10**9)
        named = {name: getattr(st, name) for name in _NAMED}
        named |= {
            "st_blocks": blocks,
            "st_mtime_ns": file.mtime_ns,
            "st_mtime": file.mtime_ns / 1e9,
        }
        fields = list(st[:10])
        fields[stat.ST_MTIME] = seconds
        return os.stat_result(fields, named)


class IncompleteFiles:
    """Incomplete files as the operations see them: find one by node or handle, and wait for its content."""

    def __init__(self, state: PassthroughState, pending: PendingFiles, settler: Settler) -> None:
        self._state = state
        self.pending = pending
        self._settler = settler
        self.durable = threading.Event()
        """Set when the names of the tree are durable."""
        self.opening: Counter[int] = Counter()
        """Opens under way by inode, guarded by the table's lock."""
        self.before_wait: Callable[[], None] = lambda: None
        """Called before a request waits; the driver lets others go on."""
        self.interrupted: Callable[[], bool] = lambda: False
        """Returns True if the caller of the request that this thread carries out was interrupted."""

    def of(self, node_id: int) -> PendingFile | None:
        """Return the incomplete file of a node; None if it is complete."""
        return self.pending.by_ino.get(self._state.nodes.get(node_id).ino)

    def of_handle(self, handle: int) -> PendingFile | None:
        """Return the incomplete file of an open handle; None if it is complete."""
        return self.pending.by_ino.get(self._state.file(handle).node.ino)

    def complete(self, file: PendingFile) -> None:
        """Wait until a file is complete.

        Raises:
            OSError: EIO where it cannot be completed, EINTR if the caller was interrupted.
        """
        self.before_wait()
        self.pending.wait_until_filled(file, self.interrupted)
        self._settler.settle(file)

    def drop_unnamed(self, file: PendingFile | None) -> None:
        """Give up a file that has lost its last name and that no program has open."""
        if file is None or file.gone:
            return
        # Under one lock with opens that are under way: a process that has the file open, now or in a moment, may read on. The node
        # does not tell, because that of a file without a name is found no more.
        with self.pending.changed:
            try:
                if os.stat(file.name, dir_fd=self.pending.directory).st_nlink > 1:
                    return
            except FileNotFoundError:
                return
            is_open = any(opened.node.ino == file.ino for opened in list(self._state.files.values()))
            if not is_open and not self.opening[file.ino]:
                self.pending.drop(file)


class _Written:
    """Number of bytes that a change has written."""

    count = 0


class LazyFiles(Files):
    """Operations on open files: blocks are fetched before they are read."""

    def __init__(self, state: PassthroughState, times: KernelTimes, incomplete: IncompleteFiles) -> None:
        super().__init__(state, times)
        self._incomplete = incomplete
        self._pending = incomplete.pending

    def open(
        self,
        node_id: int,
        flags: int,
        *,
        keeps_privileges: bool = False,
        unseen: bool = False,
        uid: int = 0,
    ) -> int:
        """Open a file and return its handle. One that is emptied needs its content no more."""

        def opened() -> int:
            return super(LazyFiles, self).open(
                node_id, flags, keeps_privileges=keeps_privileges, unseen=unseen, uid=uid
            )

        ino = self._nodes.get(node_id).ino
        opening = self._incomplete.opening
        with self._pending.changed:
            file = self._pending.by_ino.get(ino)
            if file is not None:
                opening[ino] += 1
        if file is None:
            return opened()
        try:
            if not flags & os.O_TRUNC:
                return opened()
            with file.io, self._pending.emptying(file):
                return opened()
        finally:
            with self._pending.changed:
                opening[ino] -= 1
                if not opening[ino]:
                    del opening[ino]

    def release(self, handle: int) -> None:
        """Close a handle; the last one of a removed file ends its filling."""
        opened = self._state.files.get(handle)
        file = self._pending.by_ino.get(opened.node.ino) if opened is not None else None
        del opened
        super().release(handle)
        self._incomplete.drop_unnamed(file)

    def read_nowait(self, handle: int, offset: int, size: int) -> memoryview | None:
        """Read what is in memory; None where that would wait for the disk or the store."""
        file = self._incomplete.of_handle(handle)
        if file is not None and not self._pending.has(file, offset, size):
            return None
        return super().read_nowait(handle, offset, size)

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read; may wait for the store."""
        self._fetch(handle, offset, size)
        return super().read(handle, offset, size)

    def descriptor_to_read(self, handle: int, offset: int, size: int) -> int:
        """Return the backing descriptor; may wait for the store."""
        self._fetch(handle, offset, size)
        return super().descriptor_to_read(handle, offset, size)

    def _fetch(self, handle: int, offset: int, size: int) -> None:
        file = self._incomplete.of_handle(handle)
        if file is not None and not self._pending.has(file, offset, size):
            self._pending.wait(file, offset, size, self._incomplete.interrupted)

    def copy_file_range(
        self, source: int, source_offset: int, target: int, target_offset: int, length: int
    ) -> int:
        """Copy between two handles; the source is waited for."""
        # A caller goes on after less: the whole of a large file would be waited for.
        length = min(length, _MAX_COPY_BYTES)
        self._fetch(source, source_offset, length)
        with self._changing(target, target_offset) as change:
            change.count = super().copy_file_range(source, source_offset, target, target_offset, length)
        return change.count

    def write(
        self, handle: int, offset: int, data: bytes | memoryview | Pipe, *, keeps_privileges: bool = False
    ) -> int:
        """Write; waits for nothing, because what is fetched later leaves the written bytes as they are."""
        with self._changing(handle, offset) as change:
            change.count = super().write(handle, offset, data, keeps_privileges=keeps_privileges)
        return change.count

    @contextmanager
    def _changing(self, handle: int, offset: int) -> Iterator[_Written]:
        """Record what the block writes from ``offset`` on, if the file is incomplete."""
        change = _Written()
        file = self._incomplete.of_handle(handle)
        if file is None:
            yield change
            return
        opened = self._state.file(handle)
        with file.io:
            self._pending.begin_change(file)
            self._times.before_change(opened.node, file.mtime_ns)
            yield change
            # With its write cache on, the kernel sends the time of a write.
            mtime_ns = file.mtime_ns if self._times.active else os.fstat(opened.fd).st_mtime_ns
            self._pending.written(file, offset, offset + change.count, mtime_ns)

    def fallocate(self, handle: int, *arguments: Any, **options: Any) -> None:
        """Call fallocate(2), which may move blocks: the file is complete before."""
        file = self._incomplete.of_handle(handle)
        if file is not None:
            self._incomplete.complete(file)
        super().fallocate(handle, *arguments, **options)

    def lseek(self, handle: int, offset: int, whence: int) -> int:
        """Find data or a hole; an incomplete file counts as data up to its end."""
        file = self._incomplete.of_handle(handle)
        if file is None or file.filled:
            return super().lseek(handle, offset, whence)
        size = os.fstat(self._state.file(handle).fd).st_size
        if offset >= size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return offset if whence == os.SEEK_DATA else size

    def fsync(self, handle: int, datasync: bool) -> None:
        """Make the content durable, and its name: a later run would make the tree anew where that is not."""
        self._incomplete.durable.wait()
        file = self._incomplete.of_handle(handle)
        if file is None:
            super().fsync(handle, datasync)
        else:
            self._pending.sync(file, lambda: super(LazyFiles, self).fsync(handle, datasync))


class LazyAttributes(Attributes):
    """Operations on attributes; a change of size or modification time of an incomplete file is journaled."""

    def __init__(
        self, state: PassthroughState, files: Files, times: KernelTimes, incomplete: IncompleteFiles
    ) -> None:
        super().__init__(state, files, times)
        self._incomplete = incomplete

    def setattr(self, node_id: int, change: SetAttr, handle: int | None = None) -> Attr:
        """Change attributes; a file that is cut to nothing needs its content no more."""
        file = self._incomplete.of(node_id)
        if file is None:
            return super().setattr(node_id, change, handle)
        pending, node = self._incomplete.pending, self._nodes.get(node_id)
        if change.size == 0:
            with file.io, pending.emptying(file):
                return super().setattr(node_id, change, handle)
        if change.size is None and change.mtime_ns is None and not change.mtime_now:
            return super().setattr(node_id, change, handle)
        with file.io:
            pending.begin_change(file)
            self._times.before_change(node, file.mtime_ns)
            before = self._backing(node)
            resizing: AbstractContextManager[None] = nullcontext()
            if change.size is not None:
                resizing = pending.resizing(file, change.size, before.st_size)
            with resizing:
                super().setattr(node_id, change, handle)
            mtime_ns = self._backing(node).st_mtime_ns
            # Fetching has moved the time of the backing file: it says nothing where the change has not.
            if mtime_ns != before.st_mtime_ns or change.mtime_ns is not None or change.mtime_now:
                pending.set_time(file, mtime_ns)
        return self.getattr(node_id, handle)

    def _backing(self, node: Node) -> os.stat_result:
        path, _keep = self._pinned(node)
        return os.stat(path)


class LazyNames(Names):
    """Operations on names: a file that loses its last one is not filled any more."""

    def __init__(self, state: PassthroughState, incomplete: IncompleteFiles) -> None:
        super().__init__(state)
        self._incomplete = incomplete

    def unlink(self, parent_id: int, name: bytes) -> None:
        """Remove a name."""
        file = self._pending_at(parent_id, name)
        super().unlink(parent_id, name)
        self._incomplete.drop_unnamed(file)

    def rename(self, parent_id: int, name: bytes, new_parent_id: int, new_name: bytes, flags: int) -> None:
        """Rename, possibly over another file."""
        file = self._pending_at(new_parent_id, new_name)
        super().rename(parent_id, name, new_parent_id, new_name, flags)
        self._incomplete.drop_unnamed(file)

    def _pending_at(self, parent_id: int, name: bytes) -> PendingFile | None:
        if not self._incomplete.pending.by_ino:
            return None
        try:
            return self._incomplete.pending.by_ino.get(self.peek(parent_id, name))
        except OSError:
            # The operation meets the same error, or none.
            return None


class LazyDirectories(Directories):
    """Operations on open directories: syncs wait until the tree itself is durable."""

    def __init__(self, state: PassthroughState, incomplete: IncompleteFiles) -> None:
        super().__init__(state)
        self._incomplete = incomplete

    def fsyncdir(self, handle: int, datasync: bool) -> None:
        """Make a directory's names durable."""
        self._incomplete.durable.wait()
        super().fsyncdir(handle, datasync)


class LazyCore(PassthroughCore):
    """The core; ``backing_fd`` is the restored tree."""

    def __init__(
        self, backing_fd: int, pending: PendingFiles, settler: Settler, *, kernel_keeps_times: bool
    ) -> None:
        state = LazyState(NodeTable(backing_fd), pending)
        times = KernelTimes(state, active=kernel_keeps_times)
        self.incomplete = incomplete = IncompleteFiles(state, pending, settler)
        files = LazyFiles(state, times, incomplete)
        super().__init__(
            state,
            names=LazyNames(state, incomplete),
            files=files,
            attributes=LazyAttributes(state, files, times, incomplete),
            directories=LazyDirectories(state, incomplete),
        )

    def connect_waits(self, *, before_wait: Callable[[], None], interrupted: Callable[[], bool]) -> None:
        """Call these hooks of the driver from now on; before the first request.

        Args:
            before_wait: called before a request waits, so that others may go on.
            interrupted: returns True if the caller of the request that this thread carries out was interrupted.
        """
        self.incomplete.before_wait = before_wait
        self.incomplete.interrupted = interrupted

    def become(self, directory: int) -> None:
        """Let the root be another directory, which has everything that was in it; nothing else may be under way."""
        root = self._state.nodes.root
        os.dup2(directory, self._state.nodes.root_directory.fd, inheritable=False)
        root.ino = os.fstat(directory).st_ino

    def preference(self, node_id: int, flags: int, *, fresh: bool) -> OpenPreference:
        """Return the preference for an open: the kernel must not read past us what is not there yet."""
        # Nor may a program write past us, as long as the file is to get its time.
        if self.incomplete.of(node_id) is not None:
            return OpenPreference.CACHED
        return super().preference(node_id, flags, fresh=fresh)

    def prepare_open(self, node_id: int, flags: int) -> None:
        """Refuse to open a damaged file for writing: it is left out in the end.

        Raises:
            OSError: EIO.
        """
        if flags & os.O_ACCMODE != os.O_RDONLY and not flags & os.O_TRUNC:
            file = self.incomplete.of(node_id)
            if file is not None and file.damaged:
                raise OSError(errno.EIO, os.strerror(errno.EIO))


class RequestGate:
    """Counts requests under way. A request that comes while it is closed waits until it opens."""

    def __init__(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._inside = 0
        self._closed = False

    def enter(self) -> None:
        """Wait until the gate is open, and count the caller."""
        with self._changed:
            while self._closed:
                self._changed.wait()
            self._inside += 1

    def leave(self) -> None:
        """Take the caller's count back."""
        with self._changed:
            self._inside -= 1
            if self._closed:
                self._changed.notify_all()

    @contextmanager
    def closed(self) -> Iterator[None]:
        """Keep callers out during the block, which begins when all have left."""
        with self._changed:
            self._closed = True
            while self._inside:
                self._changed.wait()
        try:
            yield
        finally:
            with self._changed:
                self._closed = False
                self._changed.notify_all()


class LazyDriver(KernelDriver):
    """Driver of the connection ``fuse_fd`` for ``core``."""

    def __init__(
        self,
        core: LazyCore,
        fuse_fd: int,
        negotiated: Negotiated,
        pending: PendingFiles,
        gate: RequestGate,
    ) -> None:
        self._lazy = core
        self._pending = pending
        self._gate = gate
        self._local = threading.local()
        self._active: dict[int, bool] = {}
        """Requests that may wait: True if their caller was interrupted."""
        super().__init__(core, fuse_fd, negotiated)
        core.connect_waits(before_wait=self.session.hand_on, interrupted=self._is_interrupted)

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
            self._gate.enter()
            try:
                return handler(request, data)
            finally:
                self._gate.leave()

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
        def handle(request: FuseRequest, data: memoryview) -> Reply:
            flags, _ = p.OPEN_IN.unpack_from(data)
            self._lazy.prepare_open(request.node, flags)
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
