"""Modification times where the kernel keeps them: with its write cache on, it is the one who knows when a program wrote.

The kernel then sets a regular file's mtime itself, at the program's write(2), shows that to everybody, ignores ours, and tells us
by SETATTR before the file is flushed. It does not tell when the time did not move: two writes within one tick of its coarse
clock. Our own later write to the backing file moves that file's mtime to another moment. Without care the two differ by
milliseconds (measured: `stat` through the mount .844882276, of the backing file .848488475), so a snapshot would restore
another time than programs saw, and a remount would change it under them.

So each node notes what the kernel believes (``Node.kept_mtime_ns``): the time that stood before our first write, then whatever the
kernel says. At a flush (close(2), which precedes every cut) the backing file gets that time again where it has another.
The note stays: voided by a flush or by what the kernel says, it would be missing for a write of another thread that is under way
at that moment and moves the time after it.

Operations on one file run in several threads. So a time is set, and the note of it made, in one step (``_lock``); and a first write
does not replace a note that was made while it looked.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from typing import Final

from ciuic.fuse_layer import syscalls
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.state import OverlayState

_LOCK_STRIPES: Final = 64


class KernelTimes:
    """Keeps the backing files' mtimes what the kernel believes. ``active`` is false for drivers without the write cache."""

    def __init__(self, state: OverlayState, *, active: bool) -> None:
        self._state = state
        self._active = active
        self._locks = tuple(threading.Lock() for _ in range(_LOCK_STRIPES))

    def _lock(self, node: Node) -> threading.Lock:
        """Setting a file's time, and saying so, is one step."""
        return self._locks[node.id % _LOCK_STRIPES]

    def before_write(self, node: Node, fd: int) -> None:
        """A write or a change of size follows."""
        if self._active and node.kept_mtime_ns is None:
            stands_ns = os.fstat(fd).st_mtime_ns
            with self._lock(node):
                if node.kept_mtime_ns is None:
                    node.kept_mtime_ns = stands_ns

    def told(self, node: Node, mtime_ns: int | None, set_times: Callable[[], None]) -> None:
        """The kernel says what the time is (None: the clock's): ``set_times`` gives it to the backing file."""
        with self._lock(node):
            set_times()
            node.kept_mtime_ns = mtime_ns if self._active and node.kind == stat.S_IFREG else None

    def settle(self, node: Node, fd: int) -> None:
        """The file is being flushed: everything that the kernel had to say has arrived."""
        if node.kept_mtime_ns is not None and os.fstat(fd).st_mtime_ns != node.kept_mtime_ns:
            with self._state.gate:
                self.put_back(node, b"/proc/self/fd/%d" % fd)

    def put_back(self, node: Node, path: bytes) -> None:
        """As ``settle``, for a caller inside the gate; ``path`` is to be followed."""
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
                # On a plain file nobody would set a time here, so a file system that has become read-only, or fails, must
                # not make the program's close(2) fail: the time of our write stays.
                node.kept_mtime_ns = None
