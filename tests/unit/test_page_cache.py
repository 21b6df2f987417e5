"""Reading that leaves the page cache as it found it, on real file systems, as cachestat(2) sees them."""

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

from ciuic import page_cache
from ciuic.page_cache import DropBehind, Lookout, Span, cold_spans, drop, forbid_readahead, read_in
from ciuic.repository import Repository

pytestmark = pytest.mark.mount  # a loop device, that is

_PAGE = mmap.PAGESIZE
_NR_CACHESTAT = 451
_MIB = 1 << 20
_PAGES = 9 * _MIB // _PAGE + 1
_WARM = {0, 3, 4, 5, 100, 1024, 1500, _PAGES - 1}
"""Pages that a job uses."""


@pytest.fixture(scope="module", params=["ext4", "xfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    needs(missing(request.param))
    with small_disk(tmp_path_factory.mktemp("disk"), request.param) as point:
        _needs_cachestat(point)
        yield point


def _cached_pages(fd: int, offset: int, length: int) -> int:
    asked, found = (ctypes.c_uint64 * 2)(offset, length), (ctypes.c_uint64 * 5)()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.syscall(ctypes.c_long(_NR_CACHESTAT), ctypes.c_uint(fd), asked, found, ctypes.c_uint(0)) != 0:
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
    """The file on disk, and nothing of it in memory but these pages."""
    with path.open("wb") as file:
        file.write(os.urandom((_PAGES - 1) * _PAGE + 3))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    with path.open("rb", buffering=0) as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        for page in pages:
            os.pread(file.fileno(), 1, page * _PAGE)


def test_what_was_not_resident_is_not_afterwards_and_what_was_is(disk: Path) -> None:
    """To the page, over several runs, the last page of an odd size included."""
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


def test_what_the_kernel_reads_ahead_is_nobodys(disk: Path) -> None:
    """A file that is read from end to end, as fast as the kernel can, is afterwards in memory as far as it was before."""
    path = disk / "file"
    _warmed(path, _WARM)
    size_bytes, run_bytes = path.stat().st_size, _MIB
    with path.open("rb", buffering=0) as file:
        fd = file.fileno()
        lookout = Lookout(fd, size_bytes)
        behind = DropBehind()
        for offset in range(0, size_bytes, run_bytes):
            length = min(run_bytes, size_bytes - offset)
            spans = lookout.reach(offset + length)
            assert len(os.pread(fd, length, offset)) == length
            behind.end(fd, spans)
        behind.close()
    assert _resident(path) == _WARM


def test_a_lookout_tells_each_page_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However its windows and the pieces that are asked for meet, and never behind where it was asked for."""
    path = disk / "file"
    _warmed(path, _WARM)
    size_bytes = path.stat().st_size
    monkeypatch.setattr(page_cache, "_LOOKOUT_BYTES", 6 * _PAGE)
    told: set[int] = set()
    with path.open("rb", buffering=0) as file:
        expected = _pages_of(cold_spans(file.fileno(), 0, size_bytes))
        lookout = Lookout(file.fileno(), size_bytes)
        end = 0
        while end < size_bytes:
            end = min(size_bytes, end + 7 * _PAGE + 100)
            pages = _pages_of(lookout.reach(end))
            assert not pages & told
            assert all(page * _PAGE < end for page in pages)
            told |= pages
            assert expected & set(range(end // _PAGE)) <= told
    assert told == expected


def _pages_of(spans: list[Span]) -> set[int]:
    return {page for offset, length in spans for page in range(offset // _PAGE, (offset + length) // _PAGE)}


def test_what_was_written_and_is_not_on_disk_stays(disk: Path) -> None:
    """Dirty pages are somebody's work."""
    path = disk / "dirty"
    _warmed(path, set())
    with path.open("r+b", buffering=0) as file:
        os.pwrite(file.fileno(), b"x", 7 * _PAGE)
        drop(file.fileno(), [(0, _PAGE), (7 * _PAGE, _PAGE)])
        assert os.pread(file.fileno(), 1, 7 * _PAGE) == b"x"
        assert 7 in _resident(path)


def test_what_has_no_pages_is_no_error(tmp_path: Path) -> None:
    """A pipe, and an empty file."""
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
    """Neither the files that it read nor the packs that it wrote push out what a job uses."""
    root, repository = disk / "root", disk / "repository"
    root.mkdir()
    _warmed(root / "large", _WARM)
    _warmed(root / "foreign", _WARM)
    os.chown(root / "foreign", 12345, 12345)
    (root / "foreign").chmod(0o600)
    Repository.create(repository).close()
    command = [sys.executable, "-m", "ciuic.daemon.capture", "--offline", "--repo", str(repository)]
    subprocess.run([*command, "--root", str(root)], check=True, timeout=120, capture_output=True)
    assert _resident(root / "large") == _WARM
    assert _resident(root / "foreign") == _WARM
    data = max((repository / "packs").glob("*.pack"), key=lambda path: path.stat().st_size)
    assert data.stat().st_size > 18 * _MIB
    with data.open("rb") as file:
        assert _cached_pages(file.fileno(), 0, 0) <= 16  # the footer, and what its reader looked at


def test_without_descriptors_pages_are_dropped_at_once(disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was read stays read: a courtesy to the page cache never costs a snapshot a file."""
    path = disk / "read"
    path.write_bytes(bytes(_MIB))
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
        drop(fd, [(0, _MIB)])
        behind = DropBehind()
        spans = behind.begin(fd, 0, _MIB)
        os.pread(fd, _MIB, 0)
        assert _cached_pages(fd, 0, _MIB) == _MIB // _PAGE

        def refuse(fd: int) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(os, "dup", refuse)
        behind.end(fd, spans)
        behind.close()
        assert _cached_pages(fd, 0, _MIB) == 0
    finally:
        os.close(fd)
