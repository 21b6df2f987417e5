"""Decide for each non-directory how it is restored, and give it to the workers that do so."""

from __future__ import annotations

import os
import posixpath
import stat
from dataclasses import dataclass
from typing import Protocol

from ciuic.errors import Damaged
from ciuic.repository.lookup import join
from ciuic.restore.files.content import batch_blocks
from ciuic.restore.files.destination import Remover, stat_at
from ciuic.restore.files.directory_handles import NOT_THERE, Folder
from ciuic.restore.files.large import Feeder
from ciuic.restore.files.links import Linker
from ciuic.restore.files.non_directory import NonDirectory
from ciuic.restore.files.pool import Pool
from ciuic.restore.files.small import SmallFiles
from ciuic.restore.files.special import SpecialFilter
from ciuic.restore.model import RestorePlan, RestoreTarget
from ciuic.restore.outcomes import Outcomes
from ciuic.restore.overwrite_rules import OverwriteRules
from ciuic.system.mount_border import LEFT_ALONE
from ciuic.types import FLAG_MOUNTPOINT, Entry


class Placeholders(Protocol):
    """Maker of files whose content comes later."""

    def take(self, file: NonDirectory) -> bool:
        """Make the file without its content, and end it; return False where it is to be restored whole."""
        ...


@dataclass
class Attempt:
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

    def restore(self, attempt: Attempt, folder: Folder, entry: Entry) -> None:
        """Begin to restore a non-directory; it ends in `Outcomes.file_ended`, or is recorded as failed or left alone."""
        path = join(folder.path, entry.name)
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
        return Remover(self._plan.kept.inodes, self._plan.kept.rule)

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
        if not entry.is_file or entry.size_bytes <= self._small_bytes:
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
