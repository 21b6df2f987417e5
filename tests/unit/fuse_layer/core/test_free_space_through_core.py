"""Tests of free space while an epoch is pending: removed files count as free, and a disk that cannot be asked fails no call."""

from __future__ import annotations

import gc
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from support.faults import Disk

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore
from ciuic.fuse_layer.core.overlay_hooks import RoomForUnseen

CALLER = Credentials(0, 0, 0)
FILES, SIZE_BYTES = 40, 300_000


@pytest.fixture
def open_core(short_tmp: Path) -> Iterator[Callable[[], OverlayCore]]:
    """Open a core on a file system that nothing else changes; not tmpfs, where a hard link takes an inode."""
    disk = Disk(short_tmp / "disk.img", short_tmp / "disk", 64 << 20)
    fd = os.open(disk.point, os.O_PATH | os.O_DIRECTORY)
    cores: list[OverlayCore] = []

    def make() -> OverlayCore:
        cores.append(OverlayCore(fd, session="s", block_size=4096))
        return cores[-1]

    yield make
    while cores:
        cores.pop().close()
    os.close(fd)
    # The descriptors that a core caches are closed with it.
    gc.collect()
    disk.unmount()


def _free(core: OverlayCore) -> tuple[int, int]:
    facts = core.statfs()
    return facts.f_bavail * facts.f_frsize, facts.f_ffree


def _unlink(core: OverlayCore, name: bytes) -> None:
    """Unlink a file and forget it, as the kernel does at once with a node without name."""
    node = core.names.lookup(ROOT_ID, name).node
    core.names.unlink(ROOT_ID, name)
    core.nodes.forget(node, 100)


def _create(core: OverlayCore, name: bytes) -> int:
    _, handle = core.names.create(ROOT_ID, name, 0o644, os.O_RDWR, CALLER)
    core.files.write(handle, 0, b"x" * SIZE_BYTES)
    # Delayed allocation would count later.
    core.files.fsync(handle, False)
    return handle


@pytest.mark.mount
def test_removed_files_are_free_while_they_are_kept(open_core: Callable[[], OverlayCore]) -> None:
    """Space and inodes of removed and overwritten files are free at once, and the same after the epoch."""
    core = open_core()
    empty = _free(core)
    for number in range(FILES):
        core.files.release(_create(core, b"%d" % number))
    cut = core.cut()
    for number in range(1, FILES):
        _unlink(core, b"%d" % number)
    handle = core.files.open(core.names.lookup(ROOT_ID, b"0").node, os.O_RDWR)
    core.files.write(handle, 0, b"y" * SIZE_BYTES)
    core.files.fsync(handle, False)
    core.files.release(handle)
    assert core.pending
    free = _free(core)
    assert free[1] == empty[1] - 1
    assert free[0] == pytest.approx(empty[0] - SIZE_BYTES, abs=16384)
    core.committed(cut.epoch)
    assert _free(core) == free


@pytest.mark.mount
def test_renamed_and_open_files_are_not_free(open_core: Callable[[], OverlayCore]) -> None:
    """Renamed files, and removed ones that are open, are not free though the undo log holds them too."""
    core = open_core()
    handles = [_create(core, name) for name in (b"renamed", b"open", b"linked")]
    core.names.link(core.names.lookup(ROOT_ID, b"linked").node, ROOT_ID, b"link")
    for handle in (handles[0], handles[2]):
        core.files.release(handle)
    before = _free(core)
    cut = core.cut()
    core.names.rename(ROOT_ID, b"renamed", ROOT_ID, b"elsewhere", 0)
    _unlink(core, b"open")
    core.names.unlink(ROOT_ID, b"linked")
    assert core.pending
    assert _free(core) == before
    core.files.release(handles[1])
    free = _free(core)
    assert free[1] == before[1] + 1
    core.committed(cut.epoch)
    assert _free(core) == free


def test_a_disk_that_cannot_be_asked_fails_no_call_of_the_job() -> None:
    """Neither a removal nor an open raises when statvfs(2) fails."""
    undo = SimpleNamespace(active=True, takes_space=True, directory_fd=-1)
    room = RoomForUnseen(
        cast("Any", SimpleNamespace(undo=undo)),
        cast("Any", SimpleNamespace(room=lambda: SimpleNamespace(size_bytes=1 << 30))),
        cast("Any", SimpleNamespace(any_open=True)),
    )
    room.look()
    assert not room.is_short()
