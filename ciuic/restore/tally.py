"""Counting and telling: the result of a restore, its progress, and what becomes of each path."""

from __future__ import annotations

import errno
from collections.abc import Callable

from ciuic.errors import CiuicError, Damaged
from ciuic.lookup import readable
from ciuic.restore.attributes import OWNER
from ciuic.restore.model import Action, Failure, Item, LeftOut, Plan, Progress, Result
from ciuic.types import FLAG_OPEN_FOR_WRITING, Entry
from ciuic.units import plural

_ENDS_IT_ALL = {
    errno.ENOSPC: "the destination is full",
    errno.EDQUOT: "the disk quota is used up",
    errno.EROFS: "the destination is on a read-only file system",
}


class Tally:
    """All methods are called under one lock (Pool.changed), so callbacks come one at a time."""

    def __init__(
        self,
        plan: Plan,
        dry_run: bool,
        progress: Callable[[Progress], None] | None,
        report: Callable[[Item], None] | None,
    ) -> None:
        self.result = Result(dry_run=dry_run)
        self._plan = plan
        self._progress = progress
        self._report = report
        self._bytes_done = 0
        self._files_done = 0
        self._without_owner = b""

    def left(self, path: bytes, entry: Entry) -> None:
        """Left alone, as asked."""
        self.result.skipped += 1
        self._advance(path, entry)
        self._tell(path, "skipped")

    def done(
        self, path: bytes, entry: Entry, action: Action, problems: list[str], counted_bytes: int = 0
    ) -> None:
        """A non-directory is what it was at the snapshot."""
        if action in ("skipped", "attributes"):
            self.result.skipped += 1
        else:
            self.result.restored += 1
            self.result.restored_bytes += entry.size_bytes if entry.is_file and action == "restored" else 0
        if entry.flags & FLAG_OPEN_FOR_WRITING:
            self.result.open_for_writing.append(path)
        if self._plan.snapshot.may_be_later(entry):
            self.result.not_held.append(path)
        self.problems(path, problems)
        self._advance(path, entry, counted_bytes)
        self._tell(path, action)

    def directory(self, path: bytes, problems: list[str]) -> None:
        self.result.directories += 1
        self.problems(path, problems)

    def left_out(self, path: bytes, what: str) -> None:
        """Something special is not restored."""
        self.result.left_out.append(LeftOut(path, what))
        self.result.left_out_because = self._plan.foreign_reason

    def conflict(self, path: bytes) -> None:
        """Tell of a path that would stop the restore; `Plan.conflicts` lists it."""
        self._tell(path, "conflict")

    def removed(self, path: bytes) -> None:
        self.result.removed.append(path)
        self._tell(path, "removed")

    def problems(self, path: bytes, problems: list[str]) -> None:
        """Attributes that could not be set."""
        for problem in problems:
            if problem == OWNER:
                self._without_owner = self._without_owner or path
                self.result.owner_failures += 1
            else:
                self.result.failed.append(Failure(path, problem, attribute=True))

    def failed(self, path: bytes, error: BaseException | str) -> bool:
        """Notes it; whether it is of a kind that ends the restore."""
        ends = ""
        if isinstance(error, OSError):
            ends = _ENDS_IT_ALL.get(error.errno or 0, "")
        self.result.failed.append(Failure(path, reason_of(error), damaged=isinstance(error, Damaged)))
        self._tell(path, "failed")
        if ends and not self.result.stopped:
            self.result.stopped = f"{ends}; what was not reached yet is missing"
        return bool(ends)

    def finish(self) -> Result:
        count = self.result.owner_failures
        if count:
            others = f" (nor that of {plural(count - 1, 'other')})" if count > 1 else ""
            reason = f"its owner could not be set{others}: not permitted; run as root for exact owners"
            self.result.failed.append(Failure(self._without_owner, reason, attribute=True))
        return self.result

    def part(self, path: bytes, size_bytes: int) -> None:
        """Part of a large file is written; `done` is told not to count it again."""
        self._bytes_done += size_bytes
        self._show(path)

    def _advance(self, path: bytes, entry: Entry, counted_bytes: int = 0) -> None:
        self._files_done += 1
        if entry.is_file:
            self._bytes_done += entry.size_bytes - counted_bytes
        self._show(path)

    def _show(self, path: bytes) -> None:
        if self._progress is not None:
            bytes_total = max(self._plan.bytes_total, self._bytes_done)
            files_total = max(self._plan.files_total, self._files_done)
            self._progress(Progress(self._bytes_done, bytes_total, self._files_done, files_total, path))

    def _tell(self, path: bytes, action: Action) -> None:
        if self._report is not None:
            self._report(Item(path, action))


def reason_of(error: BaseException | str) -> str:
    if isinstance(error, str):
        return error
    if isinstance(error, CiuicError):
        return error.message
    if isinstance(error, FileExistsError):
        return "something appeared there meanwhile"
    if isinstance(error, OSError):
        return error.strerror or str(error)
    return readable(str(error).encode("utf-8", "surrogateescape"))
