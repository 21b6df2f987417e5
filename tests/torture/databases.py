"""Databases under snapshots: every restored directory holds exactly the allowed transactions.

RocksDB, LMDB (a shared writable map, with a reader that had the file open first), SQLite and PostgreSQL, each
where it is installed (`pip install rocksdict lmdb`, into any directory of PYTHONPATH; Debian's postgresql in
PATH), on ext4 and XFS loop devices under the kernel driver. Each commits numbers, one per transaction,
durable before it reports so. A snapshot may hold no number that was not begun when its cut was over, must
hold every one that was durable before it was requested, and all in between without a gap.
"""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from support import databases
from support.capture_child import captured
from support.databases import Counts
from support.overlay import overlay_over
from support.small_disks import missing, small_disk
from support.until import until
from torture.figure import Figure

from ciuic.repository import Repository

SNAPSHOTS = 20
"""Snapshots of each database on each file system, while there is time."""
_PATIENCE_SECONDS = 200
_PREPARE_SECONDS = 0.2


class Database:
    """A database's process in a directory of the root, with something committed."""

    def __init__(self, kind: str, folder: Path, counts: Path) -> None:
        self.kind, self.counts = kind, Counts.make(counts)
        folder.mkdir(exist_ok=True)
        self._process = subprocess.Popen(
            [*_command(kind, "WRITE", folder), os.fspath(counts)], stdin=subprocess.PIPE
        )
        until(
            f"the first transaction of {kind}",
            lambda: self.counts.durable or self._process.poll() is not None,
            _PATIENCE_SECONDS,
        )

    def stop(self) -> int:
        """End the process; return its exit status."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        return self._process.wait(_PATIENCE_SECONDS)


def run(seconds: float, seed: int) -> list[Figure]:
    """Return figures of each database on each file system: snapshots restored and right."""
    rng = random.Random(seed)
    kinds = [kind for kind in databases.KINDS if not databases.missing(kind)]
    disks = [disk for disk in ("ext4", "xfs") if not missing(disk)]
    figures = [
        Figure(f"{kind}: {databases.missing(kind)}", 0) for kind in databases.KINDS if kind not in kinds
    ]
    until = time.monotonic()
    for disk in disks:
        until += seconds / len(disks)
        with tempfile.TemporaryDirectory(prefix="databases-") as top, small_disk(Path(top), disk) as point:
            # The runner's directory: PostgreSQL works as another user, by an absolute path.
            Path(top).parent.chmod(0o711)
            figures += _run_on_disk(disk, kinds, Path(top), point, rng, until)
    return figures


def _run_on_disk(
    disk: str, kinds: list[str], top: Path, point: Path, rng: random.Random, until: float
) -> list[Figure]:
    root = point / "root"
    root.mkdir()
    # PostgreSQL runs as another user.
    top.chmod(0o711)
    Repository.create(top / "repository", block_size=4096).close()
    right, wrong = dict.fromkeys(kinds, 0), {kind: list[str]() for kind in kinds}
    not_held = 0
    with overlay_over(root, top / "w.sock", block_size=4096) as overlay:
        # Made now, so that the reader of LMDB finds its file.
        for kind in kinds:
            Database(kind, root / kind, top / kind).stop()
        at_work = [Database(kind, root / kind, top / kind) for kind in kinds]
        for _ in range(SNAPSHOTS):
            if time.monotonic() > until:
                break
            time.sleep(rng.random() * 0.5)
            low = {database.kind: database.counts.durable for database in at_work}
            overlay.client.prepare(_PREPARE_SECONDS)
            cut = overlay.client.cut()
            high = {database.kind: database.counts.begun for database in at_work}
            files = captured(overlay, top / "repository", cut.epoch, cut.cut_ns, reads=False)
            not_held += sum(not found.held for found in files.values())
            for kind in kinds:
                restored = _restored(top, root / kind, cut.epoch)
                problem = _judge(kind, restored, low[kind], high[kind])
                right[kind] += not problem
                wrong[kind] += [problem] if problem else []
        statuses = {database.kind: database.stop() for database in at_work}
    for kind, status in statuses.items():
        if status:
            wrong[kind].append(f"the database ended with {status}")
    return [
        *(Figure(f"{kind} on {disk}: snapshots restored and right", right[kind], tuple(wrong[kind])) for kind in kinds),
        Figure(f"files not held on {disk}", not_held),
    ]  # fmt: skip


def _restored(top: Path, folder: Path, epoch: int) -> Path:
    """Restore the folder by the command from the snapshot of the epoch; return it."""
    out = top / "out"
    shutil.rmtree(out, ignore_errors=True)
    words = ["restore", "-s", f"cs-{epoch:06x}", "-p", os.fspath(folder), "-d", os.fspath(out)]
    subprocess.run(
        [sys.executable, "-m", "ciuic", "--repo", os.fspath(top / "repository"), *words],
        check=True,
        capture_output=True,
        timeout=_PATIENCE_SECONDS,
    )
    return out / folder.name


def _judge(kind: str, folder: Path, low: int, high: int) -> str:
    """Return what is wrong with the restored database, or an empty text."""
    done = subprocess.run(
        _command(kind, "READ", folder), capture_output=True, text=True, timeout=_PATIENCE_SECONDS, check=False
    )
    if done.returncode:
        return f"it does not open: {done.stderr[-500:]}"
    first, last, count = map(int, done.stdout.split())
    if first != 1 or count != last:
        return f"{count} numbers from {first} to {last}: some are missing"
    return "" if low <= last <= high else f"its last number is {last}, and the cut allows {low} to {high}"


def _command(kind: str, what: str, folder: Path) -> list[str]:
    return [sys.executable, "-m", "support.databases", kind, what, os.fspath(folder)]
