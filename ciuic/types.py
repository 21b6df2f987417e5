"""The values that travel between overlay, capture, repository and commands. No behaviour beyond their invariants.

Paths inside a root are ``bytes``; sizes are bytes; times are integer nanoseconds since the epoch, UTC.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection
from typing import Literal, NewType

import msgspec

ChunkId = NewType("ChunkId", bytes)
"""16 bytes: the seeded XXH3-128 of the content."""

CHUNK_ID_BYTES = 16
HOLE = ChunkId(bytes(CHUNK_ID_BYTES))
"""A block that is absent: it reads as zeros and takes no space."""
NO_CHUNK = ChunkId(b"")

FLAG_OPEN_FOR_WRITING = 1
"""A descriptor that can write was open at the cut. Information: the content is that of the cut unless ``FLAG_NOT_HELD`` is set."""
FLAG_MOUNTPOINT = 2
"""Another file system was mounted here; its content is not part of the snapshot."""
FLAG_XATTRS_CHUNK = 4
"""``xattrs`` was too large to stand in the entry: it holds one pair (b"", id of a chunk that holds the pairs)."""

FLAG_NOT_HELD = 8
"""The content may be later than the cut, or mix what was there at several moments after it; see ``lag_of``."""
_LAG_SHIFT = 8
MAX_LAG_MS = (1 << 24) - 1
"""Four and a half hours: what the 24 bits above the flags hold. A longer lag is recorded as this."""

TAG_INCOMPLETE = "incomplete"
"""On a snapshot that lacks something that could not be read; its message names it."""
TAG_NOT_HELD = "not-held"
"""On a snapshot with files whose content may be later than the cut; their entries and ``RootRecord.not_held`` say which and how
many."""
TAG_PARTIAL = "partial"
"""On a snapshot that lacks a root; `Snapshot.left_out` and its message say which and why."""

TAG_RETAKEN = "retaken"
"""On a snapshot of a later instant than the one at which its id was promised; its message says why."""
TAG_SAFETY = "safety"
SAFETY_MESSAGE = "before the restore from "
"""Tag, and begin of the message, of a snapshot that a restore took before it changed anything: see `is_safety`."""

STATE_TAGS = frozenset({"training", "dcp"})
"""On each snapshot of a training's state one of them."""


def is_safety(tags: Collection[str], message: str) -> bool:
    """Return whether this is a safety snapshot, which a restore took so that it can be undone.

    Both are asked for: a snapshot that an operator tagged "safety" is an ordinary one, and is kept by the ordinary rules.
    """
    return TAG_SAFETY in tags and message.startswith(SAFETY_MESSAGE)


_SNAPSHOT_ID = re.compile(r"cs-[0-9a-f]{6,32}\Z")


class SnapshotId(str):
    """``cs-`` and 6 to 32 lower-case hexadecimal digits."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> SnapshotId:
        """The full id that ``text`` is; ValueError for anything else (prefixes are resolved by the repository)."""
        if not _SNAPSHOT_ID.match(text):
            raise ValueError(f"not a snapshot id: {text!r}")
        return cls(text)


class Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """One name in a directory's frozen tree, or one inode in a link table (then ``name`` is its number, 8 bytes big-endian).

    ``content`` is the tree id of a directory; of a regular file the root of its block map, or the id of its only block
    when ``map_height`` is 0; empty for an empty file (or one that is a single hole) and for every other type.
    """

    name: bytes
    mode: int
    uid: int = 0
    gid: int = 0
    rdev: int = 0
    ino: int = 0
    size_bytes: int = 0
    mtime_ns: int = 0
    ctime_ns: int = 0
    atime_ns: int = 0
    flags: int = 0
    link: int = 0
    """Not 0: a regular file or other inode with several names; all but name and type stands in the link table under this number."""
    content: bytes = b""
    map_height: int = 0
    target: bytes = b""
    xattrs: tuple[tuple[bytes, bytes], ...] = ()
    total_files: int = 0
    """Directories: number of non-directories below, hard-linked ones left out (they count in the link table)."""
    total_bytes: int = 0
    """Directories: sum of size_bytes of the regular files so counted."""

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        return stat.S_ISLNK(self.mode)


def not_held(lag_ms: int) -> int:
    """Flags of a file whose content may be up to ``lag_ms`` milliseconds later than the cut."""
    return FLAG_NOT_HELD | min(max(lag_ms, 0), MAX_LAG_MS) << _LAG_SHIFT


def lag_of(entry: Entry) -> int | None:
    """Milliseconds by which the content of a file may be later than the cut; None where it is that of the cut."""
    return entry.flags >> _LAG_SHIFT if entry.flags & FLAG_NOT_HELD else None


class TreeRef(msgspec.Struct, frozen=True):
    """A stored tree and what is below it (see Entry.total_files)."""

    id: ChunkId
    total_files: int = 0
    total_bytes: int = 0


class MapRef(msgspec.Struct, frozen=True):
    """A stored block map: what goes into Entry.content and Entry.map_height."""

    content: bytes
    map_height: int


RootMode = Literal["tracked", "full", "offline"]


class RootRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One protected root in a snapshot."""

    path: bytes
    """Absolute path of the root on the host."""
    entry: Entry
    """The root directory itself; its name is empty."""
    links: bytes = b""
    """Tree id of the link table, empty when no inode has several names."""
    links_files: int = 0
    links_bytes: int = 0
    session: str = ""
    """Identity of the overlay mount (32 hex digits), empty for an offline snapshot."""
    epoch: int = 0
    mode: RootMode = "full"
    excludes_digest: str = ""
    depth: int = 0
    """No directory lies more levels below the root; 0: not known."""
    not_held: int = -1
    """Files whose content may be later than the cut (FLAG_NOT_HELD). -1 in older snapshots, which mark no file so: there it is
    true of any file that was open for writing."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The other half of a snapshot that was asked for together with another: a training's state, and the files of the same instant.

    It is what was known when this half was committed. Whether the other one is there is looked up (ciuic.pairs).
    """

    of: Literal["training", "filesystem"]
    """What the other half is a snapshot of."""
    id: str = ""
    """Empty: there is none, and ``problem`` says why."""
    repository: str = ""
    """Absolute path of the one that the other half is in, where that one was made."""
    time_ns: int = 0
    """Its instant; 0 where there is none."""
    roots: tuple[str, ...] = ()
    """Files: the roots in it."""
    problem: str = ""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A root that a snapshot was to have and has not."""

    path: bytes
    """Absolute path of the root on the host."""
    reason: str = ""


class SnapshotDraft(msgspec.Struct, frozen=True, kw_only=True):
    """What capture hands to Writer.commit."""

    id: SnapshotId
    time_ns: int
    """Wall clock at the cut."""
    host: str
    roots: tuple[RootRecord, ...]
    tags: tuple[str, ...] = ()
    message: str = ""
    parent: str = ""
    """Id of the snapshot this one was built on, empty for none."""
    pair: Pair | None = None
    left_out: tuple[LeftOut, ...] = ()
    incomplete: tuple[bytes, ...] = ()
    """Paths of the roots of which something could not be read."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A committed snapshot. ``held``, ``hold_reason``, ``hold_uid`` and ``tags`` may change later; nothing else does."""

    id: SnapshotId
    time_ns: int
    host: str
    roots: tuple[RootRecord, ...]
    tags: tuple[str, ...] = ()
    message: str = ""
    parent: str = ""
    size_bytes: int = 0
    """Logical: sum of the sizes of the regular files, each inode once."""
    new_bytes: int = 0
    """Bytes this snapshot added to the packs."""
    files: int = 0
    held: bool = False
    hold_reason: str = ""
    hold_uid: int | None = None
    """The ordinary user that the hold was made for, which yields to ``min_free``; None for every other hold."""
    pair: Pair | None = None
    left_out: tuple[LeftOut, ...] = ()
    """Roots that it was to have and has not."""
    incomplete: tuple[bytes, ...] = ()
    """Paths of the roots of which something could not be read. Empty in older snapshots, where only the tag says so."""

    @property
    def not_held(self) -> int | None:
        """Files whose content may be later than the cut; None where no root says."""
        known = [root.not_held for root in self.roots if root.not_held >= 0]
        return sum(known) if known else None

    def may_be_later(self, entry: Entry) -> bool:
        """Return whether the content of this file of the snapshot may be later than the cut."""
        unsure = FLAG_NOT_HELD if self.not_held is not None else FLAG_NOT_HELD | FLAG_OPEN_FOR_WRITING
        return bool(entry.flags & unsure)

    @property
    def is_state(self) -> bool:
        """Of a training: it was made from memory, and how long it stays is for the rules of that training to say."""
        made = (not root.session and root.mode == "full" for root in self.roots)
        return not STATE_TAGS.isdisjoint(self.tags) and all(made)
