"""Tests through a real mount: a snapshot is what programs saw at the cut, whatever they do during capture.

The kernel's write cache, mappings, a worker process and its undo log are all in play; capture runs in this
process, and between any two of its reads of the log another operation goes through the mount.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from hypothesis import given, settings
from hypothesis import strategies as st
from support.capture_bench import MemoryRepository, slow_log, snapshot_manifest
from support.core_driver import Operation
from support.mount_driver import MountDriver, mount_operations
from support.overlay import Overlay, overlay_over
from support.trees import Manifest, assert_same, manifest

from ciuic.daemon.capture import content
from ciuic.daemon.capture import process as capture_root
from ciuic.daemon.capture.job import RootJob
from ciuic.daemon.capture.process import Report
from ciuic.daemon.snapshots import cut
from ciuic.fuse_layer.driver_choice import WITHOUT_PASSTHROUGH
from ciuic.fuse_layer.system.pipes import MIN_SPLICED_BYTES
from ciuic.types import RootRecord, SnapshotDraft, SnapshotId

pytestmark = pytest.mark.mount
BLOCK = 4096


class Bench:
    """Mounted root and a repository."""

    def __init__(self, overlay: Overlay, top: Path, block_size: int) -> None:
        self.overlay = overlay
        self.driver = MountDriver(overlay.root, block_size)
        self.repository = MemoryRepository(top, block_size)

    def begin(self) -> None:
        self.driver.clear()
        self.driver.furnish()

    def run(self, operations: list[Operation]) -> None:
        for operation in operations:
            self.driver.do(operation)

    def cut(self) -> tuple[int, int, Manifest]:
        """Cut as the daemon does, and return what programs see at that moment."""
        names = self.overlay.client.writers()
        assert trio.run(cut._run_helper, str(self.overlay.root), names) in (0, 3)
        made = self.overlay.client.cut()
        return made.epoch, made.cut_ns, manifest(self.overlay.root)

    def capture(self, epoch: int, cut_ns: int, meanwhile: list[Operation]) -> tuple[RootRecord, Report]:
        waiting = iter(meanwhile)

        def interfere() -> None:
            operation = next(waiting, None)
            if operation is not None:
                self.driver.do(operation)

        job = RootJob(
            path=b"/protected",
            backing_fd=self.overlay.backing_fd,
            session=self.overlay.client.status().session,
            epoch=epoch,
            worker_pid=self.overlay.process.pid,
        )
        report, writer = Report(lambda _: None), self.repository.writer()
        with slow_log(interfere):
            record, _ = capture_root.capture_root(job, self.repository, writer, report)
        writer.commit(
            SnapshotDraft(id=SnapshotId(f"cs-{epoch:06x}"), time_ns=cut_ns, host="h", roots=(record,))
        )
        self.overlay.client.committed(epoch)
        return record, report


@contextlib.contextmanager
def _bench(top: Path, monkeypatch: pytest.MonkeyPatch, block_size: int) -> Iterator[Bench]:
    monkeypatch.setattr(content, "_RUN_BYTES", 2 * block_size)
    monkeypatch.setattr(content, "_BATCH_BLOCKS", 2)
    root = top / "root"
    root.mkdir()
    with overlay_over(root, top / "worker.sock", block_size=block_size) as overlay:
        made = Bench(overlay, top, block_size)
        yield made
        made.driver.close_all()


@pytest.fixture
def bench(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    with _bench(short_tmp, monkeypatch, BLOCK) as made:
        yield made


@pytest.fixture
def bulk_bench(short_tmp: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    """Bench without passthrough whose writes are large enough to pass through the worker's pipe."""
    monkeypatch.setenv(WITHOUT_PASSTHROUGH, "1")
    with _bench(short_tmp, monkeypatch, MIN_SPLICED_BYTES) as made:
        yield made


@given(
    rounds=st.lists(st.tuples(mount_operations(12), mount_operations(20)), min_size=1, max_size=3),
)
@settings(deadline=None)
def test_every_snapshot_equals_the_view_of_programs_at_the_cut(
    bench: Bench, rounds: list[tuple[list[Operation], list[Operation]]]
) -> None:
    """Contents, names, modes, owners, times, links and attributes are captured through kernel caches."""
    _check_rounds(bench, rounds)


@given(
    rounds=st.lists(st.tuples(mount_operations(12), mount_operations(20)), min_size=1, max_size=3),
)
@settings(deadline=None)
def test_a_snapshot_is_exact_where_bulk_data_pass_through_the_worker(
    bulk_bench: Bench, rounds: list[tuple[list[Operation], list[Operation]]]
) -> None:
    """Large writes that are spliced into files are marked, and what they change is saved, as any other."""
    _check_rounds(bulk_bench, rounds)


def _check_rounds(bench: Bench, rounds: list[tuple[list[Operation], list[Operation]]]) -> None:
    bench.begin()
    for before, meanwhile in rounds:
        bench.run(before)
        epoch, cut_ns, expected = bench.cut()
        record, report = bench.capture(epoch, cut_ns, meanwhile)
        assert report.errors == []
        assert_same(expected, snapshot_manifest(bench.repository.trees, bench.repository.content, record))
