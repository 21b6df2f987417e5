"""State that the operation groups of the overlay core share: nodes, gate, tracking, undo, open handles.

Order of every changing operation, and the reason for it:

1. enter the gate (a cut waits for us, or we for it);
2. save what a sealed epoch still needs (undo_log.py: record before change);
3. change the backing file system;
4. mark the change in the current epoch and mend the node table.

Steps 2 to 4 happen inside one stay in the gate, so an epoch never ends between a change and its mark. Marks
for content are made before the change instead: a write that fails half-way has still changed blocks.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer.state.allowances import Allowances, Quota, SharedReader, owner_of
from ciuic.fuse_layer.state.node_table import Node, NodeTable
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle, stale
from ciuic.fuse_layer.tracking.changes import Tracker
from ciuic.fuse_layer.tracking.gate import Gate
from ciuic.fuse_layer.tracking.undo_log import UndoLog

_T = TypeVar("_T")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Attr(NamedTuple):
    """Attributes of a node, as a lookup or getattr returns them."""

    node: int
    generation: int
    st: os.stat_result
    nlink: int
    """Link count without links of ours; use it in place of ``st.st_nlink``."""
    written: bool = False
    """True if a handle that can write is open: the blocks of ``st`` then change without a further request."""


class OpenFile:
    """An open handle and its backing descriptor.

    ``fd`` is readable and writable where the caller may write, and has neither O_APPEND nor O_DIRECT nor
    O_SYNC: with the kernel's write cache on, partial pages are read back through it and offsets come from the
    kernel. Only an append-only inode needs O_APPEND (``appends``); the kernel caches no write to that. The descriptor closes with the last reference to the object (a shared one: with the last object
    that has it), so a release never takes it from under another thread.
    """

    __slots__ = ("appends", "fd", "flushes", "maps", "node", "shared", "uid", "unseen", "writes")

    def __init__(self, node: Node, fd: int, flags: int, uid: int, shared: SharedReader | None = None) -> None:
        self.node = node
        self.fd = fd
        self.shared = shared
        """Owner of ``fd``, where that is not this object."""
        self.uid = uid
        """User who opened it, in whose quota it counts."""
        self.writes = flags & os.O_ACCMODE != os.O_RDONLY
        self.appends = bool(
            self.writes and flags & os.O_APPEND and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND
        )
        """True if the inode is append-only, so that ``fd`` writes at the end whatever the offset."""
        self.maps = flags & os.O_ACCMODE == os.O_RDWR
        """True if the program can map it shared and writable."""
        self.flushes = self.writes
        """True if data written through it may be in the kernel's cache alone until a flush."""
        self.unseen = False
        """True if writes through it may reach the backing file without a request (passthrough_writers.py)."""

    def __del__(self) -> None:
        if self.shared is None:
            os.close(self.fd)


class OverlayState:
    """State shared by the operation groups; the module's docstring has the order of a change."""

    def __init__(
        self,
        nodes: NodeTable,
        tracker: Tracker,
        undo: UndoLog,
        *,
        plain: bool = False,
        hidden_directories: int = 0,
    ) -> None:
        """Share these parts; ``hidden_directories`` at the top of the root are not counted in its links."""
        self._hidden_directories = hidden_directories
        self.plain = plain
        """True if nothing is tracked: every file is served as one of another file system is."""
        self.nodes = nodes
        self.gate = Gate()
        self.tracker = tracker
        self.undo = undo
        self.files: dict[int, OpenFile] = {}
        self.allowances = Allowances(owner_of(nodes.root_directory.fd))
        self.shown: Callable[[os.stat_result], os.stat_result] = lambda st: st
        """Attributes to be shown in place of those of the backing file."""
        # For counting alone: threads open files at the same time.
        self._handle_lock = threading.Lock()
        self._next_handle = 1

    # -- handles ------------------------------------------------------------------------------------

    def add_file(self, file: OpenFile) -> int:
        """Give an open file a handle, and return it."""
        handle = self.new_handle()
        self.put_file(handle, file)
        return handle

    def put_file(self, handle: int, file: OpenFile) -> None:
        """Let the handle lead to this open file from now on."""
        self.quota_of(file).add(file.uid)
        self.files[handle] = file
        self.nodes.open_handle(file.node, handle, writes=file.writes)

    def quota_of(self, file: OpenFile) -> Quota:
        """Return the quota in which the file's handle counts."""
        return self.allowances.descriptors if file.shared is None else self.allowances.sharing

    def inherit_handles(self, last: int) -> None:
        """Give no handle up to ``last`` again: those were a predecessor's."""
        with self._handle_lock:
            self._next_handle = max(self._next_handle, last + 1)

    def new_handle(self) -> int:
        """Return a handle that was never used in this session."""
        with self._handle_lock:
            handle = self._next_handle
            self._next_handle += 1
            return handle

    def file(self, handle: int) -> OpenFile:
        """Return the open file of a handle.

        Raises:
            OSError: EBADF for a handle that is not open.
        """
        file = self.files.get(handle)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return file

    def any_file(self, node: Node, *, writes: bool = False) -> OpenFile | None:
        """Return an open file of the node, of whatever process; hold the object while its descriptor is used."""
        handles = node.handles
        if handles is None or (writes and not node.writers):
            return None
        if not writes:
            # Nearly always the first will do, and a file may be open a hundred thousand times. Another thread
            # may open or close one meanwhile, which ends the iteration with RuntimeError.
            with suppress(StopIteration, RuntimeError):
                file = self.files.get(next(iter(handles)))
                if file is not None:
                    return file
        for handle in tuple(handles):
            file = self.files.get(handle)
            if file is not None and (file.writes or not writes):
                return file
        return None

    # -- attributes ---------------------------------------------------------------------------------

    def attr(self, node: Node, file: OpenFile | None = None) -> Attr:
        """Return the attributes of the node now, through an open handle or its names.

        Raises:
            OSError: ESTALE when nothing leads to the inode any more.
        """
        if file is None and node.handles is not None:
            file = self.any_file(node)
        if file is not None:
            found = file
            return self._attr_of(node, lambda: os.fstat(found.fd))
        try:
            return self._attr_of(node, self.nodes.path_handle(node).stat)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            last = self.nodes.last_attributes(node)
            if last is not None:
                return Attr(node.id, 0, last, 0)
        try:
            # Another inode may have the name at this moment: pin looks again.
            pinned = self.nodes.pin(node)
        except OSError:
            # A file removed in a predecessor's time, or a pipe that a program has open: the kernel opens
            # pipes without a request.
            orphan = self.undo.hidden.find_orphan(node.ino) if node.parent is None else None
            if orphan is None:
                raise
            pinned = orphan
        return self._attr_of(node, lambda: os.fstat(pinned.fd))

    def _attr_of(self, node: Node, read: Callable[[], os.stat_result]) -> Attr:
        st, nlink = self.undo.links(read)
        if st.st_ino != node.ino:
            raise stale()
        node.note_mode(st.st_mode)
        return Attr(node.id, 0, self.shown(st), self._visible_links(node, nlink), node.is_written)

    def _visible_links(self, node: Node, nlink: int) -> int:
        """Return the link count without the ``..`` of directories that are not shown."""
        # A count of 2 or less does not count subdirectories: btrfs directories always have 1.
        return nlink - self._hidden_directories if node is self.nodes.root and nlink > 2 else nlink

    def adopt(
        self, parent: Node, name: bytes, read: Callable[[], os.stat_result], *, count: int
    ) -> tuple[Node, Attr]:
        """Return the node under this name, made if new, with its attributes, which ``read`` reads.

        Raises:
            FileNotFoundError: the name is free.
        """
        st, nlink = self.undo.links(read)
        node = self.nodes.adopt(parent, name, st, count=count)
        return node, Attr(node.id, 0, self.shown(st), nlink, node.is_written)

    # -- saving and marking -------------------------------------------------------------------------

    def tracked(self, node: Node) -> bool:
        """Return whether changes of the node are tracked: files of another file system, mounted below, are only served."""
        return node.dev == self.nodes.device and not self.plain

    def must_keep(self, ino: int) -> bool:
        """Return whether a sealed epoch may need the inode's old state."""
        return self.undo.active and not self.tracker.is_fresh(ino)

    def keep_inode(self, node: Node) -> None:
        """Save the inode's attributes if a sealed epoch needs them."""
        if not self.must_keep(node.ino) or not self.tracked(node):
            return
        if self.undo.size_at_cut(node.ino) is not None:
            # It is saved already.
            return
        # Through a descriptor, never by name: another thread may take away the name that the inode is about
        # to be saved through.
        with self.undo.saving():
            file = self.any_file(node)
            if file is not None:
                self.undo.keep_inode(os.fstat(file.fd), file.fd)
            else:
                pinned = self.nodes.pin(node)
                self.undo.keep_inode(os.fstat(pinned.fd), b"/proc/self/fd/%d" % pinned.fd)

    def keep_name(
        self, parent: Node, entry: PathHandle, st: os.stat_result | None, *, moved: bool = False
    ) -> None:
        """Save a name's binding and its directory's attributes before the binding changes.

        Args:
            parent: directory of the name.
            entry: the name in the backing directory.
            st: attributes of the inode that the name is bound to; None where it is free.
            moved: a directory bound here goes on to exist under another name.
        """
        if not self.undo.active or not self.tracked(parent):
            return
        name = entry.name
        assert name is not None
        # The directory's times move with its names.
        if not self.tracker.is_fresh(parent.ino):
            self.keep_inode(parent)
        if st is None:
            if not self.tracker.is_fresh(parent.ino):
                self.undo.keep_absent(parent.ino, name)
            return
        if st.st_dev != self.nodes.device:
            # A mount point, which stays (EBUSY). Its number may be that of an inode of ours.
            return
        if self.tracker.is_fresh(st.st_ino):
            if not self.tracker.is_fresh(parent.ino):
                # The name was taken in this epoch: it has a record already, or was free.
                self.undo.keep_absent(parent.ino, name)
            return
        # Link count and ctime of the inode change with its names.
        self.undo.keep_inode(st, entry.path, follow=False)
        if self.tracker.is_fresh(parent.ino):
            # No sealed epoch knows this directory; what came into it from elsewhere has its record there. One
            # written here would be believed of a directory removed in this epoch whose number this one was
            # given.
            return
        if not stat.S_ISDIR(st.st_mode):
            self.undo.keep_file_name(parent.ino, entry.dir_fd, name, st)
            return
        with self.undo.saving():
            kept = Descriptor(os.open(name, _KEEP_FLAGS, dir_fd=entry.dir_fd))
            # An empty one that goes needs no descriptor: a burst of removals must not run into the limit of
            # open files. One that is not empty stays (ENOTEMPTY) or moves.
            keep_open = moved or bool(os.listdir(kept.fd))
            self.undo.keep_directory_name(parent.ino, name, st, kept if keep_open else None)

    def with_space(self, change: Callable[[], _T]) -> _T:
        """Run a change; when the file system is full, give up the undo log's space and run it once more.

        Without ciuic, files that the job removed would not take space any more: inodes that the undo log
        keeps alive must never be the reason for an ENOSPC.
        """
        # Read before the change: another thread that met the same error may have given the log up meanwhile,
        # and be about to free its space.
        took_space = self.undo.takes_space
        try:
            return change()
        except OSError as error:
            if error.errno not in _NO_SPACE or not (took_space or self.undo.takes_space):
                raise
        self.undo.abandon("the file system is full, and the job needs the space")
        self.undo.tidy()
        return change()


_KEEP_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_DIRECTORY | os.O_CLOEXEC


def is_reserved(nodes: NodeTable, parent: Node, name: bytes) -> bool:
    """Return whether the name is that of the state directory, at the top of the root."""
    return name == STATE_DIR_NAME and parent is nodes.root
