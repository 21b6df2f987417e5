"""Small files and all that has no content, a group at a time: what costs the disk or the threads something is done for many at once.

Guarantees: each gets its name only whole, dressed and synced; what fails for one leaves the others alone. A group's contents are
read in the order of their places, and all of it is on its way to the disk before the first sync waits: the journal is then
written once, and the other syncs find it written.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from ciuic.errors import Damaged
from ciuic.restore.content import Batch, Part, Worker, batches, parts
from ciuic.restore.leaf import Leaf
from ciuic.restore.pool import Pool, Stopped

_GROUP_LEAVES = 48
"""Each has a descriptor open until the group is done, and some groups are in work at once."""
_GROUP_BYTES = 8 << 20


class SmallFiles:
    """Gathers leaves into groups; for the walk's thread, but for `_restore`, which is for the pool's."""

    def __init__(self, pool: Pool, believed: Callable[[Leaf], bool]) -> None:
        self._pool = pool
        self._believed = believed
        """Whether the content of what is there need not be compared."""
        self._gathered: list[Leaf] = []
        self._gathered_bytes = 0

    def add(self, leaf: Leaf) -> None:
        self._gathered.append(leaf)
        self._gathered_bytes += leaf.entry.size_bytes if leaf.entry.is_file else 0
        if len(self._gathered) >= _GROUP_LEAVES or self._gathered_bytes >= _GROUP_BYTES:
            self.flush()

    def flush(self) -> None:
        """Begins with what is gathered: to be called before waiting for any of it."""
        leaves, self._gathered, self._gathered_bytes = self._gathered, [], 0
        if leaves:
            self._pool.submit(partial(self._restore, leaves))

    def _restore(self, leaves: list[Leaf], worker: Worker) -> None:
        try:
            self._fill(leaves, worker)
            made = [leaf for leaf in leaves if not leaf.ended]
            with worker.turn():
                for leaf in made:
                    leaf.dress()
            for leaf in made:
                if not leaf.ended:
                    leaf.finish()
        except BaseException as error:
            known = isinstance(error, OSError | Damaged | Stopped)
            for leaf in leaves:
                if not leaf.ended:
                    leaf.fail(error if known else Stopped())
            if not known:
                raise

    def _fill(self, leaves: list[Leaf], worker: Worker) -> None:
        """Deals with what is there already, and puts the content of the others into new files."""
        wanted: list[Part] = []
        with worker.turn():
            for leaf in leaves:
                if self._pool.stopping:  # those that are made already are still finished
                    leaf.fail(Stopped())
                    continue
                try:
                    pieces = list(batches(worker.repository, leaf.entry)) if leaf.entry.is_file else []
                    if self._is_kept(leaf, worker, pieces):
                        continue
                    if leaf.dry_run:
                        leaf.done("restored", [])
                        continue
                    leaf.make()
                except (OSError, Damaged) as error:
                    leaf.fail(error)
                    continue
                for piece in pieces:
                    wanted.extend(parts(leaf, leaf.entry, piece, worker.repository.block_size))
        worker.write(wanted)

    def _is_kept(self, leaf: Leaf, worker: Worker, pieces: list[Batch]) -> bool:
        if leaf.existing is None:
            return False

        def equal(fd: int) -> bool:
            return all(worker.equal(fd, leaf.entry, piece) for piece in pieces)

        try:
            return leaf.keep(content_equal=None if self._believed(leaf) else equal)
        except OSError:
            return False  # what cannot be read is replaced, which tells what is wrong if it cannot be done
