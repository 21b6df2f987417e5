"""System calls on an open file do what they do by its path."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ciuic.fuse_layer.system import syscalls

_SECOND_NS = 10**9
_STATX_BASIC_AND_BIRTH = 0xFFF


@pytest.mark.parametrize(
    ("atime", "mtime", "wanted"),
    [(None, 7, (1, 7)), (5, None, (5, 2)), (5, 7, (5, 7)), (None, -3, (1, -3))],
)
def test_times_are_set_by_a_descriptor(
    tmp_path: Path, atime: int | None, mtime: int | None, wanted: tuple[int, int]
) -> None:
    """A time is set by a read-only descriptor of a file without a name, and one that is left out stays."""
    path = tmp_path / "file"
    path.touch()
    os.utime(path, (1, 2))
    fd = os.open(path, os.O_RDONLY)
    try:
        path.unlink()
        syscalls.utimensat(fd, *(None if time is None else time * _SECOND_NS for time in (atime, mtime)))
        assert (os.fstat(fd).st_atime, os.fstat(fd).st_mtime) == wanted
        syscalls.utimensat(fd, None, None, mtime_now=True)
        assert os.fstat(fd).st_mtime_ns > 10**18
    finally:
        os.close(fd)


def test_statx_of_a_descriptor_is_that_of_the_path(tmp_path: Path) -> None:
    """statx(2) finds the same by a descriptor as by a path."""
    path = tmp_path / "file"
    path.touch()
    fd = os.open(path, os.O_RDONLY)
    try:
        by_path = syscalls.statx(os.fsencode(path), _STATX_BASIC_AND_BIRTH, follow=True)
        assert syscalls.statx(fd, _STATX_BASIC_AND_BIRTH, follow=True) == by_path
        assert by_path.mask
    finally:
        os.close(fd)
