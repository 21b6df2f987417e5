"""Tests of reading without changing the page cache, on real file systems, with cachestat(2)."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.small_disks import missing, small_disk

from ciuic.repository import Repository
from ciuic.system import page_cache
from ciuic.system.page_cache import DropBehind, Lookout, Span, cold_spans, drop, forbid_readahead, read_in

# The file system is on a loop device.
pytestmark = pytest.mark.mount

_PAGE = mmap.PAGESIZE
_NR_CACHESTAT = 451
_MIB = 1 << 20
_PAGES = 9 * _MIB // _PAGE + 1
_WARM = {0, 3, 4, 5, 100, 1024, 1500, _PAGES - 1}
"""Page numbers that a job uses."""


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    needs(missing(request.param))
    with small_disk(tmp_path_factory.mktemp("disk"), request.param) as point:
        _needs_cachestat(point)
        yield point


def _cached_pages(fd: int, offset: int, length: int) -> int:
    byte_range, found = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    libc = ctypes.CDLL(None, use_errno=True)
    if (
        libc.syscall(ctypes.c_long(_NR_CACHESTAT), ctypes.c_uint(fd), byte_range, found, ctypes.c_uint(0))
        != 0
    ):
        raise OSError(ctypes.get_errno(), "cachestat")
    return int(found[0])


def _needs_cachestat(place: Path) -> None:
    fd = os.open(place, os.O_RDONLY | os.O_DIRECTORY)
    try:
        _cached_pages(fd, 0, _PAGE)
    except OSError as error:
        needs(f"the kernel has no cachestat: {error}")
    finally:
        os.close(fd)


def _resident(path: Path) -> set[int]:
    with path.open("rb") as file:
        return {page for page in range(_PAGES) if _cached_pages(file.fileno(), page * _PAGE, _PAGE)}


def _warmed(path: Path, pages: set[int]) -> None:
    """Write the file to disk, and leave only these pages of it in memory."""
    with path.open("wb") as file:
        file.write(os.urandom((_PAGES - 1) * _PAGE + 3))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(file.fileno(), 1, page * _PAGE)


def test_only_pages_resident_before_are_resident_after(disk: Path) -> None:
    """Pages not resident before a read are dropped after it, to the page, also an odd last one."""
    path = disk / "file"
    _warmed(path, _WARM)
    assert _resident(path) == _WARM
    size_bytes, run_bytes = path.stat().st_size, 4 * _MIB
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        forbid_readahead(fd)
        for offset in range(0, size_bytes, run_bytes):
            length = min(run_bytes, size_bytes - offset)
            spans = cold_spans(fd, offset, length)
            read_in(fd, spans)
            assert len(os.pread(fd, length, offset)) == length
            drop(fd, spans)
    assert _resident(path) == _WARM


def test_pages_read_ahead_are_dropped(disk: Path) -> None:
    """Pages that the kernel reads ahead during a sequential read are dropped again."""
    path = disk / "file"
    _warmed(path, _WARM)
    size_bytes, run_bytes = path.stat().st_size, _MIB
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        lookout = Lookout(fd, size_bytes)
        drop_behind = DropBehind()
        for offset in range(0, size_bytes, run_bytes):
            length = min(run_bytes, size_bytes - offset)
            spans = lookout.reach(offset + length)
            assert len(os.pread(fd, length, offset)) == length
            drop_behind.end(fd, spans)
        drop_behind.close()
    assert _resident(path) == _WARM


def test_a_lookout_reports_each_page_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookout reports each page once, for any windows and pieces, and never before the offset asked for."""
    path = disk / "file"
    _warmed(path, _WARM)
    size_bytes = path.stat().st_size
    monkeypatch.setattr(page_cache, "_LOOKOUT_BYTES", 6 * _PAGE)
    reported: set[int] = set()
    with path.open("rb", buffering=0) as file:
        expected = _pages_of(cold_spans(file.fileno(), 0, size_bytes))
        lookout = Lookout(file.fileno(), size_bytes)
        end = 0
        while end < size_bytes:
            end = min(size_bytes, end + 7 * _PAGE + 100)
            pages = _pages_of(lookout.reach(end))
            assert not pages & reported
            assert all(page * _PAGE < end for page in pages)
            reported |= pages
            assert expected & set(range(end // _PAGE)) <= reported
    assert reported == expected


def test_a_hole_of_a_terabyte_is_passed_over(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hole that truncate(2) makes at once costs a lookout a few windows, and the data behind it are still reported."""
    path = disk / "holes"
    size_bytes = 1 << 40
    with path.open("wb") as file:
        file.write(b"x" * _PAGE)
        file.truncate(size_bytes)
        file.seek(size_bytes - _PAGE)
        file.write(b"x" * _PAGE)
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    windows = []

    def counted(fd: int, offset: int, length: int) -> list[Span]:
        windows.append(offset)
        return cold_spans(fd, offset, length)

    monkeypatch.setattr(page_cache, "cold_spans", counted)
    with path.open("rb", buffering=0) as file:
        found = Lookout(file.fileno(), size_bytes).reach(size_bytes)
    assert len(windows) < 10
    assert {(0, True), (size_bytes - _PAGE, True)} <= {
        (at, any(offset <= at < offset + length for offset, length in found))
        for at in (0, size_bytes - _PAGE)
    }


def _pages_of(spans: list[Span]) -> set[int]:
    return {page for offset, length in spans for page in range(offset // _PAGE, (offset + length) // _PAGE)}


def test_dirty_pages_stay(disk: Path) -> None:
    """Dirty pages are kept, as they are not on disk."""
    path = disk / "dirty"
    _warmed(path, set())
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"x", 7 * _PAGE)
        drop(file.fileno(), [(0, _PAGE), (7 * _PAGE, _PAGE)])
        assert os.pread(file.fileno(), 1, 7 * _PAGE) == b"x"
        assert 7 in _resident(path)


def test_files_without_pages_are_no_error(tmp_path: Path) -> None:
    """A pipe and an empty file, which have no pages, are no error."""
    reading, writing = os.pipe()
    try:
        forbid_readahead(reading)
        read_in(reading, cold_spans(reading, 0, _PAGE))
        drop(reading, [(0, _PAGE)])
    finally:
        os.close(reading)
        os.close(writing)
    (tmp_path / "empty").touch()
    with (tmp_path / "empty").open("rb") as file:
        assert cold_spans(file.fileno(), 0, 0) == []


def test_a_capture_leaves_the_page_cache_as_it_was(disk: Path) -> None:
    """A capture leaves the page cache unchanged by the files it reads and the packs it writes."""
    root, repository = disk / "root", disk / "repository"
    root.mkdir()
    _warmed(root / "large", _WARM)
    _warmed(root / "foreign", _WARM)
    os.chown(root / "foreign", 12345, 12345)
    (root / "foreign").chmod(0o600)
    Repository.create(repository).close()
    command = [sys.executable, "-m", "ciuic.daemon.capture.process", "--offline", "--repo", str(repository)]
    subprocess.run([*command, "--root", str(root)], check=True, timeout=120, capture_output=True)
    assert _resident(root / "large") == _WARM
    assert _resident(root / "foreign") == _WARM
    data = max((repository / "packs").glob("*.pack"), key=lambda path: path.stat().st_size)
    assert data.stat().st_size > 18 * _MIB
    with data.open("rb") as file:
        # These are the footer, and what its reader touched.
        assert _cached_pages(file.fileno(), 0, 0) <= 16


def test_without_descriptors_pages_are_dropped_at_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages are dropped at once without descriptors to spare, and no file is left out of the snapshot."""
    path = disk / "read"
    path.write_bytes(bytes(_MIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        drop(fd, [(0, _MIB)])
        drop_behind = DropBehind()
        spans = drop_behind.begin(fd, 0, _MIB)
        os.pread(fd, _MIB, 0)
        assert _cached_pages(fd, 0, _MIB) == _MIB // _PAGE

        def refuse(fd: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "dup", refuse)
        drop_behind.end(fd, spans)
        drop_behind.close()
        assert _cached_pages(fd, 0, _MIB) == 0
    finally:
        os.close(fd)
