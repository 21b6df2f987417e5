"""Modification times where the kernel keeps them: with its write cache on, it is the one who knows when a program wrote.

The kernel then sets a regular file's mtime itself, at the program's write(2), shows that to everybody, ignores ours, and tells us
by SETATTR before the file is flushed. It does not tell when the time did not move: two writes within one tick of its coarse
clock. Our own later write to the backing file moves that file's mtime to another moment. Without care the two differ by
milliseconds (measured: `stat` through the mount .844882276, of the backing file .848488475), so a snapshot would restore
another time than programs saw, and a remount would change it under them.

So: the time that stood before our first write since the last flush is noted (``before_write``); a SETATTR that sets the time
makes the note void; and at a flush (close(2), which precedes every cut) the time is put back where the note still stands.
"""

from __future__ import annotations

import os
from contextlib import suppress

from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.nodes import Node
from ciuic.fuse_layer.state import OverlayState


class KernelTimes:
    """Keeps the backing files' mtimes what the kernel believes. ``active`` is false for drivers without the write cache."""

    def __init__(self, state: OverlayState, *, active: bool) -> None:
        self._state = state
        self._active = active

    def before_write(self, node: Node, fd: int) -> None:
        """A write or a change of size follows."""
        if self._active and node.kept_mtime_ns is None:
            node.kept_mtime_ns = os.fstat(fd).st_mtime_ns

    def told(self, node: Node) -> None:
        """The kernel has said what the time is, and the backing file has it."""
        node.kept_mtime_ns = None

    def settle(self, node: Node, fd: int) -> None:
        """The file is being flushed: everything that the kernel had to say has arrived."""
        if node.kept_mtime_ns is not None:
            with self._state.gate:
                self.put_back(node, b"/proc/self/fd/%d" % fd)

    def put_back(self, node: Node, path: bytes) -> None:
        """As ``settle``, for a caller inside the gate; ``path`` is to be followed."""
        kept, node.kept_mtime_ns = node.kept_mtime_ns, None
        # On a plain file nobody would set a time here, so a file system that has become read-only, or fails, must not make
        # the program's close(2) fail: the time of our write stays.
        with suppress(OSError):
            if kept is not None and os.stat(path).st_mtime_ns != kept:
                self._state.keep_inode(node)
                if self._state.tracked(node):
                    self._state.tracker.mark_attrs(node)
                syscalls.utimensat(path, None, kept, follow=True)
