"""Outcomes of a restore: counted, reported with the progress, and recorded under one lock, whichever thread they come from."""

from __future__ import annotations

import errno
from collections.abc import Callable

from ciuic.errors import CiuicError, Damaged
from ciuic.printable import one_line
from ciuic.restore.attributes import OWNER, TIMES
from ciuic.restore.destination import refusal
from ciuic.restore.destination_directories import Folder, Syncer
from ciuic.restore.model import (
    Action,
    Failure,
    OmittedSpecial,
    RestoreItem,
    RestorePlan,
    RestoreProgress,
    Result,
)
from ciuic.restore.new_files import NonDirectory
from ciuic.restore.pool import Pool, RunStopped
from ciuic.types import FLAG_OPEN_FOR_WRITING, Entry, is_far_time
from ciuic.units import plural

# Errors that every further path would meet as well.
_FATAL_ERRORS = {
    errno.ENOSPC: "the destination is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the destination is on a read-only file system",
}


class ResultCounter:
    """The result so far. All methods are called under one lock (Pool.changed), so callbacks come one at a time."""

    def __init__(
        self,
        plan: RestorePlan,
        dry_run: bool,
        progress: Callable[[RestoreProgress], None] | None,
        report: Callable[[RestoreItem], None] | None,
    ) -> None:
        self.result = Result(dry_run=dry_run)
        self._plan = plan
        self._progress = progress
        self._report = report
        self._bytes_done = 0
        self._files_done = 0
        # Once for all files: the snapshot counts the files of all its roots for it.
        self._later_flags = plan.snapshot.later_flags
        self._without_owner = b""
        self._without_times = b""

    def left(self, path: bytes, entry: Entry) -> None:
        """Count a file that was left alone, as asked."""
        self.result.skipped += 1
        self._advance(path, entry)
        self._tell(path, "skipped")

    def done(
        self,
        path: bytes,
        entry: Entry,
        action: Action,
        problems: list[str],
        counted_bytes: int = 0,
        *,
        replaces: bool = False,
    ) -> None:
        """Count a non-directory that is as it was at the snapshot.

        Args:
            path: its path in the destination.
            entry: what the snapshot has.
            action: how it became so.
            problems: attributes that could not be set.
            counted_bytes: bytes of it that `part` has counted already.
            replaces: something existed at the path.
        """
        written_bytes = entry.size_bytes if entry.is_file and action == "restored" else 0
        if action in ("skipped", "attributes"):
            self.result.skipped += 1
        else:
            self.result.restored += 1
            self.result.restored_bytes += written_bytes
        if entry.flags & FLAG_OPEN_FOR_WRITING:
            self.result.open_for_writing.append(path)
        if entry.flags & self._later_flags:
            self.result.not_held.append(path)
        if is_far_time(entry.mtime_ns):
            self.result.far_times.append(path)
        self.problems(path, problems)
        self._advance(path, entry, counted_bytes)
        self._tell(path, action, replaces and action in ("restored", "linked"), written_bytes)

    def directory(self, path: bytes, problems: list[str]) -> None:
        """Count a directory."""
        self.result.directories += 1
        self.problems(path, problems)

    def left_out(self, path: bytes, what: str) -> None:
        """Count something special that is not restored."""
        self.result.left_out.append(OmittedSpecial(path, what))
        self.result.left_out_because = self._plan.foreign_reason

    def conflict(self, path: bytes) -> None:
        """Report a path that would stop the restore; `RestorePlan.conflicts` lists it."""
        self._tell(path, "conflict")

    def removed(self, path: bytes) -> None:
        """Count the top of a removed tree."""
        self.result.removed.append(path)
        self._tell(path, "removed")

    def problems(self, path: bytes, problems: list[str]) -> None:
        """Count attributes that could not be set."""
        for problem in problems:
            # Without root every path has this problem: it is counted, and reported once.
            if problem == OWNER:
                self._without_owner = self._without_owner or path
                self.result.owner_failures += 1
            elif problem == TIMES:
                self._without_times = self._without_times or path
                self.result.time_failures += 1
            else:
                self.result.failed.append(Failure(path, problem, attribute=True))

    def failed(self, path: bytes, error: BaseException | str) -> bool:
        """Count a failure; return whether the error ends the whole restore, as a full disk does."""
        ends = ""
        if isinstance(error, OSError):
            ends = _FATAL_ERRORS.get(error.errno or 0, "")
        self.result.failed.append(Failure(path, reason_of(error), damaged=isinstance(error, Damaged)))
        self._tell(path, "failed")
        if ends and not self.result.stopped:
            self.result.stopped = f"{ends}; paths not restored before that are missing"
        return bool(ends)

    def finish(self) -> Result:
        """Return the result, with one failure for all owners that could not be set, and one for all times."""
        count = self.result.owner_failures
        if count:
            others = f" (nor that of {plural(count - 1, 'other')})" if count > 1 else ""
            reason = f"its owner could not be set{others}: not permitted; run as root for exact owners"
            self.result.failed.append(Failure(self._without_owner, reason, attribute=True))
        count = self.result.time_failures
        if count:
            others = f" (nor that of {plural(count - 1, 'other')})" if count > 1 else ""
            reason = (
                f"its modification time was not kept{others}: the file system holds coarser times, or fewer"
            )
            self.result.failed.append(Failure(self._without_times, reason, attribute=True))
        return self.result

    def part(self, path: bytes, size_bytes: int) -> None:
        """Report that part of a large file is written; `done` is told not to count it again."""
        self._bytes_done += size_bytes
        self._show(path)

    def _advance(self, path: bytes, entry: Entry, counted_bytes: int = 0) -> None:
        self._files_done += 1
        if entry.is_file:
            self._bytes_done += entry.size_bytes - counted_bytes
        self._show(path)

    def _show(self, path: bytes) -> None:
        if self._progress is not None:
            # The totals are 0 when unknown: the progress must not exceed them.
            bytes_total = max(self._plan.bytes_total, self._bytes_done)
            files_total = max(self._plan.files_total, self._files_done)
            self._progress(
                RestoreProgress(self._bytes_done, bytes_total, self._files_done, files_total, path)
            )

    def _tell(self, path: bytes, action: Action, replaces: bool = False, size_bytes: int = 0) -> None:
        if self._report is not None:
            self._report(RestoreItem(path, action, replaces, size_bytes))


def reason_of(error: BaseException | str) -> str:
    """Return an error as the reason shown to the operator."""
    if isinstance(error, str):
        return error
    if isinstance(error, CiuicError):
        return error.message
    if isinstance(error, FileExistsError):
        return "another process created it during the restore"
    if isinstance(error, OSError):
        return refusal(error)
    return one_line(str(error).encode("utf-8", "surrogateescape"))


class Outcomes:
    """Records what becomes of each path. An error that ends the whole restore, such as a full disk, stops the pool."""

    def __init__(
        self,
        pool: Pool,
        counter: ResultCounter,
        *,
        dry_run: bool,
        conflicts: frozenset[bytes],
        durable: bool = True,
    ) -> None:
        self._pool = pool
        self._counter = counter
        self._dry_run = dry_run
        self._conflicts = conflicts
        """Conflicts that the plan found; only a dry run is executed with them, and they are no failures there."""
        self.syncer = Syncer(self.failed, durable=durable)

    def failed(self, path: bytes, error: BaseException | str) -> None:
        """Record that a path could not be restored."""
        with self._pool.changed:
            if self._counter.failed(path, error):
                self._pool.stop()

    def left_out(self, path: bytes, what: str) -> None:
        """Record something special that is not restored."""
        with self._pool.changed:
            self._counter.left_out(path, what)

    def removed(self, path: bytes) -> None:
        """Record the top of a removed tree."""
        with self._pool.changed:
            self._counter.removed(path)

    def left_as_is(self, path: bytes, entry: Entry, overwrites: bool) -> None:
        """Record that something exists that may not be replaced.

        Args:
            path: what exists.
            entry: what the snapshot has there.
            overwrites: an overwrite mode was given, so it is left alone as asked; otherwise it is a conflict or a failure.
        """
        if overwrites:
            with self._pool.changed:
                self._counter.left(path, entry)
        elif self._dry_run and path in self._conflicts:
            with self._pool.changed:
                self._counter.conflict(path)
        else:
            self.failed(path, "another process created it during the restore")

    def file_ended(
        self, file: NonDirectory, action: Action, problems: list[str], error: BaseException | None
    ) -> None:
        """Record the end of a non-directory, and let go of its directory; called from any thread."""
        with self._pool.changed:
            if error is None:
                self._counter.done(
                    *(file.path, file.entry, action, problems, file.counted_bytes),
                    replaces=file.existing is not None,
                )
            # What was cut short is no failure of its own: the result, or the interrupt, says why the run
            # ended.
            elif not isinstance(error, RunStopped) and self._counter.failed(file.path, error):
                self._pool.stop()
            # The walk may be waiting for the first name of a link group. It waits for no other file, only for tasks, whose
            # end the pool tells: woken at each file, it took the interpreter lock from the threads at work.
            if file.group is not None:
                file.group.state = "there" if error is None else "failed"
                file.group.inode = file.inode or (0, 0)
                self._pool.changed.notify_all()
        # Outside the lock: the directory's last user sets attributes and syncs, and other threads go on
        # meanwhile.
        self.release(file.folder)

    def release(self, folder: Folder) -> None:
        """Let go of a directory; after the last one that held it, it gets its attributes and is recorded."""
        folder.release(self._pool.changed, self.syncer, self._folder_ended)

    def _folder_ended(self, folder: Folder, problems: list[str]) -> None:
        if folder.entry is not None or (self._dry_run and folder.fresh):
            self._counter.directory(folder.path, problems)
        else:
            self._counter.problems(folder.path, problems)
