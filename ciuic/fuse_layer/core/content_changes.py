"""Operations that change the content of files: write, truncate, allocate, copy, share extents.

Guarantees: a block, or the end of a file, that a sealed epoch still needs is saved before it changes; a
change that fails has marked all that it may have touched. Truncating a large file does not copy it
(truncate_swap.py).
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable
from functools import partial
from typing import Final

from ciuic.fuse_layer.core.times import KernelTimes
from ciuic.fuse_layer.core.truncate_swap import TruncateSwaps
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import OpenFile, OverlayState
from ciuic.fuse_layer.system import syscalls

COPY_STEP_BYTES: Final = 256 << 20
"""Limit of one copy_file_range(2), because a cut waits for it. The caller asks for the rest."""
_CHANGES_BLOCKS: Final = (
    syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_ZERO_RANGE | syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE
)  # fmt: skip
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE


class ContentChanges:
    """Operations of one root that change the content of files."""

    def __init__(self, state: OverlayState, times: KernelTimes) -> None:
        self._state = state
        self._nodes = state.nodes
        self._times = times
        self.swaps = TruncateSwaps(state)

    # -- writing ------------------------------------------------------------------------------------

    def write(
        self, handle: int, offset: int, data: bytes | memoryview, *, keeps_privileges: bool = False
    ) -> int:
        """Write at an offset; return the number of bytes written.

        Args:
            handle: handle of an open file.
            offset: position in the file.
            data: bytes to write.
            keeps_privileges: the writer has CAP_FSETID, so set-id bits stay.
        """
        file = self._state.file(handle)
        state = self._state
        with state.gate:
            # Of an append-only inode: a store through a mapping, which would be written behind the end.
            if file.appends and offset != os.fstat(file.fd).st_size:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            self._times.before_write(file.node, file.fd)
            if not state.tracked(file.node):
                # Set-id bits go here too: that nothing is tracked concerns snapshots alone.
                self._drop_privileges(file.node, file.fd, keeps_privileges)
                return self._write_all(file.fd, offset, data)
            if state.must_keep(file.node.ino):
                # Saving and changing are one step: another thread must not change a block after it was found
                # saved or unsaved.
                with state.undo.lock(file.node.ino):
                    self._keep_range(file.node, file.fd, offset, len(data))
                    return self._write_marked(file, offset, data, keeps_privileges)
            return self._write_marked(file, offset, data, keeps_privileges)

    def _write_marked(
        self, file: OpenFile, offset: int, data: bytes | memoryview, keeps_privileges: bool
    ) -> int:
        # Marked before the write: one that fails half-way has changed blocks, and none may be unmarked.
        self._mark(file.node, file.fd, offset, len(data))
        self._drop_privileges(file.node, file.fd, keeps_privileges)
        return self._write_all(file.fd, offset, data)

    def _write_all(self, fd: int, offset: int, data: bytes | memoryview) -> int:
        """Write all of the data, or raise an error."""
        # A file system that fills up in the middle answers with a short count. The kernel, writing back its
        # cache, would take that for done, and the undo log's space would not be freed.
        rest = memoryview(data)
        while True:
            written = self._state.with_space(partial(os.pwrite, fd, rest, offset))
            rest, offset = rest[written:], offset + written
            if not rest or not written:
                return len(data) - len(rest)

    def _mark(self, node: Node, fd: int, offset: int, length: int) -> None:
        """Mark the blocks that a write changes: its range and, where it begins beyond the end, the last block, which grows."""
        # The size costs a system call, and does not matter for a file that counts as wholly changed: every
        # new checkpoint.
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

    def _drop_privileges(
        self,
        node: Node,
        fd: int,
        keeps_privileges: bool,
        is_outside: Callable[[int], bool] | None = None,
    ) -> None:
        """Take set-user-id, and set-group-id of an executable, away, as POSIX write(2) does.

        The kernel leaves that to the server. With its write cache on it is not known here whether the writer
        was root, who would keep the bits: they go.

        Args:
            node: node that is written.
            fd: descriptor of its file.
            keeps_privileges: the writer is known to have CAP_FSETID.
            is_outside: whether the writer is outside a group, where that is known: then set-group-id of a
                file that the group cannot execute goes as well.
        """
        if keeps_privileges or not node.privileged:
            return
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

    def truncate(
        self, node: Node, size: int, handle: int | None, *, keeps_privileges: bool, moves_times: bool
    ) -> None:
        """Set the size. The caller is inside the gate.

        Args:
            node: node to change.
            size: its new size.
            handle: handle by which the program set it, if that is open.
            keeps_privileges: as of ``write``.
            moves_times: as ftruncate(2) and O_TRUNC, the present size moves the times too; of truncate(2) the
                file system decides.
        """
        # By a descriptor that is open, if there is one: the name may be gone, or lead to another file by now.
        file = self._state.file(handle) if handle is not None else self._state.any_file(node, writes=True)
        if file is not None and file.writes:
            self.truncate_open(node, file.fd, size, keeps_privileges, moves_times=moves_times)
            return
        opened = self._nodes.open(node, os.O_RDWR)
        try:
            self.truncate_open(node, opened, size, keeps_privileges, moves_times=moves_times)
        finally:
            os.close(opened)

    def truncate_open(
        self, node: Node, fd: int, size: int, keeps_privileges: bool, *, moves_times: bool
    ) -> None:
        """Set the size through a descriptor that can write, as ``truncate``. The caller is inside the gate."""
        state = self._state
        self._times.before_write(node, fd)
        if not state.tracked(node):
            _set_size(fd, size, moves_times=moves_times)
            self._drop_privileges(node, fd, keeps_privileges)
            return
        # The old size, what is saved and the truncation are one step: a write of another thread could change
        # the size between.
        with state.undo.lock(node.ino):
            old_size = os.fstat(fd).st_size
            if state.must_keep(node.ino):
                state.undo.keep_inode(os.fstat(fd), fd)
                if self.swaps.truncated(node, fd, size, old_size):
                    # The new inode has the mode of the old one.
                    self._drop_privileges(node, fd, keeps_privileges)
                    return
                state.undo.keep_blocks(fd, node.ino, min(size, old_size), max(0, old_size - size))
            # The blocks between the two ends change, and so does the last one that stays, which gets another
            # length.
            low, high = sorted((size, old_size))
            if size == 0:
                state.tracker.mark_whole(node)
            elif low != high:
                state.tracker.mark_blocks(node, low - 1 if low else 0, high - low + 1)
            else:
                state.tracker.mark_attrs(node)
            state.with_space(lambda: _set_size(fd, size, moves_times=moves_times))
            self._drop_privileges(node, fd, keeps_privileges)

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
        """Call fallocate(2) with any mode that the backing file system has.

        Args:
            handle: handle of an open file.
            mode: FALLOC_FL bits.
            offset: start of the range.
            length: length of the range.
            keeps_privileges: as of ``write``.
            is_outside: as of ``_drop_privileges``.
        """
        file = self._state.file(handle)
        node, state = file.node, self._state
        with state.gate:
            self._times.before_write(node, file.fd)
            if not state.tracked(node):
                syscalls.fallocate(file.fd, mode, offset, length)
                self._drop_privileges(node, file.fd, keeps_privileges, is_outside)
                return
            # Under the inode's lock in any case: what is saved and marked depends on the size, which must not
            # change meanwhile.
            with state.undo.lock(node.ino):
                size = os.fstat(file.fd).st_size
                # Collapsing or inserting moves everything up to the end of the file.
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
                self._drop_privileges(node, file.fd, keeps_privileges, is_outside)

    def copy_file_range(
        self, source: int, source_offset: int, target: int, target_offset: int, length: int
    ) -> int:
        """Call copy_file_range(2) between two handles, which shares extents where the backing file system can.

        Returns:
            Number of bytes copied, which may be fewer than asked for.
        """
        src, dst = self._state.file(source), self._state.file(target)
        node, state = dst.node, self._state
        # The caller is asked to come again for the rest: inside the gate a cut waits for the whole copy.
        length = min(length, COPY_STEP_BYTES)
        with state.gate:
            self._times.before_write(node, dst.fd)
            if not state.tracked(node):
                self._drop_privileges(node, dst.fd, keeps_privileges=False)
                return os.copy_file_range(src.fd, dst.fd, length, source_offset, target_offset)
            with state.undo.lock(node.ino):
                if state.must_keep(node.ino):
                    self._keep_range(node, dst.fd, target_offset, length)
                self._mark(node, dst.fd, target_offset, length)
                self._drop_privileges(node, dst.fd, keeps_privileges=False)
                return state.with_space(
                    lambda: os.copy_file_range(src.fd, dst.fd, length, source_offset, target_offset)
                )

    def share(self, node_id: int, source_fd: int, source_offset: int, offset: int, length: int) -> None:
        """Give a range of a file that is open for writing the extents of another file of the backing file system.

        The range lies within the file's size, so that the kernel's size stays right. The driver drops the
        kernel's cache of the range afterwards.

        Raises:
            OSError: EBADF when no program has the file open for writing, EINVAL for a range beyond its size;
                otherwise as the file system refuses it.
        """
        node, state = self._nodes.get(node_id), self._state
        file = state.any_file(node, writes=True)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        # FUSE passes no ioctl on that shares extents (EXDEV, EOPNOTSUPP): a restore in place asks the worker
        # over its control socket instead. Inside the gate and marked like a write, so that a cut sees all of
        # it or nothing.
        with state.gate, state.undo.lock(node.ino):
            if not 0 < length <= COPY_STEP_BYTES or offset + length > os.fstat(file.fd).st_size:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._times.before_write(node, file.fd)
            if state.tracked(node):
                if state.must_keep(node.ino):
                    self._keep_range(node, file.fd, offset, length)
                self._mark(node, file.fd, offset, length)
            self._drop_privileges(node, file.fd, keeps_privileges=False)
            state.with_space(lambda: syscalls.clone_range(source_fd, source_offset, length, file.fd, offset))


def _set_size(fd: int, size: int, *, moves_times: bool) -> None:
    if moves_times:
        os.ftruncate(fd, size)
    else:
        # By a path, the file system decides whether setting the present size moves a time.
        os.truncate(b"/proc/self/fd/%d" % fd, size)
