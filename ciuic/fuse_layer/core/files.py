"""Operations on the content of files: open, read, write, truncate, allocate, copy, sync, release.

Guarantees: reads never wait for a cut; a block, or the end of a file, that a sealed epoch still needs is saved
before it changes, and a file that is going to be written past the worker before it is opened; a change that
fails has marked all that it may have touched.

Truncating a large file whose end a sealed epoch needs does not copy it: the old inode moves to the hold directory,
whole, and a new one takes its name and its handles (`TruncateSwaps`). The truncation takes constant time, or a
bounded copy, or the sealed epochs are given up, so the job does not wait for seconds; where a swap fails nothing
has changed.

Modification times are the kernel's (`KernelTimes`): with its write cache on, only the kernel knows when a program
wrote. It then sets a regular file's mtime itself, at the program's write(2), shows that to all programs,
ignores the server's, and sends it by SETATTR before the file is flushed. It sends nothing when the time did
not move: two writes within one tick of its coarse clock. Our own later write to the backing file moves that
file's mtime to another moment. Without care the two differ by milliseconds (measured: `stat` through the
mount .844882276, of the backing file .848488475), so a snapshot would restore another time than programs saw,
and a remount would change it under them. So each node notes the kernel's time (``Node.kept_mtime_ns``): the time
before our first write, then whatever the kernel sends. At a flush (close(2), which precedes every cut) the
backing file gets that time again where it has another. The note stays: if a flush or a SETATTR removed it, it
would be missing for a write of another thread that is under way at that moment and moves the time after it.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Final

from ciuic.fuse_layer.core.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.state.allowances import OWN_DESCRIPTORS
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.overlay_state import OpenFile, OverlayState
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.path_handles import stale
from ciuic.system.xattrs import read_xattrs

COPY_LIMIT_BYTES: Final = 8 << 20
"""Limit of an old end that is copied in the job's own time (some milliseconds); with more the inode is
swapped."""
OPEN_COPY_LIMIT_BYTES: Final = 64 << 20
"""The same limit for a file whose inode cannot be swapped; with more the sealed epochs are given up."""
_LOCK_STRIPES: Final = 64
COPY_STEP_BYTES: Final = 256 << 20
"""Limit of one copy_file_range(2), because a cut waits for it. The caller asks for the rest."""
_CHANGES_BLOCKS: Final = (
    syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_ZERO_RANGE | syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE
)  # fmt: skip
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE
# Offsets come from the kernel. O_APPEND would ignore them: with the kernel's write cache on, 21,000 appended
# bytes became 29,040 on disk, hidden until the page cache was dropped. O_DIRECT would impose the alignment of
# the backing file system on requests. Creating and truncating are steps of the core's own (names.py).
_BACKING_FLAGS_DROPPED = (
    os.O_APPEND | os.O_DIRECT | os.O_SYNC | os.O_DSYNC | os.O_TRUNC | os.O_EXCL | os.O_CREAT
)


class TruncateSwaps:
    """Swaps of one overlay. All methods are called inside the gate but ``sync_name``."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self.held_by_kernel: Callable[[int], bool] = lambda node_id: False
        """True if the kernel itself has the node's backing file open, so that it must not be given another
        inode; set by a driver that lets it."""
        self._unsynced: set[int] = set()
        """Nodes whose new inode's name is not known to be on disk yet."""

    def truncated(self, node: Node, fd: int, size: int, old_size: int) -> bool:
        """Truncate by a new inode where that pays, and return whether it was done.

        The caller holds the inode's lock. After False it saves the old end and truncates.
        """
        if not self._pays(node, size, old_size):
            return False
        # A kernel that passes data through has the old inode open itself: a program would go on reading that.
        if self.held_by_kernel(node.id):
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


class KernelTimes:
    """Keeper of backing files' mtimes at the kernel's.

    ``active`` is false for drivers without the write cache.
    """

    def __init__(self, state: OverlayState, *, active: bool) -> None:
        self._state = state
        self._active = active
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    def _lock(self, node: Node) -> threading.Lock:
        """Return the lock under which a file's time is set and its note made."""
        # One step, because operations on one file run in several threads. It is taken before an inode's
        # stripe of the undo log.
        return self._locks[node.id % _LOCK_STRIPES]

    def before_write(self, node: Node, fd: int) -> None:
        """Note the file's time before a write or a change of size."""
        if self._active and node.kept_mtime_ns is None:
            stands_ns = os.fstat(fd).st_mtime_ns
            with self._lock(node):
                # Another thread may have made the note since: it is older, and stays.
                if node.kept_mtime_ns is None:
                    node.kept_mtime_ns = stands_ns

    def told(self, node: Node, mtime_ns: int | None, set_times: Callable[[], None]) -> None:
        """Give the backing file, by ``set_times``, the time that the kernel sent (None: the clock's), and note it."""
        with self._lock(node):
            # In one step with the note: a close between the two put the older time back (0.7 ms off what
            # programs saw).
            set_times()
            node.kept_mtime_ns = mtime_ns if self._active and node.kind == stat.S_IFREG else None

    def settle(self, node: Node, fd: int) -> None:
        """Give a file that is being flushed the kernel's time: every SETATTR of it has arrived."""
        if node.kept_mtime_ns is not None and os.fstat(fd).st_mtime_ns != node.kept_mtime_ns:
            with self._state.gate:
                self.put_back(node, b"/proc/self/fd/%d" % fd)

    def put_back(self, node: Node, path: bytes) -> None:
        """Give a file the kernel's time, as ``settle``, inside the gate; ``path`` is to be followed."""
        with self._lock(node):
            kept_ns = node.kept_mtime_ns
            if kept_ns is None:
                return
            try:
                if os.stat(path).st_mtime_ns == kept_ns:
                    return
                self._state.keep_inode(node)
                if self._state.tracked(node):
                    self._state.tracker.mark_attrs(node)
                syscalls.utimensat(path, None, kept_ns, follow=True)
            except OSError:
                # On a plain file close(2) sets no time, so a file system that has become read-only, or fails,
                # must not make it fail here: the time of our write stays.
                node.kept_mtime_ns = None


def backing_flags(flags: int) -> int:
    """Return the flags of the backing descriptor for an open with ``flags`` (OpenFile says why)."""
    if flags & os.O_ACCMODE == os.O_WRONLY:
        # The kernel's write cache reads a page back before a part of it is written: EBADF otherwise.
        flags = flags & ~os.O_ACCMODE | os.O_RDWR
    return (flags & ~_BACKING_FLAGS_DROPPED) | os.O_CLOEXEC | os.O_NOFOLLOW


def writes(flags: int) -> bool:
    """Return whether an open with ``flags`` can write."""
    return flags & os.O_ACCMODE != os.O_RDONLY


class Files:
    """Operations of one root on open files and their content."""

    def __init__(self, state: OverlayState, times: KernelTimes, unseen: UnseenWriters) -> None:
        self._state = state
        self._nodes = state.nodes
        self._times = times
        self._unseen = unseen
        self.swaps = TruncateSwaps(state)

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
                    self.truncate_open(node, file.fd, 0, keeps_privileges, moves_times=True)
                elif truncates:
                    # Linux empties the file of a read-only open as well: open(2) leaves it unspecified,
                    # open_namei() does it.
                    self.truncate(node, 0, None, keeps_privileges=keeps_privileges, moves_times=True)
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

    def has(self, handle: int) -> bool:
        """Return whether a handle leads to an open file; one that was inherited may not."""
        return handle in self._state.files

    def descriptor(self, handle: int) -> int:
        """Return the backing descriptor of an open handle; it closes with the handle."""
        return self._state.file(handle).fd

    def appends(self, handle: int) -> bool:
        """Return whether the handle's inode is append-only, so that the kernel must not cache writes to it."""
        return self._state.file(handle).appends

    def needs_no_flush(self, handle: int) -> None:
        """Note that no data written through the handle waits in the kernel's cache."""
        self._state.file(handle).flushes = False

    def is_seen(self, handle: int) -> None:
        """Note that a handle was opened as unseen, and that its writes come to the worker after all."""
        self._unseen.discard(handle, self._state.file(handle))

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
        self.swaps.sync_name(file.node)

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
