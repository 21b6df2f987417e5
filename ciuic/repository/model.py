"""Facts about packs and snapshots that the repository hands out. Plain values; no behaviour."""

from __future__ import annotations

from typing import Final, Literal, NamedTuple

import msgspec

from ciuic.types import ChunkId, SnapshotId

PackKind = Literal["data", "meta"]
DIFFERENCE: Final = 4
"""In the flags of a record: the content is stored as the difference from that of the base."""


class PackInfo(NamedTuple):
    """One pack file. Numbers grow and are not reused; file name `packs/<number as 16 hex digits>.pack`."""

    number: int
    kind: PackKind
    size_bytes: int
    sealed: bool


class PackRecord(NamedTuple):
    """One stored chunk: where it is in its pack and how."""

    id: ChunkId
    offset: int
    stored_bytes: int
    raw_bytes: int
    flags: int
    checksum: int
    """XXH3-64 of the stored bytes."""
    base: ChunkId | Literal[b""] = b""
    """The chunk that it is stored as the difference from, if any."""


class ChunkLocation(NamedTuple):
    """Where a chunk's best copy lies, and how it is stored: see `packformat`; without flags the bytes stand there as they are."""

    pack: int
    offset: int
    stored_bytes: int
    raw_bytes: int
    flags: int
    base: ChunkId | Literal[b""] = b""


class Shortened(NamedTuple):
    """What became of a pack of which a piece was moved elsewhere. `left_bytes`: its size now, 0 when it is gone."""

    freed_bytes: int
    left_bytes: int


class PackDamage(NamedTuple):
    """One thing wrong with one pack, as `Repository.scrub` finds it. `chunk` is None when it is the pack's
    structure.
    """

    pack: int
    offset: int
    chunk: ChunkId | None
    reason: str


class SnapshotInfo(msgspec.Struct, frozen=True, kw_only=True):
    """A line of `ciuic list`: what the catalogue knows of a committed snapshot without opening its file."""

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
    """Paths of the roots in it."""
    held: bool = False
    hold_reason: str = ""


class UnreadableSnapshot(NamedTuple):
    """A file in snapshots/ that is not a readable snapshot. While one exists, nothing may be collected."""

    id: str
    path: str
    reason: str
