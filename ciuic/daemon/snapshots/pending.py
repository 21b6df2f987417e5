"""State machine of one snapshot on its way from the cut to the commit. No I/O.

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
"""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, NamedTuple

import trio

from ciuic.daemon.base.runtime import CutRecord, PendingRecord
from ciuic.daemon.capture import job
from ciuic.daemon.snapshots.capture_process import CODE_KILLED, CaptureProcess
from ciuic.errors import Busy, CiuicError, error_of
from ciuic.protocol.control_types import Progress, SnapshotState, rfc3339

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
