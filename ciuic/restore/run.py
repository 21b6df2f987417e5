"""The walk of a restore: snapshot and destination side by side, deciding for each name what is to be done.

Guarantees: the walk is in one thread and decides alone; threads carry out (pool, leaf). A directory whose entries cannot
all be read loses nothing to --delete.
"""

from __future__ import annotations

import errno
import os
import posixpath
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ciuic import STATE_DIR_NAME
from ciuic.errors import Damaged
from ciuic.lookup import join, resolve
from ciuic.repository.trees import Lineage
from ciuic.restore import attributes
from ciuic.restore import journal as journals
from ciuic.restore.content import batch_blocks
from ciuic.restore.destination import (
    Remover,
    is_temporary,
    new_temporary_name,
    rename_new,
    stat_at,
    unlink_if_there,
)
from ciuic.restore.folders import NOT_THERE, Folder, Syncer
from ciuic.restore.large import Feeder
from ciuic.restore.leaf import Leaf
from ciuic.restore.links import Linker
from ciuic.restore.model import Action, Item, Overwrite, Plan, Progress, Result, Target
from ciuic.restore.pool import Pool, Stopped
from ciuic.restore.small import SmallFiles
from ciuic.restore.special import SpecialFilter
from ciuic.restore.tally import Tally
from ciuic.restore.targets import open_parent
from ciuic.types import FLAG_MOUNTPOINT, Entry


@dataclass
class _Frame:
    """A directory whose entries are being walked through."""

    folder: Folder
    entries: Iterator[Entry]
    extra: set[bytes] = field(default_factory=set)
    """Names in the destination that the snapshot has not shown yet."""
    whole: bool = True
    inodes: set[int] = field(default_factory=set)
    """Of the directories below that were restored already."""


class Run:
    """One execution of a plan."""

    def __init__(
        self,
        plan: Plan,
        progress: Callable[[Progress], None] | None,
        report: Callable[[Item], None] | None,
        dry_run: bool,
        runtime_dir: Path | None = None,
    ) -> None:
        self.plan = plan
        self.dry_run = dry_run
        self.pool = Pool(plan.repository.path, runtime_dir=runtime_dir)
        self.tally = Tally(plan, dry_run, progress, report)
        self.filter = SpecialFilter(plan.special, self._left_out)
        self.feeder = Feeder(plan.repository, self.pool, self.tally, dry_run=dry_run, runtime_dir=runtime_dir)
        self.small = SmallFiles(self.pool, self._believed)
        self.linker = Linker(self.pool, self.small, self.feeder, self.tally, dry_run=dry_run)
        self._small_bytes = batch_blocks(plan.repository.block_size) * plan.repository.block_size
        self._target = plan.targets[0]
        self._base = NOT_THERE
        self._bases: list[int] = []
        self._tops: list[Folder] = []
        self.syncer = Syncer(self._failed)
        self._run = journals.new_run()
        self._resumed = False
        self._stack: list[_Frame] = []
        self._lineage = Lineage()
        self._conflicts = frozenset(plan.conflicts)
        """Only a dry run gets here with conflicts: they were found before, and are no failures."""

    def execute(self) -> Result:
        with self.pool.deferring_interrupts():
            return self._execute()

    def _execute(self) -> Result:
        try:
            for target in self.plan.targets:
                if not self.pool.stopping:
                    self._restore(target)
        except BaseException:
            self.pool.stop()
            raise
        finally:
            self.pool.close()
            for top in self._tops:
                top.leave_all_workplaces()
            self.syncer.flush()
            for base in self._bases:
                os.close(base)
        return self.tally.finish()

    # -- one target

    def _restore(self, target: Target) -> None:
        self._target = target
        try:
            parent, chain = open_parent(
                self.plan.repository, self.plan.snapshot, target, dry_run=self.dry_run
            )
        except OSError as error:
            self._failed(target.path, error)
            return
        self._tops.append(chain[0])
        for folder in chain:
            if folder.entry is not None:
                folder.entry, folder.xattrs = self.filter.permitted(folder.path, folder.entry, folder.xattrs)
        self._base = os.dup(parent.fd) if parent.fd != NOT_THERE else NOT_THERE
        if self._base != NOT_THERE:
            self._bases.append(self._base)
        entry = _named(target.source.entry, posixpath.basename(target.path))
        journal, held = None, None
        try:
            if self._is_left_out(parent, entry):
                pass
            elif entry.is_dir:
                held = self._directory(parent, entry, target.source.path, set())
                parent.leave_workplace()  # nothing else is made in it, and a run that is killed leaves less behind
                if held is not None:
                    held.hold()
                    journal = self._begin_journal(held)
                    self._walk_into(held, entry)
            else:
                self._run, self._resumed = journals.new_run(), False
                self._leaf(parent, entry)
            self._finish_work()
        finally:
            if held is not None:
                if journal is not None:
                    self._end_journal(journal, held)
                held.release(self.pool.changed, self.syncer, self._folder_done)
            for folder in reversed(chain):
                folder.release(self.pool.changed, self.syncer, self._folder_done)

    def _begin_journal(self, folder: Folder) -> journals.Journal | None:
        self._run, self._resumed = journals.new_run(), False
        source, snapshot = self._target.source.path, str(self.plan.snapshot.id)
        if self.dry_run:
            mark = None if folder.fd == NOT_THERE else journals.read_mark(folder.fd)
            self._resumed = mark is not None and (mark.snapshot, mark.source) == (snapshot, source)
            return None
        journal = journals.Journal.begin(folder.fd, folder.path, snapshot, source)
        if journal is not None:
            self._run, self._resumed = journal.mark.run, journal.resumed
        return journal

    def _end_journal(self, journal: journals.Journal, folder: Folder) -> None:
        if self.pool.stopping or any(not failure.attribute for failure in self.tally.result.failed):
            journal.close()
        else:
            # Everything else comes first: killed right here, only the directory's mtime is missing.
            if folder.entry is not None:
                attributes.apply(folder.fd, os.fstat(folder.fd), folder.entry, folder.xattrs)
            journal.finish()

    def _finish_work(self) -> None:
        self.small.flush()
        while True:
            self.pool.wait(lambda: bool(self.feeder.again) or self.pool.idle())
            if not self.feeder.write_again():
                return

    # -- directories

    def _walk_into(self, top: Folder, entry: Entry) -> None:
        self._push(top, entry)
        while self._stack:
            frame = self._stack[-1]
            if self.feeder.again:
                self.feeder.write_again()
            entry_or_none = None if self.pool.stopping else self._next(frame)
            if entry_or_none is not None:
                self._visit(frame, entry_or_none)
                continue
            self._stack.pop()
            self._lineage.leave()
            if self.plan.delete and frame.whole and not self.pool.stopping:
                self._delete_extra(frame)
            frame.folder.release(self.pool.changed, self.syncer, self._folder_done)

    def _next(self, frame: _Frame) -> Entry | None:
        """The directory's next entry, with its attributes; what cannot be read is noted and passed over."""
        while True:
            try:
                entry = next(frame.entries, None)
            except Damaged as error:
                frame.whole = False
                self._failed(frame.folder.path, error)
                return None
            if entry is None:
                return None
            frame.extra.discard(entry.name)
            try:
                return resolve(self.plan.repository, self._target.source.root, entry)
            except Damaged as error:
                self._failed(join(frame.folder.path, entry.name), error)

    def _visit(self, frame: _Frame, entry: Entry) -> None:
        if entry.name == journals.JOURNAL_NAME and len(self._stack) == 1:
            return  # of a restore that was running at the snapshot: it says nothing now
        if self._is_left_out(frame.folder, entry):
            return
        if not entry.is_dir:
            self._leaf(frame.folder, entry)
            return
        source_path = join(frame.folder.source_path, entry.name)
        folder = self._directory(frame.folder, entry, source_path, frame.inodes)
        if folder is None:
            return
        if entry.flags & FLAG_MOUNTPOINT:  # its content was never part of the snapshot
            folder.release(self.pool.changed, self.syncer, self._folder_done)
            return
        try:
            self._push(folder, entry)
        except Damaged as error:
            self._failed(folder.path, error)
            folder.release(self.pool.changed, self.syncer, self._folder_done)

    def _is_left_out(self, folder: Folder, entry: Entry) -> bool:
        top = folder.source_path == self._target.source.root.path
        return self.filter.leaves_out(join(folder.path, entry.name), entry, top_of_root=top)

    def _push(self, folder: Folder, entry: Entry) -> None:
        self._lineage.enter(entry.content)
        frame = _Frame(folder, self.plan.repository.trees.entries(entry.content))
        if not folder.fresh:
            frame.extra = self._names_in(folder)
        self._stack.append(frame)

    def _names_in(self, folder: Folder) -> set[bytes]:
        """What is in the destination, after the temporary files of the run that was cut short are gone."""
        names = set()
        for name in map(os.fsencode, os.listdir(folder.fd)):
            if is_temporary(name, self._run):
                if not self.dry_run:
                    Remover().remove(folder.fd, name, join(folder.path, name), b"")
            elif name != STATE_DIR_NAME and (self._stack or name != journals.JOURNAL_NAME):
                names.add(name)
        return names

    def _directory(
        self, parent: Folder, entry: Entry, source_path: bytes, siblings: set[int]
    ) -> Folder | None:
        """The directory in the destination, made if it must be; None if it is left out, which has been told.

        ``siblings``: inodes of the directories in ``parent`` that were restored already.
        """
        path, folder = join(parent.path, entry.name), None
        try:
            st = None if parent.fresh else _stat(parent, entry.name)
            with self.pool.changed:
                if st is not None and stat.S_ISDIR(st.st_mode):
                    folder = Folder.enter(parent, entry.name, source_path)
                elif st is None:
                    folder = Folder.make(parent, entry.name, source_path, run=self._run, dry_run=self.dry_run)
                elif not self._may_replace(entry, st):
                    self._left_or_failed(path, entry)
                    return None
                else:
                    folder = self._replace_by_directory(parent, entry, source_path)
            if not self.dry_run and not parent.fresh and not entry.flags & FLAG_MOUNTPOINT:
                _never_twice(folder, siblings)
            xattrs = self.plan.repository.trees.xattrs(entry)
        except (OSError, Damaged) as error:
            self._failed(path, error)
            if (
                folder is not None
            ):  # or the parent would wait for it for ever, and never get its own attributes
                folder.release(self.pool.changed, self.syncer, self._folder_done)
            return None
        if self._sets_attributes(folder, entry, st):
            entry, xattrs = self.filter.permitted(path, entry, xattrs)
            if not self.dry_run:
                folder.entry, folder.xattrs = entry, xattrs
                if not folder.fresh:
                    attributes.narrow(folder.fd, os.fstat(folder.fd), entry, xattrs)
        return folder

    def _replace_by_directory(self, parent: Folder, entry: Entry, source_path: bytes) -> Folder:
        """A directory instead of a file. The file is put back if the directory cannot be made."""
        if self.dry_run:
            return Folder.make(parent, entry.name, source_path, run=self._run, dry_run=True)
        aside = new_temporary_name(self._run)
        os.rename(entry.name, aside, src_dir_fd=parent.fd, dst_dir_fd=parent.fd)
        try:
            folder = Folder.make(parent, entry.name, source_path, run=self._run, dry_run=False)
        except OSError:
            rename_new(parent.fd, aside, parent.fd, entry.name)
            raise
        unlink_if_there(parent.fd, aside)
        return folder

    def _sets_attributes(self, folder: Folder, entry: Entry, st: os.stat_result | None) -> bool:
        if folder.fresh or st is None:
            return True
        if entry.flags & FLAG_MOUNTPOINT and folder.parent and st.st_dev != os.fstat(folder.parent.fd).st_dev:
            return False  # another file system is mounted there again: this is its directory
        if self.plan.overwrite is Overwrite.NEVER:
            return False
        return self.plan.overwrite is not Overwrite.IF_NEWER or entry.mtime_ns > st.st_mtime_ns

    def _delete_extra(self, frame: _Frame) -> None:
        remover = self._remover()
        remover.dry_run = self.dry_run
        folder = frame.folder
        for name in sorted(frame.extra):
            path = join(folder.path, name)
            gone = remover.remove(folder.fd, name, path, join(folder.source_path, name))
            with self.pool.changed:
                if gone:
                    self.tally.removed(path)
        for path, reason in remover.failures:
            self._failed(path, reason)

    def _remover(self) -> Remover:
        return Remover(self.plan.kept.inodes, self.plan.kept.rule)

    def _folder_done(self, folder: Folder, problems: list[str]) -> None:
        if folder.entry is not None or (self.dry_run and folder.fresh):
            self.tally.directory(folder.path, problems)
        else:
            self.tally.problems(folder.path, problems)

    # -- everything else

    def _may_replace(self, entry: Entry, st: os.stat_result) -> bool:
        mode = self.plan.overwrite
        if mode is Overwrite.IF_NEWER:
            return entry.mtime_ns > st.st_mtime_ns
        return mode in (Overwrite.ALWAYS, Overwrite.IF_CHANGED)

    def _left_or_failed(self, path: bytes, entry: Entry) -> None:
        if self.plan.overwrite is not None:
            with self.pool.changed:
                self.tally.left(path, entry)
        elif self.dry_run and path in self._conflicts:
            with self.pool.changed:
                self.tally.conflict(path)
        else:
            self._failed(path, "something appeared there meanwhile")

    def _leaf(self, folder: Folder, entry: Entry) -> None:
        path = join(folder.path, entry.name)
        try:
            st = None if folder.fresh else _stat(folder, entry.name)
            xattrs = self.plan.repository.trees.xattrs(entry)
        except (OSError, Damaged) as error:
            self._failed(path, error)
            return
        if st is not None and (entry.flags & FLAG_MOUNTPOINT or not self._concerns(entry, st)):
            self._left_or_failed(path, entry)
            return
        entry, xattrs = self.filter.permitted(path, entry, xattrs)
        leaf = Leaf(
            folder,
            entry,
            path,
            st,
            self._leaf_done,
            xattrs=xattrs,
            run=self._run,
            make_remover=self._remover,
            dry_run=self.dry_run,
        )
        with self.pool.changed:
            folder.hold()
        if not entry.link or not self._linked(leaf):
            self._do(leaf)

    def _linked(self, leaf: Leaf) -> bool:
        parent = posixpath.dirname(self._target.path).rstrip(b"/") + b"/"
        folder, name = leaf.folder, leaf.entry.name

        def names() -> list[bytes]:
            return join(folder.path, name)[len(parent) :].split(b"/")

        return self.linker.link(leaf, self._target.source.root.path, self._base, names)

    def _concerns(self, entry: Entry, st: os.stat_result) -> bool:
        """Whether what exists there may be touched."""
        if self._may_replace(entry, st):
            return True
        return self.plan.overwrite is None and self._resumed and believed_equal(entry, st)

    def _do(self, leaf: Leaf) -> None:
        entry, st = leaf.entry, leaf.existing
        if not entry.is_file or entry.size_bytes <= self._small_bytes:
            self.small.add(leaf)
        elif st is None or not stat.S_ISREG(st.st_mode):
            self.feeder.write(leaf)
        elif self._believed(leaf):
            self.small.add(leaf)
        else:
            self.feeder.compare(leaf)

    def _believed(self, leaf: Leaf) -> bool:
        return self._believes and leaf.existing is not None and believed_equal(leaf.entry, leaf.existing)

    @property
    def _believes(self) -> bool:
        return self.plan.overwrite is Overwrite.IF_CHANGED or self._resumed

    # -- what became of it

    def _leaf_done(
        self, leaf: Leaf, action: Action, problems: list[str], error: BaseException | None
    ) -> None:
        with self.pool.changed:
            if error is None:
                self.tally.done(leaf.path, leaf.entry, action, problems, leaf.counted_bytes)
            elif not isinstance(error, Stopped) and self.tally.failed(leaf.path, error):
                self.pool.stop()
            if leaf.group is not None:
                leaf.group.state = "there" if error is None else "failed"
                leaf.group.inode = leaf.inode or (0, 0)
            self.pool.changed.notify_all()
        leaf.folder.release(self.pool.changed, self.syncer, self._folder_done)

    def _left_out(self, path: bytes, what: str) -> None:
        with self.pool.changed:
            self.tally.left_out(path, what)

    def _failed(self, path: bytes, error: BaseException | str) -> None:
        with self.pool.changed:
            if self.tally.failed(path, error):
                self.pool.stop()


def believed_equal(entry: Entry, st: os.stat_result) -> bool:
    """Same type, size and modification time: to the nanosecond, as a restore sets it."""
    return (
        stat.S_IFMT(entry.mode) == stat.S_IFMT(st.st_mode)
        and entry.mtime_ns == st.st_mtime_ns
        and (not entry.is_file or entry.size_bytes == st.st_size)
    )


def _never_twice(folder: Folder, siblings: set[int]) -> None:
    """OSError if the directory was restored under another name of its parent: somebody moved it, and with the owner recorded
    for this name its content would be given away. Only within one parent can it be moved by somebody else (rename(2), EACCES).
    """
    inode = os.fstat(folder.fd).st_ino
    if inode in siblings:
        raise OSError(errno.EBUSY, "a directory that was just restored under another name was moved here")
    siblings.add(inode)


def _named(entry: Entry, name: bytes) -> Entry:
    return msgspec.structs.replace(entry, name=name)


def _stat(folder: Folder, name: bytes) -> os.stat_result | None:
    return None if folder.fd == NOT_THERE else stat_at(folder.fd, name)
