"""Writers whose data the kernel carries to the backing file past the worker (kernel/modes.py): *unseen* writers.

Invariants:

* A file is wholly dirty in every epoch in which an unseen writer had it open, from the open to the release,
  and until no mapping made through it is left: tracking never calls something clean that it could not watch.
* A cut cannot hold such a writer. instant.py says what a cut copies of the file under the hold, and what
  proves that the copy is the content at the cut; without that proof the file is marked in the snapshot as not
  held.

Most such writers end by themselves within seconds (a checkpoint is saved): ``prepare`` gives those that make
progress a moment to do so.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import stat
import threading
import time
from collections.abc import Callable
from typing import Final

from ciuic.fuse_layer.cut.instant import CutTarget, Instant, faults_tell, has_fine_times
from ciuic.fuse_layer.journal import records
from ciuic.fuse_layer.state.node import Node
from ciuic.fuse_layer.state.open_rules import STAYS_SECONDS
from ciuic.fuse_layer.state.overlay_state import OpenFile, OverlayState
from ciuic.fuse_layer.system import syscalls

_POLL_SECONDS: Final = 0.02
# Age of a file's mtime from which on its writer is not waited for: it may keep the file open for life.
_IDLE_NS: Final = 200_000_000


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
        self._fine_times = has_fine_times(state.undo.directory_fd)
        self._faults_tell = faults_tell(state.undo.directory_fd)

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
            asking = os.open(b"/proc/self/fd/%d" % file.fd, os.O_RDONLY | os.O_CLOEXEC)
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
        (instant.py).
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

    def _targets(self, nodes: dict[int, Node]) -> list[CutTarget]:
        found: dict[int, CutTarget] = {}
        for file in list(self._files.values()):
            if file.node.id in nodes:
                target = CutTarget(file.node, file.fd, maps=file.maps, owner=file)
                target = found.setdefault(file.node.id, target)
                target.maps |= file.maps
        for node_id, (node, asking) in self._mapped.items():
            if node_id in nodes:
                found.setdefault(node_id, CutTarget(node, asking, maps=True)).maps = True
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
