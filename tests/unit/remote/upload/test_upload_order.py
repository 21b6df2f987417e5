"""Tests of the order of uploads, by which what a resume needs is there first, and of what a host remembers of the states there."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from support.remote_host import BLOCK, RemoteHost, new_remote, reading
from support.restoring import write

from ciuic import SnapshotManager
from ciuic.maintenance.verify import verify_snapshots
from ciuic.protocol.stored_remotely import RemotePlace, StoredRecord, doubt_record, write_record
from ciuic.remote.access import Remote, repository_space
from ciuic.remote.object_names import manifest_name, parse_pack, split_ref
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import RemoteUnreachable
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.replication import in_order_of_need
from ciuic.remote.stored_facts import StoredFacts, _Note, newest_stored_states
from ciuic.remote.uploader import _READ_AT_ONCE, Stopped
from ciuic.repository.identity import Bytes
from ciuic.repository.record_files import write_note
from ciuic.training.format.reading import read_facts
from ciuic.training.remote.uploads import labels_of

_MIB = 1 << 20


@pytest.fixture
def bucket() -> Iterator[str]:
    name = f"order-{os.urandom(6).hex()}"
    yield name
    forget_bucket(name)


class _Dying(MemoryObjects):
    """Store that answers no request any more after a number of objects were stored; the upload is told to end then."""

    def __init__(self, bucket: str, left: int, stop: threading.Event) -> None:
        super().__init__(bucket)
        self._left = left
        self._stop = stop
        self._lock = threading.Lock()

    def _store(self) -> None:
        with self._lock:
            if not self._left:
                self._stop.set()
                raise RemoteUnreachable("the store is gone")
            self._left -= 1

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self._store()
        super().put(name, data)

    def create(self, name: str, data: bytes) -> bool:
        self._store()
        return super().create(name, data)


def save(host: RemoteHost, job: str, step: int) -> str:
    with SnapshotManager(host.repository.path, name=job) as manager:
        saved = manager.save_snapshot(model={"w": np.full(20_000, float(step))}, step=step, wait=True)
        assert saved is not None
        assert saved.id is not None, saved.error
        return str(saved.id)


def resumed_step(remote: Remote, cache: Path) -> int | None:
    """Return the step at which a training goes on from the remote; None if it has no state."""
    with reading(remote, cache) as opened:
        states = opened.labelled("job", None, None, None).snapshots.ids()
        if not states:
            return None
        repository = opened.repository_of(states)
        assert not verify_snapshots(repository, states, checksum=True).damaged
        return read_facts(repository, states[0]).step


def test_the_newest_state_is_there_when_the_store_dies(tmp_path: Path, bucket: str) -> None:
    """With as many objects as the newest state takes it can be resumed, whatever was snapshotted after it."""
    host = RemoteHost(tmp_path / "host", new_remote(MemoryObjects(f"{bucket}-identity")))
    try:
        save(host, "job", 10)
        save(host, "job", 20)
        write(host.root / "a.log", random.Random(1).randbytes(3 * _MIB))
        host.snapshot()
        step = None
        for count in range(50):
            remote = new_remote(MemoryObjects(f"{bucket}-{count}"))
            stop = threading.Event()
            objects = _Dying(f"{bucket}-{count}", count, stop)
            dying = host.copy(tmp_path / f"host-{count}", remote._replace(objects=objects))
            with pytest.raises(Stopped):
                dying.upload(labels_of, stop=stop)
            step = resumed_step(remote, tmp_path / f"cache-{count}")
            if step is not None:
                break
        assert step == 20
        space = repository_space(remote, host.repository)
        stored = sum(info.size_bytes for info in space.objects.list("packs/data/"))
        # Nothing of the files, which are larger, was sent before.
        assert 0 < stored < _MIB
    finally:
        forget_bucket(f"{bucket}-identity")
        for count in range(50):
            forget_bucket(f"{bucket}-{count}")


def test_snapshots_are_taken_in_the_order_of_need(tmp_path: Path, bucket: str) -> None:
    """First the newest state of each training, then the newest files, then all older ones; nothing that is stored."""
    host = RemoteHost(tmp_path / "host", new_remote(MemoryObjects(bucket)))
    first_a, newest_a, newest_b = save(host, "a", 1), save(host, "a", 2), save(host, "b", 1)
    write(host.root / "file", b"1")
    old_files = str(host.snapshot().id)
    write(host.root / "file", b"2")
    new_files = str(host.snapshot().id)
    infos = host.repository.snapshots.list()

    def order(*stored: str) -> Sequence[str]:
        return [str(info.id) for info in in_order_of_need(host.repository, infos, stored)]

    assert order() == [newest_b, newest_a, new_files, old_files, first_a]
    # An older state waits like anything else once a newer one is there.
    assert order(newest_a) == [newest_b, new_files, old_files, first_a]
    assert order(newest_a, newest_b, new_files) == [old_files, first_a]


class _Putting(MemoryObjects):
    """Memory that notes the order in which objects are stored."""

    names: list[str]

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        super().put(name, data)
        self.names.append(name)


def test_checkpoints_go_before_other_files_of_a_snapshot(tmp_path: Path, bucket: str) -> None:
    """The content of the newest checkpoint is in the first pack, and then older ones and logs."""
    objects = _Putting(bucket)
    objects.names = []
    host = RemoteHost(tmp_path / "host", new_remote(objects))
    rng = random.Random(2)
    contents = {name: rng.randbytes(3 * _MIB) for name in ("a.log", "old.safetensors", "z.safetensors")}
    for number, (name, content) in enumerate(contents.items()):
        (host.root / name).parent.mkdir(exist_ok=True)
        write(host.root / name, content)
        os.utime(host.root / name, ns=(number * 10**9, number * 10**9))
    os.utime(host.root / "a.log")
    host.snapshot()
    host.upload()
    chunk_id = host.repository.identity.chunk_id
    owner = {
        chunk_id(content[at : at + BLOCK]): name
        for name, content in contents.items()
        for at in range(0, len(content), BLOCK)
    }
    order: list[str] = []
    for name in objects.names:
        ref = parse_pack(name)
        if ref is not None and split_ref(ref)[0] == "data":
            records = RemotePackReader(host.remote.sealer, ref).read_table(objects)
            order += [owner[record.id] for record in records]
    assert list(dict.fromkeys(order)) == ["z.safetensors", "old.safetensors", "a.log"]
    # Each chunk once, and in one run for each file but for chunks that are read at once in the order of their places.
    assert len(order) == len(owner)
    rank = [["z.safetensors", "old.safetensors", "a.log"].index(name) for name in order]
    assert all(first <= later for first, later in zip(rank, rank[_READ_AT_ONCE:], strict=False))


REPOSITORY = "ab" * 16
NAS = RemotePlace("nas", "memory://bucket")


def test_a_doubted_remote_has_nothing_to_resume_from(tmp_path: Path) -> None:
    """The newest state is told until the remote is doubted, and again once it was read."""
    name = manifest_name(job="run", epoch=1, step=7, host="h")
    fact = StoredFacts(snapshot="cs-000001", manifest=name, time_ns=1, tags=("training",), roots=(b"run",))
    record = StoredRecord(repository=REPOSITORY, stored=frozenset({"cs-000001"}), tail_ns=1)
    write_record("nas", record, tmp_path)
    (tmp_path / "nas" / REPOSITORY).mkdir()
    write_note(str(tmp_path / "nas" / REPOSITORY), "facts", _Note(facts=(fact,)), durable=False)
    assert newest_stored_states(tmp_path, NAS, [REPOSITORY])[b"run"].step == 7
    doubt_record(NAS, REPOSITORY, "it went back", tmp_path)
    assert newest_stored_states(tmp_path, NAS, [REPOSITORY]) == {}
    write_record("nas", record, tmp_path)
    assert newest_stored_states(tmp_path, NAS, [REPOSITORY])[b"run"].step == 7
