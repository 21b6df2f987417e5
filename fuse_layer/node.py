"""A node: one backing inode that the kernel remembers.

A host has millions of them, and this class is most of what a worker's memory goes to: what nearly every node has in common
is not kept with each of them, but apart, with those few that differ (``_Seldom``).
"""

from __future__ import annotations

import stat
import threading
from typing import Any, Final, Generic, TypeVar, overload

_T = TypeVar("_T")
_KINDS: Final = {
    kind: kind
    for kind in (
        stat.S_IFREG,
        stat.S_IFDIR,
        stat.S_IFLNK,
        stat.S_IFIFO,
        stat.S_IFSOCK,
        stat.S_IFCHR,
        stat.S_IFBLK,
    )
}
"""One number object for all nodes of a kind."""


_changing: Final = threading.Lock()
"""Not every such attribute changes under the table's lock, and two of one node share the dictionary."""


class _Seldom(Generic[_T]):
    """An attribute that nearly always has its usual value; any other is kept in a dictionary that only such nodes have."""

    def __init__(self, usual: _T) -> None:
        self._usual = usual

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, node: None, owner: type) -> _Seldom[_T]: ...
    @overload
    def __get__(self, node: Node, owner: type) -> _T: ...
    def __get__(self, node: Node | None, owner: type) -> _Seldom[_T] | _T:
        if node is None:
            return self
        unusual = node.unusual
        if unusual is None:
            return self._usual
        value: _T = unusual.get(self._name, self._usual)
        return value

    def __set__(self, node: Node, value: _T) -> None:
        is_usual = value == self._usual
        if is_usual and node.unusual is None:
            return
        with _changing:
            unusual = node.unusual or {}
            if is_usual:
                unusual.pop(self._name, None)
            else:
                unusual[self._name] = value
            node.unusual = unusual or None


class Node:
    """Fields change under the lock of the table (nodes.py)."""

    # Ten: with the object's head 112 bytes, and the allocator gives multiples of 16.
    __slots__ = ("below", "dev", "handles", "id", "ino", "kind", "lookups", "name", "parent", "unusual")

    aliases: _Seldom[set[tuple[Node, bytes]] | None] = _Seldom(None)
    """Further known names of the same inode."""
    keyed = _Seldom(True)
    """Is the one that is found by its inode number."""
    astray = _Seldom(False)
    """Names that are not known lead to its inode, and none that is."""
    kept = _Seldom(False)
    """Has no name, no handle that we know, and a link of ours that must go with the node: a pipe or device."""
    emptied: _Seldom[tuple[int, int, int] | None] = _Seldom(None)
    """Mode, owner and group of a directory whose removal a predecessor had begun."""
    privileged = _Seldom(False)
    """Had a set-user-id or set-group-id bit when its attributes were last read."""
    writers = _Seldom(0)
    """Handles open on it that write: known without looking at all, of which there may be a hundred thousand."""
    kept_mtime_ns: _Seldom[int | None] = _Seldom(None)
    """Modification time that the kernel believes in, where our writes may have moved the backing file's (times.py)."""

    def __init__(self, node_id: int, dev: int, ino: int, kind: int, parent: Node | None, name: bytes) -> None:
        self.unusual: dict[str, Any] | None = None
        self.id = node_id
        self.dev = dev
        self.ino = ino
        self.kind = _KINDS.get(kind, kind)
        self.parent = parent
        """None for the root, and for a node all of whose known names are gone."""
        self.name = name
        self.lookups = 0
        self.below = 0
        """Nodes that have this one as a parent, once for each name."""
        self.handles: dict[int, bool] | None = None
        """Handle numbers open on it, with whether they write."""

    @property
    def is_dir(self) -> bool:
        return self.kind == stat.S_IFDIR

    @property
    def is_written(self) -> bool:
        """A handle that can write is open."""
        return self.writers > 0

    def names(self) -> list[tuple[Node, bytes]]:
        """Every (parent, name) known to lead here."""
        own = [(self.parent, self.name)] if self.parent is not None else []
        return own + list(self.aliases or ())
