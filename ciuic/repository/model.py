"""Values about packs and snapshots that the repository hands out; no behaviour."""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from ciuic.types import ChunkId, SnapshotId

PackKind = Literal["data", "meta"]
DIFFERENCE: Final = 4
"""Flag of a record: the content is stored as the difference from that of its base."""


LOCK_NAME: Final = "lock"
CLAIM_NAME: Final = "claim"
"""Files of the repository with the locks of `ciuic.repository.locks`, which only writers import."""


class PackInfo(msgspec.Struct, frozen=True):
    """Pack file `packs/<number as 16 hex digits>.pack`; numbers grow and are not reused."""

    number: int
    kind: PackKind
    size_bytes: int
    sealed: bool


class PackRecord(msgspec.Struct, frozen=True):
    """Position of one stored chunk in its pack, and how it is stored."""

    id: ChunkId
    offset: int
    stored_bytes: int
    raw_bytes: int
    flags: int
    checksum: int
    """XXH3-64 of the stored bytes."""
    base: ChunkId | Literal[b""] = b""
    """Chunk that this one is stored as the difference from; empty for none."""


class ChunkLocation(msgspec.Struct, frozen=True):
    """Position of one copy of a chunk, and how it is stored.

    The flags are those of `pack_format`; without flags the content is stored as it is.
    """

    pack: int
    offset: int
    stored_bytes: int
    raw_bytes: int
    flags: int
    base: ChunkId | Literal[b""] = b""


class Shortened(msgspec.Struct, frozen=True):
    """Result of `Writer.shorten_pack`; ``left_bytes`` is the size of the pack now, 0 when it is gone."""

    freed_bytes: int
    left_bytes: int


class PackDamage(msgspec.Struct, frozen=True):
    """Defect of a pack, as `Repository.scrub` finds it.

    ``chunk`` is None when the structure of the pack is damaged.
    """

    pack: int
    offset: int
    chunk: ChunkId | None
    reason: str


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """Line of `ciuic list`: what the catalogue knows of a committed snapshot without opening its file."""

    id: SnapshotId
    time_ns: int
    size_bytes: int
    new_bytes: int
    files: int
    tags: tuple[str, ...] = ()
    message: str = ""
    parent: str = ""
    host: str = ""
    roots: tuple[bytes, ...] = ()
    """Paths of the roots in the snapshot."""
    held: bool = False
    hold_reason: str = ""
    placed_ns: int = 0
    """Place in the order of snapshots where it is not `time_ns`: at the commit a clock that had been ahead had
    dated others later. 0: it is `time_ns`."""
    set_id: str = ""
    """Id of the set that it is of (`ciuic.types.SetMember`); empty for none."""
    set_name: str = ""

    @property
    def order_ns(self) -> int:
        """Place in the order of snapshots, which is that of commits also where the clock was set."""
        return max(self.placed_ns, self.time_ns)


class UnreadableSnapshot(msgspec.Struct, frozen=True):
    """File in snapshots/ that is not a readable snapshot; while one exists, nothing may be collected."""

    id: str
    path: str
    reason: str
