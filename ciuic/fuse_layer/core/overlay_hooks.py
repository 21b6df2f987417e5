"""What the tracked overlay adds to operations on content and names, on the hooks of files.py and names.py.

Guarantees: a block, or the end of a file, that a sealed epoch still needs is saved before it changes, and a file
that is going to be written past the worker before it is opened; a change that fails has marked all that it may
have touched. A free name that is made, and all that a change of names moves, is saved before where a sealed epoch
needs it (the hooks of the state), and marked after it, inside the same stay in the gate. Files that come and go
within an epoch leave no mark.

Truncating a large file whose end a sealed epoch needs does not copy it: the old inode moves to the hold directory,
whole, and a new one takes its name and its handles (`TruncateSwaps`). The truncation takes constant time, or a
bounded copy, or the sealed epochs are given up, so the job does not wait for seconds; where a swap fails nothing
has changed.

Free space of the backing file system: what the undo log's end would free, and when it is given up for it.

statfs counts space and inodes that giving up the pending epochs would free as free. Only space that really becomes
free counts: an inode that lives on under another name, or that the job has open, would take its space without us
too. The figures are read from the disk, because a name of a held inode may come and go unseen; with many of them
they may be a second old, so that a program that calls statfs(2) in a loop does not have them read each time.

A write that comes to the worker and finds the disk full is repeated once the log is given up
(OverlayState.with_space). A write that the kernel carries past the worker is not: its ENOSPC goes to the job,
which has removed an old checkpoint and writes the next one. Guarantees: no file is opened past the worker
while a sealed epoch awaits capture and the disk is nearly full; where such files are open already, an epoch
whose undo log holds a quarter of the free space, or more, is given up once less than ``NEAR_FULL_BYTES`` are
free.
"""

from __future__ import annotations

import os
import stat
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any, Final, NamedTuple

import structlog

from ciuic.fuse_layer.core.files import NO_LOCK, Files, KernelTimes, backing_flags, writes
from ciuic.fuse_layer.core.names import Names, Target
from ciuic.fuse_layer.core.passthrough_writers import UnseenWriters
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.state.passthrough_state import OWN_DESCRIPTORS, OpenFile
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle, stale
from ciuic.fuse_layer.system.pipes import Pipe
from ciuic.fuse_layer.tracking.changes import ABSENT
from ciuic.fuse_layer.tracking.undo_log import UndoLog
from ciuic.fuse_layer.undo_format import HOLD_DIR
from ciuic.system.disk import read_xattrs

log = structlog.get_logger(__name__)

# Each costs an lstat(2): from so many on the figures are kept for a while.
_MANY_INODES = 1000
_STALE_SECONDS = 1.0
# Unit of st_blocks, whatever the block size of the file system (stat(2)).
_SECTOR_BYTES = 512
NEAR_FULL_BYTES: Final = 1 << 30
"""Free space below which the disk counts as nearly full: the output of writers at 5 GB/s in four looks. A
busy host runs the thread late, and removing a large file takes time."""
_LOOK_SECONDS: Final = 0.05
_MIN_RECLAIMED_BYTES: Final = 1 << 20
"""Space of the undo log below which a snapshot is not given up, because a job on a nearly full disk changes
small files all the time."""
_MIN_RECLAIMED_PART: Final = 4
"""Divisor of the free space: the log is given up when it holds at least such a part. A writer that fills the
rest meets this threshold on its way. Without it every snapshot of a small disk was given up, for the
reflinked copy of one long file."""
_LAST_BYTES: Final = 64 << 20
_LAST_PART: Final = 16
"""Free space, in bytes and as a part of the file system, below which the log's space is given back however
little it is."""


class ReclaimableSpace(NamedTuple):
    """Space and inodes that would become free."""

    size_bytes: int = 0
    inodes: int = 0


class SpaceEstimator:
    """Estimator for one root. Thread-safe: two threads may both read the disk, and both are right."""

    def __init__(self, undo: UndoLog, open_inodes: Callable[[], set[int]]) -> None:
        self._undo = undo
        self._open_inodes = open_inodes
        self._known = (0.0, ReclaimableSpace())

    def room(self) -> ReclaimableSpace:
        """Return the figures, up to a second old where much is held; zeros when nothing is pending.

        Never raises.
        """
        if not self._undo.active:
            return ReclaimableSpace()
        until, room = self._known
        if time.monotonic() < until:
            return room
        room = self._look()
        if room.inodes > _MANY_INODES:
            self._known = (time.monotonic() + _STALE_SECONDS, room)
        return room

    def _look(self) -> ReclaimableSpace:
        """Read the figures from the disk. Inodes that cannot be read do not count."""
        directory = self._undo.directory_fd
        try:
            own = os.listdir(directory)
        except OSError:
            return ReclaimableSpace()
        open_inodes = self._open_inodes()
        size_bytes = inodes = 0
        for name in [*own, *(f"{HOLD_DIR}/{ino}" for ino in list(self._undo.hidden.held))]:
            try:
                facts = os.lstat(name, dir_fd=directory)
            except OSError:
                # Removed meanwhile.
                continue
            # Another link, or an open handle of the job, keeps the inode: its space would not become free.
            if facts.st_nlink == 1 and not stat.S_ISDIR(facts.st_mode) and facts.st_ino not in open_inodes:
                size_bytes += facts.st_blocks * _SECTOR_BYTES
                inodes += 1
        return ReclaimableSpace(size_bytes, inodes)


class RoomForUnseen:
    """Watch over the free space of one root's unseen writers. Thread-safe."""

    def __init__(self, state: OverlayState, space: SpaceEstimator, unseen: UnseenWriters) -> None:
        self._state = state
        self._space = space
        self._unseen = unseen
        self._wake = threading.Event()

    def is_short(self) -> bool:
        """Return whether a file that is opened now must not pass the worker by: an epoch awaits capture on a nearly full disk."""
        # Without a sealed epoch the log takes nothing, and no system call is spent on the question.
        if not self._state.undo.takes_space:
            return False
        self.wake()
        try:
            return self._free_bytes() < NEAR_FULL_BYTES
        except OSError:
            # The open of a plain file does not ask for free space, and so does not fail for it.
            return False

    def wake(self) -> None:
        """Have the thread look, because an epoch was sealed or a file is going to be opened while one awaits capture."""
        self._wake.set()

    def look(self) -> None:
        """Give up the undo log where unseen writers will lack its space. The caller is inside the gate.

        Errors are logged: a removal that the file system has carried out must not be reported to the job as failed.
        """
        try:
            if self._is_needed():
                self._give_up_if_short()
        except OSError as error:
            log.warning("room_not_looked_at", error=str(error))

    def _give_up_if_short(self) -> None:
        room, kept = os.statvfs(self._state.undo.directory_fd), self._space.room().size_bytes
        free, last = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize // _LAST_PART
        is_worth_it = kept >= max(_MIN_RECLAIMED_BYTES, free // _MIN_RECLAIMED_PART)
        if free < NEAR_FULL_BYTES and (is_worth_it or (kept and free < min(_LAST_BYTES, last))):
            self._state.undo.abandon(
                "the file system is nearly full, and the job writes files past the overlay"
            )
            self._state.undo.tidy()

    def start(self) -> None:
        """Look repeatedly in a background thread, while an epoch awaits capture and unseen writers have files open."""
        # A predecessor may have left both.
        self.wake()
        threading.Thread(target=self._run, name="room", daemon=True).start()

    def _run(self) -> None:
        while self._wake.wait():
            self._wake.clear()
            while self._is_needed():
                # No cut may be made while the undo log is tidied (UndoLog.tidy).
                with self._state.gate:
                    self.look()
                time.sleep(_LOOK_SECONDS)
                self._wake.clear()

    def _is_needed(self) -> bool:
        return self._state.undo.active and self._unseen.any_open

    def _free_bytes(self) -> int:
        room = os.statvfs(self._state.undo.directory_fd)
        return room.f_bavail * room.f_frsize


COPY_LIMIT_BYTES: Final = 8 << 20
"""Limit of an old end that is copied in the job's own time (some milliseconds); with more the inode is
swapped."""
OPEN_COPY_LIMIT_BYTES: Final = 64 << 20
"""The same limit for a file whose inode cannot be swapped; with more the sealed epochs are given up."""
_CHANGES_BLOCKS: Final = (
    syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_ZERO_RANGE | syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE
)  # fmt: skip
_SHIFTS_BLOCKS: Final = syscalls.FALLOC_FL_COLLAPSE_RANGE | syscalls.FALLOC_FL_INSERT_RANGE


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
        st, nlink = self._state.links(entry.stat)
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
        new = os.fstat(new_fd)
        try:
            _copy_identity(fd, st, new_fd, size)
            self._state.nodes.replacing(node, new)
            os.rename(temporary, name, src_dir_fd=self._state.undo.directory_fd, dst_dir_fd=entry.dir_fd)
        except OSError:
            self._state.nodes.not_replaced(node, new)
            # On a failing disk the file stays until the epochs end.
            with suppress(OSError):
                os.unlink(temporary, dir_fd=self._state.undo.directory_fd)
            os.close(new_fd)
            return False
        try:
            self._state.tracker.mark_replaced(parent, name, st.st_ino, new.st_ino)
            open_files = [self._state.files.get(handle) for handle in tuple(node.handles or ())]
            # Once for each descriptor: readers share them, and a hundred thousand redirections would hold up
            # the job.
            by_fd = {file.fd: file for file in open_files if file is not None}
            for file in by_fd.values():
                self._redirect(file, new_fd)
            if fd not in by_fd:
                os.dup2(new_fd, fd, inheritable=False)
            self._state.nodes.replaced(node, new)
            self._unsynced.add(node.id)
            # The rename has moved its times, which a truncation does not do.
            self._state.recent.changed(parent)
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


class OverlayFiles(Files):
    """Operations of one overlay on open files: content is saved for sealed epochs, and marked, before it changes."""

    _state: OverlayState

    def __init__(self, state: OverlayState, times: KernelTimes, unseen: UnseenWriters) -> None:
        super().__init__(state, times)
        self._unseen = unseen
        self.swaps = TruncateSwaps(state)

    def _before_nameless(self, node: Node) -> None:
        # By an O_PATH descriptor, or by a path that was walked just before the name was removed or replaced. An inode
        # without a link cannot be given one, and ends with this process: a copy takes its place.
        hidden = self._state.hidden
        if self._nodes.journal is None or node.kind != stat.S_IFREG:
            return
        # Best effort: without a successor's way to the file it is open all the same.
        with suppress(OSError):
            pinned = self._nodes.pin(node)
            path = b"/proc/self/fd/%d" % pinned.fd
            hidden.keep_orphan(node.ino, path, None, follow=True)
            st = os.fstat(pinned.fd)
            if hidden.has_orphan(node.ino) or st.st_size > COPY_LIMIT_BYTES:
                return
            source = os.open(path, os.O_RDONLY)
            try:
                flags = os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC
                copy = Descriptor(os.open(b".", flags, 0o600, dir_fd=self._nodes.root_directory.fd))
                _copy_identity(source, st, copy.fd, st.st_size)
            finally:
                os.close(source)
            os.utime(copy.fd, ns=(st.st_atime_ns, st.st_mtime_ns))
            made = os.fstat(copy.fd)
            hidden.keep_orphan(made.st_ino, b"/proc/self/fd/%d" % copy.fd, None, follow=True)
            self._nodes.replaced(node, made, copy)

    def _open_inherited(self, node: Node, flags: int) -> int:
        # The predecessor has carried out O_TRUNC and O_CREAT: only the descriptor is needed again.
        try:
            return self._open_node(node, flags & ~(os.O_TRUNC | os.O_CREAT | os.O_EXCL | os.O_TMPFILE))
        except OSError:
            return self._state.hidden.open_orphan(node.ino, backing_flags(flags & ~os.O_TMPFILE))

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

    def fsync(self, handle: int, datasync: bool) -> None:
        """Make the content durable, and the name of an inode that a truncation has put there."""
        node = self._state.file(handle).node
        super().fsync(handle, datasync)
        self.swaps.sync_name(node)

    # -- hooks ----------------------------------------------------------------------------------------

    def _content_lock(self, node: Node) -> AbstractContextManager[Any]:
        # Saving and changing are one step: another thread must not change a block after it was found saved or
        # unsaved. What is saved and marked also depends on the size, which must not change meanwhile.
        return self._state.undo.lock(node.ino) if self._state.tracked(node) else NO_LOCK

    def _write(
        self, file: OpenFile, offset: int, data: bytes | memoryview | Pipe, keeps_privileges: bool
    ) -> int:
        # Not by super(), which costs a write 1 % of its time.
        state, node = self._state, file.node
        if not state.tracked(node):
            return Files._write(self, file, offset, data, keeps_privileges)
        if state.must_keep(node.ino):
            with state.undo.lock(node.ino):
                self._keep_range(node, file.fd, offset, len(data))
                self._mark(node, file.fd, offset, len(data))
                return Files._write(self, file, offset, data, keeps_privileges)
        # Marked before the write: one that fails half-way has changed blocks, and none may be unmarked.
        self._mark(node, file.fd, offset, len(data))
        return Files._write(self, file, offset, data, keeps_privileges)

    def _before_content(self, node: Node, fd: int, offset: int, length: int) -> None:
        state = self._state
        if state.tracked(node):
            if state.must_keep(node.ino):
                self._keep_range(node, fd, offset, length)
            self._mark(node, fd, offset, length)

    def _before_fallocate(self, node: Node, fd: int, mode: int, offset: int, length: int) -> None:
        state = self._state
        if not state.tracked(node):
            return
        size = os.fstat(fd).st_size
        # Collapsing or inserting moves everything up to the end of the file.
        reach = max(size - offset, 0) if mode & _SHIFTS_BLOCKS else length
        if state.must_keep(node.ino):
            self._keep_range(node, fd, offset, reach if mode & _CHANGES_BLOCKS else 0)
        if mode & _SHIFTS_BLOCKS:
            state.tracker.mark_whole(node)
        elif mode & _CHANGES_BLOCKS or not mode & syscalls.FALLOC_FL_KEEP_SIZE:
            self._mark(node, fd, offset, length)
        else:
            state.tracker.mark_attrs(node)

    def _truncated(self, node: Node, fd: int, size: int) -> bool:
        state = self._state
        if not state.tracked(node):
            return False
        old_size = os.fstat(fd).st_size
        if state.must_keep(node.ino):
            state.undo.keep_inode(os.fstat(fd), fd)
            # The new inode has the mode of the old one.
            if self.swaps.truncated(node, fd, size, old_size):
                return True
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
        return False

    def _opened_unseen(self, handle: int, file: OpenFile) -> None:
        # After a cut since its creation, the sealed epoch needs a new file as it is now: empty.
        self._keep_from_unseen(file.node, file.fd)
        self._unseen.add(handle, file)

    def _opened_seen(self, handle: int, file: OpenFile) -> None:
        self._unseen.discard(handle, file)

    def _closed_unseen(self, handle: int, file: OpenFile) -> None:
        self._unseen.closed(handle, file)

    # -- saving and marking -----------------------------------------------------------------------------

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


class OverlayNames(Names):
    """Operations of one overlay on names: bindings are saved for sealed epochs, and marked."""

    _state: OverlayState

    def __init__(self, state: OverlayState, *, after_freeing: Callable[[], None] = lambda: None) -> None:
        """Work on this state.

        Args:
            state: state of the overlay.
            after_freeing: called inside the gate, after a removal that would have freed much space if the undo
                log had not kept it.
        """
        super().__init__(state)
        self._after_freeing = after_freeing

    def _before_making(self, parent: Node, entry: PathHandle) -> None:
        # Where the name is taken nothing will change: EEXIST.
        if _lstat_or_none(entry) is None:
            self._state.keep_name(parent, entry, None)

    def _is_new(self, parent: Node, entry: PathHandle) -> bool:
        # The kernel creates names that it believes to be free. Whether it is right matters before the
        # creation only where the binding has to be saved: one system call less otherwise.
        if not self._state.undo.active:
            return True
        if _lstat_or_none(entry) is not None:
            return False
        self._state.keep_name(parent, entry, None)
        return True

    def _made(self, parent: Node, name: bytes, node: Node) -> None:
        if self._state.tracked(parent):
            self._state.tracker.mark_created(parent, name, node.ino)
            if (events := self._state.events) is not None:
                events.appeared(name)

    def _linked(self, node: Node, parent: Node, name: bytes, *, nameless: bool) -> None:
        if not self._state.tracked(parent):
            return
        if (events := self._state.events) is not None:
            events.appeared(name)
        tracker = self._state.tracker
        if nameless:
            # It is in no snapshot yet.
            tracker.mark_created(parent, name, node.ino)
        else:
            tracker.mark_name(parent, name, ABSENT)
        # One name becomes several: each entry in the snapshot changes its form.
        for known_parent, known_name in node.names():
            tracker.mark_touched(known_parent, known_name)
        tracker.mark_attrs(node)

    def _removed(self, parent: Node, name: bytes, target: Target) -> None:
        if not self._state.tracked(parent):
            return
        # No epoch that was cut has such a file, so that its content goes with its last name.
        if (
            (events := self._state.events) is not None
            and target.nlink <= 1
            and stat.S_ISREG(target.st.st_mode)
            and self._state.tracker.is_fresh(target.st.st_ino)
        ):
            events.lost(name)
        self._state.tracker.mark_removed(parent, name, target.st.st_ino)

    def _lost_name(self, target: Target, *, gone: bool) -> None:
        if target.frees_much:
            self._after_freeing()
        if target.st.st_dev != self._nodes.device:
            return
        tracker = self._state.tracker
        # Temporary files that come and go within an epoch leave no trace.
        if gone and tracker.is_fresh(target.st.st_ino):
            tracker.forget_created(target.st.st_ino)
            return
        if target.node is not None:
            # Of several names one may remain: its entry in the snapshot changes its form.
            for known_parent, known_name in target.node.names():
                tracker.mark_touched(known_parent, known_name)
        self._mark_touched(target)

    def _moved(
        self,
        parent: Node,
        name: bytes,
        source: Target,
        new_parent: Node,
        new_name: bytes,
        replaced: Target | None,
    ) -> None:
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_removed(parent, name, source.st.st_ino)
        tracker.mark_name(new_parent, new_name, replaced.st.st_ino if replaced is not None else ABSENT)
        self._mark_touched(source)
        if (events := self._state.events) is not None:
            events.renamed(new_name)

    def _exchanged(self, one: tuple[Node, bytes, Target], other: tuple[Node, bytes, Target]) -> None:
        (parent, name, here), (new_parent, new_name, there) = one, other
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_name(parent, name, here.st.st_ino)
        tracker.mark_name(new_parent, new_name, there.st.st_ino)
        self._mark_touched(here)
        self._mark_touched(there)
        if (events := self._state.events) is not None:
            events.renamed(name)
            events.renamed(new_name)

    def _mark_touched(self, target: Target) -> None:
        """Mark an inode whose link count or ctime has moved."""
        node = target.node
        if node is not None and node.parent is not None:
            self._state.tracker.mark_attrs(node)
        else:
            self._state.tracker.mark_ino(target.st.st_ino)


def _lstat_or_none(entry: PathHandle) -> os.stat_result | None:
    """Return the attributes of what a name leads to; None when it is free."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None
