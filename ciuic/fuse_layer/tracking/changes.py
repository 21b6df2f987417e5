"""Changes of an epoch, the blocks among them, and how sealed epochs fold into one another. No I/O.

Invariant: every inode that has an InodeChange can be reached from the root by *touched* names, along its path
as it is now (an inode with several names by the name that is known). It holds because making an InodeChange
touches the chain of names above it, and renaming touches both ends. Capture therefore walks touched names
only, and its cost follows the change. Where only unknown names lead to an inode (the one by which it was
opened is gone, and its other hard link was never looked up), tracking has a gap: the set is not ``complete``.

A change set also knows the state that it is a change *to*: ``since``, the epoch before it, and ``complete``,
whether tracking had no gap since then. When an epoch is given up, its set is folded into the next one and
hands over both (docs/architecture.md §4).

Sets of blocks are growing bitmaps: exact, and 32 KiB for 64 GiB of file at 256 KiB a block. The serialised form
is the bitmap itself: block ``b`` is bit ``b & 7`` (low bit first) of byte ``b >> 3``.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from typing import Final, Protocol

MAX_BLOCKS = 1 << 26
"""Limit of block numbers: 8 MiB of bitmap, 16 TiB of file at 256 KiB a block. truncate(2) gives any user a
file of exabytes in a moment; a change beyond the limit is marked as one of the whole file."""
_SAME_BYTES = re.compile(rb"\x00+|\xff+|.", re.DOTALL)
UNCHANGED_BINDING: Final = -1
"""Value in InodeChange.names: the name is bound as before; something at or below the child changed."""
ABSENT: Final = 0
"""Value in InodeChange.names: the name was free when the epoch began. (0 is no inode number on Linux file
systems.)"""


class BlockSet:
    """A set of non-negative block numbers."""

    __slots__ = ("_bits",)

    def __init__(self, bitmap: bytes = b"") -> None:
        self._bits = bytearray(bitmap)

    def __contains__(self, block: int) -> bool:
        index = block >> 3
        return index < len(self._bits) and bool(self._bits[index] >> (block & 7) & 1)

    def __len__(self) -> int:
        return int.from_bytes(self._bits, "little").bit_count()

    def __iter__(self) -> Iterator[int]:
        for index, byte in enumerate(self._bits):
            if byte:
                for bit in range(8):
                    if byte >> bit & 1:
                        yield index << 3 | bit

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BlockSet) and self.to_bytes() == other.to_bytes()

    def __hash__(self) -> int:
        raise TypeError("BlockSet is mutable and has no hash")

    def to_bytes(self) -> bytes:
        """Return the bitmap without trailing zeros."""
        return bytes(self._bits).rstrip(b"\0")

    def add_range(self, first: int, count: int) -> None:
        """Add ``count`` blocks from ``first``."""
        if count <= 0:
            return
        end = first + count
        bits = self._bits
        if len(bits) << 3 < end:
            bits.extend(bytes(((end + 7) >> 3) - len(bits)))
        low, high = first >> 3, (end - 1) >> 3
        low_mask, high_mask = 0xFF << (first & 7) & 0xFF, 0xFF >> (7 - (end - 1 & 7))
        if low == high:
            bits[low] |= low_mask & high_mask
            return
        bits[low] |= low_mask
        bits[high] |= high_mask
        bits[low + 1 : high] = b"\xff" * (high - low - 1)

    def update(self, other: BlockSet) -> None:
        """Add every block of ``other``."""
        # As two integers: one operation in C for the whole bitmap.
        size = max(len(self._bits), len(other._bits))
        union = int.from_bytes(self._bits, "little") | int.from_bytes(other._bits, "little")
        self._bits[:] = union.to_bytes(size, "little")

    def missing_runs(self, first: int, count: int) -> list[tuple[int, int]]:
        """Return the maximal runs (first, count) of [first, first + count) that are not in the set, in order."""
        runs: list[tuple[int, int]] = []
        start: int | None = None
        end = first + count
        known = max(first, min(end, len(self._bits) << 3))
        # Runs of equal bytes at once, block by block only in mixed ones: a file of exabytes has one run.
        for found in _SAME_BYTES.finditer(self._bits, first >> 3, (known + 7) >> 3) if known > first else ():
            low, high = max(found.start() << 3, first), min(found.end() << 3, known)
            is_uniform = self._bits[found.start()] in (0, 0xFF)
            for block in (low,) if is_uniform else range(low, high):
                if block not in self:
                    start = block if start is None else start
                elif start is not None:
                    runs.append((start, block - start))
                    start = None
        if start is None and known < end:
            start = known
        if start is not None:
            runs.append((start, end - start))
        return runs


def blocks_of(offset: int, length: int, block_size: int) -> tuple[int, int]:
    """Return the first block and the number of blocks that a byte range touches; (first, 0) for an empty range."""
    first = offset // block_size
    if length <= 0:
        return first, 0
    return first, (offset + length - 1) // block_size - first + 1


class NamedInode(Protocol):
    """A node, as far as tracking needs it: an inode and the name that leads to it."""

    ino: int
    name: bytes

    @property
    def astray(self) -> bool:
        """True if only unknown names lead to the inode."""

    @property
    def parent(self) -> NamedInode | None:
        """Node of the directory that has ``name``; None for the root, and without a known name."""


class InodeChange:
    """Changes of one inode in one epoch."""

    __slots__ = ("attrs", "blocks", "end", "fresh", "names", "reused", "whole")

    def __init__(self) -> None:
        self.fresh = False
        """True if it was created in this epoch: nothing of it is in an older snapshot."""
        self.reused = False
        """True if it is fresh and its number belonged to another changed inode earlier in the epoch."""
        self.attrs = False
        self.whole = False
        self.blocks: BlockSet | None = None
        self.names: dict[bytes, int] | None = None
        """Touched names of a directory, with the inode number when the epoch began, ABSENT or
        UNCHANGED_BINDING."""
        self.end = 0
        """Highest byte written while ``whole`` (for the figure of dirty bytes)."""


class ChangeSet:
    """The changes of one epoch; see the module's first paragraph for its invariant."""

    def __init__(self, *, since: int, complete: bool) -> None:
        self.since = since
        self.complete = complete
        self.changes: dict[int, InodeChange] = {}

    def dirty_bytes(self, block_size: int) -> int:
        """Return an upper bound of the file bytes that a capture of this set would read."""
        total = 0
        for change in list(self.changes.values()):
            if change.whole:
                total += change.end
            elif change.blocks is not None:
                total += len(change.blocks) * block_size
        return total

    def fold_older(self, older: ChangeSet) -> None:
        """Make this set describe the changes since ``older`` began: those of ``older``, then these."""
        for ino, before in older.changes.items():
            now = self.changes.get(ino)
            if now is None:
                # Only the older epoch changed it.
                self.changes[ino] = before
            elif not now.fresh:
                _fold(now, before)
            else:
                # Created since, under the number of an inode that the older epoch changed.
                now.reused = True
        self.since = older.since
        self.complete &= older.complete


def _fold(now: InodeChange, before: InodeChange) -> None:
    now.fresh |= before.fresh
    now.reused |= before.reused
    now.attrs |= before.attrs
    now.whole |= before.whole
    now.end = max(now.end, before.end)
    if now.whole:
        now.blocks = None
    elif before.blocks is not None:
        if now.blocks is None:
            now.blocks = BlockSet()
        now.blocks.update(before.blocks)
    if before.names is not None:
        # The older epoch's bindings are those at the beginning of both; a name whose binding it left alone
        # has the later one's.
        names = dict(before.names)
        for name, was in (now.names or {}).items():
            if names.get(name, UNCHANGED_BINDING) == UNCHANGED_BINDING:
                names[name] = was
        now.names = names


class Tracker:
    """The current epoch's change set.

    Thread-safe; callers are inside the gate, so ``seal`` never races with a mark.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 1
        self.current = ChangeSet(since=0, complete=False)
        # The gate is shared: operations in several threads mark at the same time.
        self._lock = threading.Lock()

    def is_fresh(self, ino: int) -> bool:
        """Return whether the inode was created in the current epoch, so that no older epoch can need it."""
        change = self.current.changes.get(ino)
        return change is not None and change.fresh

    def mark_attrs(self, node: NamedInode) -> None:
        """Mark attributes, extended attributes or link count of the inode as changed."""
        with self._lock:
            self._change(node).attrs = True

    def mark_ino(self, ino: int) -> None:
        """Mark an inode as changed or gone, of which the caller touches the name."""
        with self._lock:
            self.current.changes.setdefault(ino, InodeChange()).attrs = True

    def mark_blocks(self, node: NamedInode, offset: int, length: int) -> None:
        """Mark the bytes [offset, offset + length) of the file as changed."""
        change = self.current.changes.get(node.ino)
        if change is not None and change.whole:
            # Every new checkpoint: there is nothing to record but its length, and no lock is needed for that.
            change.end = max(change.end, offset + length)
            return
        first, count = blocks_of(offset, length, self.block_size)
        # truncate(2) makes a file of exabytes in a moment: a bit for each of its blocks took the worker's
        # memory.
        if first + count > MAX_BLOCKS:
            self.mark_whole(node)
            return
        with self._lock:
            change = self._change(node)
            if change.blocks is None:
                change.blocks = BlockSet()
            change.blocks.add_range(first, count)

    def mark_whole(self, node: NamedInode) -> None:
        """Mark every byte of the file as changed."""
        with self._lock:
            change = self._change(node)
            change.whole, change.blocks = True, None

    def measured(self, ino: int, size: int) -> None:
        """Note the length of a file whose writes were not seen, for the figure of dirty bytes."""
        with self._lock:
            change = self.current.changes.get(ino)
            if change is not None and change.whole:
                change.end = max(change.end, size)

    def mark_created(self, parent: NamedInode, name: bytes, ino: int) -> None:
        """Mark a new inode under a name that was free."""
        with self._lock:
            fresh = InodeChange()
            fresh.fresh = fresh.attrs = fresh.whole = True
            fresh.reused = ino in self.current.changes
            self.current.changes[ino] = fresh
            self._touch(parent, name, ABSENT)

    def mark_name(self, parent: NamedInode, name: bytes, was: int) -> None:
        """Mark the binding of a name as changed; ``was`` is the inode number just before, or ABSENT."""
        with self._lock:
            self._touch(parent, name, was)

    def mark_touched(self, parent: NamedInode, name: bytes) -> None:
        """Mark a name whose binding is unchanged: its inode has to be looked at again."""
        with self._lock:
            self._touch(parent, name, UNCHANGED_BINDING)

    def mark_removed(self, parent: NamedInode, name: bytes, was: int) -> None:
        """Mark a name as free."""
        with self._lock:
            self._touch(parent, name, was)
            names = self.current.changes[parent.ino].names
            # A name that was free when the epoch began leaves no trace: temporary names must not add up.
            if names is not None and names.get(name) == ABSENT:
                del names[name]

    def forget_created(self, ino: int) -> None:
        """Forget an inode that was created in this epoch and is gone again with all its names."""
        # Temporary files must not add up.
        with self._lock:
            change = self.current.changes.get(ino)
            if change is not None and change.fresh and not change.reused:
                del self.current.changes[ino]

    def mark_replaced(self, parent: NamedInode, name: bytes, was: int, ino: int) -> None:
        """Mark a name that was given a new inode in place of ``was``, with other content."""
        with self._lock:
            fresh = InodeChange()
            fresh.fresh = fresh.attrs = fresh.whole = True
            fresh.reused = ino in self.current.changes
            self.current.changes[ino] = fresh
            old = self.current.changes.setdefault(was, InodeChange())
            old.attrs = True
            self._touch(parent, name, was)

    def seal(self) -> tuple[int, ChangeSet]:
        """End the epoch; return its number and its set, which no mark touches any more.

        Takes constant time.
        """
        with self._lock:
            # A new set instead of a copy: the job is held meanwhile, and the old one may have a million
            # changes.
            epoch, sealed = self.epoch, self.current
            self.current = ChangeSet(since=epoch, complete=True)
            self.epoch = epoch + 1
            return epoch, sealed

    def resume(self, epoch: int, current: ChangeSet) -> None:
        """Go on in a predecessor's epoch, before anything is marked."""
        with self._lock:
            self.epoch, self.current = epoch, current

    def fold_into_current(self, older: ChangeSet) -> None:
        """Add the changes of an epoch that was given up to the current set."""
        with self._lock:
            self.current.fold_older(older)

    def _change(self, node: NamedInode) -> InodeChange:
        """Return the inode's change, made with its chain of touched names when there is none yet."""
        change = self.current.changes.get(node.ino)
        if change is None:
            change = self.current.changes[node.ino] = InodeChange()
            if node.parent is not None:
                self._touch(node.parent, node.name, UNCHANGED_BINDING)
            elif node.astray:
                # Only a comparison of everything finds the name that leads here.
                self.current.complete = False
        return change

    def _touch(self, parent: NamedInode, name: bytes, was: int) -> None:
        changes = self.current.changes
        while True:
            change = changes.get(parent.ino)
            # A directory that has a change has touched its own chain before: the walk upwards ends here.
            chain_is_touched = change is not None
            if change is None:
                change = changes[parent.ino] = InodeChange()
            if change.names is None:
                change.names = {}
            if change.names.get(name, UNCHANGED_BINDING) == UNCHANGED_BINDING:
                change.names[name] = was
            if was != UNCHANGED_BINDING:
                # A directory's times move with its names.
                change.attrs = True
            above = parent.parent
            if chain_is_touched or above is None:
                return
            parent, name, was = above, parent.name, UNCHANGED_BINDING
