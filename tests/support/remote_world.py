"""Uploaders and collectors on one bucket in memory, and what must hold of the bucket after every request.

The bucket is an object store in memory whose requests a test can order, lose, delay and cut off, one at a time.
"""

from __future__ import annotations

import random
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import xxhash

from ciuic.remote.documents import (
    LiveManifest,
    LogCommit,
    LogRemove,
    LogRetired,
    LogState,
    RemoteManifest,
    decode_log_entry,
    decode_manifest,
    encode_manifest,
    object_digest,
)
from ciuic.remote.log_reader import LogReader, LogSummary, Rounds
from ciuic.remote.object_names import PackRef, manifest_name, parse_log_entry, parse_pack
from ciuic.remote.objects.model import NoSuchObject, ObjectInfo, Objects, RemoteUnreachable
from ciuic.remote.pack import PackLimit, RemotePackReader, RemotePackWriter
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.upkeep.collection_round import CollectionPolicy, Collector, Repacker
from ciuic.remote.writer_log import LogUpkeep, WriterLog, WriterPosition
from ciuic.repository.identity import Bytes
from ciuic.repository.model import PackKind, PackRecord
from ciuic.types import ChunkId

DAY_NS = 86_400 * 10**9
_T = TypeVar("_T")


class Killed(BaseException):
    """SIGKILL at a request. Not an Exception: no handler may catch it."""


class Bucket:
    """Objects in memory. ``clock`` returns the store's time, which may jump."""

    url = "memory://bucket"

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        self.objects: dict[str, tuple[bytes, int]] = {}
        self.clock = clock
        self.requests = 0
        self.deleted: dict[str, None] = {}
        """Names that were deleted, in this order."""

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        self.requests += 1
        self.objects[name] = (b"".join(data), self.clock())

    def decay(self, name: str, at: int) -> None:
        """Flip a bit of an object, as a store does that loses data without a word."""
        data, modified_ns = self.objects[name]
        self.objects[name] = (data[:at] + bytes([data[at] ^ 4]) + data[at:][1:], modified_ns)

    def create(self, name: str, data: bytes) -> bool:
        self.requests += 1
        if name in self.objects:
            return False
        self.objects[name] = (bytes(data), self.clock())
        return True

    def get(self, name: str) -> bytes:
        self.requests += 1
        if name not in self.objects:
            raise NoSuchObject(name)
        return self.objects[name][0]

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        data = self.get(name)
        return [data[offset : offset + length] for offset, length in ranges]

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        data = self.get(name)
        return len(data), data[-length:]

    def info(self, name: str) -> ObjectInfo | None:
        self.requests += 1
        if name not in self.objects:
            return None
        data, modified_ns = self.objects[name]
        return ObjectInfo(name, len(data), modified_ns)

    def page(self, prefix: str, after: str, count: int) -> list[ObjectInfo]:
        """Return one page of a listing."""
        self.requests += 1
        names = sorted(name for name in self.objects if name.startswith(prefix))
        names = names[bisect_right(names, after) :][:count]
        return [ObjectInfo(name, len(self.objects[name][0]), self.objects[name][1]) for name in names]

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        return iter(self.page(prefix, after, 1 << 30))

    def delete(self, names: Iterable[str]) -> None:
        self.requests += 1
        for name in names:
            if self.objects.pop(name, None) is not None:
                self.deleted[name] = None

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


class MeetingBucket(Bucket):
    """Bucket in which requests whose text begins with ``meets`` are answered when ``parties`` of them are under way."""

    def __init__(self, clock: Callable[[], int] = lambda: 0) -> None:
        super().__init__(clock)
        self.meets = ""
        self._place = threading.Barrier(1)

    def meet(self, text: str, parties: int) -> None:
        """Begin with that. A request that stays alone for a minute raises BrokenBarrierError."""
        self.meets, self._place = text, threading.Barrier(parties, timeout=60)

    def _wait(self, text: str) -> None:
        if self.meets and text.startswith(self.meets):
            self._place.wait()

    def create(self, name: str, data: bytes) -> bool:
        self._wait(f"create {name}")
        return super().create(name, data)

    def get(self, name: str) -> bytes:
        self._wait(f"get {name}")
        return super().get(name)

    def info(self, name: str) -> ObjectInfo | None:
        self._wait(f"info {name}")
        return super().info(name)


class Party:
    """Thread that stops before each of its requests until the test lets it go on.

    ``step`` carries out one request of it; exactly one thread runs at any time, so a run depends on the order of
    steps alone.
    """

    def __init__(self, bucket: Bucket, name: str) -> None:
        self.name = name
        self.objects = PartyObjects(bucket, self)
        self.request: str = ""
        """Request that waits; empty if there is none."""
        self.error: BaseException | None = None
        self._go = threading.Semaphore(0)
        self._stopped = threading.Semaphore(0)
        self._fate = "go"
        self._thread: threading.Thread | None = None

    def start(self, work: Callable[[], Any]) -> None:
        """Begin the work and run it up to its first request."""
        assert self._thread is None
        self.error = None
        self._thread = threading.Thread(target=self._run, args=(work,), name=self.name, daemon=True)
        self._thread.start()
        self._wait()

    @property
    def running(self) -> bool:
        return self._thread is not None

    def step(self, fate: str = "go") -> None:
        """Carry out the request that waits, as ``fate`` says, and run up to the next."""
        self._fate = fate
        self._go.release()
        self._wait()

    def kill(self) -> None:
        """End the party before its request."""
        if self.running:
            self.step("kill before")

    def _wait(self) -> None:
        self._stopped.acquire()
        if self._thread is not None and not self.request:
            self._thread.join()
            self._thread = None

    def _run(self, work: Callable[[], Any]) -> None:
        try:
            work()
        except BaseException as error:
            self.error = error
        finally:
            self.request = ""
            self._stopped.release()

    def gate(self, request: str) -> str:
        """Wait for the test; return what happens to the request."""
        self.request = request
        self._stopped.release()
        self._go.acquire()
        if self._fate == "kill before":
            raise Killed(request)
        return self._fate


class PartyObjects:
    """Bucket as one party sees it."""

    url = "memory://bucket"

    def __init__(self, bucket: Bucket, party: Party) -> None:
        self.bucket = bucket
        self.page_size = 1 << 30
        self.late: list[Callable[[], object]] = []
        """Requests whose sender has given up, and which may still arrive."""
        self._party = party

    def _request(self, text: str, call: Callable[[], _T]) -> _T:
        fate = self._party.gate(text)
        if fate == "late":
            # A reply to what only reads has nobody left to read it.
            if text.startswith(("put", "create", "delete")):
                self.late.append(call)
            raise RemoteUnreachable(f"{text}: no reply")
        if fate == "lose request":
            raise RemoteUnreachable(f"{text}: not sent")
        result = call()
        if fate == "lose reply":
            raise RemoteUnreachable(f"{text}: no reply")
        if fate == "kill after":
            raise Killed(text)
        return result

    def put(self, name: str, data: Sequence[Bytes]) -> None:
        copied = b"".join(data)
        self._request(f"put {name}", lambda: self.bucket.put(name, [copied]))

    def create(self, name: str, data: bytes) -> bool:
        return self._request(f"create {name}", lambda: self.bucket.create(name, data))

    def get(self, name: str) -> bytes:
        return self._request(f"get {name}", lambda: self.bucket.get(name))

    def get_ranges(self, name: str, ranges: Sequence[tuple[int, int]]) -> list[bytes]:
        return self._request(f"get {name}", lambda: self.bucket.get_ranges(name, ranges))

    def tail(self, name: str, length: int) -> tuple[int, bytes]:
        return self._request(f"tail {name}", lambda: self.bucket.tail(name, length))

    def info(self, name: str) -> ObjectInfo | None:
        return self._request(f"info {name}", lambda: self.bucket.info(name))

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        # Page by page, as stores do: what is created between two pages may show up in the second alone.
        while True:
            page = self._request(f"list {prefix}", partial(self.bucket.page, prefix, after, self.page_size))
            yield from page
            if len(page) < self.page_size:
                return
            after = page[-1].name

    def delete(self, names: Iterable[str]) -> None:
        copied = list(names)
        if copied:
            self._request(f"delete {len(copied)}", lambda: self.bucket.delete(copied))

    def reconnect(self) -> None:
        pass

    def close(self) -> None:
        pass


def jumping_clock(rng: random.Random) -> Callable[[], int]:
    """Return a store's clock that is up to a day early or late at every look."""
    return lambda: 40 * DAY_NS + rng.randrange(-DAY_NS, DAY_NS)


REMOTE_ID = bytes(range(16))
REPOSITORY = "ab" * 16
EAGER = CollectionPolicy(young_ns=0, repack_share=0.5)


class Ids:
    """Random names of one process, the same in every run with this seed."""

    def __init__(self, seed: object) -> None:
        self._rng = random.Random(str(seed))

    def hex(self) -> str:
        return self.bytes(16).hex()

    def bytes(self, count: int) -> bytes:
        return self._rng.randbytes(count)

    def ref(self, kind: PackKind) -> PackRef:
        return PackRef(kind[0] + self.hex())


class MemoryState:
    """Stand-in for the local file of a log's name."""

    def __init__(self, position: WriterPosition | None = None) -> None:
        self.position = position

    def load(self) -> WriterPosition | None:
        return self.position

    def save(self, position: WriterPosition) -> None:
        self.position = position


def sealer(ids: Ids) -> Sealer:
    return Sealer(REMOTE_ID, None, random_bytes=ids.bytes)


def chunk(number: int) -> ChunkId:
    return ChunkId(xxhash.xxh3_128_digest(b"%d" % number))


def record(id_: ChunkId, base: ChunkId | None = None) -> tuple[PackRecord, bytes]:
    """Return a record of a chunk, whose stored bytes are its id; with a base it passes for a difference."""
    checksum = xxhash.xxh3_64_intdigest(id_)
    flags = 6 if base else 0
    return PackRecord(id_, 0, 16, 16, flags, checksum, base or b""), bytes(id_)


def store_pack(
    objects: Objects, sealer: Sealer, ref: PackRef, records: Iterable[tuple[PackRecord, bytes]]
) -> list[PackRecord]:
    """Store a pack; return its records."""
    writer = RemotePackWriter(sealer, ref, capacity_bytes=1 << 14)
    for some, stored in records:
        assert writer.add(some, stored) is not None
    objects.put(writer.name, writer.finish())
    return writer.records


def mark_manifests(objects: Objects, sealer: Sealer) -> Callable[[Mapping[str, LiveManifest]], set[bytes]]:
    """Return a marker: the snapshot file in a manifest of these tests is the ids of its chunks."""

    def mark(snapshots: Mapping[str, LiveManifest]) -> set[bytes]:
        live: set[bytes] = set()
        for name in sorted(snapshots):
            live.update(chunks_of(decode_manifest(sealer, name, objects.get(name))))
        return live

    return mark


def chunks_of(manifest: RemoteManifest) -> list[bytes]:
    return [manifest.snapshot[at : at + 16] for at in range(0, len(manifest.snapshot), 16)]


class Uploader:
    """Process that uploads snapshots: the smallest correct one."""

    def __init__(
        self, objects: Objects, ids: Ids, state: MemoryState, index: RemoteIndex, *, list_packs: bool = True
    ) -> None:
        self.objects = objects
        self.ids = ids
        self.sealer = sealer(ids)
        self.index = index
        self.rounds = Rounds(objects, self.sealer, known=index.rounds_finished)
        self.list_packs = list_packs
        self.log = WriterLog(
            objects,
            self.sealer,
            state,  # type: ignore[arg-type]
            self.rounds,
            host="host",
            repository=REPOSITORY,
            new_id=ids.hex,
        )

    def begin(self) -> None:
        self.log.hello()
        self.index.follow(self.rounds)
        if self.list_packs:
            self.index.refresh(self.objects, self.sealer)

    def upload(self, chunks: Mapping[ChunkId, ChunkId | None], snapshot: str, *, sloppy: bool = False) -> str:
        """Upload and commit a snapshot of these chunks, each with its base or None; return its manifest."""
        wanted = {*chunks, *(base for base in chunks.values() if base)}
        packs: list[PackRef] = []
        manifest = ""
        digest = ""
        while True:
            checked = self.rounds.version
            missing = sorted(wanted - self.index.has_many(wanted))
            if missing:
                ref = self.ids.ref("data")
                records = [record(id_, chunks.get(id_)) for id_ in missing]
                stored = store_pack(self.objects, self.sealer, ref, records)
                self.index.add(ref, 0, stored)
                packs.append(ref)
            if not manifest or manifest in self.rounds.manifests:
                manifest = manifest_name(job="j", epoch=0, step=0, host="h", random=self.ids.hex())
                data = encode_manifest(
                    self.sealer,
                    manifest,
                    RemoteManifest(snapshot=b"".join(sorted(chunks)), writer=self.log.writer, host="h"),
                )
                digest = object_digest(data)
                self.objects.put(manifest, [data])
            if self.log.commit(snapshot, manifest, digest, packs, checked=checked):
                return manifest


def make_collector(
    objects: Objects,
    ids: Ids,
    state: MemoryState,
    index: RemoteIndex,
    *,
    logs: dict[str, LogSummary] | None = None,
    max_entries: int = 6,
    policy: CollectionPolicy = EAGER,
    threads: int = 1,
) -> Collector:
    seals = sealer(ids)
    reader = LogReader(objects, seals, threads=1)
    # What an earlier process of this host has kept.
    reader.logs = {} if logs is None else logs
    log = WriterLog(
        objects,
        seals,
        state,  # type: ignore[arg-type]
        Rounds(objects, seals, known=index.rounds_finished),
        host="collector",
        repository=REPOSITORY,
        new_id=ids.hex,
    )
    return Collector(
        objects,
        seals,
        log=log,
        reader=reader,
        index=index,
        mark=mark_manifests(objects, seals),
        policy=policy,
        upkeep=LogUpkeep(
            objects,
            seals,
            reader,
            max_entries=max_entries,
            retire_ns=3 * DAY_NS // 2,
            new_id=ids.hex,
            threads=threads,
        ),
        repacker=lambda: Repacker(objects, seals, limit=PackLimit(1 << 14), new_ref=ids.ref),
        new_id=ids.hex,
        threads=threads,
    )


class BucketJudge:
    """Reads a bucket as the page says, without the code under test, and says what is wrong with it."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket
        self._sealer = Sealer(REMOTE_ID, None)
        self._decoded: dict[tuple[str, bytes], object] = {}
        self.acknowledged: set[str] = set()
        """Manifests whose commit has returned, and whose removal has not begun."""
        self.gone: set[str] = set()
        """Manifests whose removal has returned."""
        self.kept: set[str] = set()
        """Manifests that nobody removes, whatever becomes of their logs."""

    def live(self) -> set[str]:
        """Return the manifests of the snapshots that exist."""
        logs: dict[str, dict[int, str]] = {}
        for name in self._bucket.objects:
            if position := parse_log_entry(name):
                logs.setdefault(position.writer, {})[position.number] = name
        committed: set[str] = set()
        removed: set[str] = set()
        for writer, names in logs.items():
            entries = [
                self._decode(names[number], partial(decode_log_entry, self._sealer, writer, number))
                for number in sorted(names)
            ]
            sums = [at for at, entry in enumerate(entries) if isinstance(entry, LogState | LogRetired)]
            for entry in entries[sums[-1] if sums else 0 :]:
                if isinstance(entry, LogState | LogRetired):
                    committed |= {live.manifest for live in entry.live}
                    removed |= set(entry.removed)
                elif isinstance(entry, LogCommit):
                    committed.add(entry.manifest)
                elif isinstance(entry, LogRemove):
                    removed |= set(entry.manifests)
        return committed - removed

    def problem(self) -> str:
        """Return what is wrong; empty if nothing is."""
        live = self.live()
        if lost := self.acknowledged - live:
            return f"committed, but not in the logs: {sorted(lost)}"
        if back := self.gone & live:
            return f"removed, but in the logs: {sorted(back)}"
        readable = self._readable()
        for manifest in sorted(live | self.kept):
            if manifest not in self._bucket.objects:
                return f"the manifest {manifest} of a snapshot is gone"
            content = self._decode(manifest, partial(decode_manifest, self._sealer, manifest))
            for id_ in chunks_of(content):
                if id_ not in readable:
                    return f"chunk {id_.hex()} of {manifest} is in no pack"
        return ""

    def _readable(self) -> set[bytes]:
        """Return the chunks of which a copy can be read."""
        copies: set[tuple[bytes, bytes]] = set()
        for name in self._bucket.objects:
            if ref := parse_pack(name):
                records = self._decode(name, RemotePackReader(self._sealer, ref).check)
                copies |= {(some.id, some.base) for some in records}
        readable = {id_ for id_, base in copies if not base}
        while more := {id_ for id_, base in copies if base in readable} - readable:
            readable |= more
        return readable

    def _decode(self, name: str, decode: Callable[[bytes], Any]) -> Any:
        data = self._bucket.objects[name][0]
        key = (name, data)
        if key not in self._decoded:
            self._decoded[key] = decode(data)
        return self._decoded[key]
