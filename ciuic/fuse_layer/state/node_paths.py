"""Paths of nodes: how to reach the inode that a node stands for, at this moment.

Paths lead through names: every node knows its parent and name, a rename moves one edge, and a directory is
opened by walking down from the nearest one whose descriptor is cached. There is no descriptor per inode,
because of the limit of open files (hard limit 20,000 on common hosts;
docs/decisions/names-not-descriptors.md). Guarantees: what is opened is the node's inode and no other,
whatever happens to names meanwhile, or the answer is ESTALE.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from typing import Final

from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle, stale, wait_for_rename

_DIR_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
# Common hosts allow a process 20,000 descriptors, which files that programs have open need
# (docs/decisions/names-not-descriptors.md).
_MAX_DIRECTORIES: Final = 512
_MAX_REMOVED: Final = 256
# With the pauses of wait_for_rename ten milliseconds, in which another thread records a rename that it has
# done on disk.
_RENAME_RETRIES: Final = 12
_NOT_THE_FILE: Final = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EAGAIN)
"""Errors of opening a name that no longer leads to a file; EAGAIN of one with a lease of ours
(passthrough_writers.py)."""


class NodePaths:
    """The part of a node table that finds inodes.

    Thread-safe; no system call is made under its lock except close.
    """

    def __init__(self, root: Node, root_fd: int, by_id: dict[int, Node]) -> None:
        self.root = root
        self.root_directory = Descriptor(os.dup(root_fd))
        # The node table's lock as well: names change under it, so a walk sees whole edges. Reentrant, because
        # finding a node of a predecessor makes nodes.
        self._lock = threading.RLock()
        self._by_id = by_id
        self._directories: OrderedDict[int, Descriptor] = OrderedDict()
        self._removed: OrderedDict[int, Descriptor] = OrderedDict()
        """Descriptors by node id of inodes that lost their last name while the kernel remembers them."""
        self._last_attributes: OrderedDict[int, os.stat_result] = OrderedDict()
        self._max_directories, self._max_removed = _MAX_DIRECTORIES, _MAX_REMOVED
        self._emptied: dict[int, Descriptor] = {}
        """Stand-ins by node id for directories that were removed in a predecessor's time."""

    def keep_at_most(self, limit: int) -> None:
        """Limit cached descriptors in a process that may have ``limit`` of them: most are for files that programs open."""
        self._max_directories = max(1, min(_MAX_DIRECTORIES, limit // 8))
        self._max_removed = max(1, min(_MAX_REMOVED, limit // 16))

    def directory(self, node: Node) -> Descriptor:
        """Return an O_PATH descriptor of the directory.

        Raises:
            OSError: ESTALE when the directory is not where its names say.
        """
        if node is self.root:
            return self.root_directory
        # A rename is done on disk before its thread moves the edge in the table: ESTALE would reach the job
        # for a file that is there, so the walk is tried again.
        for attempt in range(_RENAME_RETRIES):
            wait_for_rename(attempt)
            cached = self._cached(node)
            if cached is not None:
                return cached
            try:
                return self._walk(node)
            except FileNotFoundError:
                # A directory was renamed during the walk. Its edge moves next: walk again.
                if attempt == _RENAME_RETRIES - 1:
                    raise stale() from None
        raise stale()

    def _cached(self, node: Node) -> Descriptor | None:
        with self._lock:
            found = self._directories.get(node.id)
            if found is not None:
                self._directories.move_to_end(node.id)
                return found
            return self._removed.get(node.id) or self._emptied.get(node.id)

    def _walk(self, node: Node) -> Descriptor:
        chain: list[tuple[Node, bytes]] = []
        at: Node | None = node
        found: Descriptor | None = None
        while at is not None and found is None:
            if at is self.root:
                found = self.root_directory
                break
            found = self._cached(at)
            if found is None:
                with self._lock:
                    chain.append((at, at.name))
                    at = at.parent
        if found is None:
            raise stale()
        for child, name in reversed(chain):
            if not child.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            opened = Descriptor(os.open(name, _DIR_FLAGS, dir_fd=found.fd))
            # Another directory may have this name by now.
            if os.fstat(opened.fd).st_ino != child.ino:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._cache(child, opened)
            found = opened
        return found

    def _cache(self, node: Node, opened: Descriptor) -> None:
        with self._lock:
            if node.id in self._by_id:
                self._directories[node.id] = opened
                if len(self._directories) > self._max_directories:
                    self._directories.popitem(last=False)

    def last_attributes(self, node: Node) -> os.stat_result | None:
        """Return the last attributes of a removed file whose space is freed, while the kernel remembers it."""
        return self._last_attributes.get(node.id)

    def is_freed(self, node: Node) -> bool:
        """Return whether the node's file is removed and no program has it open, so that nothing can change it any more."""
        return node.parent is None and node.handles is None and node.id in self._last_attributes

    def _keep_removed(self, node: Node, keep: Descriptor | None, last: os.stat_result | None) -> None:
        if keep is None:
            if last is not None and node.handles is None and node.lookups:
                self._last_attributes[node.id] = last
                if len(self._last_attributes) > _MAX_REMOVED:
                    self._last_attributes.popitem(last=False)
            return
        self._removed[node.id] = keep
        if len(self._removed) > self._max_removed:
            # The kernel forgets removed inodes soon; a burst of removals must not run into the limit of open
            # files.
            self._removed.popitem(last=False)

    def path_handle(self, node: Node) -> PathHandle:
        """Return how to reach the node now.

        Raises:
            OSError: ESTALE when nothing leads to the inode any more.
        """
        if node is self.root:
            return PathHandle(self.root_directory, b".")
        with self._lock:
            parent, name, removed = (
                node.parent,
                node.name,
                self._removed.get(node.id) or self._emptied.get(node.id),
            )
        if parent is not None:
            return PathHandle(self.directory(parent), name)
        if removed is not None:
            return PathHandle(removed, None)
        raise stale()

    def pin(self, node: Node) -> Descriptor:
        """Return an O_PATH descriptor of the node's inode, and of no other whatever happens to its names meanwhile.

        Raises:
            OSError: ESTALE when nothing leads to the inode any more.
        """
        # While an epoch is pending operations run in several threads. Without a pin, a rename over a file
        # between the look-up of its path and the open made the handle lead to the other inode, and its writes
        # landed in a file that was not marked.
        for attempt in range(_RENAME_RETRIES):
            wait_for_rename(attempt)
            try:
                pinned = Descriptor(self.path_handle(node).open(os.O_PATH))
            except FileNotFoundError:
                # This name was removed or renamed meanwhile.
                self._prefer_another_name(node)
                continue
            st = os.fstat(pinned.fd)
            if (st.st_dev, st.st_ino) == (node.dev, node.ino):
                # A predecessor's node is made without attributes.
                node.note_mode(st.st_mode)
                return pinned
            self._prefer_another_name(node)
        raise stale()

    def _prefer_another_name(self, node: Node) -> None:
        """Make another known name of the node its first one."""
        with self._lock:
            if node.parent is not None and node.aliases:
                other = node.aliases.pop()
                node.aliases = {*node.aliases, (node.parent, node.name)}
                node.parent, node.name = other

    def open(self, node: Node, flags: int) -> int:
        """Open the node's inode with ``flags``.

        Raises:
            OSError: ESTALE as of ``pin``.
        """
        # Never through the name alone: another thread may rename something else to it before the open, and
        # data would be written to that.
        fd = self._open_by_name(node, flags) if node.kind == stat.S_IFREG else None
        if fd is not None:
            return fd
        pinned = self.pin(node)
        return os.open(b"/proc/self/fd/%d" % pinned.fd, (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW)

    def _open_by_name(self, node: Node, flags: int) -> int | None:
        """Open the inode by its name, which takes half the system calls; return None where the name leads elsewhere."""
        path_handle = self.path_handle(node)
        if path_handle.name is None:
            return None
        # Something else may have the name by now. It is compared before it is used; O_NONBLOCK because
        # opening a fifo waits for its other end, O_NOCTTY because a terminal would become ours.
        want = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(path_handle.name, want, dir_fd=path_handle.dir_fd)
        except OSError as error:
            if error.errno in _NOT_THE_FILE:
                return None
            raise
        st = os.fstat(fd)
        if st.st_ino == node.ino and st.st_dev == node.dev:
            # As in ``pin``: a predecessor's node is made without attributes.
            node.note_mode(st.st_mode)
            return fd
        os.close(fd)
        return None

    def path_below_root(self, node: Node) -> bytes | None:
        """Return the node's path relative to the root, as its names say; None when it has none."""
        parts: list[bytes] = []
        with self._lock:
            at: Node | None = node
            while at is not None and at is not self.root:
                parts.append(at.name)
                at = at.parent
        return b"/".join(reversed(parts)) if at is self.root else None
