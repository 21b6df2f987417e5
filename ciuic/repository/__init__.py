"""The repository: chunks in packs, trees and block maps made of chunks, snapshots on top; docs/format.md has
the bytes.

Guarantees: what a committed snapshot refers to is durable, and every read is checked against its hash. Leaves
to others: what to put in (capture), what to take out (restore), what to keep (retention, gc).

Names are imported when first used, because `ciuic list` should not pay for hashing and compression it does
not need.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ciuic.repository.blockmaps import BlockMaps, blocks_of
    from ciuic.repository.chunks import ChunkReader
    from ciuic.repository.disk import Disk
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
    from ciuic.repository.ids import is_zero, new_snapshot_id
    from ciuic.repository.model import (
        ChunkLocation,
        PackDamage,
        PackInfo,
        PackRecord,
        SnapshotInfo,
        UnreadableSnapshot,
    )
    from ciuic.repository.repository import Repository
    from ciuic.repository.snapshots import SnapshotStore
    from ciuic.repository.trees import Trees
    from ciuic.repository.walk import Walker
    from ciuic.repository.writer import Writer

_HOME = {
    "BlockMaps": "blockmaps",
    "blocks_of": "blockmaps",
    "ChunkReader": "chunks",
    "Disk": "disk",
    "DamagedChunk": "errors",
    "DamagedPack": "errors",
    "DamagedRepository": "errors",
    "DamagedSnapshot": "errors",
    "DamagedTree": "errors",
    "MissingChunk": "errors",
    "RepositoryExists": "errors",
    "UnsupportedFormat": "errors",
    "is_zero": "ids",
    "new_snapshot_id": "ids",
    "ChunkLocation": "model",
    "PackDamage": "model",
    "PackInfo": "model",
    "PackRecord": "model",
    "SnapshotInfo": "model",
    "UnreadableSnapshot": "model",
    "Repository": "repository",
    "SnapshotStore": "snapshots",
    "Trees": "trees",
    "Walker": "walk",
    "Writer": "writer",
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
    "Disk",
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


def __getattr__(name: str) -> object:
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value
