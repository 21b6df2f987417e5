"""Tests of listings that leave no nodes in the worker, and have the numbers that lookups give."""

from __future__ import annotations

import errno
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from ciuic.fuse_layer.core.directories import UNKNOWN_NUMBER
from ciuic.fuse_layer.core.files import SetAttr
from ciuic.fuse_layer.core.overlay_core import OverlayCore
from ciuic.fuse_layer.system.caller import ROOT
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


def test_a_change_within_a_tick_of_the_clock_is_seen_in_a_listing(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that the overlay replaces is looked at again also where the times of the directory stay as they were."""
    for name in "ab":
        (tmp_path / name).touch()
    handle, fstat = core.directories.opendir(ROOT_ID), os.fstat
    times: dict[int, os.stat_result] = {}
    monkeypatch.setattr(os, "fstat", lambda fd: times.setdefault(fd, fstat(fd)))
    core.directories.list_names(handle, 0, one)
    for name in (b"a", b"b"):
        core.names.unlink(ROOT_ID, name)
        core.names.symlink(ROOT_ID, name, b"nowhere", ROOT)
    ((_, _, mode, _),) = core.directories.list_names(handle, 1, one)
    assert stat.S_ISLNK(mode)


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


def _after_the_look_at(monkeypatch: pytest.MonkeyPatch, name: bytes, change: Callable[[], object]) -> None:
    """Have another thread's change happen when the name has been looked at for the first time."""
    stat_of, changes = PathHandle.stat, [change]

    def look(entry: PathHandle) -> os.stat_result:
        st = stat_of(entry)
        if entry.name == name and changes:
            changes.pop()()
        return st

    monkeypatch.setattr(PathHandle, "stat", look)


def test_an_inode_replaced_between_look_and_node_is_looked_at_again(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name whose inode a truncation replaces after the look at it keeps its node, and has the new attributes."""
    for name in "abc":
        (tmp_path / name).write_text("old content")
    known = core.names.lookup(ROOT_ID, b"b").node

    def replace() -> None:
        (tmp_path / "new").write_text("new")
        (tmp_path / "new").rename(tmp_path / "b")
        node, st = core._state.nodes.get(known), (tmp_path / "b").stat()
        core._state.nodes.replacing(node, st)
        core._state.nodes.replaced(node, st)

    _after_the_look_at(monkeypatch, b"b", replace)
    listed = {name: attr for name, attr, _ in core.directories.readdir(core.directories.opendir(ROOT_ID), 0)}
    found = listed[b"b"]
    assert found is not None
    assert (found.node, found.st.st_size) == (known, 3)
    assert [
        node.lookups for node in core._state.nodes._by_id.values() if node.id not in (ROOT_ID, known)
    ] == [1, 1]
    assert core._state.nodes.get(known).lookups == 2


def test_attributes_are_shown_as_of_the_look(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is shown for a file is asked for before the next one is looked at: a lazy restore may end in between."""
    (tmp_path / "a").touch()
    (tmp_path / "b").touch()
    calls: list[str] = []
    stat_of = PathHandle.stat
    monkeypatch.setattr(PathHandle, "stat", lambda self: calls.append("look") or stat_of(self))
    monkeypatch.setattr(core._state, "shown", lambda st: calls.append("show") or st)
    core.directories.readdir(core.directories.opendir(ROOT_ID), 0)
    assert calls == ["look", "show"] * 2


def test_a_listing_takes_no_set_id_bit_for_gone(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A set-id bit that is set after the look at a file is taken away by a later write."""
    (tmp_path / "a").touch()
    node = core.names.lookup(ROOT_ID, b"a").node
    handle = core.files.open(node, os.O_RDWR)
    _after_the_look_at(monkeypatch, b"a", lambda: core.attributes.setattr(node, SetAttr(mode=0o4777)))
    core.directories.readdir(core.directories.opendir(ROOT_ID), 0)
    core.files.write(handle, 0, b"evil", keeps_privileges=False)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o777


def test_a_file_that_cannot_be_looked_at_is_listed(
    core: OverlayCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One damaged inode or dead mount does not keep the others of its directory from being listed, as in a plain directory."""
    for name in "abc":
        (tmp_path / name).touch()
    (tmp_path / "dead").mkdir()
    stat_of = PathHandle.stat

    def look(entry: PathHandle) -> os.stat_result:
        if entry.name == b"dead":
            raise OSError(errno.ENOTCONN, "Transport endpoint is not connected")
        return stat_of(entry)

    monkeypatch.setattr(PathHandle, "stat", look)
    handle = core.directories.opendir(ROOT_ID)
    listed = {name: number for name, number, _, _ in core.directories.list_names(handle, 0)}
    assert set(listed) == {b"a", b"b", b"c", b"dead"}
    assert listed[b"dead"] == UNKNOWN_NUMBER
    attributes = {name: attr for name, attr, _ in core.directories.readdir(handle, 0)}
    assert {name for name, attr in attributes.items() if attr is None} == {b"dead"}
    assert set(attributes) == set(listed)
