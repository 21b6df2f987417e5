"""Snapshots under four writers, judged as prefixes of their histories (tests/support/oracle.py).

On ext4 and XFS loop devices under the kernel driver: append, pwrite, O_DIRECT, mmap with msync (with and
without a reader first), new files that bypass the overlay, truncate, rename, link, unlink while open.
"""

from __future__ import annotations

import random
import tempfile
import time
from pathlib import Path

from support import oracle_run
from support.overlay import overlay_over
from support.small_disks import missing, small_disk
from torture.figure import Figure

from ciuic.repository import Repository

_CUTS = 100
"""Cuts of each run; then the writers start again with other seeds."""


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures: snapshots judged on each file system, their files, and those not held."""
    rng = random.Random(seed)
    figures: list[Figure] = []
    disks = [disk for disk in ("ext4", "xfs") if not missing(disk)]
    until = time.monotonic()
    for disk in disks:
        until += seconds / len(disks)
        total, wrong = oracle_run.Outcome(), list[str]()
        while not total.snapshots or time.monotonic() < until:
            one_seed = rng.randrange(1 << 30)
            one = _run(disk, one_seed, until)
            total.snapshots += one.snapshots
            total.files += one.files
            total.not_held += one.not_held
            wrong += [f"seed {one_seed}: {text}" for text in one.wrong]
        figures += [
            Figure(f"snapshots judged on {disk}", total.snapshots, tuple(wrong)),
            Figure(f"files in them on {disk}", total.files),
            Figure(f"of these not held on {disk}", total.not_held),
        ]
    return figures


def _run(disk: str, seed: int, until: float) -> oracle_run.Outcome:
    with tempfile.TemporaryDirectory(prefix="oracle-") as top, small_disk(Path(top), disk) as point:
        root, logs, store = point / "root", Path(top) / "logs", Path(top) / "repository"
        root.mkdir()
        logs.mkdir()
        Repository.create(store, block_size=4096).close()
        with overlay_over(root, Path(top) / "w.sock", block_size=4096) as overlay:
            return oracle_run.run(overlay, store, logs, seed=seed, cuts=_CUTS, until=until)
