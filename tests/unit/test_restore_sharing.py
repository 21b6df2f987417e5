"""Restores on file systems that share extents: content comes back as the extents of the packs, and checked all the same."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.ci import needs
from support.extents import overlap_bytes, shared_extents
from support.restoring import take
from support.small_disks import missing, small_disk
from support.trees import assert_same, manifest

from ciuic.repository import Repository
from ciuic.restore import Overwrite, Result, content, execute, plan_restore
from ciuic.restore.sharing import Sharing
from ciuic.types import Snapshot

pytestmark = pytest.mark.mount  # a loop device, that is

_MIB = 1 << 20
_BLOCK = 256 << 10


@pytest.fixture(scope="module", params=["xfs", "btrfs"])
def disk(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    needs(missing(request.param))
    with small_disk(tmp_path_factory.mktemp("disk"), request.param) as point:
        yield point


@pytest.fixture
def place(disk: Path, request: pytest.FixtureRequest) -> Path:
    """A root of one large file, small ones and text, not on the disk; a repository with a snapshot of it there."""
    place = disk / str(abs(hash(request.node.name)))
    place.mkdir()
    return place


def _root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (root / "large").write_bytes(os.urandom(20 * _MIB + 5000))
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


def test_what_is_stored_as_it_is_comes_back_as_extents(place: Path, tmp_path: Path) -> None:
    """By the maps of extents of both; what is written to the file afterwards leaves the packs as they were."""
    root = _root(tmp_path)
    with Repository.create(place / "repository") as repository:
        snapshot = take(repository, root)
        assert _restore(repository, snapshot, root, place / "out").complete
        assert_same(manifest(root), manifest(place / "out/root"))
        restored = place / "out/root/large"
        assert overlap_bytes(_packs(place), shared_extents(restored)) >= 20 * _MIB
        assert overlap_bytes(_packs(place), shared_extents(place / "out/root/middle")) >= 3 * _BLOCK
        assert os.stat(place / "out/root/hole").st_blocks * 512 <= _BLOCK + 65536
        with restored.open("r+b") as file:
            file.write(bytes(21 * _MIB))
            os.fsync(file.fileno())
        assert list(repository.scrub()) == []
        assert _restore(repository, snapshot, root, place / "out", overwrite=Overwrite.ALWAYS).complete
        assert_same(manifest(root), manifest(place / "out/root"))


def test_damaged_bytes_are_never_shared(place: Path, tmp_path: Path) -> None:
    """A file with a damaged block does not come back, and the others do."""
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


@pytest.mark.parametrize("fails_from", [0, 1, 5])
def test_what_can_no_longer_be_shared_is_written(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails_from: int
) -> None:
    """Whenever the file system begins to refuse: at once, or in the middle of a file."""
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
