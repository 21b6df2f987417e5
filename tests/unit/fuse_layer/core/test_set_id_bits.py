"""Tests of set-id bits, which go when a file's content changes, in whatever way it is served."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer.core import overlay_hooks
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore, SetAttr, UntrackedCore
from ciuic.fuse_layer.journal import journal_writer
from ciuic.fuse_layer.journal.journal_writer import JournalWriter
from ciuic.fuse_layer.system import syscalls

Change = Callable[[OverlayCore, int], object]
"""Change of the content of a node that is not open."""


def _open(core: OverlayCore, node: int) -> int:
    return core.files.open(node, os.O_RDWR)


def _copy(core: OverlayCore, node: int) -> None:
    handle = _open(core, node)
    assert core.files.copy_file_range(handle, 0, handle, 8192, 100) == 100


def _share(core: OverlayCore, node: int) -> None:
    handle = _open(core, node)
    core.files.share(node, core.files.descriptor(handle), 0, 0, 4096)


CHANGES: dict[str, Change] = {
    "write": lambda core, node: core.files.write(_open(core, node), 0, b"x"),
    "write beyond the end": lambda core, node: core.files.write(_open(core, node), 100_000, b"x"),
    "truncate": lambda core, node: core.attributes.setattr(node, SetAttr(size=5)),
    "truncate an open file": lambda core, node: core.attributes.setattr(
        node, SetAttr(size=5), _open(core, node)
    ),
    "open with O_TRUNC": lambda core, node: core.files.open(node, os.O_RDWR | os.O_TRUNC),
    "fallocate": lambda core, node: core.files.fallocate(_open(core, node), 0, 0, 50_000),
    "copy": _copy,
    "share": _share,
}


@pytest.fixture(params=["tracked", "untracked", pytest.param("mounted below", marks=pytest.mark.mount)])
def core(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[OverlayCore]:
    """Yield a core that serves the file ``below/file``: tracked, or in one of the ways that track nothing."""
    below = tmp_path / "root" / "below"
    below.mkdir(parents=True)
    if request.param == "mounted below":
        subprocess.run(["mount", "-t", "tmpfs", "none", below], check=True, timeout=30)
    try:
        (below / "file").write_bytes(bytes(20_000))
        fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
        kind = UntrackedCore if request.param == "untracked" else OverlayCore
        made = kind(fd, session="1" * 32, block_size=4096)
        yield made
        made.close()
        os.close(fd)
    finally:
        if request.param == "mounted below":
            subprocess.run(["umount", "-l", below], check=True, timeout=30)


def _node(core: OverlayCore) -> int:
    return core.names.lookup(core.names.lookup(ROOT_ID, b"below").node, b"file").node


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize(("mode", "left"), [(0o4777, 0o777), (0o6777, 0o777), (0o2767, 0o2767)])
def test_a_change_of_content_takes_set_id_bits_away(
    core: OverlayCore, tmp_path: Path, change: str, mode: int, left: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every change of the content drops set-user-id, and set-group-id of an executable."""
    # Few file systems share extents: that of the test does not have to.
    monkeypatch.setattr(syscalls, "clone_range", lambda *_: None)
    file = tmp_path / "root" / "below" / "file"
    file.chmod(mode)
    CHANGES[change](core, _node(core))
    assert stat.S_IMODE(file.stat().st_mode) == left


def test_a_privileged_writer_keeps_set_id_bits(core: OverlayCore, tmp_path: Path) -> None:
    """A writer with CAP_FSETID keeps the bits, in a file that is only served as well."""
    file = tmp_path / "root" / "below" / "file"
    file.chmod(0o6777)
    node = _node(core)
    handle = _open(core, node)
    core.files.write(handle, 0, b"x", keeps_privileges=True)
    core.files.fallocate(handle, 0, 0, 50_000, keeps_privileges=True)
    core.attributes.setattr(node, SetAttr(size=5, keeps_privileges=True), handle)
    assert stat.S_IMODE(file.stat().st_mode) == 0o6777


def test_an_outsider_loses_the_group_bit(core: OverlayCore, tmp_path: Path) -> None:
    """An allocation from outside the group drops set-group-id of a file that the group cannot execute."""
    file = tmp_path / "root" / "below" / "file"
    file.chmod(0o2767)
    handle = _open(core, _node(core))
    core.files.fallocate(handle, 0, 0, 50_000, is_outside=lambda _: False)
    assert stat.S_IMODE(file.stat().st_mode) == 0o2767
    core.files.fallocate(handle, 0, 0, 60_000, is_outside=lambda _: True)
    assert stat.S_IMODE(file.stat().st_mode) == 0o767


def test_a_truncation_that_gives_a_new_inode_drops_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A large file that is truncated while an epoch needs it is given a new inode, without the bits."""
    monkeypatch.setattr(overlay_hooks, "COPY_LIMIT_BYTES", 4096)
    file = tmp_path / "root" / "file"
    file.parent.mkdir()
    file.write_bytes(bytes(100_000))
    file.chmod(0o4777)
    was = file.stat().st_ino
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    core = OverlayCore(fd, session="1" * 32, block_size=4096)
    core.cut()
    core.attributes.setattr(core.names.lookup(ROOT_ID, b"file").node, SetAttr(size=5))
    assert file.stat().st_ino != was
    assert stat.S_IMODE(file.stat().st_mode) == 0o777
    core.close()
    os.close(fd)


@pytest.mark.parametrize("opened", [False, True], ids=["opened by the successor", "open since before"])
def test_a_successor_takes_set_id_bits_away(tmp_path: Path, opened: bool) -> None:
    """A worker that has never read a file's attributes drops the bits of a file that its predecessor knew."""
    file = tmp_path / "root" / "file"
    file.parent.mkdir()
    file.write_bytes(b"x")
    file.chmod(0o4777)
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    journal = JournalWriter(tmp_path / "ledger")
    journal.begin(45, 0, 4096)
    predecessor = OverlayCore(fd, session="s", journal=journal)
    node = predecessor.names.lookup(ROOT_ID, b"file").node
    inherited = journal_writer.replay(tmp_path / "ledger")
    successor = OverlayCore(fd, session="s", journal=JournalWriter(tmp_path / "ledger"), inherited=inherited)
    if opened:
        successor.files.inherit(7, node, os.O_RDWR, unseen=False)
    successor.files.write(7 if opened else successor.files.open(node, os.O_RDWR), 0, b"y")
    assert stat.S_IMODE(file.stat().st_mode) == 0o777
    successor.close()
    predecessor.close()
    journal.remove()
    os.close(fd)
