"""The space of a removed file is free when the call that removed it returns, as in a plain directory."""

from __future__ import annotations

import ctypes
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.overlay import Overlay

pytestmark = pytest.mark.mount
MIB = 1 << 20


@pytest.fixture
def root(short_tmp: Path) -> Iterator[Path]:
    """A root on a file system of its own, so that nobody else takes or frees space there."""
    disk = short_tmp / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=160m", "none", disk], check=True)
    (disk / "root").mkdir()
    with Overlay(disk / "root", short_tmp / "w.sock"):
        yield disk / "root"


def _free(root: Path) -> int:
    room = os.statvfs(root.parent)
    return room.f_bavail * room.f_frsize


@pytest.mark.parametrize("how", ["unlink", "rename over it"])
def test_the_next_checkpoint_fits_where_the_old_one_was(root: Path, how: str) -> None:
    """100 MiB of 160: removed and written anew ten times, which fails where the space comes back later."""
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


def test_what_is_open_in_any_way_still_answers(root: Path) -> None:
    """A file that somebody has open keeps its content; one that is only referred to (O_PATH) keeps its attributes."""
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


def test_what_the_kernel_writes_back_of_a_removed_file_is_no_error(root: Path) -> None:
    """syncfs(2) after a checkpoint was written and removed: the kernel still has its times to write, and nobody misses them."""
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
