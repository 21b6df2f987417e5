"""Small files and everything without content, restored in groups.

What costs the disk or the threads something is done once for a group. Guarantees: each file is renamed only when it is whole,
has its attributes and is synced; a failure of one leaves the others alone. A group's contents are read in the order of their
positions in the packs. All of it is on its way to the disk before the first sync waits: the file system's journal is then
written once, and the other syncs find it written.
"""

from __future__ import annotations

from functools import partial

from ciuic.errors import Damaged
from ciuic.restore.files.content import Batch, BlockWorker, FileBlock, batches, file_blocks
from ciuic.restore.files.non_directory import NonDirectory
from ciuic.restore.files.pool import Pool, RunStopped

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
