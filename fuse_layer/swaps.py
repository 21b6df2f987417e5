"""Truncating something large of which a sealed epoch needs the end: not copied, but swapped.

The old inode moves to the hold directory, whole, and a new one takes its name, its handles included. Guarantees: constant time, or
a bounded copy, or the sealed epochs are given up: the job does not wait for seconds; where a swap fails nothing has changed.
"""

from __future__ import annotations

import os
import stat
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.state import OpenFile, OverlayState
from ciuic.xattrs import read_xattrs

COPY_LIMIT_BYTES: Final = 8 << 20
"""Up to here an old end is copied in the job's own time (some milliseconds); beyond it the inode is
swapped."""
OPEN_COPY_LIMIT_BYTES: Final = 64 << 20
"""The same for a file whose inode cannot be swapped."""


class Swaps:
    """Of one overlay. All methods are called inside the gate but ``sync_name``."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._unsynced: set[int] = set()
        """Nodes whose new inode's name is not known to be on disk yet."""

    def truncated(self, node: Node, fd: int, size: int, old_size: int) -> bool:
        """Whether the file has its new size already, by way of a new inode. The caller holds the inode's lock, and otherwise saves
        the old end and truncates."""
        if not self._pays(node, size, old_size):
            return False
        if self._state.held_by_kernel(node.id):
            self._give_up_old_end(fd, node.ino, size, old_size)
            return False
        return self._swap(node, fd, size)

    def sync_name(self, node: Node) -> None:
        """After an fsync of the file: so that the name that it has leads to what was synced."""
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
        """What cannot be swapped, because a program reads the backing file past us, is cloned; or else copied, up to a
        limit; or else the sealed epochs are given up: the job does not wait for seconds."""
        undo = self._state.undo
        if not undo.clone_blocks(fd, ino) and old_size - size > OPEN_COPY_LIMIT_BYTES:
            undo.abandon("a large file was truncated while a program had it open")

    def _swap(self, node: Node, fd: int, size: int) -> bool:
        """Give the name a new inode with the first ``size`` bytes, in constant time; the old one goes to the
        hold directory whole.

        False, and nothing changed, where several names lead to the inode or the file system refuses; the
        caller copies then."""
        way = self._state.nodes.way(node)
        parent, name = node.parent, way.name
        st, nlink = self._state.undo.links(way.stat)
        is_other = st.st_ino != node.ino or not stat.S_ISREG(st.st_mode)
        if parent is None or name is None or nlink != 1 or is_other:
            return False
        self._state.keep_name(parent, way, st)
        if not self._state.undo.active:
            return False
        try:
            new_fd, temporary = self._state.undo.create_replacement(node.ino)
        except OSError:  # no inode left, no descriptor: no reason for the job's truncation to fail
            return False
        try:
            _copy_identity(fd, st, new_fd, size)
            os.rename(temporary, name, src_dir_fd=self._state.undo.directory_fd, dst_dir_fd=way.dir_fd)
        except OSError:
            with suppress(OSError):  # a failing disk; emptied when the epochs end
                os.unlink(temporary, dir_fd=self._state.undo.directory_fd)
            os.close(new_fd)
            return False
        try:
            self._state.tracker.mark_replaced(parent, name, st.st_ino, os.fstat(new_fd).st_ino)
            open_files = [self._state.files.get(handle) for handle in tuple(node.handles or ())]
            # By descriptor: readers share them, and redirecting one a hundred thousand times would hold up the job.
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
        """Point an open handle at the new inode: dup2 changes what the number means in one step, under
        concurrent reads."""
        flags = os.O_RDWR if file.writes else os.O_RDONLY
        try:
            reopened = os.open(b"/proc/self/fd/%d" % new_fd, flags | os.O_CLOEXEC)
        except OSError:
            # Out of descriptors, and there is no way back. dup2 needs no further one; that a reader's descriptor can now
            # write does no harm: ``file.writes`` decides.
            os.dup2(new_fd, file.fd, inheritable=False)
            return
        try:
            os.dup2(reopened, file.fd, inheritable=False)
        finally:
            os.close(reopened)


def _copy_identity(fd: int, st: os.stat_result, new_fd: int, size: int) -> None:
    """Owner, mode, extended attributes, times and the first ``size`` bytes."""
    at = 0
    while at < size:
        piece = os.pread(fd, min(1 << 20, size - at), at)
        if not piece:
            break
        at += os.pwrite(new_fd, piece, at)
    os.ftruncate(new_fd, size)
    os.fchown(new_fd, st.st_uid, st.st_gid)
    for name, value in read_xattrs(fd, skip_unreadable=False).items():
        os.setxattr(new_fd, name, value)
    os.fchmod(new_fd, stat.S_IMODE(st.st_mode))
