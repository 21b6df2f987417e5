"""A node: one backing inode that the kernel remembers.

A host has millions of them, and this class takes most of a worker's memory: an attribute that has the same
value in nearly every node is kept in a dictionary of the few nodes that differ (``_RareAttribute``).
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
"""Number objects of the kinds, one for all nodes of a kind."""


# Two rare attributes of one node share its dictionary, and not all of them change under the table's lock:
# without this one, a change of one attribute could take back that of another.
_changing: Final = threading.Lock()


# A million nodes took 299 bytes each with a slot for every attribute, and 252 with the ten that all nodes
# need.
class _RareAttribute(Generic[_T]):
    """An attribute that nearly always has its usual value; any other value is kept in the node's dictionary ``unusual``."""

    def __init__(self, usual: _T) -> None:
        self._usual = usual

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, node: None, owner: type) -> _RareAttribute[_T]: ...
    @overload
    def __get__(self, node: Node, owner: type) -> _T: ...
    def __get__(self, node: Node | None, owner: type) -> _RareAttribute[_T] | _T:
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
    """A backing inode that the kernel remembers.

    Fields change under the lock of the table (node_table.py).
    """

    # Ten slots: with the object's head 112 bytes, and the allocator gives multiples of 16.
    __slots__ = ("below", "dev", "handles", "id", "ino", "kind", "lookups", "name", "parent", "unusual")

    aliases: _RareAttribute[set[tuple[Node, bytes]] | None] = _RareAttribute(None)
    """Further known names of the same inode."""
    keyed = _RareAttribute(True)
    """True if a lookup of the inode number finds this node."""
    astray = _RareAttribute(False)
    """True if only unknown names lead to its inode."""
    kept = _RareAttribute(False)
    """True if a hidden link must go with the node: a pipe or device without a name and without a handle that
    we know."""
    emptied: _RareAttribute[tuple[int, int, int] | None] = _RareAttribute(None)
    """Mode, owner and group of a directory whose removal a predecessor had begun."""
    privileged = _RareAttribute(False)
    """True if it had a set-user-id or set-group-id bit when its attributes were last read."""
    writers = _RareAttribute(0)
    """Number of its handles that can write. Counted, because a file may be open a hundred thousand times."""
    kept_mtime_ns: _RareAttribute[int | None] = _RareAttribute(None)
    """Modification time that the kernel shows, where our writes may have moved the backing file's
    (times.py)."""

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
        """Number of names that have this node as their parent."""
        self.handles: dict[int, bool] | None = None
        """Handle number → True if the handle can write; None where none is open."""

    @property
    def is_dir(self) -> bool:
        """True if the node is a directory."""
        return self.kind == stat.S_IFDIR

    @property
    def is_written(self) -> bool:
        """True if a handle that can write is open."""
        return self.writers > 0

    def note_mode(self, mode: int) -> None:
        """Note whether the inode has a set-id bit, from its attributes as just read."""
        self.privileged = bool(mode & (stat.S_ISUID | stat.S_ISGID))

    def names(self) -> list[tuple[Node, bytes]]:
        """Return every (parent, name) that is known to lead to the inode."""
        own = [(self.parent, self.name)] if self.parent is not None else []
        return own + list(self.aliases or ())
