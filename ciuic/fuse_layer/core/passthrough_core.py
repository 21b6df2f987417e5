"""A passthrough file system: a backing directory's names, files, attributes and directories, synchronous and thread-safe, for any driver.

A driver translates requests into methods of these parts and OSError into its replies. Nodes and handles are integers;
names, link targets and attribute names are bytes; attributes are ``os.stat_result``. The parts:

* names.py, files.py, directories.py: the operations
* state/node_table.py: the inodes that the kernel remembers, and how to reach them

It knows nothing of epochs. What stands on it overrides the hooks of its operations (names.py, files.py) and of its state
(passthrough_state.py), and hands them to `PassthroughCore`: the tracked overlay (overlay_core.py), and the lazily restored tree.

"Passthrough" is meant as of a file system whose requests are repeated on another one; whether the kernel carries data past this process
is the driver's choice (kernel/driver.py).

Methods that may take long: ``fsync``, ``read`` of data that is not in memory, and every changing operation while
``pending`` is true. A driver runs them where other requests do not wait.

The serving process must have umask 0: modes arrive with the caller's umask applied or beside them
(Credentials.umask).
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from ciuic.fuse_layer.core.directories import Directories
from ciuic.fuse_layer.core.files import Attributes, Files
from ciuic.fuse_layer.core.names import Names
from ciuic.fuse_layer.state.node_table import ROOT_ID
from ciuic.fuse_layer.state.open_rules import OpenPreference, OpenRules
from ciuic.fuse_layer.state.passthrough_state import PassthroughState
from ciuic.fuse_layer.system import syscalls


class DriverHooks(NamedTuple):
    """Calls of a core to its driver: notices and questions."""

    before_freeing: Callable[[], None] = lambda: None
    """Called before a removal that frees much space, which takes the file system up to seconds, and before waiting for one: other
    requests may go on."""
    on_listing: Callable[[int, list[bytes]], None] = lambda handle, names: None
    """Called with the handle of a directory and the names that its offsets count from now on."""
    take_back_attributes: Callable[[int], None] = lambda node_id: None
    """Has the kernel drop the attributes of a node, and the answers to requests that it sent before."""
    held_by_kernel: Callable[[int], bool] = lambda node_id: False
    """Returns True if the kernel itself has the node's backing file open, so that it must not be given another inode."""


class PassthroughCore:
    """Passthrough file system over a backing directory: four groups of operations on one state, which the core owns."""

    def __init__(
        self,
        state: PassthroughState,
        *,
        names: Names,
        files: Files,
        attributes: Attributes,
        directories: Directories,
        rules: OpenRules | None = None,
    ) -> None:
        """Serve these operations; ``rules`` are those of opens (open_rules.py)."""
        self._state = state
        self._rules = rules or OpenRules()
        self.nodes = state.nodes
        self.names = names
        self.files = files
        self.attributes = attributes
        self.directories = directories
        self.recent = state.recent
        # Most descriptors are for files that programs open: caches and moved directories must leave them.
        state.nodes.keep_at_most(state.allowances.limit)

    def connect(self, driver: DriverHooks) -> None:
        """Call these hooks of the driver from now on; before the first request."""
        self.names.before_freeing = self.files.before_waiting = driver.before_freeing
        self.directories.on_listing = driver.on_listing
        self.recent.take_back = driver.take_back_attributes

    @property
    def pending(self) -> bool:
        """True if changing operations may take long: none does here."""
        return False

    @property
    def open_files(self) -> int:
        """Number of open handles of files."""
        return len(self._state.files)

    def statfs(self, node_id: int = ROOT_ID) -> os.statvfs_result:
        """Return the figures of the file system that a node is on."""
        node = self._state.nodes.get(node_id)
        if node.dev != self._state.nodes.device:
            # Of a file system that is mounted below the root.
            pin = self._state.nodes.pin(node)
            return os.statvfs(pin.fd)
        return os.statvfs(self._state.nodes.root_directory.fd)

    def preference(self, node_id: int, flags: int, *, fresh: bool) -> OpenPreference:
        """Return the rules' preference for an open of the node, where its family is not decided yet."""
        node = self._state.nodes.get(node_id)
        return self._rules.preference(
            node.name, node.ino, flags, lambda: self._state.attr(node).st, fresh=fresh
        )

    def note_joined(self, node_id: int) -> None:
        """Note that the node was opened read-write beside readers by passthrough."""
        self._rules.note_joined(self._state.nodes.get(node_id).ino)

    def syncfs(self) -> None:
        """Make everything on the backing file system durable."""
        fd = os.open(b".", os.O_RDONLY | os.O_DIRECTORY, dir_fd=self._state.nodes.root_directory.fd)
        try:
            syscalls.syncfs(fd)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Close every open handle. The core is not used afterwards."""
        self._state.files.clear()
