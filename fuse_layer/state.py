"""What the operation groups of the overlay core share: nodes, gate, tracking, undo, open handles.

Order of every changing operation, and the reason for it:

1. enter the gate (a cut waits for us, or we for it);
2. save what a sealed epoch still needs (undo.py: record before change);
3. change the backing file system;
4. mark the change in the current epoch and mend the node table.

Steps 2 to 4 happen inside one stay in the gate, so an epoch never ends between a change and its mark. Marks
for content are made before the change instead: a write that fails half-way has still changed blocks."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple, TypeVar

from ciuic import STATE_DIR_NAME
from ciuic.fuse_layer.allowances import Allowances, SharedReader, owner_of
from ciuic.fuse_layer.gate import Gate
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.nodes import NodeTable
from ciuic.fuse_layer.quota import Quota
from ciuic.fuse_layer.tracking import Tracker
from ciuic.fuse_layer.undo import UndoLog
from ciuic.fuse_layer.ways import Descriptor, Way, stale

_T = TypeVar("_T")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class Attr(NamedTuple):
    """What a lookup or getattr answers."""

    node: int
    generation: int
    st: os.stat_result
    nlink: int
    """Link count without links of ours; use it in place of ``st.st_nlink``."""
    written: bool = False
    """A handle that can write is open: what ``st`` says of blocks will change without a further request."""


class OpenFile:
    """An open handle. ``fd`` is readable and writable where the caller may write, and has neither O_APPEND
    nor O_DIRECT nor O_SYNC: with the kernel's write cache on, partial pages are read back through it and
    offsets come from the kernel. The descriptor closes when the last user lets go of the object (a shared one: of
    the last object that has it), so a release never takes it from under another thread."""

    __slots__ = ("fd", "flushes", "maps", "node", "shared", "uid", "unseen", "writes")

    def __init__(self, node: Node, fd: int, flags: int, uid: int, shared: SharedReader | None = None) -> None:
        self.node = node
        self.fd = fd
        self.shared = shared
        """What ``fd`` belongs to, where that is not this object."""
        self.uid = uid
        """Who opened it, and pays for it."""
        self.writes = flags & os.O_ACCMODE != os.O_RDONLY
        self.maps = flags & os.O_ACCMODE == os.O_RDWR
        """Whether the program can map it shared and writable."""
        self.flushes = self.writes
        """What was written through it may be in the kernel's cache only, until a flush."""
        self.unseen = False
        """Writes through it may reach the backing file without a request (unseen.py)."""

    def __del__(self) -> None:
        if self.shared is None:
            os.close(self.fd)


class OverlayState:
    """Shared by the operation groups; see the module's docstring."""

    def __init__(
        self,
        nodes: NodeTable,
        tracker: Tracker,
        undo: UndoLog,
        *,
        plain: bool = False,
        hidden_directories: int = 0,
    ) -> None:
        """``hidden_directories``: directories at the top of the root that the overlay does not show."""
        self._hidden_directories = hidden_directories
        self.plain = plain
        """Nothing is tracked: every file is served as one of another file system is."""
        self.nodes = nodes
        self.gate = Gate()
        self.tracker = tracker
        self.undo = undo
        self.files: dict[int, OpenFile] = {}
        self.allowances = Allowances(owner_of(nodes.root_directory.fd))
        self.held_by_kernel: Callable[[int], bool] = lambda node_id: False
        """Whether the kernel itself has the node's backing file open: it must not be given another inode."""
        self._handle_lock = threading.Lock()
        self._next_handle = 1

    # -- handles ------------------------------------------------------------------------------------

    def add_file(self, file: OpenFile) -> int:
        handle = self.new_handle()
        self.put_file(handle, file)
        return handle

    def put_file(self, handle: int, file: OpenFile) -> None:
        """The handle leads to this open file from now on."""
        self.quota_of(file).add(file.uid)
        self.files[handle] = file
        self.nodes.open_handle(file.node, handle, writes=file.writes)

    def quota_of(self, file: OpenFile) -> Quota:
        """What its handle counts in."""
        return self.allowances.descriptors if file.shared is None else self.allowances.sharing

    def inherit_handles(self, last: int) -> None:
        """Handles up to ``last`` were a predecessor's."""
        with self._handle_lock:
            self._next_handle = max(self._next_handle, last + 1)

    def new_handle(self) -> int:
        with self._handle_lock:
            handle = self._next_handle
            self._next_handle += 1
            return handle

    def file(self, handle: int) -> OpenFile:
        file = self.files.get(handle)
        if file is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return file

    def any_file(self, node: Node, *, writes: bool = False) -> OpenFile | None:
        """An open handle on the node's inode, whoever opened it; hold the object while its descriptor is
        used."""
        handles = node.handles
        if handles is None or (writes and not node.writers):
            return None
        if not writes:  # nearly always the first will do: a file may be open a hundred thousand times
            with suppress(StopIteration, RuntimeError):  # another thread opens or closes
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
        """Attributes of the node now, through an open handle or its names. ESTALE when it is not where it
        was."""
        if file is None and node.handles is not None:
            file = self.any_file(node)
        if file is not None:
            found = file
            return self._attr_of(node, lambda: os.fstat(found.fd))
        try:
            return self._attr_of(node, self.nodes.way(node).stat)
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE):
                raise
            last = self.nodes.last_attributes(node)
            if last is not None:
                return Attr(node.id, 0, last, 0)
        try:
            pinned = self.nodes.pin(node)  # its name is another's just now
        except OSError:
            # Removed in a predecessor's time; a pipe that a program has open, whose handle the kernel never told us.
            orphan = self.undo.hidden.find_orphan(node.ino) if node.parent is None else None
            if orphan is None:
                raise
            pinned = orphan
        return self._attr_of(node, lambda: os.fstat(pinned.fd))

    def _attr_of(self, node: Node, read: Callable[[], os.stat_result]) -> Attr:
        st, nlink = self.undo.links(read)
        if st.st_ino != node.ino:
            raise stale()
        node.privileged = bool(st.st_mode & (stat.S_ISUID | stat.S_ISGID))
        return Attr(node.id, 0, st, self._visible_links(node, nlink), node.is_written)

    def _visible_links(self, node: Node, nlink: int) -> int:
        """Link count without the ``..`` of directories that are not shown. A count of 2 or less is not one of subdirectories:
        btrfs directories always have 1."""
        return nlink - self._hidden_directories if node is self.nodes.root and nlink > 2 else nlink

    def adopt(
        self, parent: Node, name: bytes, read: Callable[[], os.stat_result], *, count: int
    ) -> tuple[Node, Attr]:
        """The node under this name with its attributes, which ``read`` reads, made if new. FileNotFoundError when the name is
        free."""
        st, nlink = self.undo.links(read)
        node = self.nodes.adopt(parent, name, st, count=count)
        return node, Attr(node.id, 0, st, nlink, node.is_written)

    # -- saving and marking -------------------------------------------------------------------------

    def tracked(self, node: Node) -> bool:
        """Whether the node is on the root's own file system; what is mounted below is served but not
        captured."""
        return node.dev == self.nodes.device and not self.plain

    def must_keep(self, ino: int) -> bool:
        return self.undo.active and not self.tracker.is_fresh(ino)

    def keep_inode(self, node: Node) -> None:
        """Save the inode's attributes if a sealed epoch needs them."""
        if not self.must_keep(node.ino) or not self.tracked(node):
            return
        if self.undo.size_at_cut(node.ino) is not None:
            return  # saved already
        with self.undo.saving():
            file = self.any_file(node)
            if file is not None:
                self.undo.keep_inode(os.fstat(file.fd), file.fd)
            else:
                pinned = self.nodes.pin(node)
                self.undo.keep_inode(os.fstat(pinned.fd), b"/proc/self/fd/%d" % pinned.fd)

    def keep_name(self, parent: Node, way: Way, st: os.stat_result | None, *, moved: bool = False) -> None:
        """Save what the name is bound to (``st``, None: nothing), and the directory's attributes, before the
        binding changes. ``moved``: a directory bound here goes on to exist under another name."""
        if not self.undo.active or not self.tracked(parent):
            return
        name = way.name
        assert name is not None
        if not self.tracker.is_fresh(parent.ino):
            self.keep_inode(parent)
        if st is None:
            if not self.tracker.is_fresh(parent.ino):
                self.undo.keep_absent(parent.ino, name)
            return
        if st.st_dev != self.nodes.device:
            return  # a mount point, which stays (EBUSY); its number may be that of an inode of ours
        if self.tracker.is_fresh(st.st_ino):
            if not self.tracker.is_fresh(parent.ino):
                self.undo.keep_absent(
                    parent.ino, name
                )  # taken in this epoch: it has a record, or the name was free
            return
        self.undo.keep_inode(st, way.path, follow=False)
        if self.tracker.is_fresh(parent.ino):
            # No sealed epoch knows this directory; what came into it from elsewhere has its record there. One written here
            # would be believed of a directory removed in this epoch whose number this one was given.
            return
        if not stat.S_ISDIR(st.st_mode):
            self.undo.keep_file_name(parent.ino, way.dir_fd, name, st)
            return
        with self.undo.saving():
            kept = Descriptor(os.open(name, _KEEP_FLAGS, dir_fd=way.dir_fd))
            # An empty one that goes needs no descriptor: a burst of removals must not run into the limit of open files. One
            # that is not empty stays (ENOTEMPTY) or moves.
            keep_open = moved or bool(os.listdir(kept.fd))
            self.undo.keep_directory_name(parent.ino, name, st, kept if keep_open else None)

    def with_space(self, change: Callable[[], _T]) -> _T:
        """Run a change; when the file system is full, give up the undo log's space and run it again.

        Without ciuic, files that the job removed would not take space any more: what the undo log keeps alive
        must never be the reason for an ENOSPC. Looked at before the change: another thread that met the same
        may have given the log up meanwhile, and be about to free it."""
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
    """Whether the name is the one at the top of the root that belongs to us."""
    return name == STATE_DIR_NAME and parent is nodes.root
