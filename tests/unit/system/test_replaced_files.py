"""Replacing a file whole, and locking one that is still at its path."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

import pytest

from ciuic.system.disk import APPEND_FILE, Disk, open_locked, remove_leftovers, temporary_name


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("by_descriptor", [False, True])
def test_a_file_is_replaced_whole_or_not_at_all(tmp_path: Path, *, shared: bool, by_descriptor: bool) -> None:
    """A failure leaves the old file and nothing beside it; permissions do not depend on the umask."""
    (tmp_path / "file").write_bytes(b"old")
    # Left by a process that was killed.
    (tmp_path / "file.tmp").write_bytes(b"longer than the new one")
    dir_fd = os.open(tmp_path, os.O_RDONLY) if by_descriptor else None
    path = "file" if by_descriptor else tmp_path / "file"
    before = os.umask(0o077)
    try:
        with suppress(KeyboardInterrupt), Disk().replacing(path, dir_fd=dir_fd, shared=shared) as fd:
            os.write(fd, b"half")
            raise KeyboardInterrupt
        assert (tmp_path / "file").read_bytes() == b"old"
        Disk().replace_file(path, b"new", mode=0o644, dir_fd=dir_fd, shared=shared)
    finally:
        os.umask(before)
        if dir_fd is not None:
            os.close(dir_fd)
    assert (tmp_path / "file").read_bytes() == b"new"
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o644
    assert sorted(os.listdir(tmp_path)) == (["file", "file.tmp"] if shared else ["file"])


def test_leftovers_of_one_file_alone_are_removed(tmp_path: Path) -> None:
    """Temporary files of killed writers go, also of a name that is as long as a name can be; nothing else does."""
    name = "n" * 255
    for left in (temporary_name(tmp_path / name), temporary_name(tmp_path / name)):
        Path(left).touch()
    others = {".other.0123456789ab.tmp", f"{name[:200]}.tmp", f".{name[:200]}.0123456789ab.tmp.kept"}
    for other in others:
        (tmp_path / other).touch()
    remove_leftovers(tmp_path / name)
    assert set(os.listdir(tmp_path)) == others


def test_a_lock_on_a_removed_file_is_taken_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lock file that its holder removes between open and lock is made anew, so that the lock excludes others."""
    path, real = tmp_path / "lock", os.open
    path.touch()

    def removed(*args: object, **options: object) -> int:
        fd = real(*args, **options)  # type: ignore[arg-type]
        monkeypatch.undo()
        path.unlink()
        return fd

    monkeypatch.setattr(os, "open", removed)
    fd = open_locked(path)
    try:
        assert os.path.samestat(os.fstat(fd), path.stat())
        with pytest.raises(BlockingIOError):
            open_locked(path)
    finally:
        os.close(fd)


def test_a_pipe_in_the_place_of_a_log_is_not_waited_for(tmp_path: Path) -> None:
    """Opening it for writing fails at once while nobody reads it."""
    os.mkfifo(tmp_path / "log")
    with pytest.raises(OSError, match="No such device or address"):
        os.open(tmp_path / "log", APPEND_FILE, 0o600)
