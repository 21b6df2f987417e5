"""Whether what snapshots promise can be kept: every tree, block map and chunk there and, on request, every byte right.

Guarantees: damage is named with path, block and all snapshots that share it, and never ends the search; each chunk is
read once, however many snapshots have it. Leaves to `ciuic.check` whether the repository is tidy.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from ciuic.repository import Repository
from ciuic.types import ChunkId, SnapshotId

DamageKind = Literal["snapshot", "tree", "links", "map", "xattrs", "data", "pack", "index", "config"]


class Damage(NamedTuple):
    """One thing that is wrong. In a snapshot's content (path is set), or in the repository itself (file is set)."""

    kind: DamageKind
    reason: str
    path: bytes = b""
    """Absolute path of the file or directory."""
    root: bytes = b""
    block: int = -1
    """Block number in the file, or -1."""
    offset: int = -1
    """Byte offset of that block in the file, or -1."""
    chunk: ChunkId | None = None
    snapshots: tuple[SnapshotId, ...] = ()
    """All that share it, newest first."""
    file: str = ""
    """The repository's own file, where that is known."""


class VerifyProgress(NamedTuple):
    bytes_done: int
    bytes_total: int
    """0 while unknown."""
    files_done: int
    path: bytes


@dataclass
class VerifyResult:
    """What was looked at and what was found."""

    snapshots: list[SnapshotId] = field(default_factory=list)
    checksum: bool = False
    damages: list[Damage] = field(default_factory=list)
    files: int = 0
    """Names of non-directories that were looked at, each shared subtree once."""
    chunks: int = 0
    bytes_read: int = 0
    """Content that was read and hashed (0 without checksum)."""

    @property
    def damaged(self) -> bool:
        return bool(self.damages)


def verify_snapshots(
    repository: Repository,
    ids: Sequence[SnapshotId] | None = None,
    *,
    checksum: bool = False,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyResult:
    """Verifies these snapshots, or with None all and every byte of the repository's own files.

    NotFound for an id that is not there. Damage never raises.
    """
    raise NotImplementedError
