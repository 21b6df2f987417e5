"""Tests of what capture examines, reads and cannot read, with a core without mount."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.capture_bench import BLOCK, ROOT_PATH, SESSION, Bench, MemoryRepository, bench, snapshot_manifest
from support.core_driver import PATHS, path_of
from support.trees import assert_same, make_everything, manifest

from ciuic.daemon.capture import content, view
from ciuic.daemon.capture import process as capture_root
from ciuic.daemon.capture.job import CaptureProgress, RootJob
from ciuic.daemon.capture.process import Interrupted, Report, RootUnreadable
from ciuic.errors import CiuicError, Damaged
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, SetAttr
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.undo_format import OldStat, UndoLost
from ciuic.types import (
    FLAG_NOT_HELD,
    MAX_TIME_NS,
    TAG_INCOMPLETE,
    Entry,
    RootRecord,
    SnapshotDraft,
    SnapshotId,
)

ROOT = Credentials(0, 0)
OLD_NS = 1_600_000_000 * 10**9


@pytest.fixture
def rig() -> Iterator[Bench]:
    with bench() as made:
        yield made


def write(rig: Bench, path: bytes, offset: int, data: bytes) -> None:
    handle = rig.core.files.open(rig.driver.node(path), os.O_RDWR)
    rig.core.files.write(handle, offset, data)
    rig.core.files.release(handle)


def entry_at(rig: Bench, record: RootRecord, path: bytes) -> Entry | None:
    entry: Entry | None = record.entry
    for name in path.split(b"/"):
        entry = rig.repository.trees.entry(entry.content, name) if entry is not None else None
    return entry


# Reading


def test_the_second_snapshot_reads_only_changed_files(rig: Bench) -> None:
    """The second snapshot reads ten changed files of many, and examines only directories above them."""
    for folder in range(20):
        node = rig.core.names.mkdir(ROOT_ID, b"folder%d" % folder, 0o755, ROOT).node
        for number in range(50):
            handle = rig.core.names.create(node, b"file%d" % number, 0o644, os.O_RDWR, ROOT)[1]
            rig.core.files.write(handle, 0, b"%d %d" % (folder, number))
            rig.core.files.release(handle)
    record, report = rig.snapshot()
    assert (record.mode, report.files_read) == ("full", 1008)
    for number in range(10):
        write(rig, b"folder%d/file%d" % (number, number), 0, b"changed")
    record, report = rig.snapshot()
    assert record.mode == "tracked"
    assert report.files_read == 10
    assert report.bytes_read == 10 * len(b"changed")
    assert report.entries == 20, "ten directories and ten files"
    _, report = rig.snapshot()
    assert (report.entries, report.files_read) == (0, 0)


def test_one_block_of_a_large_sparse_file_costs_one_block(rig: Bench) -> None:
    """A changed block of a large sparse file is read alone; a hole at its end or in its middle costs nothing."""
    size = 100 << 30
    handle = rig.core.names.create(ROOT_ID, b"sparse", 0o644, os.O_RDWR, ROOT)[1]
    rig.core.files.write(handle, 7 * BLOCK, b"x" * (5 * BLOCK))
    rig.core.attributes.setattr(rig.driver.node(b"sparse"), SetAttr(size=size), handle)
    record, report = rig.capture(rig.cut(observe=False))
    first = report.bytes_read
    assert first < 100 * BLOCK
    rig.core.files.write(handle, 9 * BLOCK + 5, b"y")
    record, report = rig.capture(rig.cut(observe=False))
    assert report.bytes_read == BLOCK
    rig.core.attributes.setattr(rig.driver.node(b"sparse"), SetAttr(size=size + BLOCK), handle)
    punch = syscalls.FALLOC_FL_PUNCH_HOLE | syscalls.FALLOC_FL_KEEP_SIZE
    rig.core.files.fallocate(handle, punch, 10 * BLOCK, BLOCK)
    rig.core.files.release(handle)
    record, report = rig.capture(rig.cut(observe=False))
    assert report.bytes_read == 0
    entry = entry_at(rig, record, b"sparse")
    assert entry is not None
    blocks = rig.repository.maps[entry.content]
    assert {index: rig.repository.chunks[chunk] for index, chunk in blocks.items()} == {
        7: b"x" * BLOCK,
        8: b"x" * BLOCK,
        9: b"x" * 5 + b"y" + b"x" * (BLOCK - 6),
        11: b"x" * BLOCK,
    }


def test_a_moved_directory_is_not_read_again(rig: Bench) -> None:
    """The tree of a moved directory is reused by inode number, whatever the number of files in it."""
    rig.snapshot()
    rig.core.names.rename(ROOT_ID, b"d", rig.driver.node(b"e"), b"moved", 0)
    _, report = rig.snapshot()
    assert report.files_read == 0
    assert report.entries == 3


def test_excludes_apply_again_to_a_moved_directory() -> None:
    """Entries reused by inode number are matched again with the excludes under their new path."""
    with bench(("e/moved/*.log", "d/f/gone")) as rig:
        node = rig.driver.node(b"d")
        for name in (b"a.log", b"keep"):
            rig.core.files.release(rig.core.names.create(node, name, 0o644, os.O_RDWR, ROOT)[1])
        gone = rig.core.names.mkdir(rig.driver.node(b"d/f"), b"gone", 0o755, ROOT).node
        rig.core.files.release(rig.core.names.create(gone, b"inside", 0o644, os.O_RDWR, ROOT)[1])
        record, _ = rig.capture(rig.cut())
        assert entry_at(rig, record, b"d/a.log") is not None
        assert entry_at(rig, record, b"d/f/gone") is None
        rig.core.names.rename(ROOT_ID, b"d", rig.driver.node(b"e"), b"moved", 0)
        record, _ = rig.capture(rig.cut())
        assert record.mode == "tracked"
        assert entry_at(rig, record, b"e/moved/a.log") is None
        assert entry_at(rig, record, b"e/moved/keep") is not None
        assert entry_at(rig, record, b"e/moved/f/gone/inside") is not None, "not excluded under this path"
        assert entry_at(rig, record, b"d") is None


def test_other_excludes_mean_comparing_everything(rig: Bench) -> None:
    """Other excludes force a comparison, as tracking says nothing of what was left out before."""
    rig.snapshot()
    rig.excludes = ("*.tmp",)
    record, _ = rig.snapshot()
    assert record.mode == "full"
    record, _ = rig.snapshot()
    assert record.mode == "tracked"


def test_untrusted_tracking_is_replaced_by_comparison(rig: Bench) -> None:
    """A change made past the overlay is found by comparing when tracking is not trusted."""
    rig.snapshot()
    backing = rig.backing / "d" / "a"
    backing.write_bytes(b"written behind our back")
    record, report = rig.snapshot(trust=False)
    assert record.mode == "full"
    assert report.files_read >= 1


def test_progress_has_the_expected_amounts_where_they_are_known(rig: Bench) -> None:
    """Progress has the expected entries after the first snapshot, and bytes when parts of files changed.

    The figures are totals over all roots.
    """
    rig.snapshot()
    write(rig, b"d/a", 0, b"x")
    write(rig, b"d/f/e", 0, b"x")
    reports: list[CaptureProgress] = []
    report = Report(reports.append, clock=iter(range(10**6)).__next__)
    job = RootJob(path=ROOT_PATH, backing_fd=rig.backing_fd, session=SESSION, epoch=rig.cut())
    capture_root.capture_root(job, rig.repository, rig.repository.writer(), report)
    assert {message.entries_expected for message in reports} == {4}, "d, d/a, d/f, d/f/e"
    assert {message.bytes_expected for message in reports} == {2 * BLOCK}
    assert reports[-1].entries == 4
    assert 0 < reports[-1].bytes_read <= 2 * BLOCK
    assert reports[-1].root == ROOT_PATH


# Comparing


def settle(rig: Bench) -> None:
    """Make every ctime old: comparing trusts no file that changed within a second of the older cut."""
    kept = rig.repository.snapshots.kept
    for id_, snapshot in kept.items():
        kept[id_] = msgspec.structs.replace(snapshot, time_ns=snapshot.time_ns + 3600 * 10**9)


def test_comparing_reads_only_files_that_differ(rig: Bench) -> None:
    """A settled file with the same size, mtime, ctime and inode is not read, unless it was open at the older cut."""
    rig.snapshot()
    settle(rig)
    _, report = rig.snapshot(trust=False)
    assert report.files_read == 0
    settle(rig)
    path = rig.backing / "d" / "a"
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    _, report = rig.snapshot(trust=False)
    assert report.files_read == 1
    writer = rig.core.files.open(rig.driver.node(b"d/a"), os.O_RDWR)
    rig.capture(rig.cut(observe=False))
    rig.core.files.release(writer)
    rig.core.committed(rig.core.cut().epoch)
    settle(rig)
    _, report = rig.snapshot(trust=False)
    assert report.files_read == 1


def test_comparing_reads_a_file_that_changed_around_the_older_cut(rig: Bench) -> None:
    """A file changed around the older cut is read, as clocks are coarse: a ctime may mean two contents."""
    rig.snapshot()
    _, report = rig.snapshot(trust=False)
    assert report.files_read == 8, "every file is younger than a second"


def test_access_times_alone_make_no_new_tree(rig: Bench) -> None:
    """Changed access times alone make no new tree."""
    rig.snapshot()
    for folder, _, files in os.walk(rig.backing):
        for name in files:
            path = Path(folder) / name
            if not path.is_symlink() and ".ciuic-state" not in folder:
                ctime = path.stat().st_ctime_ns
                os.utime(path, ns=(OLD_NS, path.stat().st_mtime_ns))
                assert path.stat().st_ctime_ns >= ctime
    settle(rig)
    second, _ = rig.snapshot(trust=False)
    third, _ = rig.snapshot(trust=False)
    assert second.entry.content == third.entry.content


# Hard links


def test_a_linked_file_that_changed_under_a_removed_name_is_found_under_its_other(rig: Bench) -> None:
    """A linked file changed under a removed name is found by its other name, which the base knows."""
    rig.snapshot()
    handle = rig.core.files.open(rig.driver.node(b"e/e"), os.O_RDWR)
    rig.driver.do(("forget", 0, 0, 0))
    rig.core.names.unlink(rig.driver.node(b"e"), b"e")
    rig.core.files.write(handle, 1, b"through a handle whose name is gone")
    rig.core.files.release(handle)
    record, _ = rig.snapshot()
    assert record.mode == "tracked"


def test_file_written_under_no_known_name_is_found_by_comparing(rig: Bench) -> None:
    """A file written under no known name is found by comparing until one of its names is known again.

    It was opened by one name, which is gone, and its other was never looked up: in the epoch after, no name
    in the base leads to it. Once its name is known again, tracking is enough.
    """
    rig.driver.do(("forget", 0, 0, 0))
    rig.driver.do(("open", number_of(b"a"), 0, 0))
    rig.core.names.unlink(ROOT_ID, b"a")
    rig.snapshot()
    rig.driver.do(("write_open", 0, 0, 0))
    record, _ = rig.snapshot()
    assert record.mode == "full"
    assert rig.driver.node(b"e/e")
    rig.driver.do(("write_open", 0, 0, 0))
    record, _ = rig.snapshot()
    assert record.mode == "tracked"


def test_removed_hard_links_leave_the_link_table(rig: Bench) -> None:
    """The link table loses inodes without names, and is removed when it is empty."""
    record, _ = rig.snapshot()
    assert record.links
    rig.core.names.unlink(ROOT_ID, b"a")
    rig.core.names.unlink(rig.driver.node(b"e"), b"e")
    rig.snapshot()
    rig.driver.do(("remove_all", *(number_of(b"d/f"),) * 2, 0))
    record, _ = rig.snapshot()
    rig.core.names.unlink(rig.driver.node(b"d"), b"e")
    record, _ = rig.snapshot()
    assert record.links == b""


def number_of(path: bytes) -> int:
    return next(number for number in range(PATHS) if path_of(number) == path)


# Unreadable files


def test_an_unreadable_file_is_named_and_the_rest_is_captured(
    rig: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file with EIO is left out and reported, and the next snapshot compares to find it again."""
    bad = os.stat(rig.backing / "d" / "f" / "e").st_ino
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, offset)

    monkeypatch.setattr(content.os, "pread", pread)
    record, report = rig.capture(rig.cut(), tags=(TAG_INCOMPLETE,))
    assert [(error.path, error.error) for error in report.errors] == [(b"d/f/e", os.strerror(errno.EIO))]
    assert entry_at(rig, record, b"d/f/e") is None
    assert entry_at(rig, record, b"d/f/a") is not None
    monkeypatch.undo()
    record, report = rig.snapshot()
    assert record.mode == "full"
    assert entry_at(rig, record, b"d/f/e") is not None


def test_an_entry_that_cannot_be_stored_is_named_and_the_rest_is_captured(
    rig: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name with a value that no entry holds is left out and reported; its root stays in the snapshot."""
    bad = os.stat(rig.backing / "d" / "f" / "e").st_ino
    real = OldStat.of

    def of(st: os.stat_result, *, hold_links: int = 0) -> OldStat:
        found = real(st, hold_links=hold_links)
        return msgspec.structs.replace(found, uid=1 << 32) if st.st_ino == bad else found

    monkeypatch.setattr(view.OldStat, "of", of)
    record, report = rig.capture(rig.cut(), tags=(TAG_INCOMPLETE,))
    assert [error.path for error in report.errors] == [b"d/f/e"]
    assert entry_at(rig, record, b"d/f/e") is None
    assert entry_at(rig, record, b"d/f/a") is not None


def test_times_far_from_1970_are_stored_as_the_nearest_and_named() -> None:
    """A time beyond what an entry holds costs no name, and comparing finds the file unchanged afterwards."""
    with bench(below=Path("/dev/shm")) as rig:
        for name, year_9999_ns in ((b"late", 253370764800 * 10**9), (b"early", -253370764800 * 10**9)):
            node = rig.core.names.create(ROOT_ID, name, 0o644, os.O_RDWR, ROOT)[0].node
            rig.core.attributes.setattr(node, SetAttr(mtime_ns=year_9999_ns, atime_ns=0))
        record, report = rig.capture(rig.cut())
        late, early = entry_at(rig, record, b"late"), entry_at(rig, record, b"early")
        assert late is not None
        assert early is not None
        assert (late.mtime_ns, early.mtime_ns) == (MAX_TIME_NS, -MAX_TIME_NS)
        assert (report.errors, report.far_times_total) == ([], {ROOT_PATH: 2})
        assert report.far_times == {ROOT_PATH: [ROOT_PATH + b"/early", ROOT_PATH + b"/late"]}
        # A change after the cut makes a record of the old attributes in the undo log.
        epoch = rig.cut()
        rig.core.attributes.setattr(rig.core.names.lookup(ROOT_ID, b"late").node, SetAttr(mtime_ns=0))
        record, report = rig.capture(epoch)
        assert entry_at(rig, record, b"late") == late
        assert not report.errors


def test_an_unreadable_directory_is_named_and_the_rest_is_captured(
    rig: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that cannot be listed is left out and reported, and the others are captured."""
    bad = os.stat(rig.backing / "d" / "f").st_ino
    real = view.open_pinned

    def open_pinned(fd: int, flags: int) -> int:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))
        return real(fd, flags)

    monkeypatch.setattr(view, "open_pinned", open_pinned)
    record, report = rig.capture(rig.cut())
    assert [error.path for error in report.errors] == [b"d/f"]
    assert entry_at(rig, record, b"d/a") is not None


def test_capture_stops_when_its_undo_is_given_up(rig: Bench) -> None:
    """Capture stops when its undo log is given up: the backing directory alone proves nothing."""
    rig.snapshot()
    write(rig, b"d/a", 0, b"x")
    epoch = rig.cut()
    state = rig.core._state.undo

    def give_up() -> None:
        write(rig, b"d/a", 0, b"later")
        state.abandon("no space")

    with pytest.raises(UndoLost):
        rig.capture(epoch, interfere=give_up)


def test_an_epoch_that_is_not_sealed_is_lost(rig: Bench) -> None:
    """An epoch that was committed, aborted or never cut cannot be captured."""
    epoch = rig.cut()
    rig.core.committed(epoch)
    with pytest.raises(UndoLost):
        rig.capture(epoch)


def test_a_repository_of_another_block_size_is_refused(rig: Bench) -> None:
    """A repository of another block size is refused, as block numbers would mean other bytes."""
    epoch = rig.cut()
    rig.repository.block_size = 2 * BLOCK
    with pytest.raises(CiuicError, match="blocks"):
        rig.capture(epoch)


def test_a_damaged_base_means_reading_everything(rig: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Capture with an unreadable base reads everything and makes the next snapshot."""
    rig.snapshot()
    write(rig, b"d/a", 0, b"changed")
    monkeypatch.setattr(
        type(rig.repository.trees), "entry", lambda *_: (_ for _ in ()).throw(Damaged("tree node"))
    )
    record, report = rig.capture(rig.cut())
    monkeypatch.undo()
    assert record.mode == "full"
    assert report.files_read == 8
    rig.check(record, report)


def test_a_request_to_stop_is_heard_between_two_steps(rig: Bench) -> None:
    """A request to stop ends capture before the commit, and leaves the epoch for another capture."""
    epoch = rig.cut()
    report = Report(lambda _: None)
    report.stop_requested = True
    job = RootJob(path=ROOT_PATH, backing_fd=rig.backing_fd, session=SESSION, epoch=epoch)
    with pytest.raises(Interrupted):
        capture_root.capture_root(job, rig.repository, rig.repository.writer(), report)
    rig.check(*rig.capture(epoch))


# Kinds of content


def test_everything_that_a_file_system_can_hold_is_captured(rig: Bench) -> None:
    """Every file type, odd names, modes, owners, times, attributes, ACLs, links and holes are captured."""
    make_everything(rig.backing)
    rig.snapshot()


def test_a_path_two_thousand_components_deep_is_captured(rig: Bench) -> None:
    """A path of two thousand components is captured in spite of recursion and path length limits."""
    fd = os.open(rig.backing, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("x", dir_fd=fd)
        below = os.open("x", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    record, report = rig.capture(rig.cut(observe=False))
    assert report.errors == []
    depth, entry = 0, entry_at(rig, record, b"x")
    while entry is not None and entry.content:
        depth, entry = depth + 1, rig.repository.trees.entry(entry.content, b"x")
    assert depth == 1999
    # The tree is too deep for shutil.rmtree.
    subprocess.run(["rm", "-rf", rig.backing / "x"], check=True, timeout=60)


def test_the_repository_itself_is_left_out(rig: Bench) -> None:
    """A repository inside the root is left out; otherwise each snapshot would make the next one larger."""
    (rig.backing / "store").mkdir()
    (rig.backing / "store" / "pack").write_bytes(b"x" * 9)
    rig.repository.path = rig.backing / "store"
    record, _ = rig.capture(rig.cut())
    assert entry_at(rig, record, b"store") is None
    assert entry_at(rig, record, b"d/a") is not None


def test_offline_a_plain_directory_is_captured_as_it_is(tmp_path: Path) -> None:
    """Offline, a plain directory is captured; later snapshots compare, and are marked as no instant."""
    root = tmp_path / "root"
    root.mkdir()
    make_everything(root)
    repository = MemoryRepository(tmp_path / "root" / "folder", BLOCK)
    repository.path = tmp_path
    job = RootJob(path=os.fsencode(root))
    report = Report(lambda _: None)
    record, base = capture_root.capture_root(job, repository, repository.writer(), report)
    assert (record.mode, record.session, base) == ("offline", "", "")
    assert_same(manifest(root), snapshot_manifest(repository.trees, repository.content, record))
    draft = SnapshotDraft(id=SnapshotId("cs-000001"), time_ns=2**62, host="h", roots=(record,))
    repository.writer().commit(draft)
    again = Report(lambda _: None)
    record, base = capture_root.capture_root(job, repository, repository.writer(), again)
    assert (again.files_read, base) == (0, "cs-000001")


def test_offline_a_file_that_changes_while_it_is_read_is_marked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Offline, a file that changes while it is read is marked; one that vanishes is left out."""
    (tmp_path / "root").mkdir()
    for name in ("grows", "still", "vanishes"):
        (tmp_path / "root" / name).write_bytes(b"x" * 3 * BLOCK)
    real = os.pread
    grows = os.stat(tmp_path / "root" / "grows").st_ino

    def pread(fd: int, size: int, offset: int) -> bytes:
        data = real(fd, size, offset)
        if os.fstat(fd).st_ino == grows:
            with (tmp_path / "root" / "grows").open("ab") as file:
                file.write(b"more")
            (tmp_path / "root" / "vanishes").unlink(missing_ok=True)
        return data

    monkeypatch.setattr(content.os, "pread", pread)
    repository = MemoryRepository(tmp_path, BLOCK)
    report = Report(lambda _: None)
    job = RootJob(path=os.fsencode(tmp_path / "root"))
    record, _ = capture_root.capture_root(job, repository, repository.writer(), report)
    entries = {entry.name: entry for entry in repository.trees.entries(record.entry.content)}
    assert {name: entry.flags & 0xFF for name, entry in entries.items()} == {
        b"grows": FLAG_NOT_HELD,
        b"still": 0,
    }
    assert report.errors == []
    assert stat.S_ISREG(entries[b"grows"].mode)


def test_a_root_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    """A root that does not exist is an error, never an empty snapshot."""
    repository = MemoryRepository(tmp_path, BLOCK)
    with pytest.raises(RootUnreadable, match="No such file"):
        capture_root.capture_root(
            RootJob(path=b"/nonexistent/root"), repository, repository.writer(), Report(lambda _: None)
        )
