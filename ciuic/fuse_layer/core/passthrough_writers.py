"""Writers whose data the kernel carries to the backing file past the worker (kernel/driver.py): *unseen* writers.

Invariants:

* A file is wholly dirty in every epoch in which an unseen writer had it open, from the open to the release,
  and until no mapping made through it is left: tracking never calls something clean that it could not watch.
* A cut cannot hold such a writer. Without a proof that a copy is the content at the cut, the file is marked in the
  snapshot as not held.

Most such writers end by themselves within seconds (a checkpoint is saved): ``prepare`` gives those that make
progress a moment to do so. The others go on during a hold. Their files are looked at, copied, and looked at again
until nothing has changed between two looks: state that was true at the end of the first look and at the start of
the second was true of all files at one instant, and the other files stand still meanwhile. Copies are made of the
page cache to memory and written to the undo log after the hold (`Instant`).

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

import contextlib
import fcntl
import itertools
import os
import stat
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Final

from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.sealed_format import Unheld
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.open_rules import STAYS_SECONDS
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.state.passthrough_state import OpenFile
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
_POLL_SECONDS: Final = 0.02
# Age of a file's mtime from which on its writer is not waited for: it may keep the file open for life.
_IDLE_NS: Final = 200_000_000


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


class _CutTarget:
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
        self._targets: list[_CutTarget] = []
        self._late: list[_CutTarget] = []
        self._looked_ns = self._ended_ns = 0
        """Wall clock before the last look but one, and at the end of copying."""
        self._saved = False
        self.unheld: list[Unheld] = []

    # -- under the hold -------------------------------------------------------------------------------

    def take(self, targets: Sequence[_CutTarget]) -> None:
        """Save what can be saved at once of ``targets``, one for each inode."""
        try:
            self._take(targets)
        except OSError:
            # A failing disk. The cut is made all the same.
            self._targets = self._late = []
            self.unheld = [Unheld(target.ino) for target in targets]

    def _take(self, targets: Sequence[_CutTarget]) -> None:
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

    def _first_look(self, target: _CutTarget) -> bool:
        """Return whether a snapshot can have the file, which needs a name for that."""
        try:
            target.st, nlink = self._state.links(lambda: os.fstat(target.fd))
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

    def _record(self, target: _CutTarget) -> None:
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

    def _save_copy(self, target: _CutTarget) -> bool:
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

    def _clone(self, target: _CutTarget) -> None:
        undo, ino = self._state.undo, target.ino
        with undo.lock(ino):
            if undo.true_epoch != self._epoch or not undo.active or self._state.tracker.is_fresh(ino):
                return
            with suppress(OSError):
                target.cloned = undo.clone_blocks(target.fd, ino)
                # A change during the clone may be in it.
                target.moving |= _changed(target.st, os.fstat(target.fd))
                self._ended_ns = time.time_ns()

    def _is_still(self, target: _CutTarget) -> bool:
        """Return whether nothing of the file changed between the last two looks: all such files share an instant."""
        st = target.st
        if target.moving or target.dirty or (target.copied is not None and _changed(target.copied, st)):
            return False
        return self._fine_times or self._looked_ns - max(st.st_mtime_ns, st.st_ctime_ns) > TICK_NS

    def _judged(self, target: _CutTarget, is_saved: bool) -> Unheld:
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


def _has_fine_times(directory_fd: int) -> bool:
    """Try whether ctime tells two writes apart however fast one follows the other, once the time was asked for."""
    try:
        fd = os.open(b".", os.O_TMPFILE | os.O_RDWR, 0o600, dir_fd=directory_fd)
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


def _faults_tell(directory_fd: int) -> bool:
    """Return whether a store to a clean page of a mapping moves ctime on this file system."""
    with suppress(OSError):
        return syscalls.file_system_type(directory_fd) in _FAULTS_TELL
    return False


class UnseenWriters:
    """The unseen writers of one root.

    ``add``, ``closed`` and ``cut`` are called inside the gate, or with it held.
    """

    def __init__(
        self, state: OverlayState, *, on_stayed: Callable[[bytes], None] = lambda name: None
    ) -> None:
        """Watch nothing yet; ``on_stayed`` is called with the name of a file that stays open over cuts (open_rules.py)."""
        self._state = state
        self._on_stayed = on_stayed
        self._since: dict[int, float] = {}
        """Times at which handles were opened (monotonic), by handle."""
        self._at_last_cut: set[int] = set()
        """Handles that were open at the last cut."""
        self._files: dict[int, OpenFile] = {}
        self._mapped: dict[int, tuple[Node, int]] = {}
        """Nodes that a mapping may be writing to although no handle is left, each with a descriptor to ask
        by, by node id."""
        # Two handles of one file may be released at the same time: the file is watched once.
        self._lingering = threading.Lock()
        self._fine_times = _has_fine_times(state.undo.directory_fd)
        self._faults_tell = _faults_tell(state.undo.directory_fd)

    @property
    def any_open(self) -> bool:
        """True if a program has a file open for writing past the worker."""
        return bool(self._files)

    # -- life of a writer -----------------------------------------------------------------------------

    def add(self, handle: int, file: OpenFile) -> None:
        """Watch a handle whose writes pass the worker by; its file counts as wholly dirty from now on."""
        # Marked from the open on: the first write may come before any request of this file.
        file.unseen = True
        self._files[handle] = file
        self._since[handle] = time.monotonic()
        if self._state.tracked(file.node):
            self._state.tracker.mark_whole(file.node)

    def discard(self, handle: int, file: OpenFile) -> None:
        """Stop watching a handle that was opened as unseen and whose writes come to the worker after all."""
        file.unseen = False
        self._files.pop(handle, None)
        self._since.pop(handle, None)

    def closed(self, handle: int, file: OpenFile) -> None:
        """Forget a handle that is released: what it wrote since the last cut is in the current epoch's mark."""
        # Before the handle is forgotten: a cut goes on beside a release, and must find the file in one of the
        # two tables.
        if file.maps:
            self._linger(file)
        self._files.pop(handle, None)
        self._since.pop(handle, None)
        self._measure(file)

    def _linger(self, file: OpenFile) -> None:
        """Go on watching the file: a mapping may outlive its handle."""
        node = file.node
        with self._lingering, contextlib.suppress(OSError):
            if node.id in self._mapped:
                return
            # Opened anew: a read lease can be taken on a descriptor that is open for reading alone
            # (fcntl(2)).
            asking = os.open(b"/proc/self/fd/%d" % file.fd, os.O_RDONLY)
            self._mapped[node.id] = (node, asking)
            # Counted as a lookup: a cut has to mark the node by its names, also when the kernel has forgotten
            # it.
            self._state.nodes.remember(node.id)
            self._note(node.id, lingers=True)

    def nodes(self) -> dict[int, Node]:
        """Return the nodes, by id, that a program may be writing to unseen now."""
        found = {file.node.id: file.node for file in list(self._files.values())}
        for node_id, (node, asking) in list(self._mapped.items()):
            if _is_written(asking):
                found[node_id] = node
            else:
                self._forget_mapped(node_id)
        return {node_id: node for node_id, node in found.items() if self._state.tracked(node)}

    def measure(self) -> None:
        """Count every file that is being written as dirty, at the length that it has now."""
        for file in list(self._files.values()):
            self._measure(file)

    def _measure(self, file: OpenFile) -> None:
        # The length is for a figure of the status alone, which is not worth a failure.
        with contextlib.suppress(OSError):
            st = os.fstat(file.fd)
            self._state.tracker.measured(st.st_ino, st.st_size)

    def _forget_mapped(self, node_id: int) -> None:
        _, asking = self._mapped.pop(node_id)
        os.close(asking)
        self._note(node_id, lingers=False)
        self._state.nodes.forget(node_id, 1)

    def close(self) -> None:
        """Close every descriptor; no other method is called afterwards."""
        for _, asking in self._mapped.values():
            os.close(asking)
        self._mapped.clear()
        self._files.clear()

    def _note(self, node_id: int, *, lingers: bool) -> None:
        to = self._state.nodes.journal
        if to is not None:
            to.append(records.lingers_record(node_id, lingers=lingers))

    def inherit(self, node_id: int) -> None:
        """Watch a node that a mapping may go on writing to, although the predecessor's last handle on it is closed."""
        with contextlib.suppress(OSError):
            node = self._state.nodes.get(node_id)
            if node.kind != stat.S_IFREG:
                return
            # Not by its name alone: the name may be a pipe's by now, and opening one would wait for ever.
            asking = self._state.nodes.open(node, os.O_RDONLY)
            self._mapped[node_id] = (node, asking)
            self._state.nodes.remember(node_id)

    # -- the cut --------------------------------------------------------------------------------------

    def prepare(self, timeout_seconds: float) -> None:
        """Prepare a hold: start writeback, and give writers that make progress up to ``timeout_seconds`` to finish.

        A clone would wait for what is not written out, and a store to a mapped page shows only in one that is
        (`Instant`).
        """
        deadline = time.monotonic() + timeout_seconds
        # A hold must not wait for the disk: what is dirty now is written out before it begins.
        for file in list(self._files.values()):
            if self._state.undo.clones or file.maps:
                with contextlib.suppress(OSError):
                    syscalls.start_writeback(file.fd)
        while time.monotonic() < deadline and any(map(_makes_progress, list(self._files.values()))):
            time.sleep(_POLL_SECONDS)

    def cut(self, epoch: int) -> Instant | None:
        """Mark the new epoch and save what can be saved at once; the old one was just sealed, the gate is held.

        Returns:
            Copies to be saved after the hold; None without unseen writers.
        """
        if not self._files and not self._mapped:
            return None
        nodes = self.nodes()
        for node in nodes.values():
            self._state.tracker.mark_whole(node)
        instant = Instant(self._state, epoch, fine_times=self._fine_times, faults_tell=self._faults_tell)
        instant.take(self._targets(nodes))
        self._note_stayed()
        return instant

    def _note_stayed(self) -> None:
        """Report the files that were open at the last cut as at this one, and for longer than a checkpoint takes."""
        long_ago = time.monotonic() - STAYS_SECONDS
        now, self._at_last_cut = self._at_last_cut, set(self._files)
        for handle in now & self._at_last_cut:
            file = self._files.get(handle)
            if file is not None and not file.maps and self._since.get(handle, long_ago + 1) < long_ago:
                self._on_stayed(file.node.name)

    def _targets(self, nodes: dict[int, Node]) -> list[_CutTarget]:
        found: dict[int, _CutTarget] = {}
        for file in list(self._files.values()):
            if file.node.id in nodes:
                target = _CutTarget(file.node, file.fd, maps=file.maps, owner=file)
                target = found.setdefault(file.node.id, target)
                target.maps |= file.maps
        for node_id, (node, asking) in self._mapped.items():
            if node_id in nodes:
                found.setdefault(node_id, _CutTarget(node, asking, maps=True)).maps = True
        return list(found.values())


def _makes_progress(file: OpenFile) -> bool:
    with contextlib.suppress(OSError):
        return time.time_ns() - os.fstat(file.fd).st_mtime_ns < _IDLE_NS
    return False


def _is_written(asking: int) -> bool:
    """Return whether a program still has the inode open for writing, a mapping included: a read lease is refused then.

    Without CAP_LEASE the answer is yes for files of other users. An open for writing in that moment breaks
    the lease, which sends SIGIO: the worker ignores it. See F_SETLEASE in fcntl(2).
    """
    try:
        fcntl.fcntl(asking, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(asking, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except OSError:
        return True
    return False
