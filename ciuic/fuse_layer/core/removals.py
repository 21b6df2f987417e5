"""Operations that take or move names: unlink, rmdir, rename.

Guarantees: names on the backing file system change by exactly one system call each, so a crash leaves either
state; the session's journal announces the change before it and records the outcome after it, so that a
successor knows both; state that a sealed epoch needs is saved before.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import NamedTuple

from ciuic.fuse_layer.core.entries import adopt_created, entry_of, new_entry_of
from ciuic.fuse_layer.state.change_notes import note_changing, note_unchanged
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle
from ciuic.fuse_layer.tracking.tracking import ABSENT

_OPENED_BY_THE_KERNEL = (stat.S_IFIFO, stat.S_IFCHR, stat.S_IFBLK)
_FREED_AT_ONCE_BYTES = 1 << 20
"""Size from which on a removed file's space is free when unlink(2) returns.

A job that removes an old checkpoint and writes the next one on a nearly full disk needs that. Smaller files
keep a descriptor until the kernel forgets them, so that an O_PATH descriptor of the job's can still be opened
anew.
"""


class Removals:
    """Operations of one root that take or move names."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._nodes = state.nodes
        self.before_freeing: Callable[[], None] = lambda: None
        """Called before a removal that frees much space, which takes the file system up to seconds."""
        self.after_freeing: Callable[[], None] = lambda: None
        """Called inside the gate, after a removal that would have freed much space if the undo log had not
        kept it."""

    def unlink(self, parent_id: int, name: bytes) -> None:
        """Remove the name of anything but a directory."""
        self._remove(parent_id, name, lambda entry: os.unlink(entry.name or b"", dir_fd=entry.dir_fd))

    def rmdir(self, parent_id: int, name: bytes) -> None:
        """Remove an empty directory."""
        self._remove(parent_id, name, lambda entry: os.rmdir(entry.name or b"", dir_fd=entry.dir_fd))

    def _remove(self, parent_id: int, name: bytes, remove: Callable[[PathHandle], None]) -> None:
        parent = self._nodes.get(parent_id)
        with self._state.gate:
            entry = entry_of(self._state, parent, name)
            target = self._target(entry)
            self._state.keep_name(parent, entry, target.st)
            keep = self._keep_removed(target, entry)
            # Before the system call, and for every inode that the kernel knows: a successor that did not know
            # of a removal gave the next file with the same inode number the same node (ESTALE and wrong link
            # counts, once in 1,500 kills).
            if target.is_remembered:
                note_changing(self._nodes.journal, parent, name, target.st.st_ino, goes=target.remembered)
            try:
                self._state.with_space(lambda: remove(entry))
            except OSError:
                if target.is_remembered:
                    note_unchanged(self._nodes.journal, parent, name)
                raise
            if self._state.tracked(parent):
                self._state.tracker.mark_removed(parent, name, target.st.st_ino)
            self._unbound(parent, name, target, keep)

    def _target(self, entry: PathHandle) -> _Target:
        # Before keep_name, which may add a hidden link.
        st, nlink = self._state.undo.links(entry.stat)
        return _Target(st, nlink, self._nodes.find(st))

    def _keep_removed(self, target: _Target, entry: PathHandle) -> Descriptor | None:
        """Return a descriptor of an inode that is about to lose a name; None where the kernel cannot ask about it later."""
        node = target.node
        # Other names help a successor only where one is known here: the kernel may have forgotten the others.
        if target.may_be_open and (target.nlink <= 1 or (node is not None and not node.aliases)):
            assert node is not None
            node.kept = node.handles is None
            self._state.undo.hidden.keep_orphan(node.ino, entry.name or b"", entry.dir_fd, follow=False)
        # Measured with a descriptor kept: the space of a removed checkpoint (256 MiB, ext4) came back 360 ms
        # after unlink(2). Freed inside the call it takes as long as in a plain directory, and other requests
        # go on meanwhile.
        if target.frees_much:
            # A descriptor would keep the space until the kernel forgets the node, which is after unlink(2)
            # has returned.
            self.before_freeing()
            return None
        if node is None or not node.lookups:
            return None
        return Descriptor(
            os.open(entry.name or b"", os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=entry.dir_fd)
        )

    def _unbound(self, parent: Node, name: bytes, target: _Target, keep: Descriptor | None) -> None:
        """Update tables and marks of an inode that lost this name; the caller marks the name itself."""
        gone = stat.S_ISDIR(target.st.st_mode) or target.nlink <= 1
        if target.frees_much:
            self.after_freeing()
        node = target.node
        if node is not None:
            self._nodes.unlinked(node, parent, name, gone=gone, keep=keep, last=target.st)
        if target.st.st_dev != self._nodes.device:
            return
        tracker = self._state.tracker
        # Temporary files that come and go within an epoch leave no trace.
        if gone and tracker.is_fresh(target.st.st_ino):
            tracker.forget_created(target.st.st_ino)
            return
        if node is not None:
            # Of several names one may remain: its entry in the snapshot changes its form.
            for known_parent, known_name in node.names():
                tracker.mark_touched(known_parent, known_name)
        self._mark_touched(node, target.st)

    # -- renaming -----------------------------------------------------------------------------------

    def rename(self, parent_id: int, name: bytes, new_parent_id: int, new_name: bytes, flags: int) -> None:
        """Rename as rename(2) or, with flags, as renameat2(2)."""
        parent, new_parent = self._nodes.get(parent_id), self._nodes.get(new_parent_id)
        state = self._state
        with state.gate:
            entry = entry_of(state, parent, name)
            new_entry = new_entry_of(state, new_parent, new_name)
            source, replaced = self._target(entry), self._target_or_none(new_entry)
            if replaced is not None and source.key == replaced.key and not flags:
                # Two names of one file: rename(2) does nothing.
                return
            exchange = bool(flags & syscalls.RENAME_EXCHANGE)
            state.keep_name(parent, entry, source.st, moved=True)
            state.keep_name(new_parent, new_entry, replaced.st if replaced else None, moved=exchange)
            keep = self._keep_removed(replaced, new_entry) if replaced is not None and not exchange else None
            note_changing(
                self._nodes.journal, parent, name, source.st.st_ino, to=(new_parent, new_name),
                replaced=replaced.st.st_ino if replaced is not None else 0, exchange=exchange,
                goes=replaced.remembered if replaced is not None and not exchange else None,
            )  # fmt: skip
            try:
                state.with_space(lambda: _rename(entry, new_entry, flags))
            except OSError:
                note_unchanged(self._nodes.journal, parent, name, to=(new_parent, new_name))
                raise
            if exchange and replaced is not None:
                self._exchanged((parent, name, source), (new_parent, new_name, replaced))
                return
            if replaced is not None:
                self._unbound(new_parent, new_name, replaced, keep)
            self._moved(parent, name, source, new_parent, new_name, replaced)
            if flags & syscalls.RENAME_WHITEOUT:
                # The file system has made a new inode under the old name, whose lookup the kernel does not
                # count.
                self._nodes.forget(adopt_created(self._state, parent, name, entry.stat)[0].id, 1)

    def _target_or_none(self, entry: PathHandle) -> _Target | None:
        try:
            return self._target(entry)
        except FileNotFoundError:
            return None

    def _moved(
        self,
        parent: Node,
        name: bytes,
        source: _Target,
        new_parent: Node,
        new_name: bytes,
        replaced: _Target | None,
    ) -> None:
        if source.node is not None:
            self._nodes.renamed(source.node, parent, name, new_parent, new_name)
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_removed(parent, name, source.st.st_ino)
        tracker.mark_name(new_parent, new_name, replaced.st.st_ino if replaced is not None else ABSENT)
        self._mark_touched(source.node, source.st)

    def _exchanged(self, one: tuple[Node, bytes, _Target], other: tuple[Node, bytes, _Target]) -> None:
        (parent, name, here), (new_parent, new_name, there) = one, other
        # The first one last: its record settles the change, so a successor that has this record has both.
        if there.node is not None:
            self._nodes.renamed(there.node, new_parent, new_name, parent, name)
        if here.node is not None:
            self._nodes.renamed(here.node, parent, name, new_parent, new_name)
        if not self._state.tracked(parent):
            return
        tracker = self._state.tracker
        tracker.mark_name(parent, name, here.st.st_ino)
        tracker.mark_name(new_parent, new_name, there.st.st_ino)
        self._mark_touched(here.node, here.st)
        self._mark_touched(there.node, there.st)

    def _mark_touched(self, node: Node | None, st: os.stat_result) -> None:
        """Mark an inode whose link count or ctime has moved."""
        if node is not None and node.parent is not None:
            self._state.tracker.mark_attrs(node)
        else:
            self._state.tracker.mark_ino(st.st_ino)


class _Target(NamedTuple):
    """Inode that a name is bound to, with the link count that users see."""

    st: os.stat_result
    nlink: int
    node: Node | None

    @property
    def key(self) -> tuple[int, int]:
        """Device and inode number."""
        return self.st.st_dev, self.st.st_ino

    @property
    def remembered(self) -> tuple[Node, os.stat_result] | None:
        """Node and attributes, where the kernel knows the inode."""
        return None if self.node is None else (self.node, self.st)

    @property
    def may_be_open(self) -> bool:
        """True if a program may have the file open. The kernel opens pipes and devices without a request."""
        if self.node is None:
            return False
        return self.node.handles is not None or (
            bool(self.node.lookups) and stat.S_IFMT(self.st.st_mode) in _OPENED_BY_THE_KERNEL
        )

    @property
    def frees_much(self) -> bool:
        """True if this is the last name of a large file that no program has open."""
        node = self.node
        return (
            stat.S_ISREG(self.st.st_mode)
            and self.nlink <= 1
            and self.st.st_blocks * 512 >= _FREED_AT_ONCE_BYTES
            and (node is None or node.handles is None)
        )

    @property
    def is_remembered(self) -> bool:
        """True if the kernel may still ask for the inode, which it remembers until it is told of the removal.

        A successor that took a new file with the same number for it would give two files one node.
        """
        return self.node is not None


def _rename(entry: PathHandle, new_entry: PathHandle, flags: int) -> None:
    old, new = entry.name or b"", new_entry.name or b""
    if flags:
        syscalls.renameat2(entry.dir_fd, old, new_entry.dir_fd, new, flags)
    else:
        os.rename(old, new, src_dir_fd=entry.dir_fd, dst_dir_fd=new_entry.dir_fd)
