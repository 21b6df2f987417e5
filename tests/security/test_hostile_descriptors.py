"""A local user who holds very many descriptors, or descriptors of very deep directories."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.deep_trees import remove_chain
from support.second_user import MADE_UP

from ciuic import bypass, long_names
from ciuic.bypass import find_bypassing

DEEP_NAME = b"x" * 200
_HOLDER = """
import os, sys
levels, every = int(sys.argv[1]), int(sys.argv[2])
os.setgroups([]); os.setresgid(54321, 54321, 54321); os.setresuid(54321, 54321, 54321)
fd, held = os.open(".", os.O_RDONLY), []
name = "x" * 200
for level in range(levels):
    try:
        os.mkdir(name, dir_fd=fd)
    except FileExistsError:
        pass
    below = os.open(name, os.O_RDONLY, dir_fd=fd)
    if level % every:
        os.close(fd)
    else:
        held.append(fd)
    fd = below
if len(sys.argv) > 3:
    held.append(os.open("f", os.O_WRONLY | os.O_CREAT, dir_fd=fd))
print("ready", flush=True)
sys.stdin.read()
"""


@contextmanager
def holding(top: Path, levels: int, every: int, *more: str) -> Iterator[int]:
    """A process of another user that holds every so manieth directory of a chain below ``top``, and the deepest; its pid."""
    os.chown(top, MADE_UP.uid, MADE_UP.gid)
    child = subprocess.Popen(
        [sys.executable, "-c", _HOLDER, str(levels), str(every), *more],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=top,
    )
    assert child.stdin is not None
    assert child.stdout is not None
    try:
        assert child.stdout.readline() == b"ready\n"
        yield child.pid
    finally:
        child.stdin.close()
        child.wait(60)
        child.stdout.close()
        remove_chain(top, DEEP_NAME)


@pytest.fixture
def counted_opens(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Every path that the scan opens."""
    opened: list[bytes] = []
    real = os.open

    def counting(path: str | bytes | Path, *arguments: object, **more: object) -> int:
        opened.append(os.fsencode(path))
        return real(path, *arguments, **more)  # type: ignore[arg-type]

    for module in (bypass, long_names):
        if hasattr(module, "os"):
            monkeypatch.setattr(module.os, "open", counting)
    return opened


def test_directories_deeper_than_any_path_keep_no_other_root_from_being_looked_after(
    tmp_path: Path, counted_opens: list[bytes]
) -> None:
    """Whoever holds them beside a root is told from who holds them in it, with a few system calls for each."""
    root, beside = tmp_path / "root", tmp_path / "beside"
    root.mkdir()
    beside.mkdir()
    with holding(beside, 3000, 100) as pid:
        assert pid not in [process.pid for process in find_bypassing(root)]
        assert len(counted_opens) < 30 * 40
        (found,) = [process for process in find_bypassing(beside) if process.pid == pid]
        assert found.writes
        assert found.known


def test_what_cannot_be_judged_is_not_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file in a directory too deep, or no time left: the process is named as one that may go round, and no accusation."""
    root, beside = tmp_path / "root", tmp_path / "beside"
    root.mkdir()
    beside.mkdir()
    with holding(beside, 50, 10, "and a file") as pid:
        (found,) = [process for process in find_bypassing(root) if process.pid == pid]
        assert (found.writes, found.known) == (True, False)
        (found,) = [process for process in find_bypassing(beside) if process.pid == pid]
        assert found.known
        monkeypatch.setattr(bypass, "Climber", lambda: long_names.Climber(seconds=0))
        (found,) = [process for process in find_bypassing(root) if process.pid == pid]
        assert not found.known


def test_deep_directories_of_other_file_systems_are_not_looked_into(
    counted_opens: list[bytes], tmp_path: Path
) -> None:
    """The mount id of a descriptor says that it is not about this root, before anything else is done about it."""
    top = Path("/dev/shm") / f"ciuic-test-{os.getpid()}"
    top.mkdir()
    try:
        with holding(top, 60, 1) as pid:
            before = len(counted_opens)
            assert pid not in [process.pid for process in find_bypassing(tmp_path)]
            assert not [path for path in counted_opens[before:] if path.startswith(b"..")]
    finally:
        top.rmdir()
