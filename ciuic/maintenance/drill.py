"""Drill of a rescue: files of a snapshot restored into a scratch directory, and compared with what the snapshot says of them.

Guarantees: every directory tree of the snapshot is read. Content is read back from the restored files, and each block is
compared with its chunk id; so are type, mode, modification time, extended attributes, targets of symbolic links, and that names of
one inode are one again. A seed chooses the same files of the same snapshot. The space that restored files of a sample take is that
of the largest of them, or `_BATCH_BYTES`: they are restored in batches and removed after the comparison.

Not compared is what the drill may not restore: owners where it is not root's, times and attributes that the scratch directory's file
system does not hold, device nodes and other special attributes (ciuic.restore.attributes).
"""

from __future__ import annotations

import fcntl
import heapq
import os
import posixpath
import random
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from ciuic.compare.diff import PathChange, diff_restored
from ciuic.errors import CiuicError, Damaged, NotFound, NotPermitted
from ciuic.history import latest_change
from ciuic.printable import one_line
from ciuic.protocol.last_drill import LastDrill
from ciuic.repository import Repository
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.errors import Archived
from ciuic.repository.lookup import Located, children, find, is_within, join
from ciuic.restore import RestorePlan, RestoreTarget, Result, execute
from ciuic.restore.attributes import REMOVABLE, SpecialFilter, kind_of
from ciuic.restore.model import Kept
from ciuic.system.child_process import is_privileged
from ciuic.system.disk import READ_DIRECTORY, try_lock
from ciuic.system.ownership import find_flaw
from ciuic.types import FLAG_MOUNTPOINT, Entry, RootRecord, Snapshot
from ciuic.units import human_size
from ciuic.verdicts.model import Checkpoint, Verdict
from ciuic.verdicts.sources import SnapshotDirectory
from ciuic.verdicts.verdict import Named, checkpoints_in, judge_file, may_hold_checkpoints, named_by

if TYPE_CHECKING:
    from ciuic.repository.snapshots import CommittedSnapshots

DEFAULT_SAMPLE_BYTES: Final = 1 << 30
DEFAULT_SAMPLE_FILES: Final = 1000
_FILE_BYTES: Final = 256 << 10
"""Content that takes as long as a file without any: by bytes alone, a sample of small files would make days of seconds."""
_BATCH_BYTES: Final = 64 << 20
_BATCH_FILES: Final = 64
# Directories that are searched for the newest checkpoint: those with the newest files that may be one.
_CHECKPOINT_DIRECTORIES: Final = 8
_CANDIDATES: Final = 16
"""Newest files of these that are asked for their format."""
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
    verdicts: tuple[Checkpoint, ...] = ()
    """Checkpoints of which something was restored, with the verdict on each."""

    @property
    def bytes_per_second(self) -> float:
        """Rate of restoring and comparing."""
        return self.bytes_read / max(self.seconds, 0.001)

    @property
    def estimated_seconds(self) -> float:
        """Time that a restore of the whole snapshot would take: of files and of bytes, whichever of them the sample has more of."""
        done = self.bytes_read + self.files * _FILE_BYTES
        return self.seconds * max(1.0, (self.bytes_total + self.files_total * _FILE_BYTES) / max(done, 1))


def choose_snapshots(store: CommittedSnapshots, seed: int) -> list[Snapshot]:
    """Return the snapshots with files that a drill restores from: the newest, and another at random.

    Raises:
        NotFound: there is no snapshot, or none of them has a file: to restore nothing exactly proves nothing.
    """
    snapshots = store.list(safety=False)
    found = [one for one in snapshots if one.files]
    if snapshots and not found:
        raise NotFound("no snapshot has a file to restore: a drill of nothing proves nothing")
    if not found:
        raise NotFound("the repository has no snapshot to restore from", hint="ciuic snapshot takes one")
    ids = [found[0].id]
    if len(found) > 1:
        # No secret: the seed has to choose the same one again.
        ids.append(random.Random(seed).choice(found[1:]).id)
    return [store.load(one) for one in ids]


def outcome_of(done: Sequence[tuple[Snapshot, DrillResult]], seconds: float) -> LastDrill:
    """Return the record of a drill of these snapshots, at least one: of the first that is damaged, else of the first."""
    snapshot, result = next((one for one in done if one[1].damages), done[0])
    damages = result.damages
    return LastDrill(
        time_ns=time.time_ns(),
        verdict="damaged" if damages else "good",
        seconds=seconds,
        reason=f"{one_line(damages[0].path)}: {damages[0].reason}" if damages else "",
        snapshot=str(snapshot.id),
        files=sum(one.files for _, one in done),
        bytes_read=sum(one.bytes_read for _, one in done),
        estimated_seconds=result.estimated_seconds,
    )


def failed_outcome(error: CiuicError, seconds: float) -> LastDrill:
    """Return the record of a drill that ended with an error."""
    return LastDrill(
        time_ns=time.time_ns(),
        verdict="damaged" if isinstance(error, Damaged) else "failed",
        seconds=seconds,
        reason=error.message,
    )


def run_drill(
    repository: Repository,
    snapshot: Snapshot,
    scratch: Path,
    *,
    seed: int,
    sample_bytes: int = DEFAULT_SAMPLE_BYTES,
    sample_files: int = DEFAULT_SAMPLE_FILES,
    within: Sequence[bytes] = (),
    patterns: Sequence[str] = (),
    between: Callable[[], None] = lambda: None,
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
        within: Absolute paths to which the choice is restricted; empty for the whole snapshot.
        patterns: The user's patterns of what is one checkpoint each.
        between: Called often, from any thread, so that the caller can pause.
        progress: Called with (bytes compared, bytes to compare).

    Raises:
        CiuicError: the sample cannot be restored here, or the store does not answer.
        NotFound: the snapshot does not have one of the paths, or was removed meanwhile.
        Archived: a file of the sample lies in an archive of the store.
    """
    chosen = _Choice(repository, snapshot, seed, sample_files, within, patterns)
    sample = chosen.sample(sample_bytes)
    # After the choice: reading directories takes no more time for a larger sample.
    began = time.monotonic()
    require_space(repository, scratch, [[file.entry] for file in sample])
    damages = list(chosen.damages)
    all_bytes = sum(one.entry.size_bytes for one in sample)
    done_bytes = 0
    for batch in _batches(sample):
        with tempfile.TemporaryDirectory(prefix="batch-", dir=scratch) as place:
            targets = {os.fsencode(f"{place}/{number}"): file for number, file in enumerate(batch)}
            damages += restore_and_compare(repository, snapshot, targets, between)
        done_bytes += sum(one.entry.size_bytes for one in batch)
        progress(done_bytes, all_bytes)
    seconds = time.monotonic() - began
    verdicts, unread = chosen.verdicts(sample)
    if (damages or unread) and snapshot.id not in repository.snapshots.names():
        # What was missing may be what prune has removed with it.
        raise NotFound(f"{snapshot.id} was removed while it was drilled", hint="run it again")
    return DrillResult(
        seed=seed,
        checkpoint=chosen.checkpoint,
        files=len(sample),
        bytes_read=all_bytes,
        files_total=chosen.files_total,
        bytes_total=chosen.bytes_total,
        seconds=seconds,
        damages=tuple(dict.fromkeys([*damages, *unread])),
        verdicts=verdicts,
    )


def restore_whole(
    repository: Repository,
    snapshot: Snapshot,
    path: bytes,
    scratch: Path,
    *,
    patterns: Sequence[str] = (),
    between: Callable[[], None] = lambda: None,
) -> tuple[DrillResult, Path]:
    """Restore all of a file or directory of a snapshot below a directory, and compare it with the snapshot.

    Args:
        repository: Repository of the snapshot.
        snapshot: The snapshot.
        path: Absolute path, as it was at the snapshot.
        scratch: Directory for what is restored, which stays.
        patterns: The user's patterns of what is one checkpoint each.
        between: Called often, from any thread, so that the caller can pause.

    Returns:
        The result, and where the file or directory is now.

    Raises:
        NotFound: the snapshot does not have the path.
        CiuicError: it cannot be restored here.
    """
    source = find(repository, snapshot, path)
    chosen = _Choice(repository, snapshot, 0, 0, [path], patterns)
    files = chosen.everything()
    began = time.monotonic()
    require_space(repository, scratch, [[file.entry for file in files]])
    place = scratch / os.fsdecode(posixpath.basename(source.path) or b"root")
    found = [*restore_and_compare(repository, snapshot, {os.fsencode(place): source}, between)]
    seconds = time.monotonic() - began
    verdicts, unread = chosen.verdicts(files)
    result = DrillResult(
        seed=0,
        checkpoint=chosen.checkpoint,
        files=len(files),
        bytes_read=chosen.bytes_total,
        files_total=len(files),
        bytes_total=chosen.bytes_total,
        seconds=seconds,
        damages=tuple(dict.fromkeys([*found, *chosen.damages, *unread])),
        verdicts=verdicts,
    )
    return result, place


def newest_checkpoint_directory(
    repository: Repository, snapshot: Snapshot, patterns: Sequence[str] = ()
) -> bytes:
    """Return the directory with the newest checkpoint of a snapshot, or the one that is it.

    Raises:
        NotFound: the snapshot has none.
    """
    path = _Choice(repository, snapshot, 0, 0, patterns=patterns).checkpoint
    if not path:
        raise NotFound(
            f"no checkpoint was found in {snapshot.id}", hint="-p names the directory that is restored"
        )
    with suppress(NotFound):
        if find(repository, snapshot, path).entry.is_dir:
            return path
    return posixpath.dirname(path)


class _Choice:
    """Files of a snapshot to restore: its newest checkpoint, and others at random."""

    def __init__(
        self,
        repository: Repository,
        snapshot: Snapshot,
        seed: int,
        sample_files: int,
        within: Sequence[bytes] = (),
        patterns: Sequence[str] = (),
    ) -> None:
        self._repository = repository
        self._patterns = patterns
        self._named: dict[bytes, Named | None] = {}
        self._snapshot = snapshot
        self._tops = [find(repository, snapshot, path) for path in within] or [
            Located(root, root.path, root.entry) for root in snapshot.roots
        ]
        self._places: dict[bytes, Located] = {}
        """Directories that may hold checkpoints."""
        self.files_total = 0
        self.bytes_total = 0
        self.damages: list[DrillDamage] = []
        self.checkpoint = b""
        self._of_checkpoint: list[Located] = []
        # The last `sample_files` in a random order of all files: (negative rank, number in the walk, file).
        self._ranked: list[tuple[float, int, Located]] = []
        # Latest change of each directory, and those of one step in which the walk is.
        places: dict[bytes, int] = {}
        steps: list[Located] = []
        # The directory above the one that the user has named, in which the walk is, with that one's path.
        named: tuple[Located, bytes] | None = None
        # No secret: it has to choose the same files again.
        order = random.Random(seed)
        for directory, files in self._walk():
            newest_ns = 0
            if named is not None and not is_within(directory.path, named[1]):
                named = None
            if named is None and self._is_named(directory.root, directory.path, is_dir=True):
                named = find(repository, snapshot, posixpath.dirname(directory.path)), directory.path
            for file in files:
                self.files_total += 1
                self.bytes_total += file.entry.size_bytes
                ranked = (-order.random(), self.files_total, file)
                if len(self._ranked) < sample_files:
                    heapq.heappush(self._ranked, ranked)
                elif sample_files:
                    heapq.heappushpop(self._ranked, ranked)
                if (
                    named is not None
                    or may_hold_checkpoints([posixpath.basename(file.path)])
                    or self._is_named(file.root, file.path, is_dir=False)
                ):
                    newest_ns = max(newest_ns, file.entry.mtime_ns, 1)
            steps = [one for one in steps if is_within(directory.path, one.path)]
            if newest_ns:
                # All below the directory of a step may be one checkpoint; what the user has named has no others in it.
                for place in (directory, *steps) if named is None else (named[0],):
                    self._places[place.path] = place
                    places[place.path] = max(newest_ns, places.get(place.path, 0))
            if may_hold_checkpoints([], directory.path):
                steps.append(directory)
            if snapshot.is_state and not within:
                self._of_checkpoint += files
        if snapshot.is_state and not within:
            self.checkpoint = snapshot.roots[0].path
        else:
            newest = heapq.nlargest(_CHECKPOINT_DIRECTORIES, places, key=lambda path: (places[path], path))
            self._find_checkpoint([self._places[path] for path in newest])

    def _named_in(self, root: RootRecord) -> Named | None:
        if root.path not in self._named:
            self._named[root.path] = named_by(root.path, self._patterns)
        return self._named[root.path]

    def _is_named(self, root: RootRecord, path: bytes, *, is_dir: bool) -> bool:
        named = self._named_in(root)
        return named is not None and path != root.path and named(path, is_dir)

    def everything(self) -> list[Located]:
        """Return all files and symbolic links that a restore would bring back."""
        return [file for _, files in self._walk() for file in files]

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
        # Names of one inode side by side: restored in one batch they have to be one inode again.
        return sorted(found, key=lambda one: (one.root.path, one.entry.link) if one.entry.link else (b"", 0))

    def verdicts(self, sample: Sequence[Located]) -> tuple[tuple[Checkpoint, ...], list[DrillDamage]]:
        """Return the checkpoints that have a file in the sample, judged, and directories that cannot be read."""
        judged: list[Checkpoint] = []
        unread: list[DrillDamage] = []
        paths = {file.path for file in sample}
        # A part may lie in a directory below the one with the index.
        above = {path for file in sample for path in _directories_above(file.path)}
        for path in sorted(above & self._places.keys()):
            place = self._places[path]
            directory = SnapshotDirectory(self._repository, self._snapshot, place, self._earlier(place))
            try:
                found = checkpoints_in(directory, named=self._named_in(place.root))
            except Damaged as error:
                unread.append(DrillDamage(path, error.message))
                continue
            judged += [one for one in found if not paths.isdisjoint(join(path, name) for name in one.files)]
        return tuple(judged), unread

    def _earlier(self, place: Located) -> Callable[[int], Snapshot | None]:
        """Return the function that finds the newest snapshot of a directory's root before a time."""

        def before(time_ns: int) -> Snapshot | None:
            for one in self._repository.snapshots.list():
                if one.time_ns < time_ns and one.host == self._snapshot.host:
                    with suppress(NotFound, Damaged):
                        snapshot = self._repository.snapshots.load(one.id)
                        if any(root.path == place.root.path for root in snapshot.roots):
                            return snapshot
            return None

        return before

    def _walk(self) -> Iterator[tuple[Located, list[Located]]]:
        """Yield each directory with its regular files, depth first."""
        for top in self._tops:
            if not top.entry.is_dir:
                above = posixpath.dirname(top.path)
                yield (
                    find(self._repository, self._snapshot, above),
                    [top] if _is_restorable(top.entry) else [],
                )
                continue
            lineage = Lineage()
            # For the frame of the top alone.
            lineage.enter(b"")
            stack = [iter([top])]
            while stack:
                at = next(stack[-1], None)
                if at is None:
                    stack.pop()
                    lineage.leave()
                    continue
                try:
                    below = [
                        Located(top.root, join(at.path, entry.name), entry)
                        for entry in children(self._repository, top.root, at.entry)
                    ]
                    lineage.enter(at.entry.content)
                except Damaged as error:
                    self.damages.append(DrillDamage(at.path, error.message))
                    continue
                yield at, [one for one in below if _is_restorable(one.entry)]
                stack.append(iter([one for one in below if one.entry.is_dir and one.entry.content]))

    def _find_checkpoint(self, places: Iterable[Located]) -> None:
        """Set the newest checkpoint in these directories, of a format that is known if there is one."""
        candidates: list[tuple[int, Checkpoint, Located, SnapshotDirectory]] = []
        for place in places:
            directory = SnapshotDirectory(self._repository, self._snapshot, place, lambda time_ns: None)
            try:
                found = checkpoints_in(
                    directory,
                    lambda source: Verdict("UNKNOWN", "not judged"),
                    named=self._named_in(place.root),
                )
                times = {entry.name: entry.mtime_ns for entry in directory.entries()}
            except Damaged as error:
                self.damages.append(DrillDamage(place.path, error.message))
                continue
            candidates.extend((latest_change(directory, one, times), one, place, directory) for one in found)
        if not candidates:
            return
        # Of what is found in a directory and as a part of what is above it, the whole.
        candidates.sort(key=lambda one: (one[0], len(one[1].files), one[1].path), reverse=True)
        # Any file may be called NAME.bin. Few are judged: the newest is one as a rule, and judging reads some kilobytes.
        known = (one for one in candidates[:_CANDIDATES] if _is_of_known_format(one[1], one[3]))
        _, found_checkpoint, place, _ = next(known, candidates[0])
        self.checkpoint, names = found_checkpoint.path, found_checkpoint.files
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


def _is_of_known_format(checkpoint: Checkpoint, directory: SnapshotDirectory) -> bool:
    """Return whether a checkpoint has several files, which its index names, or is a file of a known format."""
    if len(checkpoint.files) != 1:
        return True
    source = directory.file(checkpoint.files[0])
    # One that cannot be read stays: that is what a drill finds.
    return source is None or not judge_file(source).is_foreign


def _is_restorable(entry: Entry) -> bool:
    """Return whether the entry is a file or symbolic link whose content the snapshot has."""
    return (entry.is_file or entry.is_symlink) and not entry.flags & FLAG_MOUNTPOINT and not kind_of(entry)


def _directories_above(path: bytes) -> Iterator[bytes]:
    while len(path) > 1:
        path = posixpath.dirname(path)
        yield path


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


def require_space(repository: Repository, scratch: Path, sets: Iterable[Sequence[Entry]]) -> None:
    """Raise CiuicError if the file system of the scratch directory lacks the space for a batch, or for the files of one of these sets."""
    status = os.statvfs(scratch)
    free_bytes = status.f_bavail * status.f_frsize
    needed_bytes = _BATCH_BYTES
    for entries in sets:
        set_bytes = sum(entry.size_bytes for entry in entries)
        if set_bytes > free_bytes:
            # Holes take no space: counted where they decide, because that reads the maps of the files.
            set_bytes = sum(_stored_bytes(repository, entry) for entry in entries)
        needed_bytes = max(needed_bytes, set_bytes)
    if needed_bytes > free_bytes:
        raise CiuicError(
            f"{one_line(str(scratch.parent))} has {human_size(free_bytes)} free, and the drill needs "
            f"{human_size(needed_bytes)} for the files that it restores at a time",
            hint="--scratch names a directory with more room",
        )


def _stored_bytes(repository: Repository, entry: Entry) -> int:
    """Return the size of a file without its holes; of one whose map cannot be read, which the restore finds, none."""
    if not entry.is_file:
        return entry.size_bytes
    blocks = blocks_of(entry.size_bytes, repository.block_size)
    try:
        stored = sum(1 for _ in repository.block_maps.ids(entry.content, entry.map_height, blocks))
    except Damaged:
        return 0
    return min(entry.size_bytes, stored * repository.block_size)


def restore_and_compare(
    repository: Repository,
    snapshot: Snapshot,
    targets: Mapping[bytes, Located],
    between: Callable[[], None] = lambda: None,
) -> Iterator[DrillDamage]:
    """Restore files or directories to these paths, and yield what is not as the snapshot says.

    Raises:
        CiuicError: something cannot be restored here, for a reason that lies in the destination.
        Archived: a file lies in an archive of the store.
    """
    plan = RestorePlan(
        repository=repository,
        snapshot=snapshot,
        targets=tuple(RestoreTarget(source, path, in_place=False) for path, source in targets.items()),
        overwrite=None,
        delete=False,
        kept=Kept(frozenset(), None),
        # Of no use here, and dangerous in a repository that others may write to.
        special=False,
    )
    result = execute(plan, progress=lambda state: between())
    bad: set[bytes] = set()
    for failure in result.failed:
        if failure.attribute:
            continue
        if not failure.damaged:
            raise CiuicError(
                f"the drill cannot restore {one_line(_source_path(targets, failure.path))} here: {failure.reason}",
                hint="--scratch names another directory",
            )
        bad.add(failure.path)
        yield DrillDamage(_source_path(targets, failure.path), failure.reason)
    if result.stopped:
        raise CiuicError(f"the drill ended early: {result.stopped}", hint="--scratch names another directory")
    compared = _Comparison(repository, result, between)
    inodes: dict[tuple[bytes, int], tuple[int, int]] = {}
    for path, source in targets.items():
        if path in bad:
            continue
        try:
            for at, reason in compared.differences(source, path):
                if not any(is_within(at, other) for other in bad):
                    yield DrillDamage(_source_path(targets, at), reason)
        except Archived:
            raise
        except Damaged as error:
            yield DrillDamage(source.path, error.message)
        if source.entry.link:
            status = os.lstat(path)
            inode = status.st_dev, status.st_ino
            if inodes.setdefault(
                (source.root.path, source.entry.link), inode
            ) != inode and compared.has_links(path):
                yield DrillDamage(
                    source.path, "it was restored as a file of its own, and is a hard link in the snapshot"
                )


def _source_path(targets: Mapping[bytes, Located], path: bytes) -> bytes:
    """Return the path in the snapshot of what is restored at a path."""
    for top, source in targets.items():
        if is_within(path, top):
            return source.path + path[len(top) :]
    return path


class _Comparison:
    """Compares what was restored with its snapshot, less what could not be restored here."""

    def __init__(self, repository: Repository, result: Result, between: Callable[[], None]) -> None:
        self._repository = repository
        self._between = between
        self._unset = {failure.path for failure in result.failed if failure.attribute}
        self._has_owners = os.geteuid() == 0 and not result.owner_failures
        self._has_times = not result.time_failures
        self._special = SpecialFilter(False, lambda path, what: None)

    def has_links(self, path: bytes) -> bool:
        """Return whether the file system took hard links."""
        return path not in self._unset

    def differences(self, source: Located, path: bytes) -> Iterator[tuple[bytes, str]]:
        """Yield (restored path, reason) for what is not as the snapshot says."""
        for change in diff_restored(self._repository, source, path, self._between):
            if reason := self._reason(source, change):
                yield change.path, reason

    def _reason(self, source: Located, change: PathChange) -> str:
        old = change.old
        if old is None:
            return "it was restored, and is not in the snapshot"
        if change.kind == "removed":
            return "" if kind_of(old) else "it was not restored"
        if change.kind == "retyped":
            return "it was restored as a file of another type"
        details = set(change.details)
        if "unreadable" in details:
            # The mode may withhold it from a user who is not root: content is what matters then.
            return self._unreadable(source, change, change.details[-1])
        if change.path in self._unset:
            details &= {"content", "target"}
        if "owner" in details and not self._has_owners:
            # Where the owner is not set, neither are rights that only the recorded group has.
            details -= {"owner", "mode"}
        if not self._has_times:
            details.discard("mtime")
        new = change.new
        if new is not None and details & {"mode", "xattrs"}:
            wanted, xattrs = self._special.permitted(change.path, old, self._repository.trees.xattrs(old))
            if stat.S_IMODE(wanted.mode) == stat.S_IMODE(new.mode):
                details.discard("mode")
            # Labels that the kernel gives to every new file are none of the snapshot.
            found = {pair for pair in new.xattrs if pair in xattrs or pair[0].startswith(REMOVABLE)}
            if found == set(xattrs):
                details.discard("xattrs")
        details.discard("device")
        if not details:
            return ""
        return f"it was restored with other {', '.join(sorted(details))} than the snapshot has"

    def _unreadable(self, source: Located, change: PathChange, reason: str) -> str:
        old = change.old
        assert old is not None
        if os.geteuid() == 0 or old.mode & stat.S_IRUSR or not old.is_file:
            return f"it was restored and cannot be read: {reason}"
        mode = stat.S_IMODE(os.lstat(change.path).st_mode)
        os.chmod(change.path, 0o600)
        try:
            again = Located(source.root, change.path, old)
            for found in diff_restored(self._repository, again, change.path, self._between):
                if "content" in found.details:
                    return "it was restored with other content than the snapshot has"
        finally:
            os.chmod(change.path, mode)
        return ""


@contextmanager
def scratch_directory(
    parent: Path, prefix: str = _PREFIX, empty: Callable[[Path], object] = lambda path: None
) -> Iterator[Path]:
    """Provide a directory of this process below ``parent``, which is removed at the end.

    What a process that was killed has left there is removed first.

    Args:
        parent: Where it is made.
        prefix: Beginning of its name, by which leftovers are known.
        empty: Called before one is removed, to take away what must not be walked into.

    Raises:
        NotPermitted: as root, another user may exchange what is in ``parent``.
        OSError: it cannot be made.
    """
    # A name that nothing has: others may write to /tmp itself, and cannot rename what is in it.
    flaw = find_flaw(parent / f"{prefix}{os.urandom(8).hex()}") if is_privileged() else None
    if flaw is not None:
        raise NotPermitted(
            f"{one_line(os.fspath(parent))} is no place for root's files: {flaw.found}",
            hint="--scratch, or TMPDIR, names a directory that root alone may rename",
        )
    _remove_leftovers(parent, prefix, empty)
    while True:
        path = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        fcntl.flock(fd, fcntl.LOCK_EX)
        # Before it was locked another drill may have taken it for a leftover.
        if path.exists():
            break
        os.close(fd)
    try:
        yield path
    finally:
        empty(path)
        shutil.rmtree(path, ignore_errors=True)
        # Closed last: it is no leftover while this process removes it.
        os.close(fd)


def _remove_leftovers(parent: Path, prefix: str, empty: Callable[[Path], object]) -> None:
    """Remove directories of processes of this user that were killed: nobody has a lock on them."""
    for path in parent.glob(f"{prefix}*"):
        try:
            fd = os.open(path, READ_DIRECTORY)
        except OSError:
            continue
        try:
            # A drill that runs has its lock.
            if os.fstat(fd).st_uid == os.geteuid() and try_lock(fd):
                empty(path)
                shutil.rmtree(path, ignore_errors=True)
        finally:
            os.close(fd)
