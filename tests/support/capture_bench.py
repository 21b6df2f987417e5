"""Capture bench: a root with an overlay core over it, without a mount, and a repository in memory."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from support.core_driver import CoreDriver, Operation, open_backing
from support.memory_repository import MemoryRepository
from support.snapshot_manifest import snapshot_manifest
from support.trees import Manifest, assert_same, manifest

from ciuic.daemon.capture import root
from ciuic.daemon.capture.job import RootJob
from ciuic.daemon.capture.root import Report
from ciuic.fuse_layer.core.core import OverlayCore, SealedEpoch
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.undo_format import LogReader
from ciuic.types import FLAG_OPEN_FOR_WRITING, Entry, RootRecord, SnapshotDraft, SnapshotId

BLOCK = 4096
SESSION = "5" * 32
ROOT_PATH = b"/protected"


class Bench:
    """Root with a core over it and a repository for its snapshots."""

    def __init__(self, top: Path, excludes: tuple[str, ...] = ()) -> None:
        self.backing = top / "backing"
        self.backing.mkdir()
        self.excludes = excludes
        self.backing_fd = open_backing(self.backing)
        self.session = SESSION
        self.core = OverlayCore(self.backing_fd, session=SESSION, block_size=BLOCK)
        self.driver = CoreDriver(self.core, BLOCK)
        self.repository = MemoryRepository(top, BLOCK)
        self.at_cut: dict[int, tuple[SealedEpoch, Manifest, set[int]]] = {}
        self.gaps: set[int] = set()
        """Epochs in which tracking had a gap: the first, and those with a change below no known name."""

    def close(self) -> None:
        self.driver.close_all()
        self.core.close()
        os.close(self.backing_fd)

    def start_again(self, session: str) -> None:
        """Replace the core, saved or lost, by a new worker's; its handles and pending epochs are gone."""
        self.core.close()
        self.session = session
        self.core = OverlayCore(self.backing_fd, session=session, block_size=BLOCK)
        self.driver = CoreDriver(self.core, BLOCK)

    def succeed(self) -> bool:
        """Replace the core by a successor's, as if the worker was killed between two operations.

        Return whether the successor took up the sealed epochs; otherwise nothing is pending any more.
        """
        pending = self.core.status()["pending"]
        self.core.close()
        self.core = OverlayCore(
            self.backing_fd, session="6" * 32, block_size=BLOCK, inherited=InheritedSession()
        )
        self.driver = CoreDriver(self.core, BLOCK)
        taken_up = self.core.session == self.session
        assert self.core.status()["pending"] == (pending if taken_up else [])
        self.session = self.core.session
        return taken_up

    def run(self, ops: Sequence[Operation]) -> None:
        for operation in ops:
            self.driver.do(operation)

    def cut(self, *, observe: bool = True) -> int:
        """End the epoch; `observe` records everything there, and so reads it all."""
        writers = self.driver.open_for_writing()
        complete = self.core._state.tracker.current.complete
        cut = self.core.cut()
        if not complete:
            self.gaps.add(cut.epoch)
        self.at_cut[cut.epoch] = (cut, manifest(self.backing) if observe else {}, writers)
        return cut.epoch

    def snapshot(
        self, meanwhile: Sequence[Operation] = (), *, trust: bool = True
    ) -> tuple[RootRecord, Report]:
        """Cut, capture, and compare with the state at the cut."""
        record, report = self.capture(self.cut(), meanwhile, trust=trust)
        self.check(record, report)
        return record, report

    def capture(
        self,
        epoch: int,
        meanwhile: Sequence[Operation] = (),
        *,
        trust: bool = True,
        interfere: Callable[[], None] = lambda: None,
        tags: tuple[str, ...] = (),
    ) -> tuple[RootRecord, Report]:
        """Capture the epoch and commit; run one operation of `meanwhile` before each look into the log."""
        waiting = iter(meanwhile)

        def before_each_poll() -> None:
            interfere()
            operation = next(waiting, None)
            if operation is not None:
                self.driver.do(operation)

        job = RootJob(
            path=ROOT_PATH,
            backing_fd=self.backing_fd,
            session=self.session,
            epoch=epoch,
            worker_pid=os.getpid(),
            excludes=self.excludes,
            trust_tracking=trust,
        )
        report = Report(lambda _: None)
        writer = self.repository.writer()
        with slow_log(before_each_poll):
            record, _ = root.capture_root(job, self.repository, writer, report)  # type: ignore[arg-type]
        cut = self.at_cut[epoch][0]
        writer.commit(
            SnapshotDraft(
                id=SnapshotId(f"cs-{epoch:06x}"), time_ns=cut.cut_ns, host="h", roots=(record,), tags=tags
            )
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

    def _files(self, record: RootRecord) -> Iterator[Entry]:
        yield from self.repository.trees.links(record.links)
        stack = [record.entry]
        while stack:
            for entry in self.repository.trees.entries(stack.pop().content):
                if entry.is_dir:
                    stack.append(entry)
                elif not entry.link:
                    yield entry


@contextmanager
def slow_log(interfere: Callable[[], None]) -> Iterator[None]:
    """Call ``interfere`` before each read of the undo log by a capture in this process."""

    class SlowLog(LogReader):
        def poll(self) -> int:
            interfere()
            return super().poll()

    def open_slow_log(undo_fd: int, epoch: int) -> LogReader:
        return SlowLog(f"/proc/self/fd/{undo_fd}/log", epoch)

    with mock.patch.object(root, "open_log", open_slow_log):
        yield


@contextmanager
def bench(excludes: tuple[str, ...] = (), *, below: Path | None = None) -> Iterator[Bench]:
    """Provide a bench, made in ``below`` if the file system matters."""
    top = Path(tempfile.mkdtemp(prefix="ciuic-capture-", dir=below))
    made = Bench(top, excludes)
    try:
        made.driver.furnish()
        yield made
    finally:
        made.close()
        shutil.rmtree(top)
