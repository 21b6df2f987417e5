"""Snapshots on their way from the cut to the commit: the state machine of one, which does no I/O, and their queue.

`PendingSnapshot.phase` says in which state the snapshot is, and with that what has to be done next;
`Capturing` and `cut.settle_doubt` carry it out, and ask here how often and when. No other class changes an
attribute of a snapshot: every change goes through one method here, and every change of state is announced as an
event.

| state       | meaning                                             | next effect                  |
| ----------- | --------------------------------------------------- | ---------------------------- |
| `QUEUED`    | cut, waits for its first or another attempt         | start a capture (Capturing)  |
| `CAPTURING` | a capture process runs, or waits for the repository | wait for its end (Capturing) |
| `DOUBTFUL`  | a worker ended; a successor may have its epoch      | ask it (settle_doubt)        |
| `EMPTY`     | every root was left out                             | give up (Capturing)          |
| `COMMITTED` | durable in the repository                           | none: it leaves the queue    |
| `FAILED`    | will never exist                                    | none: it leaves the queue    |

`DOUBTFUL` is a condition of single roots, and several roots may be in it at once: the state of the snapshot is
the first that holds of COMMITTED, FAILED, EMPTY, DOUBTFUL, CAPTURING, QUEUED.

| from              | transition           | caused by                                         | to              |
| ----------------- | -------------------- | ------------------------------------------------- | --------------- |
| (none)            | constructor          | Snapshots: a cut, or a predecessor's journal      | QUEUED          |
| QUEUED            | `begin_attempt`      | Capturing                                         | CAPTURING       |
| CAPTURING         | `attempt_progressed` | message of the capture process                    | CAPTURING       |
| CAPTURING         | `attempt_failed`     | Capturing: another attempt is worth it            | QUEUED          |
| CAPTURING         | `attempt_failed`     | Capturing: none is left, one root is to blame     | QUEUED, without |
| QUEUED, CAPTURING | `doubt`              | Snapshots.session_lost: a worker ended;           | DOUBTFUL        |
|                   |                      | Snapshots.resume, make_job: another session       |                 |
| DOUBTFUL          | `take_doubt`         | settle_doubt: the root's worker has the epoch     | QUEUED          |
| DOUBTFUL          | `take_doubt`, `lose` | settle_doubt: no worker has it                    | QUEUED or EMPTY |
| all but the ends  | `commit`             | Capturing: `Done`, or found in the repository     | COMMITTED       |
| all but the ends  | `fail`               | Capturing: EMPTY, no attempt is left, a defect,   | FAILED          |
|                   |                      | or the daemon ends                                |                 |

The queue (`SnapshotQueue`) has their order and the journal, and `Promises` the ids on file in the repository. Each
pending epoch costs its root a copy of what the job overwrites, and more than a few would slow the job, so the
queue has few places. Ordinary users have a part of them, and one user a part of that: whatever they ask for,
administrators and the schedule find a place, and so does the next user.

Guarantees: the journal in the runtime directory names every snapshot of the queue, or an alert says that it
cannot be written; finished snapshots are remembered for a while, for callers that ask by id. An id that a
caller was given is on file in the repository (ciuic.repository.promised) until its snapshot is committed, and
with a reason when it never will be; a repository that cannot be written fails no snapshot. Belongs to the
trio thread. Leaves delivering the snapshots to capturing.py.
"""

from __future__ import annotations

import enum
import os
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from typing import Literal, NamedTuple

import msgspec
import structlog
import trio

from ciuic.daemon.base.events import Alerts
from ciuic.daemon.base.repository_store import Store
from ciuic.daemon.base.runtime import CutRecord, PendingRecord, RuntimeDirectory
from ciuic.daemon.capture import job
from ciuic.daemon.snapshots.capture_process import CODE_KILLED, CaptureProcess
from ciuic.errors import Busy, CiuicError, error_of
from ciuic.protocol.control_types import Progress, SnapshotState, rfc3339
from ciuic.repository.promised import Promise
from ciuic.units import plural

# Longest time for which a sealed epoch waits for another writer. Waiting costs the job copies of old blocks,
# so it has an end.
BUSY_PATIENCE_SECONDS = 30 * 60
# Attempts before the snapshot is given up; the job pays for its sealed epoch meanwhile.
MAX_ATTEMPTS = 3
# Pause before an attempt while another writer, such as a prune by hand, has the repository.
_BUSY_RETRY_SECONDS = 5.0
# Upkeep runs between two attempts and may free space on a full store.
_STORE_RETRY_SECONDS = 15.0
# Multiplied by the number of attempts, because memory may have run out.
_KILLED_RETRY_SECONDS = 1.0


class _Retry(NamedTuple):
    """Delay before the next attempt; None: no further attempt."""

    after_seconds: float | None


def retry_after(failure: job.Failed, attempts: int, waited_seconds: float) -> _Retry:
    """Decide whether another attempt is worth it.

    Args:
        failure: end of the last attempt.
        attempts: attempts so far with the same roots.
        waited_seconds: time since the cut.
    """
    if failure.code == Busy.exit_code:
        return _Retry(_BUSY_RETRY_SECONDS if waited_seconds < BUSY_PATIENCE_SECONDS else None)
    if attempts >= MAX_ATTEMPTS:
        return _Retry(None)
    if failure.code in (CODE_KILLED, job.EXIT_INTERRUPTED):  # by hand, or for want of memory
        return _Retry(_KILLED_RETRY_SECONDS * attempts)
    if failure.code == CiuicError.exit_code:
        return _Retry(_STORE_RETRY_SECONDS)
    # Damaged, not permitted, wrong usage: the next attempt would fail in the same way.
    return _Retry(None)


class Phase(enum.Enum):
    """State of a pending snapshot; see the table in this module's docstring."""

    QUEUED = "queued"
    CAPTURING = "capturing"
    DOUBTFUL = "doubtful"
    EMPTY = "empty"
    COMMITTED = "committed"
    FAILED = "failed"


class _AfterFailure(NamedTuple):
    """Consequence of a failed attempt."""

    action: Literal["reconsider", "retry", "without_root", "give_up"]
    """`reconsider`: the phase has changed, and says what follows; `without_root`: a root was left out, and
    the next attempt begins at once."""
    after_seconds: float | None = None
    """Delay of a retry."""
    root: str = ""
    """Root that was left out."""


class SnapshotCut(NamedTuple):
    """The epochs that all roots of one snapshot sealed at one instant."""

    records: Sequence[CutRecord]
    time_ns: int
    hold_microseconds: int
    trust_tracking: dict[str, bool]
    """Whether, by root, no process wrote past its overlay since the last snapshot that compared
    everything."""
    unbypassed: set[str]
    """Roots that no process bypassed at the cut."""
    tags: Sequence[str] = ()
    """Tags that describe the cut."""


class PendingSnapshot:
    """Snapshot whose id was given out, until it is committed or given up. Belongs to the trio thread."""

    def __init__(
        self,
        record: PendingRecord,
        *,
        announce: Callable[[str, SnapshotState], None],
        trust_tracking: dict[str, bool] | None = None,
        unbypassed: set[str] | None = None,
        cut_at: float = 0.0,
    ) -> None:
        self.record = record
        self.trust_tracking = trust_tracking or {}
        """Trust in the tracking, by root; a root that is missing is not trusted."""
        self.unbypassed = unbypassed or set()
        """Roots that no process bypassed at the cut: once committed, tracking that had a gap counts again
        there."""
        self.cut_at = cut_at
        """Time of the cut on trio's clock."""
        self.doubtful: dict[str, str] = {}
        """Roots whose worker ended, with the reason."""
        self.doubtful_since = 0.0
        """Time of the last doubt on trio's clock."""
        self.loss_reason = ""
        """Why the sealed epoch of a root is gone before it was captured; empty while none is."""
        self.has_lost_session = False
        """A session ended since the last attempt began."""
        self.tries = 0
        """Attempts with the roots that remain."""
        self.needed_bytes = 0
        """Space that an attempt had used when it ran out of room."""
        self.root_in_progress = ""
        """Root that the running attempt reads."""
        self.capture_began_at: float | None = None
        """Start of the running attempt on trio's clock."""
        self.process: CaptureProcess | None = None
        """Process of the running attempt."""
        # Set when a wait between two attempts must end.
        self._wake = trio.Event()
        self.finished = trio.Event()
        self.failure: CiuicError | None = None
        self._attempt_runs = False
        self._announce = announce
        self.state = SnapshotState(
            id=record.id,
            state="pending",
            time=rfc3339(record.time_ns),
            roots=[cut.path for cut in record.cuts],
            tags=list(record.tags),
            message=record.message,
            attempts=record.attempts,
            left_out=dict(record.left_out),
            hold_microseconds=record.hold_microseconds,
        )

    @property
    def id(self) -> str:
        return self.record.id

    @property
    def remaining(self) -> list[CutRecord]:
        """Cuts that are to be captured, or were."""
        return [cut for cut in self.record.cuts if cut.path not in self.record.left_out]

    @property
    def phase(self) -> Phase:
        """State of the snapshot. Sessions end at any time: read it anew after every await."""
        if self.finished.is_set():
            return Phase.COMMITTED if self.failure is None else Phase.FAILED
        if not self.remaining:
            return Phase.EMPTY
        if self.doubtful:
            return Phase.DOUBTFUL
        return Phase.CAPTURING if self._attempt_runs else Phase.QUEUED

    def announce_cut(self) -> None:
        """Announce that the queue and the journal have the snapshot."""
        self._announce("snapshot_cut", self.state)

    # -- attempts

    def begin_attempt(self) -> None:
        """Enter CAPTURING."""
        self.record.attempts += 1
        self.tries += 1
        self._attempt_runs = True
        self.has_lost_session, self._wake, self.root_in_progress = False, trio.Event(), ""
        self.state.attempts = self.record.attempts
        self.state.state = "capturing"
        self.state.progress = Progress(phase="starting")
        self.capture_began_at = trio.current_time()
        self._announce("snapshot_capturing", self.state)

    @contextmanager
    def attempt_by(self, process: CaptureProcess) -> Iterator[None]:
        """Kill this process when a session ends, while the block waits for it."""
        self.process = process
        try:
            yield
        finally:
            self.process = None
            self.record.capture_pid = 0

    def capture_started(self, pid: int, started_ticks: int) -> None:
        """Note the process for a successor of this daemon; field 22 of /proc/<pid>/stat tells it from later ones."""
        self.record.capture_pid, self.record.capture_started_ticks = pid, started_ticks

    def predecessor_capture_ended(self) -> None:
        """Note that the capture that a killed daemon had started has ended."""
        self.record.capture_pid = 0

    def attempt_progressed(self, message: job.CaptureProgress) -> None:
        """Show how far the capture process is."""
        self.root_in_progress = os.fsdecode(message.root)
        self.state.progress = Progress(
            phase="reading",
            files_done=message.entries,
            files_total=message.entries_expected,
            bytes_done=message.bytes_read,
            bytes_total=message.bytes_expected,
            new_bytes=message.new_bytes,
            path=message.path.decode("utf-8", "backslashreplace"),
            share=message.pace.share,
            least_share=message.pace.least_share,
            others_waiting=message.pace.waiting,
            others_writing=message.pace.writing,
            paused_seconds=message.pace.paused_seconds,
        )
        self._announce("snapshot_progress", self.state)

    def attempt_failed(self, failure: job.Failed) -> _AfterFailure:
        """Leave CAPTURING after a failure, and return what follows."""
        self._attempt_runs = False
        if self.has_lost_session:  # the failure says no more than that, and the phase says what to do
            return _AfterFailure("reconsider")
        self.needed_bytes = max(self.needed_bytes, failure.needed_bytes)
        after_seconds = retry_after(failure, self.tries, trio.current_time() - self.cut_at).after_seconds
        if after_seconds is not None:
            return _AfterFailure("retry", after_seconds=after_seconds)
        culprit = self._leave_out_culprit(failure)
        return _AfterFailure("without_root", root=culprit) if culprit else _AfterFailure("give_up")

    def require_space(self, needed_bytes: int) -> None:
        """Have the next attempt refused unless this much space is free."""
        self.needed_bytes = needed_bytes

    def expect(self, seconds_left: float | None) -> None:
        """Show the remaining time until the commit; None where it is not known."""
        self.state.seconds_left = seconds_left

    def show_retry(self, failure: job.Failed) -> None:
        """Show the failure of an attempt that another one follows."""
        self.state.state = "pending"
        self.state.progress = None
        self.state.error, self.state.hint = failure.error, failure.hint
        self._announce("snapshot_retrying", self.state)

    async def retry_wait(self, seconds: float) -> None:
        """Wait before the next attempt, until a session ends at the longest."""
        with trio.move_on_after(seconds):
            await self._wake.wait()

    def _leave_out_culprit(self, failure: job.Failed) -> str:
        """Leave out the root at which the last attempts failed, and return its path.

        Return an empty text where no root is to blame. A root that is alone in its snapshot is not left out.
        """
        # The root's owner may have brought the failure about, and the snapshots of other roots must not
        # depend on it.
        culprit = os.fsdecode(failure.root) or (self.root_in_progress if failure.code == CODE_KILLED else "")
        if failure.code == Busy.exit_code or len(self.remaining) < 2:
            return ""
        if all(cut.path != culprit for cut in self.remaining):
            return ""
        self.leave_out(culprit, failure.error)
        return culprit

    def leave_out(self, path: str, reason: str) -> None:
        """Take a root out of the snapshot, which records the reason."""
        self.record.left_out[path] = reason
        self.state.left_out[path] = reason
        self.doubtful.pop(path, None)
        # The roots that remain get all attempts: so far this one may have made them fail.
        self.tries = 0

    # -- sessions that end

    def doubt(self, path: str, reason: str) -> None:
        """Note that the worker of a root has ended, or that another session serves it.

        A running attempt reads what that worker sealed, so it is killed at once; it begins again when a
        successor goes on with the session.
        """
        if path in self.record.left_out:
            return
        self.doubtful.setdefault(path, reason)
        self.doubtful_since = trio.current_time()
        self.has_lost_session = True
        if self.process is not None:
            self.process.kill(reason)
        self._wake.set()

    def take_doubt(self, path: str) -> str | None:
        """Take a root out of doubt, and return why its worker ended; None where it is not in doubt."""
        return self.doubtful.pop(path, None)

    def lose(self, path: str, reason: str) -> None:
        """Leave out a root whose sealed epoch is gone."""
        self.loss_reason = self.loss_reason or reason
        self.leave_out(path, reason)

    async def session_lost(self) -> None:
        """Wait until a session has ended since the last attempt began."""
        while not self.has_lost_session:
            await self._wake.wait()

    # -- ends

    def commit(self, *, new_bytes: int = 0, errors: Sequence[str] = ()) -> None:
        """Enter COMMITTED: the snapshot is durable.

        Args:
            new_bytes: size of what the repository did not have yet.
            errors: files that could not be read, each with the error.
        """
        self._attempt_runs = False
        self.state.state = "committed"
        self.state.progress = self.state.seconds_left = None
        self.state.error = self.state.hint = ""
        self.state.new_bytes = new_bytes
        self.state.incomplete += errors
        self.state.is_incomplete = bool(self.state.incomplete)
        # Only now is it known which roots the snapshot has.
        self.state.roots = [cut.path for cut in self.remaining]
        self._announce("snapshot_committed", self.state)
        self.finished.set()

    def fail(self, failure: job.Failed) -> None:
        """Enter FAILED: the snapshot will never exist."""
        self._attempt_runs = False
        found = error_of(failure.code, f"snapshot {self.id} failed: {failure.error}", hint=failure.hint)
        self.failure = found
        self.state.state = "failed"
        self.state.progress = self.state.seconds_left = None
        self.state.error, self.state.hint, self.state.code = failure.error, failure.hint, found.exit_code
        self._announce("snapshot_failed", self.state)
        self.finished.set()


MAX_PENDING = 8
MAX_PENDING_OF_USERS = 5
MAX_PENDING_OF_A_USER = 3
# Longest wait of a request for a place. The running capture is hurried meanwhile, so a longer wait means
# that the repository cannot be written, and the caller should know.
ROOM_SECONDS = 60.0
# Snapshots whose state is known by id; older finished ones are looked up in the repository.
_REMEMBERED = 64
# Longest wait for the record of a promise: a busy disk must not keep an id from its caller when the cut is
# made and in the journal.
RECORD_SECONDS = 0.5
# Longest wait for the record of the outcome: a disk that hangs, which may be why the snapshot failed, must
# not keep the failure from callers that wait.
OUTCOME_SECONDS = 5.0
MACHINE_ENDED = "the daemon and its record of running captures were gone before it was captured (a restart of the machine)"
log = structlog.get_logger(__name__)


class SnapshotQueue:
    """Queue of one daemon. Iteration yields the snapshots in it, oldest cut first."""

    def __init__(self, runtime: RuntimeDirectory, alerts: Alerts) -> None:
        self._runtime = runtime
        self._alerts = alerts
        self._waiting: list[PendingSnapshot] = []
        # Users whose snapshots are being cut, one entry for each.
        self._reserved: list[int | None] = []
        self._remembered: dict[str, PendingSnapshot] = {}
        self._wake = trio.Event()
        self._left = trio.Event()

    def __iter__(self) -> Iterator[PendingSnapshot]:
        return iter(self._waiting)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def remembered(self) -> frozenset[str]:
        """Ids that must not be given out again."""
        return frozenset(self._remembered)

    def find(self, snapshot_id: str) -> PendingSnapshot | None:
        """Return a snapshot of this daemon's life, or None when it is not (or no longer) remembered."""
        return self._remembered.get(snapshot_id)

    def unfinished(self) -> list[PendingSnapshot]:
        """Return the snapshots that are neither committed nor given up."""
        return [pending for pending in self._waiting if not pending.finished.is_set()]

    async def first(self) -> PendingSnapshot:
        """Return the oldest snapshot; wait while there is none."""
        while not self._waiting:
            self._wake = trio.Event()
            await self._wake.wait()
        return self._waiting[0]

    def is_full(self, user: int | None) -> bool:
        """Return whether no place is left for a snapshot of this user (None: administrators, the schedule)."""
        taken = [*self._reserved, *(pending.record.user for pending in self._waiting)]
        if user is None or len(taken) >= MAX_PENDING:
            return len(taken) >= MAX_PENDING
        of_users = len(taken) - taken.count(None)
        return of_users >= MAX_PENDING_OF_USERS or taken.count(user) >= MAX_PENDING_OF_A_USER

    @asynccontextmanager
    async def place(self, user: int | None, until_seconds: float) -> AsyncIterator[None]:
        """Reserve a place while the block cuts a snapshot; wait for one until this time on trio's clock.

        Raises:
            Busy: no place became free in time.
        """
        with trio.move_on_at(until_seconds):
            while self.is_full(user):
                await self._left.wait()
        if self.is_full(user):
            raise Busy(
                f"{plural(len(self), 'snapshot has', 'snapshots have')} waited for capture for {ROOM_SECONDS:.0f} s, expected fewer than "
                f"{MAX_PENDING if user is None else MAX_PENDING_OF_A_USER}",
                hint="see why with ciuic status, and try again later",
            )
        self._reserved.append(user)
        try:
            yield
        finally:
            self._reserved.remove(user)
            self._wake_waiting()

    def _wake_waiting(self) -> None:
        """Wake every request that waits for a place; a new event is for those that find none."""
        self._left.set()
        self._left = trio.Event()

    def add(self, pending: PendingSnapshot) -> None:
        """Append a snapshot and write the journal, so that a successor of this daemon knows of it."""
        self._waiting.append(pending)
        self._remembered[pending.id] = pending
        # Only finished ones are forgotten: a caller may wait for any other.
        done = [id_ for id_, known in self._remembered.items() if known.finished.is_set()]
        for id_ in done[: max(0, len(self._remembered) - _REMEMBERED)]:
            del self._remembered[id_]
        self.write_journal()
        self._wake.set()

    def write_journal(self) -> None:
        """Replace the journal; an alert stands while it cannot be written."""
        try:
            self._runtime.write_pending([pending.record for pending in self._waiting])
        except OSError as error:
            # Without the journal a successor aborts these epochs and captures their changes with the next: no
            # reason to fail a snapshot.
            log.error("journal_not_written", error=str(error))
            self._alerts.report(
                "runtime",
                f"the runtime directory {self._runtime.path} cannot be written: {error.strerror or error}",
                hint="free space there; until then a daemon that is killed forgets the snapshots that wait",
                severity="warning",
            )
        else:
            self._alerts.clear("runtime")

    def remove(self, pending: PendingSnapshot) -> None:
        """Remove a finished snapshot and write the journal."""
        self._waiting.remove(pending)
        self._wake_waiting()
        self.write_journal()

    def clear(self) -> None:
        """Empty the queue and leave the journal as it is: the next daemon goes by it."""
        self._waiting.clear()

    def doubt(self, path: str, session: str, reason: str) -> None:
        """Put a root of every snapshot that this session sealed into doubt.

        The session or its worker has ended.
        """
        for pending in self._waiting:
            if any(cut.path == path and cut.session == session for cut in pending.record.cuts):
                pending.doubt(path, reason)

    def epochs(self) -> set[tuple[str, str, int]]:
        """Return root, session and number of every epoch that belongs to a queued snapshot."""
        return {
            (cut.path, cut.session, cut.epoch) for pending in self._waiting for cut in pending.record.cuts
        }


class Promises:
    """Durable records of ids that were given out, in the repository."""

    def __init__(self, store: Callable[[], Store], now_ns: Callable[[], int]) -> None:
        self._store = store
        self._now_ns = now_ns
        # Records are written in the order in which they are asked for: a loss must not be replaced by the
        # promise that it ends, whose thread began later.
        self._lock = trio.Lock()

    async def record(self, pending: PendingSnapshot) -> None:
        """Record that the id of `pending` was given out.

        Scheduled snapshots have no record: no caller was told their ids.
        """
        if pending.record.scheduled:
            return
        promise, store = _promise(pending), self._store()
        await self._do("promise_not_recorded", pending.id, lambda: store.promise(promise), RECORD_SECONDS)
        # The snapshot may have ended while the file was written, and its end found no record to change.
        if pending.failure is not None:
            await self.record_loss(pending, pending.state.error)
        elif pending.finished.is_set():
            await self.remove(pending)

    async def remove(self, pending: PendingSnapshot) -> None:
        """Remove the record: the snapshot is committed."""
        if not pending.record.scheduled:
            store = self._store()
            await self._do(
                "promise_not_removed", pending.id, lambda: store.keep_promise(pending.id), OUTCOME_SECONDS
            )

    async def record_loss(self, pending: PendingSnapshot, reason: str) -> None:
        """Record why the snapshot will never exist."""
        if pending.record.scheduled:
            return
        loss = _promise(pending, reason=reason, lost_ns=self._now_ns())
        store = self._store()
        await self._do("loss_not_recorded", pending.id, lambda: store.lose(loss), OUTCOME_SECONDS)

    async def record_forgotten(self, resumed: Collection[str]) -> None:
        """Record as lost what a predecessor promised and what is neither committed nor on its way.

        Args:
            resumed: ids that are on their way.
        """

        def work() -> None:
            store, now_ns = self._store(), self._now_ns()
            for promise in store.open_promises(resumed):
                log.error("promised_snapshot_lost", id=promise.id, reason=MACHINE_ENDED)
                store.lose(msgspec.structs.replace(promise, reason=MACHINE_ENDED, lost_ns=now_ns))

        await self._do("promises_not_read", "", work, OUTCOME_SECONDS)

    async def _do(self, event: str, snapshot_id: str, work: Callable[[], None], seconds: float) -> None:
        try:
            async with self._lock:
                with trio.move_on_after(seconds) as scope:
                    # Abandoned at the time limit: a disk that hangs holds the thread, not the snapshot.
                    await trio.to_thread.run_sync(work, abandon_on_cancel=True)
            if scope.cancelled_caught:  # the thread goes on, and may still write the record
                log.warning(event, id=snapshot_id, error=f"not done within {seconds:g} s")
        except (CiuicError, OSError) as error:
            # As a rule the repository is full or gone, which is why the snapshot failed, and the alert of the
            # failure says so.
            log.warning(event, id=snapshot_id, error=str(error))


def _promise(pending: PendingSnapshot, *, reason: str = "", lost_ns: int = 0) -> Promise:
    record = pending.record
    return Promise(
        id=pending.id,
        time_ns=record.time_ns,
        roots=tuple(cut.path for cut in record.cuts),
        tags=tuple(record.tags),
        message=record.message,
        reason=reason,
        lost_ns=lost_ns,
    )
