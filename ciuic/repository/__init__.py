"""The repository: chunks in packs, trees and block maps made of chunks, snapshots on top.

`docs/format.md` has the bytes. Guarantees: what a committed snapshot refers to is durable, and every read is
checked against its hash. Capture decides what to store, restore what to read back, retention and prune what
to keep. The package may import ciuic.system and the modules at the top of ciuic.

Names are imported on first use, because `ciuic list` should not pay for hashing and compression it does not
need.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ciuic.deferred_imports import lazy_attributes

if TYPE_CHECKING:
    from ciuic.repository.block_maps import BlockMaps, blocks_of
    from ciuic.repository.chunk_reader import ChunkReader
    from ciuic.repository.directory_trees import Trees
    from ciuic.repository.errors import (
        DamagedChunk,
        DamagedPack,
        DamagedRepository,
        DamagedSnapshot,
        DamagedTree,
        MissingChunk,
        RepositoryExists,
        UnsupportedFormat,
    )
    from ciuic.repository.identity import Identity, is_zero, new_snapshot_id
    from ciuic.repository.model import (
        ChunkLocation,
        PackDamage,
        PackInfo,
        PackRecord,
        SnapshotInfo,
        UnreadableSnapshot,
    )
    from ciuic.repository.repository import Repository
    from ciuic.repository.snapshot_walk import Walker
    from ciuic.repository.snapshots import SnapshotStore
    from ciuic.repository.writing.writer import Writer

_HOMES = {
    "block_maps": "BlockMaps blocks_of",
    "chunk_reader": "ChunkReader",
    "directory_trees": "Trees",
    "errors": "DamagedChunk DamagedPack DamagedRepository DamagedSnapshot DamagedTree MissingChunk RepositoryExists UnsupportedFormat",
    "identity": "Identity is_zero new_snapshot_id",
    "model": "ChunkLocation PackDamage PackInfo PackRecord SnapshotInfo UnreadableSnapshot",
    "repository": "Repository",
    "snapshot_walk": "Walker",
    "snapshots": "SnapshotStore",
    "writing.writer": "Writer",
}

__all__ = [
    "BlockMaps",
    "ChunkLocation",
    "ChunkReader",
    "DamagedChunk",
    "DamagedPack",
    "DamagedRepository",
    "DamagedSnapshot",
    "DamagedTree",
    "Identity",
    "MissingChunk",
    "PackDamage",
    "PackInfo",
    "PackRecord",
    "Repository",
    "RepositoryExists",
    "SnapshotInfo",
    "SnapshotStore",
    "Trees",
    "UnreadableSnapshot",
    "UnsupportedFormat",
    "Walker",
    "Writer",
    "blocks_of",
    "is_zero",
    "new_snapshot_id",
]


__getattr__ = lazy_attributes(__name__, _HOMES)
