"""Values that overlay, capture, repository and commands exchange; no behaviour beyond their invariants.

Paths inside a root are ``bytes``; sizes are bytes; times are integer nanoseconds since the epoch, UTC.
"""

from __future__ import annotations

import re
import stat
from collections.abc import Collection
from typing import Annotated, Final, Literal, NewType, Protocol

import msgspec

Cloud = Literal["aws", "gcp", "azure"]
"""Cloud whose notices of a machine's end are understood (`ciuic.system.cloud_notices`)."""
ChunkId = NewType("ChunkId", bytes)
"""Seeded XXH3-128 hash of the content, 16 bytes."""

MAX_TIME_NS = (1 << 63) - 1
"""Largest distance from 1970 that an entry holds (docs/format.md, section 5): from September 1677 to April
2262. XFS, btrfs, ext4 and tmpfs hold more."""


def recorded_time(time_ns: int) -> int:
    """Return the time that an entry records for a file's: the nearest that it holds."""
    return max(-MAX_TIME_NS, min(time_ns, MAX_TIME_NS))


def is_far_time(time_ns: int) -> bool:
    """Return whether a recorded time stands for this one or any farther from 1970."""
    return abs(time_ns) >= MAX_TIME_NS


CHUNK_ID_BYTES = 16
HOLE = ChunkId(bytes(CHUNK_ID_BYTES))
"""Absent block: reads as zeros and takes no space."""

FLAG_OPEN_FOR_WRITING = 1
"""A descriptor that can write was open at the cut. Information only: the content is that of the cut unless
``FLAG_NOT_HELD`` is set."""
FLAG_MOUNTPOINT = 2
"""Another file system was mounted here; its content is not part of the snapshot."""
FLAG_XATTRS_CHUNK = 4
"""``xattrs`` did not fit into the entry: it holds one pair (b"", id of the chunk with the pairs)."""

FLAG_NOT_HELD = 8
"""The content may be later than the cut, or a mix of several moments after it; see `lag_of`."""
# The lag is in bits 8 to 31 of the flags (docs/format.md, section 5).
_LAG_SHIFT = 8
MAX_LAG_MS = (1 << 24) - 1
"""Largest lag (four and a half hours) that the 24 bits above the flags hold; a longer one is recorded as
this."""

TAG_INCOMPLETE = "incomplete"
"""Tag of a snapshot that lacks something that could not be read; its message names it."""
TAG_NOT_HELD = "not-held"
"""Tag of a snapshot with files whose content may be later than the cut; their entries say which, and
``RootRecord.not_held`` how many."""
TAG_PARTIAL = "partial"
"""Tag of a snapshot that lacks a root; `Snapshot.left_out` and the message say which and why."""

TAG_RETAKEN = "retaken"
"""Tag that earlier versions gave a snapshot of a later instant than the one at which its id was promised; its message says why."""
TAG_SAFETY = "safety"
SAFETY_MESSAGE = "before the restore from "
"""Beginning of the message of a safety snapshot, which a restore took before it changed anything; see
`is_safety`."""

PAIRED = "paired"
"""Tag of both snapshots of a pair: `list` looks for pairs where it is set. A person may give it, too."""
STATE_TAGS = frozenset({"training", "dcp"})
"""Tags of snapshots of a training state; each has one of them."""


FACT_TAGS = STATE_TAGS | {
    *(TAG_INCOMPLETE, TAG_NOT_HELD, TAG_PARTIAL, TAG_RETAKEN, TAG_SAFETY),
    *("unflushed", "verified", "damaged"),
}
"""Tags that say what a snapshot is, or what was found in it; people neither add nor remove them."""
EXPLAINED_TAGS = frozenset({TAG_INCOMPLETE, TAG_PARTIAL, TAG_RETAKEN, TAG_SAFETY})
"""Tags of snapshots whose message says more of it."""


def is_safety(tags: Collection[str], message: str) -> bool:
    """Return whether this is a safety snapshot, which a restore took so that it can be undone.

    Tag and message must both match: a snapshot that an operator tagged "safety" is kept by the ordinary
    rules.
    """
    return TAG_SAFETY in tags and message.startswith(SAFETY_MESSAGE)


# \Z, because $ also matches before a line end, and ids are names of files.
_SNAPSHOT_ID = re.compile(r"cs-[0-9a-f]{6,32}\Z")


class SnapshotId(str):
    """Snapshot id: ``cs-`` and 6 to 32 lower-case hexadecimal digits."""

    __slots__ = ()

    @classmethod
    def parse(cls, text: str) -> SnapshotId:
        """Return ``text`` as a full id; the repository resolves prefixes. ValueError for anything else."""
        if not _SNAPSHOT_ID.match(text):
            raise ValueError(f"a snapshot id must be cs- and 6 to 32 hexadecimal digits, got {text!r}")
        return cls(text)


# An array in trees: the order of the fields is that of docs/format.md, section 5. Older readers ignore
# further elements, so that a new field comes last. Without names of fields, which would be most of an entry.
class Placed(Protocol):
    """Snapshot, or a line of `list`, with its place in the order."""

    @property
    def id(self) -> SnapshotId:
        """Id of the snapshot."""

    @property
    def order_ns(self) -> int:
        """Place in the order of commits."""


def order_of(snapshot: Placed) -> tuple[int, str]:
    """Return the sort key for the order of snapshots, oldest first, the only one there is: of equal places the higher id is the newer."""
    return snapshot.order_ns, snapshot.id


# Numbers beyond the kernel's types would reach system calls, SQLite and the clock, which refuse them in ways of their own.
# As the decoders check them; `tree_format.attributes_problem` is the same for what the code makes.
_Uint16 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 16)]
_Uint32 = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
_Uint63 = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
# A decoder refuses more than 64 bits by itself.
_Uint64 = Annotated[int, msgspec.Meta(ge=0)]
_TimeNs = Annotated[int, msgspec.Meta(gt=-(1 << 63), le=(1 << 63) - 1)]
MAX_ITEMS: Final = 10_000
"""Limit of the items in each list of a snapshot: decoded, an item takes many times its bytes in the file."""
_Items = msgspec.Meta(max_length=MAX_ITEMS)
# More than listxattr returns names in its 64 KiB, an end after each.
_Xattrs = msgspec.Meta(max_length=1 << 15)
# Block maps have heights from 0 to 6.
_Height = Annotated[int, msgspec.Meta(ge=0, lt=7)]


class Entry(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """Name in a directory's frozen tree, or inode in a link table.

    In a link table ``name`` is the inode number, 8 bytes big-endian. ``content`` is the tree id of a
    directory. For a regular file it is the root of the block map, or the id of the only block when
    ``map_height`` is 0. It is empty for an empty file, for one that is a single hole, and for every other
    type. Decoders refuse numbers beyond the kernel's types.
    """

    name: bytes
    mode: _Uint16
    uid: _Uint32 = 0
    gid: _Uint32 = 0
    rdev: _Uint64 = 0
    ino: _Uint64 = 0
    size_bytes: _Uint63 = 0
    mtime_ns: _TimeNs = 0
    ctime_ns: _TimeNs = 0
    atime_ns: _TimeNs = 0
    flags: _Uint32 = 0
    link: _Uint64 = 0
    """Inode number of the link table entry of an inode with several names, which has everything but name and
    type; else 0."""
    content: bytes = b""
    map_height: _Height = 0
    target: bytes = b""
    xattrs: Annotated[tuple[tuple[bytes, bytes], ...], _Xattrs] = ()
    total_files: _Uint63 = 0
    """Directories: number of non-directories below. Hard-linked files count in the link table instead."""
    total_bytes: _Uint63 = 0
    """Directories: sum of ``size_bytes`` of the regular files so counted."""

    @property
    def is_dir(self) -> bool:
        """True for a directory."""
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        """True for a regular file."""
        return stat.S_ISREG(self.mode)

    @property
    def is_symlink(self) -> bool:
        """True for a symbolic link."""
        return stat.S_ISLNK(self.mode)


def not_held(lag_ms: int) -> int:
    """Return the flags of a file whose content may be up to ``lag_ms`` milliseconds later than the cut."""
    # Cut to what fits: a longer lag would overflow into a bit that is not its own, or come out as a short
    # one.
    return FLAG_NOT_HELD | min(max(lag_ms, 0), MAX_LAG_MS) << _LAG_SHIFT


def lag_of(entry: Entry) -> int | None:
    """Return by how many ms a file's content may be later than the cut; None if it is that of the cut."""
    return entry.flags >> _LAG_SHIFT if entry.flags & FLAG_NOT_HELD else None


class TreeRef(msgspec.Struct, frozen=True):
    """Reference to a stored tree, with the totals of what is below it (see `Entry.total_files`)."""

    id: ChunkId
    total_files: int = 0
    total_bytes: int = 0


class MapRef(msgspec.Struct, frozen=True):
    """Reference to a stored block map, as in `Entry.content` and `Entry.map_height`."""

    content: bytes
    map_height: int


RootMode = Literal["tracked", "full", "offline"]


class RootRecord(msgspec.Struct, frozen=True, kw_only=True):
    """Protected root in a snapshot."""

    path: bytes
    """Absolute path of the root on the host."""
    entry: Entry
    """Entry of the root directory itself; its name is empty."""
    links: bytes = b""
    """Tree id of the link table; empty when no inode has several names."""
    links_files: int = 0
    links_bytes: int = 0
    session: str = ""
    """Identity of the overlay mount (32 hexadecimal digits); empty for an offline snapshot."""
    epoch: int = 0
    mode: RootMode = "full"
    excludes_digest: str = ""
    depth: int = 0
    """Largest number of levels that a directory lies below the root; 0 if not known."""
    not_held: int = -1
    """Number of files whose content may be later than the cut (FLAG_NOT_HELD). -1 in older snapshots, which
    mark no file so: there any file that was open for writing may be later."""


class Pair(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """The paired snapshot: a training state and the files of the same instant are each other's pair.

    The fields say what was known when this half was committed. Whether the other half exists is looked up
    (`ciuic.protocol.pairing`).
    """

    of: Literal["training", "filesystem"]
    """Kind of the paired snapshot."""
    id: str = ""
    """Id of the paired snapshot; empty if there is none, and ``problem`` says why."""
    repository: str = ""
    """Absolute path of the repository with the paired snapshot, on the host where it was made."""
    time_ns: int = 0
    """Time of the paired snapshot; 0 if there is none."""
    roots: Annotated[tuple[str, ...], _Items] = ()
    """Roots in the paired snapshot, if it is one of files."""
    problem: str = ""


class SetMember(msgspec.Struct, frozen=True, kw_only=True):
    """Place of a snapshot in a set: snapshots of one instant, one for each host or group of ranks.

    Nothing else records a set. It is whole while every member that it names has a snapshot with its id, so a host
    that died before its commit leaves a set that is told as incomplete.
    """

    id: str
    """Identity of the set, 32 hexadecimal digits, drawn at random for each attempt to cut one."""
    name: str
    """Name of the set for people; several sets may have the same."""
    member: str
    """The member that this snapshot is: a host, or a name that is unique among ``members``."""
    members: Annotated[tuple[str, ...], _Items]
    """All members of the set, in order, each once."""


class LeftOut(msgspec.Struct, frozen=True, kw_only=True):
    """A root that was configured but is missing from a snapshot."""

    path: bytes
    """Absolute path of the root on the host."""
    reason: str = ""


class SnapshotDraft(msgspec.Struct, frozen=True, kw_only=True):
    """Snapshot to commit, as capture hands it to `Writer.commit`."""

    id: SnapshotId
    time_ns: int
    """Wall clock at the cut."""
    host: str
    roots: tuple[RootRecord, ...]
    tags: tuple[str, ...] = ()
    message: str = ""
    parent: str = ""
    """Id of the snapshot this one was built on; empty for none."""
    pair: Pair | None = None
    set_member: SetMember | None = None
    left_out: tuple[LeftOut, ...] = ()
    incomplete: tuple[bytes, ...] = ()
    """Paths of the roots of which something could not be read."""


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """Committed snapshot; only ``held``, ``hold_reason``, ``hold_uid`` and ``tags`` may change later."""

    id: SnapshotId
    time_ns: int
    host: str
    roots: tuple[RootRecord, ...]
    tags: tuple[str, ...] = ()
    message: str = ""
    parent: str = ""
    size_bytes: int = 0
    """Logical size: sum of the sizes of the regular files, each inode once."""
    new_bytes: int = 0
    """Bytes this snapshot added to the packs."""
    files: int = 0
    held: bool = False
    hold_reason: str = ""
    hold_uid: int | None = None
    """Uid of the ordinary user that the hold was made for; such a hold yields to ``min_free``. None for every
    other hold."""
    pair: Pair | None = None
    set_member: SetMember | None = None
    left_out: tuple[LeftOut, ...] = ()
    """Configured roots that are missing from the snapshot."""
    incomplete: tuple[bytes, ...] = ()
    """Paths of the roots of which something could not be read. Empty in older snapshots, where only the tag
    says so."""
    placed_ns: int = 0
    """Place in the order of snapshots where it is not `time_ns`: at the commit a clock that had been ahead had
    dated others later. 0: it is `time_ns`."""

    @property
    def order_ns(self) -> int:
        """Place in the order of snapshots, which is that of commits also where the clock was set."""
        return max(self.placed_ns, self.time_ns)

    @property
    def not_held(self) -> int | None:
        """Number of files whose content may be later than the cut; None where no root says."""
        known = [root.not_held for root in self.roots if root.not_held >= 0]
        return sum(known) if known else None

    @property
    def later_flags(self) -> int:
        """Flags of which one or more are set on a file whose content may be later than the cut."""
        return FLAG_NOT_HELD if self.not_held is not None else FLAG_NOT_HELD | FLAG_OPEN_FOR_WRITING

    def may_be_later(self, entry: Entry) -> bool:
        """Return whether the content of this file of the snapshot may be later than the cut."""
        return bool(entry.flags & self.later_flags)

    @property
    def is_safety(self) -> bool:
        """True for a safety snapshot; see the function of this name."""
        return is_safety(self.tags, self.message)

    @property
    def is_state(self) -> bool:
        """True for a training state, made from memory; the training's own rules decide how long it stays."""
        made = (not root.session and root.mode == "full" for root in self.roots)
        return not STATE_TAGS.isdisjoint(self.tags) and all(made)
