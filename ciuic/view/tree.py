"""Nodes of a view of snapshots: what a name leads to, the attributes that it has, and the content of files.

A view of all snapshots has a directory for each, named after its time and its id, and ``latest``, a symbolic link to the newest.
In a view of one root that directory is the root as it was, with the access that it gave then. Otherwise
its roots lie below it at the paths that they had. Directories above a root belong to no snapshot: they look as those of the
host do now, so that a view which other users may read shows nothing below a directory that is closed to them.

Guarantees: what a node shows never changes, but for the list of snapshots, which is read again when it has changed. Content is
checked against its chunk ids when it is read. Names of an inode with several names are one node.

`ViewTree` is not thread-safe; `filesystem` serves one request at a time.
"""

from __future__ import annotations

import errno
import os
import stat
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final, NamedTuple

import xxhash

from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.lookup import is_within, resolve
from ciuic.repository.snapshots import CommittedSnapshots
from ciuic.types import ChunkId, Entry, RootRecord, Snapshot, SnapshotId

ROOT_ID: Final = 1
LATEST: Final = b"latest"
# Blocks that are read at once where a file is read from its beginning to its end: 4 MiB of 256 KiB.
_READ_AHEAD: Final = 16
_CACHE_BYTES: Final = 64 << 20
# An inode number of a snapshot says nothing outside of it, and 1 is that of the view itself.
_INO_MASK: Final = (1 << 63) - 1


class Node:
    """File or directory of a view, as long as the kernel knows it."""

    __slots__ = (
        "blocks",
        "entry",
        "id",
        "ino",
        "keys",
        "lookups",
        "names",
        "next_block",
        "path",
        "root",
        "snapshot",
    )

    def __init__(
        self,
        id_: int,
        ino: int,
        entry: Entry,
        snapshot: Snapshot | None = None,
        root: RootRecord | None = None,
        path: bytes = b"",
    ) -> None:
        self.id: Final = id_
        self.ino: Final = ino
        self.entry: Final = entry
        """Its attributes, with those of its inode if that has several names."""
        self.snapshot: Final = snapshot
        """The snapshot that it belongs to; None for the list of snapshots."""
        self.root: Final = root
        """Root that it lies in; None above the roots."""
        self.path: Final = path
        """Path in the host; empty for the top of a snapshot."""
        self.lookups = 0
        self.keys: list[tuple[int, bytes]] = []
        """Names that lead to it: parent and name."""
        self.blocks = -1
        """Blocks with data; -1 while not counted."""
        self.next_block = 0
        """Block behind the one that was read last."""


class ListedName(NamedTuple):
    """Name in a directory; its node is made when the kernel asks for it."""

    name: bytes
    mode: int
    make: Callable[[], Node]


class ViewTree:
    """Nodes of all snapshots, or of one."""

    def __init__(
        self,
        snapshots: CommittedSnapshots,
        repository_of: Callable[[SnapshotId], Repository],
        only: SnapshotId | None = None,
        of_root: bytes | None = None,
    ) -> None:
        """Begin.

        Args:
            snapshots: Snapshots to show.
            repository_of: Returns the repository that has a snapshot.
            only: The snapshot whose roots lie at the top; None for a directory for each.
            of_root: The root that the directory of each snapshot is; None for all roots below it.

        Raises:
            NotFound, Damaged: that snapshot cannot be read.
        """
        self._snapshots = snapshots
        self._repository_of = repository_of
        self._of_root = of_root
        self._nodes: dict[int, Node] = {}
        self._by_name: dict[tuple[int, bytes], Node] = {}
        self._by_link: dict[tuple[SnapshotId, bytes, int], Node] = {}
        self._next_id = ROOT_ID + 1
        self._state: object = None
        self._names: dict[bytes, SnapshotId] = {}
        self._newest = b""
        self._cache: OrderedDict[ChunkId, bytes] = OrderedDict()
        self._cached_bytes = 0
        snapshot = None if only is None else snapshots.load(only)
        self.top = self._nodes[ROOT_ID] = Node(ROOT_ID, ROOT_ID, _directory(b"", snapshot), snapshot)
        self.top.lookups = 1
        if snapshot is None:
            self._refresh()

    def node(self, id_: int) -> Node:
        """Return a node that the kernel knows. OSError (ESTALE) if there is none."""
        found = self._nodes.get(id_)
        if found is None:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        return found

    def forget(self, id_: int, lookups: int) -> None:
        """Take back so many lookups; with the last one the node is dropped."""
        node = self._nodes.get(id_)
        if node is None or node is self.top:
            return
        node.lookups -= lookups
        if node.lookups > 0:
            return
        del self._nodes[id_]
        for key in node.keys:
            self._by_name.pop(key, None)
        if node.snapshot is not None and node.root is not None:
            self._by_link.pop((node.snapshot.id, node.root.path, node.entry.link), None)

    def child(self, parent: Node, name: bytes) -> Node:
        """Return what ``name`` is in a directory. OSError (ENOENT, ENOTDIR) if nothing; Damaged if it cannot be read."""
        found = self._by_name.get((parent.id, name))
        if found is not None:
            return found
        if parent.snapshot is None:
            return self._snapshot_node(name)
        if parent.root is None:
            if name in self._below(parent.snapshot, parent.path):
                return self._in_path(parent, name)
        elif not parent.entry.is_dir:
            raise OSError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        else:
            repository = self._repository_of(parent.snapshot.id)
            entry = repository.trees.entry(parent.entry.content, name) if parent.entry.content else None
            if entry is not None:
                return self._entry_node(parent, entry)
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))

    def entries(self, node: Node) -> Iterator[ListedName]:
        """Yield what is in a directory, without ``.`` and ``..``. Raises Damaged while it is read."""
        snapshot = node.snapshot
        if snapshot is None:
            self._refresh()
            for name in sorted(self._names):
                yield ListedName(name, stat.S_IFDIR, partial(self._snapshot_node, name))
            if self._newest:
                yield ListedName(LATEST, stat.S_IFLNK, partial(self._snapshot_node, LATEST))
        elif node.root is None:
            for name in sorted(self._below(snapshot, node.path)):
                yield ListedName(name, stat.S_IFDIR, partial(self.child, node, name))
        elif node.entry.content:
            for entry in self._repository_of(snapshot.id).trees.entries(node.entry.content):
                yield ListedName(entry.name, entry.mode, partial(self._entry_node, node, entry))

    def xattrs(self, node: Node) -> tuple[tuple[bytes, bytes], ...]:
        """Return names and values of the extended attributes. Raises Damaged."""
        if node.snapshot is None or node.root is None:
            return ()
        return self._repository_of(node.snapshot.id).trees.xattrs(node.entry)

    def data_blocks(self, node: Node) -> int:
        """Return how many blocks of a file have data; holes take no space. Raises Damaged."""
        if node.blocks < 0:
            node.blocks = sum(1 for _ in self._ids(node, 0)) if node.snapshot is not None else 0
        return node.blocks

    def block_size(self, node: Node) -> int:
        """Return the size of the blocks of a file in bytes."""
        assert node.snapshot is not None
        return self._repository_of(node.snapshot.id).block_size

    def read(self, node: Node, offset: int, size_bytes: int) -> bytearray:
        """Return the content from ``offset`` on, shorter only at the end of the file.

        Raises:
            Damaged: a block of it cannot be read.
        """
        size_bytes = max(0, min(size_bytes, node.entry.size_bytes - offset))
        found = bytearray(size_bytes)
        if not size_bytes:
            return found
        block_size = self.block_size(node)
        first, last = offset // block_size, (offset + size_bytes - 1) // block_size
        for number, data in self._blocks(node, first, last):
            start = number * block_size - offset
            piece = memoryview(data)[max(0, -start) : size_bytes - start]
            at = max(0, start)
            found[at : at + len(piece)] = piece
        return found

    def seek(self, node: Node, offset: int, *, data: bool) -> int:
        """Return where, from ``offset`` on, the next data or the next hole begins (lseek(2)). OSError (ENXIO) if nowhere."""
        size = node.entry.size_bytes
        if not 0 <= offset < size:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        block_size = self.block_size(node)
        at = offset // block_size
        for number, _ in self._ids(node, at):
            if data:
                return max(offset, number * block_size)
            if number != at:
                break
            at += 1
        if data:
            raise OSError(errno.ENXIO, os.strerror(errno.ENXIO))
        return min(max(offset, at * block_size), size)

    # -- content --------------------------------------------------------------------------------------

    def _ids(self, node: Node, start: int, stop: int | None = None) -> Iterator[tuple[int, ChunkId]]:
        assert node.snapshot is not None
        repository = self._repository_of(node.snapshot.id)
        entry = node.entry
        blocks = blocks_of(entry.size_bytes, repository.block_size)
        return repository.block_maps.ids(entry.content, entry.map_height, blocks, start, stop)

    def _blocks(self, node: Node, first: int, last: int) -> Iterator[tuple[int, bytes]]:
        """Yield number and content of the blocks with data; more are read where the file is read in order."""
        assert node.snapshot is not None
        ahead = _READ_AHEAD if first in (node.next_block, node.next_block - 1) else 0
        node.next_block = last + 1
        ids = dict(self._ids(node, first, last + 1 + ahead))
        wanted = [number for number in ids if number <= last]
        if any(ids[number] not in self._cache for number in wanted):
            self._fetch(
                self._repository_of(node.snapshot.id), [id_ for id_ in ids.values() if id_ not in self._cache]
            )
        for number in wanted:
            found = self._cache.get(ids[number])
            if found is None:
                found = self._repository_of(node.snapshot.id).chunks.get(ids[number])
                self._keep(ids[number], found)
            self._cache.move_to_end(ids[number])
            yield number, found

    def _fetch(self, repository: Repository, ids: Sequence[ChunkId]) -> None:
        for piece in repository.bulk.read(ids):
            # What is damaged, or a difference, is left to `ChunkReader.get`, which is asked only if it is needed.
            if piece.source is not None:
                self._keep(ids[piece.position], bytes(piece.source[piece.start : piece.end]))

    def _keep(self, id_: ChunkId, data: bytes) -> None:
        if id_ not in self._cache:
            self._cache[id_] = data
            self._cached_bytes += len(data)
        while self._cached_bytes > _CACHE_BYTES and len(self._cache) > 1:
            _, dropped = self._cache.popitem(last=False)
            self._cached_bytes -= len(dropped)

    # -- names ----------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        state = self._snapshots.state()
        if state != self._state:
            self._names = {
                snapshot_name(info.time_ns, info.id): info.id
                for info in self._snapshots.list(root=self._of_root)
            }
            newest = self._snapshots.list(root=self._of_root, safety=False, limit=1)
            self._newest = snapshot_name(newest[0].time_ns, newest[0].id) if newest else b""
            self._state = state

    def _snapshot_node(self, name: bytes) -> Node:
        self._refresh()
        if name == LATEST and self._newest:
            # Of no snapshot, and a new node each time: it leads elsewhere after the next one.
            entry = Entry(
                name=LATEST, mode=stat.S_IFLNK | 0o777, target=self._newest, size_bytes=len(self._newest)
            )
            return self._add(Node(self._new_id(), _number(LATEST, self._newest), entry), [])
        if name not in self._names:
            raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
        snapshot = self._snapshots.load(self._names[name])
        number = _number(snapshot.id.encode())
        if self._of_root is None:
            node = Node(self._new_id(), number, _directory(b"", snapshot), snapshot)
        else:
            root = next((root for root in snapshot.roots if root.path == self._of_root), None)
            if root is None:
                raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
            node = Node(self._new_id(), number, root.entry, snapshot, root, root.path)
        return self._add(node, [(ROOT_ID, name)])

    @staticmethod
    def _below(snapshot: Snapshot, path: bytes) -> set[bytes]:
        """Return the next parts of the paths of the roots below a directory above them."""
        start = len(path) + 1
        return {
            root.path[start:].split(b"/")[0] for root in snapshot.roots if is_within(root.path, path or b"/")
        }

    def _in_path(self, parent: Node, name: bytes) -> Node:
        snapshot = parent.snapshot
        assert snapshot is not None
        path = parent.path + b"/" + name
        number = _number(snapshot.id.encode(), path)
        root = next((root for root in snapshot.roots if root.path == path), None)
        if root is None:
            node = Node(self._new_id(), number, _directory(path, snapshot), snapshot, None, path)
        else:
            node = Node(self._new_id(), number, root.entry, snapshot, root, path)
        return self._add(node, [(parent.id, name)])

    def _entry_node(self, parent: Node, entry: Entry) -> Node:
        snapshot, root = parent.snapshot, parent.root
        assert snapshot is not None
        assert root is not None
        key = (parent.id, entry.name)
        found = self._by_name.get(key)
        if found is not None:
            return found
        if entry.link:
            known = self._by_link.get((snapshot.id, root.path, entry.link))
            if known is not None:
                known.keys.append(key)
                self._by_name[key] = known
                return known
        whole = resolve(self._repository_of(snapshot.id), root, entry)
        path = parent.path + b"/" + entry.name
        place = b"%d" % entry.link if entry.link else path
        node = Node(
            self._new_id(), _number(snapshot.id.encode(), root.path, place), whole, snapshot, root, path
        )
        if entry.link:
            self._by_link[snapshot.id, root.path, entry.link] = node
        return self._add(node, [key])

    def _add(self, node: Node, keys: list[tuple[int, bytes]]) -> Node:
        node.keys = keys
        self._nodes[node.id] = node
        for key in keys:
            self._by_name[key] = node
        return node

    def _new_id(self) -> int:
        self._next_id += 1
        return self._next_id


def snapshot_name(time_ns: int, id_: SnapshotId) -> bytes:
    """Return the name of a snapshot's directory: local time to the millisecond, and the id."""
    seconds, rest = divmod(time_ns, 10**9)
    clock = time.strftime("%Y-%m-%dT%H-%M-%S", time.localtime(seconds))
    return f"{clock}.{rest // 10**6:03}_{id_}".encode()


def _number(*parts: bytes) -> int:
    """Return an inode number for what these parts name; the same each time."""
    return max(xxhash.xxh3_64_intdigest(b"\0".join(parts)) & _INO_MASK, ROOT_ID + 1)


def _directory(path: bytes, snapshot: Snapshot | None) -> Entry:
    """Return the attributes of a directory above the roots."""
    mode, uid, gid = 0o555, 0, 0
    if path:
        try:
            # Of the host as it is: snapshots know nothing of it.
            now = os.lstat(path)
            mode, uid, gid = now.st_mode & 0o555, now.st_uid, now.st_gid
        except OSError:
            mode = 0o500
    time_ns = time.time_ns() if snapshot is None else snapshot.time_ns
    return Entry(
        name=b"",
        mode=stat.S_IFDIR | mode,
        uid=uid,
        gid=gid,
        mtime_ns=time_ns,
        ctime_ns=time_ns,
        atime_ns=time_ns,
    )
