"""Execute the plan of a restore: walk the snapshot's tree and the destination side by side, one target after the other.

Guarantees: one thread walks and decides for each name what is to be done; the threads of the pool carry it out. A directory
whose entries cannot all be read loses nothing to --delete.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.errors import Damaged
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.lookup import join, resolve
from ciuic.restore import attributes
from ciuic.restore import journal as journals
from ciuic.restore.attributes import SpecialFilter
from ciuic.restore.content import batch_blocks
from ciuic.restore.destination import (
    Remover,
    is_temporary,
    new_temporary_name,
    rename_new,
    stat_at,
    unlink_if_there,
)
from ciuic.restore.destination_directories import NOT_THERE, Folder, many_descriptors, open_parent
from ciuic.restore.journal import JOURNAL_NAME
from ciuic.restore.model import (
    OverwriteRules,
    RestoreItem,
    RestorePlan,
    RestoreProgress,
    RestoreTarget,
    Result,
)
from ciuic.restore.new_files import NonDirectory
from ciuic.restore.pool import Pool
from ciuic.restore.workers import Feeder, Linker, Outcomes, ResultCounter, SmallFiles
from ciuic.system.mountinfo import LEFT_ALONE
from ciuic.types import FLAG_MOUNTPOINT, Entry


class Placeholders(Protocol):
    """Maker of files whose content comes later."""

    def take(self, file: NonDirectory) -> bool:
        """Make the file without its content, and end it; return False where it is to be restored whole."""
        ...


class Attempt(msgspec.Struct):
    """State of the restore of a single target."""

    target: RestoreTarget
    base: int
    """Descriptor of the directory that the target's name is in; NOT_THERE in a dry run that would make it."""
    run: str
    """16 hexadecimal digits in the names of temporary files."""
    rules: OverwriteRules


class Dispatcher:
    """Gives non-directories to the workers. All methods are for the thread of the walk."""

    def __init__(
        self,
        plan: RestorePlan,
        pool: Pool,
        outcomes: Outcomes,
        special: SpecialFilter,
        small: SmallFiles,
        feeder: Feeder,
        linker: Linker,
        *,
        dry_run: bool,
        placeholders: Placeholders | None = None,
    ) -> None:
        self._plan = plan
        self._placeholders = placeholders
        self._pool = pool
        self._outcomes = outcomes
        self._special = special
        self._small = small
        self._feeder = feeder
        self._linker = linker
        self._dry_run = dry_run
        self._small_bytes = batch_blocks(plan.repository.block_size) * plan.repository.block_size
        """Up to this size a file is one batch, which is one thread's work."""

    def restore(self, attempt: Attempt, folder: Folder, entry: Entry, path: bytes) -> None:
        """Begin to restore a non-directory to ``path``, its name in the folder.

        It ends in `Outcomes.file_ended`, or is recorded as failed or left alone.
        """
        try:
            # Nothing can exist in a directory that this run has made: a system call less for each file.
            existing = None if folder.fresh else status_of(folder, entry.name)
            xattrs = self._plan.repository.trees.xattrs(entry)
        except (OSError, Damaged) as error:
            self._outcomes.failed(path, error)
            return
        rules = attempt.rules
        if existing is not None and not entry.flags & FLAG_MOUNTPOINT and folder.leads_away(entry.name):
            self._outcomes.failed(path, LEFT_ALONE)
            return
        # A file on which another was mounted at the cut: its content is not in the snapshot, so what exists
        # stays.
        if existing is not None and (entry.flags & FLAG_MOUNTPOINT or not rules.may_touch(entry, existing)):
            self._outcomes.left_as_is(path, entry, self._plan.overwrite is not None)
            return
        # After the decision above: a file that is left alone has nothing left out of it.
        entry, xattrs = self._special.permitted(path, entry, xattrs)
        file = NonDirectory(
            folder,
            entry,
            path,
            existing,
            self._outcomes.file_ended,
            xattrs=xattrs,
            run=attempt.run,
            make_remover=self.make_remover,
            content_believed=existing is not None and rules.believes_content(entry, existing),
            dry_run=self._dry_run,
        )
        # Held until the file's end (`Outcomes.file_ended`), under the lock that guards the count.
        with self._pool.changed:
            folder.hold()
        if not entry.link or not self._is_linked(attempt, file):
            self._give_out(file)

    def write_again(self) -> None:
        """Write the large files that turned out to differ, if there are any."""
        # Looked at without the lock, between any two entries: a late answer costs one entry.
        if self._feeder.again:
            self._feeder.write_again()

    def wait(self) -> None:
        """Return when everything given out has ended."""
        # The last group is seldom full, and no thread has been given it.
        self._small.flush()
        while True:
            self._pool.wait(lambda: bool(self._feeder.again) or self._pool.idle())
            # Files that are written again may take part in another round of waiting.
            if not self._feeder.write_again():
                return

    def make_remover(self) -> Remover:
        """Return a remover that spares what the plan keeps."""
        kept = self._plan.kept
        return Remover(kept.inodes, kept.rule, self._dry_run, stays=kept.directory_rule)

    def _is_linked(self, attempt: Attempt, file: NonDirectory) -> bool:
        # The names are computed when they are needed: each link group would otherwise keep names that may be thousands.
        parent = posixpath.dirname(attempt.target.path).rstrip(b"/") + b"/"
        folder, name = file.folder, file.entry.name

        def names() -> list[bytes]:
            return join(folder.path, name)[len(parent) :].split(b"/")

        return self._linker.link(file, attempt.target.source.root.path, attempt.base, names)

    def _give_out(self, file: NonDirectory) -> None:
        entry, existing = file.entry, file.existing
        if self._placeholders is not None and self._placeholders.take(file):
            return
        if self._dry_run and existing is None:
            # Nothing is compared: no thread, with a repository opened for it, is needed.
            file.done("restored", [])
        elif not entry.is_file or entry.size_bytes <= self._small_bytes:
            self._small.add(file)
        elif existing is None or not stat.S_ISREG(existing.st_mode):
            self._feeder.write(file)
        elif file.content_believed:
            # Nothing is read or written: as cheap as a small file.
            self._small.add(file)
        else:
            self._feeder.compare(file)


def status_of(folder: Folder, name: bytes) -> os.stat_result | None:
    """Return the status of a name in a directory; None if either does not exist."""
    return None if folder.fd == NOT_THERE else stat_at(folder.fd, name)


class _Frame(msgspec.Struct):
    """A directory whose entries are being walked through."""

    folder: Folder
    entries: Iterator[Entry]
    extra: set[bytes] = msgspec.field(default_factory=set)
    """Names in the destination that the snapshot has not shown yet."""
    whole: bool = True
    """All entries could be read."""
    inodes: set[int] = msgspec.field(default_factory=set)
    """Inodes of the subdirectories that were restored already."""


class Walk:
    """Walks the directories of all targets of a run, one target after the other."""

    def __init__(
        self,
        plan: RestorePlan,
        pool: Pool,
        outcomes: Outcomes,
        special: SpecialFilter,
        dispatcher: Dispatcher,
        *,
        dry_run: bool,
    ) -> None:
        self._plan = plan
        self._pool = pool
        self._outcomes = outcomes
        self._special = special
        self._dispatcher = dispatcher
        self._dry_run = dry_run
        self._stack: list[_Frame] = []
        self._lineage = Lineage()

    def walk(self, attempt: Attempt, top: Folder, entry: Entry) -> None:
        """Restore everything below a directory; what the threads do may go on after the return."""
        self._push(attempt, top, entry)
        while self._stack:
            frame = self._stack[-1]
            # Only this thread may feed large files, so it looks between any two entries for those that turned out to differ.
            self._dispatcher.write_again()
            entry_or_none = None if self._pool.stopping else self._next(attempt, frame)
            if entry_or_none is not None:
                self._visit(attempt, frame, entry_or_none)
                continue
            self._stack.pop()
            self._lineage.leave()
            # Not after an error in the directory's list: a name that could not be read would be taken for an extra one.
            if self._plan.delete and frame.whole and not self._pool.stopping:
                # Remove what the snapshot does not have in this directory.
                self._delete_names(frame.folder, sorted(frame.extra))
            self._outcomes.release(frame.folder)

    def is_left_out(self, attempt: Attempt, folder: Folder, entry: Entry, path: bytes) -> bool:
        """Return whether the entry, of this path in the destination, is something special that is not restored, which is recorded."""
        # Asked last: hardly any name is that of a root's state.
        is_state = entry.name == STATE_DIR_NAME and folder.source_path == attempt.target.source.root.path
        return self._special.leaves_out(path, entry, is_state=is_state)

    def restore_directory(
        self,
        attempt: Attempt,
        parent: Folder,
        entry: Entry,
        source_path: bytes,
        siblings: set[int],
        *,
        is_root: bool = False,
    ) -> Folder | None:
        """Open or create a directory in the destination; None if it is left alone or failed, which is recorded.

        Args:
            attempt: the target's restore.
            parent: directory that it is in.
            entry: what the snapshot has.
            source_path: its path at the snapshot.
            siblings: inodes of the directories in ``parent`` that were restored already; gets its inode.
            is_root: the directory is a root's top, which is restored into whatever is mounted there.
        """
        path, folder = join(parent.path, entry.name), None
        try:
            existing = None if parent.fresh else status_of(parent, entry.name)
            if existing is not None and not is_root and parent.leads_away(entry.name):
                # The top of another file system: neither its attributes nor anything in it are the snapshot's.
                if not entry.flags & FLAG_MOUNTPOINT:
                    self._outcomes.failed(path, LEFT_ALONE)
                return None
            # A new directory counts as a user of its parent, and the counts are guarded by this lock.
            with self._pool.changed:
                if existing is not None and stat.S_ISDIR(existing.st_mode):
                    folder = Folder.enter(parent, entry.name, source_path)
                    if not self._dry_run:
                        folder.lift()
                elif existing is None:
                    folder = Folder.make(
                        parent, entry.name, source_path, run=attempt.run, dry_run=self._dry_run
                    )
                elif not attempt.rules.may_replace(entry, existing):
                    self._outcomes.left_as_is(path, entry, self._plan.overwrite is not None)
                    return None
                else:
                    folder = self._replace_by_directory(attempt, parent, entry, source_path)
            # In a fresh directory no other user can move anything.
            if not self._dry_run and not parent.fresh:
                _check_only_once(folder, siblings)
            xattrs = self._plan.repository.trees.xattrs(entry)
        except (OSError, Damaged) as error:
            self._outcomes.failed(path, error)
            # Not released, it would hold its parent for ever, which would then never get its own attributes.
            if folder is not None:
                self._outcomes.release(folder)
            return None
        selection = attempt.target.selection
        if (
            folder.fresh
            or existing is None
            or (
                attempt.rules.sets_directory_attributes(entry, existing)
                and not (selection is not None and selection.only_leads(source_path))
            )
        ):
            entry, xattrs = self._special.permitted(path, entry, xattrs)
            if not self._dry_run:
                folder.entry, folder.xattrs = entry, xattrs
                # Rights are taken before anything is restored into it, and given when everything below is done.
                if not folder.fresh:
                    attributes.narrow(folder.fd, os.fstat(folder.fd), entry, xattrs)
        return folder

    def _push(self, attempt: Attempt, folder: Folder, entry: Entry) -> None:
        self._lineage.enter(entry.content)
        frame = _Frame(folder, self._plan.repository.trees.entries(entry.content))
        if not folder.fresh:
            frame.extra = self._names_in(attempt, folder)
        self._stack.append(frame)

    def _next(self, attempt: Attempt, frame: _Frame) -> Entry | None:
        """Return the directory's next entry, with its attributes; one that cannot be read is recorded and skipped."""
        while True:
            try:
                entry = next(frame.entries, None)
            except Damaged as error:
                frame.whole = False
                self._outcomes.failed(frame.folder.path, error)
                return None
            if entry is None:
                return None
            # Before the entry is resolved: a name that the snapshot has is no extra one, even if the rest of
            # it cannot be read.
            frame.extra.discard(entry.name)
            try:
                return resolve(self._plan.repository, attempt.target.source.root, entry)
            except Damaged as error:
                self._outcomes.failed(join(frame.folder.path, entry.name), error)

    def _visit(self, attempt: Attempt, frame: _Frame, entry: Entry) -> None:
        # The journal of a restore that was running when the snapshot was made means nothing now.
        if entry.name == JOURNAL_NAME and len(self._stack) == 1:
            return
        parent, is_dir, selection = frame.folder, entry.is_dir, attempt.target.selection
        if selection is not None and not selection.has(join(parent.source_path, entry.name), is_dir):
            # The snapshot has nothing below it that is chosen, so all that exists there and is chosen is extra.
            if is_dir and self._plan.delete and not parent.fresh and not parent.leads_away(entry.name):
                self._delete_names(parent, [entry.name])
            return
        path = join(parent.path, entry.name)
        if self.is_left_out(attempt, parent, entry, path):
            return
        if not is_dir:
            self._dispatcher.restore(attempt, parent, entry, path)
            return
        source_path = join(parent.source_path, entry.name)
        folder = self.restore_directory(attempt, parent, entry, source_path, frame.inodes)
        if folder is None:
            return
        # The content of a mount point was never part of the snapshot.
        if entry.flags & FLAG_MOUNTPOINT:
            self._outcomes.release(folder)
            return
        try:
            self._push(attempt, folder, entry)
        except Damaged as error:
            self._outcomes.failed(folder.path, error)
            self._outcomes.release(folder)

    def _names_in(self, attempt: Attempt, folder: Folder) -> set[bytes]:
        """Remove temporary files of a run that was cut short; return the other names in the destination."""
        names = set()
        for name in map(os.fsencode, os.listdir(folder.fd)):
            # Only names with this run's id, which a journal hands on: another restore may be at work below.
            if is_temporary(name, attempt.run):
                if not self._dry_run:
                    Remover().remove(folder.fd, name, join(folder.path, name), b"")
            # The state of a root and the journal are no content, so --delete must not take them for extra
            # names.
            elif name != STATE_DIR_NAME and (self._stack or name != JOURNAL_NAME):
                names.add(name)
        return names

    def _replace_by_directory(
        self, attempt: Attempt, parent: Folder, entry: Entry, source_path: bytes
    ) -> Folder:
        """Replace a file by a directory; the file is put back if the directory cannot be created."""
        if self._dry_run:
            return Folder.make(parent, entry.name, source_path, run=attempt.run, dry_run=True)
        # Moved aside, not unlinked: mkdir may fail, and then the file must still be there.
        aside = new_temporary_name(attempt.run)
        os.rename(entry.name, aside, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        try:
            folder = Folder.make(parent, entry.name, source_path, run=attempt.run, dry_run=False)
        except OSError:
            rename_new(parent.fd, aside, parent.fd, entry.name)
            raise
        unlink_if_there(parent.fd, aside)
        return folder

    def _delete_names(self, folder: Folder, names: Sequence[bytes]) -> None:
        remover = self._dispatcher.make_remover()
        for name in names:
            path = join(folder.path, name)
            if status_of(folder, name) is None:
                continue
            if remover.remove(folder.fd, name, path, join(folder.source_path, name)):
                self._outcomes.removed(path)
        for path in remover.removed_below:
            self._outcomes.removed(path)
        for path, reason in remover.failures:
            self._outcomes.failed(path, reason)


def _check_only_once(folder: Folder, siblings: set[int]) -> None:
    """Raise OSError if the directory was restored under another name of its parent already.

    Another user moved it then, and with the owner recorded for this name its content would be given away. Checking within one
    parent is enough: a user who does not own a directory cannot move it to another parent (rename(2), EACCES).
    """
    inode = os.fstat(folder.fd).st_ino
    if inode in siblings:
        raise OSError(
            errno.EBUSY, "a directory that was just restored under another name has been moved here"
        )
    siblings.add(inode)


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
        self._bases: list[tuple[bytes, int]] = []
        self._journals: list[journals.Journal] = []
        """Those of targets of which something is missing."""
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
            # Left for the next run.
            for journal in self._journals:
                journal.close()
            for _, base in self._bases:
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
            self._keep_open(parent, posixpath.dirname(target.path)),
            journals.new_run(),
            OverwriteRules(self._plan.overwrite, resumed=False, cut_ns=self._plan.snapshot.time_ns),
        )
        entry = msgspec.structs.replace(target.source.entry, name=posixpath.basename(target.path))
        try:
            self._restore_below(attempt, parent, entry)
        finally:
            for folder in reversed(chain):
                self._outcomes.release(folder)

    def _keep_open(self, parent: Folder, path: bytes) -> int:
        """Return a descriptor of the directory that stays open until the run ends: links may be made from it later."""
        if parent.fd == NOT_THERE:
            return NOT_THERE
        base = os.dup(parent.fd)
        self._bases.append((path, base))
        return base

    def _restore_below(self, attempt: Attempt, parent: Folder, entry: Entry) -> None:
        """Restore the target, whose parent is open, and wait for the threads."""
        journal, top = None, None
        path = join(parent.path, entry.name)
        try:
            if self._walk.is_left_out(attempt, parent, entry, path):
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
                self._dispatcher.restore(attempt, parent, entry, path)
            self._dispatcher.wait()
        finally:
            if top is not None:
                if journal is not None:
                    self._end_journal(journal, top)
                self._outcomes.release(top)

    def _begin_journal(self, attempt: Attempt, folder: Folder) -> journals.Journal | None:
        """Mark the directory as being restored; an earlier run of the same restore is resumed."""
        source, snapshot = attempt.target.mark, str(self._plan.snapshot.id)
        journal, resumed = None, False
        if not self._is_durable:
            # The caller has a record of its own.
            return None
        if self._dry_run:
            mark = None if folder.fd == NOT_THERE else journals.read_mark(folder.fd)
            resumed = mark is not None and mark.is_of(snapshot, source)
        else:
            journal = journals.Journal.begin(folder.fd, folder.path, snapshot, source)
            if journal is not None:
                attempt.run, resumed = journal.mark.run, journal.resumed
        attempt.rules = OverwriteRules(
            self._plan.overwrite, resumed=resumed, cut_ns=self._plan.snapshot.time_ns
        )
        return journal

    def _end_journal(self, journal: journals.Journal, folder: Folder) -> None:
        # It stays for the next run where something is missing; locked until this run ends.
        if self._pool.stopping or self._is_to_be_resumed():
            self._journals.append(journal)
            return
        # Everything else comes before the journal goes: killed right after it, only the directory's mtime is missing.
        try:
            if folder.entry is not None:
                attributes.apply(folder.fd, os.fstat(folder.fd), folder.entry, folder.xattrs)
                # The mode may withhold the removal of the journal; it is put back when the directory is released.
                folder.lift()
        except BaseException:
            journal.close()
            raise
        journal.finish()

    def _is_to_be_resumed(self) -> bool:
        """Return whether something is missing, so that the journal stays and the next run resumes.

        Attributes that could not be set, and places where something is mounted, would fail again, and are no reason to keep it.
        """
        return any(
            not failure.attribute and failure.reason != LEFT_ALONE for failure in self._counter.result.failed
        )
