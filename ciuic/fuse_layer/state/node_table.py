"""The table of nodes: which inodes of the backing directory the kernel remembers.

A node stands for one backing inode. Its id is the number that the kernel holds: the backing inode number
where that is free, a number from a range of its own where it is not (a number reused while the kernel still
remembers its old owner, another file system mounted below), so an id never names two inodes at once. A node
lives while the kernel remembers it (``lookups``), a handle is open on it, or another node hangs below it.
node_paths.py finds the inode of a node.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.inherited_session import InheritedSession, NodeFacts
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.node_paths import NodePaths
from ciuic.fuse_layer.system.path_handles import Descriptor, stale

ROOT_ID: Final = 1
# Ids that are no inode number: greater than most inode numbers, and below 2**63, because the archive's keys
# are signed integers of SQLite.
_SYNTHETIC_IDS_FROM: Final = 1 << 62
# Lookups of a predecessor's node, whose number is not known: no FORGET takes so many back.
_LOOKED_UP_FOR_EVER: Final = 1 << 60
_DEFAULT_EMPTIED: Final = (stat.S_IFDIR | 0o755, 0, 0)
"""Mode, owner and group shown for a removed directory where the journal does not have them."""


class NodeTable(NodePaths):
    """All nodes of one root. Thread-safe.

    No system call is made under its lock except close, and those of finding a predecessor's node in the
    archive.
    """

    def __init__(self, root_fd: int) -> None:
        st = os.fstat(root_fd)
        root = Node(ROOT_ID, st.st_dev, st.st_ino, stat.S_IFDIR, None, b".")
        root.lookups = 1
        super().__init__(root, root_fd, {ROOT_ID: root})
        self.journal: JournalWriter | None = None
        """Journal of every change to the table, for a successor; None where there can be none."""
        self.device = st.st_dev
        self.without_default_acl: set[int] = set()
        """Ids of directories that were seen to have no default ACL; setting one takes the id out."""
        # Only nodes whose id is not their inode number: the others are found by id, which saves a million
        # entries and keys.
        self._by_key: dict[tuple[int, int], Node] = {}
        self._set_key(self.root)
        self._next_synthetic = _SYNTHETIC_IDS_FROM
        self.on_dropped: Callable[[int], None] = lambda ino: None
        """Called with the inode number of a ``kept`` node that the kernel has forgotten; under the lock, so
        it must not wait."""
        self.stand_in: Callable[[tuple[int, int, int]], Descriptor] | None = None
        """Opens a removed empty directory of a given mode, owner and group, to stand for one that a
        predecessor removed."""
        self._inherited: InheritedSession | None = None
        """Tables of a predecessor, from which a node is taken when the kernel speaks of it."""

    def __len__(self) -> int:
        return len(self._by_id)

    def get(self, node_id: int) -> Node:
        """Return the node of an id.

        Raises:
            OSError: ESTALE for an id that the kernel has forgotten.
        """
        node = self._by_id.get(node_id)
        if node is None:
            node = self._from_predecessor(node_id)
            if node is None:
                raise stale()
        return node

    def find(self, st: os.stat_result) -> Node | None:
        """Return the node of an inode; None where the kernel does not remember it."""
        return self._found(st.st_dev, st.st_ino)

    def by_ino(self, ino: int) -> Node | None:
        """Return the node of an inode of the root's own file system; None where the kernel does not remember it."""
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
        """Return the id that this inode has or would get at its lookup; None where only making its node can tell."""
        with self._lock:
            node = self._found(st.st_dev, st.st_ino)
            if node is not None:
                return node.id if node.kind == stat.S_IFMT(st.st_mode) else None
            is_taken = st.st_ino in self._by_id
            if st.st_dev != self.device or is_taken or not ROOT_ID < st.st_ino < _SYNTHETIC_IDS_FROM:
                return None
            return st.st_ino

    def _set_key(self, node: Node) -> None:
        """Make the node the one that its inode number leads to."""
        node.keyed = True
        if node.id != node.ino or node.dev != self.device:
            self._by_key[node.dev, node.ino] = node

    def _number_reused(self, node: Node) -> None:
        """Note that the node's inode number belongs to another inode now; the kernel has not forgotten the old one yet."""
        if self.journal is not None:
            self.journal.append(records.unlinked_record(node.id, 0, b"", gone=True))
        self._unkey(node)

    def _unkey(self, node: Node) -> None:
        node.keyed = False
        self._forget_key(node)

    def _forget_key(self, node: Node) -> None:
        if self._by_key.get((node.dev, node.ino)) is node:
            del self._by_key[node.dev, node.ino]

    # -- life ---------------------------------------------------------------------------------------

    def adopt(self, parent: Node, name: bytes, st: os.stat_result, *, count: int = 0) -> Node:
        """Return the node of the inode found under this name, made if new; add ``count`` lookups."""
        with self._lock:
            node = self._found(st.st_dev, st.st_ino)
            # Another type under the same number: it was reused, and the kernel has not forgotten its old
            # owner yet.
            if node is not None and node.kind != stat.S_IFMT(st.st_mode):
                self._number_reused(node)
                node = None
            if node is None:
                node = self._make(parent, name, st)
            elif node.parent is not parent or node.name != name:
                self._add_name(node, parent, name, several=st.st_nlink > 1 and not node.is_dir)
            node.note_mode(st.st_mode)
            node.lookups += count
            return node

    def _make(self, parent: Node, name: bytes, st: os.stat_result) -> Node:
        node_id = st.st_ino
        # The inode number where that is free, so that st_ino survives a remount.
        if st.st_dev != self.device or node_id in self._by_id or not ROOT_ID < node_id < _SYNTHETIC_IDS_FROM:
            node_id = self._next_synthetic
            self._next_synthetic += 1
        kind = stat.S_IFMT(st.st_mode)
        # One number object for all nodes: one for each would be a tenth of the table's memory.
        dev = self.device if st.st_dev == self.device else st.st_dev
        node = Node(node_id, dev, st.st_ino if node_id != st.st_ino else node_id, kind, parent, name)
        parent.below += 1
        self._by_id[node_id] = node
        self._set_key(node)
        if self.journal is not None:
            above = parent.id if name else 0
            self.journal.append(records.node_record(node_id, st.st_dev, st.st_ino, above, kind, name))
        return node

    def adopt_nameless(self, st: os.stat_result) -> Node:
        """Make the node of an inode that is open and has no name yet; count one lookup."""
        with self._lock:
            stray = self._found(st.st_dev, st.st_ino)
            if stray is not None:
                self._number_reused(stray)
            node = self._make(self.root, b"", st)
            # `_make` has counted a name below the root, and there is none.
            self.root.below -= 1
            node.parent = None
            node.lookups = 1
            return node

    def _add_name(self, node: Node, parent: Node, name: bytes, *, several: bool) -> None:
        if node is self.root:
            return
        if self.journal is not None:
            self.journal.append(records.name_record(node.id, parent.id, name, several=several))
        if several and node.parent is not None:
            if node.aliases is None:
                node.aliases = set()
            if (parent, name) not in node.aliases:
                node.aliases.add((parent, name))
                parent.below += 1
            return
        node.astray = False
        # Before the old names are dropped: one of them may be in the same directory, which must not be
        # dropped with it.
        parent.below += 1
        old_names = node.names()
        node.parent, node.name, node.aliases = parent, name, None
        for old_parent, _ in old_names:
            self._drop_below(old_parent)

    def remember(self, node_id: int) -> None:
        """Count one more lookup, of an entry of a listing that the kernel accepted."""
        with self._lock:
            self.get(node_id).lookups += 1

    def forget(self, node_id: int, count: int) -> None:
        """Take ``count`` lookups back; drop the node when nothing refers to it any more."""
        with self._lock:
            node = self._by_id.get(node_id)
            if node is None:
                return
            node.lookups = max(0, node.lookups - count)
            self._maybe_drop(node)

    def open_handle(self, node: Node, handle: int, *, writes: bool) -> None:
        """Note a handle that was opened on the node."""
        with self._lock:
            if node.handles is None:
                node.handles = {}
            node.handles[handle] = writes
            if writes:
                node.writers += 1

    def close_handle(self, node: Node, handle: int) -> None:
        """Note that a handle on the node was closed."""
        with self._lock:
            if node.handles is not None:
                if node.handles.pop(handle, False):
                    node.writers -= 1
                if not node.handles:
                    node.handles = None
            self._maybe_drop(node)

    def _maybe_drop(self, node: Node) -> None:
        # Upwards, because a directory may have lived for this child alone. By a loop: a tree may be deeper
        # than Python's stack.
        while node.lookups <= 0 and not node.below and node.handles is None and node is not self.root:
            if self._by_id.pop(node.id, None) is None:
                return
            self.without_default_acl.discard(node.id)
            if self.journal is not None:
                self.journal.append(records.dropped_record(node.id))
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

    def inherit(self, inherited: InheritedSession) -> None:
        """Go on with the nodes of a predecessor, each of which is made when the kernel speaks of it.

        How often the kernel has looked one up is not known: such nodes stay for as long as the session does.
        """
        self._inherited = inherited
        self._next_synthetic = max(self._next_synthetic, inherited.last_node + 1)

    def _from_predecessor(self, node_id: int) -> Node | None:
        """Return the node, made with everything above it as a predecessor left them; None when it left none of this id."""
        if self._inherited is None:
            return None
        with self._lock:
            # Parents are made with their children, by a list and not by recursion: a tree may be deeper than
            # Python's stack.
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
        """Give a directory that was removed in a predecessor's time another inode, because its own is gone.

        It was empty, and nothing can be made in it, so a removed empty directory of the same mode and owner
        serves for it.
        """
        if not node.is_dir or self.stand_in is None:
            return
        with suppress(OSError):
            stand_in = self._emptied[node.id] = self.stand_in(node.emptied or _DEFAULT_EMPTIED)
            st = os.fstat(stand_in.fd)
            node.dev, node.ino = st.st_dev, st.st_ino

    def _inherit_names(self, node: Node, known: NodeFacts) -> None:
        if known.name is not None:
            # None where the parent itself is gone: no name leads to the node then.
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

    def renamed(self, node: Node, parent: Node, name: bytes, new_parent: Node, new_name: bytes) -> None:
        """Move one name of the node."""
        with self._lock:
            if self.journal is not None:
                self.journal.append(records.renamed_record(node.id, parent.id, name, new_parent.id, new_name))
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
        """Take a name from the node.

        Args:
            node: node that loses the name.
            parent: directory of the name.
            name: name that is gone.
            gone: it was the last one.
            keep: descriptor that still leads to the inode then.
            last: attributes of the inode, where its space is freed.
        """
        with self._lock:
            if self.journal is not None:
                self.journal.append(records.unlinked_record(node.id, parent.id, name, gone=gone))
            if gone:
                # No name leads to the inode any more, so every other one in the table is out of date.
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
        """Give the node the inode that took its name; id and handles stay."""
        with self._lock:
            if self.journal is not None:
                self.journal.append(records.replaced_record(node.id, st.st_dev, st.st_ino))
            self._unkey(node)
            node.dev, node.ino = st.st_dev, st.st_ino
            # The number may have belonged to a removed inode that the kernel has not forgotten yet.
            other = self._found(node.dev, node.ino)
            if other is not None:
                self._unkey(other)
            self._set_key(node)
