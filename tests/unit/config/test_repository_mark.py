"""Tests of the mark by which a root tells an absent repository disk from a repository never made."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from support.overlay import state_of

from ciuic.config.repository_mark import absent_mount_point, mark_of, read_mark, read_mark_at, write_mark
from ciuic.daemon.base import repository_store as store_module
from ciuic.daemon.base.repository_store import Store
from ciuic.errors import NotFound
from ciuic.protocol.state_directory import open_state
from ciuic.repository import Repository
from ciuic.system.mountinfo import Mount, parse

ROOT_MOUNT = b"21 1 8:1 / / rw - ext4 /dev/a rw\n"


def mounts(*points: Path) -> list[Mount]:
    lines = [
        b"%d 21 8:%d / %s rw - ext4 /dev/b rw\n" % (30 + n, 2 + n, os.fsencode(p))
        for n, p in enumerate(points)
    ]
    return parse(ROOT_MOUNT + b"".join(lines))


@pytest.fixture
def root_fd(tmp_path: Path) -> Iterator[int]:
    (tmp_path / "root").mkdir()
    fd = os.open(tmp_path / "root", os.O_PATH)
    os.close(open_state(fd).fd)
    yield fd
    os.close(fd)


def test_a_mark_is_read_as_it_was_written(root_fd: int, tmp_path: Path) -> None:
    """A mark reads back, also when replaced or written twice; a damaged or missing one counts as none."""
    assert read_mark(root_fd) is None
    for path in (tmp_path / "a", tmp_path / "b", tmp_path / "b"):
        mark = mark_of(path, "f" * 32, mounts())
        write_mark(root_fd, mark)
        assert read_mark(root_fd) == read_mark_at(tmp_path / "root") == mark
    assert os.listdir(state_of(tmp_path / "root")) == ["repository"]
    for junk in (b"", b"\xff" * 40, b"\x93\xa1a\xa1b\xa1\xff"):
        (state_of(tmp_path / "root") / "repository").write_bytes(junk)
        assert read_mark(root_fd) is None
    assert read_mark_at(tmp_path / "nothing") is None


def test_an_absent_disk_is_known_by_its_mount_point(tmp_path: Path) -> None:
    """A repository counts as absent only if its path led to another file system when it was marked."""
    disk, path = tmp_path / "disk", tmp_path / "disk/repository"
    mark = mark_of(path, "f" * 32, mounts(disk))
    assert absent_mount_point(path, [mark], mounts()) == os.fsencode(disk)
    assert absent_mount_point(path, [mark], mounts(disk)) is None
    assert absent_mount_point(tmp_path / "other", [mark], mounts()) is None
    assert absent_mount_point(path, [], mounts()) is None


@pytest.fixture
def mounted(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Fake the mount table below the root file system."""
    points: list[Path] = []
    monkeypatch.setattr(store_module.mountinfo, "read", lambda: mounts(*points))
    return points


def test_a_new_daemon_makes_no_repository_below_the_mount_point(
    root_fd: int, tmp_path: Path, mounted: list[Path]
) -> None:
    """A new daemon makes no repository below the mount point of a marked disk that is not mounted.

    Once the disk is back the repository is used; one that was removed from its own disk is made anew, with a
    log line.
    """
    disk = tmp_path / "disk"
    path = disk / "repository"
    disk.mkdir()
    mounted.append(disk)
    Store(path, block_bytes=4096).ensure([root_fd])
    path.rename(tmp_path / "away")
    mounted.clear()
    store = Store(path, block_bytes=4096)
    for _ in range(2):
        with pytest.raises(NotFound, match=f"belongs at {disk}, which is not mounted"):
            store.ensure([root_fd])
    assert os.listdir(disk) == []
    assert "not mounted" in store.status().missing
    mounted.append(disk)
    (tmp_path / "away").rename(path)
    store.ensure([root_fd])
    assert store.status().missing == ""
    path.rename(tmp_path / "removed")
    with structlog.testing.capture_logs() as logs:
        Store(path, block_bytes=4096).ensure([root_fd])
    assert Repository.exists(path)
    assert [entry["event"] for entry in logs] == ["repository_gone_and_made_anew"]


def test_root_that_cannot_be_marked_is_no_error(root_fd: int, tmp_path: Path) -> None:
    """The repository is made and used although the root cannot be marked."""
    state_of(tmp_path / "root").rmdir()
    Store(tmp_path / "repository", block_bytes=4096).ensure([root_fd])
    assert Repository.exists(tmp_path / "repository")
