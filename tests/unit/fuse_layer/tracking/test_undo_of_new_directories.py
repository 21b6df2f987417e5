"""Tests of names that enter and leave a directory made in the running epoch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.overlay import state_of

from ciuic.fuse_layer.core.overlay_core import ROOT_ID, Credentials, OverlayCore
from ciuic.fuse_layer.undo_format import LogReader

ROOT = Credentials(0, 0)


@pytest.fixture
def core(tmp_path: Path) -> Iterator[OverlayCore]:
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_PATH | os.O_DIRECTORY)
    made = OverlayCore(fd, session="1" * 32)
    yield made
    made.close()
    os.close(fd)


def test_names_in_a_directory_made_after_the_cut_have_no_records(core: OverlayCore, tmp_path: Path) -> None:
    """Names in a directory made after the cut have no records there, only where they were at the cut.

    Such a directory may have the inode number of one removed since the cut, whose records these would seem to
    be.
    """
    _, handle = core.names.create(ROOT_ID, b"file", 0o600, os.O_RDWR, ROOT)
    core.files.release(handle)
    core.names.mkdir(ROOT_ID, b"folder", 0o700, ROOT)
    epoch = core.cut().epoch
    new = core.names.mkdir(ROOT_ID, b"new", 0o700, ROOT)
    for name in (b"file", b"folder"):
        core.names.rename(ROOT_ID, name, new.node, name, 0)
        core.names.rename(new.node, name, ROOT_ID, b"back-" + name, 0)
    undo = state_of(tmp_path / "root") / "undo"
    log = LogReader(str(undo / "log"), epoch)
    log.poll()
    assert log.names(os.stat(tmp_path / "root/new").st_ino) == {}
    kept = log.names(os.stat(tmp_path / "root").st_ino)
    assert {name for name, record in kept.items() if record.ino} == {b"file", b"folder"}
    log.close()
