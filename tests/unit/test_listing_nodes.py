"""A listing that the kernel remembers nothing of leaves nothing in the worker, and tells the numbers that lookups will."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer.core import OverlayCore

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
    """Every name with its type and number, no node for any of them: a million listed names stayed in memory for good."""
    for number in range(50):
        (tmp_path / f"file{number}").touch()
    (tmp_path / "directory").mkdir()
    os.link(tmp_path / "file0", tmp_path / "link")
    before = len(core._state.nodes)
    listed = {name: (number, mode) for name, number, mode, _ in core.list_names(core.opendir(ROOT_ID), 0)}
    assert len(core._state.nodes) == before
    assert {os.fsdecode(name) for name in listed} == {path.name for path in tmp_path.iterdir()}
    for name, (number, mode) in listed.items():
        attr = core.lookup(ROOT_ID, name)
        assert (attr.node, attr.st.st_mode) == (number, mode), name


def test_a_number_whose_old_owner_is_remembered_is_told_as_looked_up(
    core: OverlayCore, tmp_path: Path
) -> None:
    """A file that got the inode number of one that the kernel has not forgotten is listed under the id of its own node."""
    (tmp_path / "old").touch()
    old = core.lookup(ROOT_ID, b"old")
    core._state.nodes._unkey(core._state.nodes.get(old.node))
    (listed,) = [entry for entry in core.list_names(core.opendir(ROOT_ID), 0) if entry[0] == b"old"]
    assert listed[1] != old.node
    assert core.lookup(ROOT_ID, b"old").node == listed[1]


def test_what_vanished_is_left_out(core: OverlayCore, tmp_path: Path) -> None:
    """A name that was removed after the listing began is not told."""
    for name in "ab":
        (tmp_path / name).touch()
    entries = core.list_names(core.opendir(ROOT_ID), 0)
    first = next(entries)[0]
    (tmp_path / ({"a": "b", "b": "a"}[os.fsdecode(first)])).unlink()
    assert list(entries) == []
