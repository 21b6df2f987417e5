"""Tests that a repository can be read from something else than a directory, by everything that only reads."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support import trees
from support.identities import IDENTITIES
from support.restoring import take, write
from support.sealed_elsewhere import Bucket, ElsewhereRepository

from ciuic.compare.diff import diff_live, diff_snapshots
from ciuic.errors import NotFound
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import DamagedChunk, Repository
from ciuic.repository.codecs.codec import Codec
from ciuic.repository.codecs.compression import Content
from ciuic.repository.lookup import find
from ciuic.restore import execute, plan_restore
from ciuic.types import ChunkId, Snapshot

BLOCK = 4096


class Moved(NamedTuple):
    """A repository whose directory is gone, and the root that it was made from."""

    repository: ElsewhereRepository
    root: Path
    first: Snapshot
    second: Snapshot
    manifest: trees.Manifest
    """The root at the first snapshot."""


def _stored_with_bases(repository: Repository) -> list[bytes]:
    """Store numbers as planes and as differences from them; return them."""
    contents = [
        struct.pack(f"<{BLOCK // 4}f", *(at / 7 + step / 1000 for at in range(BLOCK // 4)))
        for step in range(3)
    ]
    base: ChunkId | None = None
    with repository.writer() as writer:
        for content in contents:
            codec = Codec("planes", 4) if base is None else Codec("difference", 4, base)
            base = writer.put_chunks([Content(content, codec=codec)])[0]
        writer.flush()
    return contents


@pytest.fixture(params=IDENTITIES)
def moved(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Moved]:
    root = tmp_path / "root"
    write(root / "numbers", b"")
    write(root / "noise", os.urandom(30 * BLOCK + 5))
    write(root / "text", b"all work and no play " * 9000)
    write(root / "deep" / "er" / "small", b"small")
    for number in range(200):
        write(root / "many" / f"{number:03}", b"%d" % number)
    os.link(root / "noise", root / "deep" / "noise too")
    with Repository.create(tmp_path / "local", block_size=BLOCK, identity=request.param) as local:
        # The capture finds this content stored already, as differences.
        write(root / "numbers", b"".join(_stored_with_bases(local)))
        manifest = trees.manifest(root)
        first = take(local, root)
        write(root / "text", b"something else")
        os.unlink(root / "deep" / "er" / "small")
        second = take(local, root)
    with Repository.open(tmp_path / "local") as local:
        assert any(record.base for pack in local.packs() for record in local.pack_records(pack.number))
        bucket = Bucket.of(local)
    shutil.rmtree(tmp_path / "local")
    (tmp_path / "empty").mkdir()
    with ElsewhereRepository(tmp_path / "empty", bucket) as repository:
        yield Moved(repository, root, first, second, manifest)
    assert os.listdir(tmp_path / "empty") == []


def test_snapshots_are_listed_and_found(moved: Moved) -> None:
    """Snapshots are listed newest first, and found by id, prefix, position and root."""
    snapshots, root = moved.repository.snapshots, os.fsencode(moved.root)
    assert snapshots.ids() == [moved.second.id, moved.first.id]
    assert snapshots.list(root=root, limit=1) == [snapshots.info(moved.second.id)]
    assert [info.id for info in snapshots.newest_first(root)] == snapshots.ids()
    assert snapshots.latest(b"/nowhere") is None
    for text, wanted in (("latest", moved.second), ("latest~1", moved.first), (moved.first.id, moved.first)):
        assert snapshots.load(snapshots.resolve(text)) == wanted
    with pytest.raises(NotFound):
        snapshots.resolve("cs-ffffffffff")
    assert snapshots.new_id() not in snapshots.names()
    assert (snapshots.unreadable(), snapshots.vanished(), snapshots.catalogue_problems()) == ([], [], [])


def test_a_path_is_found(moved: Moved) -> None:
    """The entry of a path is found, attributes of a file with two names included."""
    located = find(moved.repository, moved.first, os.fsencode(moved.root / "deep" / "noise too"))
    assert located.entry.size_bytes == 30 * BLOCK + 5


def test_differences_are_found(moved: Moved) -> None:
    """Snapshots are compared with one another and with the live directory."""
    root = os.fsencode(moved.root)
    changed = {change.path for change in diff_snapshots(moved.repository, moved.first, moved.second)}
    assert {root + b"/text", root + b"/deep/er/small"} <= changed
    assert not any(path.startswith((root + b"/many", root + b"/noise")) for path in changed)
    live = {change.path for change in diff_live(moved.repository, moved.first)}
    assert {root + b"/text", root + b"/deep/er/small"} <= live


def test_a_restore_is_exact(moved: Moved, tmp_path: Path) -> None:
    """A restore gives the root as it was; its threads read through repositories of their own."""
    (tmp_path / "there").mkdir()
    plan = plan_restore(
        moved.repository, moved.first, [os.fsencode(moved.root)], dest=os.fsencode(tmp_path / "there")
    )
    result = execute(plan)
    assert result.complete, result.error()
    trees.assert_same(moved.manifest, trees.manifest(tmp_path / "there" / "root"))
    assert moved.repository.bucket.announced > 0


def test_many_chunks_are_read_into_memory(moved: Moved) -> None:
    """Chunks of every kind are read into the caller's buffers, differences with their bases."""
    chunks = [ChunkId(chunk) for chunk in moved.repository.bucket.places]
    rooms = [memoryview(bytearray(moved.repository.chunks.size(chunk))) for chunk in chunks]
    assert moved.repository.into_memory.read(chunks, rooms) == []
    assert [moved.repository.chunks.id_of(room) for room in rooms] == chunks


@pytest.mark.parametrize("checksum", [False, True])
def test_a_sound_one_verifies(moved: Moved, checksum: bool) -> None:
    """Verifying all snapshots or one finds nothing wrong."""
    for ids in (None, [moved.first.id]):
        result = verify_snapshots(moved.repository, ids, checksum=checksum)
        assert (result.damages, result.files > 200) == ([], True)


def test_a_record_that_does_not_open_is_damage(moved: Moved, tmp_path: Path) -> None:
    """A record whose seal is broken is reported with path and place; a restore fails that file alone."""
    root = os.fsencode(moved.root)
    noise = find(moved.repository, moved.first, root + b"/noise").entry
    chunk = dict(moved.repository.block_maps.ids(noise.content, noise.map_height, 31))[7]
    (place,) = moved.repository.bucket.places[chunk]
    moved.repository.bucket.records[place.pack][place.offset] = bytes(place.stored_bytes + 8)
    with pytest.raises(DamagedChunk, match="cannot be read"):
        moved.repository.chunks.get(chunk)
    for ids in (None, [moved.first.id]):
        damages = verify_snapshots(moved.repository, ids, checksum=True).damages
        assert {(damage.kind, damage.block) for damage in damages} == {("data", 7)}
        assert {damage.file for damage in damages} == {moved.repository.pack_path(place.pack)}
        assert set(damages[0].snapshots) == {moved.first.id, moved.second.id}
    (tmp_path / "there").mkdir()
    plan = plan_restore(moved.repository, moved.first, [root], dest=os.fsencode(tmp_path / "there"))
    result = execute(plan)
    assert {os.path.basename(path) for path, *_ in result.failed} <= {b"noise", b"noise too"}
    assert result.failed
    assert (tmp_path / "there" / "root" / "text").read_bytes() == b"all work and no play " * 9000


def test_a_lost_pack_is_damage(moved: Moved) -> None:
    """Chunks of a pack that is gone are damage, and no other error."""
    moved.repository.bucket.records.clear()
    assert verify_snapshots(moved.repository, checksum=True).damaged
