"""The overlay core: one protected root, served as a passthrough file system (passthrough_core.py) with tracking, and its epochs.

What it adds to the operations of a passthrough file system:

* overlay_hooks.py, state/overlay_state.py: what happens on their hooks, before and after changes
* tracking/gate.py, tracking/changes.py, tracking/undo_log.py: holds, dirty tracking, old state that
  sealed epochs still need, and the life of an epoch
* nodes and handles that a successor takes over (journal/)

Changing operations may take long while ``pending`` is true (they may copy old blocks). They raise GateHeld (gate.py)
only in the thread that the driver registered as ``inline_thread``.

Cuts, and the life of an epoch from its seal to its commit or its end without one.

One control thread at a time; operations go on beside it except during a hold.

Invariant: the pending epochs are consecutive in time and captured oldest first. Each sealed set names the
epoch that it is a change to (``since``): the one sealed before it. Giving an epoch up folds it into the next,
so no change is ever lost: it is in a committed snapshot, in a pending set or in the current one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final, NamedTuple

import msgspec
import structlog

from ciuic.errors import CiuicError
from ciuic.fuse_layer import sealed_format, undo_format
from ciuic.fuse_layer.core.directories import Directories
from ciuic.fuse_layer.core.files import Attributes, KernelTimes, SetAttr
from ciuic.fuse_layer.core.names import settle
from ciuic.fuse_layer.core.overlay_hooks import OverlayFiles, OverlayNames, RoomForUnseen, SpaceEstimator
from ciuic.fuse_layer.core.passthrough_core import DriverHooks, PassthroughCore
from ciuic.fuse_layer.core.passthrough_writers import Instant, UnseenWriters
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.state.node_table import ROOT_ID, Node, NodeTable
from ciuic.fuse_layer.state.open_rules import OpenPreference, OpenRules
from ciuic.fuse_layer.state.overlay_state import OverlayState, UntrackedState
from ciuic.fuse_layer.state.passthrough_state import Attr, NameEvents
from ciuic.fuse_layer.system.caller import Credentials
from ciuic.fuse_layer.system.path_handles import Descriptor
from ciuic.fuse_layer.tracking.changes import BlockSet, ChangeSet, InodeChange, Tracker
from ciuic.fuse_layer.tracking.gate import GateHeld, HoldExpired
from ciuic.fuse_layer.tracking.undo_log import InheritedUndo, UndoLog
from ciuic.protocol import state_directory
from ciuic.protocol.worker_frames import USE_OF_HOLD_SECONDS
from ciuic.structs import decode_msgpack
from ciuic.system.disk import PIN_DIRECTORY, Disk

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
        except msgspec.DecodeError:
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
        except msgspec.DecodeError:
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
        fd = os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=state_fd)
    except FileNotFoundError:
        return None
    with os.fdopen(fd, "rb") as file:
        data = file.read()
    # Durable before it is used: after a power cut, tracking that was used and then missed changes would be
    # found again.
    os.unlink(name, dir_fd=state_fd)
    os.fsync(state_fd)
    return data


log = structlog.get_logger(__name__)

__all__ = [
    "ROOT_ID",
    "Attr",
    "Credentials",
    "GateHeld",
    "HoldExpired",
    "OverlayCore",
    "SealedEpoch",
    "SetAttr",
    "UntrackedCore",
]

_TRACKING_NAME: Final = b"tracking"
_SUCCESSION_NAME: Final = b"succession"
_STAND_IN_NAME: Final = b"nowhere"
DEFAULT_UNDO_LIMIT_BYTES: Final = 1 << 40


class OverlayCore(PassthroughCore):
    """The overlay of one root: its files with tracking, and the life of its epochs.

    Opening it empties the undo directory, and loads tracking that a clean stop saved.

    Args:
        backing_fd: the root's directory (O_PATH suffices), opened before anything was mounted over it. It
            stays the caller's.
        session: name of the session.
        block_size: size of a block of dirty tracking, in bytes; a power of two.
        undo_limit_bytes: limit of the undo log.
        kernel_keeps_times: the driver lets the kernel cache writes (files.py).
        journal: journal of nodes for a successor.
        inherited: tables of a predecessor whose session goes on.
        rules: rules of opens (open_rules.py).

    Raises:
        OSError: the state directory cannot be made (read-only or full file system).
        CiuicError: its name is taken (state_directory.open_state).
    """

    _state: OverlayState
    files: OverlayFiles
    names: OverlayNames
    _state_class: ClassVar[type[OverlayState]] = OverlayState
    _inherits_epochs: ClassVar[bool] = True
    """True to continue the epochs that a killed predecessor sealed."""

    def __init__(
        self,
        backing_fd: int,
        *,
        session: str,
        block_size: int = 262144,
        undo_limit_bytes: int = DEFAULT_UNDO_LIMIT_BYTES,
        kernel_keeps_times: bool = False,
        journal: JournalWriter | None = None,
        inherited: InheritedSession | None = None,
        rules: OpenRules | None = None,
    ) -> None:
        self._state_fd, self._set_aside = state_directory.open_state(backing_fd)
        self._renewed = 0
        """Number of times that the state directory was made anew because it had been deleted."""
        for name in self._set_aside:
            log.error("reserved_name_set_aside", new_name=os.fsdecode(name))
        self._removed: dict[tuple[int, int, int], Descriptor] = {}
        nodes = NodeTable(backing_fd)
        # Left by a worker that handed over. Valid for the next process alone: read and removed in any case.
        left = read_saved(self._state_fd, _SUCCESSION_NAME)
        undo = UndoLog(
            self._state_fd,
            block_size=block_size,
            limit_bytes=undo_limit_bytes,
            on_abandon=self._on_abandon,
            # A predecessor that handed its session over gave its epochs up; one that was killed left them on
            # disk.
            inherit=inherited is not None and left is None and self._inherits_epochs,
        )
        hidden = int(state_directory.lies_inside(backing_fd))
        state = self._state_class(nodes, Tracker(block_size), undo, hidden_directories=hidden)
        nodes.on_dropped = undo.hidden.let_orphan_go
        undo.max_directories = min(undo.max_directories, state.allowances.limit // 8)
        rules = rules or OpenRules()
        rules.load(self._state_fd)
        self._unseen = UnseenWriters(state, on_stayed=rules.note_stayed)
        # Only with a journal is there a successor that could open a removed file again.
        if journal is not None:
            undo.hidden.keep_orphans_in(self._state_fd, inherited=inherited is not None)
        self._epochs = Epochs(state, self._unseen, session=session)
        self._space = SpaceEstimator(undo, self._open_inodes)
        self.room_for_unseen = RoomForUnseen(state, self._space, self._unseen)
        self.block_size = block_size
        times = KernelTimes(state, active=kernel_keeps_times)
        files = OverlayFiles(state, times, self._unseen)
        super().__init__(
            state,
            names=OverlayNames(state, after_freeing=self.room_for_unseen.look),
            files=files,
            attributes=Attributes(state, files, times),
            directories=Directories(state),
            rules=rules,
        )
        self.session = self._epochs_loaded(undo, left if inherited is not None else None) or session
        # After the core has made its own nodes: a successor makes those in the same way.
        nodes.journal = journal
        if inherited is not None:
            self._inherit(inherited)

    def _epochs_loaded(self, undo: UndoLog, left: bytes | None) -> str | None:
        """Load what a predecessor left of tracking and epochs; return the session that it belongs to, None for a new one."""
        # Read and removed in any case: tracking that was saved may be trusted once.
        saved = read_saved(self._state_fd, _TRACKING_NAME)
        if left is not None:
            return self._epochs.load_session(left)
        if undo.inherited is not None:
            session = self._epochs.adopt(undo.inherited)
            log.info("epochs_inherited", epochs=undo.pending, records=len(undo.inherited.names))
            return session
        if saved is not None:
            self._epochs.load(saved)
        return None

    def _inherit(self, inherited: InheritedSession) -> None:
        """Take over the nodes and handles of a predecessor, which keep their numbers.

        A handle whose file cannot be opened any more answers EBADF (Files.has).
        """
        self._state.nodes.stand_in = self._stand_in_directory
        self._state.nodes.inherit(inherited)
        # Before any file is opened, because names lead to the files.
        settle(self._state.nodes, inherited.changes, self._is_gone)
        self._state.inherit_handles(inherited.last_handle)
        lost = 0
        # A lost file costs its program EBADF, a successor that does not start costs every program its files.
        for opened in inherited.files.values():
            try:
                self.files.inherit(
                    opened.handle, opened.node, opened.flags, unseen=opened.unseen, uid=opened.uid
                )
            except OSError as error:
                log.error("handle_lost", node=opened.node, error=str(error))
                lost += 1
        for directory in inherited.directories.values():
            names = inherited.listings.get(directory.handle)
            try:
                removed = inherited.removed_since_opened(directory.handle)
                self.directories.inherit(
                    directory.handle, directory.node, names, uid=directory.uid, removed=removed
                )
            except OSError:
                lost += 1
        for node_id in inherited.lingering:
            self._unseen.inherit(node_id)
        if lost:
            log.error("handles_lost", count=lost)

    # -- for drivers --------------------------------------------------------------------------------

    def connect(self, driver: DriverHooks) -> None:
        """Call these hooks of the driver from now on; before the first request."""
        super().connect(driver)
        self.files.swaps.held_by_kernel = driver.held_by_kernel

    @property
    def pending(self) -> bool:
        """True if a sealed epoch awaits its capture, so that changing operations may copy old content first."""
        return self._state.undo.active

    @property
    def inline_thread(self) -> int | None:
        """Thread (threading.get_ident) that must not wait for a cut (gate.py)."""
        return self._state.gate.inline_thread

    @inline_thread.setter
    def inline_thread(self, ident: int | None) -> None:
        self._state.gate.inline_thread = ident

    def statfs(self, node_id: int = ROOT_ID) -> os.statvfs_result:
        """Return the figures of the file system that a node is on.

        The undo log's space counts as free: it is given up before the job runs short.
        """
        spare = self._space.room()
        real = super().statfs(node_id)
        # A file system that is mounted below the root has none of it.
        if not spare.inodes or self._state.nodes.get(node_id).dev != self._state.nodes.device:
            return real
        values, blocks = list(real), spare.size_bytes // real.f_frsize
        # Positions of f_bfree, f_bavail, f_ffree and f_favail in the tuple.
        for at, more in ((3, blocks), (4, blocks), (6, spare.inodes), (7, spare.inodes)):
            values[at] += more
        return os.statvfs_result(values)

    def prepare_cut(self, timeout_seconds: float) -> None:
        """Prepare a hold, before it begins (UnseenWriters.prepare)."""
        self._unseen.prepare(timeout_seconds)

    def preference(self, node_id: int, flags: int, *, fresh: bool) -> OpenPreference:
        """Return the rules' preference for an open of the node, where its family is not decided yet."""
        preference = super().preference(node_id, flags, fresh=fresh)
        # Such a writer meets a full disk without a request, so the undo log could not be given up for it
        # (overlay_hooks.py).
        passes_by = preference is OpenPreference.ANY and fresh and flags & os.O_ACCMODE == os.O_WRONLY
        return OpenPreference.TRACKED if passes_by and self.room_for_unseen.is_short() else preference

    # -- for control --------------------------------------------------------------------------------

    def hold(self, timeout_seconds: float) -> int:
        """Hold every change for at most the timeout; return the token of the hold (Epochs.hold)."""
        # Before the job is held.
        self._renew_state()
        return self._epochs.hold(timeout_seconds)

    def release_hold(self, token: int) -> None:
        """End a hold; one that is over already is left alone."""
        self._state.gate.release(token)

    def committed(self, epoch: int) -> None:
        """Drop what was kept for an epoch, of which a snapshot exists now (Epochs.committed)."""
        self._epochs.committed(epoch)

    def abort(self, epoch: int) -> None:
        """Give a sealed epoch up: the next one has its changes too (Epochs.abort)."""
        self._epochs.abort(epoch)

    def cut(self, timeout_seconds: float = 5.0) -> SealedEpoch:
        """Make a whole cut of this root alone: hold, cut, release, and write the sealed file."""
        token = self.hold(timeout_seconds)
        try:
            cut = self.cut_held(token)
        finally:
            self.release_hold(token)
        self.seal(cut.epoch)
        return cut

    def seal(self, epoch: int) -> None:
        """Write the sealed file of an epoch that was cut (Epochs.seal)."""
        self._epochs.seal(epoch)
        self.room_for_unseen.wake()
        self._rules.save(self._state_fd)

    def writers(self) -> list[bytes]:
        """Return the path below the root of each file with a handle that can write: the kernel may hold unwritten pages of it."""
        nodes = {file.node.id: file.node for file in list(self._state.files.values()) if file.flushes}
        paths = (self._state.nodes.path_below_root(node) for node in nodes.values())
        return [path for path in paths if path]

    def status(self) -> dict[str, Any]:
        """Return the core's fields of a status reply (docs/architecture.md §3), as plain values."""
        # The daemon asks regularly, so files that an ended epoch left are removed here.
        self._renew_state()
        self._epochs.tidy()
        self._unseen.measure()
        current = self._state.tracker.current
        return {
            "session": self.session,
            "epoch": self._state.tracker.epoch,
            "pending": self._state.undo.pending,
            "since": self._epochs.since,
            "complete": current.complete,
            "dirty_bytes": current.dirty_bytes(self.block_size),
            "dirty_inodes": len(current.changes),
            "undo_bytes": self._state.undo.space.kept_bytes if self.pending else 0,
            "open_files": self.open_files,
            "nodes": len(self._state.nodes),
            "abandoned": [entry._asdict() for entry in self._epochs.abandoned],
            "set_aside": list(self._set_aside),
            "renewed": self._renewed,
        }

    def name_events(self, rules: Sequence[tuple[str, str]], *, dirty: bool) -> dict[str, Any]:
        """Count what happens to these names from now on, and return the counts since the last call with the same ones.

        Args:
            rules: as of `NameEvents`; none to count nothing.
            dirty: return the dirty bytes as well, which takes time in proportion to the changed files.
        """
        events = self._state.events
        if events is None or events.rules != tuple(rules):
            events = self._state.events = NameEvents(rules) if rules else None
        tracker = self._state.tracker
        if dirty:
            self._unseen.measure()
        counts, lost = ([], []) if events is None else events.take()
        return {
            "counts": counts,
            "lost": lost,
            "epoch": tracker.epoch,
            "dirty_bytes": tracker.current.dirty_bytes(self.block_size) if dirty else 0,
        }

    def _renew_state(self) -> None:
        """Make the state directory anew if another program has deleted it, such as `git clean -fdx`.

        Sealed epochs are given up, and their changes belong to the next one. The job sees nothing of it.
        """
        undo = self._state.undo
        if not undo.was_deleted():
            return
        with self._epochs.standing_still():
            try:
                undo.abandon("its state directory was deleted by another program")
                nodes = self._state.nodes
                made, _ = state_directory.open_state(nodes.directory(nodes.root).fd)
                # Under the old number, which other threads may be using just now.
                os.dup2(made, self._state_fd, inheritable=False)
                os.close(made)
                undo.renew(self._state_fd)
                self._rules.save(self._state_fd)
            except (OSError, CiuicError) as error:
                # A full disk, for example: the next call tries again.
                log.error("state_not_renewed", error=str(error))
                return
            self._renewed += 1
        log.warning("state_renewed", times=self._renewed)

    @property
    def undo_fd(self) -> int:
        """Descriptor of the directory that holds the undo log; it stays the core's."""
        return self._state.undo.directory_fd

    def save_tracking(self) -> None:
        """Fold pending epochs into the current one and save it durably, at a clean stop when no operation comes any more."""
        self._epochs.give_up_all()
        self._rules.save(self._state_fd)
        Disk().replace_file(_TRACKING_NAME, self._epochs.dump(), dir_fd=self._state_fd)

    def cut_held(self, token: int) -> SealedEpoch:
        """End the epoch under a hold (Epochs.cut)."""
        return self._epochs.cut(token)

    def pin_orphans(self) -> None:
        """Prepare for another session beside this one, which is detached and serves what is open (HiddenLinks.pin_orphans)."""
        self._state.undo.hidden.pin_orphans()

    def save_for_successor(self) -> None:
        """Save tracking for a successor that goes on with this session, when no operation is under way and none will be."""
        self._epochs.give_up_all()
        Disk().replace_file(_SUCCESSION_NAME, self._epochs.dump_session(), dir_fd=self._state_fd)

    def close(self) -> None:
        """Close every descriptor and every open handle. The core is not used afterwards."""
        self._state.files.clear()
        self._unseen.close()
        self._state.undo.hidden.let_orphans_go()
        os.close(self._state_fd)

    def _stand_in_directory(self, facts: tuple[int, int, int]) -> Descriptor:
        """Return a removed directory of this mode, owner and group, one for all: the kernel checks permissions by them."""
        found = self._removed.get(facts)
        if found is None:
            mode, uid, gid = facts
            # Left by a worker that was killed before the removal below.
            with contextlib.suppress(FileExistsError):
                os.mkdir(_STAND_IN_NAME, 0o700, dir_fd=self._state_fd)
            found = self._removed[facts] = Descriptor(
                os.open(_STAND_IN_NAME, PIN_DIRECTORY, dir_fd=self._state_fd)
            )
            path = b"/proc/self/fd/%d" % found.fd
            os.chown(path, uid, gid)
            os.chmod(path, stat.S_IMODE(mode))
            os.rmdir(_STAND_IN_NAME, dir_fd=self._state_fd)
        return found

    def _is_gone(self, node: Node) -> bool:
        """Return whether the inode of a node whose only known name was removed has no name left."""
        orphan = self._state.undo.hidden.find_orphan(node.ino)
        if orphan is None:
            # No program has it open: a lookup by another name makes a new node.
            return True
        st = os.fstat(orphan.fd)
        return st.st_nlink <= self._state.undo.hidden.of(node.ino)

    def _open_inodes(self) -> set[int]:
        return {file.node.ino for file in list(self._state.files.values())}

    def _on_abandon(self, epochs: list[int], reason: str) -> None:
        self._epochs.on_abandon(epochs, reason)


class UntrackedCore(OverlayCore):
    """The overlay of a root whose workers kept dying: it serves and is controlled as any other, and refuses to be cut."""

    _state_class = UntrackedState
    _inherits_epochs = False

    def status(self) -> dict[str, Any]:
        """Return what any core does, and that this one tracks nothing."""
        return {**super().status(), "plain": True}

    def cut_held(self, token: int) -> SealedEpoch:
        """Refuse to end the epoch.

        Raises:
            OSError: EOPNOTSUPP.
        """
        raise OSError(
            errno.EOPNOTSUPP, "this root is served without snapshots, because its workers kept dying"
        )
