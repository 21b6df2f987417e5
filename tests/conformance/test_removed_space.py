"""The space of a removed file is free when the call that removed it returns, as in a plain directory."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.overlay import DRIVER, PASSES, Overlay
from support.until import until

pytestmark = pytest.mark.mount
MIB = 1 << 20


@pytest.fixture
def overlay(short_tmp: Path) -> Iterator[Overlay]:
    """Provide a root on a file system of its own, whose space no other process takes or frees."""
    disk = short_tmp / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", disk], check=True)
    (disk / "root").mkdir()
    with Overlay(disk / "root", short_tmp / "w.sock") as overlay:
        yield overlay


@pytest.fixture
def root(overlay: Overlay) -> Path:
    return overlay.root


def _free(root: Path) -> int:
    room = os.statvfs(root.parent)
    return room.f_bavail * room.f_frsize


@pytest.mark.parametrize("how", ["unlink", "rename over it"])
def test_the_next_checkpoint_fits_where_the_old_one_was(root: Path, how: str) -> None:
    """A checkpoint of 100 MiB on a disk of 160 MiB can be removed and rewritten ten times in a row.

    It fails where space is freed after the removing call has returned.
    """
    data = os.urandom(MIB)
    for _ in range(10):
        with open(root / "checkpoint", "wb", buffering=0) as file:
            for _ in range(100):
                assert file.write(data) == MIB
        before = _free(root)
        if how == "unlink":
            (root / "checkpoint").unlink()
        else:
            (root / "small").write_bytes(b"x")
            (root / "small").rename(root / "checkpoint")
        assert _free(root) - before > 99 * MIB


_REMOVES_WHAT_IT_WRITES = """
import os, sys
with open(sys.argv[1], "wb") as file:
    file.write(os.urandom(100 << 20))
    file.flush()
    print("written", flush=True)
    sys.stdin.readline()
    os.unlink(sys.argv[1])
print("closed", flush=True)
"""


@pytest.mark.skipif(DRIVER != "kernel", reason="sessions outlive the workers of the kernel driver alone")
def test_space_of_a_file_that_a_killed_worker_opened_is_free_after_its_close(overlay: Overlay) -> None:
    """A successor keeps no space of a checkpoint that was open when its predecessor died, and that is removed before its close."""
    overlay.keep_session()
    job = [sys.executable, "-c", _REMOVES_WHAT_IT_WRITES, str(overlay.root / "checkpoint")]
    with subprocess.Popen(job, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == "written\n"
        overlay.process.kill()
        overlay.succeed()
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "closed\n"
    # The kernel tells the worker of the last close, and waits for no answer.
    until("the space", lambda: _free(overlay.root) > 150 * MIB)


@pytest.mark.parametrize("opened", ["before", "after"])
@pytest.mark.parametrize("how", ["unlink", "rename over it"])
def test_next_checkpoint_fits_while_a_snapshot_is_pending(overlay: Overlay, how: str, opened: str) -> None:
    """The next checkpoint fits while a snapshot is pending, and the old one's blocks are kept.

    The undo log keeps what the snapshot needs of the old checkpoint; the job's new writes bypass the worker.
    """
    root, data = overlay.root, os.urandom(MIB)
    (root / "old").write_bytes(data * 100)
    (root / "small").write_bytes(b"x")
    files = [open(root / "new", "wb", buffering=0)] if opened == "before" else []
    overlay.client.cut()
    if how == "unlink":
        (root / "old").unlink()
    else:
        (root / "small").rename(root / "old")
    with files.pop() if files else open(root / "new", "wb", buffering=0) as file:
        for _ in range(100):
            assert file.write(data) == MIB
        os.fsync(file.fileno())
    assert (root / "new").read_bytes() == data * 100
    assert [gone.epoch for gone in overlay.client.status().abandoned] == [1]


def test_file_that_was_removed_while_open_makes_room_when_it_closes(overlay: Overlay) -> None:
    """A file removed while open makes room for a bypassing writer soon after its last close.

    No FUSE server hears of a close in time to free the space before close(2) returns.
    """
    root, data = overlay.root, os.urandom(MIB)
    (root / "old").write_bytes(data * 100)
    with open(root / "new", "wb", buffering=0) as new:
        overlay.client.cut()
        with open(root / "old", "rb"):
            (root / "old").unlink()
        # Without passthrough each write asks for the room it lacks.
        if PASSES:
            until("room", lambda: not overlay.client.status().pending)
        for _ in range(100):
            assert new.write(data) == MIB


def test_removed_files_answer_through_open_descriptors(root: Path) -> None:
    """An open file keeps its content after removal, and one referred to by O_PATH keeps its attributes."""
    for name in ("open", "referred"):
        (root / name).write_bytes(os.urandom(4 * MIB))
    with open(root / "open", "rb") as file:
        content = file.read(10)
        referred = os.open(root / "referred", os.O_PATH)
        try:
            number = os.fstat(referred).st_ino
            for name in ("open", "referred"):
                (root / name).unlink()
            file.seek(0)
            assert file.read(10) == content
            assert os.fstat(file.fileno()).st_nlink == 0
            facts = os.fstat(referred)
            assert (facts.st_ino, facts.st_nlink, facts.st_size) == (number, 0, 4 * MIB)
        finally:
            os.close(referred)


def test_write_back_of_a_removed_file_is_no_error(root: Path) -> None:
    """A syncfs(2) after a checkpoint was written and removed succeeds.

    The kernel still has the file's times to write then.
    """
    for _ in range(4):
        for name in ("a", "b"):
            (root / name).write_bytes(os.urandom(8 * MIB))
        with open(root / "a", "r+b") as file:
            file.write(b"x" * 5 * MIB)
        (root / "a").rename(root / "c")
        for name in ("b", "c"):
            (root / name).unlink()
        fd = os.open(root, os.O_RDONLY)
        try:
            assert ctypes.CDLL(None, use_errno=True).syncfs(fd) == 0
        finally:
            os.close(fd)
