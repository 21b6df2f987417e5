"""Walk of a restore: the snapshot's tree and the destination side by side, deciding for each name what is to be done.

Guarantees: one thread walks and decides; the threads of the pool carry out. A directory whose entries cannot all be read
loses nothing to --delete.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, field

from ciuic import STATE_DIR_NAME
from ciuic.errors import Damaged
from ciuic.repository.lookup import join, resolve
from ciuic.repository.trees.tree_reader import Lineage
from ciuic.restore.dispatch import Attempt, Dispatcher, status_of
from ciuic.restore.files import attributes
from ciuic.restore.files.destination import (
    Remover,
    is_temporary,
    new_temporary_name,
    rename_new,
    unlink_if_there,
)
from ciuic.restore.files.directory_handles import Folder
from ciuic.restore.files.journal import JOURNAL_NAME
from ciuic.restore.files.pool import Pool
from ciuic.restore.files.special import SpecialFilter
from ciuic.restore.model import RestorePlan
from ciuic.restore.outcomes import Outcomes
from ciuic.system.mount_border import LEFT_ALONE
from ciuic.types import FLAG_MOUNTPOINT, Entry


@dataclass
class _Frame:
    """A directory whose entries are being walked through."""

    folder: Folder
    entries: Iterator[Entry]
    extra: set[bytes] = field(default_factory=set)
    """Names in the destination that the snapshot has not shown yet."""
    whole: bool = True
    """All entries could be read."""
    inodes: set[int] = field(default_factory=set)
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
                self._delete_extra(frame)
            self._outcomes.release(frame.folder)

    def is_left_out(self, attempt: Attempt, folder: Folder, entry: Entry) -> bool:
        """Return whether the entry is something special that is not restored, which is recorded."""
        top = folder.source_path == attempt.target.source.root.path
        return self._special.leaves_out(join(folder.path, entry.name), entry, top_of_root=top)

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
        if folder.fresh or existing is None or attempt.rules.sets_directory_attributes(entry, existing):
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
        if self.is_left_out(attempt, frame.folder, entry):
            return
        if not entry.is_dir:
            self._dispatcher.restore(attempt, frame.folder, entry)
            return
        source_path = join(frame.folder.source_path, entry.name)
        folder = self.restore_directory(attempt, frame.folder, entry, source_path, frame.inodes)
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

    def _delete_extra(self, frame: _Frame) -> None:
        """Remove what the snapshot does not have in this directory."""
        remover = self._dispatcher.make_remover()
        remover.dry_run = self._dry_run
        folder = frame.folder
        for name in sorted(frame.extra):
            path = join(folder.path, name)
            if remover.remove(folder.fd, name, path, join(folder.source_path, name)):
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
