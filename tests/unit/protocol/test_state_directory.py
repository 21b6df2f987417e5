"""Tests of where the state of a root lies, and of state that an earlier version kept elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.state_dir import state_of

from ciuic import STATE_DIR_NAME
from ciuic.protocol.state_directory import open_state

NAME = os.fsdecode(STATE_DIR_NAME)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


@contextmanager
def opened(root: Path) -> Iterator[tuple[bytes, ...]]:
    """Open the state directory of the root; return the new names of what was in its way."""
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        state = open_state(root_fd)
        os.close(state.fd)
        yield state.set_aside
    finally:
        os.close(root_fd)


def _earlier(root: Path) -> Path:
    """Make the state of a version up to 7b77f7c, in the root, with one file that is open and removed."""
    state = root / NAME
    for below in ("", "undo", "undo/hold", "open"):
        (state / below).mkdir(mode=0o700)
    (state / "tracking").write_text("old")
    (state / "undo/log").write_text("old")
    (state / "open/4711").write_text("removed and open")
    return state


def test_open_removed_files_of_an_earlier_version_are_taken_over(root: Path) -> None:
    """Removed files that an earlier version kept open are moved for its worker's successor.

    Its tracking is not trusted.
    """
    _earlier(root)
    with opened(root) as set_aside:
        assert set_aside == ()
    assert (state_of(root) / "open/4711").read_text() == "removed and open"
    assert os.listdir(state_of(root)) == ["open"]
    assert os.listdir(root) == []


@pytest.mark.parametrize("lacking", [False, True])
def test_foreign_directory_is_set_aside(root: Path, lacking: bool) -> None:
    """A directory with other content than an earlier version made is set aside unchanged."""
    state = _earlier(root)
    if lacking:
        (state / "undo/hold").rmdir()
    else:
        (state / "notes").write_text("precious")
    with opened(root) as set_aside:
        (aside,) = set_aside
    assert (root / os.fsdecode(aside) / "open/4711").exists()
    assert not (state_of(root) / "open").exists()
