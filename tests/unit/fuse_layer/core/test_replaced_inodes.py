"""Requests that meet a file whose inode a truncation replaces at that moment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ciuic.fuse_layer.core import overlay_hooks
from ciuic.fuse_layer.core.files import SetAttr
from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.core.overlay_hooks import TruncateSwaps

SIZE, LEFT = 100_000, 5


@pytest.fixture
def core(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OverlayCore]:
    monkeypatch.setattr(overlay_hooks, "COPY_LIMIT_BYTES", 4096)
    root = tmp_path / "root"
    root.mkdir()
    (root / "file").write_bytes(bytes(SIZE))
    fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    made = OverlayCore(fd, session="1" * 32, block_size=4096)
    made.cut()
    yield made
    made.close()
    os.close(fd)


def _ask(core: OverlayCore, node: int, handle: int) -> None:
    """Make every kind of request that tells the node of a name or its attributes."""
    assert core.names.lookup(ROOT_ID, b"file").node == node
    assert core.attributes.getattr(node, handle).node == node
    assert core.attributes.getattr(node).node == node
    ((_, listed, _),) = core.directories.readdir(core.directories.opendir(ROOT_ID), 0)
    assert listed is not None
    assert listed.node == node
    ((_, number, _, _),) = core.directories.list_names(core.directories.opendir(ROOT_ID), 0)
    assert number == node
    assert [found for found in core._state.nodes._by_id if found != ROOT_ID] == [node]


def _then(real: Callable[..., Any], act: Callable[[], None]) -> Callable[..., Any]:
    def call(*arguments: Any, **more: Any) -> Any:
        result = real(*arguments, **more)
        act()
        return result

    return call


@pytest.mark.parametrize("moment", ["name", "handle"])
def test_a_replaced_inode_has_one_node_throughout(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """Once the name leads to the new inode, and once the open handle does, which is before the table of nodes knows."""
    node = core.names.lookup(ROOT_ID, b"file").node
    handle = core.files.open(node, os.O_RDWR)
    was, asked = (tmp_path / "root" / "file").stat().st_ino, []

    def ask() -> None:
        asked.append(moment)
        _ask(core, node, handle)

    if moment == "name":
        monkeypatch.setattr(os, "rename", _then(os.rename, ask))
    else:
        monkeypatch.setattr(TruncateSwaps, "_redirect", _then(TruncateSwaps._redirect, ask))
    taken_back: list[int] = []
    monkeypatch.setattr(core.recent, "take_back", taken_back.append)
    core.attributes.setattr(node, SetAttr(size=LEFT), handle)
    assert asked
    # The rename has moved the directory's times.
    assert ROOT_ID in taken_back
    assert (tmp_path / "root" / "file").stat().st_ino != was
    _ask(core, node, handle)
    core.files.release(handle)


def test_a_refused_replacement_leaves_the_inode_its_node(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rename that the file system refuses leaves nothing of the new inode behind: its number may be used again."""
    node = core.names.lookup(ROOT_ID, b"file").node
    keys = dict(core._state.nodes._by_key)

    def refuse(*arguments: object, **more: object) -> None:
        raise OSError(5, "refused")

    monkeypatch.setattr(os, "rename", refuse)
    handle = core.files.open(node, os.O_RDWR)
    core.attributes.setattr(node, SetAttr(size=LEFT), handle)
    assert core._state.nodes._by_key == keys
    _ask(core, node, handle)
    assert (tmp_path / "root" / "file").stat().st_size == LEFT
    core.files.release(handle)


def test_a_name_looked_at_before_its_inode_is_replaced_keeps_its_node(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lookup that found the inode which the node had before looks at the name again."""
    node = core.names.lookup(ROOT_ID, b"file").node
    replaced = []

    def replace() -> None:
        if not replaced:
            replaced.append(True)
            core.attributes.setattr(node, SetAttr(size=LEFT))

    monkeypatch.setattr(core._state, "links", _then(core._state.links, replace))
    attr = core.names.lookup(ROOT_ID, b"file")
    assert replaced
    assert (attr.node, attr.st.st_size) == (node, LEFT)
    assert core._state.nodes.get(node).lookups == 2
