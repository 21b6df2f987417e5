"""Reading of a remote: whatever was uploaded is listed, compared, verified and restored exactly, from nothing."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from support import trees
from support.object_servers import SeaweedFS
from support.remote_host import BLOCK, RemoteHost, flip_object, new_remote, reading
from support.restoring import write
from support.trees import STEPS, play

from ciuic.compare.diff import diff_live, diff_snapshots
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.opening import open_objects
from ciuic.repository import Repository
from ciuic.repository.identity import Bytes
from ciuic.restore import Overwrite, execute, plan_restore
from ciuic.types import Snapshot

Stores = Callable[[], Remote]


@pytest.fixture(scope="module", params=["memory", "file", "s3", "memory in clear"])
def kind(request: pytest.FixtureRequest) -> tuple[str, SeaweedFS | None]:
    """Provide a kind of store, and the server that it needs."""
    # Of the module: a server that begins within a test would count as left behind by it.
    return request.param, request.getfixturevalue("seaweedfs") if request.param == "s3" else None


@pytest.fixture
def new_store(kind: tuple[str, SeaweedFS | None], tmp_path: Path) -> Iterator[Stores]:
    """Provide a maker of empty remotes."""
    name, server = kind
    made = []

    def make() -> Remote:
        made.append(f"reading-{os.urandom(6).hex()}")
        if name == "file":
            return new_remote(open_objects(f"file://{tmp_path}/{made[-1]}", make=True))
        if server is not None:
            return new_remote(server.connect(server.new_url()))
        return new_remote(MemoryObjects(made[-1]), sealed=name == "memory")

    yield make
    for bucket in made:
        forget_bucket(bucket)


def restored(repository: Repository, snapshot: Snapshot, root: Path, place: Path) -> Path:
    """Restore the root into a new directory below ``place``; return it."""
    there = Path(tempfile.mkdtemp(dir=place))
    result = execute(plan_restore(repository, snapshot, [os.fsencode(root)], dest=os.fsencode(there)))
    assert result.complete, result.error()
    return there / root.name


@settings(max_examples=8)
@given(first=STEPS, second=STEPS)
def test_what_was_uploaded_comes_back(tmp_path: Path, new_store: Stores, first: list, second: list) -> None:
    """Random trees with links, holes and attributes are the same bit for bit, diffed and verified, from nothing."""
    place = Path(tempfile.mkdtemp(dir=tmp_path))
    remote = new_store()
    host = RemoteHost(place / "host", remote)
    write(host.root / "seed", random.Random(1).randbytes(3 * BLOCK + 5))
    with open(host.root / "sparse", "wb") as file:
        file.write(b"begin")
        file.seek(50 * BLOCK)
        file.write(b"end")
    manifests = []
    snapshots = []
    for steps in (first, second):
        play(host.root, steps)
        manifests.append(trees.manifest(host.root))
        snapshots.append(host.snapshot())
        host.upload()
    with Repository.open(host.repository.path) as local:
        wanted = [(change.kind, change.path, change.details) for change in diff_snapshots(local, *snapshots)]
    shutil.rmtree(host.repository.path)
    with reading(remote, place / "cache") as opened:
        (repository,) = opened.repositories
        assert set(opened.snapshots.ids()) == {snapshot.id for snapshot in snapshots}
        assert [opened.snapshots.load(snapshot.id) for snapshot in snapshots] == snapshots
        found = [
            (change.kind, change.path, change.details) for change in diff_snapshots(repository, *snapshots)
        ]
        assert found == wanted
        assert list(diff_live(repository, snapshots[1])) == []
        for checksum in (False, True):
            assert verify_snapshots(repository, checksum=checksum).damages == []
        for snapshot, manifest in zip(snapshots, manifests, strict=True):
            trees.assert_same(manifest, trees.manifest(restored(repository, snapshot, host.root, place)))


@pytest.mark.skipif(os.geteuid() != 0, reason="device nodes need root")
def test_every_kind_of_file_comes_back(tmp_path: Path, new_store: Stores) -> None:
    """Devices, sockets, deep paths, ACLs, sparse files and odd names are restored exactly."""
    remote = new_store()
    host = RemoteHost(tmp_path / "host", remote)
    trees.make_everything(host.root)
    manifest = trees.manifest(host.root)
    snapshot = host.snapshot()
    host.upload()
    sparse_bytes = trees.allocated_bytes(host.root / "sparse")
    with reading(remote, tmp_path / "cache") as opened:
        repository = opened.repository_of([snapshot.id])
        there = tmp_path / "there"
        there.mkdir()
        plan = plan_restore(
            repository, snapshot, [os.fsencode(host.root)], dest=os.fsencode(there), special=True
        )
        result = execute(plan)
        assert result.complete, result.error()
    trees.assert_same(manifest, trees.manifest(there / "root"))
    assert trees.allocated_bytes(there / "root" / "sparse") <= sparse_bytes


def test_an_interrupted_restore_goes_on(tmp_path: Path, new_store: Stores) -> None:
    """A restore that is run again changes what differs, and nothing else."""
    remote = new_store()
    host = RemoteHost(tmp_path / "host", remote)
    rng = random.Random(3)
    for number in range(20):
        write(host.root / f"{number}", rng.randbytes(5 * BLOCK))
    manifest = trees.manifest(host.root)
    snapshot = host.snapshot()
    host.upload()
    with reading(remote, tmp_path / "cache") as opened:
        there = restored(opened.repositories[0], snapshot, host.root, tmp_path)
        os.unlink(there / "3")
        (there / "4").write_bytes(b"half")
    with reading(remote, tmp_path / "cache") as opened:
        plan = plan_restore(
            opened.repositories[0],
            snapshot,
            [os.fsencode(host.root)],
            dest=os.fsencode(there.parent),
            overwrite=Overwrite.IF_CHANGED,
        )
        result = execute(plan)
    assert (result.restored, result.complete) == (2, True)
    trees.assert_same(manifest, trees.manifest(there))


class MeetingObjects(MemoryObjects):
    """Objects of which the first two packs are read only at the same time."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self._left = ["", ""]
        self._both = threading.Barrier(2)

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> Sequence[Bytes]:
        if name.startswith("packs/data/") and name not in self._left and "" in self._left:
            self._left[self._left.index("")] = name
            self._both.wait(60)
        return super().get_ranges(name, ranges)


def test_several_packs_are_verified_at_once(tmp_path: Path) -> None:
    """A verification of every byte waits for the store once for several small packs, and names what is damaged in each."""
    bucket = f"meeting-{os.urandom(6).hex()}"
    remote = new_remote(MemoryObjects(bucket))
    host = RemoteHost(tmp_path / "host", remote)
    for number in range(4):
        write(host.root / f"file-{number}", os.urandom(BLOCK))
        host.snapshot()
        host.upload()
    with reading(remote._replace(objects=MeetingObjects(bucket)), tmp_path / "cache") as opened:
        found = verify_snapshots(opened.repositories[0], checksum=True)
    assert found.damages == []
    packs = sorted(info.name for info in remote.objects.list("packs/data/"))
    assert len(packs) == 4
    for name in packs[:2]:
        flip_object(remote.objects, name, at=100)
    with reading(remote, tmp_path / "another") as opened:
        found = verify_snapshots(opened.repositories[0], checksum=True)
    assert len({damage.path for damage in found.damages if damage.path}) == 2
    forget_bucket(bucket)
