"""The values of a restore: what is asked, what would be in the way, what was done."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Literal, NamedTuple

from ciuic.errors import CiuicError, Partial
from ciuic.lookup import Located, readable
from ciuic.units import plural

if TYPE_CHECKING:
    from ciuic.repository import Repository
    from ciuic.types import Snapshot


class Overwrite(str, Enum):
    """What happens to a file (anything but a directory) that exists where one is to be restored."""

    ALWAYS = "always"
    """It becomes what it was at the snapshot. One that already is, to the byte, is not written again."""
    IF_CHANGED = "if-changed"
    """As ALWAYS, but one of the same type, size and modification time is believed to have the same content."""
    IF_NEWER = "if-newer"
    """Replaced only where the snapshot's modification time is the later one."""
    NEVER = "never"
    """Left alone; only what is missing is restored."""


Action = Literal["restored", "attributes", "linked", "skipped", "removed", "failed", "conflict"]


class Item(NamedTuple):
    """What became of one path (or, in a dry run, would have)."""

    path: bytes
    """Where it is now: absolute."""
    action: Action
    """restored: written; attributes: content was right; linked: another name of a restored file; skipped: right
    already, or left alone as asked; removed: by --delete or for something of another type; failed; conflict: exists, and would stop the
    restore (dry runs only)."""


class Failure(NamedTuple):
    """One path that is not as it was, and why."""

    path: bytes
    reason: str
    damaged: bool = False
    """The repository's content is damaged, not the destination in the way."""
    attribute: bool = False
    """The content is right; an owner, mode, attribute or time could not be set."""


class LeftOut(NamedTuple):
    """Something special (restore/special.py) that was not restored."""

    path: bytes
    what: str
    """Such as "setuid bit", "block device 8:0", "attribute security.capability"."""


class Progress(NamedTuple):
    """How far a restore is."""

    bytes_done: int
    bytes_total: int
    """From the snapshot; 0 when unknown."""
    files_done: int
    files_total: int
    path: bytes


class Target(NamedTuple):
    """One thing to bring back, and where."""

    source: Located
    path: bytes
    """Absolute path that it gets."""
    in_place: bool
    """It goes back where it was: below the root, no symbolic link is followed on the way."""


class Kept(NamedTuple):
    """What --delete must spare besides what the snapshot has."""

    inodes: frozenset[tuple[int, int]]
    """(device, inode) of directories, such as the repository's own."""
    rule: Callable[[bytes, bool], bool] | None
    """(absolute path as it was at the snapshot, is a directory) → spare it; for excluded paths."""


@dataclass(frozen=True)
class Plan:
    """A restore that nothing stands in the way of, ready for `execute`. Nothing has been changed yet."""

    repository: Repository
    snapshot: Snapshot
    targets: tuple[Target, ...]
    overwrite: Overwrite | None
    delete: bool
    kept: Kept
    conflicts: tuple[bytes, ...] = ()
    """Existing paths that stop it; empty unless planned with ``check=False``."""
    bytes_total: int = 0
    files_total: int = 0
    special: bool = True
    """Special files and attributes are restored."""
    foreign_reason: str = ""
    """Why special ones are left out without having been asked for; empty otherwise."""


@dataclass
class Result:
    """What a restore did. Counts are of files, links and other non-directories unless said otherwise."""

    dry_run: bool = False
    restored: int = 0
    """Written or linked."""
    restored_bytes: int = 0
    skipped: int = 0
    """Right already, or left alone as the overwrite mode says; attributes may have been set."""
    directories: int = 0
    removed: list[bytes] = field(default_factory=list)
    """Tops of what was removed."""
    failed: list[Failure] = field(default_factory=list)
    open_for_writing: list[bytes] = field(default_factory=list)
    """Restored files that were open for writing at the cut."""
    not_held: list[bytes] = field(default_factory=list)
    """Restored files whose content may be later than the cut."""
    left_out: list[LeftOut] = field(default_factory=list)
    """Special files and attributes that were not restored."""
    left_out_because: str = ""
    """`Plan.foreign_reason`, if something was left out for it: then the restore is not complete."""
    owner_failures: int = 0
    """Paths whose owner could not be set (not root): reported once, as one failure."""
    stopped: str = ""
    """Why the restore ended before its end (the disk is full…); empty if it did not."""

    @property
    def complete(self) -> bool:
        return not self.failed and not self.stopped and not self.left_out_because

    def error(self) -> CiuicError | None:
        """Partial, with everything that is not as it was; None if all is."""
        if self.complete:
            return None
        lines = [f"{readable(failure.path)}: {failure.reason}" for failure in self.failed]
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
