"""Values of a restore: the request with its rules for existing names, the plan, the progress and the result."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

from ciuic.errors import CiuicError, Partial
from ciuic.repository.lookup import Located
from ciuic.system.shell_quoting import shown
from ciuic.types import Entry, recorded_time
from ciuic.units import plural

if TYPE_CHECKING:
    from ciuic.repository import Repository
    from ciuic.restore.selection import Selection
    from ciuic.types import Snapshot


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


class RestoreItem(NamedTuple):
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


class Failure(NamedTuple):
    """A path that is not as it was at the snapshot, with the reason."""

    path: bytes
    reason: str
    damaged: bool = False
    """The cause is damage in the repository, not an obstacle in the destination."""
    attribute: bool = False
    """Only an owner, mode, attribute or time could not be set; the content is right."""


class OmittedSpecial(NamedTuple):
    """A special file or attribute (attributes.py) that was not restored."""

    path: bytes
    what: str
    """Description such as "setuid bit", "block device 8:0" or "attribute security.capability"."""


class RestoreProgress(NamedTuple):
    """Progress of a restore."""

    bytes_done: int
    bytes_total: int
    """Size according to the snapshot; 0 when unknown."""
    files_done: int
    files_total: int
    path: bytes


class RestoreTarget(NamedTuple):
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


class Kept(NamedTuple):
    """Exceptions of --delete: what stays although the snapshot does not have it."""

    inodes: frozenset[tuple[int, int]]
    """(device, inode) of directories that stay, such as the repository's own."""
    rule: Callable[[bytes, bool], bool] | None
    """Function of (absolute path at the snapshot, is a directory) that returns True for what stays, such as excluded paths."""
    directory_rule: Callable[[bytes], bool] | None = None
    """Function of an absolute path at the snapshot that returns True for a directory that stays, whatever goes from below it."""


@dataclass(frozen=True)
class RestorePlan:
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


@dataclass
class Result:
    """Result of a restore. Counts are of files, links and other non-directories unless stated otherwise."""

    dry_run: bool = False
    restored: int = 0
    """Number of files written or linked."""
    restored_bytes: int = 0
    skipped: int = 0
    """Number of files that were right already or left alone by the overwrite mode; attributes may have been set."""
    directories: int = 0
    removed: list[bytes] = field(default_factory=list)
    """Tops of the trees that were removed."""
    failed: list[Failure] = field(default_factory=list)
    open_for_writing: list[bytes] = field(default_factory=list)
    """Restored files that were open for writing at the cut."""
    not_held: list[bytes] = field(default_factory=list)
    """Restored files whose content may be later than the cut."""
    far_times: list[bytes] = field(default_factory=list)
    """Restored files whose modification time was farther from 1970 than a snapshot holds; they have the nearest."""
    left_out: list[OmittedSpecial] = field(default_factory=list)
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
