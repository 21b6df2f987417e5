"""The sealed view on an undo log written by hand, for cases that an overlay rarely produces."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.capture_bench import MemoryRepository

from ciuic.daemon.capture.job import RootJob
from ciuic.daemon.capture.process import Report, capture_root
from ciuic.daemon.capture.view import OfflineLog, SealedView, open_log
from ciuic.fuse_layer.undo_format import (
    InodeRecord,
    LogReader,
    NameRecord,
    OldStat,
    Record,
    SwappedRecord,
    UndoLost,
    encode,
)
from ciuic.system.spill import Spill
from ciuic.types import FLAG_MOUNTPOINT

DIRECTORY, FILE = stat.S_IFDIR >> 12, stat.S_IFREG >> 12
EPOCH = 5


class Sealed:
    """A backing directory whose undo log has the records that the test wrote."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.undo = top / ".ciuic-state" / "undo"
        (self.undo / "hold").mkdir(parents=True)
        self.backing_fd = os.open(top, os.O_PATH)
        self.undo_fd = os.open(self.undo, os.O_PATH)
        self.log: LogReader = open_log(self.undo_fd, EPOCH)
        self.view = SealedView(
            self.backing_fd,
            log=self.log,
            spill=Spill(os.fspath(top)),
            undo_fd=self.undo_fd,
            worker_pid=os.getpid(),
        )
        self.root = self.view.root()

    def append(self, *records: Record) -> None:
        with (self.undo / "log").open("ab") as log:
            log.write(b"".join(map(encode, records)))

    def old_stat(self, name: str, **changes: int) -> OldStat:
        old = OldStat.of(os.lstat(self.top / name))
        return OldStat(**{field: changes.get(field, getattr(old, field)) for field in old.__struct_fields__})

    def close(self) -> None:
        self.root.close()
        self.log.close()
        os.close(self.undo_fd)
        os.close(self.backing_fd)


@pytest.fixture
def sealed(tmp_path: Path) -> Iterator[Sealed]:
    made = Sealed(tmp_path)
    yield made
    made.close()


def test_a_removed_directory_is_not_the_new_one_that_got_its_number(sealed: Sealed) -> None:
    """A removed directory is rebuilt from records up to its end, not from a new one with its inode number."""
    (sealed.top / "folder").mkdir()
    (sealed.top / "folder" / "new").touch()
    (sealed.undo / "hold" / "1").touch()
    held = os.stat(sealed.undo / "hold" / "1").st_ino
    (sealed.undo / "hold" / "1").rename(sealed.undo / "hold" / str(held))
    number = os.stat(sealed.top / "folder").st_ino
    sealed.append(
        InodeRecord(number, EPOCH, sealed.old_stat("folder", mode=stat.S_IFDIR | 0o711), {b"user.a": b"1"}),
        NameRecord(number, EPOCH, b"old", held, FILE),
        NameRecord(sealed.root.ino, EPOCH, b"folder", number, DIRECTORY),
        NameRecord(number, EPOCH + 1, b"of the new one", held, FILE),
    )
    folder = sealed.view.child(sealed.root, b"folder")
    assert folder is not None
    with folder:
        assert stat.S_IMODE(folder.stat.mode) == 0o711
        assert folder.xattrs == {b"user.a": b"1"}
        assert list(sealed.view.names(folder)) == [b"old"]
        assert sealed.view.child(folder, b"new") is None
        assert sealed.view.child(folder, b"of the new one") is None
        old = sealed.view.child(folder, b"old")
        assert old is not None
        with old:
            assert old.ino == held


def test_a_hold_link_of_an_older_epoch_is_not_counted(sealed: Sealed) -> None:
    """A hold link of an older epoch does not count as a name of the file."""
    (sealed.top / "file").touch()
    number = os.stat(sealed.top / "file").st_ino
    os.link(sealed.top / "file", sealed.undo / "hold" / str(number))
    with sealed.view.child(sealed.root, b"file") as file:  # type: ignore[union-attr]
        assert file.stat.nlink == 1
    os.link(sealed.top / "file", sealed.top / "second")
    with sealed.view.child(sealed.root, b"second") as file:  # type: ignore[union-attr]
        assert file.stat.nlink == 2


def test_a_moved_directory_is_reached_by_the_descriptor_of_the_worker(sealed: Sealed) -> None:
    """A moved directory is opened by the worker's descriptor; its names and the records make the listing."""
    (sealed.top / "folder").mkdir()
    (sealed.top / "folder" / "inside").touch()
    (sealed.top / "folder" / "later").touch()
    fd = os.open(sealed.top / "folder", os.O_RDONLY)
    number = os.fstat(fd).st_ino
    (sealed.top / "folder").rename(sealed.top / "elsewhere")
    sealed.append(
        NameRecord(sealed.root.ino, EPOCH, b"folder", number, DIRECTORY, fd),
        NameRecord(sealed.root.ino, EPOCH, b"elsewhere", 0),
        NameRecord(number, EPOCH, b"later", 0),
    )
    assert list(sealed.view.names(sealed.root, is_root=True)) == [b"elsewhere", b"folder"]
    assert sealed.view.child(sealed.root, b"elsewhere") is None
    with sealed.view.child(sealed.root, b"folder") as folder:  # type: ignore[union-attr]
        found = {name: sealed.view.child(folder, name) for name in sealed.view.names(folder)}
    os.close(fd)
    assert found.pop(b"later") is None
    inside = found.pop(b"inside")
    assert inside is not None
    inside.close()
    assert not found


def test_a_file_with_a_new_inode_is_read_from_the_old(sealed: Sealed) -> None:
    """The old file is read under its hold link after a truncation that replaced the inode."""
    (sealed.top / "file").write_bytes(b"new")
    (sealed.undo / "old").write_bytes(b"the old content")
    old = os.stat(sealed.undo / "old").st_ino
    (sealed.undo / "old").rename(sealed.undo / "hold" / str(old))
    sealed.append(SwappedRecord(old, EPOCH, os.stat(sealed.top / "file").st_ino))
    with sealed.view.child(sealed.root, b"file") as file:  # type: ignore[union-attr]
        assert (file.ino, file.stat.size) == (old, 15)


def test_missing_targets_of_log_records_are_errors(sealed: Sealed) -> None:
    """A hold link, descriptor or record that is missing is an error; nothing else is read in its place."""
    (sealed.top / "file").touch()
    (sealed.undo / "hold" / "77").touch()
    sealed.append(
        NameRecord(sealed.root.ino, EPOCH, b"no link", 99, FILE),
        NameRecord(sealed.root.ino, EPOCH, b"wrong link", 77, FILE),
        NameRecord(sealed.root.ino, EPOCH, b"no descriptor", 98, DIRECTORY, 987654),
        NameRecord(sealed.root.ino, EPOCH, b"no attributes", 97, DIRECTORY),
    )
    for name in (b"no link", b"wrong link", b"no descriptor", b"no attributes"):
        with pytest.raises(UndoLost):
            sealed.view.child(sealed.root, name)


def test_the_reserved_directory_is_never_listed(sealed: Sealed) -> None:
    """The reserved directory is left out at the top of the root only."""
    (sealed.top / "folder" / ".ciuic-state").mkdir(parents=True)
    assert list(sealed.view.names(sealed.root, is_root=True)) == [b"folder"]
    with sealed.view.child(sealed.root, b"folder") as folder:  # type: ignore[union-attr]
        assert list(sealed.view.names(folder)) == [b".ciuic-state"]


def test_reading_leaves_access_times_alone(sealed: Sealed) -> None:
    """Reading does not change access times, which clean-up tools look at."""
    (sealed.top / "folder").mkdir()
    (sealed.top / "folder" / "file").write_bytes(b"x")
    for path in (sealed.top / "folder" / "file", sealed.top / "folder"):
        os.utime(path, ns=(10**18, 2 * 10**18))
    with sealed.view.child(sealed.root, b"folder") as folder:  # type: ignore[union-attr]
        list(sealed.view.names(folder))
        with sealed.view.child(folder, b"file") as file:  # type: ignore[union-attr]
            fd = sealed.view.open_content(file)
            assert os.read(fd, 1) == b"x"
            os.close(fd)
    for path in (sealed.top / "folder" / "file", sealed.top / "folder"):
        assert path.stat().st_atime_ns == 10**18


@pytest.mark.mount
def test_another_file_system_is_marked_and_not_entered(short_tmp: Path) -> None:
    """A nested mount is an empty directory with its mark in the snapshot."""
    nested = short_tmp / "root" / "nested"
    nested.mkdir(parents=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", nested], check=True, timeout=20)
    try:
        (nested / "not ours").touch()
        repository = MemoryRepository(short_tmp, 4096)
        job = RootJob(path=os.fsencode(short_tmp / "root"))
        record, _ = capture_root(job, repository, repository.writer(), Report(lambda _: None))
    finally:
        subprocess.run(["umount", nested], check=True, timeout=20)
    entry = repository.trees.entry(record.entry.content, b"nested")
    assert entry is not None
    assert (entry.flags, entry.content, entry.ino, entry.is_dir) == (FLAG_MOUNTPOINT, b"", 0, True)


def test_offline_a_missing_name_is_just_missing(tmp_path: Path) -> None:
    """Offline, a name removed between listing and reading is left out without an error."""
    fd = os.open(tmp_path, os.O_PATH)
    view = SealedView(fd, log=OfflineLog(), spill=Spill("/nowhere"))
    with view.root() as root:
        assert view.child(root, b"gone") is None
    os.close(fd)
