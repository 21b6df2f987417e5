"""Deadline of an upload: the machine goes away, and what can be stored until then is chosen by measurement.

    announce(state_dir, seconds=120, cause="AWS: spot instance, terminate")

leaves a note in the state directory of the process that uploads, which looks for it ten times a second. Until
the deadline that process is urgent (`ciuic.remote.replication.run`): it leaves idle priority, the limit of the bandwidth and the
times of the schedule, stops at the next object with what it is sending, and sends only what it expects to end in time.

Guarantees: a note of another boot or of another machine that shares the directory counts for nothing, and one whose
deadline has passed neither. The earliest deadline counts. The directory may belong to another user: no link in it is followed, and
the note can be read by its owner. An expectation (`UploadForecast`) counts what the remote lacks, at the
rate that was measured, with a reserve; a snapshot that was not expected in time is not begun. Where nothing
was measured yet, the newest state is tried, and nothing is promised.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Final, Literal, NamedTuple

import msgspec

from ciuic.protocol.stored_remotely import StoredRecordDamaged, read_state_file, write_state_file
from ciuic.repository.record_files import decode_note, encode_note
from ciuic.system.processes import boot_id

_NAME: Final = "deadline"
_MAX_NOTE_BYTES: Final = 1 << 16
LOOK_SECONDS: Final = 0.1
"""Time between two looks for a deadline: one stat(2)."""
# Of the measured time and beside it: what a promise has in reserve.
_RESERVE_FACTOR: Final = 1.25
_RESERVE_SECONDS: Final = 0.5
# Requests of an upload beside its packs: what a collection did meanwhile, manifest and commit; and the two last packs.
_REQUESTS: Final = 6
LARGE_OBJECT_BYTES: Final = 128 << 10
"""Size from which a stored object tells the rate; the time of a smaller one is that of a request."""


class UploadDeadline(msgspec.Struct, frozen=True, kw_only=True):
    """Note of a deadline."""

    boot: str
    """Boot of the kernel whose clock this is."""
    by_seconds: float
    """Deadline on the monotonic clock of that boot."""
    cause: str


def announce(
    state_dir: Path, seconds: float, cause: str, *, clock: Callable[[], float] = time.monotonic
) -> None:
    """Leave the note that this machine, or the processes here, end in so many seconds.

    Args:
        state_dir: State directory of the process that uploads.
        seconds: Time until the end.
        cause: What ends them, for people.
        clock: Monotonic clock.

    Raises:
        OSError: The note cannot be written.
    """
    by_seconds = clock() + max(0.0, seconds)
    before = read_deadline(state_dir, clock=clock)
    if before is None or by_seconds < before.by_seconds:
        note = UploadDeadline(boot=boot_id(), by_seconds=by_seconds, cause=cause)
        with suppress(FileExistsError):
            state_dir.mkdir(0o700)
        # Not durable: it counts for this boot alone, and an fsync(2) may wait for what the job writes.
        write_state_file(state_dir, ".", _NAME, encode_note(note), durable=False)


def withdraw(state_dir: Path) -> None:
    """Remove the note of a deadline, if there is one.

    Raises:
        OSError: It cannot be removed.
    """
    (state_dir / _NAME).unlink(missing_ok=True)


def read_deadline(state_dir: Path, *, clock: Callable[[], float] = time.monotonic) -> UploadDeadline | None:
    """Return the deadline of this machine; None if there is none, or if it has passed."""
    with suppress(OSError, StoredRecordDamaged):
        note = decode_note(read_state_file(state_dir, ".", _NAME, _MAX_NOTE_BYTES), UploadDeadline)
        if note is not None and note.boot == boot_id() and note.by_seconds > clock():
            return note
    return None


class DeadlineWatch:
    """Looks for the note of a deadline; for any thread."""

    def __init__(self, state_dir: Path | None, *, clock: Callable[[], float] = time.monotonic) -> None:
        """Look at nothing yet; without a directory there is never a deadline."""
        self._state_dir = state_dir
        self._clock = clock
        self._looked = -LOOK_SECONDS
        self._seen: tuple[int, int] | None = None
        self._deadline: UploadDeadline | None = None

    def now(self) -> UploadDeadline | None:
        """Return the deadline; None if there is none, or if it has passed."""
        at = self._clock()
        if self._state_dir is not None and not 0 <= at - self._looked < LOOK_SECONDS:
            self._looked = at
            seen = None
            with suppress(OSError):
                found = os.stat(self._state_dir / _NAME)
                seen = found.st_ino, found.st_mtime_ns
            if seen != self._seen:
                self._seen, self._deadline = seen, read_deadline(self._state_dir, clock=self._clock)
        deadline = self._deadline
        return deadline if deadline is not None and deadline.by_seconds > at else None

    def left(self, deadline: UploadDeadline) -> float:
        """Return the seconds until a deadline."""
        return max(0.0, deadline.by_seconds - self._clock())


class WriteRate(NamedTuple):
    """How fast a store has taken objects lately."""

    bytes_per_second: float = 0.0
    """Of large objects, of all connections together; 0: not measured."""
    request_seconds: float = 0.0
    """Of a request for a small object; 0: not measured."""

    def seconds_for(self, size_bytes: int) -> float | None:
        """Estimate the time in which so many bytes of a snapshot are stored and committed; None: not measured."""
        if not self.bytes_per_second:
            return None
        sending = size_bytes / self.bytes_per_second
        return _RESERVE_FACTOR * (sending + _REQUESTS * self.request_seconds) + _RESERVE_SECONDS

    def bytes_within(self, seconds: float) -> int | None:
        """Return a size that is stored in no less than these seconds; None: not measured."""
        return int(seconds * self.bytes_per_second) if self.bytes_per_second else None


Outcome = Literal["stored", "promised", "tried", "left out"]


class ExpectedState(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast for one training, or one root, at the deadline."""

    root: bytes
    newest: str
    """Newest snapshot here."""
    outcome: Outcome
    """Of the newest. Stored: the remote has it. Promised: expected in time. Tried: begun, because nothing was measured.
    Left out: not begun, because it would not end in time.
    """
    size_bytes: int = 0
    """What the remote lacks of it; of one left out at least so much."""
    needed_seconds: float | None = None
    """Expected time; None: not measured, or not needed."""
    resume: str = ""
    """Snapshot from which a resume from the remote starts if what is promised comes; empty: there is none."""
    epoch: int | None = None
    step: int | None = None
    in_set: bool = False
    """The newest is one of a set, which counts only if every host stores its own."""


class UploadForecast(msgspec.Struct, frozen=True, kw_only=True):
    """Forecast of a remote's content at a deadline."""

    by_seconds: float
    """The deadline on the monotonic clock."""
    cause: str
    states: tuple[ExpectedState, ...] = ()

    def of(self, root: bytes) -> ExpectedState | None:
        """Return what is expected of a root."""
        return next((one for one in self.states if one.root == root), None)
