"""Tests of captures on file systems that share extents: packs share the file's extents, and are correct."""

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

from ciuic.daemon.capture.job import CaptureJob, RootJob
from ciuic.daemon.capture.process import Report, run_job
from ciuic.repository import Repository, extent_sharing
from ciuic.repository.block_maps import blocks_of
from ciuic.repository.extent_sharing import Stage, StagedFile
from ciuic.system.disk import Disk
from ciuic.types import SnapshotId

# The file system is on a loop device.
pytestmark = pytest.mark.mount

_MIB = 1 << 20
_BLOCK = 256 << 10


@pytest.fixture
def place(sharing_disk: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """Return a directory for a root and a repository of its own."""
    place = sharing_disk / str(abs(hash(request.node.name)))
    (place / "root").mkdir(parents=True)
    Repository.create(place / "repository").close()
    yield place
    shutil.rmtree(place)


def _capture(place: Path, number: int = 1) -> bytes:
    """Capture; return the content of "file" in the snapshot."""
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


def test_raw_chunks_share_the_extents_of_the_file(place: Path) -> None:
    """All whole blocks of a new file of noise share its extents, and the packs outlast its changes.

    Both extent maps are compared, and the packs verified.
    """
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


def test_text_is_compressed_on_sharing_file_systems(place: Path) -> None:
    """Text is compressed, and takes a fraction of its size in the packs."""
    data = b"step 1000 loss 0.125\n" * 200_000
    (place / "root/file").write_bytes(data)
    assert _capture(place) == data
    assert _packs(place) == []
    assert sum(pack.stat().st_size for pack in (place / "repository/packs").iterdir()) < len(data) // 10


def test_everything_is_written_where_nothing_can_be_shared(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Everything is written when a clone is refused at the last moment."""
    data = os.urandom(5 * _MIB)
    (place / "root/file").write_bytes(data)
    monkeypatch.setattr(Disk, "share", lambda *_: False)
    assert _capture(place) == data
    assert overlap_bytes(_packs(place), shared_extents(place / "root/file")) == 0


@pytest.mark.parametrize("mapped", [False, True], ids=["written", "mapped"])
def test_a_file_that_changes_meanwhile_is_stored_as_it_was_read(place: Path, mapped: bool) -> None:
    """Ids and bytes of a file that is written during capture agree; `_capture` verifies every chunk."""
    file = place / "root/file"
    file.write_bytes(os.urandom(8 * _MIB))
    end = threading.Event()

    def write() -> None:
        with file.open("r+b", buffering=0) as opened, mmap.mmap(opened.fileno(), 0) as mapping:
            at = 0
            while not end.is_set():
                noise = os.urandom(64 << 10)
                if mapped:
                    mapping[at : at + len(noise)] = noise
                else:
                    os.pwrite(opened.fileno(), noise, at)
                # Every store in a shared block takes new room, and the disk is small.
                end.wait(0.001)
                at = (at + len(noise)) % (8 * _MIB)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for number in (1, 2):
            assert len(_capture(place, number)) == 8 * _MIB
    finally:
        end.set()
        writer.join()


def test_a_file_is_staged_some_way_ahead(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces of a file are staged one after the other as they were, and a shortened file up to its end."""
    monkeypatch.setattr(extent_sharing, "_WINDOW_BYTES", 4 * _MIB)
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
            mebibyte = os.pread(found.file.fd, _MIB, found.offset)
            assert mebibyte == content[offset : offset + _MIB]
            if offset % (4 * _MIB) == 0:
                os.pwrite(opened.fileno(), bytes(_MIB), min(offset + _MIB, 7 * _MIB))
        assert staged.take(9 * _MIB, 5) is None
    stage.close()


@pytest.mark.parametrize("how", ["write", "map", "same", "punch"])
@pytest.mark.parametrize("written_out", [False, True], ids=["cached", "written out"])
def test_a_stage_detects_changes_of_its_part_of_the_file(place: Path, how: str, written_out: bool) -> None:
    """A stage detects any change of its part of the file, and ignores changes of the rest.

    The changes are one byte written, stored through an earlier mapping, rewritten unchanged, or punched away.
    """
    file = place / "root/file"
    file.write_bytes(os.urandom(8 * _MIB))
    stage = Stage(str(place / "repository/packs"))
    with file.open("r+b") as opened, mmap.mmap(opened.fileno(), 0) as mapping:
        fd = opened.fileno()
        # This page can be stored to without a fault.
        mapping[5 * _MIB] = 1
        staged = stage.take(fd, 4 * _MIB, 2 * _MIB)
        assert staged is not None
        assert stage.is_unchanged(fd, 4 * _MIB, 2 * _MIB, staged)
        os.pwrite(fd, b"elsewhere", 7 * _MIB)
        assert stage.is_unchanged(fd, 4 * _MIB, 2 * _MIB, staged)
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
        assert not stage.is_unchanged(fd, 4 * _MIB, 2 * _MIB, staged)
    stage.close()
