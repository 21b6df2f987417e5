"""Drill of a rescue: files of a snapshot restored from a remote alone, and compared with what the snapshot says of them.

Guarantees: every directory tree of the snapshot is read. Content is read back from the restored files, and each block is
compared with its chunk id. A seed chooses the same files of the same snapshot. The space that restored files take is that of
the largest of them, or `_BATCH_BYTES`: they are restored in batches and removed after the comparison.

Owners and other attributes, which depend on who runs the drill, are not compared. Special files are not restored.
"""

from __future__ import annotations

import fcntl
import heapq
import os
import posixpath
import random
import shutil
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from ciuic.errors import CiuicError, Damaged, NotFound
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.errors import Archived
from ciuic.repository.lookup import Located, children, find, is_within, join
from ciuic.restore import RestorePlan, RestoreTarget, execute
from ciuic.restore.model import Kept
from ciuic.types import Entry, Snapshot
from ciuic.units import human_size
from ciuic.verdicts.model import Verdict
from ciuic.verdicts.sources import SnapshotDirectory
from ciuic.verdicts.verdict import checkpoints_in, may_hold_checkpoints

DEFAULT_SAMPLE_BYTES: Final = 1 << 30
DEFAULT_SAMPLE_FILES: Final = 1000
_BATCH_BYTES: Final = 64 << 20
_BATCH_FILES: Final = 64
# Directories that are searched for the newest checkpoint: those with the newest files that may be one.
_CHECKPOINT_DIRECTORIES: Final = 8
_PREFIX: Final = "ciuic-drill-"


class DrillDamage(NamedTuple):
    """A path of the snapshot that does not come back as the snapshot says, with the reason."""

    path: bytes
    reason: str


class DrillResult(NamedTuple):
    """Outcome of a drill."""

    seed: int
    checkpoint: bytes
    """Newest checkpoint in the snapshot, which was restored whole; empty for none."""
    files: int
    """Files that were restored and compared."""
    bytes_read: int
    """Size of these files."""
    files_total: int
    """Files in the snapshot, without those in directories that cannot be read."""
    bytes_total: int
    """Size of these files; one with several names counts with each."""
    seconds: float
    """Time that restoring and comparing took."""
    damages: tuple[DrillDamage, ...]

    @property
    def bytes_per_second(self) -> float:
        """Rate of restoring and comparing."""
        return self.bytes_read / max(self.seconds, 0.001)

    @property
    def estimated_seconds(self) -> float:
        """Time that a restore of the whole snapshot would take at this rate."""
        if self.bytes_read:
            return self.seconds * max(1.0, self.bytes_total / self.bytes_read)
        return self.seconds * max(1.0, self.files_total / max(self.files, 1))


def run_drill(
    repository: Repository,
    snapshot: Snapshot,
    scratch: Path,
    *,
    seed: int,
    sample_bytes: int = DEFAULT_SAMPLE_BYTES,
    sample_files: int = DEFAULT_SAMPLE_FILES,
    progress: Callable[[int, int], None] = lambda done_bytes, all_bytes: None,
) -> DrillResult:
    """Restore a sample of a snapshot into a directory, and compare it with the snapshot.

    Args:
        repository: Repository of the snapshot, such as one in a remote.
        snapshot: The snapshot.
        scratch: Directory for restored files, which are removed again.
        seed: Chooses the files.
        sample_bytes: Limit of the sizes of the files that are chosen at random; the newest checkpoint is added, whatever its size.
        sample_files: Limit of their number.
        progress: Called with (bytes compared, bytes to compare).

    Raises:
        CiuicError: the sample cannot be restored here, or the store does not answer.
        Archived: a file of the sample lies in an archive of the store.
    """
    chosen = _Choice(repository, snapshot, seed, sample_files)
    sample = chosen.sample(sample_bytes)
    # After the choice: reading directories takes no more time for a larger sample.
    began = time.monotonic()
    _require_space(scratch, sample)
    damages = list(chosen.damages)
    all_bytes = sum(one.entry.size_bytes for one in sample)
    done_bytes = 0
    for batch in _batches(sample):
        with tempfile.TemporaryDirectory(prefix="batch-", dir=scratch) as place:
            damages += _restore_and_compare(repository, snapshot, batch, place)
        done_bytes += sum(one.entry.size_bytes for one in batch)
        progress(done_bytes, all_bytes)
    return DrillResult(
        seed=seed,
        checkpoint=chosen.checkpoint,
        files=len(sample),
        bytes_read=all_bytes,
        files_total=chosen.files_total,
        bytes_total=chosen.bytes_total,
        seconds=time.monotonic() - began,
        damages=tuple(damages),
    )


class _Choice:
    """Files of a snapshot to restore: its newest checkpoint, and others at random."""

    def __init__(self, repository: Repository, snapshot: Snapshot, seed: int, sample_files: int) -> None:
        self._repository = repository
        self._snapshot = snapshot
        self.files_total = 0
        self.bytes_total = 0
        self.damages: list[DrillDamage] = []
        self.checkpoint = b""
        self._of_checkpoint: list[Located] = []
        # The last `sample_files` in a random order of all files: (negative rank, number in the walk, file).
        self._ranked: list[tuple[float, int, Located]] = []
        # (latest change, path, directory)
        places: list[tuple[int, bytes, Located]] = []
        # No secret: it has to choose the same files again.
        order = random.Random(seed)
        for directory, files in self._walk():
            newest_ns = 0
            for file in files:
                self.files_total += 1
                self.bytes_total += file.entry.size_bytes
                ranked = (-order.random(), self.files_total, file)
                if len(self._ranked) < sample_files:
                    heapq.heappush(self._ranked, ranked)
                elif sample_files:
                    heapq.heappushpop(self._ranked, ranked)
                if may_hold_checkpoints([posixpath.basename(file.path)]):
                    newest_ns = max(newest_ns, file.entry.mtime_ns, 1)
            if snapshot.is_state:
                self._of_checkpoint += files
            elif newest_ns:
                places.append((newest_ns, directory.path, directory))
        if snapshot.is_state:
            self.checkpoint = snapshot.roots[0].path
        else:
            self._find_checkpoint([place for _, _, place in heapq.nlargest(_CHECKPOINT_DIRECTORIES, places)])

    def sample(self, sample_bytes: int) -> list[Located]:
        """Return the files to restore, those of the checkpoint first; one at least, where there is any."""
        found = list(self._of_checkpoint)
        known = {file.path for file in found}
        left = sample_bytes
        for _, _, file in sorted(self._ranked, key=lambda one: (-one[0], one[1])):
            if file.path not in known and file.entry.size_bytes <= left:
                left -= file.entry.size_bytes
                found.append(file)
        if not found and self._ranked:
            found.append(min((file for _, _, file in self._ranked), key=lambda one: one.entry.size_bytes))
        return found

    def _walk(self) -> Iterator[tuple[Located, list[Located]]]:
        """Yield each directory with its regular files, depth first."""
        for root in self._snapshot.roots:
            lineage = Lineage()
            # For the frame of the root alone.
            lineage.enter(b"")
            stack = [iter([Located(root, root.path, root.entry)])]
            while stack:
                at = next(stack[-1], None)
                if at is None:
                    stack.pop()
                    lineage.leave()
                    continue
                try:
                    below = [
                        Located(root, join(at.path, entry.name), entry)
                        for entry in children(self._repository, root, at.entry)
                    ]
                    lineage.enter(at.entry.content)
                except Damaged as error:
                    self.damages.append(DrillDamage(at.path, error.message))
                    continue
                yield at, [one for one in below if one.entry.is_file]
                stack.append(iter([one for one in below if one.entry.is_dir and one.entry.content]))

    def _find_checkpoint(self, places: Iterable[Located]) -> None:
        """Set the newest checkpoint in these directories."""
        newest: tuple[int, bytes, tuple[bytes, ...], Located] | None = None
        for place in places:
            directory = SnapshotDirectory(self._repository, self._snapshot, place, lambda time_ns: None)
            try:
                found = checkpoints_in(directory, lambda source: Verdict("UNKNOWN", "not judged"))
                times = {entry.name: entry.mtime_ns for entry in directory.entries()}
            except Damaged as error:
                self.damages.append(DrillDamage(place.path, error.message))
                continue
            for one in found:
                latest = max((times.get(name.split(b"/")[0], 0) for name in one.files), default=0)
                if newest is None or (latest, one.path) > newest[:2]:
                    newest = latest, one.path, one.files, place
        if newest is None:
            return
        _, self.checkpoint, names, place = newest
        tops = []
        for name in names:
            # A part may be missing in a torn checkpoint: nothing there to restore.
            with suppress(NotFound):
                tops.append(find(self._repository, self._snapshot, join(place.path, name)))
        self._of_checkpoint = [one for one in tops if one.entry.is_file]
        directories = [one.path for one in tops if one.entry.is_dir]
        if directories:
            for at, files in self._walk():
                if any(is_within(at.path, top) for top in directories):
                    self._of_checkpoint += files
        # A part may be named beside the directory that has it.
        self._of_checkpoint = list({one.path: one for one in self._of_checkpoint}.values())


def _batches(sample: list[Located]) -> Iterator[list[Located]]:
    batch: list[Located] = []
    size_bytes = 0
    for file in sample:
        if batch and (len(batch) >= _BATCH_FILES or size_bytes + file.entry.size_bytes > _BATCH_BYTES):
            yield batch
            batch, size_bytes = [], 0
        batch.append(file)
        size_bytes += file.entry.size_bytes
    if batch:
        yield batch


def _require_space(scratch: Path, sample: list[Located]) -> None:
    largest = max((file.entry.size_bytes for file in sample), default=0)
    status = os.statvfs(scratch)
    # A sparse file may take less; the restore says so when it does not fit.
    if max(largest, _BATCH_BYTES) > (free_bytes := status.f_bavail * status.f_frsize):
        raise CiuicError(
            f"{one_line(str(scratch.parent))} has {human_size(free_bytes)} free, and the drill needs "
            f"{human_size(max(largest, _BATCH_BYTES))} for the files that it restores at a time",
            hint="--scratch names a directory with more room",
        )


def _restore_and_compare(
    repository: Repository, snapshot: Snapshot, batch: list[Located], place: str
) -> Iterator[DrillDamage]:
    """Restore these files under numbers, and yield what is not as the snapshot says."""
    by_path = {os.fsencode(f"{place}/{number}"): file for number, file in enumerate(batch)}
    plan = RestorePlan(
        repository=repository,
        snapshot=snapshot,
        targets=tuple(RestoreTarget(file, path, in_place=False) for path, file in by_path.items()),
        overwrite=None,
        delete=False,
        kept=Kept(frozenset(), None),
        # Of no use here, and dangerous in a remote that others may write to.
        special=False,
    )
    result = execute(plan)
    bad: set[bytes] = set()
    for failure in result.failed:
        if failure.attribute:
            continue
        if not failure.damaged:
            raise CiuicError(
                f"the drill cannot restore {one_line(by_path[failure.path].path)} here: {failure.reason}",
                hint="--scratch names another directory",
            )
        bad.add(failure.path)
        yield DrillDamage(by_path[failure.path].path, failure.reason)
    if result.stopped:
        raise CiuicError(f"the drill ended early: {result.stopped}", hint="--scratch names another directory")
    for path, file in by_path.items():
        if path in bad:
            continue
        try:
            reason = _difference(repository, file.entry, path)
        except Archived:
            raise
        except Damaged as error:
            reason = error.message
        if reason:
            yield DrillDamage(file.path, reason)


def _difference(repository: Repository, entry: Entry, path: bytes) -> str:
    """Return what of a restored file is not as the snapshot says; empty for nothing."""
    # The file may have been one that its owner cannot read.
    os.chmod(path, 0o600)
    with open(path, "rb") as file:
        size_bytes = os.fstat(file.fileno()).st_size
        if size_bytes != entry.size_bytes:
            return f"it was restored with {size_bytes} bytes, and has {entry.size_bytes} in the snapshot"
        block_size = repository.block_size
        blocks = blocks_of(entry.size_bytes, block_size)
        ids = repository.block_maps.ids(entry.content, entry.map_height, blocks)
        expected = next(ids, None)
        for number in range(blocks):
            data = file.read(block_size)
            if expected is None or expected[0] != number:
                # A hole.
                is_right = not data.strip(b"\0")
            else:
                is_right = repository.identity.chunk_id(data) == expected[1]
                expected = next(ids, None)
            if not is_right:
                return f"block {number} was restored with other content than the snapshot has"
    return ""


@contextmanager
def scratch_directory(parent: Path) -> Iterator[Path]:
    """Provide a directory of this process below ``parent``, which is removed at the end.

    What a drill that was killed has left there is removed first.

    Raises:
        OSError: it cannot be made.
    """
    _remove_leftovers(parent)
    while True:
        path = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Before it was locked another drill may have taken it for a leftover.
        if path.exists():
            break
        os.close(fd)
    try:
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        # Closed last: it is no leftover while this process removes it.
        os.close(fd)


def _remove_leftovers(parent: Path) -> None:
    """Remove directories of drills of this user that were killed: nobody has a lock on them."""
    for path in parent.glob(f"{_PREFIX}*"):
        try:
            fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue
        try:
            if os.fstat(fd).st_uid == os.geteuid():
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        except BlockingIOError:
            # Of a drill that runs.
            pass
        finally:
            os.close(fd)
