"""State of the tracked overlay: what `PassthroughState` has, with gate, tracker and undo log behind its hooks.

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
import os
import stat
from collections.abc import Callable
from typing import TypeVar

from ciuic.fuse_layer.state.node_table import Node, NodeTable
from ciuic.fuse_layer.state.passthrough_state import PassthroughState
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle
from ciuic.fuse_layer.tracking.changes import Tracker
from ciuic.fuse_layer.tracking.gate import Gate
from ciuic.fuse_layer.tracking.undo_log import UndoLog
from ciuic.system.disk import READ_DIRECTORY

_T = TypeVar("_T")
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)


class OverlayState(PassthroughState):
    """State shared by the operation groups of an overlay; the module's docstring has the order of a change."""

    gate: Gate

    def __init__(
        self, nodes: NodeTable, tracker: Tracker, undo: UndoLog, *, hidden_directories: int = 0
    ) -> None:
        """Share these parts; ``hidden_directories`` as of `PassthroughState`."""
        super().__init__(nodes, undo.hidden, gate=Gate(), hidden_directories=hidden_directories)
        self.tracker = tracker
        self.undo = undo

    # -- saving and marking -------------------------------------------------------------------------

    def tracked(self, node: Node) -> bool:
        """Return whether changes of the node are tracked: files of another file system, mounted below, are only served."""
        return node.dev == self.nodes.device

    def mark_attributes(self, node: Node) -> None:
        """Mark the node's attributes as changed in the current epoch."""
        if self.tracked(node):
            self.tracker.mark_attrs(node)

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
            kept = Descriptor(os.open(name, READ_DIRECTORY, dir_fd=entry.dir_fd))
            # An empty one that goes needs no descriptor: a burst of removals must not run into the limit of
            # open files. One that is not empty stays (ENOTEMPTY) or moves.
            keep_open = moved or bool(os.listdir(kept.fd))
            self.undo.keep_directory_name(parent.ino, name, st, kept if keep_open else None)

    def with_space(self, change: Callable[[], _T], *, is_vain: Callable[[], bool] | None = None) -> _T:
        """Run a change; when the file system is full, give up the undo log's space and run it once more.

        Without ciuic, files that the job removed would not take space any more: inodes that the undo log
        keeps alive must never be the reason for an ENOSPC.

        Args:
            change: what to run.
            is_vain: returns whether no space that is given up can help a change that met ENOSPC; asked then.
        """
        # Read before the change: another thread that met the same error may have given the log up meanwhile,
        # and be about to free its space.
        took_space = self.undo.takes_space
        try:
            return change()
        except OSError as error:
            if error.errno not in _NO_SPACE or not (took_space or self.undo.takes_space):
                raise
            may_help = error.errno == errno.EDQUOT or is_vain is None or not is_vain()
        if may_help:
            self.undo.abandon("the file system is full, and the job needs the space")
            self.undo.tidy()
        # Where there is room too: another thread may have made it since.
        return change()

    def with_space_of(
        self, node: Node, change: Callable[[], _T], *, is_vain: Callable[[], bool] | None = None
    ) -> _T:
        """Run a change of a file's content as ``with_space``; the undo log's space is no help to another file system."""
        return self.with_space(change, is_vain=is_vain) if self.tracked(node) else change()


class UntrackedState(OverlayState):
    """State of an overlay that tracks no content and no attributes: its files are served as those of another file system are."""

    def tracked(self, node: Node) -> bool:
        """Return False."""
        return False
