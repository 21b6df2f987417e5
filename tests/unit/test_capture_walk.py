"""What capture looks at, what it reads, and what it does with what it cannot read. Core without a mount, repository in memory."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from support.capture_bench import BLOCK, ROOT_PATH, SESSION, Bench, bench
from support.core_driver import PATHS, path_of
from support.memory_repository import MemoryRepository
from support.snapshot_manifest import snapshot_manifest
from support.trees import assert_same, make_everything, manifest

from ciuic.daemon import capture_content, capture_root, capture_view
from ciuic.daemon.capture_job import Progress, RootJob
from ciuic.daemon.capture_root import Interrupted, Report, RootUnreadable
from ciuic.errors import CiuicError, Damaged
from ciuic.fuse_layer.core import ROOT_ID, Caller, SetAttr
from ciuic.fuse_layer.undo_format import UndoLost
from ciuic.types import FLAG_NOT_HELD, TAG_INCOMPLETE, Entry, RootRecord, SnapshotDraft, SnapshotId

ROOT = Caller(0, 0)
OLD_NS = 1_600_000_000 * 10**9


@pytest.fixture
def here() -> Iterator[Bench]:
    with bench() as made:
        yield made


def write(here: Bench, path: bytes, offset: int, data: bytes) -> None:
    handle = here.core.open(here.driver.node(path), os.O_RDWR)
    here.core.write(handle, offset, data)
    here.core.release(handle)


def entry_at(here: Bench, record: RootRecord, path: bytes) -> Entry | None:
    entry: Entry | None = record.entry
    for name in path.split(b"/"):
        entry = here.repository.trees.entry(entry.content, name) if entry is not None else None
    return entry


# -- what is read


def test_the_second_snapshot_reads_what_changed_and_nothing_else(here: Bench) -> None:
    """Ten changed files of many: ten are read, and of the directories only those on the way are looked at."""
    for folder in range(20):
        node = here.core.mkdir(ROOT_ID, b"folder%d" % folder, 0o755, ROOT).node
        for number in range(50):
            handle = here.core.create(node, b"file%d" % number, 0o644, os.O_RDWR, ROOT)[1]
            here.core.write(handle, 0, b"%d %d" % (folder, number))
            here.core.release(handle)
    record, report = here.snapshot()
    assert (record.mode, report.files_read) == ("full", 1008)
    for number in range(10):
        write(here, b"folder%d/file%d" % (number, number), 0, b"changed")
    record, report = here.snapshot()
    assert record.mode == "tracked"
    assert report.files_read == 10
    assert report.bytes_read == 10 * len(b"changed")
    assert report.entries == 20, "ten directories and ten files"
    _, report = here.snapshot()
    assert (report.entries, report.files_read) == (0, 0)


def test_one_block_of_a_large_sparse_file_costs_one_block(here: Bench) -> None:
    """Neither its holes nor its other blocks are read again; growing it by a hole costs the last block."""
    size = 100 << 30
    handle = here.core.create(ROOT_ID, b"sparse", 0o644, os.O_RDWR, ROOT)[1]
    here.core.write(handle, 7 * BLOCK, b"x" * (5 * BLOCK))
    here.core.setattr(here.driver.node(b"sparse"), SetAttr(size=size), handle)
    record, report = here.capture(here.cut(observe=False))
    first = report.bytes_read
    assert first < 100 * BLOCK
    here.core.write(handle, 9 * BLOCK + 5, b"y")
    record, report = here.capture(here.cut(observe=False))
    assert report.bytes_read == BLOCK
    here.core.setattr(here.driver.node(b"sparse"), SetAttr(size=size + BLOCK), handle)
    here.core.release(handle)
    record, report = here.capture(here.cut(observe=False))
    assert report.bytes_read == 0
    entry = entry_at(here, record, b"sparse")
    assert entry is not None
    blocks = here.repository.maps[entry.content]
    assert {index: here.repository.chunks[chunk] for index, chunk in blocks.items()} == {
        7: b"x" * BLOCK,
        8: b"x" * BLOCK,
        9: b"x" * 5 + b"y" + b"x" * (BLOCK - 6),
        10: b"x" * BLOCK,
        11: b"x" * BLOCK,
    }


def test_a_moved_directory_is_not_read_again(here: Bench) -> None:
    """Its tree is taken over by inode number, whatever the number of files in it."""
    here.snapshot()
    here.core.rename(ROOT_ID, b"d", here.driver.node(b"e"), b"moved", 0)
    _, report = here.snapshot()
    assert report.files_read == 0
    assert report.entries == 3


def test_a_directory_moved_among_excludes_loses_what_they_match_there() -> None:
    """Excludes depend on the path: what is reused by inode number is matched again under the new one."""
    with bench(("e/moved/*.log", "d/f/gone")) as here:
        node = here.driver.node(b"d")
        for name in (b"a.log", b"keep"):
            here.core.release(here.core.create(node, name, 0o644, os.O_RDWR, ROOT)[1])
        gone = here.core.mkdir(here.driver.node(b"d/f"), b"gone", 0o755, ROOT).node
        here.core.release(here.core.create(gone, b"inside", 0o644, os.O_RDWR, ROOT)[1])
        record, _ = here.capture(here.cut())
        assert entry_at(here, record, b"d/a.log") is not None
        assert entry_at(here, record, b"d/f/gone") is None
        here.core.rename(ROOT_ID, b"d", here.driver.node(b"e"), b"moved", 0)
        record, _ = here.capture(here.cut())
        assert record.mode == "tracked"
        assert entry_at(here, record, b"e/moved/a.log") is None
        assert entry_at(here, record, b"e/moved/keep") is not None
        assert entry_at(here, record, b"e/moved/f/gone/inside") is not None, "not excluded under this path"
        assert entry_at(here, record, b"d") is None


def test_other_excludes_mean_comparing_everything(here: Bench) -> None:
    """Tracking says nothing of what was left out before."""
    here.snapshot()
    here.excludes = ("*.tmp",)
    record, _ = here.snapshot()
    assert record.mode == "full"
    record, _ = here.snapshot()
    assert record.mode == "tracked"


def test_tracking_is_not_trusted_when_told_so(here: Bench) -> None:
    """A writer that goes round the overlay is found by comparing."""
    here.snapshot()
    backing = here.backing / "d" / "a"
    backing.write_bytes(b"written behind our back")
    record, report = here.snapshot(trust=False)
    assert record.mode == "full"
    assert report.files_read >= 1


def test_progress_says_how_much_is_expected_where_it_is_known(here: Bench) -> None:
    """Entries always after the first snapshot; bytes when only parts of files changed. Counted over all roots."""
    here.snapshot()
    write(here, b"d/a", 0, b"x")
    write(here, b"d/f/e", 0, b"x")
    told: list[Progress] = []
    report = Report(told.append, clock=iter(range(10**6)).__next__)
    job = RootJob(path=ROOT_PATH, backing_fd=here.backing_fd, session=SESSION, epoch=here.cut())
    capture_root.capture_root(job, here.repository, here.repository.writer(), report)
    assert {message.entries_expected for message in told} == {4}, "d, d/a, d/f, d/f/e"
    assert {message.bytes_expected for message in told} == {2 * BLOCK}
    assert told[-1].entries == 4
    assert 0 < told[-1].bytes_read <= 2 * BLOCK
    assert told[-1].root == ROOT_PATH


# -- comparing


def settle(here: Bench) -> None:
    """Makes every ctime old: comparing trusts no file that changed within a second of the older cut."""
    kept = here.repository.snapshots.kept
    for id_, snapshot in kept.items():
        kept[id_] = msgspec.structs.replace(snapshot, time_ns=snapshot.time_ns + 3600 * 10**9)


def test_comparing_reads_only_files_that_differ(here: Bench) -> None:
    """Same size, mtime, ctime and inode number, and settled: not read. A file whose ctime alone moved: read."""
    here.snapshot()
    settle(here)
    _, report = here.snapshot(trust=False)
    assert report.files_read == 0
    settle(here)
    path = here.backing / "d" / "a"
    before = path.stat()
    path.write_bytes(path.read_bytes()[::-1])
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    _, report = here.snapshot(trust=False)
    assert report.files_read == 1


def test_comparing_reads_a_file_that_changed_around_the_older_cut(here: Bench) -> None:
    """Clocks tick coarsely: the same ctime may stand for two contents."""
    here.snapshot()
    _, report = here.snapshot(trust=False)
    assert report.files_read == 8, "every file is younger than a second"


def test_access_times_alone_make_no_new_tree(here: Bench) -> None:
    """Reading files must not cost metadata in every snapshot."""
    here.snapshot()
    for folder, _, files in os.walk(here.backing):
        for name in files:
            path = Path(folder) / name
            if not path.is_symlink() and ".ciuic-state" not in folder:
                ctime = path.stat().st_ctime_ns
                os.utime(path, ns=(OLD_NS, path.stat().st_mtime_ns))
                assert path.stat().st_ctime_ns >= ctime
    settle(here)
    second, _ = here.snapshot(trust=False)
    third, _ = here.snapshot(trust=False)
    assert second.entry.content == third.entry.content


# -- hard links


def test_a_linked_file_that_changed_under_a_removed_name_is_found_under_its_other(here: Bench) -> None:
    """The name that the overlay knew is gone; the base says which others there are."""
    here.snapshot()
    handle = here.core.open(here.driver.node(b"e/e"), os.O_RDWR)
    here.driver.do(("forget", 0, 0, 0))
    here.core.unlink(here.driver.node(b"e"), b"e")
    here.core.write(handle, 1, b"through a handle whose name is gone")
    here.core.release(handle)
    record, _ = here.snapshot()
    assert record.mode == "tracked"


def test_what_is_written_where_no_known_name_leads_is_found_by_comparing(here: Bench) -> None:
    """Opened by one name, which is gone, and its other was never asked for: in the epoch after, no name in the base tells of it.
    Once its name is known again, tracking is enough."""
    here.driver.do(("forget", 0, 0, 0))
    here.driver.do(("open", number_of(b"a"), 0, 0))
    here.core.unlink(ROOT_ID, b"a")
    here.snapshot()
    here.driver.do(("write_open", 0, 0, 0))
    record, _ = here.snapshot()
    assert record.mode == "full"
    assert here.driver.node(b"e/e")
    here.driver.do(("write_open", 0, 0, 0))
    record, _ = here.snapshot()
    assert record.mode == "tracked"


def test_removed_hard_links_leave_the_link_table(here: Bench) -> None:
    """Nothing in the table that no name refers to (the manifest checks it), and no table at last."""
    record, _ = here.snapshot()
    assert record.links
    here.core.unlink(ROOT_ID, b"a")
    here.core.unlink(here.driver.node(b"e"), b"e")
    here.snapshot()
    here.driver.do(("remove_all", *(number_of(b"d/f"),) * 2, 0))
    record, _ = here.snapshot()
    here.core.unlink(here.driver.node(b"d"), b"e")
    record, _ = here.snapshot()
    assert record.links == b""


def number_of(path: bytes) -> int:
    return next(number for number in range(PATHS) if path_of(number) == path)


# -- what cannot be read


def test_an_unreadable_file_is_named_and_the_rest_is_captured(
    here: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO on one file: left out, reported; the next snapshot compares, because tracking would not come back to it."""
    bad = os.stat(here.backing / "d" / "f" / "e").st_ino
    real = os.pread

    def pread(fd: int, size: int, offset: int) -> bytes:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(fd, size, offset)

    monkeypatch.setattr(capture_content.os, "pread", pread)
    record, report = here.capture(here.cut(), tags=(TAG_INCOMPLETE,))
    assert [(error.path, error.error) for error in report.errors] == [(b"d/f/e", os.strerror(errno.EIO))]
    assert entry_at(here, record, b"d/f/e") is None
    assert entry_at(here, record, b"d/f/a") is not None
    monkeypatch.undo()
    record, report = here.snapshot()
    assert record.mode == "full"
    assert entry_at(here, record, b"d/f/e") is not None


def test_an_unreadable_directory_is_named_and_the_rest_is_captured(
    here: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A listing that fails costs that directory, no other."""
    bad = os.stat(here.backing / "d" / "f").st_ino
    real = capture_view.open_pinned

    def open_pinned(fd: int, flags: int) -> int:
        if os.fstat(fd).st_ino == bad:
            raise OSError(errno.EUCLEAN, os.strerror(errno.EUCLEAN))
        return real(fd, flags)

    monkeypatch.setattr(capture_view, "open_pinned", open_pinned)
    record, report = here.capture(here.cut())
    assert [error.path for error in report.errors] == [b"d/f"]
    assert entry_at(here, record, b"d/a") is not None


def test_capture_stops_when_its_undo_is_given_up(here: Bench) -> None:
    """From that moment on the backing directory proves nothing; no record comes back."""
    here.snapshot()
    write(here, b"d/a", 0, b"x")
    epoch = here.cut()
    state = here.core._state.undo

    def give_up() -> None:
        write(here, b"d/a", 0, b"later")
        state.abandon("no space")

    with pytest.raises(UndoLost):
        here.capture(epoch, interfere=give_up)


def test_an_epoch_that_is_not_sealed_is_lost(here: Bench) -> None:
    """Committed, aborted or never cut: there is nothing to capture."""
    epoch = here.cut()
    here.core.committed(epoch)
    with pytest.raises(UndoLost):
        here.capture(epoch)


def test_a_repository_of_another_block_size_is_refused(here: Bench) -> None:
    """Block numbers would mean different bytes on the two sides."""
    epoch = here.cut()
    here.repository.block_size = 2 * BLOCK
    with pytest.raises(CiuicError, match="blocks"):
        here.capture(epoch)


def test_a_damaged_base_means_reading_everything(here: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot that cannot be read must not prevent the next one."""
    here.snapshot()
    write(here, b"d/a", 0, b"changed")
    monkeypatch.setattr(
        type(here.repository.trees), "entry", lambda *_: (_ for _ in ()).throw(Damaged("tree node"))
    )
    record, report = here.capture(here.cut())
    monkeypatch.undo()
    assert record.mode == "full"
    assert report.files_read == 8
    here.check(record, report)


def test_a_request_to_stop_is_heard_between_two_steps(here: Bench) -> None:
    """Nothing is committed then; the epoch is still there for another capture."""
    epoch = here.cut()
    report = Report(lambda _: None)
    report.stop_requested = True
    job = RootJob(path=ROOT_PATH, backing_fd=here.backing_fd, session=SESSION, epoch=epoch)
    with pytest.raises(Interrupted):
        capture_root.capture_root(job, here.repository, here.repository.writer(), report)
    here.check(*here.capture(epoch))


# -- what there can be


def test_everything_that_a_file_system_can_hold_is_captured(here: Bench) -> None:
    """Every type, odd names, modes, owners, times, attributes, ACLs, links, holes, a path 200 components deep."""
    make_everything(here.backing)
    here.snapshot()


def test_a_path_two_thousand_components_deep_is_captured(here: Bench) -> None:
    """No recursion limit and no path length limit in the way."""
    fd = os.open(here.backing, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("x", dir_fd=fd)
        below = os.open("x", os.O_RDONLY, dir_fd=fd)
        os.close(fd)
        fd = below
    os.close(fd)
    record, report = here.capture(here.cut(observe=False))
    assert report.errors == []
    depth, entry = 0, entry_at(here, record, b"x")
    while entry is not None and entry.content:
        depth, entry = depth + 1, here.repository.trees.entry(entry.content, b"x")
    assert depth == 1999
    subprocess.run(["rm", "-rf", here.backing / "x"], check=True, timeout=60)  # too deep for shutil.rmtree


def test_the_repository_itself_is_left_out(here: Bench) -> None:
    """A repository inside the root would otherwise grow by itself with every snapshot."""
    (here.backing / "store").mkdir()
    (here.backing / "store" / "pack").write_bytes(b"x" * 9)
    here.repository.path = here.backing / "store"
    record, _ = here.capture(here.cut())
    assert entry_at(here, record, b"store") is None
    assert entry_at(here, record, b"d/a") is not None


def test_offline_a_plain_directory_is_captured_as_it_is(tmp_path: Path) -> None:
    """No overlay, no undo log; the second snapshot compares with the first, and says that it is no instant."""
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
    """It may never have existed as a whole: whoever restores it must be told. One that vanishes is just not there."""
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

    monkeypatch.setattr(capture_content.os, "pread", pread)
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
    """Never an empty snapshot."""
    repository = MemoryRepository(tmp_path, BLOCK)
    with pytest.raises(RootUnreadable, match="No such file"):
        capture_root.capture_root(
            RootJob(path=b"/nonexistent/root"), repository, repository.writer(), Report(lambda _: None)
        )
