"""Repository that is no directory: each record sealed by itself in a dictionary, snapshots in another.

It stands for whatever else a repository may be read from: a subclass of `Repository` that uses nothing but
what that class offers for this purpose.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import xxhash

from ciuic.errors import Damaged, NotFound, NotPermitted
from ciuic.repository import PackDamage, PackInfo, PackRecord, Repository
from ciuic.repository.committed_snapshots import CommittedSnapshots
from ciuic.repository.config import StoredConfig
from ciuic.repository.disk.operations import Disk
from ciuic.repository.format import snapshot_format
from ciuic.repository.index.catalogue import info_of
from ciuic.repository.model import ChunkLocation, SnapshotInfo, UnreadableSnapshot
from ciuic.repository.writing.shared_write_claim import Claim
from ciuic.repository.writing.writer import Writer
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
                    yield PackRecord(ChunkId(chunk), *place[1:5], checksum=0, base=place.base)

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
