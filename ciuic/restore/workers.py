"""Workers of a restore: groups of small files, large files in batches, and hard links.

Guarantees: each file is renamed only when it is whole, has its attributes and is synced; a failure of one leaves the others
alone. A file that is being compared is not written before it is known to differ.

Small files and everything without content go in groups, because what costs the disk or the threads something is then done once
for a group: contents are read in the order of their positions in the packs, and all of it is on its way to the disk before the
first sync waits, so that the file system's journal is written once. A large file is divided into batches that several threads
compare or write; whichever thread finishes last renames it, if every batch succeeded.

Outcomes of a restore: counted, reported with the progress, and recorded under one lock, whichever thread they come from.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from ciuic.errors import CiuicError, Damaged
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.restore.attributes import OWNER, TIMES
from ciuic.restore.content import (
    Batch,
    BlockWorker,
    FileBlock,
    Sharing,
    batches,
    file_blocks,
    start_writing_out,
)
from ciuic.restore.destination import new_temporary_name, refusal, unlink_if_there
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
from ciuic.restore.new_files import LinkGroup, NonDirectory
from ciuic.restore.pool import Pool, RunStopped
from ciuic.system.disk import READ_FILE
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


# Files of a group. Each has a descriptor open until its group is done, and several groups are in work at once.
_MAX_GROUP_FILES = 48
_MAX_GROUP_BYTES = 8 << 20


class SmallFiles:
    """Gathers files into groups. Its public methods are for the thread of the walk."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._gathered: list[NonDirectory] = []
        self._gathered_bytes = 0

    def add(self, file: NonDirectory) -> None:
        """Put the file into the current group; hand the group to the threads when it is full."""
        self._gathered.append(file)
        self._gathered_bytes += file.entry.size_bytes if file.entry.is_file else 0
        if len(self._gathered) >= _MAX_GROUP_FILES or self._gathered_bytes >= _MAX_GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Hand the current group to the threads; must be called before waiting for any file in it."""
        files, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if files:
            self._pool.submit(partial(self._restore, files))

    def _restore(self, files: list[NonDirectory], worker: BlockWorker) -> None:
        try:
            self._fill(files, worker)
            made = [file for file in files if not file.ended]
            # All are dressed, which starts writing them out, before the first is finished, which waits for its sync. For 256 files
            # of 3 kB, fsync one by one took 45 to 80 ms, and 25 ms after sync_file_range(2) for all. syncfs(2) would take 4 ms, but
            # it waits for everything that any process has written to the file system: gigabytes beside a training.
            with worker.turn():
                for file in made:
                    file.dress()
            for file in made:
                if not file.ended:
                    file.finish()
        except BaseException as error:
            # Every file must report its end, or the walk would wait for it for ever.
            known = isinstance(error, OSError | Damaged | RunStopped)
            for file in files:
                if not file.ended:
                    file.fail(error if known else RunStopped())
            if not known:
                raise

    def _fill(self, files: list[NonDirectory], worker: BlockWorker) -> None:
        """Keep the files that are right already, and write the content of the others into new files."""
        wanted: list[FileBlock] = []
        with worker.turn():
            for file in files:
                if self._pool.stopping:
                    # Only this one is given up: files that are made already are still finished.
                    file.fail(RunStopped())
                    continue
                try:
                    pieces = list(batches(worker.repository, file.entry)) if file.entry.is_file else []
                    if self._is_kept(file, worker, pieces):
                        continue
                    if file.dry_run:
                        file.done("restored", [])
                        continue
                    file.make()
                except (OSError, Damaged) as error:
                    file.fail(error)
                    continue
                for piece in pieces:
                    wanted.extend(file_blocks(file, file.entry, piece, worker.repository.block_size))
        # One call for the whole group: the blocks are read in the order of their positions in the packs, not file by file.
        if wanted:
            worker.write(wanted)

    def _is_kept(self, file: NonDirectory, worker: BlockWorker, pieces: list[Batch]) -> bool:
        if file.existing is None:
            return False

        def equal(fd: int) -> bool:
            return all(worker.equal(fd, file.entry, piece) for piece in pieces)

        try:
            return file.keep(content_equal=None if file.content_believed else equal)
        except OSError:
            # A file that cannot be read is replaced; if that fails too, its error says what is wrong.
            return False


# A clone is searched for differences at least so far before it is given up for writing everything.
_MIN_SEARCHED_BYTES = 32 << 20

Work = Callable[[BlockWorker, Batch], None]


class LargeFile:
    """A file that several threads compare or write, batch by batch. `outstanding` is guarded by ``Pool.changed``."""

    def __init__(self, file: NonDirectory) -> None:
        self.file = file
        self.outstanding = 1
        """Batches in work, and one for the thread that is still feeding."""
        self.different = False
        self.wrong_bytes = 0
        self.right_bytes = 0
        self.error: BaseException | None = None
        self.fd = -1
        self.inode = (0, 0)
        """(device, inode) of the existing file that was cloned."""

    @property
    def abandoned(self) -> bool:
        """True if further batches are pointless."""
        return self.different or self.error is not None

    def compare(self, worker: BlockWorker, batch: Batch) -> None:
        """Compare one batch of the existing file; sets `different`."""
        try:
            if not self.abandoned and not worker.equal(self.fd, self.file.entry, batch):
                self.different = True
        except (OSError, Damaged):
            # The file is written anew then, and if that fails too, its error says what is wrong.
            self.different = True
        except BaseException as error:
            self.error = self.error or error

    def write(self, worker: BlockWorker, batch: Batch) -> None:
        """Write one batch of a new file."""
        try:
            if self.error is None:
                worker.check()
                worker.write(list(file_blocks(self, self.file.entry, batch, worker.repository.block_size)))
                # Started after each batch, so that the fsync at the end finds most of the file on the disk. Direct I/O took
                # 0.16 s for 384 MiB instead of 0.11 s, and would leave a file that is about to be loaded out of the page cache.
                start_writing_out(self.fd, batch.start, batch.end - batch.start)
        except BaseException as error:
            self.error = self.error or error

    def repair(self, worker: BlockWorker, batch: Batch) -> None:
        """Correct one batch of a clone; without comparing it where most of the file has turned out to differ."""
        try:
            if self.error is not None:
                return
            worker.check()
            size = batch.end - batch.start
            if self.wrong_bytes > max(_MIN_SEARCHED_BYTES, self.right_bytes):
                worker.replace(self, self.file.entry, batch)
                wrong = size
            else:
                wrong = worker.repair(self, self.file.entry, batch)
            self.right_bytes += size - wrong
            # `+=` by several threads may lose an addition, which only delays the decision above. But adding 0 could take back
            # the first addition, after which `wrong_bytes == 0` would mean that nothing was written.
            if wrong:
                self.wrong_bytes += wrong
                start_writing_out(self.fd, batch.start, size)
        except BaseException as error:
            self.error = self.error or error

    def fail(self, error: BaseException) -> None:
        """Note that a block cannot be read or written."""
        self.error = self.error or error


class Feeder:
    """Feeds large files to the threads. Its methods are for the walk's thread; `again` is guarded by ``Pool.changed``."""

    def __init__(
        self,
        repository: Repository,
        pool: Pool,
        counter: ResultCounter,
        *,
        dry_run: bool,
        runtime_dir: Path | None = None,
    ) -> None:
        self._repository = repository
        self._pool = pool
        self._counter = counter
        self._dry_run = dry_run
        self._sharing = Sharing(runtime_dir)
        self.again: list[NonDirectory] = []
        """Files that turned out to differ and are still to be written."""

    def write_again(self) -> bool:
        """Write the files that turned out to differ; return whether there were any."""
        with self._pool.changed:
            again, self.again = self.again, []
        for file in again:
            self.write(file)
        return bool(again)

    def compare(self, file: NonDirectory) -> None:
        """Restore a file of which one with the same name exists: keep that one if its content is right."""
        large = LargeFile(file)
        try:
            large.fd = os.open(file.entry.name, READ_FILE, dir_fd=file.folder.fd)
        except OSError:
            # A file that cannot be read is replaced; if that fails too, its error says what is wrong.
            self.write(file)
            return
        # In a clone, what was compared is what is kept: other processes may write the existing file during the comparison.
        if self._clone(large):
            self._feed(large, large.repair, self._repaired)
        elif os.fstat(large.fd).st_size == file.entry.size_bytes:
            self._feed(large, large.compare, self._compared)
        else:
            os.close(large.fd)
            self.write(file)

    def _clone(self, large: LargeFile) -> bool:
        """Clone the existing file; return whether `fd` is now a new file that shares all extents with it.

        The clone is compared instead of the existing file, which others may be writing, and only what differs is written.
        """
        file, existing = large.file, large.fd
        # READ_FILE may have opened a pipe or a device that was put in the place of the file since the walk saw it.
        if (
            self._dry_run
            or not self._sharing.may_clone(existing)
            or not stat.S_ISREG(os.fstat(existing).st_mode)
        ):
            return False
        try:
            fd = file.make(readable=True)
            if self._sharing.clone(existing, fd):
                # The clone is as long as the existing file: what is too much goes, what is missing reads as
                # zeros.
                os.ftruncate(fd, file.entry.size_bytes)
                now = os.fstat(existing)
                large.fd, large.inode = fd, (now.st_dev, now.st_ino)
                os.close(existing)
                return True
        except OSError:
            # A full disk, for instance: writing the file meets the same error and reports it.
            pass
        file.discard()
        return False

    def _repaired(self, large: LargeFile) -> None:
        if large.error is None and not large.wrong_bytes and not self._pool.stopping:
            try:
                # Nothing differed: the existing file stays, and the clone is discarded.
                if large.file.keep(content_equal=None, compared=large.inode):
                    return
            except OSError as error:
                large.error = error
        self._written(large)

    def _compared(self, large: LargeFile) -> None:
        # Of the descriptor that was compared: the name may lead to another file by now.
        st = os.fstat(large.fd)
        os.close(large.fd)
        if large.error is None and not large.different and not self._pool.stopping:
            try:
                if large.file.keep(content_equal=None, compared=(st.st_dev, st.st_ino)):
                    return
            except OSError:
                large.different = True
        if large.error is not None or self._pool.stopping:
            large.file.fail(large.error or RunStopped())
            return
        # Only the walk's thread feeds: a pool thread that waited for a free place among the tasks would wait for itself.
        with self._pool.changed:
            self.again.append(large.file)
            self._pool.changed.notify_all()

    def write(self, file: NonDirectory) -> None:
        """Restore a file into a new one, without a look at what exists."""
        if self._dry_run:
            file.done("restored", [])
            return
        large = LargeFile(file)
        try:
            large.fd = file.make()
            self._sharing.prepare(large.fd, file.entry.size_bytes)
        except OSError as error:
            file.fail(error)
            return
        self._feed(large, large.write, self._written)

    def _written(self, large: LargeFile) -> None:
        if large.error is not None or self._pool.stopping:
            large.file.fail(large.error or RunStopped())
        else:
            large.file.dress()
            if not large.file.ended:
                large.file.finish()

    def _feed(self, large: LargeFile, work: Work, then: Callable[[LargeFile], None]) -> None:
        """Submit all batches of the file; ``then`` is called once, by whichever thread finishes last."""
        try:
            # `outstanding` begins at 1 for this loop, so that `then` cannot be called before all batches are submitted.
            for batch in batches(self._repository, large.file.entry):
                if large.abandoned or self._pool.stopping:
                    break
                self._feed_one(large, work, then, batch)
        except BaseException as error:
            large.error = large.error or (error if isinstance(error, Damaged) else RunStopped())
            self._batch_done(large, then)
            if not isinstance(error, Damaged):
                raise
            return
        self._batch_done(large, then)

    def _feed_one(
        self, large: LargeFile, work: Work, then: Callable[[LargeFile], None], batch: Batch
    ) -> None:
        with self._pool.changed:
            large.outstanding += 1
        try:
            self._pool.submit(partial(self._batch, large, work, then, batch))
        except BaseException:
            # The run is cut short and no thread will do this batch.
            with self._pool.changed:
                large.outstanding -= 1
            raise

    def _batch(
        self,
        large: LargeFile,
        work: Work,
        then: Callable[[LargeFile], None],
        batch: Batch,
        worker: BlockWorker,
    ) -> None:
        try:
            work(worker, batch)
            # A comparison has restored nothing yet: `NonDirectory.keep` counts the whole file if it is right.
            if work in (large.write, large.repair) and large.error is None:
                with self._pool.changed:
                    large.file.counted_bytes += batch.end - batch.start
                    self._counter.part(large.file.path, batch.end - batch.start)
        except BaseException:
            large.error = large.error or RunStopped()
            raise
        finally:
            self._batch_done(large, then)

    def _batch_done(self, large: LargeFile, then: Callable[[LargeFile], None]) -> None:
        with self._pool.changed:
            large.outstanding -= 1
            if large.outstanding:
                return
        # Outside the lock: `then` syncs and renames, and other threads go on meanwhile.
        then(large)


NOT_LINKABLE = (errno.EMLINK, errno.EPERM, errno.EXDEV, errno.EOPNOTSUPP, errno.ENOSYS)
"""The file system refuses this link: the name becomes a file of its own, and a problem is reported."""


class Linker:
    """All link groups of a run; for the thread of the walk."""

    def __init__(
        self, pool: Pool, small: SmallFiles, feeder: Feeder, counter: ResultCounter, *, dry_run: bool
    ) -> None:
        self._pool = pool
        self._small = small
        self._feeder = feeder
        self._counter = counter
        self._dry_run = dry_run
        self._groups: dict[tuple[bytes, int], LinkGroup] = {}

    def link(self, file: NonDirectory, root: bytes, base: int, names: Callable[[], Sequence[bytes]]) -> bool:
        """Return whether the file is settled: linked to a name that was restored before, or failed.

        If not, it is the first of its names, and the caller restores it.

        Args:
            file: the name to be linked.
            root: path of the snapshot's root; link numbers are unique within a root.
            base: descriptor of a directory above the file.
            names: computes the names that lead from ``base`` to the file. The callable is kept instead of the names, which
                may be thousands.
        """
        # Inode numbers are those of the snapshot: files restored from different roots are never linked.
        key = (root, file.entry.link)
        group = self._groups.get(key)
        if group is not None and self._is_there(group):
            return self._link_to(group, file)
        self._groups[key] = file.group = LinkGroup(base, names)
        return False

    def _is_there(self, group: LinkGroup) -> bool:
        """Wait for the first name; return whether it was restored."""
        if group.state == "working":
            # The first name may still be gathered in a group that no thread has been given.
            self._small.flush()
        while group.state == "working":
            # The first name may be a large file that is to be written again, which only this thread can start.
            self._pool.wait(lambda: group.state != "working" or bool(self._feeder.again))
            self._feeder.write_again()
        return group.state == "there"

    def _link_to(self, group: LinkGroup, file: NonDirectory) -> bool:
        st = file.existing
        # The name is a link to the first one already, as after an earlier restore.
        if st is not None and (st.st_dev, st.st_ino) == group.inode:
            file.inode = group.inode
            file.done("skipped", [])
            return True
        try:
            if not self._dry_run:
                _make_link(group, file)
        except OSError as error:
            if error.errno not in NOT_LINKABLE:
                file.fail(error)
                return True
            with self._pool.changed:
                problem = f"restored as a separate file: it could not be hard-linked to its other names ({error.strerror})"
                self._counter.problems(file.path, [problem])
            return False
        file.done("linked", [])
        return True


def _make_link(group: LinkGroup, file: NonDirectory) -> None:
    """Give the file's name the group's inode in one step, by a rename from a temporary name. OSError."""
    # By a temporary name, because link(2) replaces nothing, and the final name may exist.
    place = file.folder.workplace(file.run)
    temporary = new_temporary_name(file.run)
    group.link(place, temporary)
    try:
        file.place(place, temporary)
    except BaseException:
        unlink_if_there(place, temporary)
        raise
    file.inode = group.inode
