"""Operations on open directories: list, sync.

A listing is a snapshot of the names taken at its first read (and again after a rewind): offsets are indexes
into it, so they are stable however the directory changes, and nothing is listed twice. What vanished
meanwhile is left out."""

from __future__ import annotations

import errno
import os
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Final

from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.quota import Quota
from ciuic.fuse_layer.state import Attr, OverlayState, is_reserved
from ciuic.fuse_layer.ways import Descriptor, Way

_LATEST_KEPT: Final = 256
"""Directories whose last listing is compared with the next one."""
_LISTING_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


class _OpenDirectory:
    __slots__ = ("__weakref__", "descriptor", "names", "node", "uid")

    def __init__(self, node: Node, descriptor: Descriptor, uid: int) -> None:
        self.node = node
        self.descriptor = descriptor
        """O_PATH; the one that the node table keeps, if it keeps one: many handles of one directory are one descriptor."""
        self.uid = uid
        self.names: _Names | None = None


class _Names(list[bytes]):
    """The names of a listing, which handles that see the same ones share."""

    __slots__ = ("_quota", "_uid")

    def __init__(self, names: list[bytes], quota: Quota, uid: int) -> None:
        super().__init__(names)
        self._quota = quota
        self._uid = uid
        quota.add(uid, len(names))

    def __del__(self) -> None:
        self._quota.give_back(self._uid, len(self))


class Directories:
    """The operation group; one for each core."""

    def __init__(self, state: OverlayState) -> None:
        self._state = state
        self._nodes = state.nodes
        self._open: dict[int, _OpenDirectory] = {}
        self._latest: OrderedDict[tuple[int, int], weakref.ref[_OpenDirectory]] = OrderedDict()
        """By node and user: the handle that listed last."""
        self.on_listing: Callable[[int, list[bytes]], None] = lambda handle, names: None
        """Told the names that the offsets of a handle count from now on."""

    def inherit(self, handle: int, node_id: int, names: list[bytes] | None, *, uid: int = 0) -> None:
        """Open what a predecessor had open, under its handle and with the names that its offsets count."""
        opened = self._put(handle, node_id, uid)
        if names is not None:
            opened.names = _Names(names, self._state.allowances.names, uid)

    def has(self, handle: int) -> bool:
        """Whether it is open."""
        return handle in self._open

    def opendir(self, node_id: int, *, uid: int = 0) -> int:
        """``uid``: who opens it, whose allowance pays for it (OSError as `Quota.check`)."""
        self._state.allowances.descriptors.check(uid)
        handle = self._state.new_handle()
        self._put(handle, node_id, uid)
        return handle

    def _put(self, handle: int, node_id: int, uid: int) -> _OpenDirectory:
        node = self._nodes.get(node_id)
        opened = _OpenDirectory(node, self._nodes.directory(node), uid)
        self._state.allowances.descriptors.add(uid)
        self._open[handle] = opened
        return opened

    def readdir(self, handle: int, offset: int) -> Iterator[tuple[bytes, Attr, int]]:
        """Entries from ``offset`` (0: from the start, read anew) as (name, attributes, offset of the next),
        without "." and "..".

        No lookup is counted: the driver calls ``remember`` for each entry that the kernel took.
        """
        opened, names = self._names_from(handle, offset)
        for index in range(offset, len(names)):
            way = Way(opened.descriptor, names[index])
            try:
                _, attr = self._state.adopt(opened.node, names[index], way.stat, count=0)
            except FileNotFoundError:
                continue
            yield names[index], attr, index + 1

    def list_names(self, handle: int, offset: int) -> Iterator[tuple[bytes, int, int, int]]:
        """Entries as ``readdir``, each as (name, number, mode, offset of the next).

        Without nodes: the kernel is told a number and remembers nothing, so that it would never have a node forgotten. With
        them, a program that listed a million names left a million nodes in the worker.
        """
        opened, names = self._names_from(handle, offset)
        for index in range(offset, len(names)):
            way = Way(opened.descriptor, names[index])
            try:
                st = way.stat()
                number = self._nodes.id_of(st)
                if number is None:
                    number = self._state.adopt(opened.node, names[index], way.stat, count=0)[1].node
            except FileNotFoundError:
                continue
            yield names[index], number, st.st_mode, index + 1

    def _names_from(self, handle: int, offset: int) -> tuple[_OpenDirectory, _Names]:
        opened = self._directory(handle)
        if offset == 0 or opened.names is None:
            opened.names = self._listed(opened)
            self.on_listing(handle, opened.names)
        return opened, opened.names

    def _listed(self, opened: _OpenDirectory) -> _Names:
        opened.names = None  # its room is free
        found, key = self._read(opened), (opened.node.id, opened.uid)
        before = self._latest.get(key)
        other = before() if before is not None else None
        if other is not None and other.names == found:
            return (
                other.names
            )  # a directory of a million names that a hundred programs list is in memory once
        quota = self._state.allowances.names
        quota.check(opened.uid, len(found))
        self._latest[key] = weakref.ref(opened)
        if len(self._latest) > _LATEST_KEPT:
            self._latest.popitem(last=False)
        return _Names(found, quota, opened.uid)

    def _read(self, opened: _OpenDirectory) -> list[bytes]:
        fd = os.open(b".", _LISTING_FLAGS, dir_fd=opened.descriptor.fd)
        try:
            names = (os.fsencode(name) for name in os.listdir(fd))
            return [name for name in names if not is_reserved(self._nodes, opened.node, name)]
        finally:
            os.close(fd)

    def remember(self, node_id: int) -> None:
        """The kernel took an entry of a listing: one lookup more."""
        self._nodes.remember(node_id)

    def releasedir(self, handle: int) -> None:
        opened = self._open.pop(handle, None)
        if opened is not None:
            self._state.allowances.descriptors.remove(opened.uid)

    def fsyncdir(self, handle: int, datasync: bool) -> None:
        """The directory's names are durable on return."""
        fd = os.open(b".", _LISTING_FLAGS, dir_fd=self._directory(handle).descriptor.fd)
        try:
            (os.fdatasync if datasync else os.fsync)(fd)
        finally:
            os.close(fd)

    def _directory(self, handle: int) -> _OpenDirectory:
        opened = self._open.get(handle)
        if opened is None:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        return opened
