"""Tests that threads of a restore take turns at what costs processor time."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from support.restoring import take

from ciuic.repository import Repository
from ciuic.repository.bulk_reader import ReadChunk
from ciuic.restore import Overwrite, content, execute, plan_restore
from ciuic.restore.content import BlockWorker, FileBlock


def test_no_more_threads_work_at_once_than_there_are_processors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that write or compare are never more than the processors, and all get a turn."""
    # A machine has more processors than a container's cpuset or taskset(1) leaves to the process.
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    working: set[int] = set()
    most = [0]
    real_write, real_has = BlockWorker._write, BlockWorker._has

    def count_worker(work: object) -> None:
        working.add(threading.get_ident())
        most[0] = max(most[0], len(working))
        time.sleep(0.0005)

    def write(self: BlockWorker, part: FileBlock, piece: ReadChunk) -> None:
        count_worker(self)
        real_write(self, part, piece)
        working.discard(threading.get_ident())

    def has(self: BlockWorker, fd: int, start: int, end: int, chunk: content.ChunkId) -> bool:
        count_worker(self)
        try:
            return real_has(self, fd, start, end, chunk)
        finally:
            working.discard(threading.get_ident())

    monkeypatch.setattr(BlockWorker, "_write", write)
    monkeypatch.setattr(BlockWorker, "_has", has)
    root, out = tmp_path / "root", os.fsencode(tmp_path / "out")
    root.mkdir()
    (root / "large").write_bytes(os.urandom(40 << 20))
    for number in range(100):
        (root / f"small {number}").write_bytes(os.urandom(100))
    with Repository.create(tmp_path / "repository") as repository:
        snapshot = take(repository, root)
        for overwrite in (None, Overwrite.ALWAYS):
            assert execute(
                plan_restore(repository, snapshot, [os.fsencode(root)], out, overwrite=overwrite)
            ).complete
    assert 1 <= most[0] <= 2
    assert (tmp_path / "out/root/large").read_bytes() == (root / "large").read_bytes()


@pytest.mark.parametrize("zeros", [0, 255, 256, 4095, 4096, 9000])
@pytest.mark.parametrize("at", [0, 1, 5000, 60_000])
def test_a_page_of_zeros_is_found_wherever_it_begins(zeros: int, at: int) -> None:
    """A page of zeros is found at any offset."""
    data = b"\1" * at + bytes(zeros) + b"\1" * 70_000
    assert content.has_zero_page(data, 0, len(data)) == (zeros >= 4096)
    assert not content.has_zero_page(data, 0, min(at + 4000, len(data)))
