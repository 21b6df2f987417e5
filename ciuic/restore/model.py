"""Values of a restore: the request with its rules for existing names, the plan, the progress and the result.

Choice among the names below a target of a restore: patterns to include and to exclude, by the rules of gitignore (`ciuic.excludes`).

A pattern without a slash matches at any depth, one with a slash is relative to the target, and so is one that begins with a slash, as
in git; only one that begins with the target's own path spells an absolute path. What is included comes with everything below it, and with the directories that lead to it; what is
excluded is left alone, with everything below it, also where it is included.

Guarantees: what is left out of a restore is neither written nor removed, and the attributes of an existing directory that only
leads to what is included stay as they are.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal

import msgspec

from ciuic.errors import CiuicError, Damaged, Partial
from ciuic.repository.directory_trees import Lineage
from ciuic.repository.lookup import Located, join
from ciuic.system.shell_quoting import shown
from ciuic.types import FLAG_MOUNTPOINT, Entry, recorded_time
from ciuic.units import plural

if TYPE_CHECKING:
    from ciuic.repository import Repository
    from ciuic.types import Snapshot


class Selection:
    """Choice among what lies at or below one target; paths are those at the snapshot."""

    def __init__(
        self, repository: Repository, source: Located, include: Sequence[str], exclude: Sequence[str]
    ) -> None:
        """Find the directories that lead to what is included.

        Args:
            repository: Repository of the snapshot.
            source: The target. A target that is no directory is restored whatever the patterns say.
            include: Patterns of what is restored; none: everything.
            exclude: Patterns of what is not.

        Raises:
            ValueError: a pattern cannot match anything; the message names it.
        """
        # Imported here: most restores choose nothing by patterns.
        from hashlib import sha256

        from ciuic.excludes import ExcludeMatcher, effective_patterns

        self._top = source.path
        self._start = len(source.path.rstrip(b"/")) + 1
        top = os.fsdecode(source.path)
        self._include = ExcludeMatcher(source.path, effective_patterns(top, (), include)) if include else None
        self._exclude = ExcludeMatcher(source.path, effective_patterns(top, (), exclude))
        self.digest = sha256(repr((tuple(include), tuple(exclude))).encode(errors="surrogateescape")).digest()
        """Tells one choice from another in the journal of a restore."""
        self._leading: set[bytes] = set()
        if self._include is not None and source.entry.is_dir:
            self._find_leading(repository, source)

    @property
    def is_empty(self) -> bool:
        """True if there are patterns of what to include, and nothing below the target matches."""
        return self._include is not None and not self._leading

    def has(self, path: bytes, is_dir: bool) -> bool:
        """Return whether the name is restored, a directory perhaps only because it leads to what is."""
        return self._is_chosen(path, is_dir) or (is_dir and path in self._leading)

    def only_leads(self, path: bytes) -> bool:
        """Return whether a directory is there only for what is below it."""
        return path in self._leading and not self._is_chosen(path, is_dir=True)

    def spares(self, path: bytes, is_dir: bool) -> bool:
        """Return whether ``delete`` must leave alone what exists at this path, with everything below."""
        if is_dir:
            return self._exclude.match(path[self._start :], is_dir=True)
        return not self._is_chosen(path, is_dir)

    def spares_directory(self, path: bytes) -> bool:
        """Return whether ``delete`` must leave a directory, but not what is chosen below it."""
        return not self._is_chosen(path, is_dir=True)

    def _is_chosen(self, path: bytes, is_dir: bool) -> bool:
        below = path[self._start :]
        if self._exclude.match(below, is_dir):
            return False
        # The top itself: all of it, or what is included in it.
        return self._include is None or self._include.match(below, is_dir)

    def _find_leading(self, repository: Repository, source: Located) -> None:
        assert self._include is not None
        lineage = Lineage()
        lineage.enter(b"")
        # (path, entries); all paths on the stack lead to what is found in the last one.
        stack: list[tuple[bytes, Iterator[Entry]]] = [
            (source.path, repository.trees.entries(source.entry.content))
        ]
        while stack:
            path, entries = stack[-1]
            try:
                entry = next(entries, None)
            except Damaged:
                # Told by the restore, which looks into each directory that may have something for it.
                self._lead(stack)
                entry = None
            if entry is None:
                stack.pop()
                lineage.leave()
                continue
            here = join(path, entry.name)
            below = here[self._start :]
            if self._exclude.match(below, entry.is_dir):
                continue
            if self._include.match(below, entry.is_dir):
                self._lead(stack)
            elif entry.is_dir and entry.content and not entry.flags & FLAG_MOUNTPOINT:
                lineage.enter(entry.content)
                stack.append((here, repository.trees.entries(entry.content)))

    def _lead(self, stack: list[tuple[bytes, Iterator[Entry]]]) -> None:
        for path, _ in reversed(stack):
            if path in self._leading:
                return
            self._leading.add(path)


class Overwrite(str, Enum):
    """Rule for a file (anything but a directory) that exists where one is to be restored."""

    ALWAYS = "always"
    """Replace it by the snapshot's. A file that is the same to the byte is not written again."""
    IF_CHANGED = "if-changed"
    """Replace it like ALWAYS, but do not read one that its size and times show to be as it was at the snapshot."""
    IF_NEWER = "if-newer"
    """Replace it only if the snapshot's modification time is later."""
    NEVER = "never"
    """Leave it alone; only what is missing is restored."""


Action = Literal["restored", "attributes", "linked", "skipped", "removed", "failed", "conflict"]


class RestoreItem(msgspec.Struct, frozen=True):
    """Outcome of one path; in a dry run the outcome that it would have."""

    path: bytes
    """Absolute path in the destination."""
    action: Action
    """Outcome of the path.

    restored: written. attributes: only attributes were set, the content was right. linked: made another name of a restored file.
    skipped: right already, or left alone as asked. removed: by --delete, or for something of another type. failed: not
    restored. conflict: exists, and would stop the restore (dry runs only).
    """
    replaces: bool = False
    """Something of another content existed, whose place is taken."""
    size_bytes: int = 0
    """Size of a file that is written."""


class Failure(msgspec.Struct, frozen=True):
    """A path that is not as it was at the snapshot, with the reason."""

    path: bytes
    reason: str
    damaged: bool = False
    """The cause is damage in the repository, not an obstacle in the destination."""
    attribute: bool = False
    """Only an owner, mode, attribute or time could not be set; the content is right."""


class OmittedSpecial(msgspec.Struct, frozen=True):
    """A special file or attribute (attributes.py) that was not restored."""

    path: bytes
    what: str
    """Description such as "setuid bit", "block device 8:0" or "attribute security.capability"."""


class RestoreProgress(msgspec.Struct, frozen=True):
    """Progress of a restore."""

    bytes_done: int
    bytes_total: int
    """Size according to the snapshot; 0 when unknown."""
    files_done: int
    files_total: int
    path: bytes


class RestoreTarget(msgspec.Struct, frozen=True):
    """A file or directory to be restored, and its destination."""

    source: Located
    path: bytes
    """Absolute path in the destination."""
    in_place: bool
    """The destination is the original path: below the root, no symbolic link is followed on the way."""
    selection: Selection | None = None
    """Choice among what is below it; None for everything."""

    @property
    def is_root(self) -> bool:
        """The source is a root itself, which is restored into whatever is mounted at the destination."""
        return self.source.path == self.source.root.path

    @property
    def mark(self) -> bytes:
        """Bytes that tell this restore from others into the same directory, for its journal."""
        return (
            self.source.path if self.selection is None else self.source.path + b"\0" + self.selection.digest
        )

    def wants(self, source_path: bytes, is_dir: bool) -> bool:
        """Return whether what the snapshot has at this path, below the source, is restored."""
        return self.selection is None or self.selection.has(source_path, is_dir)


class Kept(msgspec.Struct, frozen=True):
    """Exceptions of --delete: what stays although the snapshot does not have it."""

    inodes: frozenset[tuple[int, int]]
    """(device, inode) of directories that stay, such as the repository's own."""
    rule: Callable[[bytes, bool], bool] | None
    """Function of (absolute path at the snapshot, is a directory) that returns True for what stays, such as excluded paths."""
    directory_rule: Callable[[bytes], bool] | None = None
    """Function of an absolute path at the snapshot that returns True for a directory that stays, whatever goes from below it."""


class RestorePlan(msgspec.Struct, frozen=True):
    """A restore without conflicts, ready for `execute`. Nothing has been changed yet."""

    repository: Repository
    snapshot: Snapshot
    targets: tuple[RestoreTarget, ...]
    overwrite: Overwrite | None
    delete: bool
    kept: Kept
    conflicts: tuple[bytes, ...] = ()
    """Existing paths that would stop the restore; empty unless planned with ``check=False``."""
    bytes_total: int = 0
    files_total: int = 0
    special: bool = True
    """True if special files and attributes are restored."""
    foreign_reason: str = ""
    """Reason for which special files are left out although nobody asked for it; empty otherwise."""


class Result(msgspec.Struct):
    """Result of a restore. Counts are of files, links and other non-directories unless stated otherwise."""

    dry_run: bool = False
    restored: int = 0
    """Number of files written or linked."""
    restored_bytes: int = 0
    skipped: int = 0
    """Number of files that were right already or left alone by the overwrite mode; attributes may have been set."""
    directories: int = 0
    removed: list[bytes] = []
    """Tops of the trees that were removed."""
    failed: list[Failure] = []
    open_for_writing: list[bytes] = []
    """Restored files that were open for writing at the cut."""
    not_held: list[bytes] = []
    """Restored files whose content may be later than the cut."""
    far_times: list[bytes] = []
    """Restored files whose modification time was farther from 1970 than a snapshot holds; they have the nearest."""
    left_out: list[OmittedSpecial] = []
    """Special files and attributes that were not restored."""
    left_out_because: str = ""
    """`RestorePlan.foreign_reason`, if something was left out for it; the restore is not complete then."""
    owner_failures: int = 0
    """Number of paths whose owner could not be set (not root); reported as one failure."""
    time_failures: int = 0
    """Number of paths whose modification time the file system did not keep; reported as one failure."""
    stopped: str = ""
    """Reason for which the restore ended early, such as a full disk; empty if it did not."""

    @property
    def complete(self) -> bool:
        """True if everything that was asked for is as it was at the snapshot."""
        return not self.failed and not self.stopped and not self.left_out_because

    def error(self) -> CiuicError | None:
        """Return Partial, which lists everything that is not as it was; None if the restore is complete."""
        if self.complete:
            return None
        lines = [f"{shown(failure.path)}: {failure.reason}" for failure in self.failed]
        head = f"restored in part: {self.stopped}" if self.stopped else "restored in part"
        if self.left_out_because:
            counted = plural(
                len(self.left_out),
                "special file or attribute was left out",
                "special files or attributes were left out",
            )
            lines.insert(0, f"{counted}, because {self.left_out_because}")
        hint = "run it again when the cause is gone: what is restored already is kept"
        if not self.failed and not self.stopped:
            hint = "--special restores them, if you trust whoever may write there; --no-special does without them"
        if any(failure.damaged for failure in self.failed):
            hint = f"`ciuic verify` names the damage; an older snapshot may have these files whole; {hint}"
        return Partial("\n  ".join([head, *lines]), hint=hint)


# Distance from the snapshot within which the time of the last change may hide a later one: clocks of file systems tick coarsely.
_RACY_NS: Final = 1_000_000_000


class OverwriteRules:
    """Decisions of one overwrite mode."""

    def __init__(self, mode: Overwrite | None, *, resumed: bool, cut_ns: int = 0) -> None:
        """Take the mode.

        Args:
            mode: The mode; None: nothing that exists may be replaced.
            resumed: The same restore was begun here before and cut short.
            cut_ns: Time of the snapshot; 0: no times are believed.
        """
        self._mode = mode
        self._resumed = resumed
        self._settled_before_ns = cut_ns - _RACY_NS

    def may_replace(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether the mode allows to replace what exists."""
        if self._mode is Overwrite.IF_NEWER:
            return entry.mtime_ns > recorded_time(existing.st_mtime_ns)
        return self._mode in (Overwrite.ALWAYS, Overwrite.IF_CHANGED)

    def may_touch(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether what exists may be replaced or given other attributes."""
        if self.may_replace(entry, existing):
            return True
        # Without a mode only the result of an earlier run may be there, which the plan did not report as a conflict.
        return self._mode is None and self._resumed and believed_equal(entry, existing)

    def believes_content(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether what exists is believed to have the right content, without reading it."""
        if not believed_equal(entry, existing):
            return False
        # A resumed run has set these times itself, after the content was whole and synced. Otherwise any program can set
        # the modification time (cp -p, rsync, touch), and none the time of the last change.
        is_untouched = recorded_time(existing.st_ctime_ns) == entry.ctime_ns <= self._settled_before_ns
        return self._resumed or (self._mode is Overwrite.IF_CHANGED and is_untouched)

    def sets_directory_attributes(self, entry: Entry, existing: os.stat_result) -> bool:
        """Return whether an existing directory gets the recorded attributes."""
        if self._mode is Overwrite.NEVER:
            return False
        return self._mode is not Overwrite.IF_NEWER or entry.mtime_ns > recorded_time(existing.st_mtime_ns)


def believed_equal(entry: Entry, existing: os.stat_result) -> bool:
    """Return whether type, size and modification time are the same, to the nanosecond, as a restore sets it."""
    return (
        stat.S_IFMT(entry.mode) == stat.S_IFMT(existing.st_mode)
        and entry.mtime_ns == recorded_time(existing.st_mtime_ns)
        and (not entry.is_file or entry.size_bytes == existing.st_size)
    )
