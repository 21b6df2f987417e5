"""Tests of listings that leave no nodes in the worker, and have the numbers that lookups give."""

from __future__ import annotations

import os
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from ciuic.fuse_layer.core import directories
from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.system.path_handles import PathHandle

ROOT_ID = 1


@pytest.fixture
def core(tmp_path: Path) -> Iterator[OverlayCore]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    core = OverlayCore(fd, session="0" * 32)
    try:
        yield core
    finally:
        core.close()
        os.close(fd)


def one(names: Sequence[bytes], offset: int) -> int:
    """Fit one name into a reply."""
    return offset + 1


def test_names_alone_make_no_nodes(core: OverlayCore, tmp_path: Path) -> None:
    """Listed names have type and number but no node: a million of them once stayed in memory for good."""
    for number in range(50):
        (tmp_path / f"file{number}").touch()
    (tmp_path / "directory").mkdir()
    os.link(tmp_path / "file0", tmp_path / "link")
    (tmp_path / "symbolic").symlink_to("nowhere")
    os.mkfifo(tmp_path / "pipe")
    before = len(core._state.nodes)
    listed = {
        name: (number, mode)
        for name, number, mode, _ in core.directories.list_names(core.directories.opendir(ROOT_ID), 0)
    }
    assert len(core._state.nodes) == before
    assert {os.fsdecode(name) for name in listed} == {path.name for path in tmp_path.iterdir()}
    for name, (number, mode) in listed.items():
        attr = core.names.lookup(ROOT_ID, name)
        assert (attr.node, stat.S_IFMT(attr.st.st_mode)) == (number, stat.S_IFMT(mode)), name


def test_reused_inode_number_is_listed_under_its_node(core: OverlayCore, tmp_path: Path) -> None:
    """A file with the reused number of a remembered node is listed under the id of its own node."""
    (tmp_path / "old").touch()
    old = core.names.lookup(ROOT_ID, b"old")
    core._state.nodes._unkey(core._state.nodes.get(old.node))
    (listed,) = [
        entry
        for entry in core.directories.list_names(core.directories.opendir(ROOT_ID), 0)
        if entry[0] == b"old"
    ]
    assert listed[1] != old.node
    assert core.names.lookup(ROOT_ID, b"old").node == listed[1]


def test_vanished_names_are_left_out(core: OverlayCore, tmp_path: Path) -> None:
    """A name removed between two replies of a listing is left out of the second."""
    for name in "ab":
        (tmp_path / name).touch()
    handle = core.directories.opendir(ROOT_ID)
    ((first, _, _, offset),) = core.directories.list_names(handle, 0, one)
    (tmp_path / ({"a": "b", "b": "a"}[os.fsdecode(first)])).unlink()
    assert core.directories.list_names(handle, offset, one) == []


def test_names_are_looked_at_again_where_the_directory_changed(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A later reply takes kinds and numbers from the first reading of an unchanged directory alone."""
    monkeypatch.setattr(directories, "_SETTLED_NS", -10 * directories._SETTLED_NS)
    for name in "abc":
        (tmp_path / name).touch()
    handle, looked = core.directories.opendir(ROOT_ID), list[bytes | None]()
    stat_of = PathHandle.stat
    monkeypatch.setattr(PathHandle, "stat", lambda self: looked.append(self.name) or stat_of(self))
    for offset in range(3):
        ((name, number, mode, _),) = core.directories.list_names(handle, offset, one)
        assert (number, stat.S_ISREG(mode)) == ((tmp_path / os.fsdecode(name)).stat().st_ino, True)
    assert looked == []
    # A file system may count the times of a change in ticks of the kernel's clock.
    time.sleep(0.05)
    (tmp_path / os.fsdecode(name)).unlink()
    (tmp_path / os.fsdecode(name)).symlink_to("nowhere")
    ((listed, number, mode, _),) = core.directories.list_names(handle, 2, one)
    assert (listed, number) == (name, (tmp_path / os.fsdecode(name)).lstat().st_ino)
    assert stat.S_ISLNK(mode)
    assert looked == [name]


def test_a_fresh_directory_is_not_trusted_to_be_unchanged(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names of a directory that changed just now are looked at: its times may be the same after a further change."""
    now_ns = time.time_ns()
    monkeypatch.setattr(directories, "_times", lambda opened: (now_ns, now_ns))
    for name in "ab":
        (tmp_path / name).touch()
    handle = core.directories.opendir(ROOT_ID)
    ((first, *_),) = core.directories.list_names(handle, 0, one)
    other = tmp_path / ("a" if first == b"b" else "b")
    other.unlink()
    other.symlink_to("nowhere")
    ((_, number, mode, _),) = core.directories.list_names(handle, 1, one)
    assert (number, stat.S_ISLNK(mode)) == (other.lstat().st_ino, True)


def test_a_reply_whose_names_all_vanished_is_not_the_end(core: OverlayCore, tmp_path: Path) -> None:
    """Where no name of a reply is left, the next ones are listed: an empty reply would end the listing."""
    for name in "abcd":
        (tmp_path / name).touch()
    handle = core.directories.opendir(ROOT_ID)
    names = [entry[0] for entry in core.directories.list_names(handle, 0)]
    for name in names[1:3]:
        (tmp_path / os.fsdecode(name)).unlink()
    assert [entry[0] for entry in core.directories.list_names(handle, 1, one)] == names[3:]
    assert [entry[0] for entry in core.directories.readdir(handle, 1, one)] == names[3:]
