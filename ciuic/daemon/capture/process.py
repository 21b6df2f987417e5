"""Capture process: one job in, one snapshot out. Run as `python -m ciuic.daemon.capture.process`.

Reads a CaptureJob as JSON from standard input (job.py), or builds one from its options with `--offline`: a
snapshot of plain directories that no daemon serves, which is not of one instant. Writes CaptureProgress lines
and one Done or Failed to standard output, logs to standard error, and exits with 0 exactly when the snapshot
is committed.

Guarantees: a committed snapshot has every root that was walked to its end, and names the others with the
reason; SIGTERM and SIGINT end the process cleanly between two steps, SIGKILL at any moment leaves the
repository as it was before plus garbage. It never changes a backing file.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib  # noqa: F401 (for Excludes.digest: later, without privileges, the file may be out of reach)
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable, Sequence, Set
from typing import Final

import msgspec
import structlog

from ciuic.daemon.base.child_processes import JobInput, follow_urgency
from ciuic.daemon.capture.job import (
    EXIT_INTERRUPTED,
    EXIT_NO_ROOM,
    EXIT_UNDO_LOST,
    CaptureJob,
    Done,
    Failed,
    Message,
    RootJob,
    decode_job,
    encode_message,
    printable,
)
from ciuic.daemon.capture.roots import (
    PATHS_IN_MESSAGE,
    Captured,
    Interrupted,
    Report,
    capture_roots,
    limit_memory,
)
from ciuic.daemon.capture.space import CaptureRoom, NoRoom
from ciuic.errors import Busy, CiuicError, UsageError
from ciuic.excludes import effective_patterns
from ciuic.fuse_layer.undo_format import UndoDamaged, UndoLost
from ciuic.repository import Repository, Writer
from ciuic.repository.trust import require_own
from ciuic.system import logs, syscall_profiles
from ciuic.system.disk_space import reserve_of, total_bytes
from ciuic.system.io_throttle import Pace, gauges, processor_waits, waits_files, yield_to_others
from ciuic.system.precedence import Precedence
from ciuic.system.privileges import limit_capture
from ciuic.system.urgency import Urgency
from ciuic.types import (
    TAG_INCOMPLETE,
    TAG_NOT_HELD,
    TAG_PARTIAL,
    LeftOut,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
)

_log = structlog.get_logger(__name__)
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
        modes={printable(root.path): root.mode for root in snapshot.roots},
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
        printable(os.path.join(error.root, error.path)) for error in report.errors[:PATHS_IN_MESSAGE]
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
    named = ", ".join(map(printable, paths))
    return f"[times beyond 1677 to 2262 stored as the nearest: {named}{f' and {more} more' if more else ''}]"


def _left_out(roots: Sequence[LeftOut]) -> str:
    """Return the note about roots that are not in the snapshot."""
    named = "; ".join(f"{printable(root.path)}: {root.reason}" for root in roots[:PATHS_IN_MESSAGE])
    more = len(roots) - PATHS_IN_MESSAGE
    return f"[left out: {named}{f'; and {more} more' if more > 0 else ''}]"


def failure(error: BaseException, repository: str) -> Failed:
    """Return the message for an error, with the exit status."""
    if isinstance(error, CiuicError):
        failed = Failed(error=printable(error.message), hint=printable(error.hint), code=error.exit_code)
        if isinstance(error, NoRoom):
            code = EXIT_NO_ROOM if error.is_final else error.exit_code
            failed = msgspec.structs.replace(failed, needed_bytes=error.needed_bytes, code=code)
        return failed
    if isinstance(error, UndoLost | UndoDamaged):
        return Failed(
            error=printable(str(error)), hint="the next snapshot takes these changes", code=EXIT_UNDO_LOST
        )
    if isinstance(error, Interrupted):
        return Failed(error="interrupted; nothing was committed", code=EXIT_INTERRUPTED)
    if isinstance(error, OSError):
        where = f" ({printable(error.filename)})" if isinstance(error.filename, str | bytes) else ""
        return Failed(
            error=f"capture into {printable(repository)} failed: {error.strerror or error}{where}",
            hint="look at the disk; the next snapshot takes these changes",
        )
    return Failed(
        error=printable(f"capture failed: {type(error).__name__}: {error}"),
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
