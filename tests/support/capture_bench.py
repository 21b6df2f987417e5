"""Capture bench: a root with an overlay core over it, without a mount, and a repository in memory.

The repository has capture's interface, for tests that make hundreds of snapshots: it hashes its input, so equal trees have equal
ids; it stores nothing and keeps no promise about crashes. The manifest of a root in a snapshot has the form of trees.manifest, so that
the two can be compared.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import msgspec
import pytest
import xxhash
from support.core_driver import CoreDriver, Operation, open_backing
from support.trees import Facts, Manifest, assert_same, manifest

from ciuic.daemon.capture import content as capture_content
from ciuic.daemon.capture import process
from ciuic.daemon.capture.job import RootJob
from ciuic.daemon.capture.process import Report
from ciuic.fuse_layer.core import overlay_hooks
from ciuic.fuse_layer.core.overlay_core import OverlayCore, SealedEpoch
from ciuic.fuse_layer.journal.inherited_session import InheritedSession
from ciuic.fuse_layer.undo_format import LogReader
from ciuic.repository.compression import Content
from ciuic.repository.extent_sharing import Stage
from ciuic.system import spill
from ciuic.types import (
    FLAG_OPEN_FOR_WRITING,
    HOLE,
    ChunkId,
    Entry,
    MapRef,
    RootRecord,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
    TreeRef,
)


def _id(data: bytes) -> ChunkId:
    return ChunkId(hashlib.md5(data, usedforsecurity=False).digest())


class _Info(NamedTuple):
    id: SnapshotId


class _Snapshots:
    def __init__(self) -> None:
        self.kept: dict[SnapshotId, Snapshot] = {}

    def newest_first(self, root: bytes) -> list[_Info]:
        return [_Info(s.id) for s in reversed(self.kept.values()) if any(r.path == root for r in s.roots)]

    def load(self, id_: SnapshotId) -> Snapshot:
        return self.kept[id_]


class _Trees:
    def __init__(self, stored: dict[bytes, dict[bytes, Entry]]) -> None:
        self._stored = stored

    def entry(self, tree: bytes, name: bytes) -> Entry | None:
        return self._stored[tree].get(name) if tree else None

    def entries(self, tree: bytes, *, after: bytes = b"") -> Iterator[Entry]:
        return iter(
            [entry for name, entry in sorted(self._stored[tree].items()) if name > after] if tree else []
        )

    def links(self, links: bytes) -> Iterator[Entry]:
        return self.entries(links)

    def link(self, links: bytes, ino: int) -> Entry | None:
        return self.entry(links, ino.to_bytes(8, "big"))


class _Writer:
    def __init__(self, repository: MemoryRepository) -> None:
        self._repository = repository
        self.new_bytes = 0
        self.stage = Stage("")

    def put_chunk(self, data: bytes) -> ChunkId:
        chunk = _id(data)
        assert len(data) <= self._repository.block_size
        self._repository.chunks[chunk] = bytes(data)
        return chunk

    def put_chunks(self, blocks: Sequence[Content]) -> list[ChunkId]:
        return [self.put_chunk(bytes(block.data)) for block in blocks]

    def put_xattrs(self, pairs: Iterable[tuple[bytes, bytes]]) -> tuple[tuple[tuple[bytes, bytes], ...], int]:
        return tuple(sorted(pairs)), 0

    def update_tree(
        self, base: bytes, changes: Mapping[bytes, Entry | None], *, links: bool = False
    ) -> TreeRef:
        entries = dict(self._repository.stored_trees[base]) if base else {}
        for name, entry in changes.items():
            if entry is None:
                entries.pop(name, None)
            else:
                assert entry.name == name
                entries[name] = entry
        if not entries:
            return TreeRef(ChunkId(b""))
        tree = _id(b"tree" + msgspec.msgpack.encode(sorted(entries.items())))
        self._repository.stored_trees[tree] = entries
        counted = [entry for entry in entries.values() if not entry.link and not entry.is_dir]
        below = [entry for entry in entries.values() if entry.is_dir]
        return TreeRef(
            tree,
            len(counted) + sum(entry.total_files for entry in below),
            sum(entry.size_bytes for entry in counted if entry.is_file)
            + sum(entry.total_bytes for entry in below),
        )

    def update_block_map(
        self, base: MapRef | tuple[bytes, int], n_blocks: int, changes: Mapping[int, ChunkId]
    ) -> MapRef:
        content = base.content if isinstance(base, MapRef) else base[0]
        blocks = {**self._repository.maps.get(content, {}), **changes}
        blocks = {i: chunk for i, chunk in blocks.items() if i < n_blocks and chunk != HOLE}
        if not blocks:
            return MapRef(b"", 0)
        id_ = _id(b"map" + repr(sorted(blocks.items())).encode())
        self._repository.maps[id_] = blocks
        return MapRef(id_, 1)

    def commit(self, draft: SnapshotDraft) -> Snapshot:
        snapshot = Snapshot(
            id=draft.id,
            time_ns=draft.time_ns,
            host=draft.host,
            roots=draft.roots,
            tags=draft.tags,
            message=draft.message,
            parent=draft.parent,
            left_out=draft.left_out,
            incomplete=draft.incomplete,
        )
        self._repository.snapshots.kept[draft.id] = snapshot
        return snapshot


class MemoryRepository:
    def __init__(self, path: Path, block_size: int) -> None:
        self.path = path
        self.block_size = block_size
        self.chunks: dict[bytes, bytes] = {}
        self.maps: dict[bytes, dict[int, ChunkId]] = {}
        self.stored_trees: dict[bytes, dict[bytes, Entry]] = {}
        self.snapshots = _Snapshots()
        self.trees: Any = _Trees(self.stored_trees)

    def writer(self) -> _Writer:
        return _Writer(self)

    def content(self, entry: Entry) -> bytes:
        """Return the whole content of a small file."""
        blocks = self.maps[entry.content] if entry.content else {}
        data = bytearray(entry.size_bytes)
        for index, chunk in blocks.items():
            part = self.chunks[chunk]
            at = index * self.block_size
            assert len(part) == min(self.block_size, entry.size_bytes - at), (
                "a block as long as the file says"
            )
            data[at : at + len(part)] = part
        return bytes(data)


def snapshot_manifest(trees: Any, content: Callable[[Entry], bytes], root: RootRecord) -> Manifest:
    """Return every name of the root in the snapshot; a dangling link table reference is an error."""
    found: Manifest = {}
    first_names: dict[int, bytes] = {}
    used_links: set[int] = set()

    def add(path: bytes, entry: Entry) -> None:
        full, same = entry, path
        if entry.link:
            looked_up = trees.link(root.links, entry.link)
            assert looked_up is not None, (
                f"{path!r} refers to inode {entry.link}, which is not in the link table"
            )
            full, same = looked_up, first_names.setdefault(entry.link, path)
            used_links.add(entry.link)
        found[path] = Facts(
            kind=stat.S_IFMT(full.mode),
            mode=stat.S_IMODE(full.mode),
            uid=full.uid,
            gid=full.gid,
            rdev=full.rdev,
            size_bytes=full.size_bytes,
            mtime_ns=full.mtime_ns,
            digest=xxhash.xxh3_128(content(full)).hexdigest() if full.is_file else "",
            target=full.target,
            xattrs=tuple((os.fsdecode(name), value) for name, value in full.xattrs),
            same_inode_as=same,
        )

    def walk(prefix: bytes, directory: Entry) -> None:
        for entry in trees.entries(directory.content):
            add(prefix + entry.name, entry)
            if entry.is_dir:
                walk(prefix + entry.name + b"/", entry)

    add(b".", root.entry)
    walk(b"", root.entry)
    in_table = {entry.ino for entry in trees.links(root.links)}
    assert in_table == used_links, f"link table has {in_table}, the tree refers to {used_links}"
    return found


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
            record, _ = process.capture_root(job, self.repository, writer, report)  # type: ignore[arg-type]
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

    def entry_of(self, record: RootRecord, name: bytes) -> Entry:
        """Return a file at the top of the root."""
        found: Entry | None = self.repository.trees.entry(record.entry.content, name)
        assert found is not None
        return found

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

    with mock.patch.object(process, "open_log", open_slow_log):
        yield


@pytest.fixture(autouse=True)
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the limits, in modules that import this, so that small files and few changes take the code paths of large ones and many."""
    monkeypatch.setattr(spill, "MAX_ENTRIES", 2)
    monkeypatch.setattr(overlay_hooks, "COPY_LIMIT_BYTES", BLOCK)
    monkeypatch.setattr(capture_content, "_RUN_BYTES", 2 * BLOCK)
    monkeypatch.setattr(capture_content, "_BATCH_BLOCKS", 2)


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
