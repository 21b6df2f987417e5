"""Capture process: one job in, one snapshot out. Run as `python -m ciuic.daemon.capture.process`.

Reads a CaptureJob as JSON from standard input (job.py), or builds one from its options with `--offline`: a
snapshot of plain directories that no daemon serves, which is not of one instant. Writes CaptureProgress lines
and one Done or Failed to standard output, logs to standard error, and exits with 0 exactly when the snapshot
is committed.

Guarantees: a committed snapshot has every root that was walked to its end, and names the others with the
reason; SIGTERM and SIGINT end the process cleanly between two steps, SIGKILL at any moment leaves the
repository as it was before plus garbage. It never changes a backing file.

Capture of the roots of one snapshot, one after the other: open, choose the base, walk.

Guarantees: a root record is returned only for a walk that reached its end; where tracking does not fit,
everything is compared. Unreadable entries are in `Report.errors`. A root that cannot be captured is left out,
with the reason, and the others are captured. An error of the repository, which all of them need, ends the
capture. Nothing here commits.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import gc
import hashlib  # noqa: F401 (for Excludes.digest: later, without privileges, the file may be out of reach)
import os
import resource
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence, Set
from typing import Final, NamedTuple

import msgspec
import structlog

from ciuic.daemon.base.child_processes import JobInput, follow_urgency
from ciuic.daemon.capture.content import ContentReader
from ciuic.daemon.capture.entries import Base, EntryMaker, choose_base, expected_of
from ciuic.daemon.capture.job import (
    EXIT_INTERRUPTED,
    EXIT_NO_ROOM,
    EXIT_UNDO_LOST,
    CaptureJob,
    CaptureProgress,
    Done,
    Failed,
    Message,
    ReadError,
    RootJob,
    decode_job,
    encode_message,
)
from ciuic.daemon.capture.space import CaptureRoom, NoRoom
from ciuic.daemon.capture.view import BackingUnreadable, OfflineLog, SealedView, open_log
from ciuic.daemon.capture.walk import DirectoryPath, RootWalker, TrackingBroken, WalkedRoot
from ciuic.errors import Busy, CiuicError, Damaged, UsageError
from ciuic.excludes import ExcludeMatcher, effective_patterns
from ciuic.fuse_layer.sealed_format import Sealed, read_sealed
from ciuic.fuse_layer.undo_format import UndoDamaged, UndoLost, sealed_name
from ciuic.printable import path_text
from ciuic.protocol.state_directory import find_state
from ciuic.repository import Repository, Writer
from ciuic.repository.trust import require_own
from ciuic.system import logs, syscall_profiles
from ciuic.system.disk import READ_DIRECTORY
from ciuic.system.disk_space import reserve_of, total_bytes
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.precedence import Precedence
from ciuic.system.privileges import limit_capture
from ciuic.system.spill import Spill
from ciuic.system.urgency import Urgency
from ciuic.types import (
    TAG_INCOMPLETE,
    TAG_NOT_HELD,
    TAG_PARTIAL,
    LeftOut,
    RootMode,
    RootRecord,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
)
from ciuic.units import plural

_log = structlog.get_logger(__name__)
# Pause between two progress messages.
_PROGRESS_SECONDS: Final = 0.5
# Pause between two checks of the free space, besides those before each write: temporary files and the index
# grow, and the job writes.
_ROOM_SECONDS: Final = 0.1
# Unreadable entries that are recorded, in all and of one root: the owner of one root must not fill the list
# for others.
_ERRORS_NAMED: Final = 1000
_ERRORS_NAMED_OF_ROOT: Final = 250
PATHS_IN_MESSAGE: Final = 3
"""Paths that a note in the snapshot's message names."""


class RootUnreadable(CiuicError):
    """The root itself cannot be read; other roots of the snapshot are captured."""


class Interrupted(Exception):
    """The process was asked to stop."""


class Report:
    """Counters of a capture. Sends progress, keeps the pace, and stops the capture when asked."""

    def __init__(
        self, tell: Callable[[CaptureProgress], None], *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Begin to count.

        Args:
            tell: sends a progress message.
            clock: monotonic clock.
        """
        self.entries = 0
        self.files_read = 0
        self.bytes_read = 0
        self.errors: list[ReadError] = []
        self.errors_total = 0
        self.far_times: dict[bytes, list[bytes]] = {}
        """Paths of each root whose modification time is not stored exactly, as far as they are named."""
        self.far_times_total: dict[bytes, int] = {}
        self.stop_requested = False
        self.root = b""
        self.entries_expected = 0
        self.bytes_expected = 0
        self.new_bytes: Callable[[], int] = lambda: 0
        self._tell = tell
        self._clock = clock
        self._told_at = clock()
        self._at: tuple[DirectoryPath, bytes] = (DirectoryPath(), b"")
        self._path_was_read = True
        self._errors_of_root = 0
        self.pace = Pace(())
        self.room: CaptureRoom | None = None
        """Free space of the repository; None: there is no reserve to keep."""
        self._room_asked_at = clock()

    def begin(self, root: bytes, entries_expected: int, bytes_expected: int) -> None:
        """Begin a root. The expected numbers are of this root alone, 0 for unknown."""
        self.root = root
        self._errors_of_root = 0
        self.far_times[root], self.far_times_total[root] = [], 0
        self.entries_expected = self.entries + entries_expected if entries_expected else 0
        self.bytes_expected = self.bytes_read + bytes_expected if bytes_expected else 0
        self._emit()

    def visited(self, directory: DirectoryPath, name: bytes) -> None:
        """Count a visited name. Its path is assembled only for a progress message."""
        self.entries += 1
        self._at = (directory, name)
        self._path_was_read = False
        self.step()

    def paused(self) -> None:
        """Send progress while the pace waits, and stop the capture when asked."""
        self.check()
        self._tell_if_due()

    def read(self, size_bytes: int) -> None:
        """Count bytes that were read from the last visited name."""
        if size_bytes:
            self.bytes_read += size_bytes
            if not self._path_was_read:
                self._path_was_read = True
                self.files_read += 1
        self.step()

    def failed(self, path: bytes, error: OSError) -> None:
        """Count an unreadable entry, and record the first ones of each root.

        The owner of one root must not fill the log, nor the list in which others look for entries of theirs.
        """
        self.errors_total += 1
        self._errors_of_root += 1
        if self._errors_of_root > _ERRORS_NAMED_OF_ROOT or len(self.errors) >= _ERRORS_NAMED:
            return
        text = error.strerror or str(error)
        self.errors.append(ReadError(root=self.root, path=path, error=text))
        _log.warning("entry_not_readable", root=os.fsdecode(self.root), path=os.fsdecode(path), error=text)

    def far_time(self, path: bytes) -> None:
        """Count an entry with a modification time that is stored as the nearest one that an entry holds."""
        self.far_times_total[self.root] += 1
        if len(self.far_times[self.root]) < PATHS_IN_MESSAGE:
            self.far_times[self.root].append(os.path.join(self.root, path))

    def root_failed(self, errors_before: tuple[int, int]) -> None:
        """Discard the unreadable entries of a root that is left out or walked again.

        Args:
            errors_before: number of recorded and of all errors before the root was begun.
        """
        del self.errors[errors_before[0] :]
        self.errors_total = errors_before[1]
        self._errors_of_root = 0

    def check(self) -> None:
        """Raise Interrupted when the process was asked to stop."""
        if self.stop_requested:
            raise Interrupted

    def step(self) -> None:
        """Keep the pace after a small piece of work.

        Raise where a stop was asked for or the space is used up.
        """
        self.check()
        self.pace.step()
        if self.room is not None and self._clock() - self._room_asked_at >= _ROOM_SECONDS:
            self._room_asked_at = self._clock()
            self.room.check()
        self._tell_if_due()

    def _tell_if_due(self) -> None:
        if self._clock() - self._told_at >= _PROGRESS_SECONDS:
            self._emit()

    def _emit(self) -> None:
        self._told_at = self._clock()
        self._tell(
            CaptureProgress(
                root=self.root,
                entries=self.entries,
                files_read=self.files_read,
                bytes_read=self.bytes_read,
                new_bytes=self.new_bytes(),
                entries_expected=self.entries_expected,
                bytes_expected=self.bytes_expected,
                pace=self.pace.state,
                path=self._at[0].path_of(self._at[1]),
            )
        )


class _OpenRoot:
    """Descriptors of one root, and the content of its sealed epoch. Context manager."""

    def __init__(self, job: RootJob, block_size: int, room: str) -> None:
        """Open the root.

        Args:
            job: the root.
            block_size: block size of the repository.
            room: directory for temporary files.

        Raises:
            UndoLost: the sealed epoch is not there (any more).
            RootUnreadable: the root cannot be opened.
            CiuicError: the overlay tracks blocks of another size.
        """
        self._stack = contextlib.ExitStack()
        self.spill = Spill(room)
        with contextlib.ExitStack() as opening:
            opening.callback(self.spill.close)
            self.backing_fd = job.backing_fd
            if self.backing_fd < 0:
                self.backing_fd = _open_root(job.path)
                opening.callback(os.close, self.backing_fd)
            self.sealed: Sealed | None = None
            if job.epoch:
                self.view = self._open_sealed(job, block_size, opening)
            else:
                self.view = SealedView(self.backing_fd, log=OfflineLog(), spill=self.spill)
            # Only now: what was opened before an error is closed by `opening`.
            self._stack = opening.pop_all()

    def _open_sealed(self, job: RootJob, block_size: int, opening: contextlib.ExitStack) -> SealedView:
        try:
            undo_fd = job.undo_fd
            if undo_fd < 0:
                undo_fd = _find_undo(self.backing_fd)
                opening.callback(os.close, undo_fd)
            # Below a descriptor, and by no path that the owner of the root could change.
            self.sealed = read_sealed(f"/proc/self/fd/{undo_fd}/{sealed_name(job.epoch)}", self.spill)
        except FileNotFoundError as error:
            raise UndoLost(f"epoch {job.epoch} is not sealed, or was given up") from error
        head = self.sealed.head
        # Epochs count from 1 in each session, so the file of another mount has the same name.
        if head.session != job.session or head.epoch != job.epoch:
            raise UndoLost(f"the sealed epoch belongs to another mount ({head.session})")
        # Dirty blocks are stored as they are tracked.
        if head.block_size != block_size:
            raise CiuicError(
                f"the overlay tracks blocks of {head.block_size} bytes, the repository has {block_size}",
                hint="restart the service, so that its overlays use the repository's block size",
            )
        log = open_log(undo_fd, job.epoch)
        opening.callback(log.close)
        return SealedView(
            self.backing_fd, log=log, spill=self.spill, undo_fd=undo_fd, worker_pid=job.worker_pid
        )

    def check_still_sealed(self) -> None:
        """Raise UndoLost when the epoch was given up since.

        What was read after that may be later than the cut.

        A log that does not exist has no record of that, so the sealed file is checked too, which is removed
        then.
        """
        self.view.log.poll()
        if self.sealed is not None:
            try:
                os.stat(sealed_name(self.sealed.head.epoch), dir_fd=self.view.undo_fd)
            except FileNotFoundError as error:
                raise UndoLost(
                    f"epoch {self.sealed.head.epoch} was given up while it was captured"
                ) from error

    def __enter__(self) -> _OpenRoot:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def _find_undo(backing_fd: int) -> int:
    """Open the undo directory of a root whose worker did not hand it out.

    Raise FileNotFoundError where ciuic has made none.
    """
    state_fd = find_state(backing_fd)
    if state_fd is None:
        raise FileNotFoundError(errno.ENOENT, "no state directory")
    try:
        return os.open("undo", READ_DIRECTORY, dir_fd=state_fd)
    finally:
        os.close(state_fd)


def _open_root(path: bytes) -> int:
    try:
        return os.open(path, os.O_PATH | os.O_DIRECTORY)
    except OSError as error:
        raise RootUnreadable(f"{os.fsdecode(path)} cannot be opened: {error.strerror}") from error


def capture_root(
    job: RootJob, repository: Repository, writer: Writer, report: Report
) -> tuple[RootRecord, str]:
    """Read one root into the repository.

    Returns:
        The root's record, and the id of the snapshot that it builds on, empty for none.

    Raises:
        UndoLost: the sealed epoch was given up.
        UndoDamaged: the undo log cannot be read.
        Interrupted: the process was asked to stop.
        RootUnreadable: the root itself cannot be read.
        Damaged: the repository is damaged.
        OSError: the repository cannot be read or written.
    """
    excludes = ExcludeMatcher(job.path, job.excludes)
    digest = excludes.digest()
    with _OpenRoot(job, repository.block_size, os.fspath(repository.path)) as opened:
        base = choose_base(repository, job.path, opened.sealed, digest)
        if base is not None and not job.trust_tracking:
            base = base._replace(trusted=False)
        # Only a first capture reads everything; later ones store what has changed, whose size no look at the
        # root tells.
        if base is None and report.room is not None:
            report.begin(job.path, 0, 0)
            report.room.check_root(job.path, opened.backing_fd, excludes, report.step)
        walked, base = _walk_with_fallback(job, repository, writer, report, opened, base, excludes)
        opened.check_still_sealed()
    mode: RootMode = "full"
    if opened.sealed is None:
        mode = "offline"
    elif base is not None and base.trusted:
        mode = "tracked"
    record = RootRecord(
        path=job.path,
        entry=walked.entry,
        links=walked.links.id,
        links_files=walked.links.total_files,
        links_bytes=walked.links.total_bytes,
        session=job.session if opened.sealed is not None else "",
        epoch=job.epoch,
        mode=mode,
        excludes_digest=digest,
        depth=walked.depth,
        not_held=walked.not_held,
    )
    return record, base.snapshot_id if base is not None else ""


def _walk_with_fallback(
    job: RootJob,
    repository: Repository,
    writer: Writer,
    report: Report,
    opened: _OpenRoot,
    base: Base | None,
    excludes: ExcludeMatcher,
) -> tuple[WalkedRoot, Base | None]:
    """Walk by tracking; where that does not fit, compare with the base.

    Read everything where the base is damaged.
    """
    errors_before = len(report.errors), report.errors_total
    while True:
        try:
            return _walk(job, repository, writer, report, opened, base, excludes), base
        except TrackingBroken as error:
            if base is None or not base.trusted:
                raise
            _log.warning("tracking_does_not_fit", root=os.fsdecode(job.path), reason=str(error))
            base = base._replace(trusted=False)
        except Damaged as error:
            if base is None:
                raise
            _log.error("base_snapshot_damaged", snapshot=base.snapshot_id, reason=str(error))
            base = None
        report.root_failed(errors_before)


def _walk(
    job: RootJob,
    repository: Repository,
    writer: Writer,
    report: Report,
    opened: _OpenRoot,
    base: Base | None,
    excludes: ExcludeMatcher,
) -> WalkedRoot:
    expected = expected_bytes = 0
    if base is not None and base.trusted:
        expected, expected_bytes = expected_of(opened.sealed)
    elif base is not None:
        expected = base.record.entry.total_files + base.record.links_files
    report.begin(job.path, expected, expected_bytes)
    content = ContentReader(opened.view, writer, repository.block_size, report.read)
    maker = EntryMaker(writer, content, base, opened.sealed)
    place = os.stat(repository.path)
    walker = RootWalker(
        opened.view,
        writer,
        repository.trees,
        maker,
        base=base,
        sealed=opened.sealed,
        excludes=excludes,
        spill=opened.spill,
        skip=(place.st_dev, place.st_ino),
        visited=report.visited,
        failed=report.failed,
        far_time=report.far_time,
    )
    try:
        return walker.run()
    except BackingUnreadable as error:
        raise RootUnreadable(f"{os.fsdecode(job.path)} cannot be read: {error}") from error
    finally:
        content.close()


class Captured(NamedTuple):
    """Outcome for all roots."""

    records: tuple[RootRecord, ...]
    left_out: tuple[LeftOut, ...]
    incomplete: tuple[bytes, ...]
    """Roots with unreadable entries."""
    parent: str
    """Id of the snapshot that the first root builds on; empty for none."""


def capture_roots(job: CaptureJob, repository: Repository, writer: Writer, report: Report) -> Captured:
    """Read every root that can be read.

    Raises what the first root failed with when none could be; Interrupted; OSError and CiuicError of the
    repository.
    """
    records: list[RootRecord] = []
    left_out = list(job.left_out)
    incomplete: list[bytes] = []
    parent = ""
    first_failure: Exception | None = None
    for root in job.roots:
        before = len(report.errors), report.errors_total
        try:
            record, builds_on = capture_root(root, repository, writer, report)
            unread = report.errors_total - before[1]
            if unread and not record.entry.total_files:
                # Listed, it would be taken for a snapshot of the root, and its chunks would be all that is kept.
                reason = f": {report.errors[before[0]].error}" if len(report.errors) > before[0] else ""
                raise RootUnreadable(
                    f"nothing in {os.fsdecode(root.path)} could be read: {plural(unread, 'name')} failed{reason}"
                )
        except Exception as error:
            if not _costs_one_root(error):
                raise
            _log_failure(root.path, error)
            report.root_failed(before)
            # The frames of the traceback hold the memory of the walk, which the next root needs.
            traceback.clear_frames(error.__traceback__)
            first_failure = first_failure or error.with_traceback(None)
            left_out.append(LeftOut(path=root.path, reason=reason_of(error)))
            # Frees reference cycles of the failed walk now, not at some later collection.
            gc.collect()
            continue
        records.append(record)
        parent = parent or builds_on
        if report.errors_total > before[1]:
            incomplete.append(root.path)
    if first_failure is not None and not records:
        report.root = job.roots[0].path
        raise first_failure
    return Captured(tuple(records), tuple(left_out), tuple(incomplete), parent)


def _costs_one_root(error: Exception) -> bool:
    """Return whether an error concerns one root only, and neither the repository nor other roots.

    Such errors are those of the root itself, of its size, of its undo log and of the memory that its walk
    took. A defect in this program that one root brings out must not cost the other roots their snapshot
    either.
    """
    if isinstance(error, RootUnreadable | NoRoom):
        return True
    return not isinstance(error, Interrupted | CiuicError | OSError)


def reason_of(error: Exception) -> str:
    """Return why a root was left out, in one line for JSON."""
    if isinstance(error, CiuicError):
        return path_text(error.message)
    if isinstance(error, MemoryError):
        return "the memory limit of a capture was reached while it was read"
    return path_text(str(error) or type(error).__name__)


def _log_failure(path: bytes, error: Exception) -> None:
    known = isinstance(error, CiuicError) or type(error).__name__ in (
        "UndoLost",
        "UndoDamaged",
        "TrackingBroken",
    )
    _log.error("root_left_out", root=os.fsdecode(path), error=reason_of(error), exc_info=not known)


def limit_memory(limit_bytes: int) -> None:
    """Let allocations beyond the limit fail in this process.

    They fail as MemoryError, which costs the root that is read instead of the host's memory. Data of the
    kernel and shared mappings do not count (setrlimit(2), RLIMIT_DATA).
    """
    if limit_bytes:
        with contextlib.suppress(ValueError, OSError):  # a lower limit is in force already
            resource.setrlimit(resource.RLIMIT_DATA, (limit_bytes, resource.RLIM_INFINITY))


# Step of the wait for the repository's lock, after which a signal takes effect.
_LOCK_POLL_SECONDS: Final = 0.5
# Between the job's 0 and 1000: when memory runs out, a capture is killed before the job.
_OOM_SCORE_ADJ: Final = "500"


def run_job(job: CaptureJob, report: Report, committed: Callable[[Done], None] = lambda _: None) -> Done:
    """Take the snapshot. It is durable on return.

    Args:
        job: the job.
        report: counters and progress.
        committed: called when the snapshot is durable, before the repository is closed, which only saves
            later work.

    Raises:
        Busy: another writer has the repository.
        CiuicError: see `capture_root`.
    """
    begun = time.monotonic()
    require_own(job.repository, trusted=job.trust_repository)
    room = CaptureRoom(job)
    with (
        Repository.open(job.repository, disk=room.disk) as repository,
        _writer(repository, job, report) as writer,
    ):
        room.check_first(repository)
        report.new_bytes = lambda: writer.new_bytes
        report.room = room
        try:
            captured = capture_roots(job, repository, writer, report)
            report.check()
            read = time.monotonic()
            snapshot = _commit(job, captured, writer, report)
        except OSError as error:
            raise room.failed(error, writer) from error
        except NoRoom:
            room.give_back(writer)
            raise
        done = _done(snapshot, report, begun, read)
        # Before the repository is closed, which takes four syncs of SQLite: callers that wait for the
        # snapshot need not wait for these (docs/decisions/snapshot-of-nothing.md).
        committed(done)
    return done


def _done(snapshot: Snapshot, report: Report, begun: float, read: float) -> Done:
    ended = time.monotonic()
    return Done(
        id=str(snapshot.id),
        new_bytes=snapshot.new_bytes,
        size_bytes=snapshot.size_bytes,
        files=snapshot.files,
        entries=report.entries,
        files_read=report.files_read,
        bytes_read=report.bytes_read,
        modes={path_text(root.path): root.mode for root in snapshot.roots},
        seconds=round(ended - begun, 3),
        commit_seconds=ended - read,
        errors=tuple(report.errors),
        errors_total=report.errors_total,
        left_out=snapshot.left_out,
    )


def _writer(repository: Repository, job: CaptureJob, report: Report) -> Writer:
    """Return the repository's writer. Waits for the lock in short steps, so that a signal ends the wait."""
    deadline = time.monotonic() + job.lock_wait_seconds
    while True:
        report.check()
        left = max(0.0, min(_LOCK_POLL_SECONDS, deadline - time.monotonic()))
        try:
            return repository.writer(wait_seconds=left, command="capture")
        except Busy:
            if time.monotonic() >= deadline:
                raise


def _commit(job: CaptureJob, captured: Captured, writer: Writer, report: Report) -> Snapshot:
    tags, notes = job.tags, [job.message]
    if report.errors_total:
        tags = (*tags, TAG_INCOMPLETE)
        notes.append(_incomplete(report))
    notes.append(_far_times(report, {record.path for record in captured.records}))
    if captured.left_out:
        tags = (*tags, TAG_PARTIAL)
        notes.append(_left_out(captured.left_out))
    if any(record.not_held > 0 for record in captured.records):
        tags = (*tags, TAG_NOT_HELD)
    snapshot = writer.commit(
        SnapshotDraft(
            id=SnapshotId.parse(job.id),
            time_ns=job.time_ns,
            host=job.host,
            roots=captured.records,
            tags=tags,
            message=" ".join(filter(None, notes)),
            parent=captured.parent,
            pair=job.pair,
            set_member=job.set_member,
            left_out=captured.left_out,
            incomplete=captured.incomplete,
        )
    )
    # Marks are set on a committed snapshot, so a capture that is killed in between leaves it without its
    # hold.
    if job.hold:
        snapshot = writer.set_marks(snapshot.id, hold=True, reason=job.hold_reason, hold_uid=job.hold_uid)
    return snapshot


def _incomplete(report: Report) -> str:
    """Return the note about unreadable entries for the snapshot's message, which `ciuic list` shows."""
    named = ", ".join(
        path_text(os.path.join(error.root, error.path)) for error in report.errors[:PATHS_IN_MESSAGE]
    )
    more = report.errors_total - min(PATHS_IN_MESSAGE, len(report.errors))
    return f"[not readable: {named}{f' and {more} more' if more else ''}]"


def _far_times(report: Report, roots: Set[bytes]) -> str:
    """Return the note about modification times that are not stored exactly, empty for none."""
    total = sum(report.far_times_total.get(root, 0) for root in roots)
    if not total:
        return ""
    paths = [path for root in sorted(roots) for path in report.far_times.get(root, ())][:PATHS_IN_MESSAGE]
    more = total - len(paths)
    named = ", ".join(map(path_text, paths))
    return f"[times beyond 1677 to 2262 stored as the nearest: {named}{f' and {more} more' if more else ''}]"


def _left_out(roots: Sequence[LeftOut]) -> str:
    """Return the note about roots that are not in the snapshot."""
    named = "; ".join(f"{path_text(root.path)}: {root.reason}" for root in roots[:PATHS_IN_MESSAGE])
    more = len(roots) - PATHS_IN_MESSAGE
    return f"[left out: {named}{f'; and {more} more' if more > 0 else ''}]"


def failure(error: BaseException, repository: str) -> Failed:
    """Return the message for an error, with the exit status."""
    if isinstance(error, CiuicError):
        failed = Failed(error=path_text(error.message), hint=path_text(error.hint), code=error.exit_code)
        if isinstance(error, NoRoom):
            code = EXIT_NO_ROOM if error.is_final else error.exit_code
            failed = msgspec.structs.replace(failed, needed_bytes=error.needed_bytes, code=code)
        return failed
    if isinstance(error, UndoLost | UndoDamaged):
        return Failed(
            error=path_text(str(error)), hint="the next snapshot takes these changes", code=EXIT_UNDO_LOST
        )
    if isinstance(error, Interrupted):
        return Failed(error="interrupted; nothing was committed", code=EXIT_INTERRUPTED)
    if isinstance(error, OSError):
        where = f" ({path_text(error.filename)})" if isinstance(error.filename, str | bytes) else ""
        return Failed(
            error=f"capture into {path_text(repository)} failed: {error.strerror or error}{where}",
            hint="look at the disk; the next snapshot takes these changes",
        )
    return Failed(
        error=path_text(f"capture failed: {type(error).__name__}: {error}"),
        hint="this is a bug; the log has more",
    )


def main(arguments: list[str] | None = None) -> int:
    """Run the process and return its exit status."""
    options = _parser().parse_args(arguments)
    if options.offline:
        return _capture(lambda: _offline_job(options), JobInput(), 1, options.repo or "")
    job_input = JobInput(0)
    return _capture(lambda: decode_job(job_input.first_line()), job_input, 1, "")


def serve(job_fd: int, messages_fd: int) -> int:
    """Run the forked process and return its exit status."""
    job_input = JobInput(job_fd)
    return _capture(lambda: decode_job(job_input.first_line()), job_input, messages_fd, "")


def _capture(
    find_job: Callable[[], CaptureJob], job_input: JobInput, messages_fd: int, repository: str
) -> int:
    """Run one job and return the exit status.

    Args:
        find_job: returns the job.
        job_input: channel of later changes of the urgency.
        messages_fd: descriptor for messages.
        repository: path of the repository, for errors before the job is known.
    """
    output = _Output(messages_fd)
    logs.configure(as_json=True)  # on standard error: standard output is for messages alone
    report = Report(output.tell)

    def stop(_number: int, _frame: object) -> None:
        report.stop_requested = True

    # A flag and no exception: the capture ends between two steps, where the repository is consistent.
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    done: list[Done] = []

    def committed(last: Done) -> None:
        done.append(last)
        output.tell(last)

    try:
        job = find_job()
        repository = job.repository
        # Before privileges are dropped: to raise the priority again as the deadline nears takes RLIMIT_NICE,
        # which is set here (docs/decisions/deadlines.md).
        precedence = _yield_to_job(job)
        heard = gauges(waits_files(job.runtime_dir) if job.runtime_dir else ())
        # In force before the first byte of a root is read.
        limit_memory(job.memory_limit_bytes)
        report.pace = Pace(
            heard, urgency=job.urgency, on_pause=report.paused, processor_waits=processor_waits()
        )
        _drop_privileges(repository)
        follow_urgency(job_input, report.pace, precedence)
        run_job(job, report, committed)
    except msgspec.MsgspecError as error:
        output.tell(Failed(error=f"no capture job on standard input: {error}", code=UsageError.exit_code))
        return UsageError.exit_code
    except Exception as error:
        if done:  # the snapshot is committed, and only closing the repository failed
            _log.warning("repository_not_closed", error=str(error))
            return 0
        failed = msgspec.structs.replace(failure(error, repository), root=report.root)
        unexpected = not isinstance(error, CiuicError | UndoLost | UndoDamaged | Interrupted | OSError)
        _log.error("capture_failed", error=failed.error, code=failed.code, exc_info=unexpected)
        output.tell(failed)
        return failed.code
    return 0


class _Output:
    """Output for messages. The daemon may close the other end; the snapshot is taken all the same."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._open = True

    def tell(self, message: Message) -> None:
        if self._open:
            try:
                left = encode_message(message)
                while left:
                    left = left[os.write(self._fd, left) :]
            except BrokenPipeError:
                self._open = False


def _yield_to_job(job: CaptureJob) -> Precedence:
    """Yield to the job in CPU, I/O and memory, and raise the limit of descriptors for deep trees."""
    precedence = yield_to_others(job.io_priority, job.urgency.least_share(0))
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write(_OOM_SCORE_ADJ)
    return precedence


def _drop_privileges(repository: str) -> None:
    """Keep only the privileges and the system calls that a capture needs."""
    try:
        limit_capture(repository)
    except OSError as error:  # a filter of system calls may forbid it; the snapshot matters more
        _log.warning("privileges_not_dropped", error=str(error))
    unfiltered = syscall_profiles.limit_calls(syscall_profiles.CAPTURE)
    if unfiltered:
        _log.warning("system_calls_not_filtered", reason=unfiltered)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m ciuic.daemon.capture.process", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--offline", action="store_true", help="capture plain directories, without daemon or job"
    )
    parser.add_argument("--repo", metavar="DIR", help="repository")
    parser.add_argument(
        "--root", metavar="DIR", action="append", default=[], help="root, absolute; repeatable"
    )
    parser.add_argument(
        "--exclude", metavar="PATTERN", action="append", default=[], help="as in the configuration"
    )
    parser.add_argument("--tag", metavar="TAG", action="append", default=[])
    parser.add_argument("-m", "--message", metavar="TEXT", default="")
    parser.add_argument("--trust-repository", action="store_true", help="although another user owns it")
    parser.add_argument("--hold", action="store_true", help="never prune it")
    parser.add_argument(
        "--wait", metavar="SECONDS", type=float, default=0.0, help="for the repository's lock"
    )
    parser.add_argument("--io-priority", metavar="CLASS", default="idle")
    parser.add_argument(
        "--min-share", metavar="SHARE", type=float, default=1.0, help="as in the configuration, 0.01 for 1%%"
    )
    return parser


def _offline_job(options: argparse.Namespace) -> CaptureJob:
    if not options.repo or not options.root:
        raise UsageError("--offline needs --repo and at least one --root")
    for root in options.root:
        if not os.path.isabs(root):
            raise UsageError(f"{root} is not an absolute path")
    with Repository.open(options.repo) as repository:
        new_id = repository.snapshots.new_id()
    reserve = reserve_of(None, total_bytes(options.repo))
    return CaptureJob(
        repository=options.repo,
        id=str(new_id),
        time_ns=time.time_ns(),
        host=socket.gethostname(),
        roots=tuple(
            RootJob(
                path=os.fsencode(os.path.normpath(root)),
                excludes=effective_patterns(root, options.exclude, ()),
            )
            for root in options.root
        ),
        tags=tuple(options.tag),
        message=options.message,
        hold=options.hold,
        trust_repository=options.trust_repository,
        lock_wait_seconds=options.wait,
        io_priority=options.io_priority,
        urgency=Urgency(min_share=options.min_share),
        reserve_bytes=reserve.size_bytes,
        reserve_reason=reserve.reason,
    )


if __name__ == "__main__":
    sys.exit(main())
