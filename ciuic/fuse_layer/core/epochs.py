"""Cuts, and the life of an epoch from its seal to its commit or its end without one.

One control thread at a time; operations go on beside it except during a hold.

Invariant: the pending epochs are consecutive in time and captured oldest first. Each sealed set names the
epoch that it is a change to (``since``): the one sealed before it. Giving an epoch up folds it into the next,
so no change is ever lost: it is in a committed snapshot, in a pending set or in the current one.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterator
from typing import Final, NamedTuple

import msgspec

from ciuic.fuse_layer import sealed_format, undo_format
from ciuic.fuse_layer.core.passthrough_writers import Instant, UnseenWriters
from ciuic.fuse_layer.state.node_table import Node
from ciuic.fuse_layer.state.overlay_state import OverlayState
from ciuic.fuse_layer.tracking.changes import BlockSet, ChangeSet, InodeChange
from ciuic.fuse_layer.tracking.gate import HoldExpired
from ciuic.fuse_layer.tracking.undo_log import InheritedUndo
from ciuic.protocol.worker_frames import USE_OF_HOLD_SECONDS
from ciuic.structs import decode_msgpack

# Every status reply has all of them.
_MAX_ABANDONED: Final = 100
_DUMP_VERSION: Final = 1
_SESSION_VERSION: Final = 1


class AbandonedEpoch(NamedTuple):
    """A sealed epoch that was given up."""

    epoch: int
    reason: str
    time_ns: int


class SealedEpoch(NamedTuple):
    """An epoch that was just sealed by a cut."""

    epoch: int
    cut_ns: int
    """Wall clock, nanoseconds."""
    hold_us: int
    """Time for which changing operations were held."""


class SealedSet(NamedTuple):
    """A pending epoch."""

    cut_ns: int
    changes: ChangeSet
    open_for_write: list[int]
    instant: Instant | None = None
    """Copies of files whose writers pass the worker by; None where there were none."""


class Epochs:
    """The pending epochs of one root, and the operations on them; one object for each core."""

    def __init__(self, state: OverlayState, unseen: UnseenWriters, *, session: str) -> None:
        self._state = state
        self._unseen = unseen
        self._session = session
        # Orders cut, seal, commit, abort and giving up. Giving up can start inside an operation, in the gate
        # and under an inode's stripe: under this lock nothing may wait for either. Reentrant, because a cut
        # that expired aborts itself.
        self._control = threading.RLock()
        self._sets: dict[int, SealedSet] = {}
        self._open_at_last_cut: dict[int, Node] = {}
        """Nodes by id; each is remembered once for this table."""
        self._hold_started_ns = 0
        self.since = 0
        """Newest epoch of this session that a snapshot was committed for, 0 for none."""
        self.abandoned: list[AbandonedEpoch] = []

    # -- the cut ------------------------------------------------------------------------------------

    def hold(self, timeout_seconds: float) -> int:
        """Stop changing operations, until ``release`` or the end of the timeout; none is in flight on return.

        Raises:
            TimeoutError: operations in flight did not finish in time.
        """
        # Wait for a commit that frees much before the gate is closed, not while the job is held.
        with self._control:
            pass
        started = time.monotonic_ns()
        token = self._state.gate.hold(timeout_seconds)
        self._hold_started_ns = started
        return token

    @contextlib.contextmanager
    def standing_still(self) -> Iterator[None]:
        """Keep cuts, seals and commits out; inside, nothing may wait for the gate."""
        with self._control:
            yield

    def cut(self, token: int) -> SealedEpoch:
        """End the epoch under a hold, which stays in force.

        ``seal`` must follow after the hold: it tells capture what changed.

        Raises:
            HoldExpired: the hold is over, and nothing was cut.
        """
        with self._control:
            # A new deadline, which the cut itself does not outlast.
            self._state.gate.extend(token, USE_OF_HOLD_SECONDS)
            cut = self._cut()
            try:
                self._state.gate.extend(token, USE_OF_HOLD_SECONDS)
            except HoldExpired:
                # This thread had no processor for so long that the job went on in the middle of the cut.
                self.abort(cut.epoch)
                raise
            return cut

    def _cut(self) -> SealedEpoch:
        # In this order under the hold: open files are marked in the epoch that ends, its set is sealed,
        # saving begins, and files that are written past the worker are copied last, because only that takes
        # time.
        open_for_write = self._mark_open_files()
        epoch, changes = self._state.tracker.seal()
        cut_ns = time.time_ns()
        self._sets[epoch] = SealedSet(cut_ns, changes, open_for_write)
        self._state.undo.begin(epoch)
        instant = self._unseen.cut(epoch)
        # The epoch may have been given up while the copies were made.
        if instant is not None and epoch in self._sets:
            self._sets[epoch] = self._sets[epoch]._replace(instant=instant)
        return SealedEpoch(epoch, cut_ns, (time.monotonic_ns() - self._hold_started_ns) // 1000)

    def _mark_open_files(self) -> list[int]:
        """Mark the files that are open for writing now or were at the last cut as changed, and return the former's inode numbers.

        Capture sets and clears their mark of an open file. The nodes are kept until the next cut: one that
        the kernel has forgotten cannot be marked by name any more.
        """
        nodes = self._state.nodes
        # Copied: opens for reading and releases do not pass the gate, and change the table meanwhile.
        open_now = {
            file.node.id: file.node
            for file in list(self._state.files.values())
            if file.writes and self._state.tracked(file.node)
        } | self._unseen.nodes()
        before, self._open_at_last_cut = self._open_at_last_cut, open_now
        for node in (*open_now.values(), *(node for id_, node in before.items() if id_ not in open_now)):
            if node.parent is not None:
                self._state.tracker.mark_attrs(node)
            else:
                self._state.tracker.mark_ino(node.ino)
        for id_ in open_now.keys() - before.keys():
            try:
                nodes.remember(id_)
            except OSError:
                # It was closed and forgotten just now; its mark above is in time.
                del open_now[id_]
        for id_ in before.keys() - open_now.keys():
            nodes.forget(id_, 1)
        return [node.ino for node in open_now.values()]

    def seal(self, epoch: int) -> None:
        """Write the sealed file of an epoch that was cut; abandon every sealed epoch when that fails."""
        with self._control:
            sealed = self._sets.get(epoch)
            if sealed is None:
                return
            if sealed.instant is not None:
                sealed.instant.save()
            if epoch not in self._sets:
                # Given up just now, because the copies were too much for the undo log.
                return
            try:
                self._write_sealed(epoch, sealed)
            except OSError as error:
                self._state.undo.abandon(f"sealed file: {error.strerror or error}")

    def _write_sealed(self, epoch: int, sealed: SealedSet) -> None:
        state = self._state
        sealed_format.write_sealed(
            b"/proc/self/fd/%d" % state.undo.directory_fd,
            sealed_format.SealedHead(
                session=self._session,
                epoch=epoch,
                since=sealed.changes.since,
                cut_ns=sealed.cut_ns,
                complete=sealed.changes.complete,
                root_ino=state.nodes.root.ino,
                block_size=state.tracker.block_size,
                open_for_write=sealed.open_for_write,
                unheld=sealed.instant.unheld if sealed.instant is not None else [],
            ),
            ((ino, _as_record(change)) for ino, change in sealed.changes.changes.items()),
        )

    # -- afterwards ---------------------------------------------------------------------------------

    def committed(self, epoch: int) -> None:
        """End ``epoch``, of which a snapshot exists.

        Unknown epochs are ignored: they ended before, or were given up meanwhile.
        """
        with self._control:
            if self._sets.pop(epoch, None) is None:
                return
            self.since = max(self.since, epoch)
            self._state.undo.end(epoch)

    def tidy(self) -> None:
        """Remove what an ended epoch left in the undo log, unless an epoch is cut, ended or captured just now."""
        # Never waits: the next call does what this one leaves.
        if self._state.gate.held or not self._control.acquire(blocking=False):
            return
        try:
            self._state.undo.tidy()
        finally:
            self._control.release()

    def abort(self, epoch: int) -> None:
        """Give ``epoch`` up, whose capture has failed: its changes belong to the next one.

        Unknown epochs are ignored.
        """
        with self._control:
            if epoch in self._sets:
                self._fold(epoch)
                self._state.undo.end(epoch)

    def on_abandon(self, epochs: list[int], reason: str) -> None:
        """Fold the pending epochs that the undo log gave up.

        The log calls this, possibly from within an operation of the job.
        """
        with self._control:
            now = time.time_ns()
            # The newest first: each then goes into the current set. Folding into one that is given up too
            # would write its sealed file without a reader, on what may be a full disk, and from within an
            # operation of the job's.
            for epoch in reversed(epochs):
                if epoch in self._sets:
                    self._fold(epoch)
            for epoch in epochs:
                self.abandoned.append(AbandonedEpoch(epoch, reason, now))
            del self.abandoned[:-_MAX_ABANDONED]

    def _fold(self, epoch: int) -> None:
        older = self._sets.pop(epoch)
        later = [other for other in self._sets if other > epoch]
        if later:
            following = self._sets[min(later)]
            following.changes.fold_older(older.changes)
            # Where that cannot be written, the later ones are given up too.
            self.seal(min(later))
        else:
            self._state.tracker.fold_into_current(older.changes)

    def give_up_all(self) -> None:
        """Fold every pending epoch into the current one, because the worker stops."""
        with self._control:
            # The newest first: a set is a change to the one before it, which is folded beneath it.
            for epoch in sorted(self._sets, reverse=True):
                self._state.tracker.fold_into_current(self._sets.pop(epoch).changes)
                self._state.undo.end(epoch)

    # -- across a restart ---------------------------------------------------------------------------

    def dump(self) -> bytes:
        """Encode the current set, for ``load`` in a later session."""
        changes = self._state.tracker.current.changes
        return msgspec.msgpack.encode(
            [_DUMP_VERSION, {ino: _as_record(change) for ino, change in changes.items()}]
        )

    def dump_session(self) -> bytes:
        """Encode what a successor in this very session needs, for ``load_session``. No epoch is pending."""
        tracker = self._state.tracker
        current = tracker.current
        records = {ino: _as_record(change) for ino, change in current.changes.items()}
        head = [_SESSION_VERSION, self._session, tracker.epoch, self.since, current.since, current.complete]
        return msgspec.msgpack.encode([*head, records])

    def load_session(self, data: bytes) -> str | None:
        """Go on where a predecessor stopped.

        Return the session's name; None when the dump is of another version.
        """
        try:
            version, session, epoch, since, current_since, complete, records = decode_msgpack(
                data, tuple[int, str, int, int, int, bool, dict[int, undo_format.SealedChange]]
            )
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return None
        if version != _SESSION_VERSION:
            return None
        current = ChangeSet(since=current_since, complete=complete)
        current.changes = {ino: _from_record(record) for ino, record in records.items()}
        self._state.tracker.resume(epoch, current)
        self._session, self.since = session, since
        return session

    def adopt(self, inherited: InheritedUndo) -> str:
        """Go on with the epochs that a killed predecessor sealed, and return the session's name.

        The changes of the current epoch were in the predecessor's memory: the set is not complete, and
        continues no snapshot.
        """
        for head in inherited.heads:
            # The sealed file has the changes; this set stands for them where it is folded into another.
            changes = ChangeSet(since=head.since, complete=False)
            self._sets[head.epoch] = SealedSet(head.cut_ns, changes, head.open_for_write)
        current = ChangeSet(since=0, complete=False)
        for ino in inherited.reborn:
            # Marked as fresh, so that nothing of it is saved for a sealed epoch.
            current.changes[ino] = change = InodeChange()
            change.fresh = True
        self._state.tracker.resume(inherited.true_epoch + 1, current)
        self._session = inherited.heads[-1].session
        return self._session

    def load(self, data: bytes) -> None:
        """Fold a dump of an earlier session into the current set.

        The set stays incomplete, because files may have changed while nothing was mounted. A dump that does
        not decode is left out, for the same reason without loss.
        """
        try:
            version, records = decode_msgpack(data, tuple[int, dict[int, undo_format.SealedChange]])
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
            return
        if version != _DUMP_VERSION:
            return
        older = ChangeSet(since=0, complete=False)
        older.changes = {ino: _from_record(record) for ino, record in records.items()}
        self._state.tracker.fold_into_current(older)


def _as_record(change: InodeChange) -> undo_format.SealedChange:
    data: int | bytes = 0
    if change.whole:
        data = 1
    elif change.blocks is not None:
        data = change.blocks.to_bytes() or 0
    return undo_format.SealedChange(change.fresh, change.attrs, data, change.names)


def _from_record(record: undo_format.SealedChange) -> InodeChange:
    change = InodeChange()
    change.fresh, change.attrs, change.names = record.fresh, record.attrs, record.names
    change.whole = record.data == 1
    if isinstance(record.data, bytes):
        change.blocks = BlockSet(record.data)
    return change


def read_saved(state_fd: int, name: bytes) -> bytes | None:
    """Take a saved file: return its content and remove it durably, because tracking may be trusted only once."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=state_fd)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read()
    # Durable before it is used: after a power cut, tracking that was used and then missed changes would be
    # found again.
    os.unlink(name, dir_fd=state_fd)
    os.fsync(state_fd)
    return data
