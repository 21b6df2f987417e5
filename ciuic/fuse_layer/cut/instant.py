"""Copies of files that the kernel writes past the worker (passthrough_writers.py) at a cut: one instant of all of them.

Such writers go on during a hold. Their files are looked at, copied, and looked at again until nothing has
changed between two looks: state that was true at the end of the first look and at the start of the second was
true of all files at one instant, and the other files stand still meanwhile. Copies are made of the page cache
to memory and written to the undo log after the hold.

Guarantees:

* The undo log has the content at that instant of every file that is not in ``unheld``.
* A file in ``unheld`` that is ``provable`` has that content for as long as its size and times are those of
  the list.
* The hold is not longer for it than ``MAX_HOLD_SECONDS`` and one step, or 2 ms of processor time; nothing
  waits for a disk but clones of some pages.
* No failure in here reaches the job: a file that cannot be saved is listed in ``unheld``.

The proof rests on ctime: a write moves it, no program can set it, and the file system tells two moments apart
by it. Linux 6.13 does so exactly once the time was asked for (multigrain timestamps); elsewhere the clock
behind it ticks, and a time within the last tick proves nothing. A store through a mapping moves ctime only
when its page was clean; so a file that may be mapped has to have no dirty page, on a file system of which
that is known (``_FAULTS_TELL``).
"""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer.sealed_format import Unheld
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.system import syscalls
from ciuic.types import recorded_time

HOLD_BUDGET_SECONDS: Final = 0.02
"""Processor time by which a hold may be extended to copy; a snapshot's hold is some milliseconds
otherwise."""
MAX_HOLD_SECONDS: Final = 0.05
"""The same limit by the clock. On a busy host the worker waits for a processor in between; files not done by
then are marked."""
MAX_COPIED_BYTES: Final = 8 << 20
"""Limit of all copies, smallest file first: 8 MiB of page cache take 4 ms, so that several roots stay within
the budget."""
MAX_FILES: Final = 512
"""Limit of files: each takes 20 µs of processor time to look at twice, copy and record. The others are
captured as found."""
SURE_FILES: Final = 64
"""Number of files that are recorded whatever the clock says: with SURE_BYTES, 2 ms of processor time.

A worker that another process keeps from its processor for longer than the budget would otherwise mark files
without a reason.
"""
SURE_BYTES: Final = 1 << 20
"""Number of bytes that are copied whatever the clock says."""
MAX_ROUNDS: Final = 4
"""Looks after which a file that changes at each of them counts as being written without a pause."""
CLONE_IN_HOLD_PAGES: Final = 256
"""Limit of dirty pages (a MiB) that a clone writes while the gate is held; with more the clone is made after
the hold."""
TICK_NS: Final = 20_000_000
"""Twice the longest tick of the clock behind coarse timestamps (CONFIG_HZ=100)."""
_STEP_BYTES: Final = 1 << 20
_FAULTS_TELL: Final = frozenset({0xEF53, 0x58465342, 0x9123683E})
"""f_type of ext4, XFS and btrfs: writing a page out write-protects it in mappings, and the fault of the next
store moves ctime."""
# So many writes take microseconds: a clock that ticks gives two of them one time.
_PROBES: Final = 8


class _Budget:
    """Time budget of the work under a hold."""

    def __init__(self) -> None:
        self._cpu_end = time.thread_time() + HOLD_BUDGET_SECONDS
        self._end = time.monotonic() + MAX_HOLD_SECONDS

    @property
    def is_used_up(self) -> bool:
        """True if no further file should be copied."""
        return time.thread_time() > self._cpu_end or self.is_late

    @property
    def is_late(self) -> bool:
        """True if the hold has to end, whatever is not done."""
        return time.monotonic() > self._end


class CutTarget:
    """A file that may be written unseen."""

    __slots__ = ("_owner", "cloned", "copied", "copy", "dirty", "fd", "maps", "moving", "node", "st", "whole")

    def __init__(self, node: Node, fd: int, *, maps: bool, owner: object = None) -> None:
        """Describe a file; ``owner`` closes ``fd`` when nothing refers to it, so a release beside the hold does not."""
        self.node = node
        self.fd = fd
        self._owner = owner
        self.maps = maps
        """True if a program may have it mapped for writing."""
        self.st: os.stat_result
        self.dirty = False
        """True if it may be mapped, and a store could pass without moving a time."""
        self.moving = False
        """True if it changed between the last two looks."""
        self.whole = True
        """True if it could be copied, as far as is known."""
        self.copy: list[memoryview] | None = None
        self.copied: os.stat_result | None = None
        """Attributes before the copy was made."""
        self.cloned = False

    @property
    def ino(self) -> int:
        """Inode number."""
        return self.node.ino


class Instant:
    """The unseen files of one root at one cut. ``take`` is called with the gate held, ``save`` after it."""

    def __init__(self, state: OverlayState, epoch: int, *, fine_times: bool, faults_tell: bool) -> None:
        self._state = state
        self._epoch = epoch
        self._fine_times = fine_times
        self._faults_tell = faults_tell
        self._targets: list[CutTarget] = []
        self._late: list[CutTarget] = []
        self._looked_ns = self._ended_ns = 0
        """Wall clock before the last look but one, and at the end of copying."""
        self._saved = False
        self.unheld: list[Unheld] = []

    # -- under the hold -------------------------------------------------------------------------------

    def take(self, targets: Sequence[CutTarget]) -> None:
        """Save what can be saved at once of ``targets``, one for each inode."""
        try:
            self._take(targets)
        except OSError:
            # A failing disk. The cut is made all the same.
            self._targets = self._late = []
            self.unheld = [Unheld(target.ino) for target in targets]

    def _take(self, targets: Sequence[CutTarget]) -> None:
        budget = _Budget()
        self.unheld = [Unheld(target.ino) for target in targets[MAX_FILES:]]
        self._looked_ns = time.time_ns()
        self._targets = [target for target in targets[:MAX_FILES] if self._first_look(target)]
        # Look, copy, look again: what did not change between two looks is true of one instant for all files.
        for _ in range(MAX_ROUNDS):
            self._copy(budget)
            looking_ns = time.time_ns()
            if not self._look_again() or budget.is_used_up:
                break
            self._looked_ns = looking_ns
        for done, target in enumerate(self._targets):
            if budget.is_late and done >= SURE_FILES:
                self.unheld += [Unheld(left.ino) for left in self._targets[done:]]
                del self._targets[done:]
                break
            self._record(target)
        self._ended_ns = time.time_ns()

    def _first_look(self, target: CutTarget) -> bool:
        """Return whether a snapshot can have the file, which needs a name for that."""
        try:
            target.st, nlink = self._state.undo.links(lambda: os.fstat(target.fd))
        except OSError:
            self.unheld.append(Unheld(target.ino))
            return False
        target.dirty = target.maps and self._stores_hide(target.fd)
        return nlink > 0 and target.st.st_ino == target.ino

    def _look_again(self) -> bool:
        """Note which files changed since the last look, and return whether any did."""
        for target in self._targets:
            before = target.st
            target.st = os.fstat(target.fd)
            target.moving = _changed(before, target.st)
            target.dirty = target.maps and (target.dirty or self._stores_hide(target.fd))
        return any(target.moving for target in self._targets)

    def _stores_hide(self, fd: int) -> bool:
        return not self._faults_tell or syscalls.dirty_pages(fd) != 0

    def _copy(self, budget: _Budget) -> None:
        """Copy what is in the page cache, the smallest files first, of those that changed since they were copied."""
        room = MAX_COPIED_BYTES
        for target in sorted(self._targets, key=lambda target: target.st.st_size):
            room -= target.st.st_size
            is_sure = MAX_COPIED_BYTES - room <= SURE_BYTES
            if room < 0 or (budget.is_used_up and not is_sure):
                return
            if target.whole and (target.copied is None or _changed(target.copied, target.st)):
                target.copy = _copied(target.fd, target.st.st_size, budget)
                target.copied = target.st if target.copy is not None else None
                target.whole = target.copy is not None

    def _record(self, target: CutTarget) -> None:
        """Note the attributes of a file, and with them the length up to which it is captured, and clone what was not copied."""
        undo = self._state.undo
        # The attributes from before the copy: the file may have grown since.
        undo.keep_inode(target.copied or target.st, target.fd)
        if target.copy is not None or not undo.clones:
            return
        pages = syscalls.dirty_pages(target.fd)
        if pages is not None and pages <= CLONE_IN_HOLD_PAGES:
            self._clone(target)
        else:
            self._late.append(target)

    # -- after it -------------------------------------------------------------------------------------

    def save(self) -> None:
        """Write the copies to the undo log, clone what would have taken too long under the hold, and judge every file."""
        if self._saved:
            return
        self._saved = True
        for target in self._late:
            self._clone(target)
        for target in self._targets:
            is_saved = target.cloned or self._save_copy(target)
            if not (is_saved and self._is_still(target)):
                self.unheld.append(self._judged(target, is_saved))
        self._targets = self._late = []

    def _save_copy(self, target: CutTarget) -> bool:
        """Write the copy to the undo log, and return whether it is there."""
        copy, target.copy = target.copy, None
        undo = self._state.undo
        if copy is None:
            return False
        with undo.lock(target.ino):
            # Another cut was made meanwhile, or the epoch was given up: the copy would be filed under the
            # wrong epoch.
            if undo.true_epoch != self._epoch or not undo.active:
                return False
            # Without room the file is captured as found, which is better than no snapshot.
            try:
                if not undo.space.has_room_for(sum(map(len, copy))):
                    return False
                undo.keep_copy(target.ino, copy)
            except OSError:
                return False
        return True

    def _clone(self, target: CutTarget) -> None:
        undo, ino = self._state.undo, target.ino
        with undo.lock(ino):
            if undo.true_epoch != self._epoch or not undo.active or self._state.tracker.is_fresh(ino):
                return
            with suppress(OSError):
                target.cloned = undo.clone_blocks(target.fd, ino)
                # A change during the clone may be in it.
                target.moving |= _changed(target.st, os.fstat(target.fd))
                self._ended_ns = time.time_ns()

    def _is_still(self, target: CutTarget) -> bool:
        """Return whether nothing of the file changed between the last two looks: all such files share an instant."""
        st = target.st
        if target.moving or target.dirty or (target.copied is not None and _changed(target.copied, st)):
            return False
        return self._fine_times or self._looked_ns - max(st.st_mtime_ns, st.st_ctime_ns) > TICK_NS

    def _judged(self, target: CutTarget, is_saved: bool) -> Unheld:
        """Describe a file that is not held, and what would prove after the capture that it is."""
        st = target.st
        provable = not is_saved and self._is_still(target)
        until_ns = self._ended_ns if is_saved else 0
        mtime_ns, ctime_ns = recorded_time(st.st_mtime_ns), recorded_time(st.st_ctime_ns)
        return Unheld(target.ino, st.st_size, mtime_ns, ctime_ns, provable, until_ns)


def _changed(before: os.stat_result, after: os.stat_result) -> bool:
    return (before.st_size, before.st_mtime_ns, before.st_ctime_ns) != (
        after.st_size,
        after.st_mtime_ns,
        after.st_ctime_ns,
    )


def _copied(fd: int, size_bytes: int, budget: _Budget) -> list[memoryview] | None:
    """Return the first bytes of a file from the page cache, None where they are not all there or time is up."""
    pieces: list[memoryview] = []
    at = 0
    while at < size_bytes:
        buffer = bytearray(min(_STEP_BYTES, size_bytes - at))
        try:
            # A hold never waits for a disk.
            count = os.preadv(fd, [buffer], at, os.RWF_NOWAIT)
        except OSError:
            return None
        if not count:
            return None
        pieces.append(memoryview(buffer)[:count])
        at += count
        if at < size_bytes and budget.is_used_up:
            return None
    return pieces


def has_fine_times(directory_fd: int) -> bool:
    """Try whether ctime tells two writes apart however fast one follows the other, once the time was asked for."""
    try:
        fd = os.open(b".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=directory_fd)
    except OSError:
        return False
    try:
        times = [_written_ns(fd) for _ in range(_PROBES)]
    except OSError:
        return False
    finally:
        os.close(fd)
    return all(before < after for before, after in itertools.pairwise(times))


def _written_ns(fd: int) -> int:
    os.pwrite(fd, b"0", 0)
    return os.fstat(fd).st_ctime_ns


def faults_tell(directory_fd: int) -> bool:
    """Return whether a store to a clean page of a mapping moves ctime on this file system."""
    with suppress(OSError):
        return syscalls.file_system_type(directory_fd) in _FAULTS_TELL
    return False
