"""One snapshot on its way from the cut to the commit, and what to do when a capture fails. No I/O.

Guarantees: every state change goes through one method and is announced; the retry decision is a pure function.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

import trio

from ciuic.control_types import Progress, SnapshotState, rfc3339
from ciuic.daemon import capture_job
from ciuic.daemon.capture_process import CODE_KILLED, CaptureProcess
from ciuic.daemon.runtime import CutRecord, PendingRecord
from ciuic.errors import BY_EXIT_CODE, Busy, CiuicError

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
        self.lost = ""
        """Why an overlay session ended before its sealed state was captured; empty while all live."""
        self.has_lost_session = False
        """A session ended since the last attempt began."""
        self.tries = 0
        """Attempts since a root was left out for the last time."""
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

    def lose(self, path: str, reason: str) -> None:
        """The session of a root has ended: a capture that reads what it sealed is ended at once, and the others begin anew."""
        if path in self.record.left_out:
            return
        self.leave_out(path, reason)
        self.lost = self.lost or reason
        self.has_lost_session = True
        if self.process is not None:
            self.process.kill(reason)
        self.wake.set()

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
