"""The nodes of one root: which inodes of the backing directory the kernel remembers, and how to reach them.

A node stands for one backing inode. Its id is the number that the kernel holds: the backing inode number
where that is free, a number from a range of its own where it is not (a number reused while the kernel still
remembers its old owner, another file system mounted below), so an id never names two inodes at once. A node
lives while the kernel remembers it (``lookups``), a handle is open on it, or another node hangs below it.

Paths lead through names: every node knows its parent and name, a rename moves one edge, and a directory is
opened by walking down from the nearest one whose descriptor is cached. There is no descriptor per inode,
because of the limit of open files (hard limit 20,000 on common hosts;
docs/decisions/names-not-descriptors.md). Guarantees: what is opened is the node's inode and no other,
whatever happens to names meanwhile, or the answer is ESTALE.

A host has millions of nodes, which take most of a worker's memory: an attribute that has the same value in
nearly every node is kept in a dictionary of the few nodes that differ (``_RareAttribute``).
"""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from typing import Any, Final, Generic, TypeVar, overload

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.journal.inherited_session import InheritedSession, NodeFacts
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.system.path_handles import Descriptor, PathHandle, stale, wait_for_rename
from ciuic.system.disk import PIN_DIRECTORY

_T = TypeVar("_T")
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
_FORGOTTEN_AT_ONCE: Final = 500
"""Nodes that are forgotten without giving the table to other threads: some three milliseconds."""
ROOT_ID: Final = 1
# Ids that are no inode number: greater than most inode numbers, and below 2**63, because the archive's keys
# are signed integers of SQLite.
_SYNTHETIC_IDS_FROM: Final = 1 << 62
SNAPSHOTS_ID: Final = (1 << 63) - 1
"""Id of the directory that a root's snapshots are mounted on, which is no inode (kernel/driver.py)."""
# Lookups of a predecessor's node, whose number is not known: no FORGET takes so many back.
_LOOKED_UP_FOR_EVER: Final = 1 << 60
_DEFAULT_EMPTIED: Final = (stat.S_IFDIR | 0o755, 0, 0)
"""Mode, owner and group shown for a removed directory where the journal does not have them."""


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
        is_usual, unusual = value == self._usual, node.unusual
        if is_usual and (unusual is None or self._name not in unusual):
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
    written_past_cache = _RareAttribute(False)
    """True if it was opened for writes that pass the kernel's cache by (O_DIRECT), beside which pages may have become stale."""
    kept_mtime_ns: _RareAttribute[int | None] = _RareAttribute(None)
    """Modification time that the kernel shows, where our writes may have moved the backing file's
    (`KernelTimes`)."""

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
    def is_counted(self) -> bool:
        """True if the node goes when the kernel forgets it; one of a predecessor stays."""
        return self.lookups < _LOOKED_UP_FOR_EVER >> 1

    @property
    def is_written(self) -> bool:
        """True if a handle that can write is open."""
        return self.writers > 0

    def note_mode(self, mode: int) -> None:
        """Note whether the inode has a set-id bit, from its attributes as just read."""
        if mode & (stat.S_ISUID | stat.S_ISGID):
            self.privileged = True
        elif self.unusual is not None:
            self.privileged = False

    def names(self) -> list[tuple[Node, bytes]]:
        """Return every (parent, name) that is known to lead to the inode."""
        own = [(self.parent, self.name)] if self.parent is not None else []
        return own if self.unusual is None else own + list(self.aliases or ())


class NodeTable:
    """All nodes of one root. Thread-safe.

    No system call is made under its lock except close, and those of finding a predecessor's node in the
    archive.
    """

    def __init__(self, root_fd: int) -> None:
        st = os.fstat(root_fd)
        root = Node(ROOT_ID, st.st_dev, st.st_ino, stat.S_IFDIR, None, b".")
        root.lookups = 1
        self.root = root
        self.root_directory = Descriptor(os.dup(root_fd))
        # Names change under it, so that a walk sees whole edges. Reentrant, because finding a node of a predecessor
        # makes nodes.
        self._lock = threading.RLock()
        self._by_id = {ROOT_ID: root}
        self._directories: OrderedDict[int, Descriptor] = OrderedDict()
        self._removed: OrderedDict[int, Descriptor] = OrderedDict()
        """Descriptors by node id of inodes that lost their last name while the kernel remembers them."""
        self._last_attributes: OrderedDict[int, os.stat_result] = OrderedDict()
        self._max_directories, self._max_removed = _MAX_DIRECTORIES, _MAX_REMOVED
        self._emptied: dict[int, Descriptor] = {}
        """Stand-ins by node id for directories that were removed in a predecessor's time."""
        self.journal: JournalWriter | None = None
        """Journal of every change to the table, for a successor; None where there can be none."""
        self.replacements = 0
        """Number of nodes that were given another inode (`replaced`) so far."""
        self._held: list[bytes] | None = None
        """Records that are written at once, by who holds the lock."""
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
            OSError: ESTALE for an id that the kernel has forgotten, EROFS for `SNAPSHOTS_ID`.
        """
        node = self._by_id.get(node_id)
        if node is None:
            if node_id == SNAPSHOTS_ID:
                # Not ESTALE, after which the kernel walks the path once more and asks for its names.
                raise OSError(errno.EROFS, os.strerror(errno.EROFS))
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

    def ids_of(self, dev: int, inos: Sequence[int], modes: Sequence[int]) -> list[int | None]:
        """Return the ids that inodes of a file system have or would get at their lookup.

        None where only making its node can tell, and where ``modes`` has no kind.
        """
        ids: list[int | None] = []
        with self._lock:
            by_id, others = self._by_id, dev != self.device
            # Half of a listing's time would be calls that find nothing.
            unknown = not others and not self._by_key and self._inherited is None
            for ino, mode in zip(inos, modes, strict=True):
                node = None if unknown and ino not in by_id else self._found(dev, ino)
                if node is not None:
                    ids.append(node.id if node.kind == stat.S_IFMT(mode) else None)
                elif others or not mode or ino in by_id or not ROOT_ID < ino < _SYNTHETIC_IDS_FROM:
                    ids.append(None)
                else:
                    ids.append(ino)
        return ids

    def _set_key(self, node: Node) -> None:
        """Make the node the one that its inode number leads to."""
        if node.unusual is not None:
            node.keyed = True
        if node.id != node.ino or node.dev != self.device:
            self._by_key[node.dev, node.ino] = node

    def _number_reused(self, node: Node) -> None:
        """Note that the node's inode number belongs to another inode now; the kernel has not forgotten the old one yet."""
        if self.journal is not None:
            self._note(records.unlinked_record(node.id, 0, b"", gone=True))
        self._unkey(node)

    def _unkey(self, node: Node) -> None:
        node.keyed = False
        self._forget_key(node)

    def _forget_key(self, node: Node) -> None:
        if self._by_key.get((node.dev, node.ino)) is node:
            del self._by_key[node.dev, node.ino]

    # -- life ---------------------------------------------------------------------------------------

    def adopt(
        self, parent: Node, name: bytes, st: os.stat_result, replacements: int, *, count: int = 0
    ) -> Node | None:
        """Return the node of the inode found under this name, made if new; add ``count`` lookups.

        None, and nothing is done, where `replacements` has changed since before it was looked at: what was found may be the inode
        that a node had.
        """
        with self._lock:
            if self.replacements != replacements:
                return None
            node = self._adopt(parent, name, st)
            node.note_mode(st.st_mode)
            node.lookups += count
            return node

    def adopt_all(
        self, parent: Node, found: Sequence[tuple[bytes, os.stat_result]], replacements: int
    ) -> list[Node] | None:
        """Return the nodes of the inodes found under names of one directory, made if new; add a lookup to each.

        None as of `adopt`.
        """
        with self._lock, self._in_one_write():
            if self.replacements != replacements:
                return None
            nodes = [self._adopt(parent, name, st) for name, st in found]
            for node, (_, st) in zip(nodes, found, strict=True):
                node.lookups += 1
                # What was found may be older than a change of the mode: no set-id bit is taken for gone.
                if st.st_mode & (stat.S_ISUID | stat.S_ISGID):
                    node.privileged = True
            return nodes

    def _adopt(self, parent: Node, name: bytes, st: os.stat_result) -> Node:
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
        return node

    @contextmanager
    def _in_one_write(self) -> Iterator[None]:
        """Write the table's records of the body to the journal at once, at its end. Under the lock."""
        held: list[bytes] = []
        self._held = held
        try:
            yield
        finally:
            self._held = None
            if held and self.journal is not None:
                self.journal.append(b"".join(held))

    def _note(self, record: bytes) -> None:
        if self._held is not None:
            self._held.append(record)
        elif self.journal is not None:
            self.journal.append(record)

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
            self._note(records.node_record(node_id, st.st_dev, st.st_ino, above, kind, name))
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
            self._note(records.name_record(node.id, parent.id, name, several=several))
        if several and node.parent is not None:
            if node.aliases is None:
                node.aliases = set()
            if (parent, name) not in node.aliases:
                node.aliases.add((parent, name))
                parent.below += 1
            return
        node.astray = False
        # It would keep the space of a file that loses this name too.
        self._removed.pop(node.id, None)
        # Before the old names are dropped: one of them may be in the same directory, which must not be
        # dropped with it.
        parent.below += 1
        old_names = node.names()
        node.parent, node.name, node.aliases = parent, name, None
        for old_parent, _ in old_names:
            self._drop_below(old_parent)

    def remember(self, node_id: int) -> None:
        """Count one more lookup."""
        with self._lock:
            self.get(node_id).lookups += 1

    def forget(self, node_id: int, count: int) -> None:
        """Take ``count`` lookups back; drop the node when nothing refers to it any more."""
        with self._lock:
            self._forget(node_id, count)

    def forget_all(self, forgotten: Iterable[tuple[int, int]]) -> None:
        """Take lookups back as `forget`, of many nodes."""
        left = iter(forgotten)
        # In slices: the kernel forgets 69,000 nodes at once, and other threads wait for the lock.
        while some := list(islice(left, _FORGOTTEN_AT_ONCE)):
            with self._lock, self._in_one_write():
                for node_id, count in some:
                    self._forget(node_id, count)

    def _forget(self, node_id: int, count: int) -> None:
        node = self._by_id.get(node_id)
        if node is not None:
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
                self._note(records.dropped_record(node.id))
            self._forget_key(node)
            if node.kept:
                self.on_dropped(node.ino)
            self._directories.pop(node.id, None)
            self._removed.pop(node.id, None)
            self._last_attributes.pop(node.id, None)
            self._emptied.pop(node.id, None)
            names, node.parent = node.names(), None
            if node.unusual is not None:
                node.aliases = None
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
                self._note(records.renamed_record(node.id, parent.id, name, new_parent.id, new_name))
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
            keep: descriptor that still leads to the inode where no known name does.
            last: attributes of the inode, where its space is freed.
        """
        with self._lock:
            if self.journal is not None:
                self._note(records.unlinked_record(node.id, parent.id, name, gone=gone))
            if gone:
                # No name leads to the inode any more, so every other one in the table is out of date.
                names, node.parent = node.names(), None
                if node.unusual is not None:
                    node.aliases, node.astray = None, False
                for known_parent, _ in names:
                    self._drop_below(known_parent)
            elif node.parent is parent and node.name == name:
                if node.aliases:
                    node.parent, node.name = node.aliases.pop()
                else:
                    node.parent = None
                    node.astray = True
                    # The file is there: a program may refer to it by an O_PATH descriptor.
                    self._keep_removed(node, keep, None)
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

    def replacing(self, node: Node, st: os.stat_result) -> None:
        """Have an inode that is about to take the node's name lead to the node, too, until `replaced` or `not_replaced`."""
        with self._lock:
            # The number may have belonged to a removed inode that the kernel has not forgotten yet.
            other = self._found(st.st_dev, st.st_ino)
            if other is not None:
                self._unkey(other)
            self._by_key[st.st_dev, st.st_ino] = node

    def not_replaced(self, node: Node, st: os.stat_result) -> None:
        """End what `replacing` began, if it did: the inode has not taken the node's name."""
        with self._lock:
            if self._by_key.get((st.st_dev, st.st_ino)) is node:
                del self._by_key[st.st_dev, st.st_ino]

    def replaced(self, node: Node, st: os.stat_result, keep: Descriptor | None = None) -> None:
        """Give the node the inode that took its name, or ``keep`` where it has none; id and handles stay."""
        with self._lock:
            self.replacements += 1
            if self.journal is not None:
                self._note(records.replaced_record(node.id, st.st_dev, st.st_ino))
            self._unkey(node)
            node.dev, node.ino = st.st_dev, st.st_ino
            if keep is not None:
                self._keep_removed(node, keep, None)
            else:
                self._set_key(node)

    # -- reaching an inode ----------------------------------------------------------------------------

    def keep_at_most(self, limit: int) -> None:
        """Limit cached descriptors in a process that may have ``limit`` of them: most are for files that programs open."""
        self._max_directories = max(1, min(_MAX_DIRECTORIES, limit // 8))
        self._max_removed = max(1, min(_MAX_REMOVED, limit // 16))

    def directory(self, node: Node) -> Descriptor:
        """Return an O_PATH descriptor of the directory.

        Raises:
            OSError: ESTALE when the directory is not where its names say.
        """
        opened = self._opened_directory(node)
        if opened is not None:
            return opened
        # A rename is done on disk before its thread moves the edge in the table: ESTALE would reach the job
        # for a file that is there, so the walk is tried again.
        for attempt in range(_RENAME_RETRIES):
            wait_for_rename(attempt)
            try:
                return self._walk(node)
            except FileNotFoundError:
                # A directory was renamed during the walk. Its edge moves next: walk again.
                continue
        raise stale()

    def _opened_directory(self, node: Node) -> Descriptor | None:
        if node is self.root:
            return self.root_directory
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
            found = self._opened_directory(at)
            if found is None:
                with self._lock:
                    chain.append((at, at.name))
                    at = at.parent
        if found is None:
            raise stale()
        for child, name in reversed(chain):
            if not child.is_dir:
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            opened = Descriptor(os.open(name, PIN_DIRECTORY, dir_fd=found.fd))
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
        removed = None
        with self._lock:
            parent, name = node.parent, node.name
            if parent is None:
                removed = self._removed.get(node.id) or self._emptied.get(node.id)
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
