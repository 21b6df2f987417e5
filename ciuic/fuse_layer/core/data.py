"""Operations on open files: open, read, seek, flush, sync, release.

Guarantees: reads never wait for a cut; a file that is going to be written past the worker is saved first, as
far as a sealed epoch needs it.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ciuic.fuse_layer.core.content_changes import ContentChanges
from ciuic.fuse_layer.core.open_flags import backing_flags, writes
from ciuic.fuse_layer.core.times import KernelTimes
from ciuic.fuse_layer.core.truncate_swap import OPEN_COPY_LIMIT_BYTES
from ciuic.fuse_layer.cut.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.state.allowances import OWN_DESCRIPTORS
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import OpenFile, OverlayState
from ciuic.fuse_layer.system.path_handles import stale


class Data:
    """Operations of one root on open files."""

    def __init__(
        self, state: OverlayState, times: KernelTimes, unseen: UnseenWriters, changes: ContentChanges
    ) -> None:
        self._state = state
        self._nodes = state.nodes
        self._times = times
        self._unseen = unseen
        self._changes = changes

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
        """Open a node and return its handle; O_TRUNC is carried out here, inside the gate.

        Args:
            node_id: node to open.
            flags: flags of open(2).
            keeps_privileges: the caller has CAP_FSETID, so O_TRUNC does not take set-id bits away.
            unseen: writes may pass the worker by (passthrough_writers.py); decided before any program can
                write.
            uid: user who opens it, in whose quota the handle counts.
        """
        node = self._nodes.get(node_id)
        truncates = bool(flags & os.O_TRUNC)
        if not truncates and not unseen:
            return self._state.add_file(self._opened(node, flags, uid))
        # An open that truncates or may be written past the worker is a change: a cut comes before or after
        # all of it.
        with self._state.gate:
            file = self._opened(node, flags, uid)
            handle = self._state.add_file(file)
            try:
                if truncates and file.writes:
                    self._changes.truncate_open(node, file.fd, 0, keeps_privileges, moves_times=True)
                elif truncates:
                    # Linux empties the file of a read-only open as well: open(2) leaves it unspecified,
                    # open_namei() does it.
                    self._changes.truncate(node, 0, None, keeps_privileges=keeps_privileges, moves_times=True)
                if unseen:
                    self._keep_from_unseen(node, file.fd)
                    self._unseen.add(handle, file)
            # The kernel is given no handle, and so releases none.
            except BaseException:
                self.release(handle)
                raise
            return handle

    def is_unseen(self, handle: int) -> None:
        """Note that a file that was just created will be written past the worker (passthrough_writers.py)."""
        with self._state.gate:
            # After a cut since the creation, the sealed epoch needs the file as it is now: empty.
            file = self._state.file(handle)
            self._keep_from_unseen(file.node, file.fd)
            self._unseen.add(handle, file)

    def _keep_from_unseen(self, node: Node, fd: int) -> None:
        """Save all that a sealed epoch needs of a file that a program is going to write past the worker."""
        state, undo = self._state, self._state.undo
        if not state.must_keep(node.ino) or not state.tracked(node):
            return
        # Before the open is answered: from then on a store through a mapping changes blocks without a
        # request. A clone takes constant time; without one the copy is bounded, and beyond it the epoch is
        # given up: the job waits for neither.
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
        """Open the node for a user.

        Raises:
            OSError: as of `Quota.check`.
        """
        # One reader with 19,470 opens of one file took all descriptors of a worker: from the 17th handle on
        # readers share.
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
            if error.errno == errno.EPERM and writes(flags) and flags & os.O_APPEND:
                # Refused without O_APPEND: an append-only inode (chattr +a).
                return self._nodes.open(node, want | os.O_APPEND)
            # No name leads to the inode any more: open it anew through a handle that a program has.
            file = self._state.any_file(node)
            if error.errno != errno.ESTALE or file is None:
                raise
            return os.open(b"/proc/self/fd/%d" % file.fd, want & ~os.O_NOFOLLOW)

    def _open_inherited(self, node: Node, flags: int) -> int:
        # The predecessor has carried out O_TRUNC and O_CREAT: only the descriptor is needed again.
        try:
            return self._open_node(node, flags & ~(os.O_TRUNC | os.O_CREAT | os.O_EXCL | os.O_TMPFILE))
        except OSError:
            return self._state.undo.hidden.open_orphan(node.ino, backing_flags(flags & ~os.O_TMPFILE))

    def inherit(self, handle: int, node_id: int, flags: int, *, unseen: bool, uid: int = 0) -> None:
        """Open a file that a predecessor had open, under its handle.

        Raises:
            OSError: nothing leads to the file any more.
        """
        node = self._nodes.get(node_id)
        handles = node.handles
        if handles is None or len(handles) < OWN_DESCRIPTORS or writes(flags):
            file = OpenFile(node, self._open_inherited(node, flags), flags, uid)
        else:
            file = self._sharing(node, flags, uid, lambda: self._open_inherited(node, flags))
        # The name may lead to another file by now, which must not be written to under this handle.
        st = os.fstat(file.fd)
        if st.st_ino != node.ino:
            raise stale()
        # A file that was removed in the predecessor's time was opened without its node's attributes.
        node.note_mode(st.st_mode)
        self._state.put_file(handle, file)
        if unseen:
            self._unseen.add(handle, file)

    def release(self, handle: int) -> None:
        """Close a handle; unknown handles are ignored."""
        file = self._state.files.get(handle)
        if file is not None:
            try:
                if file.writes:
                    self._times.settle(file.node, file.fd)
            finally:
                # The kernel sends no second release: a handle that stayed would keep a removed file's space
                # until the unmount.
                if self._state.files.pop(handle, None) is not None:
                    self._state.quota_of(file).remove(file.uid)
                if file.unseen:
                    self._unseen.closed(handle, file)
                self._nodes.close_handle(file.node, handle)
                if file.node.handles is None:
                    self._state.undo.hidden.let_orphan_go(file.node.ino)

    def flush(self, handle: int) -> None:
        """Carry out close(2) of one descriptor."""
        file = self._state.file(handle)
        self._times.settle(file.node, file.fd)
        if file.writes:
            # close(2) of a duplicate reports errors that show up only now (quota, network file systems).
            os.close(os.dup(file.fd))

    def fsync(self, handle: int, datasync: bool) -> None:
        """Make the file's content and, without ``datasync``, its attributes durable."""
        file = self._state.file(handle)
        # Before the sync, because it sets the time that the kernel shows.
        self._times.settle(file.node, file.fd)
        (os.fdatasync if datasync else os.fsync)(file.fd)
        self._changes.swaps.sync_name(file.node)

    # -- reading ------------------------------------------------------------------------------------

    def read(self, handle: int, offset: int, size: int) -> bytes:
        """Read; may wait for the disk."""
        return os.pread(self._state.file(handle).fd, size, offset)

    def read_nowait(self, handle: int, offset: int, size: int) -> memoryview | None:
        """Read data that is in memory; return None when that would wait for a disk, or cannot be known."""
        buffer = bytearray(size)
        fd = self._state.file(handle).fd
        try:
            count = os.preadv(fd, [buffer], offset, os.RWF_NOWAIT)
        except OSError as error:
            # EAGAIN: the data are not in memory. The others: a file system or kernel without RWF_NOWAIT.
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP, errno.ENOSYS):
                return None
            raise
        # A short read ends at the end of the file, or where the page cache ends.
        if count == size or offset + count >= os.fstat(fd).st_size:
            return memoryview(buffer)[:count]
        return None

    def lseek(self, handle: int, offset: int, whence: int) -> int:
        """Find data or a hole (SEEK_DATA, SEEK_HOLE)."""
        return os.lseek(self._state.file(handle).fd, offset, whence)
