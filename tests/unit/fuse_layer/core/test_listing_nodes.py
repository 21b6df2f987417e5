"""Tests of listings that leave no nodes in the worker, and have the numbers that lookups give."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer.core.overlay_core import OverlayCore

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
    first, _, _, offset = next(core.directories.list_names(handle, 0))
    (tmp_path / ({"a": "b", "b": "a"}[os.fsdecode(first)])).unlink()
    assert list(core.directories.list_names(handle, offset)) == []
