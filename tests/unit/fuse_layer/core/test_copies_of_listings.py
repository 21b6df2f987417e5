"""Handles that read the kernel's copy of a listing, and go on here once that is gone."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, OverlayCore
from ciuic.fuse_layer.journal.journal_writer import LISTING_KEPT_FROM
from ciuic.fuse_layer.state import passthrough_state
from ciuic.fuse_layer.system.caller import Credentials

NAMES, READ, REMOVED = 100, 60, 25
ROOT = Credentials(0, 0, 0)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[OverlayCore]:
    for number in range(NAMES):
        (tmp_path / f"{number:03}").touch()
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    made = OverlayCore(fd, session="0" * 32)
    yield made
    made.close()
    os.close(fd)


def _open(core: OverlayCore) -> tuple[int, bool]:
    """Open the root as the driver does; return the handle and whether it may read the copy."""
    handle = core.directories.opendir(ROOT_ID)
    return handle, core.directories.may_read_copy(handle)


def _list(core: OverlayCore, handle: int, offset: int = 0) -> list[bytes]:
    return [name for name, *_ in core.directories.list_names(handle, offset)]


def _copy(core: OverlayCore) -> list[bytes]:
    """Have the kernel make a copy of the root's listing, and return it."""
    handle, _ = _open(core)
    names = _list(core, handle)
    assert not core.directories.copied(handle)
    core.directories.releasedir(handle)
    return names


def test_a_handle_goes_on_in_the_listing_that_the_copy_was_of(core: OverlayCore) -> None:
    """What was read from the copy and removed moves no offset; a name that is new is not in an old listing."""
    names = _copy(core)
    handle, may = _open(core)
    assert may
    for name in names[:REMOVED]:
        core.names.unlink(ROOT_ID, name)
    core.names.mkdir(ROOT_ID, b"new", 0o755, ROOT)
    assert _list(core, handle, READ) == names[READ:]


def test_a_handle_misses_nothing_where_the_listing_is_not_remembered(
    core: OverlayCore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Listings longer than the limit are listed again from as many names before the offset as were removed."""
    monkeypatch.setattr(passthrough_state, "MAX_COPIED_NAMES", NAMES - 1)
    names = _copy(core)
    handle, _ = _open(core)
    for name in names[:REMOVED]:
        core.names.unlink(ROOT_ID, name)
    assert _list(core, handle, READ) == names[READ:]
    # Removed behind the offset: some come twice.
    handle, _ = _open(core)
    for name in names[-REMOVED:]:
        core.names.unlink(ROOT_ID, name)
    rest = _list(core, handle, READ - REMOVED)
    assert set(names[READ:-REMOVED]) <= set(rest)


def test_a_predecessors_handle_misses_nothing(core: OverlayCore) -> None:
    """Without a listing of its own it lists everything again, unless the listing was too short to be kept: it has ended then."""
    for handle, offset in ((1000, READ), (1001, 1)):
        core.directories.inherit(handle, ROOT_ID, None)
        assert len(_list(core, handle, offset)) == NAMES
    below = core.names.mkdir(ROOT_ID, b"below", 0o755, ROOT).node
    for number in range(LISTING_KEPT_FROM - 1):
        core.names.mkdir(below, b"%d" % number, 0o755, ROOT)
    core.directories.inherit(1002, below, None)
    assert _list(core, 1002, LISTING_KEPT_FROM - 1) == []


def test_names_that_went_in_a_predecessors_time_move_the_offset(core: OverlayCore) -> None:
    """A predecessor's handle goes on where it was when the journal counted what was removed, so that no name comes twice."""
    names = _copy(core)
    for name in names[:REMOVED]:
        core.names.unlink(ROOT_ID, name)
    core.directories.inherit(1000, ROOT_ID, None, removed=REMOVED)
    for name in names[REMOVED : READ - 1]:
        core.names.unlink(ROOT_ID, name)
    assert _list(core, 1000, READ) == names[READ:]


def test_the_first_name_is_a_position_as_all_others(core: OverlayCore) -> None:
    """A seek to the first name keeps the listing, so that a position told before gives its name; a rewind reads the directory anew."""
    handle = core.directories.opendir(ROOT_ID)
    names = _list(core, handle)
    for name in names[:REMOVED]:
        core.names.unlink(ROOT_ID, name)
    assert [name for name, *_ in core.directories.list_names(handle, 0, rewinds=False)] == names[REMOVED:]
    assert _list(core, handle, READ) == names[READ:]
    assert len(_list(core, handle)) == NAMES - REMOVED
    assert _list(core, handle, READ) == names[REMOVED + READ :]


def test_the_copy_is_shared_until_the_directory_changes(core: OverlayCore) -> None:
    """A handle that only keeps a directory open takes the copy from nobody; after a change others list for themselves until it is closed."""
    _copy(core)
    first, may = _open(core)
    assert may
    assert _open(core)[1]
    core.names.mkdir(ROOT_ID, b"new", 0o755, ROOT)
    assert not _open(core)[1]
    for handle in list(core.directories._open):
        core.directories.releasedir(handle)
    assert not core._state.watched
    assert _open(core)[1]
    assert not core.directories.has(first)


def test_a_copy_is_dropped_where_another_handle_may_be_in_an_older_one(core: OverlayCore) -> None:
    """Two handles of one moment: one lists the directory after a change, and the other goes on in the old listing."""
    names = _copy(core)
    first, second = _open(core)[0], _open(core)[0]
    core.names.unlink(ROOT_ID, names[0])
    assert len(_list(core, second)) == NAMES - 1
    assert core.directories.copied(second)
    assert _list(core, first, READ) == names[READ:]


def test_remembered_listings_are_limited(core: OverlayCore, monkeypatch: pytest.MonkeyPatch) -> None:
    """The names of the latest listings are remembered, up to the limit."""
    monkeypatch.setattr(passthrough_state, "MAX_COPIED_NAMES", NAMES + 5)
    _copy(core)
    below = core.names.mkdir(ROOT_ID, b"below", 0o755, ROOT).node
    for number in range(10):
        core.names.mkdir(below, b"%d" % number, 0o755, ROOT)
    handle = core.directories.opendir(below)
    assert core.directories.may_read_copy(handle)
    _list(core, handle)
    assert not core.directories.copied(handle)
    assert core._state.copied.of(ROOT_ID) is None
    assert sorted(core._state.copied.of(below) or ()) == [b"%d" % number for number in range(10)]
    # An empty one counts as well.
    for number in range(NAMES + 5):
        core._state.copied.keep(1000 + number, ())
    assert core._state.copied.of(below) is None


@pytest.mark.parametrize("opened_before", [False, True])
def test_a_listing_from_before_a_change_is_of_no_copy(core: OverlayCore, opened_before: bool) -> None:
    """Names that came while nobody read the directory, or had it open at all, are not missed by a reader whose copy is dropped."""
    old = _copy(core)
    kept = core.directories.opendir(ROOT_ID) if opened_before else 0
    for number in range(REMOVED):
        core.names.mkdir(ROOT_ID, b"new%d" % number, 0o755, ROOT)
    first, second = _open(core)[0], _open(core)[0]
    names = _list(core, second)
    assert len(names) == len(old) + REMOVED
    assert not core.directories.copied(second)
    assert _list(core, first, READ) == names[READ:]
    core.directories.releasedir(kept)
