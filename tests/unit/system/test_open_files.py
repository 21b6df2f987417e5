"""Search for open files beside mounts and processes that do not answer."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic.system import open_files
from ciuic.system.open_files import find_open_files


@pytest.fixture
def top(tmp_path: Path) -> Path:
    """Make a directory with a file, and a directory in it where something is mounted according to `proc`."""
    made = tmp_path / "top"
    (made / "mnt").mkdir(parents=True)
    (made / "file").write_bytes(b"x")
    (made / "mnt" / "far").write_bytes(b"x")
    return made


@pytest.fixture
def proc(tmp_path: Path, top: Path) -> Path:
    """Make a /proc in which process 77 has both files open, the first for writing, and works at the mount."""
    made = tmp_path / "proc"
    (made / "self").mkdir(parents=True)
    (made / "self" / "mountinfo").write_text(f"30 20 0:99 / {top}/mnt rw - fuse far rw\n")
    process = made / "77"
    for name in ("fd", "fdinfo"):
        (process / name).mkdir(parents=True)
    for number, name, flags in ((3, "file", "0100001"), (4, "mnt/far", "0100000")):
        (process / "fd" / str(number)).symlink_to(top / name)
        inode = os.stat(top / name).st_ino
        (process / "fdinfo" / str(number)).write_text(
            f"pos:\t0\nflags:\t{flags}\nmnt_id:\t30\nino:\t{inode}\n"
        )
    (process / "cmdline").write_bytes(b"job\0")
    (process / "comm").write_bytes(b"job\n")
    (process / "maps").write_bytes(b"")
    (process / "cwd").symlink_to(top / "mnt")
    return made


def test_nothing_at_or_below_another_mount_is_looked_up(
    top: Path, proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name below another mount is never looked up, whoever has it open: the mount may hang for ever."""
    looked_up = []
    lstat = os.lstat

    def noted(path: bytes) -> os.stat_result:
        looked_up.append(path)
        return lstat(path)

    monkeypatch.setattr(open_files.os, "lstat", noted)
    found = find_open_files([os.fsencode(top)], proc=proc)
    monkeypatch.undo()
    assert [(one.path, one.pid, one.how) for one in found] == [(os.fsencode(top / "file"), 77, "writing")]
    assert os.fsencode(top / "file") in looked_up
    assert not [path for path in looked_up if path.startswith(os.fsencode(top / "mnt"))]


def test_a_process_that_does_not_answer_ends_the_search(top: Path, proc: Path) -> None:
    """A read of /proc that blocks is given up after the time of the search, with what was found before."""
    blocked = proc / "78"
    blocked.mkdir()
    os.mkfifo(blocked / "cmdline")
    # Whichever of the two comes first.
    found = find_open_files([os.fsencode(top)], proc=proc, max_seconds=0.2)
    assert {one.pid for one in found} <= {77}
    # Lets the thread end.
    os.close(os.open(blocked / "cmdline", os.O_RDWR))
