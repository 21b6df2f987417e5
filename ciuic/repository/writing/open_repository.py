"""The part of an open repository that writing and freeing space use.

Writing lies below the public `Repository`, which makes writers, and sees it through this protocol.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from ciuic.repository.committed_snapshots import CommittedSnapshots
from ciuic.repository.config import StoredConfig
from ciuic.repository.model import PackInfo, PackRecord


class OpenRepository(Protocol):
    """An open repository; `ciuic.repository.Repository` documents each member."""

    path: Path
    id: str
    block_size: int
    config: StoredConfig
    snapshots: CommittedSnapshots

    @property
    def may_have_bases(self) -> bool:
        """True if chunks may be stored as differences."""

    def packs(self) -> list[PackInfo]:
        """Return all packs by number."""

    def pack_records(self, number: int, *, salvage: bool = False) -> Iterator[PackRecord]:
        """Return all records of a pack."""

    def stored_bytes(self) -> int:
        """Return the size of all packs together."""

    def forget_pack(self, number: int) -> None:
        """Close a deleted pack."""

    def close(self) -> None:
        """Close all descriptors."""
