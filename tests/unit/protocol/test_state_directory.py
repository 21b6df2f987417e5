"""Tests of where the state of a root lies, and of state that an earlier version kept elsewhere."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.overlay import state_of

from ciuic import STATE_DIR_NAME
from ciuic.protocol.state_directory import open_state, remove_state

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


def _git(tree: Path, *words: str) -> str:
    identity = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b", "GIT_COMMITTER_NAME": "a"}
    env = {**os.environ, **identity, "GIT_COMMITTER_EMAIL": "a@b", "GIT_CONFIG_GLOBAL": "/dev/null"}
    done = subprocess.run(
        ["git", "-C", str(tree), *words], env=env, check=True, capture_output=True, text=True
    )
    return done.stdout


def test_state_lies_above_the_work_tree_that_the_root_is_in(tmp_path: Path) -> None:
    """Git neither lists nor deletes it, whatever it is asked to clean; also where one work tree is in another."""
    root = tmp_path / "outer" / "inner" / "data"
    root.mkdir(parents=True)
    for tree in (tmp_path / "outer", tmp_path / "outer" / "inner"):
        _git(tree, "init", "-q")
    with opened(root):
        pass
    (state,) = [path for path in (tmp_path / NAME).iterdir() if path.is_dir()]
    assert state.name.startswith(f"{root.stat().st_ino}-")
    assert not (tmp_path / "outer" / NAME).exists()
    assert not (tmp_path / "outer" / "inner" / NAME).exists()


def test_state_in_a_work_tree_is_hidden_from_git(tmp_path: Path) -> None:
    """State that an earlier ciuic left in a work tree is used there; status, stash and clean leave it alone."""
    tree, root = tmp_path / "tree", tmp_path / "tree" / "data"
    root.mkdir(parents=True)
    with opened(root):
        pass
    assert state_of(root).is_dir()
    (tree / NAME / ".gitignore").unlink()
    (state_of(root) / "tracking").write_text("kept")
    _git(tree, "init", "-q")
    (tree / "code").write_text("x")
    (root / "file").write_text("x")
    _git(tree, "add", "code", "data")
    _git(tree, "commit", "-qm", "x")
    assert NAME in _git(tree, "status", "--porcelain")
    with opened(root):
        pass
    assert _git(tree, "status", "--porcelain") == ""
    (tree / "code").write_text("y")
    _git(tree, "stash", "-u")
    _git(tree, "clean", "-fd")
    assert (state_of(root) / "tracking").read_text() == "kept"


def test_nothing_of_ciuic_is_left_after_the_last_root(root: Path) -> None:
    """The directory of states goes with the last state in it, and its .gitignore too."""
    with opened(root):
        pass
    root_fd = os.open(root, os.O_PATH | os.O_DIRECTORY)
    try:
        remove_state(root_fd)
    finally:
        os.close(root_fd)
    assert not (root.parent / NAME).exists()
