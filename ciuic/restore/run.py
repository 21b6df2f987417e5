"""Execute the plan of a restore, one target after the other."""

from __future__ import annotations

import os
import posixpath
from collections.abc import Callable
from pathlib import Path

import msgspec

from ciuic.restore.dispatch import Attempt, Dispatcher, Placeholders
from ciuic.restore.files import attributes
from ciuic.restore.files import journal as journals
from ciuic.restore.files.directory_handles import NOT_THERE, Folder
from ciuic.restore.files.large import Feeder
from ciuic.restore.files.links import Linker
from ciuic.restore.files.pool import Pool
from ciuic.restore.files.result_counter import ResultCounter
from ciuic.restore.files.small import SmallFiles
from ciuic.restore.files.special import SpecialFilter
from ciuic.restore.files.targets import open_parent
from ciuic.restore.limits import many_descriptors
from ciuic.restore.model import RestoreItem, RestorePlan, RestoreProgress, RestoreTarget, Result
from ciuic.restore.outcomes import Outcomes
from ciuic.restore.overwrite_rules import OverwriteRules
from ciuic.restore.walk import Walk
from ciuic.system.mount_border import LEFT_ALONE
from ciuic.types import FLAG_MOUNTPOINT, Entry


def execute(
    plan: RestorePlan,
    *,
    progress: Callable[[RestoreProgress], None] | None = None,
    report: Callable[[RestoreItem], None] | None = None,
    dry_run: bool = False,
    runtime_dir: Path | None = None,
    placeholders: Placeholders | None = None,
) -> Result:
    """Carry out a plan; on return everything counted as restored is durable under its final name.

    A path that fails is listed in `Result.failed`, and the others go on; a full disk ends the restore early
    (`Result.stopped`). KeyboardInterrupt, and what a callback raises, is raised after unfinished files are removed.

    Args:
        plan: the result of `plan_restore`.
        progress: called with the progress; from several threads, one at a time.
        report: called with what became of each path; from several threads, one at a time.
        dry_run: change nothing, and report the same.
        runtime_dir: directory of the overlay workers' sockets. Without it nothing is shared with files of an overlay.
        placeholders: makes files without their content, where it wants to. Names and attributes are not durable on return then.

    Raises:
        Busy: another restore works in the same directory.
        CiuicError: the way to the destination is blocked.
    """
    with many_descriptors():
        return RestoreRun(plan, progress, report, dry_run, runtime_dir, placeholders).execute()


class RestoreRun:
    """Execution of a plan: wires the parts together and restores the targets in turn."""

    def __init__(
        self,
        plan: RestorePlan,
        progress: Callable[[RestoreProgress], None] | None,
        report: Callable[[RestoreItem], None] | None,
        dry_run: bool,
        runtime_dir: Path | None = None,
        placeholders: Placeholders | None = None,
    ) -> None:
        self._plan = plan
        self._dry_run = dry_run
        self._is_durable = placeholders is None
        self._pool = Pool(plan.repository, runtime_dir=runtime_dir)
        self._counter = ResultCounter(plan, dry_run, progress, report)
        self._outcomes = Outcomes(
            *(self._pool, self._counter),
            dry_run=dry_run,
            conflicts=frozenset(plan.conflicts),
            durable=placeholders is None,
        )
        self._special = SpecialFilter(plan.special, self._outcomes.left_out)
        small = SmallFiles(self._pool)
        feeder = Feeder(plan.repository, self._pool, self._counter, dry_run=dry_run, runtime_dir=runtime_dir)
        linker = Linker(self._pool, small, feeder, self._counter, dry_run=dry_run)
        self._dispatcher = Dispatcher(
            *(plan, self._pool, self._outcomes, self._special, small, feeder, linker),
            dry_run=dry_run,
            placeholders=placeholders,
        )
        self._walk = Walk(plan, self._pool, self._outcomes, self._special, self._dispatcher, dry_run=dry_run)
        self._bases: list[int] = []
        self._tops: list[Folder] = []

    def execute(self) -> Result:
        """Restore all targets. Called once."""
        # An interrupt stops the run at the next block, and is raised after unfinished files are removed.
        with self._pool.deferring_interrupts():
            return self._execute()

    def _execute(self) -> Result:
        try:
            for target in self._plan.targets:
                if not self._pool.stopping:
                    self._restore(target)
        except BaseException:
            self._pool.stop()
            raise
        finally:
            # The threads end first: they use the directories that are closed after them.
            self._pool.close()
            for top in self._tops:
                top.leave_all_workplaces()
            # What was renamed into directories is durable after this, and the result may say so.
            self._outcomes.syncer.flush()
            for base in self._bases:
                os.close(base)
        return self._counter.finish()

    def _restore(self, target: RestoreTarget) -> None:
        try:
            parent, chain = open_parent(
                self._plan.repository, self._plan.snapshot, target, dry_run=self._dry_run
            )
        except OSError as error:
            self._outcomes.failed(target.path, error)
            return
        # Through its top a run that is cut short finds the private directories that are left
        # (`leave_all_workplaces`).
        self._tops.append(chain[0])
        for folder in chain:
            if folder.entry is not None:
                folder.entry, folder.xattrs = self._special.permitted(
                    folder.path, folder.entry, folder.xattrs
                )
        attempt = Attempt(
            target,
            self._keep_open(parent),
            journals.new_run(),
            OverwriteRules(self._plan.overwrite, resumed=False),
        )
        entry = msgspec.structs.replace(target.source.entry, name=posixpath.basename(target.path))
        try:
            self._restore_below(attempt, parent, entry)
        finally:
            for folder in reversed(chain):
                self._outcomes.release(folder)

    def _keep_open(self, parent: Folder) -> int:
        """Return a descriptor of the directory that stays open until the run ends: links may be made from it later."""
        if parent.fd == NOT_THERE:
            return NOT_THERE
        base = os.dup(parent.fd)
        self._bases.append(base)
        return base

    def _restore_below(self, attempt: Attempt, parent: Folder, entry: Entry) -> None:
        """Restore the target, whose parent is open, and wait for the threads."""
        journal, top = None, None
        try:
            if self._walk.is_left_out(attempt, parent, entry):
                pass
            elif entry.is_dir:
                source_path = attempt.target.source.path
                top = self._walk.restore_directory(
                    attempt, parent, entry, source_path, set(), is_root=attempt.target.is_root
                )
                # Nothing else is made in it, and a run that is killed leaves less behind.
                parent.leave_workplace()
                if entry.flags & FLAG_MOUNTPOINT:
                    self._outcomes.failed(
                        attempt.target.path,
                        "another file system was mounted there at the snapshot: its content was not captured",
                    )
                elif top is not None:
                    # Held beyond the walk: the directory gets its times after the journal was removed from it.
                    top.hold()
                    journal = self._begin_journal(attempt, top)
                    self._walk.walk(attempt, top, entry)
            else:
                self._dispatcher.restore(attempt, parent, entry)
            self._dispatcher.wait()
        finally:
            if top is not None:
                if journal is not None:
                    self._end_journal(journal, top)
                self._outcomes.release(top)

    def _begin_journal(self, attempt: Attempt, folder: Folder) -> journals.Journal | None:
        """Mark the directory as being restored; an earlier run of the same restore is resumed."""
        source, snapshot = attempt.target.source.path, str(self._plan.snapshot.id)
        journal, resumed = None, False
        if not self._is_durable:
            # The caller has a record of its own.
            return None
        if self._dry_run:
            mark = None if folder.fd == NOT_THERE else journals.read_mark(folder.fd)
            resumed = mark is not None and (mark.snapshot, mark.source) == (snapshot, source)
        else:
            journal = journals.Journal.begin(folder.fd, folder.path, snapshot, source)
            if journal is not None:
                attempt.run, resumed = journal.mark.run, journal.resumed
        attempt.rules = OverwriteRules(self._plan.overwrite, resumed=resumed)
        return journal

    def _end_journal(self, journal: journals.Journal, folder: Folder) -> None:
        # The journal stays while something is missing, so that the next run resumes. Attributes that could not be set, and
        # places where something is mounted, would fail again, and are no reason to keep it.
        if self._pool.stopping or any(
            not failure.attribute and failure.reason != LEFT_ALONE for failure in self._counter.result.failed
        ):
            journal.close()
            return
        # Everything else comes before the journal goes: killed right after it, only the directory's mtime is missing.
        if folder.entry is not None:
            attributes.apply(folder.fd, os.fstat(folder.fd), folder.entry, folder.xattrs)
            # The mode may withhold the removal of the journal; it is put back when the directory is released.
            folder.lift()
        journal.finish()
