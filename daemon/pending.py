"""One snapshot on its way from the cut to the commit, and what to do when a capture fails. No I/O.

Guarantees: every state change goes through one method and is announced; the retry decision is a pure function.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import NamedTuple

import trio

from ciuic.control_types import Progress, SnapshotState, rfc3339
from ciuic.daemon import capture_job
from ciuic.daemon.capture_process import CODE_KILLED, CaptureProcess
from ciuic.daemon.runtime import CutRecord, PendingRecord
from ciuic.errors import BY_EXIT_CODE, Busy, CiuicError
from ciuic.types import TAG_RETAKEN

BUSY_PATIENCE_SECONDS = 30 * 60
"""How long a sealed epoch waits for another writer. Waiting costs the job copies of old blocks, so it has an end."""
MAX_ATTEMPTS = 3


class Retry(NamedTuple):
    """``after_seconds`` None: give up."""

    after_seconds: float | None


def retry_after(failure: capture_job.Failed, attempts: int, waited_seconds: float) -> Retry:
    """What to do after the ``attempts``-th capture failed, ``waited_seconds`` after the cut."""
    if failure.code == Busy.exit_code:
        return Retry(5.0 if waited_seconds < BUSY_PATIENCE_SECONDS else None)
    if attempts >= MAX_ATTEMPTS:
        return Retry(None)
    if failure.code in (CODE_KILLED, capture_job.EXIT_INTERRUPTED):
        return Retry(1.0 * attempts)  # by hand, or for want of memory
    if failure.code == CiuicError.exit_code:
        return Retry(15.0)  # a full or failing store: upkeep runs in between and may free space
    # Damaged, not permitted, wrong usage, undo log lost: the same again would fail in the same way.
    return Retry(None)


class Cut(NamedTuple):
    """What all roots of one snapshot sealed at one instant."""

    records: Sequence[CutRecord]
    time_ns: int
    hold_microseconds: int
    trust_tracking: dict[str, bool]
    """By root: whether nobody went round its overlay since the last snapshot that compared everything."""
    settles: set[str]
    """Roots that nobody bypassed at the cut."""
    tags: Sequence[str] = ()
    """What has to be said of the cut."""


class PendingSnapshot:
    """Belongs to the trio thread."""

    def __init__(
        self,
        record: PendingRecord,
        *,
        announce: Callable[[str, SnapshotState], None],
        trust_tracking: dict[str, bool] | None = None,
        settles: set[str] | None = None,
        cut_at: float = 0.0,
    ) -> None:
        self.record = record
        self.trust_tracking = trust_tracking or {}
        """By root; a root that is not in it is not trusted."""
        self.settles = settles or set()
        """Roots that nobody bypassed at the cut: once committed, tracking that had a gap counts again there."""
        self.cut_at = cut_at
        """On trio's clock."""
        self.interrupted: dict[str, str] = {}
        """Roots whose sealed epoch is gone before it was captured, with the reason: the snapshot has to be cut anew."""
        self.doubtful: dict[str, str] = {}
        """Roots whose worker ended, with the reason: a successor may go on with what was sealed (`Retaking.settle`)."""
        self.retakes = 0
        """How often that was tried."""
        self.lost = ""
        """Why a root that was interrupted could not be cut anew; empty while there is none."""
        self.has_lost_session = False
        """A session ended since the last attempt began."""
        self.tries = 0
        """Attempts since a root was left out for the last time."""
        self.needed_bytes = 0
        """What an attempt had written when it ran out of room."""
        self.root_in_progress = ""
        """The root that the running attempt reads."""
        self.capture_began_at: float | None = None
        """On trio's clock: the attempt that runs."""
        self.process: CaptureProcess | None = None
        self.wake = trio.Event()
        """Set when a wait between two attempts must end."""
        self.finished = trio.Event()
        self.failure: CiuicError | None = None
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
            retaken=record.retaken,
        )

    @property
    def id(self) -> str:
        return self.record.id

    def capturing(self) -> None:
        """An attempt begins."""
        self.record.attempts += 1
        self.tries += 1
        self.has_lost_session, self.wake, self.root_in_progress = False, trio.Event(), ""
        self.state.attempts = self.record.attempts
        self.state.state = "capturing"
        self.state.progress = Progress(phase="starting")
        self.capture_began_at = trio.current_time()
        self._announce("snapshot_capturing", self.state)

    def progressed(self, message: capture_job.Progress) -> None:
        """The capture process said how far it is."""
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

    def waiting(self, failure: capture_job.Failed) -> None:
        """An attempt failed and another follows."""
        self.state.state = "pending"
        self.state.progress = None
        self.state.error, self.state.hint = failure.error, failure.hint
        self._announce("snapshot_retrying", self.state)

    def committed(self, *, new_bytes: int = 0, errors: list[str] | None = None) -> None:
        """It is durable."""
        self.state.state = "committed"
        self.state.progress = self.state.seconds_left = None
        self.state.error = self.state.hint = ""
        self.state.new_bytes = new_bytes
        self.state.incomplete += errors or []
        self.state.is_incomplete = bool(self.state.incomplete)
        self.state.roots = [cut.path for cut in self.remaining]
        self._announce("snapshot_committed", self.state)
        self.finished.set()

    def failed(self, failure: capture_job.Failed) -> None:
        """It will not exist."""
        known = BY_EXIT_CODE.get(failure.code, CiuicError)
        self.failure = known(f"snapshot {self.id} failed: {failure.error}", hint=failure.hint)
        self.state.state = "failed"
        self.state.progress = self.state.seconds_left = None
        self.state.error, self.state.hint, self.state.code = failure.error, failure.hint, known.exit_code
        self._announce("snapshot_failed", self.state)
        self.finished.set()

    @property
    def remaining(self) -> list[CutRecord]:
        """The cuts that are to be captured, or were."""
        return [cut for cut in self.record.cuts if cut.path not in self.record.left_out]

    def is_lost(self) -> bool:
        """Whether nothing is left that could be captured; asked anew after every await."""
        return not self.remaining

    def doubt(self, path: str, reason: str) -> None:
        """The worker of a root has ended: a capture that reads what it sealed is ended at once, and begun again when it is known
        whether a successor goes on with that."""
        if path in self.record.left_out:
            return
        self.doubtful.setdefault(path, reason)
        self._end_attempt(reason)

    def interrupt(self, path: str, reason: str) -> None:
        """The sealed epoch of a root is gone: the snapshot is to be cut anew."""
        if path in self.record.left_out:
            return
        self.interrupted.setdefault(path, reason)
        self._end_attempt(reason)

    def _end_attempt(self, reason: str) -> None:
        self.has_lost_session = True
        if self.process is not None:
            self.process.kill(reason)
        self.wake.set()

    def interrupt_all(self, reason: str) -> None:
        """What all roots sealed is gone."""
        for cut in self.remaining:
            self.interrupt(cut.path, reason)

    def lose(self, path: str, reason: str) -> None:
        """Leave out a root that was interrupted and cannot be cut anew."""
        if path not in self.record.left_out:
            self.lost = self.lost or reason
            self.leave_out(path, reason)

    def retaken(self, cut: Cut, cut_at: float) -> None:
        """The remaining roots were cut anew: from now on this is a snapshot of that instant, under the same id."""
        reason = "; ".join(dict.fromkeys(self.interrupted.values()))
        record = self.record
        record.retaken = record.retaken or reason
        record.promised_ns = record.promised_ns or record.time_ns
        record.cuts, record.time_ns = list(cut.records), cut.time_ns
        record.hold_microseconds = cut.hold_microseconds
        record.tags = list(dict.fromkeys([*record.tags, TAG_RETAKEN, *cut.tags]))
        self.trust_tracking, self.settles, self.cut_at = cut.trust_tracking, cut.settles, cut_at
        self.interrupted, self.doubtful = {}, {}
        self.state.state, self.state.progress = "pending", None
        self.state.time = rfc3339(record.time_ns)
        self.state.tags, self.state.retaken = list(record.tags), record.retaken
        self.state.hold_microseconds = record.hold_microseconds
        self._announce("snapshot_retaken", self.state)

    def leave_out(self, path: str, reason: str) -> None:
        """The snapshot will be without this root, and say so."""
        self.record.left_out[path] = reason
        self.state.left_out[path] = reason
        self.tries = 0

    def leave_out_culprit(self, failure: capture_job.Failed) -> str:
        """Leave out the root at which the last attempts failed, when there are others: its owner may have brought that about,
        and the others' snapshots must not depend on it. Its path; empty where no root is to blame."""
        culprit = os.fsdecode(failure.root) or (self.root_in_progress if failure.code == CODE_KILLED else "")
        if failure.code == Busy.exit_code or len(self.remaining) < 2:
            return ""
        if all(cut.path != culprit for cut in self.remaining):
            return ""
        self.leave_out(culprit, failure.error)
        return culprit
