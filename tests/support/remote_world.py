"""Uploaders and collectors on one bucket in memory, and what must hold of the bucket after every request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import xxhash
from support.remote_bucket import DAY_NS, Bucket

from ciuic.remote.format.documents import (
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
from ciuic.remote.format.names import PackRef, manifest_name, parse_log_entry, parse_pack
from ciuic.remote.format.pack import RemotePackReader, RemotePackWriter
from ciuic.remote.log.compaction import LogUpkeep
from ciuic.remote.log.log_reader import LogReader, LogSummary
from ciuic.remote.log.rounds import Rounds
from ciuic.remote.log.writer_log import WriterLog, WriterPosition
from ciuic.remote.objects.model import Objects
from ciuic.remote.remote_index import RemoteIndex
from ciuic.remote.sealing.sealer import Sealer
from ciuic.remote.upkeep.collector import CollectionPolicy, Collector, Repacker
from ciuic.repository.model import PackKind, PackRecord
from ciuic.types import ChunkId

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
            objects, seals, reader, max_entries=max_entries, retire_ns=3 * DAY_NS // 2, new_id=ids.hex
        ),
        repacker=lambda: Repacker(objects, seals, pack_bytes=1 << 14, new_ref=ids.ref),
        new_id=ids.hex,
        threads=1,
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
