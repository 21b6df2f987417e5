"""Prune, killed or failed by the disk at every operation: every listed snapshot reads back exactly."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.failing_disk import FailingDisk, Killed
from support.power_disk import PowerCut, PowerDisk
from support.small_repository import noise
from support.stored import read_back, store

from ciuic.errors import Damaged
from ciuic.maintenance.check import check
from ciuic.maintenance.prune import CollectionRefused, forget, prune
from ciuic.maintenance.sweep import Thresholds
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository, Writer
from ciuic.repository.index_database import INDEX_NAME, discard
from ciuic.retention import RetentionPolicy
from ciuic.system.disk import Disk
from ciuic.types import SnapshotId

BLOCK = 4096
EAGER = Thresholds(unused_share=0.0, pack_dead_share=0.0)
LAST_TWO = RetentionPolicy(keep_within_seconds=0, keep_last=2)


def tree(number: int) -> dict[bytes, Any]:
    return {
        b"own": noise(number, 40 * BLOCK),
        b"shared": noise(90, 20 * BLOCK),
        b"d": {b"pair": noise(100 + number // 2, 10 * BLOCK)},
    }


def six_snapshots(path: Path, pack_bytes: int) -> tuple[Path, list[SnapshotId]]:
    with Repository.create(path, block_size=BLOCK) as repository:
        ids = []
        for number in range(6):
            with repository.writer(pack_bytes=pack_bytes) as writer:
                ids.append(store(writer, tree(number), number=number).id)
    return path, ids


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SnapshotId]]:
    """Provide six snapshots in many packs, sealed and open, with garbage in all once the older ones go."""
    return six_snapshots(tmp_path_factory.mktemp("gc-crash") / "repo", 30 * BLOCK)


@pytest.fixture(scope="module")
def single_pack(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[SnapshotId]]:
    """A repository of the same six snapshots in one data pack, one segment each."""
    return six_snapshots(tmp_path_factory.mktemp("gc-crash") / "repo", 10_000 * BLOCK)


def assert_read_back(path: Path, ids: list[SnapshotId], expected: set[SnapshotId]) -> None:
    """Assert that the expected snapshots are listed and that every listed one reads back as stored."""
    with Repository.open(path) as repository:
        listed = repository.snapshots.ids()
        assert expected <= set(listed)
        assert repository.snapshots.unreadable() == []
        for id_ in listed:
            assert read_back(repository, id_) == tree(ids.index(id_))


def report_little_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """Report so little free space that prune moves packs by pieces, from their ends."""
    from ciuic.maintenance import sweep

    for name in ("available_bytes", "writable_bytes"):
        # One of the segments of `single_pack`.
        monkeypatch.setattr(sweep, name, lambda path: 640 << 10)


@pytest.mark.parametrize(
    "failure",
    [
        Killed(),
        pytest.param(OSError(errno.ENOSPC, "No space left on device"), marks=pytest.mark.full),
        pytest.param(OSError(errno.EIO, "I/O"), marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize("room", [pytest.param("ample", marks=pytest.mark.full), "cramped"])
def test_prune_torn_at_any_operation_damages_no_snapshot(
    tmp_path: Path,
    original: tuple[Path, list[SnapshotId]],
    single_pack: tuple[Path, list[SnapshotId]],
    failure: BaseException,
    room: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prune with the nth operation torn and all later ones failing, for every n, damages no snapshot.

    The next undisturbed prune does the rest. Both with room for whole packs and with room for one piece at a
    time.
    """
    source, ids = original
    if room == "cramped":
        source, ids = single_pack
        report_little_space(monkeypatch)
    expected = set(ids[-2:])
    operation, finished = 0, False
    while not finished:
        operation += 1
        path = tmp_path / f"repo-{operation}"
        shutil.copytree(source, path)
        disk = FailingDisk(operation, failure)
        with Repository.open(path, disk=disk) as repository, contextlib.suppress(type(failure)):
            prune(repository, LAST_TWO, thresholds=EAGER)
        finished = disk.operations < operation
        assert_read_back(path, ids, expected)
        with Repository.open(path) as repository:
            prune(repository, LAST_TWO, thresholds=EAGER)
            assert set(repository.snapshots.ids()) == expected
            assert not check(repository, read_data=True).damaged
        assert_read_back(path, ids, expected)
        shutil.rmtree(path)
    # Otherwise the loop has not exercised prune.
    assert operation > 12


def pack_files(path: Path) -> list[Path]:
    return sorted(path.rglob("*.pack"))


def test_a_pack_with_a_damaged_table_is_never_dropped(
    tmp_path: Path, original: tuple[Path, list[SnapshotId]]
) -> None:
    """Prune refuses, or leaves readable all that was readable, whichever 4 KiB of a pack are lost."""
    source, ids = original
    for pack in range(len(pack_files(source))):
        size = pack_files(source)[pack].stat().st_size
        for offset in {0, 4096, size // 2 // 4096 * 4096, max(0, size - 4096)}:
            path = tmp_path / "repo"
            shutil.copytree(source, path)
            with pack_files(path)[pack].open("r+b") as stream:
                stream.seek(offset)
                stream.write(b"\xee" * min(4096, size - offset))
            before = readable(path, ids[-2:])
            with Repository.open(path) as repository:
                try:
                    prune(repository, LAST_TWO, thresholds=EAGER)
                except CollectionRefused:
                    assert set(repository.snapshots.ids()) == set(ids)
            assert readable(path, ids[-2:]) >= before
            shutil.rmtree(path)


def readable(path: Path, ids: list[SnapshotId]) -> set[tuple[SnapshotId, bytes]]:
    """Return the files of these snapshots that read back as stored, each checked by itself."""
    found = set()
    with Repository.open(path) as repository:
        for id_ in ids:
            number = int(id_[3:], 16)
            for name, content in tree(number).items():
                if not isinstance(content, bytes):
                    continue
                try:
                    entry = repository.trees.entry(
                        repository.snapshots.load(id_).roots[0].entry.content, name
                    )
                    assert entry is not None
                    for block, chunk in repository.block_maps.ids(entry.content, entry.map_height, 40):
                        assert repository.chunks.get(chunk) == content[block * BLOCK : (block + 1) * BLOCK]
                        found.add((id_, name + b":%d" % block))
                except Damaged:
                    continue
    return found


def test_a_pack_is_moved_by_pieces_where_there_is_no_room_for_it(
    tmp_path: Path, single_pack: tuple[Path, list[SnapshotId]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prune moves a pack piece by piece, and drops all garbage, if there is no room for a whole one.

    The repository never grows meanwhile, and a reader with the index of the beginning gets what was stored.
    """
    source, ids = single_pack
    path = tmp_path / "repo"
    shutil.copytree(source, path)
    report_little_space(monkeypatch)
    lengths: list[int] = []
    shorten = Writer.shorten_pack

    def watched(writer: Writer, *arguments: Any) -> Any:
        lengths.append(writer.repository.stored_bytes())
        done = shorten(writer, *arguments)
        lengths.append(writer.repository.stored_bytes())
        assert read_back(reader, ids[-1]) == tree(5)
        return done

    monkeypatch.setattr(Writer, "shorten_pack", watched)
    with Repository.open(path) as reader, Repository.open(path) as repository:
        assert read_back(reader, ids[-1]) == tree(5)
        before = repository.stored_bytes()
        report = prune(repository, LAST_TWO, thresholds=EAGER)
        assert (report.garbage_bytes, report.notes) == (0, [])
        assert before - repository.stored_bytes() == report.freed_bytes
        assert max(lengths) <= before
        assert len(lengths) > 2 * report.rewritten_packs
        assert not check(repository, read_data=True).damaged
    assert_read_back(path, ids, set(ids[-2:]))


def test_before_a_pack_is_cut_the_next_writer_is_bound_to_see_it(
    tmp_path: Path, single_pack: tuple[Path, list[SnapshotId]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies and a new modification time of packs/ are durable before prune truncates a pack.

    A power cut may undo updates of the index; without the new time the next writer would trust entries for
    data that was cut off.
    """

    class Recording(Disk):
        def __init__(self) -> None:
            self.done: list[str] = []

        def sync(self, fd: int) -> None:
            self.done.append("sync")
            super().sync(fd)

        def sync_dir(self, path: str) -> None:
            self.done.append(f"sync {os.path.basename(path)} {os.stat(path).st_ctime_ns > before_ns}")
            super().sync_dir(path)

        def truncate(self, fd: int, size_bytes: int) -> None:
            self.done.append("cut")
            super().truncate(fd, size_bytes)

    source, _ = single_pack
    path = tmp_path / "repo"
    shutil.copytree(source, path)
    report_little_space(monkeypatch)
    before_ns = os.stat(path / "packs").st_ctime_ns
    disk = Recording()
    with Repository.open(path, disk=disk) as repository:
        prune(repository, LAST_TWO, thresholds=EAGER)
    cuts = [at for at, what in enumerate(disk.done) if what == "cut"]
    assert cuts
    for at in cuts:
        assert disk.done[at - 1] == "sync packs True"
        assert "sync" in disk.done[:at]


@pytest.fixture
def small_disk(short_tmp: Path) -> Iterator[Path]:
    """Provide a file system of 24 MiB. The shared fixture unmounts whatever is left below it."""
    point = short_tmp / "disk"
    point.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"tmpfs", os.fsencode(point), b"tmpfs", 0, b"size=24m"):
        raise OSError(ctypes.get_errno(), "mount tmpfs")
    yield point
    libc.umount2(os.fsencode(point), 2)


@pytest.mark.mount
def test_on_a_full_disk(small_disk: Path) -> None:
    """Forget and prune free space on a disk without a free byte, and leave the kept snapshots whole."""
    path = small_disk / "repo"
    ids = []
    with Repository.create(path, block_size=BLOCK) as repository:
        for number in range(5):
            with repository.writer(pack_bytes=1 << 20) as writer:
                content = {b"own": noise(number, 3 << 20), b"shared": noise(50, 1 << 20)}
                ids.append(store(writer, content, number=number).id)
        fill(small_disk / "filler")
        assert os.statvfs(small_disk).f_bfree == 0

        forget(repository, ids[:1])
        assert ids[0] not in repository.snapshots.ids()
        fill(small_disk / "filler-2")
        report = prune(repository, RetentionPolicy(keep_within_seconds=0, keep_last=1))
        assert set(report.removed) == set(ids[1:4])
        assert report.freed_bytes > 8 << 20
        assert os.statvfs(small_disk).f_bfree * 4096 > 8 << 20
        assert read_back(repository, ids[4]) == {b"own": noise(4, 3 << 20), b"shared": noise(50, 1 << 20)}
    with Repository.open(path) as reopened, reopened.writer() as writer:
        store(writer, {b"new": noise(60, 2 << 20)}, number=9)
        assert not check(reopened).damaged


@pytest.mark.mount
def test_on_a_full_disk_where_every_pack_is_needed(small_disk: Path) -> None:
    """Prune on a full disk of packs that are all needed drops their dead ends first, and uses that space."""
    path = small_disk / "repo"
    keep = noise(70, 1 << 20)
    with Repository.create(path, block_size=BLOCK) as repository:
        for number, content in enumerate((b"keep", b"lose", b"keep")):
            with repository.writer() as writer:
                data = noise(72, 8 << 20) if content == b"lose" else keep
                kept = store(writer, {b"f": data}, number=number).id
        fill(small_disk / "filler")
        assert os.statvfs(small_disk).f_bfree == 0
        report = prune(repository, RetentionPolicy(keep_within_seconds=0, keep_last=1))
        assert report.freed_bytes > 8 << 20
        assert os.statvfs(small_disk).f_bfree * 4096 > 8 << 20
        assert read_back(repository, kept) == {b"f": keep}
    with Repository.open(path) as reopened, reopened.writer() as writer:
        # The index may claim this chunk was once there; prune must not rely on that.
        store(
            writer,
            {b"f": noise(72, 8 << 20)[: 4 << 20]},
            number=9,
        )
        assert not check(reopened, read_data=True).damaged


def fill(path: Path) -> None:
    """Take every free byte."""
    with path.open("wb", buffering=0) as stream:
        size = 1 << 20
        while size:
            try:
                if stream.write(b"x" * size) < size:
                    size //= 2
            except OSError:
                size //= 2


@pytest.mark.parametrize("room", [pytest.param("ample", marks=pytest.mark.full), "cramped"])
@pytest.mark.parametrize("index", [pytest.param("kept", marks=pytest.mark.full), "lost"])
def test_power_cut_at_every_operation(
    short_tmp: Path,
    original: tuple[Path, list[SnapshotId]],
    single_pack: tuple[Path, list[SnapshotId]],
    index: str,
    room: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A power cut at the nth operation of prune, for every n, leaves every listed snapshot whole.

    Unsynced writes are lost, torn or present. An undisturbed prune afterwards ends in a repository without
    damage.
    """
    source, ids = original
    if room == "cramped":
        source, ids = single_pack
        report_little_space(monkeypatch)
    expected = set(ids[-2:])
    operation, finished = 0, False
    while not finished:
        operation += 1
        running, after = short_tmp / "running", short_tmp / "after"
        shutil.copytree(source, running)
        disk = PowerDisk(running, stop_at=operation)
        with Repository.open(running, disk=disk) as repository, contextlib.suppress(PowerCut):
            prune(repository, LAST_TWO, thresholds=EAGER)
        finished = disk.calls < operation
        disk.after_power_cut(after, random.Random(operation) if operation % 3 else None)
        discard(str(after / INDEX_NAME))
        if index == "kept":
            for file in running.glob(INDEX_NAME + "*"):
                shutil.copy(file, after)
        assert_read_back(after, ids, expected)
        with Repository.open(after) as repository:
            prune(repository, LAST_TWO, thresholds=EAGER)
            assert set(repository.snapshots.ids()) == expected
            # Without the index, the torn end of a pack cannot be told from promised data: it stays and is
            # reported.
            if not (index == "lost" and room == "cramped"):
                assert not check(repository, read_data=True).damaged
        assert_read_back(after, ids, expected)
        shutil.rmtree(after)
        disk.dispose()
        shutil.rmtree(running)
    assert operation > 12


def test_a_writer_killed_at_any_operation_is_no_damage(tmp_path: Path) -> None:
    """A capture killed at any operation leaves nothing that verify reports as damage.

    This holds at once, after the next writer, and after prune.
    """

    def damages() -> list[str]:
        with Repository.open(path) as repository:
            return [str(damage) for damage in verify_snapshots(repository, checksum=True).damages]

    source = tmp_path / "source"
    with Repository.create(source, block_size=BLOCK) as repository, repository.writer(pack_bytes=1) as writer:
        # Fills its packs, so that the next capture starts new ones.
        id_ = store(writer, tree(0), number=0).id
    operation, finished = 0, False
    while not finished:
        operation += 1
        path = tmp_path / f"repo-{operation}"
        shutil.copytree(source, path)
        disk = FailingDisk(operation, Killed())
        with (
            Repository.open(path, disk=disk) as repository,
            contextlib.suppress(Killed),
            repository.writer() as writer,
        ):
            store(writer, tree(1), number=1)
        finished = disk.operations < operation
        assert damages() == []
        with Repository.open(path) as repository, repository.writer():
            pass
        assert damages() == []
        with Repository.open(path) as repository:
            prune(repository, thresholds=EAGER)
            assert read_back(repository, id_) == tree(0)
        assert damages() == []
    assert operation > 8
