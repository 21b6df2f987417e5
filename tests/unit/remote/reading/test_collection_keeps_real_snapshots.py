"""Collection with the marks of real snapshots: what they need stays, what nothing needs goes."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.remote_world import MemoryState
from support.restoring import write

from ciuic.errors import Damaged
from ciuic.maintenance.verify import verify_snapshots
from ciuic.remote.access import Remote
from ciuic.remote.documents import LogRemove
from ciuic.remote.log_reader import LogReader, Rounds
from ciuic.remote.object_names import PACKS_PREFIX, new_hex_id
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.reading.remote_repository import SpaceReader
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.upkeep.collection_round import CollectionPolicy, CollectionResult, Collector, live_chunks
from ciuic.remote.uploader import Labels
from ciuic.remote.writer_log import WriterLog, append_to_log
from ciuic.repository import Repository
from ciuic.types import Snapshot


@pytest.fixture
def host(tmp_path: Path) -> Iterator[RemoteHost]:
    """Provide a host with a remote of its own."""
    name = f"marking-{os.urandom(6).hex()}"
    yield RemoteHost(tmp_path / "host", new_remote(MemoryObjects(name)))
    forget_bucket(name)


def collect(
    remote: Remote, reader: SpaceReader, *, between: Callable[[], None] = lambda: None
) -> CollectionResult:
    """Run one round of a new collector."""
    index = RemoteIndex.open(None)
    try:
        rounds = Rounds(remote.objects, remote.sealer, known=index.rounds_finished)
        log = WriterLog(
            remote.objects,
            remote.sealer,
            MemoryState(),  # type: ignore[arg-type]
            rounds,
            host="collector",
            repository=new_hex_id(),
        )
        return Collector(
            remote.objects,
            remote.sealer,
            log=log,
            reader=LogReader(remote.objects, remote.sealer),
            index=index,
            mark=live_chunks(reader, between=between),
            policy=CollectionPolicy(young_ns=0, repack_share=0.9),
        ).run()
    finally:
        index.close()


def forget(remote: Remote, snapshot: str) -> None:
    """Remove a snapshot from the remote."""
    logs = LogReader(remote.objects, remote.sealer)
    logs.refresh()
    (manifest,) = [name for name, live in logs.live().items() if live.snapshot == snapshot]
    ((writer, summary),) = [(w, s) for w, s in logs.logs.items() if manifest in s.committed]
    entry = LogRemove(nonce=new_hex_id(), manifests=(manifest,))
    assert append_to_log(remote.objects, remote.sealer, writer, summary, entry)


def packs_of(remote: Remote) -> set[str]:
    return {info.name for info in remote.objects.list(PACKS_PREFIX)}


def test_what_snapshots_need_stays(host: RemoteHost, tmp_path: Path) -> None:
    """After each removal and collection every snapshot that is left verifies to its last byte; the rest goes."""
    remote, rng = host.remote, random.Random(1)
    left = []
    for number in range(4):
        write(host.root / f"{number % 3}", rng.randbytes(20 * BLOCK))
        write(host.root / "shared" / f"{number}", rng.randbytes(3 * BLOCK))
        os.link(host.root / f"{number % 3}", host.root / f"link {number}")
        left.append(host.snapshot())
        host.upload()
    before = packs_of(remote)
    collected = set()
    while left:
        forget(remote, left.pop(rng.randrange(len(left))).id)
        with reading(remote, tmp_path / "collector") as opened:
            collected |= {*collect(remote, opened.readers[0]).packs}
        # With a cache from before the collection, and without one.
        for cache in ("host", f"new {len(left)}"):
            with reading(remote, tmp_path / cache) as opened:
                assert opened.snapshots.names() == {snapshot.id for snapshot in left}
                found = verify_snapshots(opened.repositories[0], checksum=True)
                assert (found.damages, found.files > 0) == ([], bool(left))
    assert len(collected) >= len(before)
    assert packs_of(remote) == set()


def test_an_upload_sends_again_what_a_collection_took_meanwhile(host: RemoteHost, tmp_path: Path) -> None:
    """What a running upload knew to be stored counts no more once the snapshot that had it was collected."""
    remote, seen = host.remote, list[str]()
    write(host.root / "file", random.Random(4).randbytes(20 * BLOCK))
    snapshots = [host.snapshot() for _ in range(2)]

    def collect_first(repository: Repository, snapshot: Snapshot) -> Labels:
        seen.append(snapshot.id)
        if len(seen) == 2:
            forget(remote, seen[0])
            with reading(remote, tmp_path / "collector") as opened:
                assert collect(remote, opened.readers[0]).packs
        return Labels()

    host.upload(collect_first)
    # The second one is begun again.
    assert seen == [snapshots[1].id, snapshots[0].id, snapshots[0].id]
    with reading(remote, tmp_path / "new") as opened:
        found = verify_snapshots(opened.repositories[0], [snapshots[0].id], checksum=True)
        assert (found.damages, found.files) == ([], 1)


def test_a_restore_goes_on_beside_a_collection(host: RemoteHost, tmp_path: Path) -> None:
    """A reader whose index is older than a collection finds the chunks in the packs that they were copied to."""
    remote, rng = host.remote, random.Random(2)
    write(host.root / "kept", rng.randbytes(10 * BLOCK))
    write(host.root / "dropped", rng.randbytes(100 * BLOCK))
    first = host.snapshot()
    host.upload()
    os.unlink(host.root / "dropped")
    second = host.snapshot()
    host.upload()
    with reading(remote, tmp_path / "reader") as opened:
        repository = opened.repositories[0]
        assert verify_snapshots(repository, [second.id]).damages == []
        before = packs_of(remote)
        forget(remote, first.id)
        with reading(remote, tmp_path / "collector") as others:
            assert collect(remote, others.readers[0]).repacked_bytes > 0
        assert before - packs_of(remote)
        assert verify_snapshots(repository, [second.id], checksum=True).damages == []


def test_nothing_is_collected_where_a_tree_cannot_be_read(host: RemoteHost, tmp_path: Path) -> None:
    """With a lost meta pack, or a damaged manifest, a collection ends with an error and deletes nothing."""
    remote, rng = host.remote, random.Random(3)
    for _ in range(2):
        write(host.root / "file", rng.randbytes(10 * BLOCK))
        snapshot = host.snapshot()
        host.upload()
    forget(remote, snapshot.id)
    for prefix in ("packs/meta/", "manifests/"):
        stored = {info.name: bytes(remote.objects.get(info.name)) for info in remote.objects.list(prefix)}
        for name in stored:
            remote.objects.put(name, [b"?" * 100])
        before = packs_of(remote)
        with reading(remote, tmp_path / f"cache {prefix[:4]}") as opened, pytest.raises(Damaged):
            collect(remote, opened.readers[0])
        assert packs_of(remote) == before
        for name, data in stored.items():
            remote.objects.put(name, [data])
