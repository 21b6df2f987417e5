"""Tests of restores on file systems that share extents: content shares the packs' extents."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.extents import extents, overlap_bytes, shared_extents
from support.restoring import take
from support.small_disks import place as place
from support.trees import assert_same, manifest

from ciuic.repository import Repository
from ciuic.restore import Overwrite, Result, content, execute, plan_restore
from ciuic.restore.content import Sharing
from ciuic.types import Snapshot

# The file system is on a loop device.
pytestmark = pytest.mark.mount

_MIB = 1 << 20
_BLOCK = 256 << 10


def _root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "large").write_bytes(os.urandom(12 * _MIB + 5000))
    (root / "middle").write_bytes(os.urandom(3 * _BLOCK + 70_001))
    (root / "small").write_bytes(os.urandom(3000))
    (root / "text").write_bytes(b"step 1000 loss 0.125\n" * 100_000)
    (root / "hole in a block").write_bytes(os.urandom(100_000) + bytes(16384) + os.urandom(100_000))
    (root / "hole").write_bytes(os.urandom(_BLOCK))
    os.truncate(root / "hole", 9 * _MIB)
    return root


def _restore(repository: Repository, snapshot: Snapshot, root: Path, out: Path, **how: Overwrite) -> Result:
    return execute(plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(out), **how))


def _packs(place: Path) -> list[tuple[int, int]]:
    return [extent for pack in (place / "repository/packs").iterdir() for extent in shared_extents(pack)]


def test_raw_chunks_are_restored_as_extents(place: Path, tmp_path: Path) -> None:
    """Raw chunks are restored as shared extents, and later writes to the file leave the packs unchanged."""
    root = _root(tmp_path)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        assert _restore(repository, snapshot, root, place / "out").complete
        assert_same(manifest(root), manifest(place / "out/root"))
        restored = place / "out/root/large"
        assert overlap_bytes(_packs(place), shared_extents(restored)) >= 12 * _MIB
        assert overlap_bytes(_packs(place), shared_extents(place / "out/root/middle")) >= 3 * _BLOCK
        assert os.stat(place / "out/root/hole").st_blocks * 512 <= _BLOCK + 65536
        with restored.open("r+b") as file:
            file.write(bytes(13 * _MIB))
            os.fsync(file.fileno())
        assert list(repository.scrub()) == []
        assert _restore(repository, snapshot, root, place / "out", overwrite=Overwrite.ALWAYS).complete
        assert_same(manifest(root), manifest(place / "out/root"))


def test_the_end_of_a_shared_file_is_compared_like_the_rest(place: Path, tmp_path: Path) -> None:
    """A restored file whose last bytes, less than a page, were changed in place is corrected."""
    root = _root(tmp_path)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        assert _restore(repository, snapshot, root, place / "out").complete
        with (place / "out/root/large").open("r+b") as file:
            file.seek(-3, os.SEEK_END)
            file.write(b"bad")
            os.fsync(file.fileno())
        assert _restore(repository, snapshot, root, place / "out", overwrite=Overwrite.ALWAYS).complete
    assert_same(manifest(root), manifest(place / "out/root"))


def test_damaged_bytes_are_never_shared(place: Path, tmp_path: Path) -> None:
    """A file with a damaged block is not restored, and the others are."""
    root = _root(tmp_path)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        entry = repository.trees.entry(snapshot.roots[0].entry.content, b"large")
        assert entry is not None
        chunk = repository.block_maps.get(entry.content, entry.map_height, 81, 40)
        found = repository.chunks.locate(chunk)
        with (place / f"repository/packs/{found.pack:016x}.pack").open("r+b") as pack:
            pack.seek(found.offset + 77_777)
            pack.write(b"damaged")
        result = _restore(repository, snapshot, root, place / "out")
        assert [(failure.path, failure.damaged) for failure in result.failed] == [
            (os.fsencode(place / "out/root/large"), True)
        ]
        assert sorted(os.listdir(place / "out/root")) == sorted(
            {*os.listdir(root), ".ciuic-restore"} - {"large"}
        )


@pytest.mark.parametrize("fails_from", [0, 5])
def test_content_that_can_no_longer_be_shared_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    """Content is written when the file system refuses to share, at once or in the middle of a file."""
    root = _root(tmp_path)
    calls = iter(range(1_000_000))
    real = Sharing.share

    def share(self: Sharing, *where: int) -> bool:
        return next(calls) < fails_from and real(self, *where)

    monkeypatch.setattr(content.Sharing, "share", share)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        assert _restore(repository, snapshot, root, place / "out").complete
    assert_same(manifest(root), manifest(place / "out/root"))


def _change_middle(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(5 * _MIB + 100)
        opened.write(os.urandom(_MIB))


def _fill_hole(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(4 * _MIB)
        opened.write(os.urandom(_MIB))


_CHANGES: dict[str, tuple[str, Callable[[Path], object]]] = {
    "a piece in the middle": ("large", _change_middle),
    "longer": ("large", lambda file: os.truncate(file, 22 * _MIB)),
    "shorter": ("large", lambda file: os.truncate(file, 11 * _MIB + 1)),
    "data in a hole": ("hole", _fill_hole),
    "all": ("large", lambda file: file.write_bytes(os.urandom(12 * _MIB + 5000))),
    "only the time": ("large", lambda file: os.utime(file, ns=(1, 1))),
}


@pytest.mark.parametrize(
    ("change", "mode"),
    [("a piece in the middle", Overwrite.IF_CHANGED), *((change, Overwrite.ALWAYS) for change in _CHANGES)],
)
def test_only_differing_blocks_of_an_existing_file_are_written(
    place: Path, tmp_path: Path, change: str, mode: Overwrite
) -> None:
    """An existing file is cloned and only differing blocks are written; the old file is never changed."""
    root = _root(tmp_path)
    name, apply = _CHANGES[change]
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        out = place / "out/root"
        out.parent.mkdir()
        subprocess.run(["cp", "--reflink=never", "-aT", root, out], check=True, timeout=60)
        file = out / name
        apply(file)
        os.sync()
        where = extents(file)
        with file.open("rb") as old:
            before = old.read()
            assert _restore(repository, snapshot, root, place / "out", overwrite=mode).complete
            old.seek(0)
            assert old.read() == before
            kept = overlap_bytes(where, extents(file))
        assert_same(manifest(root), manifest(out))
        least = {"a piece in the middle": 10, "longer": 11, "shorter": 10, "only the time": 12}
        assert kept >= least.get(change, 0) * _MIB
        assert not [left for left in os.listdir(out) if left.startswith(".ciuic")]


def test_writes_during_a_restore_do_not_affect_it(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An existing file that is overwritten while it is compared does not affect the restored content."""
    root = _root(tmp_path)
    real = content.BlockWorker.repair

    def repair(self: content.BlockWorker, *args: Any) -> int:
        wrong = real(self, *args)
        (place / "out/root/large").write_bytes(bytes(12 * _MIB + 5000))
        return wrong

    monkeypatch.setattr(content.BlockWorker, "repair", repair)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        shutil.copytree(root, place / "out/root")
        _change_middle(place / "out/root/large")
        assert _restore(repository, snapshot, root, place / "out", overwrite=Overwrite.ALWAYS).complete
    assert_same(manifest(root), manifest(place / "out/root"))
