"""Old blocks in the undo log: copied before they have a record, and given up where the disk has no room."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from ciuic.fuse_layer.tracking import undo_log
from ciuic.fuse_layer.tracking.undo_log import UndoLog
from ciuic.fuse_layer.undo_format import LOG_NAME, BlockRun, LogReader

_BLOCK = 4096
_BLOCKS = 8


class _Saved(NamedTuple):
    """A file whose epoch 1 is sealed, and its undo log."""

    log: UndoLog
    fd: int
    ino: int
    abandoned: list[int]

    def keep_blocks(self) -> None:
        with self.log.lock(self.ino):
            self.log.keep_blocks(self.fd, self.ino, 0, _BLOCKS * _BLOCK)

    def known(self) -> list[BlockRun]:
        """Return the runs of blocks that a capture finds now."""
        reader = LogReader(f"/proc/self/fd/{self.log.directory_fd}/{LOG_NAME}", 1)
        reader.poll()
        return list(reader.blocks(self.ino, 0, _BLOCKS))


@pytest.fixture
def saved(tmp_path: Path) -> Iterator[_Saved]:
    abandoned: list[int] = []
    state = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    (tmp_path / "file").write_bytes(os.urandom(_BLOCKS * _BLOCK))
    fd = os.open(tmp_path / "file", os.O_RDWR)
    log = UndoLog(
        state,
        block_size=_BLOCK,
        limit_bytes=1 << 30,
        on_abandon=lambda epochs, reason: abandoned.extend(epochs),
    )
    log.begin(1)
    log.keep_inode(os.fstat(fd), fd)
    yield _Saved(log, fd, os.fstat(fd).st_ino, abandoned)
    os.close(fd)
    os.close(state)


def test_a_block_has_a_record_when_it_is_copied_and_not_before(
    saved: _Saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A capture that reads while a block is being copied finds no record that vouches for the copy."""
    copy: Callable[..., None] = undo_log._copy_data
    seen: list[list[BlockRun]] = []

    def copying(*arguments: Any) -> None:
        seen.append(saved.known())
        copy(*arguments)
        seen.append(saved.known())

    monkeypatch.setattr(undo_log, "_copy_data", copying)
    saved.keep_blocks()
    assert seen == [[], []]
    assert [(run.first, run.stop) for run in saved.known()] == [(0, _BLOCKS)]
    assert saved.abandoned == []


def test_a_record_that_is_cut_short_ends_the_epoch(saved: _Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """A record of which a full disk takes a part protects nothing: the sealed epochs are given up."""
    write = os.write
    with monkeypatch.context() as full:
        full.setattr(os, "write", lambda fd, data: write(fd, data[:-1]))
        saved.keep_blocks()
    assert (saved.abandoned, saved.log.pending) == ([1], [])


def test_old_blocks_leave_as_much_room_as_they_take(saved: _Saved, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where copies take more than the file system has left, the sealed epochs are given up for the job's room."""
    monkeypatch.setattr(undo_log, "_ROOM_CHECK_BYTES", 1)
    monkeypatch.setattr(os, "statvfs", lambda fd: SimpleNamespace(f_bavail=_BLOCKS - 1, f_frsize=_BLOCK))
    saved.keep_blocks()
    assert (saved.abandoned, saved.log.pending) == ([1], [])
