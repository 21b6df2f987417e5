"""Facts about processes that choose their own names, and the search for open files beside mounts and processes that do not answer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.second_user import MADE_UP

from ciuic.system import mountinfo, open_files, processes
from ciuic.system.open_files import find_open_files
from ciuic.system.service_manager import unit_of


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


@contextmanager
def named(name: bytes) -> Iterator[int]:
    """Run a process of another user under a name of its choice, and keep it until the block ends."""
    code = (
        f"import ctypes, os, sys\nos.setgroups([]); os.setresgid({MADE_UP.gid}, {MADE_UP.gid}, {MADE_UP.gid})\n"
        f"os.setresuid({MADE_UP.uid}, {MADE_UP.uid}, {MADE_UP.uid})\n"
        f"ctypes.CDLL(None).prctl(15, {name!r}, 0, 0, 0)\nprint('ready', flush=True)\nsys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == b"ready\n"
            yield child.pid
        finally:
            child.stdin.close()


@pytest.mark.mount
@pytest.mark.parametrize("end", [b"\r", b"\x0b", b"\x0c", b"\x1c", b"\x85", "\u2028".encode(), b"\n"])
def test_no_process_gets_another_owner_by_its_name(end: bytes) -> None:
    """A process that has a line of /proc/PID/status in its name keeps its owner."""
    with named(b"x" + end + b"Uid: 0") as pid:
        assert processes.owner(pid) == MADE_UP.uid


def test_a_zombie_has_ended_for_who_asks_for_its_mounts() -> None:
    """A process that nobody has waited for yet has no mounts any more, and no command fails because of it."""
    with subprocess.Popen(["true"]) as child:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        with pytest.raises(ProcessLookupError):
            mountinfo.read(Path(f"/proc/{child.pid}"))


def test_the_pid_of_a_descriptor_is_read_from_whole_lines(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A name of a file in the description of a descriptor does not count as its pid."""
    described = tmp_path / "fdinfo"
    described.write_bytes(b"pos:\t0\nUserFiles:\t1\n    0: /srv/\xff\rPid:\t1\nPid:\t77\n")
    monkeypatch.setattr(
        processes, "open", lambda path, *how, **more: open(described, *how, **more), raising=False
    )
    assert processes.pid_of(3) == 77


def test_a_service_is_found_whatever_its_groups_are_named() -> None:
    """The service of a process in a group below it is found whatever characters the group's name has."""
    for end in ("\r", "\x0b", "\x0c", "\x1c", "\x85", "\u2028", ":"):
        assert unit_of(f"1:cpu:/system.slice/a.service/x{end}0::/y\n0::/b.service\n") == "a.service"
        assert unit_of(f"0::/user.slice/user@7.service/x{end}y.service0\n") is None
