"""Names of the backing directory for operations that make or remove them: reserved names, entries, marks of new inodes."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable

from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import Attr, OverlayState, is_reserved
from ciuic.fuse_layer.system.path_handles import PathHandle


def entry_of(state: OverlayState, parent: Node, name: bytes) -> PathHandle:
    """Return the entry of a name in the backing directory.

    Raises:
        NotADirectoryError: ``parent`` is no directory.
        FileNotFoundError: the name is reserved, so the job does not see it.
    """
    if not parent.is_dir:
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
    if is_reserved(state.nodes, parent, name):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT))
    return PathHandle(state.nodes.directory(parent), name)


def new_entry_of(state: OverlayState, parent: Node, name: bytes) -> PathHandle:
    """Return the entry of a name that is to be made.

    Raises:
        PermissionError: the name is reserved.
    """
    if is_reserved(state.nodes, parent, name):
        raise PermissionError(errno.EACCES, "this name is reserved")
    return entry_of(state, parent, name)


def lstat_or_none(entry: PathHandle) -> os.stat_result | None:
    """Return the attributes of what a name leads to; None when it is free."""
    try:
        return entry.stat()
    except FileNotFoundError:
        return None


def adopt_created(
    state: OverlayState, parent: Node, name: bytes, read: Callable[[], os.stat_result]
) -> tuple[Node, Attr]:
    """Return the node of an inode that was just made under a name, marked as created; one lookup is counted."""
    node, attr = state.adopt(parent, name, read, count=1)
    if state.tracked(parent):
        state.tracker.mark_created(parent, name, node.ino)
    return node, attr
