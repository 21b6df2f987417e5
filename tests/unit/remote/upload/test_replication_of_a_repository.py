"""Replication of a repository: everything committed is whole, nothing is sent twice, interruptions go on."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from blake3 import blake3
from support.stored import Tree, store

from ciuic.config import RemoteConfig
from ciuic.remote.access import Remote, init_remote, open_remote
from ciuic.remote.documents import decode_manifest, object_digest
from ciuic.remote.errors import DamagedRemote
from ciuic.remote.log_reader import LogReader
from ciuic.remote.object_names import PACKS_PREFIX, parse_pack
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import NoSuchBucket, Objects, RemoteUnreachable
from ciuic.remote.objects.wrappers import CountingObjects
from ciuic.remote.pack import RemotePackReader
from ciuic.remote.replication import Replication
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.uploader import Labels, Persistence, Stopped
from ciuic.repository import Repository, Walker
from ciuic.repository.block_maps import BlockMaps
from ciuic.repository.chunk_reader import unpack
from ciuic.repository.directory_trees import Trees
from ciuic.repository.identity import Bytes
from ciuic.repository.pack_directory import Packs
from ciuic.repository.snapshot_format import StoredMarks, apply_marks, decode_snapshot
from ciuic.retention import RetentionPolicy
from ciuic.types import ChunkId, Snapshot


class StoredChunks:
    """Content of every chunk in the packs of a remote, decoded and compared with its id."""

    def __init__(self, remote: Remote) -> None:
        self._remote = remote
        self._stored: dict[bytes, tuple[bytes, int, int, bytes]] = {}
        self.packs = 0
        self.copies = 0
        for info in remote.objects.list(PACKS_PREFIX):
            ref = parse_pack(info.name)
            assert ref is not None, info.name
            reader = RemotePackReader(remote.sealer, ref)
            records = reader.check(bytes(remote.objects.get(info.name)))
            self.packs += 1
            self.copies += len(records)
            for record, data in zip(records, reader.read_records(remote.objects, records), strict=True):
                self._stored[record.id] = (bytes(data), record.raw_bytes, record.flags, record.base)

    def get(self, chunk: ChunkId) -> bytes:
        data, raw_bytes, flags, base = self._stored[chunk]
        content = unpack(data, raw_bytes, flags, base=self.get(ChunkId(base)) if base else None)
        assert self._remote.identity.chunk_id(content) == chunk
        return content

    def __contains__(self, chunk: object) -> bool:
        return chunk in self._stored

    def __len__(self) -> int:
        return len(self._stored)


class _Source:
    """Trees and block maps of a remote snapshot, for a walk."""

    def __init__(self, chunks: StoredChunks, block_size: int) -> None:
        self.trees = Trees(chunks)
        self.block_maps = BlockMaps(chunks)
        self.block_size = block_size


def committed(remote: Remote) -> dict[str, Snapshot]:
    """Return the snapshots that logs commit, by the names of their manifests."""
    reader = LogReader(remote.objects, remote.sealer)
    reader.refresh()
    found = {}
    for name, live in reader.live().items():
        data = bytes(remote.objects.get(name))
        assert object_digest(data) == live.digest == blake3(data).hexdigest()
        manifest = decode_manifest(remote.sealer, name, data)
        stored = decode_snapshot(live.snapshot, manifest.snapshot, live.repository)
        found[name] = apply_marks(stored, StoredMarks(id=live.snapshot))
    return found


def assert_whole(
    remote: Remote, *, each: Callable[[Snapshot], None] = lambda snapshot: None
) -> dict[str, Snapshot]:
    """Read every committed snapshot to its last byte; return them by the names of their manifests."""
    chunks = StoredChunks(remote)
    source = _Source(chunks, remote.stored.block_size)
    found = committed(remote)
    for snapshot in found.values():
        for reached in Walker(source).walk(snapshot):
            if reached.kind == "data":
                chunks.get(reached.id)
        each(snapshot)
    return found


BLOCK = 4096


@pytest.fixture
def bucket(request: pytest.FixtureRequest) -> Iterator[str]:
    name = f"b-{abs(hash(request.node.nodeid)):x}"
    yield name
    forget_bucket(name)


def random_tree(rng: random.Random, depth: int = 2) -> Tree:
    tree: dict[bytes, object] = {}
    for number in range(rng.randrange(1, 6)):
        name = b"%d" % number
        if depth and rng.random() < 0.3:
            tree[name] = random_tree(rng, depth - 1)
        else:
            size = rng.choice((0, 10, BLOCK, 3 * BLOCK + 5, 9 * BLOCK))
            tree[name] = bytes(size) if rng.random() < 0.1 else rng.randbytes(size)
    return tree


class Host:
    """Repository of one host, and its uploader."""

    def __init__(self, path: Path, remote: Remote | None, *, name: str = "host") -> None:
        self.path = path
        self.name = name
        self.keep_last = 100
        path.mkdir()
        self.repository = Repository.create(
            path / "repository", block_size=BLOCK, identity=None if remote is None else remote.identity
        )
        (path / "state").mkdir()

    def store(self, number: int, tree: Tree, root: bytes = b"/root") -> None:
        with self.repository.writer() as writer:
            store(writer, tree, number=number, root=root)

    def remove(self, number: int) -> None:
        with self.repository.writer() as writer:
            writer.remove_snapshots(
                [id_ for id_ in self.repository.snapshots.ids() if id_ == f"cs-{number:06x}"]
            )

    def replication(self, stop: threading.Event | None = None) -> Replication:
        packs = Packs(
            str(self.path / "repository" / "packs"),
            bytes.fromhex(self.repository.id),
            self.repository.config.hash,
        )
        return Replication(
            self.repository,
            packs,
            RemoteConfig(
                name="remote",
                url="memory://unused",
                keep=RetentionPolicy(keep_within_seconds=0, keep_last=self.keep_last),
            ),
            self.path / "state",
            host=self.name,
            persist=Persistence(stop or threading.Event()),
            labels=lambda repository, snapshot: Labels(),
        )


def new_remote(objects: Objects, *, sealed: bool = True) -> Remote:
    return init_remote(objects, master=MasterKey.generate() if sealed else None, block_size=BLOCK)


@pytest.mark.parametrize("sealed", [True, False])
def test_what_is_committed_is_whole(tmp_path: Path, bucket: str, sealed: bool) -> None:
    """Random snapshots, uploaded as they come, are read back from the remote's objects alone."""
    rng = random.Random(1)
    objects = MemoryObjects(bucket)
    remote = new_remote(objects, sealed=sealed)
    host = Host(tmp_path / "h", remote)
    for number in range(6):
        host.store(number, random_tree(rng))
        if rng.random() < 0.7:
            host.replication().catch_up(remote)
    host.replication().catch_up(remote)
    found = assert_whole(remote)
    assert sorted(snapshot.id for snapshot in found.values()) == [f"cs-{number:06x}" for number in range(6)]


def test_hosts_store_shared_chunks_once(tmp_path: Path, bucket: str) -> None:
    """Two hosts with one identity and the same content send it once."""
    remote = new_remote(MemoryObjects(bucket))
    tree = random_tree(random.Random(2))
    sent = []
    for name in ("a", "b"):
        host = Host(tmp_path / name, remote, name=name)
        host.store(1, tree)
        sent.append(sum(one.sent_bytes for one in host.replication().catch_up(remote)))
    assert sent[0] > 0
    assert sent[1] == 0
    assert len(assert_whole(remote)) == 2


def test_an_older_repository_gets_a_space_of_its_own(tmp_path: Path, bucket: str) -> None:
    """A repository that names chunks by XXH3 is replicated, and its chunks never mix with the remote's."""
    from ciuic.remote.access import repository_space, repository_spaces

    remote = new_remote(MemoryObjects(bucket))
    old = Host(tmp_path / "old", None)
    old.store(1, random_tree(random.Random(3)))
    old.replication().catch_up(remote)
    assert assert_whole(remote) == {}
    space = repository_space(remote, old.repository)
    assert len(assert_whole(space)) == 1
    assert [one.id for one in repository_spaces(remote)] == [old.repository.id]


class Unsteady:
    """Objects of which every few requests fail: before, or after they were carried out."""

    def __init__(self, objects: Objects, rng: random.Random, limit: int) -> None:
        self._objects = objects
        self._rng = rng
        self._left = limit
        self.put_names: list[str] = []

    def __getattr__(self, name: str) -> object:
        method = getattr(self._objects, name)
        if not callable(method):
            return method

        def call(*args: object, **kwargs: object) -> object:
            fails = self._left > 0 and self._rng.random() < 0.2
            if fails:
                self._left -= 1
                if self._rng.random() < 0.5:
                    raise RemoteUnreachable("no reply")
            if name == "put":
                self.put_names.append(str(args[0]))
            result = method(*args, **kwargs)
            if fails:
                raise RemoteUnreachable("the reply was lost")
            return result

        return call


def test_lost_requests_and_replies_lose_nothing(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every fifth request or reply lost, each snapshot is committed exactly once and whole."""
    monkeypatch.setattr("ciuic.remote.uploader._FIRST_PAUSE_SECONDS", 0.001)
    # What needs many requests fails many times, and its pauses double.
    monkeypatch.setattr("ciuic.remote.uploader._LONGEST_PAUSE_SECONDS", 0.001)
    rng = random.Random(4)
    objects = MemoryObjects(bucket)
    remote = new_remote(objects)
    host = Host(tmp_path / "h", remote)
    for number in range(5):
        host.store(number, random_tree(rng))
        unsteady = Unsteady(objects, rng, 60)
        host.replication().catch_up(remote._replace(objects=unsteady))
    found = assert_whole(remote)
    assert sorted(snapshot.id for snapshot in found.values()) == [f"cs-{number:06x}" for number in range(5)]


class WithoutBucket(MemoryObjects):
    """Objects whose bucket is missing for so many requests to store something."""

    missing = 0

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        if self.missing:
            self.missing -= 1
            raise NoSuchBucket(f"cannot store {name}: the bucket tests does not exist")
        super().put(name, data)


@pytest.mark.parametrize("seconds", ["some", "all"])
def test_a_missing_bucket_is_not_a_removed_snapshot(
    seconds: str, tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A bucket that is missing for some seconds of an upload is waited for; one that stays missing ends it by its name."""
    monkeypatch.setattr("ciuic.remote.uploader._FIRST_PAUSE_SECONDS", 0.001)
    objects = WithoutBucket(bucket)
    remote = new_remote(objects)
    host = Host(tmp_path / "h", remote)
    host.store(1, random_tree(random.Random(5)))
    if seconds == "some":
        objects.missing = 3
        assert [done.id for done in host.replication().catch_up(remote)] == ["cs-000001"]
        assert_whole(remote)
    else:
        objects.missing = 1 << 30
        with pytest.raises(NoSuchBucket, match="the bucket tests does not exist"):
            host.replication().catch_up(remote)


class Killing:
    """Objects that end the process, as far as the test can see, after so many stored packs."""

    def __init__(self, objects: Objects, stop: threading.Event, packs: int) -> None:
        self._objects = objects
        self._stop = stop
        self._left = packs
        self._lock = threading.Lock()

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        with self._lock:
            self._left -= 1
            if self._left < 0:
                self._stop.set()
                raise RemoteUnreachable("killed")
        self._objects.put(name, data)


def test_an_interrupted_upload_goes_on_at_the_next_object(
    tmp_path: Path, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped after every second pack, an upload still stores each chunk once."""
    monkeypatch.setattr("ciuic.remote.uploader.FIRST_PACK_BYTES", 8 * BLOCK)
    monkeypatch.setattr("ciuic.remote.uploader.LARGEST_PACK_BYTES", 8 * BLOCK)
    rng = random.Random(5)
    objects = MemoryObjects(bucket)
    remote = new_remote(objects)
    host = Host(tmp_path / "h", remote)
    host.store(1, {b"%d" % number: rng.randbytes(20 * BLOCK) for number in range(8)})
    stopped = 0
    while True:
        stop = threading.Event()
        try:
            host.replication(stop).catch_up(remote._replace(objects=Killing(objects, stop, 2)))
        except Stopped:
            stopped += 1
            assert stopped < 100
            continue
        break
    assert stopped > 5
    assert_whole(remote)
    chunks = StoredChunks(remote)
    # Two threads may each have had one pack under way whose loss is seen as "stored" by none.
    assert chunks.copies == len(chunks)


def _uploaded_twice(
    tmp_path: Path, bucket: str, rng: random.Random
) -> tuple[MemoryObjects, Remote, Host, dict[str, bytes]]:
    """Return a remote with two snapshots of a host, and its objects as they were with the first one alone."""
    objects = MemoryObjects(bucket)
    remote = new_remote(objects)
    host = Host(tmp_path / "h", remote)
    host.store(1, random_tree(rng))
    host.replication().catch_up(remote)
    before = {info.name: bytes(objects.get(info.name)) for info in objects.list("")}
    host.store(2, random_tree(rng))
    host.replication().catch_up(remote)
    return objects, remote, host, before


def test_a_remote_that_is_older_than_it_was_is_refused(tmp_path: Path, bucket: str) -> None:
    """Who puts back an earlier state of the bucket does not get new snapshots built on it."""
    from ciuic.remote.log_reader import RolledBack

    rng = random.Random(6)
    objects, remote, host, before = _uploaded_twice(tmp_path, bucket, rng)
    now = [info.name for info in objects.list("")]
    objects.delete([name for name in now if name not in before])
    host.store(3, random_tree(rng))
    with pytest.raises(RolledBack, match="had the entry"):
        host.replication().catch_up(remote)


class GoingBack:
    """Objects that are those of an earlier state from the next stored object on."""

    def __init__(self, objects: Objects, before: dict[str, bytes]) -> None:
        self._objects = objects
        self._before: dict[str, bytes] | None = before

    def __getattr__(self, name: str) -> object:
        return getattr(self._objects, name)

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        if self._before is not None:
            names = [info.name for info in self._objects.list("")]
            self._objects.delete([one for one in names if one not in self._before])
            self._before = None
        self._objects.put(name, data)


def test_a_remote_that_goes_back_ends_the_upload_that_notices(tmp_path: Path, bucket: str) -> None:
    """The next snapshot is not committed behind the hole, and nothing counts as stored from then on."""
    from ciuic.protocol.stored_remotely import RemotePlace, is_doubted

    rng = random.Random(6)
    objects, remote, host, before = _uploaded_twice(tmp_path, bucket, rng)
    for number in (3, 4):
        host.store(number, random_tree(rng))
    with pytest.raises(DamagedRemote, match="older than it was"):
        host.replication().catch_up(remote._replace(objects=GoingBack(objects, before)))  # type: ignore[arg-type]
    logs = [name for info in objects.list("w/") if (name := info.name) not in before]
    assert len(logs) == 1
    assert is_doubted(RemotePlace("remote", "memory://unused"), tmp_path / "h/state")


def test_a_remote_that_goes_back_beside_an_idle_upload_is_noticed(tmp_path: Path, bucket: str) -> None:
    """An upload with nothing to send looks again and again: each look is recorded, and one at an older state ends it."""
    from ciuic.protocol.stored_remotely import read_record

    def seen() -> int:
        record = read_record("remote", tmp_path / "h/state")
        assert record is not None
        return record.seen_ns

    objects, remote, host, before = _uploaded_twice(tmp_path, bucket, random.Random(6))
    replication = host.replication()
    with replication._open(remote):
        began_ns = seen()
        replication._look()
        assert seen() == began_ns
        replication._looked = -float("inf")
        replication._look()
        assert seen() > began_ns
        objects.delete([info.name for info in objects.list("") if info.name not in before])
        replication._looked = -float("inf")
        with pytest.raises(DamagedRemote, match="older than it was"):
            replication._look()


def test_the_remote_has_a_retention_of_its_own(tmp_path: Path, bucket: str) -> None:
    """What the remote's rules do not keep is given up there, and not sent again while it is still here."""
    rng = random.Random(8)
    remote = new_remote(MemoryObjects(bucket))
    host = Host(tmp_path / "h", remote)
    host.keep_last = 2
    for number in range(5):
        host.store(number, random_tree(rng))
        if number in (1, 3):
            host.replication().catch_up(remote)
    host.remove(4)
    host.replication().catch_up(remote)
    assert host.replication().catch_up(remote) == []
    assert sorted(one.id for one in assert_whole(remote).values()) == ["cs-000002", "cs-000003"]
    # What went here stays there: the remote may keep it longer.
    host.remove(3)
    host.replication().catch_up(remote)
    assert "cs-000003" in [one.id for one in assert_whole(remote).values()]


def test_no_root_takes_anothers_place(tmp_path: Path, bucket: str) -> None:
    """The rules hold for each root alone: the only snapshot of a training stays, however often another saves."""
    rng = random.Random(9)
    remote = new_remote(MemoryObjects(bucket))
    host = Host(tmp_path / "h", remote)
    host.keep_last = 1
    host.store(0, random_tree(rng), root=b"/quiet")
    for number in range(1, 4):
        host.store(number, random_tree(rng), root=b"/busy")
        host.replication().catch_up(remote)
    assert sorted(one.id for one in assert_whole(remote).values()) == ["cs-000000", "cs-000003"]


def test_damage_here_is_not_sent(tmp_path: Path, bucket: str) -> None:
    """A snapshot with a damaged chunk is not committed, and its content does not reach the remote; others do."""
    rng = random.Random(7)
    remote = new_remote(MemoryObjects(bucket))
    host = Host(tmp_path / "h", remote)
    host.store(1, {b"good": rng.randbytes(2 * BLOCK)})
    bad = rng.randbytes(BLOCK)
    host.store(2, {b"bad": bad})
    for pack in (host.path / "repository" / "packs").iterdir():
        data = bytearray(pack.read_bytes())
        at = data.find(bad)
        if at >= 0:
            data[at] ^= 1
            pack.write_bytes(data)
    host.replication().catch_up(remote)
    assert [snapshot.id for snapshot in assert_whole(remote).values()] == ["cs-000001"]


def test_the_remote_opens_with_its_key_alone(tmp_path: Path, bucket: str) -> None:
    """A machine that never saw the host opens the remote by a slot's secret and names chunks alike."""
    from ciuic.remote.access import add_slot
    from ciuic.remote.errors import WrongKey
    from ciuic.remote.sealing.key_slots import SlotSecret

    remote = new_remote(MemoryObjects(bucket))
    secret, other = SlotSecret("key-file", bytes(32)), SlotSecret("key-file", bytes(31) + b"\1")
    add_slot(remote, "main", secret)
    again = open_remote(MemoryObjects(bucket), [secret])
    assert again.identity == remote.identity
    for wrong in ([other], []):
        with pytest.raises(WrongKey):
            open_remote(MemoryObjects(bucket), wrong)


def test_requests_of_a_snapshot(tmp_path: Path, bucket: str) -> None:
    """A snapshot takes a PUT for each pack and for its manifest, one create, one GET, and no LIST."""
    counted = CountingObjects(MemoryObjects(bucket))
    remote = init_remote(counted, master=MasterKey.generate(), block_size=BLOCK)
    host = Host(tmp_path / "host", remote)
    host.store(1, {b"a": random.Random(1).randbytes(3 * BLOCK)})
    replication = host.replication()
    with replication._open(remote) as uploader:
        for number in range(1, 6):
            if number > 1:
                host.store(number, {b"a": random.Random(number).randbytes((1 << 20) * number)})
            packs = len(list(counted.list(PACKS_PREFIX)))
            before = counted.counts()
            (info,) = list(replication._due())
            assert replication._upload(uploader, info) is not None
            after = counted.counts()
            new = {kind: after[kind].requests - before[kind].requests for kind in after}
            packs = len(list(counted.list(PACKS_PREFIX))) - packs
            assert {kind: count for kind, count in new.items() if count} == {
                "put": packs + 1,
                "create": 1,
                "get": 1,
            }
            assert packs >= 2
