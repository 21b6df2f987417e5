"""Reports from the ranks' writers to the writer that makes the snapshot: which files each rank has stored.

They go through the repository's directory. `parts/TOKEN/RANK` is one rank's report on one snapshot. Its
writer holds an exclusive flock(2) on it from before it stores until the report is complete, so a file that is
unlocked and incomplete belongs to a writer that died. The writer of the directory's first rank waits for all reports and clears
the directory when it is done, leftovers of dead runs included. Trainers are not needed for any of this: if
all are killed after they handed over their parts, the snapshot is still made.

References:
    docs/decisions/ranks-in-turn.md
"""

from __future__ import annotations

import fcntl
import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Final

import msgspec

from ciuic.structs import decode_msgpack
from ciuic.training.writer.messages import JointSave, StoredFile

PARTS_DIR: Final = "parts"
# Time that `collect` gives all ranks to begin their reports; they stage at one boundary.
_BEGIN_SECONDS: Final = 120.0
# The same limit once this writer's own trainer is gone. Ranks hand over within one step of each other: those
# that have not by then were usually killed with it, and a writer must not stay behind for two minutes.
_ORPHAN_BEGIN_SECONDS: Final = 5.0
_STALE_SECONDS: Final = 86400.0
"""Age after which the reports of another snapshot are removed as leftovers of a dead run."""
_POLL_SECONDS: Final = (0.002, 0.05)
"""First and longest pause between two looks at a rank's report."""


class _ReportRecord(msgspec.Struct, frozen=True):
    """Content of a report file."""

    problem: str
    files: list[StoredFile]


class PartReport:
    """Report of one rank while it is being made."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def stored(self, files: list[StoredFile]) -> None:
        """Complete the report: all files are stored durably."""
        self._write(_ReportRecord("", files))

    def failed(self, problem: str) -> None:
        """Complete the report: nothing is stored, with the reason."""
        self._write(_ReportRecord(problem or "unknown", []))

    def _write(self, report_part: _ReportRecord) -> None:
        # Without a sync: a report that a crash of the machine cut short is that of a writer that died.
        data = memoryview(msgspec.msgpack.encode(report_part))
        while data:
            data = data[os.write(self._fd, data) :]


@contextmanager
def report_part(repository: str, joint_save: JointSave) -> Iterator[PartReport]:
    """Hold the lock on this rank's report. Enter it before anything is stored.

    Raises:
        OSError: the report cannot be created.
    """
    folder = _folder(repository, joint_save.token)
    os.makedirs(folder, 0o700, exist_ok=True)
    name = f"{folder}/{joint_save.rank}"
    fd = os.open(f"{name}.begin", os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        # Locked under another name first: a report that appears under its own name must never be seen
        # unlocked and empty, which would mean a dead writer.
        fcntl.flock(fd, fcntl.LOCK_EX)
        os.rename(f"{name}.begin", name)
        yield PartReport(fd)
    finally:
        os.close(fd)


def report_failure(repository: str, joint_save: JointSave, problem: str) -> None:
    """Report that this rank has nothing to store for the snapshot.

    Raises:
        OSError: the report cannot be created.
    """
    with report_part(repository, joint_save) as report:
        report.failed(problem)


def collect(
    repository: str, joint_save: JointSave, trainer_is_gone: Callable[[], bool] = lambda: False
) -> list[StoredFile]:
    """Return the files that all other ranks have stored, once all have.

    Args:
        repository: path of the repository.
        joint_save: token of the snapshot, and this process's rank.
        trainer_is_gone: whether the trainer of this rank has ended. Ranks that have not begun by then are
            given up sooner.

    Raises:
        OSError: a rank has not begun in time, has failed, or died. The text names the rank.
    """
    found: list[StoredFile] = []
    deadline = _Deadline(trainer_is_gone)
    for rank in joint_save.ranks:
        if rank != joint_save.rank:
            found += _read_report(f"{_folder(repository, joint_save.token)}/{rank}", rank, deadline)
    return found


def clear(repository: str, token: str) -> None:
    """Remove the reports of this snapshot and those that dead runs left."""
    shutil.rmtree(_folder(repository, token), ignore_errors=True)
    clear_stale(repository)


def clear_stale(repository: str) -> None:
    """Remove what runs have left that died before their rank 0 could clear it, states for rank 0 included."""
    with suppress(OSError), os.scandir(f"{repository}/{PARTS_DIR}") as others:
        for other in others:
            if time.time() - other.stat().st_mtime > _STALE_SECONDS:
                shutil.rmtree(other.path, ignore_errors=True)


class _Deadline:
    """Time by which every rank must have begun."""

    def __init__(self, trainer_is_gone: Callable[[], bool]) -> None:
        self._trainer_is_gone = trainer_is_gone
        self._at_seconds = time.monotonic() + _BEGIN_SECONDS
        self._is_orphan = False

    def has_passed(self) -> bool:
        """Return whether the time is over; it is shortened once when the trainer is found to have ended."""
        if not self._is_orphan and self._trainer_is_gone():
            self._is_orphan = True
            self._at_seconds = min(self._at_seconds, time.monotonic() + _ORPHAN_BEGIN_SECONDS)
        return time.monotonic() > self._at_seconds


def _read_report(path: str, rank: int, deadline: _Deadline) -> list[StoredFile]:
    """Wait for one rank's report and return its files."""
    pause, longest = _POLL_SECONDS
    while True:
        try:
            data = _read_if_unlocked(path)
        except FileNotFoundError:
            # Only before it begins: later its lock tells that its writer lives, however slow it is.
            if deadline.has_passed():
                raise OSError(f"rank {rank} did not begin to store its part in time") from None
            data = None
        if data is not None:
            break
        time.sleep(pause)
        # Polled: the directory may lie on a shared file system, where inotify(7) does not see other hosts.
        pause = min(2 * pause, longest)
    try:
        report = decode_msgpack(data, _ReportRecord)
    # Unlocked and incomplete: the writer died, and the kernel released its lock.
    except msgspec.DecodeError:
        raise OSError(f"the writer of rank {rank} died") from None
    if report.problem:
        raise OSError(f"rank {rank}: {report.problem}")
    return report.files


def _read_if_unlocked(path: str) -> bytes | None:
    """Return the content of a report; None while its writer holds the lock."""
    fd = os.open(path, os.O_RDWR)
    try:
        # Non-blocking: a lock that is waited for could not be given up at the deadline.
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
        with open(fd, "rb", closefd=False) as file:
            return file.read()
    except BlockingIOError:
        return None
    finally:
        os.close(fd)


def _folder(repository: str, token: str) -> str:
    return f"{repository}/{PARTS_DIR}/{token}"
