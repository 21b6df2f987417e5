"""Modification times where the kernel keeps them: with its write cache on, only the kernel knows when a program wrote.

The kernel then sets a regular file's mtime itself, at the program's write(2), shows that to all programs,
ignores the server's, and sends it by SETATTR before the file is flushed. It sends nothing when the time did
not move: two writes within one tick of its coarse clock. Our own later write to the backing file moves that
file's mtime to another moment. Without care the two differ by milliseconds (measured: `stat` through the
mount .844882276, of the backing file .848488475), so a snapshot would restore another time than programs saw,
and a remount would change it under them.

So each node notes the kernel's time (``Node.kept_mtime_ns``): the time before our first write, then whatever
the kernel sends. At a flush (close(2), which precedes every cut) the backing file gets that time again where
it has another. The note stays: if a flush or a SETATTR removed it, it would be missing for a write of another
thread that is under way at that moment and moves the time after it.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from typing import Final

from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.system import syscalls

_LOCK_STRIPES: Final = 64


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
