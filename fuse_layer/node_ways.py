"""Ways to nodes: how to reach the inode that a node stands for, now.

Ways lead through names: every node knows its parent and name, renames move one edge, and a directory is opened by walking down
from the nearest one whose descriptor is cached. There is no descriptor per inode: the limit of open files
would end that (hard limit 20,000 on common hosts). Guarantees: what is opened is the node's inode and no other, whatever happens to
names meanwhile, or the answer is ESTALE.
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from typing import Final

from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.ways import Descriptor, Way, stale, wait_for_rename

_DIR_FLAGS: Final = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_DIRECTORY
_KEPT_DIRECTORIES: Final = 512
_KEPT_REMOVED: Final = 256
_RENAME_RETRIES: Final = 12
_ANOTHER_THING: Final = (errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.EISDIR, errno.EAGAIN)
"""What opening a name for writing says that no longer leads to a file, and what a lease held for a moment says (unseen.py)."""


class NodeWays:
    """The part of a node table that finds the way. Thread-safe; no system call is made under its lock except close."""

    def __init__(self, root: Node, root_fd: int, by_id: dict[int, Node]) -> None:
        self.root = root
        self.root_directory = Descriptor(os.dup(root_fd))
        self._lock = threading.RLock()
        """The table's as well: names change under it."""
        self._by_id = by_id
        self._directories: OrderedDict[int, Descriptor] = OrderedDict()
        self._removed: OrderedDict[int, Descriptor] = OrderedDict()
        """By node id: ways to what lost its last name while the kernel remembers it."""
        self._last_attributes: OrderedDict[int, os.stat_result] = OrderedDict()
        self._most_directories, self._most_removed = _KEPT_DIRECTORIES, _KEPT_REMOVED
        self._emptied: dict[int, Descriptor] = {}
        """By node id: what stands for directories that were removed in a predecessor's time."""

    def keep_at_most(self, limit: int) -> None:
        """Keep fewer descriptors in a process that may have ``limit`` of them: most are for what programs open."""
        self._most_directories = max(1, min(_KEPT_DIRECTORIES, limit // 8))
        self._most_removed = max(1, min(_KEPT_REMOVED, limit // 16))

    def directory(self, node: Node) -> Descriptor:
        """A descriptor (O_PATH) of the directory. ESTALE when it is not where its names say."""
        if node is self.root:
            return self.root_directory
        for attempt in range(_RENAME_RETRIES):
            wait_for_rename(attempt)
            cached = self._cached(node)
            if cached is not None:
                return cached
            try:
                return self._walk(node)
            except FileNotFoundError:  # renamed while we walked: the edges have moved, walk again
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
            if os.fstat(opened.fd).st_ino != child.ino:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
            self._cache(child, opened)
            found = opened
        return found

    def _cache(self, node: Node, opened: Descriptor) -> None:
        with self._lock:
            if node.id in self._by_id:
                self._directories[node.id] = opened
                if len(self._directories) > self._most_directories:
                    self._directories.popitem(last=False)

    def last_attributes(self, node: Node) -> os.stat_result | None:
        """Attributes of a file that was removed, and its space freed, while the kernel remembers it."""
        return self._last_attributes.get(node.id)

    def is_freed(self, node: Node) -> bool:
        """Whether the node's file is removed and nobody has it open, so that nothing can be done to it any more."""
        return node.parent is None and node.handles is None and node.id in self._last_attributes

    def _keep_removed(self, node: Node, keep: Descriptor | None, last: os.stat_result | None) -> None:
        if keep is None:
            if last is not None and node.handles is None and node.lookups:
                self._last_attributes[node.id] = last
                if len(self._last_attributes) > _KEPT_REMOVED:
                    self._last_attributes.popitem(last=False)
            return
        self._removed[node.id] = keep
        if len(self._removed) > self._most_removed:
            # the kernel forgets removed things soon; a burst must not cost descriptors
            self._removed.popitem(last=False)

    def way(self, node: Node) -> Way:
        """How to reach the node now. ESTALE when nothing leads there any more."""
        if node is self.root:
            return Way(self.root_directory, b".")
        with self._lock:
            parent, name, removed = (
                node.parent,
                node.name,
                self._removed.get(node.id) or self._emptied.get(node.id),
            )
        if parent is not None:
            return Way(self.directory(parent), name)
        if removed is not None:
            return Way(removed, None)
        raise stale()

    def pin(self, node: Node) -> Descriptor:
        """An O_PATH descriptor of the node's inode, and of no other whatever happens to its names meanwhile. ESTALE when
        nothing leads there any more."""
        for attempt in range(_RENAME_RETRIES):
            wait_for_rename(attempt)
            try:
                pinned = Descriptor(self.way(node).open(os.O_PATH))
            except FileNotFoundError:
                self._prefer_another_name(node)  # this one went away while we looked
                continue
            st = os.fstat(pinned.fd)
            if (st.st_dev, st.st_ino) == (node.dev, node.ino):
                return pinned
            self._prefer_another_name(node)
        raise stale()

    def _prefer_another_name(self, node: Node) -> None:
        """Take turns among the names that are known to lead to the node."""
        with self._lock:
            if node.parent is not None and node.aliases:
                other = node.aliases.pop()
                node.aliases = {*node.aliases, (node.parent, node.name)}
                node.parent, node.name = other

    def open(self, node: Node, flags: int) -> int:
        """The node's inode opened with ``flags``; ESTALE as ``pin``. Never through its name alone: between the way and the
        open another thread may rename something else there, and what is written would land in that."""
        fd = self._open_by_name(node, flags) if node.kind == stat.S_IFREG else None
        if fd is not None:
            return fd
        pinned = self.pin(node)
        return os.open(b"/proc/self/fd/%d" % pinned.fd, (flags | os.O_CLOEXEC) & ~os.O_NOFOLLOW)

    def _open_by_name(self, node: Node, flags: int) -> int | None:
        """Half the system calls of ``open``, where the name still leads to the inode; None where that is not sure. What else may
        be found there is looked at before anything is done with it, and O_NONBLOCK keeps a fifo from stopping us."""
        way = self.way(node)
        if way.name is None:
            return None
        want = flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
        try:
            fd = os.open(way.name, want, dir_fd=way.dir_fd)
        except OSError as error:
            if error.errno in _ANOTHER_THING:
                return None
            raise
        st = os.fstat(fd)
        if st.st_ino == node.ino and st.st_dev == node.dev:
            return fd
        os.close(fd)
        return None

    def path_below_root(self, node: Node) -> bytes | None:
        """The node's path relative to the root, as its names say; None when it has none."""
        parts: list[bytes] = []
        with self._lock:
            at: Node | None = node
            while at is not None and at is not self.root:
                parts.append(at.name)
                at = at.parent
        return b"/".join(reversed(parts)) if at is self.root else None
