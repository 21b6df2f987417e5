"""Operations on file content: open, read, write, truncate, allocate, sync.

Guarantees: before a block, or the end of a file, changes that a sealed epoch still needs, it is saved; a
write that fails has marked what it may have touched; reads never wait for a cut. Truncating something large
does not copy it (swaps.py)."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from typing import Final

from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.allowances import OWN_DESCRIPTORS
from ciuic.fuse_layer.namespace import backing_flags, writes
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.state import OpenFile, OverlayState
from ciuic.fuse_layer.swaps import OPEN_COPY_LIMIT_BYTES, Swaps
from ciuic.fuse_layer.times import KernelTimes
from ciuic.fuse_layer.unseen import UnseenWriters
from ciuic.fuse_layer.ways import stale

COPY_STEP_BYTES: Final = 256 << 20
"""So much of a copy_file_range(2) is done at once: a cut waits for it. The caller asks for the rest."""
_CHANGES_BLOCKS: Final = (
    syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_ZERO_RANGE | syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE
)  # fmt: skip
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE


class Data:
    """The operation group; one for each core."""

    def __init__(self, state: OverlayState, times: KernelTimes, unseen: UnseenWriters) -> None:
        self._state = state
        self._nodes = state.nodes
        self._times = times
        self._unseen = unseen
        self._swaps = Swaps(state)

    # -- handles ------------------------------------------------------------------------------------

    def open(
        self,
        node_id: int,
        flags: int,
        *,
        keeps_privileges: bool = False,
        unseen: bool = False,
        uid: int = 0,
    ) -> int:
        """Open a node; O_TRUNC is carried out here, inside the gate. Returns a handle.

        ``keeps_privileges``: the caller has CAP_FSETID, O_TRUNC does not take set-id bits away. ``unseen``: writes may
        pass us by (unseen.py); decided before anybody can write. ``uid``: who opens it, whose allowance pays for it.
        """
        node = self._nodes.get(node_id)
        truncates = bool(flags & os.O_TRUNC) and writes(flags)
        if not truncates and not unseen:
            return self._state.add_file(self._opened(node, flags, uid))
        with self._state.gate:
            file = self._opened(node, flags, uid)
            handle = self._state.add_file(file)
            try:
                if truncates:
                    self._truncate(node, file.fd, 0, keeps_privileges)
                if unseen:
                    self._keep_from_unseen(node, file.fd)
                    self._unseen.add(handle, file)
            except BaseException:
                self.release(handle)
                raise
            return handle

    def is_unseen(self, handle: int) -> None:
        """Note that a file that was just created will be written past us (unseen.py). After a cut since the creation, the sealed epoch
        needs the file as it is now: empty."""
        with self._state.gate:
            file = self._state.file(handle)
            self._keep_from_unseen(file.node, file.fd)
            self._unseen.add(handle, file)

    def _keep_from_unseen(self, node: Node, fd: int) -> None:
        """Save all that a sealed epoch needs of a file that somebody is going to change without our seeing it."""
        state, undo = self._state, self._state.undo
        if not state.must_keep(node.ino) or not state.tracked(node):
            return
        with undo.lock(node.ino):
            undo.keep_inode(os.fstat(fd), fd)
            size = undo.size_at_cut(node.ino) or 0
            unsaved = sum(count for _, count in undo.unsaved_blocks(node.ino, 0, size)) * undo.block_size
            if not unsaved or undo.clone_blocks(fd, node.ino):
                return
            if unsaved <= OPEN_COPY_LIMIT_BYTES:
                undo.keep_blocks(fd, node.ino, 0, size)
            else:
                undo.abandon("a large file was opened for writing past the overlay")

    def _opened(self, node: Node, flags: int, uid: int) -> OpenFile:
        """The node opened for this user. OSError as `Quota.check`."""
        allowances, handles = self._state.allowances, node.handles
        if handles is None or len(handles) < OWN_DESCRIPTORS or writes(flags):
            allowances.descriptors.check(uid)
            return OpenFile(node, self._open_node(node, flags), flags, uid)
        allowances.sharing.check(uid)

        def opened() -> int:
            allowances.descriptors.check(uid)
            return self._open_node(node, flags)

        return self._sharing(node, flags, uid, opened)

    def _sharing(self, node: Node, flags: int, uid: int, open_: Callable[[], int]) -> OpenFile:
        shared = self._state.allowances.shared_reader(node.id, uid, open_)
        return OpenFile(node, shared.fd, flags, uid, shared)

    def _open_node(self, node: Node, flags: int) -> int:
        want = backing_flags(flags)
        try:
            return self._nodes.open(node, want)
        except OSError as error:
            file = self._state.any_file(node)
            if error.errno != errno.ESTALE or file is None:
                raise
            return os.open(b"/proc/self/fd/%d" % file.fd, want & ~os.O_NOFOLLOW)

    def _open_inherited(self, node: Node, flags: int) -> int:
        try:
            return self._open_node(node, flags & ~(os.O_TRUNC | os.O_CREAT | os.O_EXCL | os.O_TMPFILE))
        except OSError:
            return self._state.undo.hidden.open_orphan(node.ino, backing_flags(flags & ~os.O_TMPFILE))

    def inherit(self, handle: int, node_id: int, flags: int, *, unseen: bool, uid: int = 0) -> None:
        """Open what a predecessor had open, under its handle. OSError when nothing leads there any more."""
        node = self._nodes.get(node_id)
        handles = node.handles
        if handles is None or len(handles) < OWN_DESCRIPTORS or writes(flags):
            file = OpenFile(node, self._open_inherited(node, flags), flags, uid)
        else:
            file = self._sharing(node, flags, uid, lambda: self._open_inherited(node, flags))
        if os.fstat(file.fd).st_ino != node.ino:
            raise stale()
        self._state.put_file(handle, file)
        if unseen:
            self._unseen.add(handle, file)

    def release(self, handle: int) -> None:
        """Close a handle; unknown handles are ignored (the kernel sends no second release)."""
        file = self._state.files.get(handle)
        if file is not None:
            try:
                if file.writes:
                    self._times.settle(file.node, file.fd)
            finally:  # no second release comes: kept, the handle would hold a removed file's space until the unmount
                if self._state.files.pop(handle, None) is not None:
                    self._state.quota_of(file).remove(file.uid)
                if file.unseen:
                    self._unseen.closed(handle, file)
                self._nodes.close_handle(file.node, handle)
                if file.node.handles is None:
                    self._state.undo.hidden.let_orphan_go(file.node.ino)

    def flush(self, handle: int) -> None:
        """close(2) of one descriptor: report errors that only show up now (quota, network file systems)."""
        file = self._state.file(handle)
        self._times.settle(file.node, file.fd)
        if file.writes:
            os.close(os.dup(file.fd))

    def fsync(self, handle: int, datasync: bool) -> None:
        """Durable on return: the file's content and, without ``datasync``, its attributes."""
        file = self._state.file(handle)
        self._times.settle(file.node, file.fd)
        (os.fdatasync if datasync else os.fsync)(file.fd)
        self._swaps.sync_name(file.node)

    # -- reading ------------------------------------------------------------------------------------

    def read(self, handle: int, offset: int, size: int) -> bytes:
        return os.pread(self._state.file(handle).fd, size, offset)

    def read_nowait(self, handle: int, offset: int, size: int) -> memoryview | None:
        """What ``read`` gives if it is in memory; None when that would wait for a disk, or cannot be
        known."""
        buffer = bytearray(size)
        fd = self._state.file(handle).fd
        try:
            count = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        # A short read is the end of the file, or the end of what is in memory.
        if count == size or offset + count >= os.fstat(fd).st_size:
            return memoryview(buffer)[:count]
        return None

    def lseek(self, handle: int, offset: int, whence: int) -> int:
        """SEEK_DATA and SEEK_HOLE."""
        return os.lseek(self._state.file(handle).fd, offset, whence)

    # -- writing ------------------------------------------------------------------------------------

    def write(
        self, handle: int, offset: int, data: bytes | memoryview, *, keeps_privileges: bool = False
    ) -> int:
        """Write at an offset; returns the bytes written. The blocks are marked before, so that a failure
        leaves none unmarked. ``keeps_privileges``: the writer has CAP_FSETID, set-id bits stay."""
        file = self._state.file(handle)
        state = self._state
        with state.gate:
            self._times.before_write(file.node, file.fd)
            if not state.tracked(file.node):
                return self._write_all(file.fd, offset, data)
            if state.must_keep(file.node.ino):
                with state.undo.lock(file.node.ino):
                    self._keep_range(file.node, file.fd, offset, len(data))
                    return self._write_marked(file, offset, data, keeps_privileges)
            return self._write_marked(file, offset, data, keeps_privileges)

    def _write_marked(
        self, file: OpenFile, offset: int, data: bytes | memoryview, keeps_privileges: bool
    ) -> int:
        self._mark(file.node, file.fd, offset, len(data))
        if file.node.privileged and not keeps_privileges:
            self._clear_privileges(file.node, file.fd)
        return self._write_all(file.fd, offset, data)

    def _write_all(self, fd: int, offset: int, data: bytes | memoryview) -> int:
        """All of it, or an error. A file system that fills up in the middle answers with a short count: the kernel, writing
        back its cache, would take that for done, and the undo log's space would not be asked for."""
        rest = memoryview(data)
        while True:
            written = self._state.with_space(partial(os.pwrite, fd, rest, offset))
            rest, offset = rest[written:], offset + written
            if not rest or not written:
                return len(data) - len(rest)

    def _mark(self, node: Node, fd: int, offset: int, length: int) -> None:
        """Mark what a write changes: its range and, where it begins beyond the end, the last block, which
        grows by zeros."""
        change = self._state.tracker.current.changes.get(node.ino)
        if change is None or not change.whole:
            size = os.fstat(fd).st_size
            if offset > size:
                length += offset - size
                offset = size
        self._state.tracker.mark_blocks(node, offset, length)

    def _keep_range(self, node: Node, fd: int, offset: int, length: int) -> None:
        self._state.undo.keep_inode(os.fstat(fd), fd)
        self._state.undo.keep_blocks(fd, node.ino, offset, length)

    def _clear_privileges(self, node: Node, fd: int, is_outside: Callable[[int], bool] | None = None) -> None:
        """A write takes set-user-id, and set-group-id of an executable, away (POSIX write(2)). The kernel
        leaves that to us, and with its write cache on nobody can say here whether the writer was root, who
        would keep them: they go. ``is_outside``, where it can be said of him: whether he is outside a group,
        which takes set-group-id of what the group cannot execute as well."""
        st = os.fstat(fd)
        mode = stat.S_IMODE(st.st_mode)
        cleared = mode & ~stat.S_ISUID
        if mode & stat.S_IXGRP or (mode & stat.S_ISGID and is_outside is not None and is_outside(st.st_gid)):
            cleared &= ~stat.S_ISGID
        if cleared != mode:
            self._state.keep_inode(node)
            os.fchmod(fd, cleared)
        node.privileged = bool(cleared & stat.S_ISGID)

    # -- changing the size --------------------------------------------------------------------------

    def truncate(self, node: Node, size: int, handle: int | None, *, keeps_privileges: bool) -> None:
        """Set the size. The caller is inside the gate."""
        file = self._state.file(handle) if handle is not None else self._state.any_file(node, writes=True)
        if file is not None and file.writes:
            self._truncate(node, file.fd, size, keeps_privileges)
            return
        opened = self._nodes.open(node, os.O_RDWR)
        try:
            self._truncate(node, opened, size, keeps_privileges)
        finally:
            os.close(opened)

    def _truncate(self, node: Node, fd: int, size: int, keeps_privileges: bool) -> None:
        state = self._state
        self._times.before_write(node, fd)
        if not state.tracked(node):
            _set_size(fd, size)
            return
        with state.undo.lock(node.ino):
            old_size = os.fstat(fd).st_size
            if state.must_keep(node.ino):
                state.undo.keep_inode(os.fstat(fd), fd)
                if self._swaps.truncated(node, fd, size, old_size):
                    return
                state.undo.keep_blocks(fd, node.ino, min(size, old_size), max(0, old_size - size))
            # The blocks between the ends change, and so does the last one that stays, which gets another
            # length.
            low, high = sorted((size, old_size))
            if size == 0:
                state.tracker.mark_whole(node)
            elif low != high:
                state.tracker.mark_blocks(node, low - 1 if low else 0, high - low + 1)
            else:
                state.tracker.mark_attrs(node)
            state.with_space(lambda: _set_size(fd, size))
            if node.privileged and not keeps_privileges:
                self._clear_privileges(node, fd)

    def fallocate(
        self,
        handle: int,
        mode: int,
        offset: int,
        length: int,
        *,
        keeps_privileges: bool = False,
        is_outside: Callable[[int], bool] | None = None,
    ) -> None:
        """fallocate(2), every mode that the backing file system has. ``keeps_privileges`` as in ``write``; ``is_outside``: see
        ``_clear_privileges``."""
        file = self._state.file(handle)
        node, state = file.node, self._state
        with state.gate:
            self._times.before_write(node, file.fd)
            if not state.tracked(node):
                syscalls.fallocate(file.fd, mode, offset, length)
                return
            with state.undo.lock(node.ino):
                size = os.fstat(file.fd).st_size
                reach = max(size - offset, 0) if mode & _SHIFTS_BLOCKS else length
                if state.must_keep(node.ino):
                    self._keep_range(node, file.fd, offset, reach if mode & _CHANGES_BLOCKS else 0)
                if mode & _SHIFTS_BLOCKS:
                    state.tracker.mark_whole(node)
                elif mode & _CHANGES_BLOCKS or not mode & syscalls.FALLOC_FL_KEEP_SIZE:
                    self._mark(node, file.fd, offset, length)
                else:
                    state.tracker.mark_attrs(node)
                state.with_space(lambda: syscalls.fallocate(file.fd, mode, offset, length))
                if node.privileged and not keeps_privileges:
                    self._clear_privileges(node, file.fd, is_outside)

    def copy_file_range(
        self, source: int, source_offset: int, target: int, target_offset: int, length: int
    ) -> int:
        """copy_file_range(2) between two handles: extents are shared where the backing file system can. The bytes copied,
        which may be fewer."""
        src, dst = self._state.file(source), self._state.file(target)
        node, state = dst.node, self._state
        length = min(length, COPY_STEP_BYTES)
        with state.gate:
            self._times.before_write(node, dst.fd)
            if not state.tracked(node):
                return os.copy_file_range(src.fd, dst.fd, length, source_offset, target_offset)
            with state.undo.lock(node.ino):
                if state.must_keep(node.ino):
                    self._keep_range(node, dst.fd, target_offset, length)
                self._mark(node, dst.fd, target_offset, length)
                if node.privileged:
                    self._clear_privileges(node, dst.fd)
                return state.with_space(
                    lambda: os.copy_file_range(src.fd, dst.fd, length, source_offset, target_offset)
                )

    def share(self, node_id: int, source_fd: int, source_offset: int, offset: int, length: int) -> None:
        """Give a range of a file that is open for writing the extents of another file of the backing file system. It lies within
        the file's size, which the kernel therefore knows already; what it caches of the range is the driver's to drop
        afterwards. EBADF when nobody has the file open for writing, EINVAL for another range; else as the file system says.
        """
        node, state = self._nodes.get(node_id), self._state
        file = state.any_file(node, writes=True)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        with state.gate, state.undo.lock(node.ino):
            if not 0 < length <= COPY_STEP_BYTES or offset + length > os.fstat(file.fd).st_size:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._times.before_write(node, file.fd)
            if state.tracked(node):
                if state.must_keep(node.ino):
                    self._keep_range(node, file.fd, offset, length)
                self._mark(node, file.fd, offset, length)
                if node.privileged:
                    self._clear_privileges(node, file.fd)
            state.with_space(lambda: syscalls.clone_range(source_fd, source_offset, length, file.fd, offset))


def _set_size(fd: int, size: int) -> None:
    """Set the size as truncate(2) does, which leaves it to the file system whether the size that is there moves a time."""
    os.truncate(b"/proc/self/fd/%d" % fd, size)
