"""Outcomes of a restore's parts, recorded under one lock, whichever thread they come from."""

from __future__ import annotations

from ciuic.restore.files.directory_handles import Folder, Syncer
from ciuic.restore.files.non_directory import NonDirectory
from ciuic.restore.files.pool import Pool, RunStopped
from ciuic.restore.files.result_counter import ResultCounter
from ciuic.restore.model import Action
from ciuic.types import Entry


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
                self._counter.done(file.path, file.entry, action, problems, file.counted_bytes)
            # What was cut short is no failure of its own: the result, or the interrupt, says why the run
            # ended.
            elif not isinstance(error, RunStopped) and self._counter.failed(file.path, error):
                self._pool.stop()
            # The walk may be waiting for the first name of a link group.
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
