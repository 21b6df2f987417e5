"""Tests that verify finds any changed byte of a repository and names the affected snapshots."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.restoring import take, write
from support.stored import IDENTITIES, flip

from ciuic.errors import CiuicError, Damaged
from ciuic.maintenance.verify import VerifyResult, verify_snapshots
from ciuic.repository import Repository, Walker
from ciuic.repository.lookup import children
from ciuic.types import ChunkId, Snapshot, SnapshotId


class Made(NamedTuple):
    """A repository with two snapshots that share most of their content."""

    path: Path
    root: Path
    first: Snapshot
    second: Snapshot


@pytest.fixture(scope="module", params=IDENTITIES)
def made(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Made]:
    base = tmp_path_factory.mktemp("verify")
    root = base / "root"
    write(root / "shared.bin", bytes(range(256)) * 100)
    write(root / "random.bin", os.urandom(50_000))
    write(root / "deep" / "er" / "file", b"small")
    write(root / "changes", b"first content")
    write(root / "two names", os.urandom(9000))
    os.link(root / "two names", root / "deep" / "other name")
    with Repository.create(base / "repository", block_size=4096, identity=request.param) as repository:
        first = take(repository, root)
        write(root / "changes", b"second content")
        second = take(repository, root)
        with repository.writer() as writer:
            writer.set_marks(first.id, hold=True, reason="marks have bytes too")
    with Repository.open(base / "repository") as repository:
        yield Made(repository.path, root, first, second)


@pytest.fixture
def copy(made: Made, tmp_path: Path) -> Path:
    """Provide a copy of the repository, for one test."""
    return Path(shutil.copytree(made.path, tmp_path / "repository"))


def verify(path: Path, *, checksum: bool = True, ids: list[SnapshotId] | None = None) -> VerifyResult:
    with Repository.open(path) as repository:
        return verify_snapshots(repository, ids, checksum=checksum)


def test_a_sound_repository_has_no_damage(made: Made) -> None:
    """Verifying a sound repository checks every name and reports no damage."""
    for checksum in (False, True):
        result = verify(made.path, checksum=checksum)
        assert result.damages == []
        assert result.snapshots == [made.second.id, made.first.id]
        assert result.files >= 6


@settings(max_examples=60)
@given(data=st.data())
def test_every_flipped_byte_is_found(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any flipped byte in packs, snapshot files, marks and configuration is reported by verify --checksum."""
    copy = tmp_path_factory.mktemp("flip") / "repository"
    shutil.copytree(made.path, copy)
    files = sorted(
        file
        for file in copy.rglob("*")
        if file.is_file() and not file.name.startswith(("index", "lock")) and file.stat().st_size
    )
    file = data.draw(st.sampled_from(files))
    offset = data.draw(st.integers(0, file.stat().st_size - 1))
    flip(file, offset, data.draw(st.integers(1, 255)))
    try:
        result = verify(copy)
    except Damaged:
        # The configuration has two copies: both are needed to notice the damage, one to open.
        assert file.name.startswith("config")
    else:
        assert result.damaged, f"{file.name} at {offset}"
    finally:
        shutil.rmtree(copy.parent)


@settings(max_examples=60)
@given(data=st.data())
def test_a_snapshot_is_right_exactly_when_it_reads_back(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Whatever byte of the packs is flipped: verify ID --checksum calls a snapshot damaged exactly when some file does not read back."""
    copy = tmp_path_factory.mktemp("flip") / "repository"
    shutil.copytree(made.path, copy)
    file = data.draw(st.sampled_from(sorted((copy / "packs").iterdir())))
    flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), data.draw(st.integers(1, 255)))
    try:
        for snapshot in (made.first, made.second):
            result = verify(copy, ids=[snapshot.id])
            assert result.damaged is not _reads_back(copy, snapshot), result
            assert result.damaged or result.elsewhere
    finally:
        shutil.rmtree(copy.parent)


def _reads_back(path: Path, snapshot: Snapshot) -> bool:
    """Return whether every chunk of a snapshot can be read, by a reader of its own."""
    with Repository.open(path) as repository:
        broken: list[ChunkId] = []
        walk = Walker(repository).walk(snapshot, on_damage=lambda reached, error: broken.append(reached.id))
        for reached in walk:
            try:
                repository.chunks.get(reached.id)
            except Damaged:
                broken.append(reached.id)
        return not broken


@settings(max_examples=40)
@given(data=st.data())
def test_a_damaged_index_never_hides_or_breaks_anything(
    made: Made, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A flipped byte in the index costs time, but leads to no traceback and no false damage of a file."""
    copy = tmp_path_factory.mktemp("index") / "repository"
    shutil.copytree(made.path, copy)
    file = copy / "index.sqlite"
    flip(file, data.draw(st.integers(0, file.stat().st_size - 1)), data.draw(st.integers(1, 255)))
    try:
        result = verify(copy)
        assert all(damage.kind == "index" for damage in result.damages), result.damages
    finally:
        shutil.rmtree(copy.parent)


def locate(path: Path, snapshot: Snapshot, name: bytes, block: int = 0) -> tuple[Path, int]:
    """Return pack and offset of the stored bytes of one block of a file at the top of the root."""
    with Repository.open(path) as repository:
        root = snapshot.roots[0]
        entry = next(entry for entry in children(repository, root, root.entry) if entry.name == name)
        ids = dict(repository.block_maps.ids(entry.content, entry.map_height, block + 1))
        place = repository.chunks.locate(ids[block])
        return path / "packs" / f"{place.pack:016x}.pack", place.offset


@pytest.mark.parametrize("everything", [False, True])
def test_damage_names_path_block_and_all_snapshots(made: Made, copy: Path, everything: bool) -> None:
    """A bad block of a shared file is named with path, block number and both snapshots, newest first."""
    flip(*locate(copy, made.first, b"random.bin", 3), 0x40)
    result = verify(copy, ids=None if everything else [made.first.id])
    (damage,) = [damage for damage in result.damages if damage.path]
    assert damage.path == os.fsencode(made.root / "random.bin")
    assert (damage.kind, damage.block, damage.offset) == ("data", 3, 3 * 4096)
    assert damage.snapshots == (made.second.id, made.first.id)
    assert damage.root == os.fsencode(made.root)


def test_damage_names_every_name_and_no_other_snapshot(made: Made, copy: Path) -> None:
    """Damage in content that several names share is reported for each of them, and of one snapshot for it alone."""
    flip(*locate(copy, made.first, b"two names", 1), 1)
    flip(*locate(copy, made.first, b"changes"), 1)
    found = {(damage.path, damage.snapshots) for damage in verify(copy).damages if damage.path}
    both = made.second.id, made.first.id
    assert found == {
        (os.fsencode(made.root / "two names"), both),
        (os.fsencode(made.root / "deep" / "other name"), both),
        (os.fsencode(made.root / "changes"), (made.first.id,)),
    }


def test_a_missing_pack_is_missing_chunks_without_reading_a_byte(made: Made, copy: Path) -> None:
    """Checking the structure alone finds a missing pack, and names its files."""
    locate(copy, made.first, b"random.bin")[0].unlink()
    result = verify(copy, checksum=False)
    assert os.fsencode(made.root / "random.bin") in {damage.path for damage in result.damages}
    assert result.bytes_read == 0


def test_a_damaged_snapshot_file_is_named(made: Made, copy: Path) -> None:
    """A snapshot that cannot be read is reported as damage with id and file, whether named or not."""
    file = next(file for file in copy.rglob(str(made.first.id)) if "snapshots" in str(file.parent))
    flip(file, file.stat().st_size // 2, 0xFF)
    for ids in (None, [made.first.id]):
        (damage,) = verify(copy, ids=ids).damages
        assert damage.kind == "snapshot"
        assert damage.snapshots == (made.first.id,)
        assert Path(damage.file) == file


def test_an_unknown_snapshot_is_an_error(made: Made) -> None:
    """Verifying a snapshot that does not exist is an error, not damage."""
    with pytest.raises(CiuicError, match="cs-ffffffff"):
        verify(made.path, ids=[SnapshotId("cs-ffffffff")])
