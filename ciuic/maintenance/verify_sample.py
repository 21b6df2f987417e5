"""Verify snapshots by a random sample: all of their structure, and every byte of some of their blocks.

Guarantee: each block is read with the probability that the caller names, independently of the others. Damage that covers
n blocks is missed with the probability (1 - share)^n.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from ciuic.maintenance.verify import Verification, VerifyProgress, VerifyResult
from ciuic.repository import Repository
from ciuic.restore.pool import Pool
from ciuic.types import ChunkId, SnapshotId


def verify_sample(
    repository: Repository,
    ids: Sequence[SnapshotId] | None,
    share: float,
    *,
    rng: random.Random | None = None,
    progress: Callable[[VerifyProgress], None] | None = None,
) -> VerifyResult:
    """Verify these snapshots, or with None all of them. Damage is returned, never raised.

    Args:
        repository: Open repository.
        ids: Snapshots.
        share: Share of the blocks that are read, from 0 to 1.
        rng: Chooses the blocks.
        progress: Called with the progress.

    Raises:
        NotFound: a snapshot does not exist.
    """
    return _Sample(repository, share, rng or random.Random(), progress).run(ids)


class _Sample(Verification):
    """Verification that reads some blocks, and looks the others up."""

    def __init__(
        self,
        repository: Repository,
        share: float,
        rng: random.Random,
        progress: Callable[[VerifyProgress], None] | None,
    ) -> None:
        def shown(state: VerifyProgress) -> None:
            if progress is not None:
                progress(state._replace(bytes_total=int(share * state.bytes_total)))

        super().__init__(repository, False, shown)
        self._share = share
        self._rng = rng

    def run(self, ids: Sequence[SnapshotId] | None) -> VerifyResult:
        """Verify these snapshots, or with None all of them."""
        snapshots = self._load(self.repository.snapshots.ids() if ids is None else ids)
        if ids is None:
            self._verify_repository_files()
        self._verify_snapshots(snapshots, read=True)
        self._report_damage()
        self._show_progress(b"")
        return self.result

    def _verify_data(self, chunk: ChunkId, length: int, pool: Pool | None) -> None:
        super()._verify_data(chunk, length, pool if self._rng.random() < self._share else None)
