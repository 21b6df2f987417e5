"""Capture of one epoch of a mounted overlay by the real capture process."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.overlay import Overlay
from support.stored import read_file

from ciuic.daemon.capture.job import CaptureJob, Done, RootJob, decode_message, encode_job
from ciuic.repository import Repository
from ciuic.types import FLAG_OPEN_FOR_WRITING, Entry, RootRecord, SnapshotId, lag_of

_CAPTURE_SECONDS = 200
"""Timeout of a capture, which yields to all other processes: beside twenty busy ones it takes a minute."""


class Found(NamedTuple):
    """A file of a snapshot."""

    content: bytes
    is_open: bool
    """True if the file was open for writing at the cut."""
    lag_ms: int | None
    """Milliseconds by which its content may be later than the cut; None if it is held."""

    @property
    def held(self) -> bool:
        return self.lag_ms is None


def captured(
    overlay: Overlay, store: Path, epoch: int, cut_ns: int, *, reads: bool = True
) -> dict[bytes, Found]:
    """Capture the epoch, commit it, and return the regular files of the root by their paths below it.

    With ``reads``, each with its content.
    """
    root = RootJob(
        path=os.fsencode(overlay.root),
        backing_fd=overlay.backing_fd,
        session=overlay.client.status().session,
        epoch=epoch,
        worker_pid=overlay.process.pid,
    )
    name = f"cs-{epoch:06x}"
    job = CaptureJob(repository=os.fspath(store), id=name, time_ns=cut_ns, host="h", roots=(root,))
    process = subprocess.run(
        [sys.executable, "-m", "ciuic.daemon.capture.process"],
        input=encode_job(job),
        stdout=subprocess.PIPE,
        pass_fds=(overlay.backing_fd,),
        timeout=_CAPTURE_SECONDS,
        check=False,
    )
    done = decode_message(process.stdout.splitlines()[-1])
    assert isinstance(done, Done), done
    assert done.errors == ()
    overlay.client.committed(epoch)
    with Repository.open(store) as repository:
        record = repository.snapshots.load(SnapshotId(name)).roots[0]
        return {
            path: Found(
                read_file(repository, entry) if reads else b"",
                bool(entry.flags & FLAG_OPEN_FOR_WRITING),
                lag_of(entry),
            )
            for path, entry in _files(repository, record)
        }


def _files(repository: Repository, record: RootRecord) -> Iterator[tuple[bytes, Entry]]:
    links = {entry.ino: entry for entry in repository.trees.links(record.links)} if record.links else {}
    below = [(b"", record.entry.content)]
    while below:
        prefix, tree = below.pop()
        for entry in repository.trees.entries(tree):
            path = prefix + entry.name
            if entry.is_dir:
                below.append((path + b"/", entry.content))
            elif entry.is_file:
                yield path, links[entry.link] if entry.link else entry
