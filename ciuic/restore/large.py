"""Large files: cut into batches that several threads compare or write, fed by the walk.

Guarantees: a file that is being compared is not written before it is known to differ, and one that is being written gets its
name from whoever finishes last, and only if every batch went well.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path

from ciuic.errors import Damaged
from ciuic.repository import Repository
from ciuic.restore.content import Batch, Worker, batches, parts, start_writing_out
from ciuic.restore.leaf import READ_FILE, Leaf
from ciuic.restore.pool import Pool, Stopped
from ciuic.restore.sharing import Sharing
from ciuic.restore.tally import Tally

_WORTH_LOOKING_BYTES = 32 << 20


class LargeFile:
    """A file that several threads compare or write, batch by batch. `outstanding` is guarded by Pool.changed."""

    def __init__(self, leaf: Leaf) -> None:
        self.leaf = leaf
        self.outstanding = 1
        self.different = False
        self.wrong_bytes = 0
        self.right_bytes = 0
        self.error: BaseException | None = None
        self.fd = -1
        self.inode = (0, 0)
        """(device, inode) of what was there, when that was cloned."""

    @property
    def abandoned(self) -> bool:
        return self.different or self.error is not None

    def compare(self, worker: Worker, batch: Batch) -> None:
        try:
            if not self.abandoned and not worker.equal(self.fd, self.leaf.entry, batch):
                self.different = True
        except (OSError, Damaged):
            self.different = True  # then it is to be written anew, which tells what is wrong
        except BaseException as error:
            self.error = self.error or error

    def write(self, worker: Worker, batch: Batch) -> None:
        try:
            if self.error is None:
                worker.check()
                worker.write(list(parts(self, self.leaf.entry, batch, worker.repository.block_size)))
                start_writing_out(self.fd, batch.start, batch.end - batch.start)
        except BaseException as error:
            self.error = self.error or error

    def repair(self, worker: Worker, batch: Batch) -> None:
        """Where much has turned out to differ, the rest is not even looked at."""
        try:
            if self.error is not None:
                return
            worker.check()
            size = batch.end - batch.start
            if self.wrong_bytes > max(_WORTH_LOOKING_BYTES, self.right_bytes):
                worker.replace(self, self.leaf.entry, batch)
                wrong = size
            else:
                wrong = worker.repair(self, self.leaf.entry, batch)
            self.right_bytes += size - wrong
            if wrong:  # adding nothing could undo what another thread adds
                self.wrong_bytes += wrong
                start_writing_out(self.fd, batch.start, size)
        except BaseException as error:
            self.error = self.error or error

    def fail(self, error: BaseException) -> None:
        """One of its blocks cannot be had or written."""
        self.error = self.error or error


class Feeder:
    """Feeds large files to the threads. Its methods are for the walk's thread; `again` is guarded by Pool.changed."""

    def __init__(
        self,
        repository: Repository,
        pool: Pool,
        tally: Tally,
        *,
        dry_run: bool,
        runtime_dir: Path | None = None,
    ) -> None:
        self._repository = repository
        self._pool = pool
        self._tally = tally
        self._dry_run = dry_run
        self._sharing = Sharing(runtime_dir)
        self.again: list[Leaf] = []
        """Turned out to differ: to be written."""

    def write_again(self) -> bool:
        """Writes what turned out to differ; whether there was any."""
        with self._pool.changed:
            again, self.again = self.again, []
        for leaf in again:
            self.write(leaf)
        return bool(again)

    def compare(self, leaf: Leaf) -> None:
        large = LargeFile(leaf)
        try:
            large.fd = os.open(leaf.entry.name, READ_FILE, dir_fd=leaf.folder.fd)
        except OSError:  # what cannot be read is replaced, which tells what is wrong if it cannot be done
            self.write(leaf)
            return
        if self._clone(large):
            self._feed(large, large.repair, self._repaired)
        elif os.fstat(large.fd).st_size == leaf.entry.size_bytes:
            self._feed(large, large.compare, self._compared)
        else:
            os.close(large.fd)
            self.write(leaf)

    def _clone(self, large: LargeFile) -> bool:
        """Whether there is a new file now that shares all extents with what is there; `fd` is that of it then.

        It is compared in place of the old one, which others may be writing, and only what differs is written to it.
        """
        leaf, existing = large.leaf, large.fd
        if (
            self._dry_run
            or not self._sharing.may_clone(existing)
            or not stat.S_ISREG(os.fstat(existing).st_mode)
        ):
            return False
        try:
            fd = leaf.make(readable=True)
            if self._sharing.clone(existing, fd):
                os.ftruncate(fd, leaf.entry.size_bytes)
                now = os.fstat(existing)
                large.fd, large.inode = fd, (now.st_dev, now.st_ino)
                os.close(existing)
                return True
        except OSError:  # a full disk, for instance, of which writing will tell
            pass
        leaf.discard()
        return False

    def _repaired(self, large: LargeFile) -> None:
        if large.error is None and not large.wrong_bytes and not self._pool.stopping:
            try:
                if large.leaf.keep(content_equal=None, compared=large.inode):
                    return
            except OSError as error:
                large.error = error
        self._written(large)

    def _compared(self, large: LargeFile) -> None:
        st = os.fstat(large.fd)
        os.close(large.fd)
        if large.error is None and not large.different and not self._pool.stopping:
            try:
                if large.leaf.keep(content_equal=None, compared=(st.st_dev, st.st_ino)):
                    return
            except OSError:
                large.different = True
        if large.error is not None or self._pool.stopping:
            large.leaf.fail(large.error or Stopped())
            return
        with self._pool.changed:  # feeding waits for free threads, so it is not for a thread to do
            self.again.append(large.leaf)
            self._pool.changed.notify_all()

    def write(self, leaf: Leaf) -> None:
        if self._dry_run:
            leaf.done("restored", [])
            return
        large = LargeFile(leaf)
        try:
            large.fd = leaf.make()
            self._sharing.prepare(large.fd, leaf.entry.size_bytes)
        except OSError as error:
            leaf.fail(error)
            return
        self._feed(large, large.write, self._written)

    def _written(self, large: LargeFile) -> None:
        if large.error is not None or self._pool.stopping:
            large.leaf.fail(large.error or Stopped())
        else:
            large.leaf.dress()
            if not large.leaf.ended:
                large.leaf.finish()

    def _feed(
        self, large: LargeFile, work: Callable[[Worker, Batch], None], then: Callable[[LargeFile], None]
    ) -> None:
        try:
            for batch in batches(self._repository, large.leaf.entry):
                if large.abandoned or self._pool.stopping:
                    break
                self._feed_one(large, work, then, batch)
        except BaseException as error:
            large.error = large.error or (error if isinstance(error, Damaged) else Stopped())
            self._batch_done(large, then)
            if not isinstance(error, Damaged):
                raise
            return
        self._batch_done(large, then)

    def _feed_one(
        self,
        large: LargeFile,
        work: Callable[[Worker, Batch], None],
        then: Callable[[LargeFile], None],
        batch: Batch,
    ) -> None:
        with self._pool.changed:
            large.outstanding += 1
        try:
            self._pool.submit(partial(self._batch, large, work, then, batch))
        except BaseException:  # the run is cut short: nobody will do this batch
            with self._pool.changed:
                large.outstanding -= 1
            raise

    def _batch(
        self,
        large: LargeFile,
        work: Callable[[Worker, Batch], None],
        then: Callable[[LargeFile], None],
        batch: Batch,
        worker: Worker,
    ) -> None:
        try:
            work(worker, batch)
            if work in (large.write, large.repair) and large.error is None:
                with self._pool.changed:
                    large.leaf.counted_bytes += batch.end - batch.start
                    self._tally.part(large.leaf.path, batch.end - batch.start)
        except BaseException:
            large.error = large.error or Stopped()
            raise
        finally:
            self._batch_done(large, then)

    def _batch_done(self, large: LargeFile, then: Callable[[LargeFile], None]) -> None:
        with self._pool.changed:
            large.outstanding -= 1
            if large.outstanding:
                return
        then(large)
