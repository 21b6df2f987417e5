"""Captures on file systems that share extents: what the packs hold lies where the file lies, and is right all the same."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.extents import overlap_bytes, shared_extents

from ciuic.daemon.capture import run_job
from ciuic.daemon.capture_job import CaptureJob, RootJob
from ciuic.daemon.capture_root import Report
from ciuic.repository import Repository, sharing
from ciuic.repository.blockmaps import blocks_of
from ciuic.repository.disk import Disk
from ciuic.repository.sharing import Stage, StagedFile
from ciuic.types import SnapshotId

pytestmark = pytest.mark.mount  # a loop device, that is

_MIB = 1 << 20
_BLOCK = 256 << 10


@pytest.fixture
def place(sharing_disk: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A root and a repository of their own."""
    place = sharing_disk / str(abs(hash(request.node.name)))
    (place / "root").mkdir(parents=True)
    Repository.create(place / "repository").close()
    yield place
    shutil.rmtree(place)


def _capture(place: Path, number: int = 1) -> bytes:
    """The content of "file" in the snapshot that is made."""
    id_ = f"cs-00000{number}"
    root = os.fsencode(place / "root")
    job = CaptureJob(
        repository=str(place / "repository"),
        id=id_,
        time_ns=number,
        host="",
        roots=(RootJob(path=root, excludes=()),),
    )
    run_job(job, Report(lambda _progress: None))
    with Repository.open(place / "repository") as repository:
        assert list(repository.scrub()) == []
        entry = repository.trees.entry(
            repository.snapshots.load(SnapshotId(id_)).roots[0].entry.content, b"file"
        )
        assert entry is not None
        count = blocks_of(entry.size_bytes, _BLOCK)
        ids = repository.block_maps.ids(entry.content, entry.map_height, count, 0, count)
        data = bytearray(entry.size_bytes)
        for index, chunk in ids:
            data[index * _BLOCK : (index + 1) * _BLOCK] = repository.chunks.get(chunk)
        return bytes(data)


def _packs(place: Path) -> list[tuple[int, int]]:
    return [extent for pack in (place / "repository/packs").iterdir() for extent in shared_extents(pack)]


def test_what_is_stored_as_it_is_lies_where_the_file_lies(place: Path) -> None:
    """All whole blocks of a new file of noise, by the maps of extents of both; the packs prove whole, and keep the content
    when the file changes."""
    file = place / "root/file"
    data = os.urandom(9 * _MIB + 5000)
    file.write_bytes(data)
    assert _capture(place) == data
    whole_bytes = len(data) // _BLOCK * _BLOCK
    assert overlap_bytes(_packs(place), shared_extents(file)) >= whole_bytes
    with file.open("r+b") as writing:
        writing.write(bytes(len(data)))
        os.fsync(writing.fileno())
    with Repository.open(place / "repository") as repository:
        assert list(repository.scrub()) == []
    assert _capture(place, 2) == bytes(len(data))


def test_what_compresses_well_is_compressed_all_the_same(place: Path) -> None:
    """Text takes a fraction of its size in the packs."""
    data = b"step 1000 loss 0.125\n" * 200_000
    (place / "root/file").write_bytes(data)
    assert _capture(place) == data
    assert _packs(place) == []
    assert sum(pack.stat().st_size for pack in (place / "repository/packs").iterdir()) < len(data) // 10


def test_where_nothing_can_be_shared_everything_is_written(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clone that is refused at the last moment."""
    data = os.urandom(5 * _MIB)
    (place / "root/file").write_bytes(data)
    monkeypatch.setattr(Disk, "share", lambda *_: False)
    assert _capture(place) == data
    assert overlap_bytes(_packs(place), shared_extents(place / "root/file")) == 0


@pytest.mark.parametrize("mapped", [False, True], ids=["written", "mapped"])
def test_a_file_that_changes_meanwhile_is_stored_as_it_was_read(place: Path, mapped: bool) -> None:
    """Id and bytes agree, whoever writes: every chunk proves whole in `_capture`."""
    file = place / "root/file"
    file.write_bytes(os.urandom(8 * _MIB))
    over = threading.Event()

    def write() -> None:
        with file.open("r+b", buffering=0) as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            at = 0
            while not over.is_set():
                noise = os.urandom(64 << 10)
                if mapped:
                    mapping[at : at + len(noise)] = noise
                else:
                    os.pwrite(opened.fileno(), noise, at)
                over.wait(0.001)  # every store in a shared block takes new room, and the disk is small
                at = (at + len(noise)) % (8 * _MIB)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in (1, 2):
            assert len(_capture(place, number)) == 8 * _MIB
    finally:
        over.set()
        writer.join()


def test_a_file_is_staged_some_way_ahead(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its pieces lie one after the other in what is staged, as they were when that was; a file that has become shorter is staged
    as far as it goes."""
    monkeypatch.setattr(sharing, "_WINDOW_BYTES", 4 * _MIB)
    file = place / "root/file"
    file.write_bytes(content := os.urandom(9 * _MIB + 5))
    stage = Stage(str(place / "repository/packs"))
    with file.open("r+b") as opened:
        staged = StagedFile(stage, opened.fileno(), len(content))
        for offset in range(0, 9 * _MIB, _MIB):
            if offset == 7 * _MIB:
                opened.truncate(8 * _MIB)
            found = staged.take(offset, _MIB)
            if found is None:
                assert offset == 8 * _MIB
                break
            whole = os.pread(found.file.fd, _MIB, found.offset)
            assert whole == content[offset : offset + _MIB]
            if offset % (4 * _MIB) == 0:
                os.pwrite(opened.fileno(), bytes(_MIB), min(offset + _MIB, 7 * _MIB))
        assert staged.take(9 * _MIB, 5) is None
    stage.close()


@pytest.mark.parametrize("how", ["write", "map", "same", "punch"])
@pytest.mark.parametrize("written_out", [False, True], ids=["cached", "written out"])
def test_a_stage_tells_whether_the_file_still_is_what_is_staged(
    place: Path, how: str, written_out: bool
) -> None:
    """One byte written, stored through a mapping that was there before, written as it was, or punched away; the rest of the file
    may change as it likes."""
    file = place / "root/file"
    file.write_bytes(os.urandom(8 * _MIB))
    stage = Stage(str(place / "repository/packs"))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        fd = opened.fileno()
        mapping[5 * _MIB] = 1  # this page can be stored to without a fault
        staged = stage.take(fd, 4 * _MIB, 2 * _MIB)
        assert staged is not None
        assert stage.still(fd, 4 * _MIB, 2 * _MIB, staged)
        os.pwrite(fd, b"elsewhere", 7 * _MIB)
        assert stage.still(fd, 4 * _MIB, 2 * _MIB, staged)
        if how == "map":
            mapping[5 * _MIB] = 2
        elif how == "punch":
            subprocess.run(
                ["fallocate", "-p", "-o", str(5 * _MIB), "-l", "4096", str(file)], check=True, timeout=20
            )
        else:
            os.pwrite(fd, os.pread(fd, 1, 5 * _MIB) if how == "same" else b"x", 5 * _MIB)
        if written_out:
            os.fsync(fd)
        assert not stage.still(fd, 4 * _MIB, 2 * _MIB, staged)
    stage.close()
