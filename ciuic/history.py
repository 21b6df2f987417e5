"""History of a root over its snapshots: versions of a path, names, what changed, and checkpoints with their verdicts.

Everything is found by comparing the ids of trees, and nothing that is equal is read, so that no index is needed: a directory
whose trees are equal in two snapshots, and a node of a directory's tree, is read once. Content is compared by its id; only
checkpoints, which are judged, are read. Works with every `Repository`, a remote one too.
"""

from __future__ import annotations

import fnmatch
import posixpath
import re
import stat
import sys
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from typing import Final, Literal, NamedTuple, NoReturn

from ciuic.compare.diff import PathChange, attribute_details, diff_snapshots
from ciuic.errors import Damaged, NotFound
from ciuic.printable import one_line
from ciuic.repository import Repository
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.errors import DamagedTree
from ciuic.repository.lookup import Located, find, is_within, join, resolve
from ciuic.repository.tree_format import TreeNode
from ciuic.types import ChunkId, Entry, RootRecord, Snapshot, order_of
from ciuic.verdicts.model import UNREADABLE, Checkpoint, Verdict
from ciuic.verdicts.not_finite import NumberBudget
from ciuic.verdicts.records import (
    DatedCheckpoint,
    VerdictRecord,
    VerdictRecords,
    age_of,
    may_carry,
    newest_of,
    snapshot_digest,
)
from ciuic.verdicts.sources import FileSource, SnapshotDirectory
from ciuic.verdicts.verdict import (
    FileVerdicts,
    JudgeFile,
    checkpoints_in,
    judge_file,
    may_hold_checkpoints,
    named_by,
)

MAX_PATH_BYTES: Final = 4096
"""Longest path of a directory that is looked into, as of the kernel (PATH_MAX). The text of all paths in a chain of directories grows with
the square of its levels: a gigabyte for 3,000."""


class PathTooLong(Damaged):
    """A directory has a longer path than is looked at: the answer is without what it holds."""

    def __init__(self, path: bytes) -> None:
        super().__init__(f"its path has {len(path)} bytes, more than {MAX_PATH_BYTES}")


OnDamage = Callable[[Snapshot, bytes, Damaged], None]
"""Receives a path that cannot be read in a snapshot, and why. It is passed over if this returns."""


def _raise_damage(snapshot: Snapshot, path: bytes, error: Damaged) -> NoReturn:
    """Raise the error: nothing is passed over."""
    raise error


class Timeline:
    """Snapshots that have one root, newest first.

    The same path on two hosts is two roots.
    """

    def __init__(self, host: str, path: bytes, snapshots: Sequence[Snapshot]) -> None:
        self.host = host
        self.path = path
        self.snapshots = snapshots
        # Where the clock was set, times are not in the order of commits.
        self._by_time = sorted(snapshots, key=lambda snapshot: (snapshot.time_ns, order_of(snapshot)))
        self._times = [snapshot.time_ns for snapshot in self._by_time]

    def root_of(self, snapshot: Snapshot) -> RootRecord:
        """Return the root in one of these snapshots."""
        return next(root for root in snapshot.roots if root.path == self.path)

    def before(self, time_ns: int) -> Snapshot | None:
        """Return the newest snapshot before this time, or None."""
        at = bisect_left(self._times, time_ns)
        return self._by_time[at - 1] if at else None

    def beside(self, snapshot: Snapshot) -> list[Snapshot]:
        """Return the snapshots before and after one of these by time, as far as there are any."""
        earlier, after = self.before(snapshot.time_ns), bisect_right(self._times, snapshot.time_ns)
        return [*filter(None, (earlier,)), *self._by_time[after : after + 1]]

    def id_before(self, time_ns: int) -> str:
        """Return the id of the newest snapshot before this time; empty for none."""
        found = self.before(time_ns)
        return "" if found is None else str(found.id)

    def not_after(self, time_ns: int) -> Snapshot | None:
        """Return the newest snapshot at or before this time, or None."""
        return self.before(time_ns + 1)


def timelines(
    snapshots: Sequence[Snapshot], wanted: Callable[[bytes], bool] = lambda path: True
) -> list[Timeline]:
    """Return a timeline for each root and host, by path.

    Args:
        snapshots: Snapshots of one repository, newest first.
        wanted: True for the paths of the roots to return.
    """
    found: dict[tuple[bytes, str], list[Snapshot]] = {}
    for snapshot in snapshots:
        for root in snapshot.roots:
            if wanted(root.path):
                found.setdefault((root.path, snapshot.host), []).append(snapshot)
    return [Timeline(host, path, found[path, host]) for path, host in sorted(found)]


VersionKind = Literal["added", "changed", "retyped", "gone"]


class PathVersion(NamedTuple):
    """A version of a path, or its absence."""

    kind: VersionKind
    """Difference from the version before; ``added`` if there was none."""
    first: Snapshot
    """Oldest snapshot that has it; for ``gone``, the oldest without the path."""
    last: Snapshot
    """Newest snapshot that has it, without another version between."""
    snapshots: int
    """Number of snapshots from the first to the last."""
    entry: Entry | None
    """Complete entry; None for ``gone``."""
    details: tuple[str, ...] = ()
    """Names of what changed, as `ciuic.compare.diff` has them."""
    host: str = ""
    ordinary: Snapshot | None = None
    """Newest snapshot that has it and is no safety snapshot; None if all are."""


def versions(
    repository: Repository, timeline: Timeline, path: bytes, *, on_damage: OnDamage = _raise_damage
) -> Iterator[PathVersion]:
    """Yield the versions of an absolute, normalised path below the root of a timeline, newest first.

    The path's absence is a version, except before it was first there. Snapshots that were made without the root say nothing
    of the path, and neither do those in which it cannot be read.

    Args:
        repository: Repository of the snapshots.
        timeline: Root with the path.
        path: The path.
        on_damage: Called for each snapshot in which the path cannot be read.
    """
    finder = _PathFinder(repository, path[len(timeline.path) :])
    run: list[Snapshot] = []
    entry: Entry | None = None
    for snapshot in timeline.snapshots:
        try:
            found = finder.find(timeline.root_of(snapshot))
        except Damaged as error:
            on_damage(snapshot, path, error)
            continue
        if run and not _equal(repository, found, entry):
            yield _version(repository, run, entry, found, timeline.host)
            run = []
        # The entry of the oldest snapshot of the run; its other attributes are equal.
        entry = found
        run.append(snapshot)
    if run and entry is not None:
        yield _version(repository, run, entry, None, timeline.host)


def _version(
    repository: Repository, run: list[Snapshot], entry: Entry | None, before: Entry | None, host: str
) -> PathVersion:
    kind: VersionKind = "changed"
    details: tuple[str, ...] = ()
    if entry is None:
        kind = "gone"
    elif before is None:
        kind = "added"
    elif stat.S_IFMT(entry.mode) != stat.S_IFMT(before.mode):
        kind = "retyped"
    else:
        details = tuple(_details(repository, before, entry))
    ordinary = next((one for one in run if not one.is_safety), None)
    return PathVersion(kind, run[-1], run[0], len(run), entry, details, host, ordinary)


def _details(repository: Repository, old: Entry, new: Entry) -> list[str]:
    details = attribute_details(old, new)
    if (old.content, old.map_height) != (new.content, new.map_height) or (
        old.is_file and old.size_bytes != new.size_bytes
    ):
        details.insert(0, "content")
    if old.xattrs != new.xattrs and _differ_in_xattrs(repository, old, new):
        details.append("xattrs")
    return details


def _differ_in_xattrs(repository: Repository, old: Entry, new: Entry) -> bool:
    try:
        return repository.trees.xattrs(old) != repository.trees.xattrs(new)
    except Damaged:
        # They are stored apart, so they most likely differ; the version is told all the same.
        return True


def _equal(repository: Repository, one: Entry | None, other: Entry | None) -> bool:
    if one is None or other is None:
        return one is other
    return stat.S_IFMT(one.mode) == stat.S_IFMT(other.mode) and not _details(repository, one, other)


class _PathFinder:
    """Lookup of one path in many trees; where a directory is the same as in the tree before, nothing below it is looked up."""

    def __init__(self, repository: Repository, relative: bytes) -> None:
        self._repository = repository
        self._names = [name for name in relative.split(b"/") if name]
        # For each name the tree in which it was looked up last, and what was found.
        self._last: list[tuple[bytes, Entry | None]] = [(b"\0", None)] * len(self._names)

    def find(self, root: RootRecord) -> Entry | None:
        """Return the complete entry; None for a path that is not there."""
        entry: Entry | None = root.entry
        for depth, name in enumerate(self._names):
            if entry is None or not entry.is_dir:
                return None
            tree, found = self._last[depth]
            if tree != entry.content:
                found = self._repository.trees.entry(entry.content, name) if entry.content else None
                self._last[depth] = entry.content, found
            entry = found
        # The attributes of several names of one inode stand in a table that changes by itself.
        return entry and resolve(self._repository, root, entry)


class GlobMatcher:
    """Shell pattern over text, component by component as in gitignore.

    ``*``, ``?`` and ``[ ]`` never match a slash; ``**`` alone between slashes stands for any number of directories. A pattern
    without a slash is compared with the name, one that begins with a slash with the whole path, any other with the end of the
    path. A slash at the end means directories alone.

    Args:
        pattern: Pattern as bytes. ``?`` and ``[ ]`` match one character of UTF-8, and one byte of what is not UTF-8.

    Raises:
        ValueError: no name can match.
    """

    def __init__(self, pattern: bytes) -> None:
        stripped = _text(pattern).rstrip("/")
        parts = [part for part in stripped.split("/") if part]
        if not parts:
            raise ValueError('it names nothing: write a name, such as "*.safetensors"')
        self._only_directories = pattern.endswith(b"/")
        # "**" at the end is everything below, and not the directory itself.
        last = "*" if parts[-1] == "**" else parts.pop()
        above = parts if stripped.startswith("/") else ["**", *parts]
        self._above = [None if part == "**" else _component(part) for part in above]
        self._name = _component(last)

    def of(self, folder: bytes, entries: list[Entry]) -> list[Entry]:
        """Return those entries of a directory that are looked for."""
        if not self._leads_to(folder):
            return []
        name, only_directories = self._name, self._only_directories
        return [
            entry for entry in entries if name(_text(entry.name)) and (entry.is_dir or not only_directories)
        ]

    def matches(self, path: bytes, *, is_directory: bool) -> bool:
        """Return whether an absolute path is looked for."""
        folder, _, name = path.rpartition(b"/")
        is_named = self._name(_text(name)) is not None and (is_directory or not self._only_directories)
        return is_named and self._leads_to(folder)

    def _leads_to(self, folder: bytes) -> bool:
        """Return True if what stands before the last component matches a directory."""
        above = self._above
        if above == [None]:
            return True
        # Positions in the pattern that the components so far lead to: one pass, however many ** there are.
        states = _past_stars(above, {0})
        for part in _text(folder).split("/"):
            if part:
                states = _past_stars(
                    above, {following for at in states for following in _step(above, at, part)}
                )
        return len(above) in states


_Component = Callable[[str], "re.Match[str] | None"]


def _text(name: bytes) -> str:
    # A byte that is not UTF-8 becomes a character by itself.
    return name.decode("utf-8", "surrogateescape")


def _component(part: str) -> _Component:
    return re.compile(fnmatch.translate(part)).match


def _step(above: list[_Component | None], at: int, part: str) -> list[int]:
    """Return the positions behind one more directory."""
    if at == len(above):
        return []
    token = above[at]
    if token is None:
        return [at]
    return [at + 1] if token(part) else []


def _past_stars(above: list[_Component | None], states: set[int]) -> set[int]:
    """Add the positions behind each ``**``, which may stand for no directory at all."""
    for at, token in enumerate(above):
        if token is None and at in states:
            states.add(at + 1)
    return states


class FoundPath(NamedTuple):
    """A path that was found, as the newest snapshot that has it."""

    path: bytes
    entry: Entry
    """Complete entry."""
    snapshot: Snapshot
    """Newest snapshot with the path."""
    is_deleted: bool
    """True if the newest snapshot of the root does not have it, as far as that can be read."""
    host: str


def search(
    repository: Repository,
    timeline: Timeline,
    matcher: GlobMatcher,
    below: bytes = b"",
    *,
    deep: bool = True,
    on_damage: OnDamage = _raise_damage,
) -> Iterator[FoundPath]:
    """Yield every path that matches, newest snapshot first and by name within a directory.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to search.
        matcher: Which paths to yield.
        below: Absolute path; only what lies below it. Empty for the whole root.
        deep: False for the names in that directory alone, without what lies below them.
        on_damage: Called for what cannot be read, a tree once however many snapshots have it, and for directories that
            are not looked into because of their long paths (`PathTooLong`).
    """
    walk = _Walk(repository, timeline, matcher, deep, on_damage)
    names = [name for name in below[len(timeline.path) :].split(b"/") if name]
    top = join(timeline.path, b"/".join(names)) if names else timeline.path
    for snapshot in timeline.snapshots:
        tree: bytes = timeline.root_of(snapshot).entry.content
        try:
            for name in names:
                entry = repository.trees.entry(tree, name) if tree else None
                tree = entry.content if entry is not None and entry.is_dir else b""
        except Damaged as error:
            walk.pass_over(snapshot, top, error)
            continue
        yield from walk.walk(snapshot, tree, top)


class _Walk:
    """Walk over the trees of several snapshots, which passes over what it has seen at the same path."""

    def __init__(
        self,
        repository: Repository,
        timeline: Timeline,
        matcher: GlobMatcher,
        deep: bool,
        on_damage: OnDamage,
    ) -> None:
        self._repository = repository
        self._timeline = timeline
        self._matcher = matcher
        self._deep = deep
        self._on_damage = on_damage
        # What the newest snapshot has below these is not known.
        self._unknown: list[bytes] = []
        self._seen: dict[bytes, set[bytes]] = {}
        self._found: set[bytes] = set()

    def pass_over(self, snapshot: Snapshot, path: bytes, error: Damaged) -> None:
        """Report a path that cannot be read."""
        self._on_damage(snapshot, path, error)
        if self._is_newest(snapshot):
            self._unknown.append(path)

    def _is_newest(self, snapshot: Snapshot) -> bool:
        return snapshot is self._timeline.snapshots[0]

    def _is_deleted(self, snapshot: Snapshot, path: bytes) -> bool:
        return not self._is_newest(snapshot) and not any(is_within(path, folder) for folder in self._unknown)

    def walk(self, snapshot: Snapshot, tree: bytes, top: bytes) -> Iterator[FoundPath]:
        """Yield what matches below a directory and was not found before."""
        if not tree or self._is_seen(top, tree):
            return
        lineage = Lineage()
        lineage.enter(tree)
        stack = [iter([(top, tree)])]
        while stack:
            here = next(stack[-1], None)
            if here is None:
                stack.pop()
                lineage.leave()
                continue
            folder, tree = here
            matching, below = self._directory(snapshot, folder, tree)
            for entry in matching:
                path = join(folder, entry.name)
                if path not in self._found:
                    try:
                        complete = resolve(self._repository, self._timeline.root_of(snapshot), entry)
                    except Damaged as error:
                        self.pass_over(snapshot, path, error)
                        continue
                    self._found.add(path)
                    yield FoundPath(
                        path, complete, snapshot, self._is_deleted(snapshot, path), self._timeline.host
                    )
            if below:
                try:
                    # Raises Damaged for a tree that contains itself.
                    lineage.enter(tree if folder != top else b"")
                except Damaged as error:
                    self.pass_over(snapshot, folder, error)
                    continue
                stack.append(iter(below))

    def _directory(
        self, snapshot: Snapshot, folder: bytes, tree: bytes
    ) -> tuple[list[Entry], list[tuple[bytes, bytes]]]:
        """Return what matches in the unseen nodes of a directory, and the (path, tree) of unseen directories."""
        is_dir = stat.S_ISDIR
        matching: list[Entry] = []
        below: list[tuple[bytes, bytes]] = []
        for node in self._unseen(snapshot, folder, tree):
            matching += self._matcher.of(folder, node.entries)
            for entry in node.entries if self._deep else ():
                if not is_dir(entry.mode) or not entry.content:
                    continue
                path = join(folder, entry.name)
                if len(path) > MAX_PATH_BYTES:
                    self._on_damage(snapshot, path, PathTooLong(path))
                else:
                    below.append((path, entry.content))
        return matching, [one for one in below if not self._is_seen(*one)]

    def _is_seen(self, folder: bytes, node: bytes) -> bool:
        return node in self._seen.get(folder, ())

    def _unseen(self, snapshot: Snapshot, folder: bytes, tree: bytes) -> Iterator[TreeNode]:
        """Yield the nodes of a directory that were not seen at this path; one that cannot be read is reported."""
        seen = self._seen.setdefault(folder, set())
        seen.add(tree)
        trees = self._repository.trees
        stack: list[tuple[ChunkId, int | None]] = [(ChunkId(tree), None)]
        while stack:
            id_, level_above = stack.pop()
            try:
                # Not `Trees.child`, which also sums up everything below: nothing here believes the parent's totals.
                node = trees.node(id_)
                if level_above is not None and node.level >= level_above:
                    raise DamagedTree(id_, "it is not the child that its parent describes")
            except Damaged as error:
                self.pass_over(snapshot, folder, error)
                continue
            yield node
            unseen = [ref.id for ref in node.refs if ref.id not in seen]
            seen.update(unseen)
            stack += [(child, node.level) for child in reversed(unseen)]


class Total(NamedTuple):
    """Regular files, and the sum of their sizes."""

    files: int = 0
    size_bytes: int = 0

    def plus(self, files: int, size_bytes: int) -> Total:
        """Return the sum."""
        return Total(self.files + files, self.size_bytes + size_bytes)


class DirectoryChanges(NamedTuple):
    """Changes in one directory. Sizes of overwritten files are those of now."""

    path: bytes
    """Absolute path."""
    added: Total = Total()
    overwritten: Total = Total()
    deleted: Total = Total()


class RootChanges(NamedTuple):
    """Changes of one root."""

    host: str
    root: bytes
    old: Snapshot
    new: Snapshot
    directories: list[DirectoryChanges]
    """Directories in which something changed, by path."""
    is_partial: bool = False
    """There are more changes than were to be counted."""


def changes_since(
    repository: Repository,
    timeline: Timeline,
    since_ns: int,
    *,
    rolled_up: bool = False,
    most: int | None = None,
) -> RootChanges | None:
    """Return what changed from the newest snapshot not after a time to the newest of all.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to compare.
        since_ns: Time; without a snapshot so old the oldest one is taken.
        rolled_up: Count each file in all directories above it, up to the root.
        most: Count no more than so many changed paths; None for all.

    Returns:
        None for a root with a single snapshot.

    Raises:
        Damaged: a tree cannot be read.
    """
    new = timeline.snapshots[0]
    old = timeline.not_after(since_ns) or timeline.snapshots[-1]
    if old.id == new.id:
        return None
    found = diff_snapshots(repository, old, new, timeline.path)
    directories = summed(islice(found, most), timeline.path, rolled_up=rolled_up)
    is_partial = most is not None and next(found, None) is not None
    return RootChanges(timeline.host, timeline.path, old, new, directories, is_partial)


def summed(changes: Iterable[PathChange], root: bytes, *, rolled_up: bool = False) -> list[DirectoryChanges]:
    """Return the sums of the changes of regular files by directory, in the order of their paths."""
    sums: dict[bytes, DirectoryChanges] = {}
    for change in changes:
        fields = _counted(change)
        folder = change.path.rpartition(b"/")[0] or b"/"
        while fields:
            total = sums.get(folder, DirectoryChanges(folder))
            for field, size_bytes in fields:
                total = total._replace(**{field: getattr(total, field).plus(1, size_bytes)})
            sums[folder] = total
            if not rolled_up or len(folder) <= len(root):
                break
            folder = folder.rpartition(b"/")[0] or b"/"
    return [sums[path] for path in sorted(sums)]


def _counted(change: PathChange) -> list[tuple[str, int]]:
    """Return (field of `DirectoryChanges`, bytes) for a change of a regular file."""
    old = change.old if change.old is not None and change.old.is_file else None
    new = change.new if change.new is not None and change.new.is_file else None
    if old is not None and new is not None:
        return [("overwritten", new.size_bytes)] if "content" in change.details else []
    fields = []
    if new is not None:
        fields.append(("added", new.size_bytes))
    if old is not None:
        fields.append(("deleted", old.size_bytes))
    return fields


class StoredCheckpoint(NamedTuple):
    """A checkpoint in a snapshot."""

    checkpoint: Checkpoint
    mtime_ns: int
    """Latest change of one of its files."""
    snapshot: Snapshot
    host: str


class JudgedRoot:
    """A root in a snapshot whose verdicts are known, for another snapshot of the same root: what is the same in both has the same verdicts.

    Args:
        entry: entry of the root directory.
        found: its checkpoints, all of them.
    """

    def __init__(self, entry: Entry, found: Sequence[DatedCheckpoint]) -> None:
        self.content = entry.content
        # In the order of paths, in which all below a directory stand together; with their places in the walk.
        self._found = sorted((one.checkpoint.path, number, one) for number, one in enumerate(found))
        self._paths = [path for path, _, _ in self._found]
        self._covered: dict[bytes, set[bytes]] = {}
        for path, _, one in self._found:
            above, name = posixpath.split(path)
            # A checkpoint of several files was found in its own directory or from the one above.
            for directory in (path, above):
                self._covered.setdefault(directory, set()).update(one.checkpoint.files)
            # One of NAME.index and NAME.data-… is called NAME, as a directory beside it may be.
            if all(file.startswith(name + b".") for file in one.checkpoint.files):
                self._covered[above].add(name)

    def within(self, directory: bytes) -> list[DatedCheckpoint]:
        """Return the checkpoints at a directory and below it, in the order of the walk."""
        below = join(directory, b"")
        # "0" follows "/", and sorts after all that begins with it.
        ranges = (
            (bisect_left, directory, bisect_right, directory),
            (bisect_left, below, bisect_left, below[:-1] + b"0"),
        )
        picked = {
            number: one
            for first, begin, last, end in ranges
            for _, number, one in self._found[first(self._paths, begin) : last(self._paths, end)]
        }
        return [picked[number] for number in sorted(picked)]

    def may_cover(self, directory: bytes, name: bytes) -> bool:
        """Return whether a name of a directory may be a part of a checkpoint, so that nothing in it was judged by itself."""
        return name in self._covered.get(directory, ())


def checkpoints(
    repository: Repository,
    timeline: Timeline,
    snapshot: Snapshot | None = None,
    *,
    path: bytes | None = None,
    on_damage: OnDamage = _raise_damage,
    records: VerdictRecords | None = None,
    judge: JudgeFile = judge_file,
    judged: JudgedRoot | None = None,
    patterns: Sequence[str] = (),
) -> Iterator[StoredCheckpoint]:
    """Yield the checkpoints in a snapshot of a root, by directory.

    Args:
        repository: Repository of the snapshots.
        timeline: Root to search.
        snapshot: One of its snapshots; None for the newest.
        path: Only what is at or below this absolute path in the root; None for all.
        on_damage: Called for directories that cannot be read. Content that cannot be read is UNKNOWN.
        records: Verdicts that were stored; those of a whole root are taken from there, and nothing is read. None to judge anew.
        judge: Judges one file.
        judged: The same root in another snapshot: directories that are the same in both are not read. Only without a path.
        patterns: The user's patterns of what is one checkpoint each, as of `ciuic.excludes.effective_patterns`; only what was stored
            by the same ones is taken.
    """
    snapshot = snapshot or timeline.snapshots[0]
    # Below the root, a part of what is one checkpoint in the whole may be one by itself.
    if records is not None and records.patterns == tuple(patterns) and path in (None, timeline.path):
        record = records.record(snapshot)
        if record is not None and record.is_complete:
            for one in dict(record.roots).get(timeline.path, ()):
                yield StoredCheckpoint(one.checkpoint, one.mtime_ns, snapshot, timeline.host)
            return
    root = timeline.root_of(snapshot)
    named = named_by(timeline.path, patterns)
    lineage = Lineage()
    # For the frame of the root alone.
    lineage.enter(b"")
    # Each directory with the id of the tree that it has in the other snapshot; empty for none that was judged.
    stack = [iter([(_start(repository, timeline, snapshot, path), judged.content if judged else b"")])]
    while stack:
        at, then = next(stack[-1], (None, b""))
        if at is None:
            stack.pop()
            lineage.leave()
            continue
        if judged is not None and then and then == at.entry.content:
            carried = judged.within(at.path)
            # What a link leads to may be another file now.
            if not any(file.startswith(b"../") for one in carried for file in one.checkpoint.files):
                for known in carried:
                    yield StoredCheckpoint(known.checkpoint, known.mtime_ns, snapshot, timeline.host)
                continue
        try:
            children = list(repository.trees.entries(at.entry.content))
            lineage.enter(at.entry.content)
        except Damaged as error:
            on_damage(snapshot, at.path, error)
            continue
        covered: set[bytes] = set()
        if may_hold_checkpoints([child.name for child in children], at.path) or (
            named is not None and any(named(join(at.path, child.name), child.is_dir) for child in children)
        ):
            directory = SnapshotDirectory(repository, snapshot, at, timeline.before)
            try:
                times = {child.name: child.mtime_ns for child in directory.entries()}
                for found in checkpoints_in(directory, judge, named=named):
                    covered.update(found.files)
                    if path is not None and not is_within(found.path, path):
                        continue
                    mtime_ns = latest_change(directory, found, times)
                    yield StoredCheckpoint(found, mtime_ns, snapshot, timeline.host)
            except Damaged as error:
                on_damage(snapshot, at.path, error)
        below = [child for child in children if child.is_dir and child.name not in covered and child.content]
        before = _trees_in(repository, then) if judged is not None and then and below else {}
        deeper = []
        for child in below:
            inside = join(at.path, child.name)
            if path is not None and not is_within(inside, path):
                continue
            if len(inside) > MAX_PATH_BYTES:
                on_damage(snapshot, inside, PathTooLong(inside))
            else:
                covered_then = judged is not None and judged.may_cover(at.path, child.name)
                deeper.append(
                    (Located(root, inside, child), b"" if covered_then else before.get(child.name, b""))
                )
        stack.append(iter(deeper))


def latest_change(directory: SnapshotDirectory, checkpoint: Checkpoint, times: Mapping[bytes, int]) -> int:
    """Return the latest change of one of a checkpoint's files; of one without files, of what it has in the directory.

    Args:
        directory: Where it was found.
        checkpoint: The checkpoint.
        times: Times of the names in the directory.
    """
    sources = (directory.below(name) for name in checkpoint.files)
    # Those of directories change as well when files in them are removed.
    newest_ns = max((source.mtime_ns for source in sources if source is not None), default=0)
    return newest_ns or max((times.get(name, 0) for name in checkpoint.files), default=0)


def _trees_in(repository: Repository, tree: bytes) -> dict[bytes, bytes]:
    """Return the ids of the trees of the directories in a directory, by name; none of one that cannot be read."""
    try:
        return {
            entry.name: entry.content for entry in repository.trees.entries(ChunkId(tree)) if entry.is_dir
        }
    except Damaged:
        return {}


def judge_snapshot(
    repository: Repository,
    snapshots: Sequence[Snapshot],
    snapshot: Snapshot,
    known: FileVerdicts,
    record_of: Callable[[Snapshot], VerdictRecord | None] = lambda _: None,
    patterns: Sequence[str] = (),
) -> VerdictRecord:
    """Return the verdicts on all checkpoints of a snapshot, to be stored.

    With the record of the snapshot before or after it, only directories that differ are read.

    Args:
        repository: Repository of the snapshots.
        snapshots: All of them, newest first: earlier ones tell what was overwritten in place.
        snapshot: One of them.
        known: Verdicts on files that are not read again.
        record_of: Returns the record of another snapshot, if there is one, made by the same patterns.
        patterns: The user's patterns of what is one checkpoint.
    """
    known.used = {}
    damaged: list[bytes] = []
    roots, before = [], []
    for timeline in timelines(snapshots):
        if timeline.host == snapshot.host and any(root.path == timeline.path for root in snapshot.roots):
            before.append((timeline.path, timeline.id_before(snapshot.time_ns)))
            judged = _judged_beside(timeline, snapshot, record_of)
            found = checkpoints(
                repository,
                timeline,
                snapshot,
                on_damage=lambda _, path, error: damaged.append(path),
                judge=known.judge,
                judged=judged,
                patterns=patterns,
            )
            roots.append(
                (timeline.path, tuple(DatedCheckpoint(one.checkpoint, one.mtime_ns) for one in found))
            )
    return VerdictRecord(
        repository=repository.id,
        snapshot=str(snapshot.id),
        content=snapshot_digest(snapshot),
        newest=newest_of(one for _, found in roots for one in found),
        patterns=tuple(patterns),
        # Another look may read it: the index or a pack may be in the hands of a writer just now.
        is_complete=not damaged
        and not any(UNREADABLE in one.checkpoint.verdict.reason for _, found in roots for one in found),
        roots=tuple(roots),
        before=tuple(before),
        files=known.used,
    )


def _judged_beside(
    timeline: Timeline, snapshot: Snapshot, record_of: Callable[[Snapshot], VerdictRecord | None]
) -> JudgedRoot | None:
    """Return the verdicts on the snapshot before or after this one, if they hold for what is the same in both."""
    for other in timeline.beside(snapshot):
        record = record_of(other)
        if record is not None and may_carry(
            record, other, snapshot, timeline.path, lambda _, time_ns: timeline.id_before(time_ns)
        ):
            return JudgedRoot(timeline.root_of(other).entry, dict(record.roots).get(timeline.path, ()))
    return None


def _start(repository: Repository, timeline: Timeline, snapshot: Snapshot, path: bytes | None) -> Located:
    """Return the directory to begin with. A directory may be a checkpoint itself, which the one above it tells."""
    if path is None or path == timeline.path:
        root = timeline.root_of(snapshot)
        return Located(root, timeline.path, root.entry)
    above = find(repository, snapshot, posixpath.dirname(path))
    if not above.entry.is_dir:
        raise NotFound(f"{one_line(above.path)} is no directory in snapshot {snapshot.id}")
    return above


_COUNTED_BYTES: Final = 1 << 30
"""Limit of the numbers that are read to count those that are not finite, while somebody waits: some seconds."""
_STEP: Final = re.compile(rb"step[-_=]?([0-9]{1,18})")
_NUMBER: Final = re.compile(rb"([0-9]{1,18})")


class PassedOver(NamedTuple):
    """A snapshot newer than the chosen one, and why it was not chosen."""

    snapshot: Snapshot
    reason: str
    checkpoint: StoredCheckpoint | None
    """Its newest checkpoint, if it has any."""
    good: StoredCheckpoint | None = None
    """Its newest GOOD checkpoint, an older one."""
    unfit: tuple[StoredCheckpoint, ...] = ()
    """All of its checkpoints that would not be chosen, the newest among them."""


class LastGood(NamedTuple):
    """The newest snapshot whose newest checkpoint is GOOD; where there is none, the one with the newest GOOD checkpoint."""

    repository: Repository
    snapshot: Snapshot
    checkpoint: StoredCheckpoint
    passed_over: tuple[PassedOver, ...]
    """Newest first."""
    not_good: tuple[StoredCheckpoint, ...] = ()
    """Newer checkpoints beside the chosen one that are not GOOD: a program that looks for its newest one would take them."""

    @property
    def lost_steps(self) -> int | None:
        """Steps between the newest checkpoint that was passed over and the chosen one, by their names; None if these do not tell."""
        newest = next((one.checkpoint for one in self.passed_over if one.checkpoint), None) or next(
            iter(self.not_good), None
        )
        if newest is None:
            return None
        there, here = step_of(newest.checkpoint.path), step_of(self.checkpoint.checkpoint.path)
        return None if there is None or here is None else max(0, there - here)

    @property
    def newer_good(self) -> StoredCheckpoint | None:
        """The newest GOOD checkpoint of the snapshots that were passed over, if it is newer than the chosen one.

        A program that looks for its newest checkpoint would take the one beside it, so it is to be restored alone.
        """
        found = [
            one.good for one in self.passed_over if one.good and one.good.mtime_ns > self.checkpoint.mtime_ns
        ]
        return max(found, key=lambda one: one.mtime_ns, default=None)


def step_of(path: bytes) -> int | None:
    """Return the step that the name of a checkpoint tells: the number behind "step", else its only number."""
    name = posixpath.basename(path)
    if found := _STEP.findall(name):
        return int(found[-1])
    numbers = _NUMBER.findall(name)
    return int(numbers[0]) if len(numbers) == 1 else None


def last_good(
    places: Sequence[tuple[Repository, Timeline]],
    path: bytes,
    *,
    patterns: Sequence[str] = (),
    finite: bool = False,
) -> LastGood:
    """Return the newest snapshot whose newest checkpoint at or below a path is GOOD, whatever files of no known format are beside it.

    Where the newest one of every snapshot is torn, as of a program that was killed at each save, the choice is the snapshot with
    the newest GOOD one. The newest checkpoint is the one with the latest change of a file, of several
    at one time the last by name. A snapshot of which something there cannot be read is
    passed over, and so are safety snapshots, silently.

    A stored verdict passes a snapshot over; what is chosen was judged anew, and all of its data that have a checksum were read.

    Args:
        places: Timelines of the root with the path.
        path: Absolute path, as the snapshots have it.
        patterns: The user's patterns of what is one checkpoint.
        finite: Passes over checkpoints with numbers that are not finite, as if they were not GOOD; all those of the choice are looked at.

    Raises:
        NotFound: no snapshot has any GOOD one; the message has the reasons.
    """
    records = {id(repository): VerdictRecords(repository, patterns=patterns) for repository, _ in places}
    passed_over: list[PassedOver] = []
    second: LastGood | None = None

    def suits(one: StoredCheckpoint) -> bool:
        return one.checkpoint.verdict.is_good and not (finite and one.checkpoint.verdict.not_finite)

    for repository, timeline, snapshot in _newest_first(places):
        if snapshot.is_safety:
            continue
        try:
            known = records[id(repository)]
            found = list(
                checkpoints(repository, timeline, snapshot, path=path, records=known, patterns=patterns)
            )
            if any(suits(one) for one in found):
                found = _judged_again(repository, timeline, snapshot, path, patterns, finite=finite)
        except NotFound:
            passed_over.append(PassedOver(snapshot, "it has nothing there", None))
            continue
        except Damaged as error:
            passed_over.append(PassedOver(snapshot, one_line(error.message), None))
            continue
        found.sort(key=age_of, reverse=True)
        newest = newest_of(found)
        if newest is None:
            passed_over.append(PassedOver(snapshot, "it has no checkpoint of a known format there", None))
        elif suits(newest):
            return LastGood(
                repository, snapshot, newest, tuple(passed_over), tuple(found[: found.index(newest)])
            )
        else:
            verdict = newest.checkpoint.verdict
            why = verdict.of_numbers if verdict.is_good else one_line(verdict.reason)
            reason = f"{one_line(newest.checkpoint.path)} is {verdict.state}: {why}"
            good = next((one for one in found if suits(one)), None)
            if good is not None and (second is None or good.mtime_ns > second.checkpoint.mtime_ns):
                newer = tuple(found[: found.index(good)])
                second = LastGood(repository, snapshot, good, tuple(passed_over), newer)
            unfit = tuple(one for one in found if not suits(one))
            passed_over.append(PassedOver(snapshot, reason, newest, good, unfit))
    if second is not None:
        return second
    raise NotFound(
        f"no snapshot has a GOOD checkpoint {'of finite numbers ' if finite else ''}at {one_line(path)}"
        + "".join(f"\n  {one.snapshot.id}: {one.reason}" for one in passed_over[:5])
        + (f"\n  and {len(passed_over) - 5} more" if len(passed_over) > 5 else ""),
        hint="ciuic checkpoints ID shows all checkpoints of a snapshot; -s ID restores from any",
    )


def _judged_again(
    repository: Repository,
    timeline: Timeline,
    snapshot: Snapshot,
    path: bytes,
    patterns: Sequence[str],
    *,
    finite: bool,
) -> list[StoredCheckpoint]:
    """Return the checkpoints of a snapshot, the newest GOOD one, where it is the newest of all, with its checksums compared.

    Its numbers are counted; with ``finite`` all of them, and those of the others as far as a limit goes.
    """
    budget = NumberBudget(_COUNTED_BYTES)
    look = partial(checkpoints, repository, timeline, snapshot, patterns=patterns)
    found = list(look(path=path, judge=partial(judge_file, budget=budget if finite else None)))
    newest = newest_of(found)
    if newest is None or not newest.checkpoint.verdict.is_good:
        return found
    names = {posixpath.basename(name) for name in newest.checkpoint.files}
    # A restore reads all of it anyway.
    whole = NumberBudget(sys.maxsize, sys.maxsize) if finite else NumberBudget(_COUNTED_BYTES)

    def judge(source: FileSource) -> Verdict:
        is_part = source.name in names
        return judge_file(source, thorough=is_part, budget=whole if is_part else None)

    for one in look(path=newest.checkpoint.path, judge=judge):
        if (one.checkpoint.path, one.checkpoint.files) == (newest.checkpoint.path, newest.checkpoint.files):
            return [one if other is newest else other for other in found]
    # From there it is another one.
    return list(look(path=path, judge=judge))


def _newest_first(
    places: Sequence[tuple[Repository, Timeline]],
) -> Iterator[tuple[Repository, Timeline, Snapshot]]:
    found = [
        (order_of(snapshot), repository, timeline, snapshot)
        for repository, timeline in places
        for snapshot in timeline.snapshots
    ]
    for _, repository, timeline, snapshot in sorted(found, key=lambda one: one[0], reverse=True):
        yield repository, timeline, snapshot
