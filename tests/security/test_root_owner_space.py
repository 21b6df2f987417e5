"""Attacker: the owner of a root with a disk quota, who overwrites files while a snapshot is pending.

Root copies each old block; these copies must not fill a file system that others use too.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from support.overlay import Overlay
from support.second_user import MADE_UP

pytestmark = pytest.mark.mount
MIB = 1 << 20


def test_copies_of_old_blocks_leave_others_half_of_the_free_space(short_tmp: Path) -> None:
    """A snapshot is abandoned before its copies of old blocks leave less than a quarter of the free space.

    With 50 MiB overwritten and 46 MiB free, the job gets no error and all space is free again.
    """
    disk = short_tmp / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=96m", "none", disk], check=True)
    root = disk / "root"
    root.mkdir()
    os.chown(root, MADE_UP.uid, MADE_UP.gid)
    (root / "file").write_bytes(bytes(os.urandom(MIB)) * 50)

    def free() -> int:
        room = os.statvfs(disk)
        return room.f_bavail * room.f_frsize

    before = least = free()
    with Overlay(root, short_tmp / "w.sock") as overlay:
        overlay.client.cut()
        with open(root / "file", "r+b", buffering=0) as file:
            for _ in range(50):
                file.write(b"new!" * (MIB // 4))
                os.fsync(file.fileno())
                least = min(least, free())
        (given_up,) = overlay.client.status().abandoned
        assert "than the file system has left" in given_up.reason
        assert least > before // 4
        assert free() > before - MIB
        assert (root / "file").read_bytes()[: 50 * MIB] == b"new!" * (50 * MIB // 4)
