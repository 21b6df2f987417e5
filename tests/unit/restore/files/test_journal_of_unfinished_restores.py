"""Tests of the journal of an unfinished restore."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.leftovers import descriptors

from ciuic.errors import Busy
from ciuic.restore import journal as journals
from ciuic.restore.journal import JOURNAL_NAME, Journal


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_PATH | os.O_DIRECTORY)
    yield fd
    os.close(fd)


def _begin(folder: int) -> Journal:
    journal = Journal.begin(folder, b"/data", "cs-abc123", b"/data")
    assert journal is not None
    return journal


def _interpose(monkeypatch: pytest.MonkeyPatch, *acts: object) -> None:
    """Run the acts, one before each of the next calls of flock(2)."""
    left = list(acts)
    real = fcntl.flock

    def flock(fd: int, how: int) -> None:
        if left:
            left.pop(0)()  # type: ignore[operator]
        real(fd, how)

    monkeypatch.setattr(journals.fcntl, "flock", flock)


def test_lock_holds_the_file_that_has_the_name(
    tmp_path: Path, folder: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that opened the journal before another one finished locks the new file, and a third run is refused."""
    first = _begin(folder)
    _interpose(monkeypatch, first.finish)
    second = _begin(folder)
    monkeypatch.undo()
    assert (tmp_path / os.fsdecode(JOURNAL_NAME)).exists()
    assert not second.resumed
    with pytest.raises(Busy):
        _begin(folder)
    second.finish()
    assert not (tmp_path / os.fsdecode(JOURNAL_NAME)).exists()


def test_run_that_was_overtaken_is_refused(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that opened the journal before it was removed and made anew by a third run is refused."""
    first = _begin(folder)
    third: list[Journal] = []

    def overtake() -> None:
        first.finish()
        # From here on flock(2) itself is called again.
        third.append(_begin(folder))

    _interpose(monkeypatch, overtake)
    with pytest.raises(Busy):
        _begin(folder)
    third[0].finish()


def test_name_that_never_stays_is_busy(folder: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attempts are bounded where the file is removed before every lock; no descriptor is left open."""
    before = set(os.listdir("/proc/self/fd"))
    _interpose(monkeypatch, *[lambda: os.unlink(JOURNAL_NAME, dir_fd=folder)] * 100)
    with pytest.raises(Busy):
        _begin(folder)
    assert set(os.listdir("/proc/self/fd")) == before


def test_journal_is_closed_when_it_cannot_be_removed(tmp_path: Path) -> None:
    """Another user who puts a directory in the journal's place keeps no descriptor of the run open."""
    folder = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    before = descriptors()
    journal = _begin(folder)
    name = tmp_path / os.fsdecode(JOURNAL_NAME)
    name.unlink()
    name.mkdir()
    with pytest.raises(OSError, match="directory"):
        journal.finish()
    assert descriptors() == before
    os.close(folder)
