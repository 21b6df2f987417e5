"""Tests of the core when saving fails as disks do: the job succeeds, the epochs are given up."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest
from support.overlay import state_of

from ciuic.fuse_layer import sealed_format, undo_format
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore
from ciuic.fuse_layer.system import syscalls
from ciuic.fuse_layer.tracking import undo_log
from ciuic.system.spill import Spill

BLOCK = 4096
# linux/magic.h
EXT4, XFS = 0xEF53, 0x58465342
CALLER = Credentials(0, 0, 0)


class Job:
    """Files by name, through the core."""

    def __init__(self, core: OverlayCore) -> None:
        self.core = core

    def open(self, name: bytes, flags: int = os.O_RDWR) -> int:
        node = self.core.names.lookup(ROOT_ID, name).node
        return self.core.files.open(node, flags)

    def create(self, name: bytes, data: bytes) -> None:
        _, handle = self.core.names.create(ROOT_ID, name, 0o644, os.O_RDWR, CALLER)
        self.core.files.write(handle, 0, data)
        self.core.files.release(handle)

    def overwrite(self, name: bytes, data: bytes) -> None:
        handle = self.open(name)
        self.core.files.write(handle, 0, data)
        self.core.files.release(handle)


@pytest.fixture
def backing(tmp_path: Path) -> Path:
    path = tmp_path / "root"
    path.mkdir()
    return path


@pytest.fixture
def job(backing: Path) -> Iterator[Job]:
    fd = os.open(backing, os.O_PATH | os.O_DIRECTORY)
    core = OverlayCore(fd, session="s", block_size=BLOCK)
    yield Job(core)
    core.close()
    os.close(fd)


def _failing(number: int) -> object:
    def fail(*_args: object, **_named: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    return fail


def _left(backing: Path) -> list[str]:
    state = state_of(backing) / "undo"
    return sorted([path.name for path in state.iterdir() if path.name != "hold"] + os.listdir(state / "hold"))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO, errno.EMFILE, errno.EROFS])
def test_giving_up_several_epochs_writes_nothing(
    job: Job, backing: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    """The change that cannot write a sealed file with three epochs pending succeeds."""
    job.create(b"a", b"old" * 5000)
    for round_ in range(3):
        job.overwrite(b"a", b"%d" % round_)
        job.core.cut()
    monkeypatch.setattr(sealed_format, "write_sealed", _failing(number))
    monkeypatch.setattr(undo_log.UndoLog, "_append", _failing(number))
    job.overwrite(b"a", b"new")
    assert (backing / "a").read_bytes()[:3] == b"new"
    status = job.core.status()
    assert status["pending"] == []
    assert [entry["epoch"] for entry in status["abandoned"]] == [1, 2, 3]
    assert _left(backing) == []
    monkeypatch.undo()
    cut = job.core.cut()
    path = state_of(backing) / "undo" / undo_format.sealed_name(cut.epoch)
    sealed = sealed_format.read_sealed(str(path), Spill(str(backing)))
    assert sealed.changes.get((backing / "a").stat().st_ino) is not None


def test_an_epoch_given_back_is_not_pending_though_its_successor_cannot_be_written(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An aborted epoch that cannot be folded into its successor goes with it into the current epoch.

    None of them stays pending, so none is waited for.
    """
    for _ in range(2):
        job.create(os.urandom(4).hex().encode(), b"x")
        job.core.cut()
    monkeypatch.setattr(sealed_format, "write_sealed", _failing(errno.ENOSPC))
    job.core.abort(1)
    assert job.core.status()["pending"] == []
    assert job.core.status()["dirty_inodes"] >= 3


def test_held_file_is_removed_later_after_a_failure(
    job: Job, backing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A held file that cannot be removed when its epoch ends is removed later, at the next request."""
    job.create(b"a", b"x" * 100_000)
    job.core.cut()
    job.core.names.unlink(ROOT_ID, b"a")
    monkeypatch.setattr(undo_log.os, "listdir", _failing(errno.EMFILE))
    job.core.committed(1)
    monkeypatch.undo()
    assert _left(backing) != []
    job.core.status()
    assert _left(backing) == []


def test_a_large_truncation_needs_no_new_inode(
    job: Job, backing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A truncation whose replacement inode cannot be made copies the file or gives up the epoch.

    It succeeds in any case.
    """
    job.create(b"a", b"x" * (9 << 20))
    job.core.cut()
    monkeypatch.setattr(undo_log.UndoLog, "create_replacement", _failing(errno.ENOSPC))
    handle = job.open(b"a")
    job.core.attributes.setattr(job.core.names.lookup(ROOT_ID, b"a").node, _size(3), handle)
    assert (backing / "a").read_bytes() == b"xxx"


def test_handles_follow_a_replaced_file_without_a_spare_descriptor(
    job: Job, backing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Handles open before a truncation use the file's new inode, without a spare descriptor."""
    job.create(b"a", b"x" * (9 << 20))
    job.core.cut()
    reader, writer = job.open(b"a", os.O_RDONLY), job.open(b"a")
    real = os.open

    def open_(path: object, flags: int, *rest: object, **named: object) -> int:
        if isinstance(path, bytes) and path.startswith(b"/proc/self/fd/") and path.count(b"/") == 4:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return real(path, flags, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "open", open_)
    job.core.attributes.setattr(job.core.names.lookup(ROOT_ID, b"a").node, _size(0), writer)
    job.core.files.write(writer, 0, b"new")
    assert job.core.files.read(reader, 0, 9) == b"new"
    monkeypatch.undo()
    assert (backing / "a").read_bytes() == b"new"


def test_no_writer_gets_enospc_while_another_frees_the_log(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer that meets a full disk waits while another thread frees the undo log, and gets no ENOSPC."""
    job.create(b"a", b"x")
    job.create(b"b", b"x")
    job.core.cut()
    state = job.core._state
    full, clearing, go_on = threading.Event(), threading.Event(), threading.Event()
    full.set()
    real_clear = undo_log.UndoLog._clear_all

    def clear(log: undo_log.UndoLog) -> None:
        clearing.set()
        assert go_on.wait(60)
        real_clear(log)
        full.clear()

    monkeypatch.setattr(undo_log.UndoLog, "_clear_all", clear)

    def change() -> None:
        if full.is_set():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    failures: list[OSError] = []

    def run() -> None:
        try:
            state.with_space(change)
        except OSError as error:
            failures.append(error)

    first = threading.Thread(target=run)
    first.start()
    assert clearing.wait(60)
    second = threading.Thread(target=run)
    second.start()
    # The second writer either waits, which is right, or has failed by now.
    second.join(0.2)
    go_on.set()
    first.join(60)
    second.join(60)
    assert failures == []


@pytest.mark.parametrize(
    ("length", "kept"), [(1 << 60, True), (BLOCK, False)], ids=["beyond the disk", "disk full"]
)
def test_a_range_that_no_disk_has_costs_no_snapshot(
    job: Job, monkeypatch: pytest.MonkeyPatch, length: int, kept: bool
) -> None:
    """The space of the undo log is given up for fallocate(2) only where the disk could hold the range."""
    job.create(b"a", b"x" * BLOCK)
    job.create(b"b", b"x")
    job.core.cut()
    job.core.names.unlink(ROOT_ID, b"a")
    handle = job.open(b"b")

    def refuse(*_arguments: object) -> NoReturn:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(syscalls, "fallocate", refuse)
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        job.core.files.fallocate(handle, 0, BLOCK, length)
    assert job.core._state.undo.active is kept
    job.core.files.release(handle)


@pytest.mark.parametrize(
    ("kind", "free_bytes", "number", "kept"),
    [
        (EXT4, 2 << 30, errno.ENOSPC, True),
        (EXT4, 1 << 20, errno.ENOSPC, False),
        (EXT4, 2 << 30, errno.EDQUOT, False),
        (XFS, 2 << 30, errno.ENOSPC, False),
    ],
    ids=["inode full", "disk full", "quota exhausted", "quota of an XFS project exhausted"],
)
def test_an_inode_without_room_for_an_attribute_costs_no_snapshot(
    job: Job, monkeypatch: pytest.MonkeyPatch, kind: int, free_bytes: int, number: int, kept: bool
) -> None:
    """ext4 answers ENOSPC to attributes that do not fit into one block: no space on the disk mends that."""
    job.create(b"a", b"x" * BLOCK)
    job.create(b"b", b"x")
    job.core.cut()
    job.core.names.unlink(ROOT_ID, b"a")
    node = job.core.names.lookup(ROOT_ID, b"b").node
    real = os.statvfs

    def free(path: bytes) -> os.statvfs_result:
        found = real(path)
        return os.statvfs_result((found.f_bsize, 1, *found[2:4], free_bytes, *found[5:]))

    def refuse(*_arguments: object, **_options: object) -> NoReturn:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "statvfs", free)
    monkeypatch.setattr(syscalls, "file_system_type", lambda _: kind)
    monkeypatch.setattr(os, "setxattr", refuse)
    with pytest.raises(OSError, match=os.strerror(number)):
        job.core.attributes.setxattr(node, b"user.large", b"x" * 8000, 0)
    assert job.core._state.undo.active is kept


def test_a_write_that_the_disk_cuts_short_goes_on(
    job: Job, backing: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The undo log is given up after a short count, and the rest of the write is not lost."""
    job.create(b"a", b"x" * 10_000)
    job.core.cut()
    real, answers = os.pwrite, [1000, errno.ENOSPC]

    def pwrite(fd: int, data: bytes, offset: int) -> int:
        if offset < 20_000 or not answers:
            return real(fd, data, offset)
        answer = answers.pop(0)
        if answer == errno.ENOSPC:
            raise OSError(answer, os.strerror(answer))
        return real(fd, data[:answer], offset)

    handle = job.open(b"a")
    monkeypatch.setattr(os, "pwrite", pwrite)
    assert job.core.files.write(handle, 20_000, b"new" * 1000) == 3000
    assert answers == []
    assert (backing / "a").read_bytes()[20_000:] == b"new" * 1000
    assert job.core.status()["pending"] == []


def test_handle_is_released_although_times_cannot_be_set(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last close releases the file although its times cannot be set, so removed files free space."""
    job.create(b"a", b"x")
    handle = job.open(b"a")
    monkeypatch.setattr("ciuic.fuse_layer.core.files.KernelTimes.settle", _failing(errno.ENOSPC))
    with pytest.raises(OSError, match="No space"):
        job.core.files.release(handle)
    assert job.core.open_files == 0


def _size(size: int) -> object:
    from ciuic.fuse_layer.core.overlay_core import SetAttr

    return SetAttr(size=size)
