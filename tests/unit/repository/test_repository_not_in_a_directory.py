"""Tests that a repository can be read from something else than a directory, by everything that only reads.

Here each record is sealed by itself in a dictionary, and snapshots are in another. That stands for whatever else a repository may be read from: a subclass of `Repository` that uses nothing but
what that class offers for this purpose.
"""

from __future__ import annotations

import errno
import os
import shutil
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest
import xxhash
from support import trees
from support.restoring import take, write
from support.stored import IDENTITIES

from ciuic.compare.diff import diff_live, diff_snapshots
from ciuic.errors import Damaged, NotFound, NotPermitted
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import DamagedChunk, PackDamage, PackInfo, PackRecord, Repository, snapshot_format
from ciuic.repository.compression import Codec, Content
from ciuic.repository.config import StoredConfig
from ciuic.repository.index_database import info_of
from ciuic.repository.locks import Claim
from ciuic.repository.lookup import find
from ciuic.repository.model import ChunkLocation, SnapshotInfo, UnreadableSnapshot
from ciuic.repository.snapshots import CommittedSnapshots
from ciuic.repository.writing.writer import Writer
from ciuic.restore import execute, plan_restore
from ciuic.system.disk import Disk
from ciuic.types import ChunkId, Snapshot, SnapshotId

_TAG_BYTES = 8
_MASK = bytes(range(1, 256)) + b"\0"


@dataclass
class Bucket:
    """Everything that was in a repository, in another form."""

    config: StoredConfig
    records: dict[int, dict[int, bytes]] = field(default_factory=dict)
    """Pack, a number of 128 bits, to offset, to the sealed record."""
    places: dict[bytes, list[ChunkLocation]] = field(default_factory=dict)
    snapshots: dict[str, bytes] = field(default_factory=dict)
    announced: int = 0
    """Number of ranges that readers have announced."""

    @classmethod
    def of(cls, repository: Repository) -> Bucket:
        """Return the content of a repository; records lie as far apart as their seals are long."""
        bucket = cls(repository.config)
        for pack in repository.packs():
            number, end = (1 << 100) + pack.number, 64
            stored = bucket.records.setdefault(number, {})
            for record in repository.pack_records(pack.number):
                with open(repository.pack_path(pack.number), "rb") as file:
                    content = os.pread(file.fileno(), record.stored_bytes, record.offset)
                stored[end] = sealed(content)
                facts = record.stored_bytes, record.raw_bytes, record.flags, record.base
                bucket.places.setdefault(record.id, []).append(ChunkLocation(number, end, *facts))
                end += len(stored[end])
        for name in repository.snapshots.names():
            bucket.snapshots[name] = Path(repository.snapshots.path(name)).read_bytes()
        return bucket


def sealed(content: bytes) -> bytes:
    """Return other bytes than the content, from which it can be had again."""
    return content.translate(_MASK) + xxhash.xxh3_64_digest(content)


def _opened(stored: bytes) -> bytes:
    content = bytes((byte - 1) % 256 for byte in stored[:-_TAG_BYTES])
    if xxhash.xxh3_64_digest(content) != stored[-_TAG_BYTES:]:
        raise OSError(errno.EBADMSG, os.strerror(errno.EBADMSG))
    return content


class SealedPacks:
    """The `PackSource` of a bucket. Every read must be of whole records."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def read(self, number: int, offset: int, length: int) -> bytes:
        if number not in self._bucket.records:
            raise NotFound(f"there is no pack {number:x}")
        content = _opened(self._bucket.records[number][offset])
        assert len(content) == length
        return content

    def read_run(self, number: int, records: Iterable[ChunkLocation], start: int, target: memoryview) -> int:
        target[:] = b"?" * len(target)
        for location in records:
            content = self.read(number, location.offset, location.stored_bytes)
            target[location.offset - start : location.offset - start + len(content)] = content
        return len(target)

    def read_scattered(self, number: int, records: Sequence[tuple[ChunkLocation, memoryview]]) -> None:
        for location, target in records:
            target[:] = self.read(number, location.offset, location.stored_bytes)

    def will_need(self, number: int, offset: int, length: int) -> None:
        self._bucket.announced += 1

    def descriptor(self, number: int) -> int:
        raise NotFound("this pack is no file")


class BucketLookup:
    """Lookup of chunks in a bucket."""

    def __init__(self, bucket: Bucket) -> None:
        self._places = bucket.places

    def find(self, chunk: bytes) -> list[ChunkLocation]:
        return list(self._places.get(chunk, ()))

    def search(self, chunk: bytes, failed: list[ChunkLocation]) -> list[ChunkLocation]:
        return self.find(chunk)

    def find_many(self, chunks: Sequence[bytes]) -> dict[bytes, ChunkLocation]:
        return {chunk: self._places[chunk][0] for chunk in chunks if chunk in self._places}


class BucketSnapshots(CommittedSnapshots):
    """Snapshots in a bucket, without marks."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def names(self) -> set[str]:
        return set(self._bucket.snapshots)

    def infos(self) -> list[SnapshotInfo]:
        return [info_of(snapshot) for snapshot in self.load_all()[0]]

    def load(self, id_: SnapshotId) -> Snapshot:
        if id_ not in self._bucket.snapshots:
            raise NotFound(f"there is no snapshot {id_}")
        data = self._bucket.snapshots[id_]
        stored = snapshot_format.decode_snapshot(id_, data, self._bucket.config.id)
        return snapshot_format.apply_marks(stored, snapshot_format.StoredMarks(id=id_))

    def load_all(self) -> tuple[list[Snapshot], list[UnreadableSnapshot]]:
        loaded, unreadable = [], []
        for name in self.names():
            try:
                loaded.append(self.load(SnapshotId(name)))
            except Damaged as error:
                unreadable.append(UnreadableSnapshot(name, self.path(name), error.message))
        loaded.sort(key=lambda snapshot: (-snapshot.time_ns, snapshot.id))
        return loaded, unreadable

    def path(self, id_: str) -> str:
        return f"bucket:/snapshots/{id_}"


class ElsewhereRepository(Repository):
    """Repository in a bucket; ``path`` is a directory of its own with nothing in it."""

    def __init__(self, path: Path, bucket: Bucket) -> None:
        super().__init__(path, bucket.config, Disk(), BucketSnapshots(bucket))
        self.bucket = bucket

    def reopen(self) -> ElsewhereRepository:
        return ElsewhereRepository(self.path, self.bucket)

    def _pack_source(self) -> SealedPacks:
        return SealedPacks(self.bucket)

    def _chunk_lookup(self) -> BucketLookup:
        return BucketLookup(self.bucket)

    def writer(self, *, wait_seconds: float = 0, command: str = "", pack_bytes: int | None = None) -> Writer:
        raise NotPermitted("a bucket has no writer")

    def claim(self) -> Claim:
        raise NotPermitted("a bucket has no writer")

    def packs(self) -> list[PackInfo]:
        return [PackInfo(number, "data", size, True) for number, size in self.pack_sizes().items()]

    def pack_records(self, number: int, *, salvage: bool = False) -> Iterator[PackRecord]:
        for chunk, places in self.bucket.places.items():
            for place in places:
                if place.pack == number:
                    yield PackRecord(
                        ChunkId(chunk),
                        place.offset,
                        place.stored_bytes,
                        place.raw_bytes,
                        place.flags,
                        checksum=0,
                        base=place.base,
                    )

    def pack_path(self, number: int) -> str:
        return f"bucket:/packs/{number:032x}"

    def pack_sizes(self) -> dict[int, int]:
        return {
            number: max(offset + len(stored) for offset, stored in records.items())
            for number, records in self.bucket.records.items()
        }

    def scrub(
        self,
        progress: Callable[[int, int], None] | None = None,
        *,
        after: int = -1,
        goes_on: Callable[[int], bool] = lambda number: True,
        between: Callable[[], None] = lambda: None,
    ) -> Iterator[PackDamage]:
        for number in self.bucket.records:
            for record in self.pack_records(number):
                try:
                    self.chunks.get(record.id)
                except Damaged as error:
                    yield PackDamage(number, record.offset, record.id, error.message)

    def check_index(self) -> list[str]:
        return []

    def lacks_index(self) -> bool:
        return False

    def pack_problems(self) -> list[tuple[int, str]]:
        return []

    def config_damage(self) -> list[str]:
        return []

    @property
    def may_have_bases(self) -> bool:
        return True


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
    assert [moved.repository.chunks.identity.chunk_id(room) for room in rooms] == chunks


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
    assert {os.path.basename(failure.path) for failure in result.failed} <= {b"noise", b"noise too"}
    assert result.failed
    assert (tmp_path / "there" / "root" / "text").read_bytes() == b"all work and no play " * 9000


def test_a_lost_pack_is_damage(moved: Moved) -> None:
    """Chunks of a pack that is gone are damage, and no other error."""
    moved.repository.bucket.records.clear()
    assert verify_snapshots(moved.repository, checksum=True).damaged
