"""Capture is exact: whatever the job does while capture reads, the snapshot is the root as it was at the cut.

The overlay core runs on a plain directory, without a mount; operations are slipped in between capture's reads, at the
worst moment, just before it asks the undo log. What is stored is compared with a manifest taken at the cut.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.core_driver import CoreDriver, Operation, open_backing, operations
from support.memory_repository import MemoryRepository
from support.snapshot_manifest import snapshot_manifest
from support.trees import Manifest, assert_same, manifest

from ciuic.daemon import capture_content, capture_root
from ciuic.daemon.capture_job import RootJob
from ciuic.daemon.capture_root import Report
from ciuic.fuse_layer import data as core_data
from ciuic.fuse_layer.core import Cut, OverlayCore
from ciuic.fuse_layer.undo_format import LogReader
from ciuic.types import FLAG_OPEN_FOR_WRITING, RootRecord, SnapshotDraft, SnapshotId

BLOCK = 4096
SESSION = "5" * 32
ROOT_PATH = b"/protected"


class Bench:
    """A root with a core over it and a repository for its snapshots."""

    def __init__(self, top: Path, excludes: tuple[str, ...] = ()) -> None:
        self.backing = top / "backing"
        self.backing.mkdir()
        self.excludes = excludes
        self.backing_fd = open_backing(self.backing)
        self.core = OverlayCore(self.backing_fd, session=SESSION, block_size=BLOCK)
        self.driver = CoreDriver(self.core, BLOCK)
        self.repository = MemoryRepository(top, BLOCK)
        self.at_cut: dict[int, tuple[Cut, Manifest, set[int]]] = {}

    def close(self) -> None:
        self.driver.close_all()
        self.core.close()
        os.close(self.backing_fd)

    def run(self, ops: list[Operation]) -> None:
        for operation in ops:
            self.driver.do(operation)

    def cut(self) -> int:
        writers = self.driver.open_for_writing()
        cut = self.core.cut()
        self.at_cut[cut.epoch] = (cut, manifest(self.backing), writers)
        return cut.epoch

    def capture(self, epoch: int, meanwhile: list[Operation]) -> tuple[RootRecord, Report]:
        """Captures the epoch while `meanwhile` happens, one operation before each look into the log; commits."""
        waiting = iter(meanwhile)

        def interfere() -> None:
            operation = next(waiting, None)
            if operation is not None:
                self.driver.do(operation)

        job = RootJob(
            path=ROOT_PATH,
            backing_fd=self.backing_fd,
            session=SESSION,
            epoch=epoch,
            worker_pid=os.getpid(),
            excludes=self.excludes,
        )
        report = Report(lambda _: None)
        writer = self.repository.writer()
        with slow_log(interfere):
            record, _ = capture_root.capture_root(job, self.repository, writer, report)
        cut = self.at_cut[epoch][0]
        writer.commit(
            SnapshotDraft(id=SnapshotId(f"cs-{epoch:06x}"), time_ns=cut.cut_ns, host="h", roots=(record,))
        )
        self.core.committed(epoch)
        for operation in waiting:
            self.driver.do(operation)
        return record, report

    def check(self, record: RootRecord, report: Report) -> None:
        _, expected, writers = self.at_cut[record.epoch]
        assert report.errors == []
        assert_same(expected, snapshot_manifest(self.repository.trees, self.repository.content, record))
        flagged, open_for_writing = self.flagged(record), writers & self.inodes(record)
        assert flagged == open_for_writing, f"marked {flagged}, open for writing was {open_for_writing}"

    def inodes(self, record: RootRecord) -> set[int]:
        return {entry.ino for entry in self._files(record)}

    def flagged(self, record: RootRecord) -> set[int]:
        return {entry.ino for entry in self._files(record) if entry.flags & FLAG_OPEN_FOR_WRITING}

    def _files(self, record: RootRecord) -> Iterator:
        yield from self.repository.trees.entries(record.links)
        stack = [record.entry]
        while stack:
            for entry in self.repository.trees.entries(stack.pop().content):
                if entry.is_dir:
                    stack.append(entry)
                elif not entry.link:
                    yield entry


@contextmanager
def slow_log(interfere: Callable[[], None]) -> Iterator[None]:
    class SlowLog(LogReader):
        def poll(self) -> int:
            interfere()
            return super().poll()

    def open_slow_log(undo_fd: int, epoch: int) -> LogReader:
        return SlowLog(f"/proc/self/fd/{undo_fd}/log", epoch)

    with mock.patch.object(capture_root, "open_log", open_slow_log):
        yield


@contextmanager
def bench(excludes: tuple[str, ...] = ()) -> Iterator[Bench]:
    top = Path(tempfile.mkdtemp(prefix="ciuic-capture-"))
    made = Bench(top, excludes)
    try:
        made.driver.furnish()
        yield made
    finally:
        made.close()
        shutil.rmtree(top)


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small files already take the ways that are made for large ones."""
    monkeypatch.setattr(core_data, "COPY_LIMIT_BYTES", BLOCK)
    monkeypatch.setattr(capture_content, "_RUN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(capture_content, "_BATCH_BLOCKS", 2)


@given(st.lists(st.tuples(operations(12), operations(20)), min_size=1, max_size=4))
def test_every_snapshot_is_the_root_at_its_cut(rounds: list[tuple[list[Operation], list[Operation]]]) -> None:
    """Full the first time, tracked from then on, and always exactly what was there at the cut."""
    with bench() as here:
        for number, (before, meanwhile) in enumerate(rounds):
            here.run(before)
            record, report = here.capture(here.cut(), meanwhile)
            assert record.mode == ("full" if number == 0 else "tracked")
            here.check(record, report)


@given(operations(15), operations(10), operations(10), operations(15), operations(15))
def test_epochs_that_wait_together_are_each_exact(
    first: list[Operation],
    between: list[Operation],
    after: list[Operation],
    meanwhile: list[Operation],
    meanwhile_too: list[Operation],
) -> None:
    """Two sealed epochs wait at once, as when somebody asks for a snapshot during the hourly one."""
    with bench() as here:
        here.run(first)
        here.check(*here.capture(here.cut(), between))
        here.run(between)
        one = here.cut()
        here.run(after)
        two = here.cut()
        here.check(*here.capture(one, meanwhile))
        record, report = here.capture(two, meanwhile_too)
        assert record.mode == "tracked"
        here.check(record, report)


@given(operations(15), operations(15), operations(10), operations(10))
def test_an_epoch_that_was_given_up_is_in_the_next_snapshot(
    first: list[Operation], second: list[Operation], third: list[Operation], meanwhile: list[Operation]
) -> None:
    """Capture of one epoch fails; the next snapshot, still tracked, has its changes too."""
    with bench() as here:
        here.run(first)
        here.check(*here.capture(here.cut(), []))
        here.run(second)
        given_up = here.cut()
        here.run(third)
        here.core.abort(given_up)
        record, report = here.capture(here.cut(), meanwhile)
        assert record.mode == "tracked"
        here.check(record, report)
