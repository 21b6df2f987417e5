"""Operations on open directories: list, sync.

A listing is a snapshot of the names taken at its first read (and again after a rewind): offsets are indexes
into it, so they are stable however the directory changes, and nothing is listed twice. What vanished
meanwhile is left out."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator

from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.state import Attr, OverlayState, is_reserved
from ciuic.fuse_layer.ways import Descriptor, Way

_LISTING_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _OpenDirectory:
    __slots__ = ("descriptor", "names", "node")

    def __init__(self, node: Node, descriptor: Descriptor) -> None:
        self.node = node
        self.descriptor = descriptor
        self.names: list[bytes] | None = None


class Directories:
    """The operation group; one for each core."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._nodes = state.nodes
        self._open: dict[int, _OpenDirectory] = {}
        self.on_listing: Callable[[int, list[bytes]], None] = lambda handle, names: None
        """Told the names that the offsets of a handle count from now on."""

    def inherit(self, handle: int, node_id: int, names: list[bytes] | None) -> None:
        """Open what a predecessor had open, under its handle and with the names that its offsets count."""
        node = self._nodes.get(node_id)
        fd = os.open(b".", _LISTING_FLAGS, dir_fd=self._nodes.directory(node).fd)
        self._open[handle] = opened = _OpenDirectory(node, Descriptor(fd))
        opened.names = names

    def has(self, handle: int) -> bool:
        """Whether it is open."""
        return handle in self._open

    def opendir(self, node_id: int) -> int:
        node = self._nodes.get(node_id)
        fd = os.open(b".", _LISTING_FLAGS, dir_fd=self._nodes.directory(node).fd)
        handle = self._state.new_handle()
        self._open[handle] = _OpenDirectory(node, Descriptor(fd))
        return handle

    def readdir(self, handle: int, offset: int) -> Iterator[tuple[bytes, Attr, int]]:
        """Entries from ``offset`` (0: from the start, read anew) as (name, attributes, offset of the next),
        without "." and "..".

        No lookup is counted: the driver calls ``remember`` for each entry that the kernel took.
        """
        opened = self._directory(handle)
        if offset == 0 or opened.names is None:
            os.lseek(opened.descriptor.fd, 0, os.SEEK_SET)
            opened.names = self._listed(opened)
            self.on_listing(handle, opened.names)
        names = opened.names
        for index in range(offset, len(names)):
            way = Way(opened.descriptor, names[index])
            try:
                _, attr = self._state.adopt(opened.node, names[index], way.stat, count=0)
            except FileNotFoundError:
                continue
            yield names[index], attr, index + 1

    def _listed(self, opened: _OpenDirectory) -> list[bytes]:
        names = (os.fsencode(name) for name in os.listdir(opened.descriptor.fd))
        return [name for name in names if not is_reserved(self._nodes, opened.node, name)]

    def remember(self, node_id: int) -> None:
        """The kernel took an entry of a listing: one lookup more."""
        self._nodes.remember(node_id)

    def releasedir(self, handle: int) -> None:
        self._open.pop(handle, None)

    def fsyncdir(self, handle: int, datasync: bool) -> None:
        """The directory's names are durable on return."""
        fd = self._directory(handle).descriptor.fd
        (os.fdatasync if datasync else os.fsync)(fd)

    def _directory(self, handle: int) -> _OpenDirectory:
        opened = self._open.get(handle)
        if opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened
