"""What changed in an epoch, and how sealed epochs fold into one another. No I/O.

Invariant: every inode that has a Change can be reached from the root by *touched* names, along its path as it
is now (an inode with several names by the name that is known). It holds because creating a Change touches the
chain of names above it, and renaming touches both ends. Capture therefore walks touched names only, and its
cost follows the change. Where no name is known that leads to an inode, and some do (the one by which it was opened is gone,
and its other hard link was never asked for), tracking has a gap: the set is not ``complete``.

A change set also knows what it is a change *to*: ``since``, the epoch before it, and ``complete``, whether
tracking had no gap since then. When an epoch is given up, its set is folded into the next one and hands over
both (docs/architecture.md §4)."""

from __future__ import annotations

import threading
from typing import Final, Protocol

from ciuic.fuse_layer.blockset import MOST_BLOCKS, BlockSet, blocks_of

UNCHANGED_BINDING: Final = -1
"""In Change.names: the name is bound to what it was bound to; something at or below the child changed."""
ABSENT: Final = 0
"""In Change.names: the name did not exist when the epoch began. (0 is no inode number on Linux file
systems.)"""


class Place(Protocol):
    """A node, as far as tracking needs it: an inode and the name that leads to it."""

    ino: int
    name: bytes

    @property
    def astray(self) -> bool: ...
    @property
    def parent(self) -> Place | None: ...


class Change:
    """What happened to one inode in one epoch."""

    __slots__ = ("attrs", "blocks", "end", "fresh", "names", "reused", "whole")

    def __init__(self) -> None:
        self.fresh = False
        """Created in this epoch: nothing of it is in an older snapshot."""
        self.reused = False
        """Fresh, and its number belonged to another changed inode earlier in the epoch."""
        self.attrs = False
        self.whole = False
        self.blocks: BlockSet | None = None
        self.names: dict[bytes, int] | None = None
        """Directories: touched child name → inode number it was bound to when the epoch began, ABSENT or
        UNCHANGED_BINDING."""
        self.end = 0
        """Highest byte written while ``whole`` (for the figure of dirty bytes)."""


class ChangeSet:
    """The changes of one epoch; see the module's first paragraph for its invariant."""

    def __init__(self, *, since: int, complete: bool) -> None:
        self.since = since
        self.complete = complete
        self.changes: dict[int, Change] = {}

    def dirty_bytes(self, block_size: int) -> int:
        """Upper bound of the file bytes that a capture of this set would read."""
        total = 0
        for change in list(self.changes.values()):
            if change.whole:
                total += change.end
            elif change.blocks is not None:
                total += len(change.blocks) * block_size
        return total

    def fold_older(self, older: ChangeSet) -> None:
        """Make this set describe the changes since ``older`` began: older first, then these."""
        for ino, before in older.changes.items():
            now = self.changes.get(ino)
            if now is None:
                self.changes[ino] = before
            elif not now.fresh:
                _fold(now, before)
            else:
                now.reused = True
        self.since = older.since
        self.complete &= older.complete


def _fold(now: Change, before: Change) -> None:
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
        names = dict(before.names)
        for name, was in (now.names or {}).items():
            if names.get(name, UNCHANGED_BINDING) == UNCHANGED_BINDING:
                names[name] = was
        now.names = names


class Tracker:
    """The current epoch's change set. Thread-safe; callers are inside the gate, so ``seal`` never races with
    a mark."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.epoch = 1
        self.current = ChangeSet(since=0, complete=False)
        self._lock = threading.Lock()

    def is_fresh(self, ino: int) -> bool:
        """Whether the inode was created in the current epoch (no older epoch can need it)."""
        change = self.current.changes.get(ino)
        return change is not None and change.fresh

    def mark_attrs(self, node: Place) -> None:
        """Attributes, extended attributes or link count of the inode changed."""
        with self._lock:
            self._change(node).attrs = True

    def mark_ino(self, ino: int) -> None:
        """The inode changed or went away, and its name is touched by somebody else."""
        with self._lock:
            self.current.changes.setdefault(ino, Change()).attrs = True

    def mark_blocks(self, node: Place, offset: int, length: int) -> None:
        """Bytes [offset, offset + length) of the file may have changed."""
        change = self.current.changes.get(node.ino)
        if change is not None and change.whole:  # every checkpoint: nothing to record but how far it got
            change.end = max(change.end, offset + length)
            return
        first, count = blocks_of(offset, length, self.block_size)
        if first + count > MOST_BLOCKS:
            self.mark_whole(node)
            return
        with self._lock:
            change = self._change(node)
            if change.blocks is None:
                change.blocks = BlockSet()
            change.blocks.add_range(first, count)

    def mark_whole(self, node: Place) -> None:
        """Any byte of the file may have changed."""
        with self._lock:
            change = self._change(node)
            change.whole, change.blocks = True, None

    def measured(self, ino: int, size: int) -> None:
        """For the figure of dirty bytes: how long a file is whose writes were not seen."""
        with self._lock:
            change = self.current.changes.get(ino)
            if change is not None and change.whole:
                change.end = max(change.end, size)

    def mark_created(self, parent: Place, name: bytes, ino: int) -> None:
        """A new inode came into being under a name that was free."""
        with self._lock:
            fresh = Change()
            fresh.fresh = fresh.attrs = fresh.whole = True
            fresh.reused = ino in self.current.changes
            self.current.changes[ino] = fresh
            self._touch(parent, name, ABSENT)

    def mark_name(self, parent: Place, name: bytes, was: int) -> None:
        """The binding of a name changed; ``was`` is the inode number it had just before, or ABSENT."""
        with self._lock:
            self._touch(parent, name, was)

    def mark_touched(self, parent: Place, name: bytes) -> None:
        """The name is bound as it was, and what it is bound to has to be looked at again."""
        with self._lock:
            self._touch(parent, name, UNCHANGED_BINDING)

    def mark_removed(self, parent: Place, name: bytes, was: int) -> None:
        """The name is free now. One that was free when the epoch began leaves no trace: temporary names must
        not add up."""
        with self._lock:
            self._touch(parent, name, was)
            names = self.current.changes[parent.ino].names
            if names is not None and names.get(name) == ABSENT:
                del names[name]

    def forget_created(self, ino: int) -> None:
        """What came into being in this epoch is gone again, all its names too: temporary files must not add
        up."""
        with self._lock:
            change = self.current.changes.get(ino)
            if change is not None and change.fresh and not change.reused:
                del self.current.changes[ino]

    def mark_replaced(self, parent: Place, name: bytes, was: int, ino: int) -> None:
        """The name was given a new inode in place of ``was``, with other content."""
        with self._lock:
            fresh = Change()
            fresh.fresh = fresh.attrs = fresh.whole = True
            fresh.reused = ino in self.current.changes
            self.current.changes[ino] = fresh
            old = self.current.changes.setdefault(was, Change())
            old.attrs = True
            self._touch(parent, name, was)

    def seal(self) -> tuple[int, ChangeSet]:
        """End the epoch: its number and its set, which no mark touches any more. Constant time."""
        with self._lock:
            epoch, sealed = self.epoch, self.current
            self.current = ChangeSet(since=epoch, complete=True)
            self.epoch = epoch + 1
            return epoch, sealed

    def resume(self, epoch: int, current: ChangeSet) -> None:
        """Go on in a predecessor's epoch, before anything is marked."""
        with self._lock:
            self.epoch, self.current = epoch, current

    def fold_into_current(self, older: ChangeSet) -> None:
        with self._lock:
            self.current.fold_older(older)

    def _change(self, node: Place) -> Change:
        """The inode's change, made with its chain of touched names when there is none yet."""
        change = self.current.changes.get(node.ino)
        if change is None:
            change = self.current.changes[node.ino] = Change()
            if node.parent is not None:
                self._touch(node.parent, node.name, UNCHANGED_BINDING)
            elif node.astray:
                # Only a comparison of everything finds the name that leads here.
                self.current.complete = False
        return change

    def _touch(self, parent: Place, name: bytes, was: int) -> None:
        changes = self.current.changes
        while True:
            change = changes.get(parent.ino)
            chain_is_touched = change is not None
            if change is None:
                change = changes[parent.ino] = Change()
            if change.names is None:
                change.names = {}
            if change.names.get(name, UNCHANGED_BINDING) == UNCHANGED_BINDING:
                change.names[name] = was
            if was != UNCHANGED_BINDING:
                change.attrs = True  # a directory's times move with its names
            above = parent.parent
            if chain_is_touched or above is None:
                return
            parent, name, was = above, parent.name, UNCHANGED_BINDING
