"""Sources of a verdict: files and directories that are read by ranges, and those of a snapshot.

Of a snapshot, only the blocks in which a range lies are read.
"""

from __future__ import annotations

import posixpath
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from typing import Final, NamedTuple

import msgspec

from ciuic.errors import Damaged, NotFound, UsageError
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.lookup import Located, children, find, is_within, join, resolve
from ciuic.types import FLAG_OPEN_FOR_WRITING, HOLE, ChunkId, Entry, Snapshot

MAX_NAMES = 1 << 16
"""Limit of the names of one directory that a verdict looks at."""


class FileSource(ABC):
    """One file, read by ranges."""

    name: bytes
    """Name in its directory."""
    size_bytes: int
    identity: bytes
    """Id that equal content has, and content that differs has not; empty if it is not known."""
    mtime_ns: int = 0
    """Time of its last change; 0 if it is not known."""
    is_committed: bool = False
    """True if its writer stored it as a whole, from memory: holes and zeros are its data."""

    @abstractmethod
    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range, fewer if the file ends before.

        Raises:
            Damaged: the repository cannot give them.
            OSError: the disk failed.
        """

    @abstractmethod
    def holes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges between two offsets, ascending, that were never written, or that are zeros."""

    @abstractmethod
    def doubt(self) -> str:
        """Return why a complete structure proves nothing of this file, such as an open writer; empty for no reason."""

    @abstractmethod
    def mixture(self) -> str:
        """Return why it may be a mixture of two versions, which only checksums disprove; empty for no reason."""


class LinkedFile(NamedTuple):
    """Where a symbolic link leads."""

    path: bytes
    """Absolute path in the root; empty for one that leads out of it, or in a circle."""
    file: FileSource | None
    """The regular file there, with the name of the link; None if there is none."""


class DirectorySource(ABC):
    """A directory with what is in it. Only `linked` and `below` follow a symbolic link, within the root, and only to a file."""

    path: bytes
    """Absolute path."""
    holds_state: bool = False
    """True for the top of a training state, stored as a whole."""

    @abstractmethod
    def names(self) -> list[bytes]:
        """Return the names in the directory, sorted; at most `MAX_NAMES`."""

    @abstractmethod
    def file(self, name: bytes) -> FileSource | None:
        """Return the regular file of this name; None if there is none."""

    @abstractmethod
    def directory(self, name: bytes) -> DirectorySource | None:
        """Return the directory of this name; None if there is none."""

    def linked(self, name: bytes) -> LinkedFile | None:
        """Return where the symbolic link of this name leads; None for what is no link."""
        return None

    def has(self, name: bytes) -> bool:
        """Return whether there is a file or a directory of this name."""
        return self.file(name) is not None or self.directory(name) is not None

    def below(self, relative: bytes) -> FileSource | None:
        """Return the regular file at a relative path that a document names; None for a path that leads out of the directory."""
        at, name = self._place(relative)
        if at is None:
            return None
        linked = at.linked(name)
        return at.file(name) if linked is None else linked.file

    def link_below(self, relative: bytes) -> bytes | None:
        """Return the path to which a link at a relative path leads, as `LinkedFile` has it; None for what is no link."""
        at, name = self._place(relative)
        linked = None if at is None else at.linked(name)
        return None if linked is None else linked.path

    def _place(self, relative: bytes) -> tuple[DirectorySource | None, bytes]:
        *above, name = relative.split(b"/")
        at: DirectorySource | None = self
        for part in (*above, name):
            if part in (b"", b".", b".."):
                return None, name
        for part in above:
            at = None if at is None else at.directory(part)
        return at, name


_MAX_LINKS: Final = 16
"""Limit of symbolic links that are followed to one file."""
_MAX_STEPS: Final = 64
"""Limit of snapshots in which the former content of one file is looked for."""
_CLOCK_STEP_NS: Final = 20_000_000
"""Error of an inode's times, which come from the kernel's coarse clock: a tick of at most 10 ms, twice."""
_OVERWRITTEN: Final = "it was overwritten in place, and may have a part of an older version"


Earlier = Callable[[int], Snapshot | None]
"""Returns the newest snapshot of the same root and host that was taken before a time in nanoseconds; None for none."""


class SnapshotFile(FileSource):
    """A regular file of a snapshot.

    Args:
        repository: Repository of the snapshots.
        snapshot: The snapshot.
        at: The file, with its complete entry.
        earlier: Finds earlier snapshots, for files that were overwritten in place.
    """

    def __init__(self, repository: Repository, snapshot: Snapshot, at: Located, earlier: Earlier) -> None:
        self.name = at.path.rpartition(b"/")[2]
        self.mtime_ns = at.entry.mtime_ns
        self.size_bytes = at.entry.size_bytes
        self.identity = _content_identity(at.entry)
        self.is_committed = snapshot.is_state
        self._repository = repository
        self._snapshot = snapshot
        self._at = at
        self._entry = at.entry
        self._earlier = earlier
        self._last: tuple[ChunkId, bytes] = (HOLE, b"")

    def read(self, offset: int, length: int) -> bytes:
        """Return the bytes of a range."""
        length = min(length, self.size_bytes - offset)
        if length <= 0:
            return b""
        block_size = self._repository.block_size
        result = bytearray(length)
        for block, chunk in self._blocks(offset // block_size, blocks_of(offset + length, block_size)):
            data = self._chunk(chunk)
            at = block * block_size
            # A crafted map may lead to a chunk of another length.
            if len(data) != min(block_size, self.size_bytes - at):
                raise Damaged(f"block {block} has {len(data)} bytes, which its file does not allow")
            start, stop = max(at, offset), min(at + len(data), offset + length)
            result[start - offset : stop - offset] = data[start - at : stop - at]
        return bytes(result)

    def holes(self, start: int, stop: int) -> Iterator[tuple[int, int]]:
        """Yield the ranges of blocks that the snapshot records as holes."""
        block_size, entry = self._repository.block_size, self._entry
        stop = min(stop, entry.size_bytes)
        first, last = start // block_size, blocks_of(stop, block_size)
        at = first
        for block, _ in self._blocks(first, last):
            if block > at:
                yield max(start, at * block_size), block * block_size
            at = block + 1
        if at < last:
            yield max(start, at * block_size), stop

    def doubt(self) -> str:
        """Return why the content may not be what its writer meant it to be."""
        entry = self._entry
        if self._at.root.mode == "offline":
            return "the snapshot was taken without an overlay, so that it does not say whether a program had it open"
        if entry.flags & FLAG_OPEN_FOR_WRITING:
            return "a program had it open for writing"
        if self._snapshot.may_be_later(entry):
            return "its content may be later than the snapshot"
        return ""

    def mixture(self) -> str:
        """Return why the file may be an older version that a writer, which has ended, overwrote in part."""
        entry, before_ns = self._entry, self._snapshot.time_ns
        for _ in range(_MAX_STEPS):
            # No snapshot after the last change of the inode has another content: they are passed over.
            snapshot = self._earlier(min(before_ns, entry.ctime_ns + _CLOCK_STEP_NS))
            at = None if snapshot is None else located(self._repository, snapshot, self._at.path)
            if snapshot is None or at is None or at.entry.ino != entry.ino or not at.entry.is_file:
                return ""
            if _content_identity(at.entry) != self.identity:
                return _OVERWRITTEN if at.entry.size_bytes == entry.size_bytes else ""
            entry, before_ns = at.entry, snapshot.time_ns
        return _OVERWRITTEN

    def _blocks(self, first: int, last: int) -> Iterator[tuple[int, ChunkId]]:
        entry = self._entry
        count = blocks_of(entry.size_bytes, self._repository.block_size)
        return self._repository.block_maps.ids(entry.content, entry.map_height, count, first, last)

    def _chunk(self, chunk: ChunkId) -> bytes:
        # Headers are read in many small pieces of one block.
        if self._last[0] != chunk:
            self._last = chunk, self._repository.chunks.get(chunk)
        return self._last[1]


class SnapshotDirectory(DirectorySource):
    """A directory of a snapshot; arguments as of `SnapshotFile`."""

    def __init__(self, repository: Repository, snapshot: Snapshot, at: Located, earlier: Earlier) -> None:
        self.path = at.path
        self.holds_state = snapshot.is_state and at.path == at.root.path
        self._repository = repository
        self._snapshot = snapshot
        self._at = at
        self._earlier = earlier

    def names(self) -> list[bytes]:
        """Return the names in the directory."""
        names = []
        for entry in self._repository.trees.entries(self._at.entry.content):
            names.append(entry.name)
            if len(names) >= MAX_NAMES:
                break
        return names

    def entries(self) -> Iterator[Entry]:
        """Yield the complete entries."""
        return children(self._repository, self._at.root, self._at.entry)

    def file(self, name: bytes) -> FileSource | None:
        """Return the regular file of this name."""
        at = self._child(name)
        if at is None or not at.entry.is_file:
            return None
        return SnapshotFile(self._repository, self._snapshot, at, self._earlier)

    def directory(self, name: bytes) -> DirectorySource | None:
        """Return the directory of this name."""
        at = self._child(name)
        if at is None or not at.entry.is_dir:
            return None
        return SnapshotDirectory(self._repository, self._snapshot, at, self._earlier)

    def linked(self, name: bytes) -> LinkedFile | None:
        """Return where the symbolic link of this name leads, as far as the snapshot has it."""
        at = self._child(name)
        if at is None or not at.entry.is_symlink:
            return None
        path = at.path
        for _ in range(_MAX_LINKS):
            if at is None or not at.entry.is_symlink:
                break
            target = posixpath.normpath(posixpath.join(posixpath.dirname(at.path), at.entry.target))
            # normpath keeps exactly two leading slashes.
            target = b"/" + target.lstrip(b"/")
            path, at = self._walk(target) if is_within(target, at.root.path) else (b"", None)
        else:
            return LinkedFile(b"", None)
        if at is None or not at.entry.is_file:
            return LinkedFile(path, None)
        file = SnapshotFile(self._repository, self._snapshot, at, self._earlier)
        file.name = name
        return LinkedFile(path, file)

    def _walk(self, path: bytes) -> tuple[bytes, Located | None]:
        """Return a path in the root, up to the first symbolic link and with the target of that, and what is there."""
        at = Located(self._at.root, self._at.root.path, self._at.root.entry)
        parts = [part for part in path[len(at.path) :].split(b"/") if part]
        for number, part in enumerate(parts):
            found = self._repository.trees.entry(at.entry.content, part) if at.entry.is_dir else None
            if found is None:
                return path, None
            at = Located(at.root, join(at.path, part), resolve(self._repository, at.root, found))
            if at.entry.is_symlink and number < len(parts) - 1:
                target = b"/".join((at.entry.target, *parts[number + 1 :]))
                entry = msgspec.structs.replace(at.entry, target=target)
                return path, msgspec.structs.replace(at, entry=entry)
        return path, at

    def _child(self, name: bytes) -> Located | None:
        found = self._repository.trees.entry(self._at.entry.content, name)
        if found is None:
            return None
        root = self._at.root
        return Located(root, join(self.path, name), resolve(self._repository, root, found))


def located(repository: Repository, snapshot: Snapshot, path: bytes) -> Located | None:
    """Return what a snapshot has at a path; None for nothing."""
    try:
        return find(repository, snapshot, path)
    except (NotFound, UsageError):
        return None


def _content_identity(entry: Entry) -> bytes:
    """Return the id of a regular file's content within its repository."""
    return b"%d %d %s" % (entry.size_bytes, entry.map_height, entry.content)
