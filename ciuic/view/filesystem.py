"""Requests of the kernel for a view of snapshots: decoded, answered from its nodes, encoded.

Guarantees: nothing can be changed (EROFS). Owners, modes and ACLs are those of the snapshot, and the kernel enforces them
(``default_permissions``). What is damaged ends with EIO, and is told in words; nothing else is affected. The kernel may keep what it
has read for as long as it likes, but for the list of snapshots.

One request is carried out at a time: a repository is for one thread. Where that may take long, because a store does not answer,
the requests queue for a thread of its own, and a program that waits for one may be interrupted.
"""

from __future__ import annotations

import errno
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Final

from ciuic.errors import CiuicError
from ciuic.fuse_layer import fuse_protocol as p
from ciuic.fuse_layer.fuse_protocol import FuseRequest
from ciuic.fuse_layer.kernel.session import KernelSession, Reply
from ciuic.fuse_layer.system.caller import shown_attributes
from ciuic.view.tree import LATEST, ROOT_ID, ListedName, Node, ViewTree

_FOREVER_SECONDS: Final = 86_400
# The list of snapshots changes without the kernel.
_LIST_SECONDS: Final = 1
_BLOCK_BYTES: Final = 4096
_SECTOR_BYTES: Final = 512
# FUSE_UNKNOWN_INO of libfuse.
_UNKNOWN_INO: Final = 0xFFFFFFFF
_ENTRY_BYTES: Final = p.ENTRY_HEAD.size + p.ATTR.size
# The number of names is not recorded; programs ask only whether there are others.
_SEVERAL_NAMES: Final = 2
# What a write would need is refused by the kernel itself, because the mount is read-only; this is for others.
_CHANGES: Final = (
    *(p.SETATTR, p.SYMLINK, p.MKNOD, p.MKDIR, p.UNLINK, p.RMDIR, p.RENAME, p.RENAME2, p.LINK, p.WRITE),
    *(p.SETXATTR, p.REMOVEXATTR, p.CREATE, p.TMPFILE, p.FALLOCATE),
)


class _Listing:
    """Open directory: read in order, and from its beginning again where a program seeks back."""

    def __init__(self, begin: Callable[[], Iterator[ListedName]]) -> None:
        self._begin = begin
        self._names = begin()
        self._next = 0
        self._put_back: ListedName | None = None

    def after(self, offset: int) -> Iterator[tuple[int, ListedName]]:
        """Yield what comes after ``offset`` names, with the number of names until then."""
        if offset != self._next:
            self._names, self._next, self._put_back = self._begin(), 0, None
            while self._next < offset and next(self._names, None) is not None:
                self._next += 1
        while True:
            name, self._put_back = self._put_back or next(self._names, None), None
            if name is None:
                return
            self._next += 1
            yield self._next, name

    def put_back(self, name: ListedName) -> None:
        """Take back the last name, for which there was no room."""
        self._put_back = name
        self._next -= 1


class _Turn:
    """Request that waits for its turn, or is carried out."""

    def __init__(self, work: Callable[[], Reply]) -> None:
        self.work: Final = work
        self.settled: Final = threading.Event()
        """Set when it is carried out, or its caller was interrupted."""
        self.is_done = False
        self.reply: Reply = None
        self.error: BaseException | None = None


class _Turns:
    """Carries requests out one after the other in a thread of its own, which nothing waits for at the end of the process."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[_Turn] = queue.SimpleQueue()
        self._waiting: dict[int, _Turn] = {}
        threading.Thread(target=self._run, name="view", daemon=True).start()

    def carry_out(self, unique: int, work: Callable[[], Reply]) -> Reply:
        """Return what ``work`` returns. OSError (EINTR) if the caller of request ``unique`` was interrupted."""
        turn = self._waiting[unique] = _Turn(work)
        self._queue.put(turn)
        turn.settled.wait()
        del self._waiting[unique]
        if not turn.is_done:
            raise OSError(errno.EINTR, os.strerror(errno.EINTR))
        if turn.error is not None:
            raise turn.error
        return turn.reply

    def interrupt(self, unique: int) -> bool:
        """End the wait for a request; return whether anything waits for it."""
        turn = self._waiting.get(unique)
        if turn is not None:
            turn.settled.set()
        return turn is not None

    def _run(self) -> None:
        while True:
            turn = self._queue.get()
            if turn.settled.is_set():
                # Interrupted before its turn.
                continue
            try:
                turn.reply = turn.work()
            except Exception as error:
                turn.error = error
            turn.is_done = True
            turn.settled.set()


class ViewFilesystem:
    """Handlers of one connection."""

    def __init__(
        self, tree: ViewTree, fuse_fd: int, problem: Callable[[str], None], *, may_wait: bool
    ) -> None:
        """Begin; ``problem`` is told in words what cannot be read, and ``may_wait`` says that reading may take long."""
        self._tree = tree
        self._problem = problem
        self._turns = _Turns() if may_wait else None
        self._lock = threading.Lock()
        self._listings: dict[int, _Listing] = {}
        self._next_handle = 1
        handlers: dict[int, Callable[[FuseRequest, memoryview], Reply]] = {
            p.LOOKUP: self._lookup,
            p.FORGET: self._forget,
            p.BATCH_FORGET: self._batch_forget,
            p.GETATTR: self._getattr,
            p.READLINK: self._readlink,
            p.OPEN: self._open,
            p.READ: self._read,
            p.RELEASE: lambda request, data: b"",
            p.OPENDIR: self._opendir,
            p.READDIR: self._readdir,
            p.READDIRPLUS: self._readdirplus,
            p.RELEASEDIR: self._releasedir,
            p.GETXATTR: self._getxattr,
            p.LISTXATTR: self._listxattr,
            p.LSEEK: self._lseek,
            p.STATFS: self._statfs,
            p.DESTROY: lambda request, data: b"",
        }
        guarded = {opcode: self._guarded(handler) for opcode, handler in handlers.items()}
        # `df` asks every file system: it waits for no reader.
        guarded[p.STATFS] = self._statfs
        if self._turns is not None:
            guarded[p.INTERRUPT] = self._interrupt
        self.session: Final = KernelSession(
            fuse_fd,
            guarded,
            refused={p.IOCTL: errno.ENOTTY, **dict.fromkeys(_CHANGES, errno.EROFS)},
            unread={},
        )

    def _guarded(
        self, handler: Callable[[FuseRequest, memoryview], Reply]
    ) -> Callable[[FuseRequest, memoryview], Reply]:
        def guarded(request: FuseRequest, data: memoryview) -> Reply:
            # Another thread reads the next request, and waits for its turn.
            self.session.hand_on()
            if self._turns is None:
                return locked(request, data)
            # A copy: after an interrupt this thread reads another request into its buffer.
            copy = memoryview(bytes(data))
            return self._turns.carry_out(request.unique, lambda: locked(request, copy))

        def locked(request: FuseRequest, data: memoryview) -> Reply:
            with self._lock:
                try:
                    return handler(request, data)
                except CiuicError as error:
                    self._problem(error.message)
                    raise OSError(errno.EIO, error.message) from None

        return guarded

    def _interrupt(self, request: FuseRequest, data: memoryview) -> Reply:
        # struct fuse_interrupt_in: the number of the request.
        (unique,) = p.FORGET_IN.unpack_from(data)
        if self._turns is not None and not self._turns.interrupt(unique):
            # Not queued yet, or answered: the kernel asks again as long as it has no answer.
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        # No answer: the interrupted request is answered.
        return None

    # -- attributes -----------------------------------------------------------------------------------

    def _attr(self, node: Node) -> bytes:
        entry = node.entry
        times = [divmod(ns, 10**9) for ns in (entry.atime_ns, entry.mtime_ns, entry.ctime_ns)]
        size, blocks = entry.size_bytes, 0
        if entry.is_dir:
            size = _BLOCK_BYTES
        elif entry.is_file and size:
            whole = -(-size // _SECTOR_BYTES)
            blocks = whole
            if not entry.content:
                blocks = 0
            elif entry.map_height:
                blocks = min(
                    whole, self._tree.data_blocks(node) * self._tree.block_size(node) // _SECTOR_BYTES
                )
        return p.ATTR.pack(
            *(node.ino, size, blocks),
            *(seconds & 0xFFFFFFFFFFFFFFFF for seconds, _ in times),
            *(nanoseconds for _, nanoseconds in times),
            entry.mode,
            # 1 for a directory says that subdirectories cannot be told from it, as on btrfs.
            _SEVERAL_NAMES if entry.link else 1,
            *(entry.uid, entry.gid, p.kernel_device(entry.rdev), _BLOCK_BYTES, 0),
        )

    def _entry(self, node: Node, name: bytes) -> bytes:
        node.lookups += 1
        of_list = name == LATEST and node.snapshot is None
        seconds = _LIST_SECONDS if of_list else _FOREVER_SECONDS
        return p.ENTRY_HEAD.pack(node.id, 0, seconds, _FOREVER_SECONDS, 0, 0) + self._attr(node)

    def _lookup(self, request: FuseRequest, data: memoryview) -> Reply:
        parent, name = self._tree.node(request.node), p.name_of(data)
        try:
            return self._entry(self._tree.child(parent, name), name)
        except OSError as error:
            if error.errno != errno.ENOENT or parent.snapshot is None:
                raise
            # The kernel remembers that there is nothing: a snapshot gets no names.
            return p.ENTRY_HEAD.pack(0, 0, _FOREVER_SECONDS, 0, 0, 0) + bytes(p.ATTR.size)

    def _forget(self, request: FuseRequest, data: memoryview) -> Reply:
        self._tree.forget(request.node, *p.FORGET_IN.unpack_from(data))
        return None

    def _batch_forget(self, request: FuseRequest, data: memoryview) -> Reply:
        count, _ = p.BATCH_FORGET_IN.unpack_from(data)
        at = p.BATCH_FORGET_IN.size
        for node, lookups in p.FORGET_ONE.iter_unpack(data[at : at + count * p.FORGET_ONE.size]):
            self._tree.forget(node, lookups)
        return None

    def _getattr(self, request: FuseRequest, data: memoryview) -> Reply:
        node = self._tree.node(request.node)
        seconds = _LIST_SECONDS if node.id == ROOT_ID else _FOREVER_SECONDS
        return p.ATTR_HEAD.pack(seconds, 0, 0) + self._attr(node)

    def _readlink(self, request: FuseRequest, data: memoryview) -> Reply:
        return self._tree.node(request.node).entry.target

    def _getxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        name = p.name_of(data[p.GETXATTR_IN.size :])
        for found, value in self._tree.xattrs(self._tree.node(request.node)):
            if found == name:
                return p.sized(size, value)
        raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))

    def _listxattr(self, request: FuseRequest, data: memoryview) -> Reply:
        size, _ = p.GETXATTR_IN.unpack_from(data)
        names = [name for name, _ in self._tree.xattrs(self._tree.node(request.node))]
        shown = shown_attributes(names, request.uid, request.pid)
        return p.sized(size, b"".join(name + b"\0" for name in shown))

    def _statfs(self, request: FuseRequest, data: memoryview) -> Reply:
        return p.KSTATFS.pack(0, 0, 0, 0, 0, _BLOCK_BYTES, 255, _BLOCK_BYTES)

    # -- content --------------------------------------------------------------------------------------

    def _open(self, request: FuseRequest, data: memoryview) -> Reply:
        flags, _ = p.OPEN_IN.unpack_from(data)
        if flags & os.O_ACCMODE != os.O_RDONLY:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        return p.OPEN_OUT.pack(0, p.FOPEN_KEEP_CACHE, 0)

    def _read(self, request: FuseRequest, data: memoryview) -> Reply:
        _, offset, size, *_ = p.READ_IN.unpack_from(data)
        return self._tree.read(self._tree.node(request.node), offset, size)

    def _lseek(self, request: FuseRequest, data: memoryview) -> Reply:
        _, offset, whence, _ = p.LSEEK_IN.unpack_from(data)
        if whence not in (os.SEEK_DATA, os.SEEK_HOLE):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        found = self._tree.seek(self._tree.node(request.node), offset, data=whence == os.SEEK_DATA)
        return p.LSEEK_OUT.pack(found)

    # -- directories ----------------------------------------------------------------------------------

    def _opendir(self, request: FuseRequest, data: memoryview) -> Reply:
        node = self._tree.node(request.node)
        handle, self._next_handle = self._next_handle, self._next_handle + 1
        dots = [ListedName(name, stat.S_IFDIR, lambda: node) for name in (b".", b"..")]
        self._listings[handle] = _Listing(lambda: chain(dots, self._tree.entries(node)))
        cached = p.FOPEN_KEEP_CACHE | p.FOPEN_CACHE_DIR if node.snapshot is not None else 0
        return p.OPEN_OUT.pack(handle, cached, 0)

    def _releasedir(self, request: FuseRequest, data: memoryview) -> Reply:
        handle, *_ = p.RELEASE_IN.unpack_from(data)
        self._listings.pop(handle, None)
        return b""

    def _readdir(self, request: FuseRequest, data: memoryview) -> Reply:
        return self._listed(request, data, lambda listed: (0, b""))

    def _readdirplus(self, request: FuseRequest, data: memoryview) -> Reply:
        def with_attributes(listed: ListedName) -> tuple[int, bytes]:
            if listed.name in (b".", b".."):
                # Without a node: the kernel makes no entry for them, and counts no lookup.
                return request.node, bytes(_ENTRY_BYTES)
            node = listed.make()
            return node.ino, self._entry(node, listed.name)

        return self._listed(request, data, with_attributes, room_before=_ENTRY_BYTES)

    def _listed(
        self,
        request: FuseRequest,
        data: memoryview,
        describe: Callable[[ListedName], tuple[int, bytes]],
        room_before: int = 0,
    ) -> bytearray:
        """Return as many names as there is room for."""
        handle, offset, size, *_ = p.READ_IN.unpack_from(data)
        listing = self._listings[handle]
        found = bytearray()
        for after, listed in listing.after(offset):
            if len(found) + room_before + p.DIRENT.size + len(listed.name) + -len(listed.name) % 8 > size:
                listing.put_back(listed)
                break
            number, before = describe(listed)
            # readdir(3) leaves out a name whose number is 0.
            found += before + p.pack_dirent(number or _UNKNOWN_INO, listed.mode, after, listed.name)
        return found
