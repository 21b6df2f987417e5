"""Attributes stay true when the answer to a lookup reaches the kernel after a change that it knows nothing of.

mkdir(2) over a name that is taken makes the kernel look that up anew. The answer is written and then waits for a thread to run;
another program may change the directory meanwhile.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from support import late_answers
from support.overlay import PASSES, Overlay
from support.until import until

SECONDS = 20
FIELDS = ("st_mode", "st_nlink", "st_uid", "st_size", "st_blocks", "st_mtime_ns", "st_ctime_ns")


def _store_through_mapping(file: Path) -> None:
    fd = os.open(file, os.O_RDWR)
    with mmap.mmap(fd, 1) as mapped:
        mapped[0:1] = b"m"
    os.close(fd)


IN_DIRECTORIES: dict[str, Callable[[Path], object]] = {
    "create": lambda path: (path / "new").touch(),
    "unlink": lambda path: (path / "file").unlink(),
    "mkdir": lambda path: (path / "new").mkdir(),
    "rmdir": lambda path: (path / "folder").rmdir(),
    "symlink": lambda path: (path / "new").symlink_to("x"),
    "mknod": lambda path: os.mkfifo(path / "new"),
    "link": lambda path: os.link(path / "file", path / "new"),
    "rename": lambda path: os.rename(path / "file", path / "new"),
    "rename-out": lambda path: os.rename(path / "file", path.parents[1] / "out"),
    "rename-in": lambda path: os.rename(path.parents[1] / "in", path / "new"),
    "chmod": lambda path: path.chmod(0o700),
    "setxattr": lambda path: os.setxattr(path, "user.new", b"1"),
    "removexattr": lambda path: os.removexattr(path, "user.old"),
}
OF_FILES: dict[str, Callable[[Path], object]] = {
    "write": lambda path: path.write_bytes(b"longer than before"),
    "truncate": lambda path: os.truncate(path, 1),
    "utime": lambda path: os.utime(path, (5, 5)),
    "mapping": _store_through_mapping,
    "file-link": lambda path: os.link(path, path.parents[1] / "linked"),
    "file-chmod": lambda path: path.chmod(0o600),
    "file-setxattr": lambda path: os.setxattr(path, "user.new", b"1"),
    "file-removexattr": lambda path: os.removexattr(path, "user.old"),
    # By another name: the looker has the directory of this one locked.
    "file-rename": lambda path: os.rename(path.parents[1] / "second-name", path.parents[1] / "renamed"),
}
CHANGES = {**IN_DIRECTORIES, **OF_FILES}


def _make(root: Path) -> dict[str, Path]:
    """Make what is changed, and return its paths by change."""
    # mkdir(2) waits with its parent locked: each has one of its own.
    paths = {change: root / change / (late_answers.LATE.decode() + change) for change in CHANGES}
    for change, path in paths.items():
        path.parent.mkdir()
        if change in IN_DIRECTORIES:
            (path / "folder").mkdir(parents=True)
            (path / "file").write_bytes(b"file")
        else:
            path.write_bytes(b"file")
        os.setxattr(path, "user.old", b"1")
    os.link(paths["file-rename"], root / "second-name")
    (root / "in").write_bytes(b"in")
    return paths


def _look_again(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        path.mkdir()


@pytest.mark.mount
@pytest.mark.parametrize("lately", [False, True])
def test_a_late_answer_leaves_no_attributes_from_before_a_change(short_tmp: Path, lately: bool) -> None:
    """Each kind of change, beside a lookup that was carried out before and is answered after it.

    ``lately``: of what had been changed a moment before.
    """
    root, control = short_tmp / "root", short_tmp / "control"
    root.mkdir()
    control.mkdir()
    paths = _make(root)
    interpreter = (sys.executable, late_answers.__file__, os.fspath(control))
    with Overlay(root, short_tmp / "worker.sock", interpreter=interpreter) as overlay:
        for path in paths.values():
            if lately:
                os.setxattr(path, "user.lately", b"1")
            path.lstat()
        (control / "armed").touch()
        lookers = [threading.Thread(target=_look_again, args=(path,), daemon=True) for path in paths.values()]
        for looker in lookers:
            looker.start()
        until("the lookups", lambda: {path.name for path in paths.values()} <= set(os.listdir(control)))
        before = {change: path.lstat() for change, path in paths.items()}
        # So that the file system's clock, which ticks every few milliseconds, shows every change.
        time.sleep(0.05)
        for change, path in paths.items():
            CHANGES[change](path)
        (control / "go").touch()
        for looker in lookers:
            looker.join(SECONDS)
            assert not looker.is_alive()
        # Longer than attributes of a file that is written, or was changed lately, live.
        time.sleep(0.2)
        for change, path in paths.items():
            shown, true = path.lstat(), (overlay.backing / path.relative_to(root)).lstat()
            assert true.st_ctime_ns != before[change].st_ctime_ns, change
            differences = {field for field in FIELDS if getattr(shown, field) != getattr(true, field)}
            if change in OF_FILES and not PASSES:
                # With its write cache the kernel has a time of its own.
                differences.discard("st_ctime_ns")
            assert not differences, (change, differences)
