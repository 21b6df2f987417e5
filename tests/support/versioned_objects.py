"""Bucket with versions in this process's memory, and what an attacker does to a bucket.

`VersionedObjects` answers as S3 does with versioning: a PUT adds a version, a DELETE a mark, and create-only looks at
what is current. It is `Objects` and `ObjectVersions` at once.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator, Sequence

from ciuic.remote.object_names import new_hex_id, new_pack_ref, pack_name
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, RemoteRefused, Version
from ciuic.repository.identity import Bytes


class VersionedObjects:
    """Bucket with versions; its clock counts requests that store something, in nanoseconds."""

    def __init__(self) -> None:
        self.url = "memory://versioned"
        self.now_ns = 0
        self.reads = 0
        self.listed = 0
        self.locks: dict[tuple[str, str], int] = {}
        self.has_locks = True
        # Newest last; None is a mark of deletion.
        self.stored: dict[str, list[tuple[str, bytes | None, int]]] = {}

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Add a version."""
        self._add(name, b"".join(data))

    def create(self, name: str, data: bytes) -> bool:
        """Add a version if there is none, or the newest is a mark."""
        if self._current(name) is not None:
            return False
        self._add(name, bytes(data))
        return True

    def get(self, name: str) -> bytes:
        """Return the current version."""
        data = self._current(name)
        if data is None:
            raise NoSuchObject(name)
        return data

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return ranges of the current version."""
        data = self.get(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return size and end of the current version."""
        data = self.get(name)
        return len(data), data[max(0, len(data) - length) :]

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of the current version."""
        data = self._current(name)
        return None if data is None else ObjectInfo(name, len(data), self.stored[name][-1][2])

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the names that have a current version."""
        for name in sorted(self.stored):
            if name.startswith(prefix) and name > after and (info := self.info(name)):
                yield info

    def delete(self, names: Iterable[str]) -> None:
        """Add marks."""
        for name in names:
            self._add(name, None)

    def lock(self, version: Version, until_ns: int) -> None:
        """Note the lock."""
        if not self.has_locks:
            raise RemoteRefused("the bucket has no object lock")
        self.locks[version.name, version.id] = until_ns

    def reconnect(self) -> None:
        """Do nothing: there are no connections."""

    def close(self) -> None:
        """Keep everything."""

    def versions(self) -> MemoryVersions:
        """Return the interface of versions."""
        return MemoryVersions(self)

    def _current(self, name: str) -> bytes | None:
        versions = self.stored.get(name)
        return versions[-1][1] if versions else None

    def _add(self, name: str, data: bytes | None) -> None:
        self.now_ns += 1
        self.stored.setdefault(name, []).append((f"v{self.now_ns}", data, self.now_ns))


class MemoryVersions:
    """`ObjectVersions` of a `VersionedObjects`."""

    def __init__(self, bucket: VersionedObjects) -> None:
        self._bucket = bucket
        self.url = bucket.url

    def list(self, prefix: str, *, after: str = "") -> Iterator[Version]:
        """Yield all versions."""
        for name in sorted(self._bucket.stored):
            if not name.startswith(prefix) or name <= after:
                continue
            stored = self._bucket.stored[name]
            for at in range(len(stored) - 1, -1, -1):
                self._bucket.listed += 1
                id_, data, modified_ns = stored[at]
                content = data or b""
                yield Version(
                    name=name,
                    id=id_,
                    size_bytes=len(content),
                    modified_ns=modified_ns,
                    digest=hashlib.md5(content).hexdigest(),
                    is_current=at == len(stored) - 1 and data is not None,
                    is_deletion=data is None,
                )

    def read(self, version: Version, offset: int, length: int) -> Bytes:
        """Return bytes of a version."""
        self._bucket.reads += 1
        for id_, data, _ in self._bucket.stored.get(version.name, ()):
            if id_ == version.id and data is not None:
                return data[offset : offset + length]
        raise NoSuchObject(version.name)

    def lock(self, version: Version, until_ns: int) -> None:
        """Note the lock."""
        self._bucket.lock(version, until_ns)

    def close(self) -> None:
        """Keep everything."""


def attack(objects: Objects, rng: random.Random) -> None:
    """Do to a bucket what credentials to write and delete allow, without the key.

    Every name is overwritten with forgeries (noise, a cut, a flipped byte in the middle, a neighbour's bytes) and then
    deleted, some of them first; names are made up of every kind.
    """
    names = [info.name for info in objects.list("")]
    contents = {name: objects.get(name) for name in names}
    for name in names:
        data = contents[name]
        flipped = bytearray(data)
        flipped[len(data) // 2] ^= 1
        neighbours = [other for other in names if other.split("/")[0] == name.split("/")[0] and other != name]
        forged = [rng.randbytes(len(data)), data[: len(data) // 2], bytes(flipped)]
        if neighbours:
            forged.append(contents[rng.choice(neighbours)])
        rng.shuffle(forged)
        for one in forged[: rng.randint(1, len(forged))]:
            if rng.random() < 0.3:
                objects.delete([name])
            objects.put(name, [one])
        if rng.random() < 0.7:
            objects.delete([name])
    logs = sorted({name.rpartition("/")[0] for name in names if "w/" in name})
    for log in logs:
        entries = [name for name in names if name.startswith(f"{log}/")]
        for number in range(len(entries), len(entries) + 3):
            objects.put(f"{log}/{number:010}", [contents[rng.choice(entries)]])
    for name in (
        f"w/{new_hex_id()}/0000000000",
        "gc/0000000007",
        "gc/0000000007.done",
        "keys/somebody",
        "manifests/files/0-0/host-" + new_hex_id(),
        pack_name(new_pack_ref("meta")),
        f"repositories/{new_hex_id()}/remote.json",
        f"repositories/{new_hex_id()}/w/{new_hex_id()}/0000000000",
    ):
        objects.put(name, [rng.randbytes(300)])
