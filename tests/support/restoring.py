"""Snapshots of real directories in real repositories, for tests that read snapshots back."""

from __future__ import annotations

import os
import time
from pathlib import Path

from ciuic.daemon.capture.job import CaptureJob, RootJob
from ciuic.daemon.capture.process import Report, run_job
from ciuic.repository import Repository
from ciuic.types import Snapshot


def take(repository: Repository, *roots: Path, excludes: tuple[str, ...] = ()) -> Snapshot:
    """Take an offline snapshot of these directories."""
    job = CaptureJob(
        repository=str(repository.path),
        id=repository.snapshots.new_id(),
        time_ns=time.time_ns(),
        host="here",
        roots=tuple(RootJob(path=os.fsencode(root), excludes=excludes) for root in roots),
        lock_wait_seconds=10,
    )
    done = run_job(job, Report(lambda message: None))
    # A reader opened earlier need not know this snapshot yet.
    with Repository.open(repository.path) as fresh:
        return fresh.snapshots.load(fresh.snapshots.resolve(done.id))


def write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
