"""Operations on the content and the attributes of files: open, read, write, truncate, copy, sync, stat, xattrs.

Guarantees: reads pass no gate; a write is whole, or an error; set-id bits go with the content that they were given
for. What a file system that tracks changes does before content changes hangs on the hooks of `Files`
(overlay_hooks.py), and before attributes change, in whatever way, on those of the state; here they do nothing.
Times are set to the nanosecond, and one that is not given stays as it is. The kernel has checked permissions
(default_permissions).

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
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Final, NamedTuple

from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.passthrough_state import OWN_DESCRIPTORS, Attr, OpenFile, PassthroughState
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.path_handles import Descriptor
from ciuic.fuse_layer.system.pipes import Pipe
from ciuic.system.mountinfo import HIDDEN_MOUNTS, MountTable, border_names

_LOCK_STRIPES: Final = 64
# linux/magic.h
_EXT4: Final = 0xEF53
# Free space with which a small change finds no room in its inode, and not on the disk. Far more than file systems keep
# for themselves, and than is used up between the error and the look.
_ROOM_BYTES: Final = 1 << 30
NO_LOCK: Final = nullcontext()
_COPY_STEP_BYTES: Final = 256 << 20
"""Limit of one copy_file_range(2), because a cut waits for it. The caller asks for the rest."""
# Offsets come from the kernel. O_APPEND would ignore them: with the kernel's write cache on, 21,000 appended
# bytes became 29,040 on disk, hidden until the page cache was dropped. O_DIRECT would impose the alignment of
# the backing file system on requests. Creating and truncating are steps of the core's own (names.py).
_BACKING_FLAGS_DROPPED = (
    os.O_APPEND | os.O_DIRECT | os.O_SYNC | os.O_DSYNC | os.O_TRUNC | os.O_EXCL | os.O_CREAT
)


class KernelTimes:
    """Keeper of backing files' mtimes at the kernel's.

    ``active`` is false for drivers without the write cache.
    """

    def __init__(self, state: PassthroughState, *, active: bool) -> None:
        self._state = state
        self.active: Final = active
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    def _lock(self, node: Node) -> threading.Lock:
        """Return the lock under which a file's time is set and its note made."""
        # One step, because operations on one file run in several threads. It is taken before an inode's
        # stripe of the undo log.
        return self._locks[node.id % _LOCK_STRIPES]

    def before_write(self, node: Node, fd: int) -> None:
        """Note the file's time before a write or a change of size."""
        if self.active and node.kept_mtime_ns is None:
            self.before_change(node, os.fstat(fd).st_mtime_ns)

    def before_change(self, node: Node, stands_ns: int) -> None:
        """Note the time that a file shows before it is changed."""
        if self.active:
            with self._lock(node):
                # Another thread may have made the note since: it is older, and stays.
                if node.kept_mtime_ns is None:
                    node.kept_mtime_ns = stands_ns

    def note_times(self, node: Node, mtime_ns: int | None, set_times: Callable[[], None]) -> None:
        """Give the backing file, by ``set_times``, the time that the kernel sent (None: the clock's), and note it."""
        with self._lock(node):
            # In one step with the note: a close between the two put the older time back (0.7 ms off what
            # programs saw).
            set_times()
            node.kept_mtime_ns = mtime_ns if self.active and node.kind == stat.S_IFREG else None

    def settle(self, node: Node, fd: int) -> None:
        """Give a file that is being flushed the kernel's time: every SETATTR of it has arrived."""
        if node.kept_mtime_ns is not None and os.fstat(fd).st_mtime_ns != node.kept_mtime_ns:
            with self._state.gate:
                self.put_back(node, fd)

    def put_back(self, node: Node, path: bytes | int) -> None:
        """Give a file the kernel's time, as ``settle``, inside the gate; ``path`` is to be followed, or a descriptor."""
        with self._lock(node):
            kept_ns = node.kept_mtime_ns
            if kept_ns is None:
                return
            try:
                if os.stat(path).st_mtime_ns == kept_ns:
                    return
                self._state.keep_inode(node)
                self._state.mark_attributes(node)
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

    def __init__(self, state: PassthroughState, times: KernelTimes) -> None:
        self._state = state
        self._nodes = state.nodes
        self._times = times
        self.before_waiting: Callable[[], None] = lambda: None
        """Called before an open that waits for a removal; a driver lets other requests go on."""

    # -- hooks: called inside the gate ----------------------------------------------------------------

    def _content_lock(self, node: Node) -> AbstractContextManager[Any]:
        """Return the lock under which content is saved and changed in one step."""
        return NO_LOCK

    def _before_content(self, node: Node, fd: int, offset: int, length: int) -> None:
        """Called under the content lock before bytes of the file change."""

    def _before_fallocate(self, node: Node, fd: int, mode: int, offset: int, length: int) -> None:
        """Called under the content lock before an fallocate(2)."""

    def _truncated(self, node: Node, fd: int, size: int) -> bool:
        """Called under the content lock before a change of size; return True where it was carried out in another way."""
        return False

    def _opened_unseen(self, handle: int, file: OpenFile) -> None:
        """Called before a program is given a handle whose writes may pass the worker by."""

    def _opened_seen(self, handle: int, file: OpenFile) -> None:
        """Called, outside the gate, when the writes of a handle that was opened as unseen come to the worker after all."""

    def _closed_unseen(self, handle: int, file: OpenFile) -> None:
        """Called, outside the gate, when a handle that is noted as unseen is released."""

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
            return self._opened_handle(node, flags, uid)[1]
        # An open that truncates or may be written past the worker is a change: a cut comes before or after
        # all of it.
        with self._state.gate:
            file, handle = self._opened_handle(node, flags, uid)
            try:
                if truncates and file.writes:
                    self.truncate_open(node, file.fd, 0, keeps_privileges, moves_times=True)
                elif truncates:
                    # Linux empties the file of a read-only open as well: open(2) leaves it unspecified,
                    # open_namei() does it.
                    self.truncate(node, 0, None, keeps_privileges=keeps_privileges, moves_times=True)
                if unseen:
                    self._opened_unseen(handle, file)
            # The kernel is given no handle, and so releases none.
            except BaseException:
                self.release(handle)
                raise
            return handle

    def is_unseen(self, handle: int) -> None:
        """Note that a file that was just created will be written past the worker (passthrough_writers.py)."""
        with self._state.gate:
            self._opened_unseen(handle, self._state.file(handle))

    def _opened_handle(self, node: Node, flags: int, uid: int) -> tuple[OpenFile, int]:
        """Open the node for a user, and give the file a handle with which a successor can go on."""
        while True:
            if node.parent is None and node.handles is None:
                self._before_nameless(node)
            file = self._opened(node, flags, uid)
            handle = self._state.add_file(file)
            # Looked at after the handle is there, as a removal looks at the handles after it is in `leaving`: one of the
            # two sees the other. Without that a removal in another thread kept no hidden link for this handle.
            leaving = self._state.leaving.get(node.id)
            if leaving is None:
                return file, handle
            self.before_waiting()
            with leaving:
                pass
            if node.parent is not None or self._state.hidden.has_orphan(node.ino):
                return file, handle
            # As if the removal had come first.
            self.release(handle)

    def _before_nameless(self, node: Node) -> None:
        """Called before the first open of an inode without a known name."""

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

    def has(self, handle: int) -> bool:
        """Return whether a handle leads to an open file; one that was inherited may not."""
        return handle in self._state.files

    def descriptor(self, handle: int) -> int:
        """Return the backing descriptor of an open handle; it closes with the handle."""
        return self._state.file(handle).fd

    def descriptor_to_read(self, handle: int, offset: int, size: int) -> int:
        """Return the backing descriptor, from which a range is going to be read in place of `read`. May wait as `read`."""
        return self._state.file(handle).fd

    def appends(self, handle: int) -> bool:
        """Return whether the handle's inode is append-only, so that the kernel must not cache writes to it."""
        return self._state.file(handle).appends

    def keeps_cache(self, handle: int) -> bool:
        """Return whether what the kernel has cached of the handle's inode is true, and may stay at an open."""
        # Linux drops the pages of an asynchronous O_DIRECT write before the write alone: what another program reads until
        # the write is carried out stays in the cache, stale (xfstests generic/451).
        return not self._state.file(handle).node.written_past_cache

    def needs_no_flush(self, handle: int) -> None:
        """Note that no data written through the handle waits in the kernel's cache."""
        self._state.file(handle).flushes = False

    def is_seen(self, handle: int) -> None:
        """Note that a handle was opened as unseen, and that its writes come to the worker after all."""
        self._opened_seen(handle, self._state.file(handle))

    def release(self, handle: int) -> None:
        """Close a handle; unknown handles are ignored."""
        file = self._state.files.get(handle)
        if file is not None:
            try:
                if file.writes:
                    self._times.settle(file.node, file.fd)
                    if (events := self._state.events) is not None:
                        for _, name in file.node.names():
                            events.closed(name)
            finally:
                # The kernel sends no second release: a handle that stayed would keep a removed file's space
                # until the unmount.
                if self._state.files.pop(handle, None) is not None:
                    self._state.quota_of(file).remove(file.uid)
                if file.unseen:
                    self._closed_unseen(handle, file)
                self._nodes.close_handle(file.node, handle)
                if file.maps:
                    # A shared mapping changes times and blocks without a request.
                    self._state.recent.changed(file.node)
                if file.node.handles is None:
                    self._state.hidden.let_orphan_go(file.node.ino)

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
        self, handle: int, offset: int, data: bytes | memoryview | Pipe, *, keeps_privileges: bool = False
    ) -> int:
        """Write at an offset; return the number of bytes written.

        Args:
            handle: handle of an open file.
            offset: position in the file.
            data: bytes to write; what a pipe holds leaves it.
            keeps_privileges: the writer has CAP_FSETID, so set-id bits stay.
        """
        file = self._state.file(handle)
        with self._state.gate:
            # Of an append-only inode: a store through a mapping, which would be written behind the end.
            if file.appends and offset != os.fstat(file.fd).st_size:
                raise OSError(errno.EPERM, os.strerror(errno.EPERM))
            self._times.before_write(file.node, file.fd)
            return self._write(file, offset, data, keeps_privileges)

    def _write(
        self, file: OpenFile, offset: int, data: bytes | memoryview | Pipe, keeps_privileges: bool
    ) -> int:
        """Write all of the data inside the gate, or raise an error."""
        # Set-id bits go whether or not the file is tracked: that concerns snapshots alone.
        if file.node.privileged:
            self._drop_privileges(file.node, file.fd, keeps_privileges)
        # A file system that fills up in the middle answers with a short count. The kernel, writing back its
        # cache, would take that for done, and the undo log's space would not be freed.
        fd, size, done = file.fd, len(data), 0
        while True:
            if isinstance(data, Pipe):
                put = partial(data.pwrite_to, fd, offset + done)
            else:
                put = partial(os.pwrite, fd, memoryview(data)[done:], offset + done)
            written = self._state.with_space(put)
            done += written
            if done == size or not written:
                return done

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
        self._times.before_write(node, fd)
        with self._content_lock(node):
            if not self._truncated(node, fd, size):
                self._state.with_space_of(node, lambda: _set_size(fd, size, moves_times=moves_times))
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
            with self._content_lock(node):
                self._before_fallocate(node, file.fd, mode, offset, length)
                state.with_space_of(
                    node,
                    lambda: syscalls.fallocate(file.fd, mode, offset, length),
                    is_vain=lambda: _exceeds_disk(file.fd, mode, length),
                )
                self._drop_privileges(node, file.fd, keeps_privileges, is_outside)
        state.recent.changed(node)

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
        length = min(length, _COPY_STEP_BYTES)
        with state.gate:
            self._times.before_write(node, dst.fd)
            with self._content_lock(node):
                self._before_content(node, dst.fd, target_offset, length)
                self._drop_privileges(node, dst.fd, keeps_privileges=False)
                return state.with_space_of(
                    node, lambda: os.copy_file_range(src.fd, dst.fd, length, source_offset, target_offset)
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
        with state.gate, self._content_lock(node):
            if not 0 < length <= _COPY_STEP_BYTES or offset + length > os.fstat(file.fd).st_size:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            self._times.before_write(node, file.fd)
            self._before_content(node, file.fd, offset, length)
            self._drop_privileges(node, file.fd, keeps_privileges=False)
            state.with_space(lambda: syscalls.clone_range(source_fd, source_offset, length, file.fd, offset))


def _set_size(fd: int, size: int, *, moves_times: bool) -> None:
    if moves_times:
        os.ftruncate(fd, size)
    else:
        # By a path, the file system decides whether setting the present size moves a time.
        os.truncate(b"/proc/self/fd/%d" % fd, size)


_GROUP_PRIVILEGE = stat.S_ISGID | stat.S_IXGRP
"""Bits of a set-group-id privilege: without group execution set-group-id is none, and marks mandatory locking
on some systems."""
DEFAULT_ACL = b"system.posix_acl_default"


class SetAttr(NamedTuple):
    """Attributes to change; None leaves a field. ``…_now`` asks for the file system's own clock."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None
    atime_now: bool = False
    mtime_now: bool = False
    keeps_privileges: bool = False
    """True if the caller has CAP_FSETID, so that a new size does not take set-id bits away."""
    chown_by: int | None = None
    """User who called chown(2) with -1 for both: by root and the owner that takes set-id bits away."""

    @property
    def sets_times(self) -> bool:
        """True if a time is to be set."""
        return self.atime_ns is not None or self.mtime_ns is not None or self.atime_now or self.mtime_now


class Attributes:
    """Operations of one root on attributes."""

    def __init__(self, state: PassthroughState, files: Files, times: KernelTimes) -> None:
        self._state = state
        self._nodes = state.nodes
        self._files = files
        self._times = times
        self._mounts = MountTable()

    def getattr(self, node_id: int, handle: int | None = None) -> Attr:
        """Return a node's attributes, through ``handle`` where that is open."""
        node = self._nodes.get(node_id)
        file = self._state.files.get(handle) if handle is not None else None
        return self._state.attr(node, file)

    def statx(self, node_id: int, handle: int | None, mask: int) -> tuple[Attr, syscalls.Statx]:
        """Return a node's attributes with those that only statx(2) tells: birth time and attribute flags."""
        node = self._nodes.get(node_id)
        file = self._state.files.get(handle) if handle is not None else None
        attr = self._state.attr(node, file)
        path, _keep = self._pinned(node)
        return attr, syscalls.statx(path, mask, follow=True)

    def setattr(self, node_id: int, change: SetAttr, handle: int | None = None) -> Attr:
        """Change attributes, and return the new ones."""
        # In the order size, owner, mode, times: a change of owner clears set-id bits that the same request
        # may set again.
        node = self._nodes.get(node_id)
        moves_times = handle is not None
        with self._state.gate:
            if handle is not None and handle not in self._state.files:
                # A predecessor's handle that could not be opened again (Files.has): the names
                # serve as well.
                handle = None
            if handle is None and change.size is None and self._nodes.is_freed(node):
                # The kernel writes the times of a removed file back. An error would be reported by the next
                # syncfs(2).
                return self._state.attr(node)
            self._state.keep_inode(node)
            if change.size is not None:
                self._files.truncate(
                    *(node, change.size, handle),
                    keeps_privileges=change.keeps_privileges,
                    moves_times=moves_times,
                )
            # Before the change: one that fails in the middle has changed something.
            self._state.mark_attributes(node)
            path, pinned = self._pinned(node)
            if change.uid is not None or change.gid is not None:
                os.chown(
                    path,
                    -1 if change.uid is None else change.uid,
                    -1 if change.gid is None else change.gid,
                )
            if change.chown_by is not None:
                _take_privileges(path, change.chown_by)
            if change.mode is not None:
                os.chmod(path, change.mode & 0o7777)
            if change.sets_times:
                set_times = partial(_set_times, path, change)
                if change.mtime_ns is not None or change.mtime_now:
                    self._times.note_times(node, change.mtime_ns, set_times)
                else:
                    set_times()
            # A kernel that moves the time beside the size says so in the same request: a size alone moves no
            # time.
            if change.size is not None and node.kept_mtime_ns is not None:
                self._times.put_back(node, path)
            return self._state.attr(node, pinned)

    def _pinned(self, node: Node) -> tuple[bytes | int, OpenFile | Descriptor]:
        """Return what leads to the node's inode whatever happens to its names, and what keeps it valid.

        It is the descriptor of an open file, which spares the system calls a walk through /proc, or a path that is to be
        followed.
        """
        # chmod(2) follows symbolic links. Through a name, a symbolic link put in the file's place at the
        # right moment would make this process, which is root's, change the mode of any file of the host.
        file = self._state.any_file(node)
        if file is not None:
            return file.fd, file
        pin = self._nodes.pin(node)
        return b"/proc/self/fd/%d" % pin.fd, pin

    # -- extended attributes ------------------------------------------------------------------------

    def getxattr(self, node_id: int, name: bytes) -> bytes:
        """Return an extended attribute."""
        node = self._nodes.get(node_id)
        if name == HIDDEN_MOUNTS:
            return self._borders_in(node)
        path, _keep = self._pinned(node)
        return os.getxattr(path, name)

    def _borders_in(self, node: Node) -> bytes:
        """Return the names in a directory at which another file system or subvolume begins, each ended by a NUL."""
        if node.kind != stat.S_IFDIR:
            raise OSError(errno.ENODATA, os.strerror(errno.ENODATA))
        pin = self._nodes.pin(node)
        fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=pin.fd)
        try:
            return b"".join(name + b"\0" for name in border_names(fd, self._mounts.read()))
        finally:
            os.close(fd)

    def listxattr(self, node_id: int) -> list[bytes]:
        """Return the names of extended attributes."""
        path, _keep = self._pinned(self._nodes.get(node_id))
        return [os.fsencode(name) for name in os.listxattr(path)]

    def _is_inode_full(self, path: bytes | int) -> bool:
        """Return whether ENOSPC of setxattr(2) tells of the inode alone, whose room for attributes nothing on the disk mends."""
        # ext4 answers it so, and an exhausted quota with EDQUOT. XFS answers ENOSPC for a project's quota, to which what the
        # undo log keeps counts, and btrfs where its metadata lacks space.
        if syscalls.file_system_type(self._nodes.root_directory.fd) != _EXT4:
            return False
        st = os.statvfs(path)
        return st.f_bavail * st.f_frsize >= _ROOM_BYTES and st.f_favail > 0

    def setxattr(
        self, node_id: int, name: bytes, value: bytes, flags: int, *, drops_group_bit: bool = False
    ) -> None:
        """Set an extended attribute.

        Args:
            node_id: node to change.
            name: name of the attribute.
            value: its value.
            flags: 0, XATTR_CREATE or XATTR_REPLACE.
            drops_group_bit: the caller is outside the file's group and sets its ACL, which takes the
                set-group-id bit away as chmod(2) would. The file system sees root as the caller.
        """
        node = self._nodes.get(node_id)
        with self._state.gate:
            self._state.keep_inode(node)
            path, _keep = self._pinned(node)
            self._state.mark_attributes(node)
            # A large value takes blocks of its own: on a full disk the undo log's space is given up for it.
            self._state.with_space_of(
                node, lambda: os.setxattr(path, name, value, flags), is_vain=lambda: self._is_inode_full(path)
            )
            # No file can be created in the directory meanwhile: the kernel holds its lock.
            if name == DEFAULT_ACL:
                self._nodes.without_default_acl.discard(node_id)
            # By hand, because the backing file system sees root set the ACL and keeps the bit (xfstests
            # generic/375).
            if drops_group_bit:
                os.chmod(path, stat.S_IMODE(os.stat(path).st_mode) & ~stat.S_ISGID)
        self._state.recent.changed(node)

    def removexattr(self, node_id: int, name: bytes) -> None:
        """Remove an extended attribute."""
        node = self._nodes.get(node_id)
        with self._state.gate:
            self._state.keep_inode(node)
            path, _keep = self._pinned(node)
            self._state.mark_attributes(node)
            os.removexattr(path, name)
        self._state.recent.changed(node)


def _take_privileges(path: bytes | int, uid: int) -> None:
    """Carry out chown(2) with -1 for both as ``uid``: take set-id bits away where the caller is root or the owner."""
    # The kernel sends the same request before a write by another user. Nothing is refused: the write itself
    # takes the bits away.
    st = os.stat(path)
    loses = st.st_mode & stat.S_ISUID or st.st_mode & _GROUP_PRIVILEGE == _GROUP_PRIVILEGE
    if loses and uid in (0, st.st_uid) and not stat.S_ISDIR(st.st_mode):
        os.chown(path, -1, -1)


def _set_times(path: bytes | int, change: SetAttr) -> None:
    syscalls.utimensat(
        path,
        change.atime_ns,
        change.mtime_ns,
        atime_now=change.atime_now,
        mtime_now=change.mtime_now,
        follow=True,
    )


def _exceeds_disk(fd: int, mode: int, length: int) -> bool:
    """Return whether the whole file system of an open file is smaller than what fallocate(2) would add to it at the least."""
    if mode not in (0, syscalls.FALLOC_FL_KEEP_SIZE):
        return False
    # Of a file, because of a directory with a quota of its own statvfs(3) tells that. What the file has may lie in the range.
    st = os.fstatvfs(fd)
    return length - os.fstat(fd).st_blocks * 512 > st.f_blocks * st.f_frsize
