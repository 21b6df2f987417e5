"""Nodes: what the kernel remembers of the backing directory.

A node stands for one backing inode. Its id is what the kernel holds: the backing inode number where that is
free, a number from a range of its own where it is not (a number reused while the kernel still remembers its
old owner, another file system mounted below), so an id never names two things at once. A node lives while the
kernel remembers it (``lookups``), a handle is open on it, or another node hangs below it. The way back to the inode of
each is found in node_ways.py.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer import ledger
from ciuic.fuse_layer.ledger import Inherited, NodeFacts
from ciuic.fuse_layer.ledger_writer import Ledger
from ciuic.fuse_layer.name_changes import Inodes, Names
from ciuic.fuse_layer.node import Node
from ciuic.fuse_layer.node_ways import NodeWays
from ciuic.fuse_layer.ways import Descriptor, stale

ROOT_ID: Final = 1
_SYNTHETIC_IDS_FROM: Final = 1 << 62
_LOOKED_UP_FOR_EVER: Final = 1 << 60
_EMPTIED_BY_SOMEBODY: Final = (stat.S_IFDIR | 0o755, 0, 0)
"""Attributes of a removed directory whose removal nobody noted: its worker died in it."""


class NodeTable(NodeWays):
    """All nodes of one root. Thread-safe; no system call is made under its lock except close, and what finding a
    predecessor's node in the archive takes."""

    def __init__(self, root_fd: int) -> None:
        st = os.fstat(root_fd)
        root = Node(ROOT_ID, st.st_dev, st.st_ino, stat.S_IFDIR, None, b".")
        root.lookups = 1
        super().__init__(root, root_fd, {ROOT_ID: root})
        self.ledger: Ledger | None = None
        """Where every change to the table is written for a successor, if there can be one."""
        self.device = st.st_dev
        self.without_default_acl: set[int] = set()
        """Ids of directories that were seen to have none; whoever gives one takes the id out."""
        self._by_key: dict[tuple[int, int], Node] = {}
        """Nodes whose id is not their inode number; the others are found by id. A million entries less, and their keys."""
        self._set_key(self.root)
        self._next_synthetic = _SYNTHETIC_IDS_FROM
        self.on_dropped: Callable[[int], None] = lambda ino: None
        """Told the inode number of a ``kept`` node that the kernel has forgotten; under the lock, so it must not wait."""
        self.nowhere: Callable[[tuple[int, int, int]], Descriptor] | None = None
        """Opens an empty directory that was removed, of this mode, owner and group: what is left of a predecessor's removed
        directories."""
        self._inherited: Inherited | None = None
        """Where nodes of a predecessor are that nobody has asked for yet."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, node_id: int) -> Node:
        """ESTALE for an id that the kernel was told to forget."""
        node = self._by_id.get(node_id)
        if node is None:
            node = self._from_predecessor(node_id)
            if node is None:
                raise stale()
        return node

    def find(self, st: os.stat_result) -> Node | None:
        return self._found(st.st_dev, st.st_ino)

    def by_ino(self, ino: int) -> Node | None:
        """The node of an inode of the root's own file system."""
        return self._found(self.device, ino)

    def _found(self, dev: int, ino: int) -> Node | None:
        if dev == self.device:
            node = self._by_id.get(ino) or self._from_predecessor(ino)
            if node is not None and node.keyed and node.ino == ino and node.dev == dev:
                return node
        node = self._by_key.get((dev, ino))
        if node is None and self._inherited is not None:
            node_id = self._inherited.odd(dev, ino)
            node = self._from_predecessor(node_id) if node_id is not None else None
            if node is not None and not (node.keyed and node.ino == ino and node.dev == dev):
                return None
        return node

    def id_of(self, st: os.stat_result) -> int | None:
        """The id that this inode has or, once it is looked up, would get; None where only making its node can tell."""
        with self._lock:
            node = self._found(st.st_dev, st.st_ino)
            if node is not None:
                return node.id if node.kind == stat.S_IFMT(st.st_mode) else None
            is_taken = st.st_ino in self._by_id
            if st.st_dev != self.device or is_taken or not ROOT_ID < st.st_ino < _SYNTHETIC_IDS_FROM:
                return None
            return st.st_ino

    def _set_key(self, node: Node) -> None:
        """From now on the node is the one that its inode number leads to."""
        node.keyed = True
        if node.id != node.ino or node.dev != self.device:
            self._by_key[node.dev, node.ino] = node

    def _number_reused(self, node: Node) -> None:
        """The number went to another inode; the kernel has not forgotten its old owner yet."""
        if self.ledger is not None:
            self.ledger.append(ledger.unlinked_record(node.id, 0, b"", gone=True))
        self._unkey(node)

    def _unkey(self, node: Node) -> None:
        node.keyed = False
        self._forget_key(node)

    def _forget_key(self, node: Node) -> None:
        if self._by_key.get((node.dev, node.ino)) is node:
            del self._by_key[node.dev, node.ino]

    # -- life ---------------------------------------------------------------------------------------

    def adopt(self, parent: Node, name: bytes, st: os.stat_result, *, count: int = 0) -> Node:
        """The node of the inode found under this name, made if new; adds ``count`` lookups."""
        with self._lock:
            node = self._found(st.st_dev, st.st_ino)
            if node is not None and node.kind != stat.S_IFMT(st.st_mode):
                self._number_reused(node)
                node = None
            if node is None:
                node = self._make(parent, name, st)
            elif node.parent is not parent or node.name != name:
                self._add_name(node, parent, name, several=st.st_nlink > 1 and not node.is_dir)
            node.privileged = bool(st.st_mode & (stat.S_ISUID | stat.S_ISGID))
            node.lookups += count
            return node

    def _make(self, parent: Node, name: bytes, st: os.stat_result) -> Node:
        node_id = st.st_ino
        if st.st_dev != self.device or node_id in self._by_id or not ROOT_ID < node_id < _SYNTHETIC_IDS_FROM:
            node_id = self._next_synthetic
            self._next_synthetic += 1
        kind = stat.S_IFMT(st.st_mode)
        # One number object for all: each of their own would be a tenth of the table.
        dev = self.device if st.st_dev == self.device else st.st_dev
        node = Node(node_id, dev, st.st_ino if node_id != st.st_ino else node_id, kind, parent, name)
        parent.below += 1
        self._by_id[node_id] = node
        self._set_key(node)
        if self.ledger is not None:
            above = parent.id if name else 0
            self.ledger.append(ledger.node_record(node_id, st.st_dev, st.st_ino, above, kind, name))
        return node

    def adopt_nameless(self, st: os.stat_result) -> Node:
        """The node of an inode that is open and has no name yet; one lookup counted."""
        with self._lock:
            stray = self._found(st.st_dev, st.st_ino)
            if stray is not None:
                self._number_reused(stray)
            node = self._make(self.root, b"", st)
            self.root.below -= 1
            node.parent = None
            node.lookups = 1
            return node

    def _add_name(self, node: Node, parent: Node, name: bytes, *, several: bool) -> None:
        if node is self.root:
            return
        if self.ledger is not None:
            self.ledger.append(ledger.name_record(node.id, parent.id, name, several=several))
        if several and node.parent is not None:
            if node.aliases is None:
                node.aliases = set()
            if (parent, name) not in node.aliases:
                node.aliases.add((parent, name))
                parent.below += 1
            return
        node.astray = False
        parent.below += 1  # first, so that letting go of the old name cannot drop the same directory
        old_names = node.names()
        node.parent, node.name, node.aliases = parent, name, None
        for old_parent, _ in old_names:
            self._drop_below(old_parent)

    def remember(self, node_id: int) -> None:
        """The kernel took one more reference (a directory listing that it accepted)."""
        with self._lock:
            self.get(node_id).lookups += 1

    def forget(self, node_id: int, count: int) -> None:
        with self._lock:
            node = self._by_id.get(node_id)
            if node is None:
                return
            node.lookups = max(0, node.lookups - count)
            self._maybe_drop(node)

    def open_handle(self, node: Node, handle: int, *, writes: bool) -> None:
        with self._lock:
            if node.handles is None:
                node.handles = {}
            node.handles[handle] = writes
            if writes:
                node.writers += 1

    def close_handle(self, node: Node, handle: int) -> None:
        with self._lock:
            if node.handles is not None:
                if node.handles.pop(handle, False):
                    node.writers -= 1
                if not node.handles:
                    node.handles = None
            self._maybe_drop(node)

    def _maybe_drop(self, node: Node) -> None:
        while node.lookups <= 0 and not node.below and node.handles is None and node is not self.root:
            if self._by_id.pop(node.id, None) is None:
                return
            self.without_default_acl.discard(node.id)
            if self.ledger is not None:
                self.ledger.append(ledger.dropped_record(node.id))
            self._forget_key(node)
            if node.kept:
                self.on_dropped(node.ino)
            self._directories.pop(node.id, None)
            self._removed.pop(node.id, None)
            self._last_attributes.pop(node.id, None)
            self._emptied.pop(node.id, None)
            names = node.names()
            node.parent, node.aliases = None, None
            for parent, _ in names[1:]:
                self._drop_below(parent)
            if not names:
                return
            node = names[0][0]
            node.below -= 1

    def _drop_below(self, parent: Node) -> None:
        parent.below -= 1
        self._maybe_drop(parent)

    # -- across the death of a worker ---------------------------------------------------------------

    def inherit(self, inherited: Inherited) -> None:
        """Go on with the nodes of a predecessor, each of which is made when it is asked for. How often the kernel has looked
        it up is not known: they stay for as long as the session does."""
        self._inherited = inherited
        self._next_synthetic = max(self._next_synthetic, inherited.last_node + 1)

    def _from_predecessor(self, node_id: int) -> Node | None:
        """The node, and everything above it, as a predecessor left them; None when it left none of this id."""
        if self._inherited is None:
            return None
        with self._lock:
            made: list[tuple[Node, NodeFacts]] = []
            wanted = [node_id]
            while wanted:
                this = wanted.pop()
                known = self._inherited.take(this) if this not in self._by_id else None
                if known is not None:
                    made.append((self._make_inherited(known), known))
                    wanted += [parent for parent, _ in (known.name or (ROOT_ID, b""), *known.aliases)]
            for node, known in made:
                self._inherit_names(node, known)
            return self._by_id.get(node_id)

    def _make_inherited(self, known: NodeFacts) -> Node:
        dev = self.device if known.dev == self.device else known.dev
        ino = known.id if known.ino == known.id else known.ino
        node = Node(known.id, dev, ino, known.kind, None, known.name[1] if known.name else b"")
        node.lookups = _LOOKED_UP_FOR_EVER
        node.keyed = not known.gone
        self._by_id[known.id] = node
        node.emptied = known.emptied
        if not known.gone:
            self._set_key(node)
        else:
            self._stand_in(node)
        return node

    def _stand_in(self, node: Node) -> None:
        """For a directory that was removed in a predecessor's time: the inode went with it; nothing was in it, and nothing can come
        into it."""
        if not node.is_dir or self.nowhere is None:
            return
        with suppress(OSError):
            nowhere = self._emptied[node.id] = self.nowhere(node.emptied or _EMPTIED_BY_SOMEBODY)
            st = os.fstat(nowhere.fd)
            node.dev, node.ino = st.st_dev, st.st_ino

    def _inherit_names(self, node: Node, known: NodeFacts) -> None:
        if known.name is not None:
            node.parent = self._by_id.get(known.name[0])
            if node.parent is not None:
                node.parent.below += 1
        elif not known.gone:
            node.astray = True
        for parent_id, name in known.aliases:
            parent = self._by_id.get(parent_id)
            if parent is not None:
                if node.aliases is None:
                    node.aliases = set()
                node.aliases.add((parent, name))
                parent.below += 1

    # -- names --------------------------------------------------------------------------------------

    def changing(
        self, parent: Node, name: bytes, ino: int, *, to: tuple[Node, bytes] | None = None,
        replaced: int = 0, exchange: bool = False, goes: tuple[Node, os.stat_result] | None = None,
    ) -> None:  # fmt: skip
        """Note that a name is about to be renamed (``to``) or removed, before the system call that does it. ``goes``: what loses its
        name, where the kernel remembers it."""
        if self.ledger is not None:
            if goes is not None and stat.S_ISDIR(goes[1].st_mode):
                st = goes[1]
                self.ledger.append(ledger.emptied_record(goes[0].id, st.st_mode, st.st_uid, st.st_gid))
            names = _names(parent, name, to)
            self.ledger.append(ledger.changing_record(names, Inodes(ino, replaced, exchange)))

    def unchanged(self, parent: Node, name: bytes, *, to: tuple[Node, bytes] | None = None) -> None:
        """Note that the file system refused what ``changing`` announced.

        Without this a successor, after the name was renamed later, would take it for removed: the file would get a second node, whose
        attributes the kernel keeps apart from those of the first.
        """
        if self.ledger is not None:
            self.ledger.append(ledger.unchanged_record(_names(parent, name, to)))

    def settled(self, names: Names) -> None:
        """Note that a successor knows what became of a predecessor's change."""
        if self.ledger is not None:
            self.ledger.append(ledger.unchanged_record(names))

    def renamed(self, node: Node, parent: Node, name: bytes, new_parent: Node, new_name: bytes) -> None:
        with self._lock:
            if self.ledger is not None:
                self.ledger.append(ledger.renamed_record(node.id, parent.id, name, new_parent.id, new_name))
            new_parent.below += 1
            if node.parent is parent and node.name == name:
                node.parent, node.name = new_parent, new_name
            else:
                if node.aliases is None:
                    node.aliases = set()
                node.aliases.discard((parent, name))
                node.aliases.add((new_parent, new_name))
            self._drop_below(parent)

    def unlinked(
        self, node: Node, parent: Node, name: bytes, *, gone: bool, keep: Descriptor | None,
        last: os.stat_result | None = None,
    ) -> None:  # fmt: skip
        """The name is no longer there. ``gone``: it was the last; ``keep`` then still leads to the inode, or ``last`` tells what
        its attributes were."""
        with self._lock:
            if self.ledger is not None:
                self.ledger.append(ledger.unlinked_record(node.id, parent.id, name, gone=gone))
            if gone:  # and with it every name that it had once
                names, node.parent, node.aliases, node.astray = node.names(), None, None, False
                for known_parent, _ in names:
                    self._drop_below(known_parent)
            elif node.parent is parent and node.name == name:
                if node.aliases:
                    node.parent, node.name = node.aliases.pop()
                else:
                    node.parent = None
                    node.astray = True
                self._drop_below(parent)
            elif node.aliases and (parent, name) in node.aliases:
                node.aliases.remove((parent, name))
                self._drop_below(parent)
            if gone:
                self._unkey(node)
                self._directories.pop(node.id, None)
                self._keep_removed(node, keep, last)
                if keep is None and node.emptied is not None:
                    self._stand_in(node)
            self._maybe_drop(node)

    def replaced(self, node: Node, st: os.stat_result) -> None:
        """The node's name was given a new inode; id and handles stay."""
        with self._lock:
            if self.ledger is not None:
                self.ledger.append(ledger.replaced_record(node.id, st.st_dev, st.st_ino))
            self._unkey(node)
            node.dev, node.ino = st.st_dev, st.st_ino
            other = self._found(node.dev, node.ino)
            if other is not None:
                self._unkey(other)
            self._set_key(node)


def _names(parent: Node, name: bytes, to: tuple[Node, bytes] | None) -> Names:
    return Names(parent.id, name, to[0].id, to[1]) if to is not None else Names(parent.id, name)
