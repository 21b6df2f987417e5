"""Remote with old and new data, whose store archives, for tests of tiers."""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import NamedTuple

from support.archiving_objects import ArchivingClasses, ArchivingObjects, ArchivingStore
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.config import TierRule
from ciuic.remote.access import Remote
from ciuic.remote.objects.memory_objects import MemoryObjects
from ciuic.remote.objects.model import Objects
from ciuic.remote.reading.opening import ReadableRemote
from ciuic.remote.upkeep.tier_moves import PlannedMoves, apply_rules

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
