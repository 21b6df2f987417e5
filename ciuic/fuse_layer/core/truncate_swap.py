"""Truncation of a large file whose end a sealed epoch needs: the inode is swapped instead of copied.

The old inode moves to the hold directory, whole, and a new one takes its name and its handles. Guarantees:
the truncation takes constant time, or a bounded copy, or the sealed epochs are given up, so the job does not
wait for seconds; where a swap fails nothing has changed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import OpenFile, OverlayState
from ciuic.system.xattrs import read_xattrs

COPY_LIMIT_BYTES: Final = 8 << 20
"""Limit of an old end that is copied in the job's own time (some milliseconds); with more the inode is
swapped."""
OPEN_COPY_LIMIT_BYTES: Final = 64 << 20
"""The same limit for a file whose inode cannot be swapped; with more the sealed epochs are given up."""


class TruncateSwaps:
    """Swaps of one overlay. All methods are called inside the gate but ``sync_name``."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._unsynced: set[int] = set()
        """Nodes whose new inode's name is not known to be on disk yet."""

    def truncated(self, node: Node, fd: int, size: int, old_size: int) -> bool:
        """Truncate by a new inode where that pays, and return whether it was done.

        The caller holds the inode's lock. After False it saves the old end and truncates.
        """
        if not self._pays(node, size, old_size):
            return False
        # A kernel that passes data through has the old inode open itself: a program would go on reading that.
        if self._state.held_by_kernel(node.id):
            self._give_up_old_end(fd, node.ino, size, old_size)
            return False
        return self._swap(node, fd, size)

    def sync_name(self, node: Node) -> None:
        """Make the name of a swapped file durable, after an fsync of the file."""
        # fsync(2) of a new inode does not make its name durable: after a power cut the name would lead to the
        # old inode.
        if node.id not in self._unsynced:
            return
        self._unsynced.discard(node.id)
        if node.parent is not None:
            directory = os.open(
                b".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._state.nodes.directory(node.parent).fd
            )
            try:
                os.fsync(directory)
            finally:
                os.close(directory)

    def _pays(self, node: Node, size: int, old_size: int) -> bool:
        runs = self._state.undo.unsaved_blocks(node.ino, size, old_size - size)
        unsaved = sum(count for _, count in runs) * self._state.undo.block_size
        return unsaved > COPY_LIMIT_BYTES and size <= COPY_LIMIT_BYTES

    def _give_up_old_end(self, fd: int, ino: int, size: int, old_size: int) -> None:
        """Clone a file that cannot be swapped, because the kernel reads its backing file; give the epochs up where that fails.

        An end within OPEN_COPY_LIMIT_BYTES is left to the caller to copy: the job does not wait for seconds.
        """
        undo = self._state.undo
        if not undo.clone_blocks(fd, ino) and old_size - size > OPEN_COPY_LIMIT_BYTES:
            undo.abandon("a large file was truncated while a program had it open")

    def _swap(self, node: Node, fd: int, size: int) -> bool:
        """Give the name a new inode with the first ``size`` bytes; the old one goes to the hold directory whole.

        Returns:
            False, and nothing has changed, where several names lead to the inode or the file system refuses.
        """
        entry = self._state.nodes.path_handle(node)
        parent, name = node.parent, entry.name
        st, nlink = self._state.undo.links(entry.stat)
        is_other = st.st_ino != node.ino or not stat.S_ISREG(st.st_mode)
        # Other names would go on leading to the old inode.
        if parent is None or name is None or nlink != 1 or is_other:
            return False
        # The name's record and the hidden link that keeps the old inode. Saving may have given the epochs up.
        self._state.keep_name(parent, entry, st)
        if not self._state.undo.active:
            return False
        try:
            new_fd, temporary = self._state.undo.create_replacement(node.ino)
        except OSError:
            # No inode or no descriptor left, which is no reason for the job's truncation to fail.
            return False
        try:
            _copy_identity(fd, st, new_fd, size)
            os.rename(temporary, name, src_dir_fd=self._state.undo.directory_fd, dst_dir_fd=entry.dir_fd)
        except OSError:
            # On a failing disk the file stays until the epochs end.
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._state.undo.directory_fd)
            os.close(new_fd)
            return False
        try:
            self._state.tracker.mark_replaced(parent, name, st.st_ino, os.fstat(new_fd).st_ino)
            open_files = [self._state.files.get(handle) for handle in tuple(node.handles or ())]
            # Once for each descriptor: readers share them, and a hundred thousand redirections would hold up
            # the job.
            by_fd = {file.fd: file for file in open_files if file is not None}
            for file in by_fd.values():
                self._redirect(file, new_fd)
            if fd not in by_fd:
                os.dup2(new_fd, fd, inheritable=False)
            self._state.nodes.replaced(node, os.fstat(new_fd))
            self._unsynced.add(node.id)
        finally:
            os.close(new_fd)
        return True

    def _redirect(self, file: OpenFile, new_fd: int) -> None:
        """Point an open handle at the new inode."""
        # By dup2, which gives the number its new meaning in one step under concurrent reads.
        flags = os.O_RDWR if file.writes else os.O_RDONLY
        try:
            reopened = os.open(b"/proc/self/fd/%d" % new_fd, flags | os.O_CLOEXEC)
        except OSError:
            # Out of descriptors, and the swap cannot be undone. dup2 needs no further one. A reader's
            # descriptor can then write, which does no harm: ``file.writes`` decides.
            os.dup2(new_fd, file.fd, inheritable=False)
            return
        try:
            os.dup2(reopened, file.fd, inheritable=False)
        finally:
            os.close(reopened)


def _copy_identity(fd: int, st: os.stat_result, new_fd: int, size: int) -> None:
    """Copy owner, mode, extended attributes and the first ``size`` bytes."""
    at = 0
    while at < size:
        piece = os.pread(fd, min(1 << 20, size - at), at)
        if not piece:
            break
        at += os.pwrite(new_fd, piece, at)
    os.ftruncate(new_fd, size)
    # Before the rest: a change of owner takes set-id bits and file capabilities away (chown(2)), and an ACL
    # changes the group bits of the mode.
    os.fchown(new_fd, st.st_uid, st.st_gid)
    for name, value in read_xattrs(fd, skip_unreadable=False).items():
        os.setxattr(new_fd, name, value)
    os.fchmod(new_fd, stat.S_IMODE(st.st_mode))
