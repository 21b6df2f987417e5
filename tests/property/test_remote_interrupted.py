"""A collection of a real remote that is killed at any request: what is kept verifies, and another collector ends it.

`test_remote_protocol.py` has every stop of a collection beside an upload among the states that it searches, and
`test_collection_keeps_real_snapshots.py` has collections of real repositories.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from support.dying_objects import DyingObjects, Killed
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, resolve_snapshots
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.uploader import Labels
from ciuic.repository import Repository
from ciuic.types import Snapshot

pytestmark = pytest.mark.full
POLICY = CollectionPolicy(young_ns=0, repack_share=0.6)


class World(NamedTuple):
    """A remote from which a snapshot was given up whose host is about to upload one with the same content."""

    remote: Remote
    host: RemoteHost
    objects: dict[str, bytes]
    kept: frozenset[str]
    given_up: str


def files(seed: str, root: Path, names: Iterable[int]) -> None:
    rng = random.Random(seed)
    for number in names:
        write(root / f"{number}", rng.randbytes(5 * BLOCK + 3))


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    place = tmp_path_factory.mktemp("interrupted")
    name = f"interrupted-{os.urandom(6).hex()}"
    remote = new_remote(MemoryObjects(name))
    host, other = (RemoteHost(place / name, remote, name=name) for name in ("alpha", "beta"))
    files("common", host.root, range(2))
    files("common", other.root, range(2))
    files("old", host.root, range(2, 6))
    given_up = host.snapshot().id
    host.upload()
    files("new", host.root, range(2, 5))
    kept = {host.snapshot().id}
    host.upload()
    kept.add(other.snapshot().id)
    other.upload()
    with reading(remote, place / "cache") as opened:
        give_up_snapshots(opened, resolve_snapshots(opened, [given_up]), host="operator")
    # The host has it no more; what it uploads next refers to the same chunks.
    with host.repository.writer() as writer:
        writer.remove_snapshots([given_up])
    files("old", host.root, range(2, 6))
    later = host.snapshot().id
    objects = {info.name: bytes(remote.objects.get(info.name)) for info in remote.objects.list("")}
    yield World(remote, host, objects, frozenset(map(str, {*kept, later})), str(given_up))
    forget_bucket(name)


class Trial:
    """A copy of the world in which a collector is killed after a number of requests."""

    def __init__(self, world: World, place: Path, requests: int) -> None:
        self.bucket = f"trial-{os.urandom(6).hex()}"
        self.world = world
        self.place = place
        objects = MemoryObjects(self.bucket)
        for name, data in world.objects.items():
            objects.put(name, [data])
        self.remote = world.remote._replace(objects=objects)
        self.host = world.host.copy(place / "host", self.remote)
        self._dying = world.remote._replace(objects=DyingObjects(objects, requests))
        self.survived = False

    def killed_collection(self) -> None:
        """Collect until killed."""
        try:
            with reading(self._dying, self.place / "killed") as opened:
                collect_remote(opened, host="killed", policy=POLICY)
        except Killed:
            return
        self.survived = True

    def judge(self) -> None:
        """Have another collector end the work; assert that all kept snapshots verify before and after."""
        kept = set(self.world.kept)
        for cache in ("before", "after"):
            with reading(self.remote, self.place / cache) as opened:
                assert set(opened.snapshots.ids()) == kept
                assert verify_snapshots(opened.repositories[0], checksum=True).damages == []
            if cache == "before":
                with reading(self.remote, self.place / "second") as opened:
                    collect_remote(opened, host="second", policy=POLICY)
        # Nothing waits for a dead collector.
        rounds = {info.name for info in self.remote.objects.list("gc/")}
        assert {name for name in rounds if "." not in name} == {
            name.removesuffix(".done") for name in rounds if name.endswith(".done")
        }
        manifests = {info.name for info in self.remote.objects.list("manifests/")}
        assert len(manifests) == len(kept)
        self.host.repository.close()
        forget_bucket(self.bucket)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["between the runs", "beside an upload"])
def test_a_collection_killed_at_any_request(world: World, tmp_path: Path, way: str) -> None:
    """For each n: killed after n requests, then or meanwhile an upload of what it condemns, then another collector."""
    requests = 0
    while True:
        trial = Trial(world, tmp_path / str(requests), requests)
        if way == "between the runs":
            trial.killed_collection()
            trial.host.upload()
        else:

            def collect_now(repository: Repository, snapshot: Snapshot, trial: Trial = trial) -> Labels:
                # The chunks were looked up and found, and nothing commits them yet.
                if not trial.survived and not (trial.place / "killed").exists():
                    trial.killed_collection()
                return Labels()

            trial.host.upload(collect_now)
        trial.judge()
        if trial.survived:
            break
        requests += 1
    # It had begun, decided, deleted and ended.
    assert requests > 30
