"""Tables of packs are read as they are needed: few for a snapshot, all for what is nowhere."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic.remote.access import Remote
from ciuic.remote.object_names import PACKS_PREFIX, PackRef, pack_name, parse_pack
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import ObjectInfo, RemoteUnreachable
from ciuic.remote.reading.remote_repository import TableOrder
from ciuic.remote.remote_index import list_packs
from ciuic.repository.errors import MissingChunk
from ciuic.types import ChunkId


class Noted(MemoryObjects):
    """Objects that note which listings and which ends of objects were asked for."""

    def __init__(self, bucket: str) -> None:
        super().__init__(bucket)
        self.listed: list[str] = []
        self.tails: list[str] = []
        self.unreachable: set[str] = set()

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        self.listed.append(prefix)
        return super().list(prefix, after=after)

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        self.tails.append(name)
        if name in self.unreachable:
            raise RemoteUnreachable("no answer")
        return super().tail(name, length)


@pytest.fixture
def objects() -> Iterator[Noted]:
    yield Noted("table-order")
    forget_bucket("table-order")


@pytest.fixture
def remote(objects: Noted) -> Remote:
    return new_remote(objects)


def three_snapshots(place: Path, remote: Remote) -> tuple[RemoteHost, list[str]]:
    """Upload three snapshots whose content differs wholly, but for one file of the first; return their ids."""
    host = RemoteHost(place / "host", remote)
    write(host.root / "kept", random.Random(0).randbytes(2 * BLOCK))
    ids = []
    for number in range(3):
        write(host.root / "new", random.Random(1 + number).randbytes(3 * BLOCK))
        ids.append(host.snapshot().id)
        host.upload()
    return host, ids


def test_a_snapshots_own_packs_are_enough(tmp_path: Path, objects: Noted, remote: Remote) -> None:
    """What was uploaded for a snapshot is read from the packs that its manifest names, without a listing of packs."""
    host, ids = three_snapshots(tmp_path, remote)
    objects.listed, objects.tails = [], []
    with reading(remote, tmp_path / "cache") as opened:
        repository = opened.repositories[0]
        snapshot = opened.snapshots.load(ids[2])
        tree = repository.trees.entry(snapshot.roots[0].entry.content, b"new")
        assert tree is not None
        blocks = repository.block_maps.ids(tree.content, tree.map_height, 3)
        content = b"".join(repository.chunks.get(chunk) for _, chunk in blocks)
    assert content == (host.root / "new").read_bytes()
    assert not [prefix for prefix in objects.listed if prefix.startswith(PACKS_PREFIX)]
    assert 0 < len(objects.tails) <= 2 < len(list_packs(objects))


def test_what_other_snapshots_stored_is_found(tmp_path: Path, objects: Noted, remote: Remote) -> None:
    """A file of the first snapshot is found for the last one, and the whole index stays for the next process."""
    host, ids = three_snapshots(tmp_path, remote)
    objects.tails = []
    for first in (True, False):
        with reading(remote, tmp_path / "cache") as opened:
            repository = opened.repositories[0]
            snapshot = opened.snapshots.load(ids[2])
            tree = repository.trees.entry(snapshot.roots[0].entry.content, b"kept")
            assert tree is not None
            blocks = repository.block_maps.ids(tree.content, tree.map_height, 2)
            content = b"".join(repository.chunks.get(chunk) for _, chunk in blocks)
            assert content == (host.root / "kept").read_bytes()
            if first:
                with pytest.raises(MissingChunk):
                    repository.chunks.get(ChunkId(bytes(16)))
    # No table was read twice, and all of them once.
    assert sorted(objects.tails) == sorted(map(pack_name, list_packs(objects)))


def test_a_table_that_was_not_read_is_read_later(tmp_path: Path, objects: Noted, remote: Remote) -> None:
    """A store that does not answer for a while hides nothing afterwards."""
    _, ids = three_snapshots(tmp_path, remote)
    with reading(remote, tmp_path / "cache") as opened:
        repository = opened.repositories[0]
        repository.reader.retry._seconds = 0
        snapshot = opened.snapshots.load(ids[2])
        objects.unreachable = set(map(pack_name, list_packs(objects)))
        with pytest.raises(RemoteUnreachable):
            repository.chunks.get(ChunkId(snapshot.roots[0].entry.content))
        objects.unreachable = set()
        assert repository.chunks.get(ChunkId(snapshot.roots[0].entry.content))


REFS = st.lists(
    st.tuples(st.sampled_from("dm"), st.integers(0, 40), st.integers(0, 1000)),
    unique_by=lambda one: one[:2],
)


@given(REFS, st.sets(st.integers(0, 40)), st.integers(0, 1000))
def test_every_pack_has_its_turn(packs: list[tuple[str, int, int]], known: set[int], around_ns: int) -> None:
    """Every listed pack that is not known is taken once, those of trees before those of data."""
    listed = {
        PackRef(f"{kind}{number:032x}"): ObjectInfo("", 1, modified_ns) for kind, number, modified_ns in packs
    }
    seen = {ref for ref in listed if int(ref[1:], 16) in known}
    order = TableOrder()
    order.prefer(list(listed)[:3], around_ns)
    taken = order.take_preferred(seen)
    order.found(listed, {*seen, *taken})
    while more := order.take(seen):
        taken += more
    assert sorted(taken) == sorted(ref for ref in listed if ref not in seen)
    rest = [ref[0] for ref in taken if ref not in list(listed)[:3]]
    assert rest == sorted(rest, reverse=True)


@pytest.mark.parametrize("many", [1, 10, 50, 51, 99, 100])
def test_many_packs_are_listed_alike(objects: Noted, many: int) -> None:
    """A listing by parts has the packs that a listing of everything has, and nothing else."""
    rng = random.Random(4)
    for kind in ("data", "meta"):
        for _ in range(50):
            id_ = rng.randbytes(16).hex()
            objects.put(f"{PACKS_PREFIX}{kind}/{id_[:2]}/{id_}", [os.urandom(3)])
    for other in ("data/00/other", "data/7", "data/7/x", "data/g/x", "meta/00", "more/00/x"):
        objects.put(f"{PACKS_PREFIX}{other}", [b""])
    few = list_packs(objects)
    objects.listed = []
    assert list_packs(objects, many=many) == few
    assert len(few) == 100
    assert 1 < len(objects.listed) <= 34
    assert all(parse_pack(info.name) == ref for ref, info in few.items())
