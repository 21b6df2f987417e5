"""Object store with storage classes, in memory: what is archived cannot be read until it was thawed, as on Amazon S3.

The remote with old and new data, whose store archives, for tests of tiers.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.config import TierRule
from ciuic.remote.access import Remote
from ciuic.remote.objects.memory_objects import MemoryObjects
from ciuic.remote.objects.model import ArchivedObject, NoSuchObject, ObjectInfo, Objects
from ciuic.remote.objects.storage_classes import ListedClass, ObjectClass, ThawSpeed, find_class
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.upkeep.cold_packs import PlannedMoves, apply_rules
from ciuic.repository.identity import Bytes


class ArchivingStore:
    """Storage classes beside objects of any kind; shared by all that look at one store.

    Args:
        polls: How often an object is looked at before its thaw is done.
    """

    def __init__(self, polls: int = 2) -> None:
        self.polls = polls
        self.classes: dict[str, str] = {}
        self.thawing: dict[str, int] = {}
        self.thawed: set[str] = set()
        self.kept_warm: set[str] = set()
        """Objects that a thaw has moved to the default class, as Azure does."""
        self.asked: list[tuple[str, ThawSpeed, int]] = []

    def is_archived(self, name: str) -> bool:
        """Return whether the object cannot be read."""
        return find_class("s3", self.classes.get(name, "")).is_archive and name not in self.thawed


class ArchivingObjects:
    """`Objects` of others, of which those that are archived cannot be read."""

    def __init__(self, objects: Objects, store: ArchivingStore) -> None:
        self.inner = objects
        self.store = store

    @property
    def url(self) -> str:
        """URL of the prefix."""
        return self.inner.url

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        """Store the parts as one object, in the default class."""
        self.inner.put(name, data)
        self.store.classes.pop(name, None)

    def create(self, name: str, data: bytes) -> bool:
        """Store the object if the name is free."""
        return self.inner.create(name, data)

    def get(self, name: str) -> bytes:
        """Return the whole object."""
        self._check(name)
        return self.inner.get(name)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        """Return the bytes of each (offset, length)."""
        self._check(name)
        return self.inner.get_ranges(name, ranges)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        """Return the size of the object and its last bytes."""
        self._check(name)
        return self.inner.tail(name, length)

    def info(self, name: str) -> ObjectInfo | None:
        """Return size and time of an object; archived ones have them, too."""
        return self.inner.info(name)

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        """Yield the objects whose names begin with the prefix."""
        return self.inner.list(prefix, after=after)

    def delete(self, names: Iterable[str]) -> None:
        """Delete these objects."""
        self.inner.delete(names)

    def reconnect(self) -> None:
        """Pass it on."""
        self.inner.reconnect()

    def close(self) -> None:
        """Close the objects."""
        self.inner.close()

    def _check(self, name: str) -> None:
        if self.store.is_archived(name):
            raise ArchivedObject(name)


class ArchivingClasses:
    """`ObjectClasses` of an `ArchivingStore`. Each request goes through the objects, so that a test can kill at it."""

    scheme = "s3"

    def __init__(self, objects: Objects, store: ArchivingStore) -> None:
        self.inner = objects
        self.store = store

    def list(self, prefix: str) -> Iterator[ListedClass]:
        """Yield name and class."""
        for info in self.inner.list(prefix):
            yield ListedClass(
                info.name, self.store.classes.get(info.name, ""), info.name in self.store.kept_warm
            )

    def look(self, name: str) -> ObjectClass:
        """Return the class of an object; each look brings its thaw nearer."""
        if self.inner.info(name) is None:
            raise NoSuchObject(name)
        store = self.store
        if name in store.thawing:
            store.thawing[name] -= 1
            if store.thawing[name] > 0:
                return ObjectClass(store.classes[name], "thawing")
            del store.thawing[name]
            store.thawed.add(name)
        return ObjectClass(store.classes.get(name, ""), "archived" if store.is_archived(name) else "ready")

    def change(self, name: str, storage_class: str) -> None:
        """Move an object to another class, by a copy within the store."""
        if self.store.is_archived(name):
            raise ArchivedObject(name)
        # A copy brings back what was deleted while it was made: the request that a late reply stands for.
        info = self.inner.info(name)
        if info is None:
            raise NoSuchObject(name)
        self.store.classes[name] = storage_class

    def thaw(self, name: str, speed: ThawSpeed, days: int) -> None:
        """Begin to thaw."""
        if self.inner.info(name) is None:
            raise NoSuchObject(name)
        self.store.asked.append((name, speed, days))
        self.store.thawing.setdefault(name, self.store.polls)


AT_ONCE = TierRule(after_seconds=0, storage_class="GLACIER", keep_newest=1)


class World(NamedTuple):
    """Remote with two snapshots of one host that share half of their files."""

    memory: MemoryObjects
    store: ArchivingStore
    remote: Remote
    host: RemoteHost
    first: str
    second: str

    def move(self, cache: Path, rule: TierRule = AT_ONCE, *, objects: Objects | None = None) -> PlannedMoves:
        """Apply a rule in a process with these objects."""
        objects = objects or self.memory
        remote = self.remote._replace(objects=ArchivingObjects(objects, self.store))
        with reading(remote, cache) as opened:
            return self.apply(opened, objects, rule)

    def apply(self, opened: ReadableRemote, objects: Objects, rule: TierRule) -> PlannedMoves:
        classes = ArchivingClasses(objects, self.store)
        (moved,) = apply_rules(
            [(opened.readers[0], classes)], [rule], time.time_ns() + 10**9, host="operator"
        )
        return moved

    def names(self, prefix: str) -> set[str]:
        return {info.name for info in self.memory.list(prefix)}


def make_world(place: Path, bucket: str) -> World:
    memory, store = MemoryObjects(bucket), ArchivingStore()
    remote = new_remote(ArchivingObjects(memory, store))
    host = RemoteHost(place, remote)
    rng = random.Random(7)
    write(host.root / "kept", rng.randbytes(9 * BLOCK))
    first_only = [host.root / f"{number}" for number in range(3)]
    for path in first_only:
        write(path, rng.randbytes(9 * BLOCK + 3))
    first = host.snapshot()
    host.upload()
    write(host.root / "kept", rng.randbytes(9 * BLOCK))
    for path in first_only:
        write(path, rng.randbytes(9 * BLOCK + 3))
    second = host.snapshot()
    host.upload()
    return World(memory, store, remote, host, str(first.id), str(second.id))
