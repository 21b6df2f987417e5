"""Remotes with known answers for docs/remote-format.md: objects whose every random bit is fixed, and golden remotes.

`objects` gives the same bytes at each call. They are stored in tests/format/remote-vectors-1, where a reader
written from the page alone reads them; `make` writes them there, once for each version of the format.

Golden remotes are real buckets of two hosts, with keys that are fixed. Writing one is done once for a version of the format (tests/format/make_golden_remote.py). The remote has
two snapshots of one host, and one of a host whose repository has an identity of its own. A third snapshot of the
first host was given up, and a collection deleted what it alone needed, and summed up the logs.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import xxhash
from support import golden_recipe as recipe

from ciuic.config import RemoteConfig
from ciuic.remote import documents, object_names
from ciuic.remote.access import Remote, init_remote
from ciuic.remote.documents import StoredRound, encode_round
from ciuic.remote.host_status import (
    HostStatus,
    StatusBehind,
    StatusDrill,
    StatusKey,
    StatusRoot,
    StatusState,
    StatusTraining,
)
from ciuic.remote.object_names import slot_name
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.pack import RemotePackWriter
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.replication import Replication
from ciuic.remote.sealing import key_slots
from ciuic.remote.sealing.key_slots import show_recovery_key, wrap_master_key
from ciuic.remote.sealing.passphrase_key import Argon2Cost
from ciuic.remote.sealing.sealer import MasterKey, Sealer
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, resolve_snapshots
from ciuic.remote.upkeep.collection_round import CollectionPolicy
from ciuic.remote.uploader import Labels, Persistence
from ciuic.repository import Repository, Writer
from ciuic.repository.identity import Identity
from ciuic.repository.model import PackRecord
from ciuic.repository.pack_directory import Packs
from ciuic.repository.repository import PACKS_DIR
from ciuic.types import ChunkId, Entry, RootRecord, SnapshotDraft, SnapshotId

VECTORS: Final = Path(__file__).parents[1] / "format" / "remote-vectors-1"
TIME_NS: Final = 1_800_000_000_000_000_000
BLOCK: Final = 65536
PASSPHRASE: Final = "grüne Äpfel im Mai"
MASTER: Final = bytes(range(32))
REMOTE_ID: Final = bytes(range(100, 116))
NAMING_KEY: Final = bytes(range(50, 82))
BORDER_SEED: Final = 0xFEDCBA9876543210
KEY_FILE: Final = bytes(range(200, 232))
COMMAND_KEY: Final = bytes(range(150, 182))
RECOVERY: Final = bytes(range(10, 42))
RECOVERY_TEXT: Final = show_recovery_key(RECOVERY)
REPOSITORY_ID: Final = bytes(range(60, 76))
STATUS_KEY: Final = StatusKey(bytes(range(20, 52)))
STATUS: Final = HostStatus(
    time_ns=TIME_NS,
    host="node-1",
    ciuic="1.0",
    repository=REPOSITORY_ID.hex(),
    interval_seconds=300,
    max_lag_seconds=86400,
    behind=StatusBehind(snapshots=2, size_bytes=4096, only_here_ns=TIME_NS - 10**9),
    newest=StatusState(snapshot="cs-00000c", time_ns=TIME_NS - 10**9),
    newest_stored_ns=TIME_NS - 10**10,
    error="503 für alle",
    roots=(StatusRoot(path="/data", snapshot="cs-00000c", time_ns=TIME_NS - 10**9, verdict="GOOD"),),
    trainings=(
        StatusTraining(
            name="große job",
            local=StatusState(snapshot="cs-00000d", time_ns=TIME_NS - 10**9, epoch=3, step=12500),
            stored=StatusState(snapshot="cs-00000a", time_ns=TIME_NS - 10**10, epoch=3, step=12000),
        ),
    ),
    drill=StatusDrill(time_ns=TIME_NS - 10**12, verdict="good"),
)
OLD_REPOSITORY_ID: Final = bytes(range(80, 96))
OLD_SEED: Final = 0x0123456789ABCDEF
SNAPSHOT_FILE: Final = b"CIUICSNP: not a real one, the page reader compares bytes"
MARKS_FILE: Final = b"CIUICMRK: likewise"
WRITER: Final = "0a" * 16
RETIRED_WRITER: Final = "0b" * 16
SNAPSHOT: Final = "cs-0a0b0c"
COST: Final = Argon2Cost(memory_kib=19 << 10, passes=1, lanes=2)
"""Cheapest cost that readers accept: these tests are no place to wait."""


def fixed_random(label: str) -> Callable[[int], bytes]:
    """Return a source of bytes that look random and are the same at each call."""
    count = 0

    def take(length: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_256(f"{label} {count}".encode()).digest(length)

    return take


def chunk(number: int, length: int) -> bytes:
    """Return the stored bytes of chunk ``number``."""
    return hashlib.shake_256(b"chunk %d" % number).digest(length)


def record(
    number: int, length: int, *, raw: int | None = None, flags: int = 0, base: int | None = None
) -> PackRecord:
    """Return the record of a chunk as a local pack has it."""
    return PackRecord(
        chunk_id(number),
        4096,
        length,
        length if raw is None else raw,
        flags,
        xxhash.xxh3_64_intdigest(chunk(number, length)),
        b"" if base is None else chunk_id(base),
    )


def chunk_id(number: int) -> ChunkId:
    """Return the id of chunk ``number``; it is not that of its content, which these tests do not decode."""
    return ChunkId(hashlib.shake_256(b"id %d" % number).digest(16))


DATA_RECORDS: Final = (record(1, 5000), record(2, 1), record(3, 777, raw=BLOCK, flags=1))
META_RECORDS: Final = (record(4, 300, raw=900, flags=2), record(5, 200, raw=900, flags=6, base=4))
DATA_PACK: Final = object_names.pack_ref("data", bytes(range(16)))
META_PACK: Final = object_names.pack_ref("meta", bytes(range(16, 32)))
MANIFEST: Final = object_names.manifest_name(
    job="große job", epoch=3, step=12000, host="..node-1", random="0123456789abcdef" * 2
)


def secrets() -> dict[str, key_slots.SlotSecret]:
    """Return the secret of each key slot."""
    return {
        "main": key_slots.passphrase_secret(PASSPHRASE),
        "file": key_slots.SlotSecret("key-file", KEY_FILE),
        "kms": key_slots.SlotSecret("command", COMMAND_KEY),
        "paper": key_slots.recovery_secret(RECOVERY_TEXT),
    }


def identity() -> Identity:
    """Return the identity of the remote that is not sealed."""
    return Identity("blake3-128", NAMING_KEY, BORDER_SEED)


def entries(digest: str) -> list[documents.LogEntry]:
    """Return one entry of each kind, in the order of the log."""
    nonces = fixed_random("nonces")
    live = documents.LiveManifest(
        repository=REPOSITORY_ID.hex(), snapshot=SNAPSHOT, manifest=MANIFEST, digest=digest
    )
    return [
        documents.LogHello(nonce=nonces(16).hex(), host="node-1", repository=REPOSITORY_ID.hex()),
        documents.LogCommit(
            nonce=nonces(16).hex(),
            repository=REPOSITORY_ID.hex(),
            snapshot=SNAPSHOT,
            manifest=MANIFEST,
            digest=digest,
            packs=(META_PACK, DATA_PACK),
        ),
        documents.LogFence(nonce=nonces(16).hex(), round=0),
        documents.LogRemove(nonce=nonces(16).hex(), manifests=(MANIFEST.replace("12000", "11000"),)),
        documents.LogState(
            nonce=nonces(16).hex(), live=(live,), removed=(MANIFEST.replace("12000", "11000"),)
        ),
    ]


def pack(sealer: Sealer, ref: str, records: tuple[PackRecord, ...]) -> bytes:
    """Return the bytes of a pack with these records of `chunk`."""
    writer = RemotePackWriter(sealer, ref, capacity_bytes=1 << 20)
    for one in records:
        number = next(n for n in range(10) if chunk_id(n) == one.id)
        assert writer.add(one, chunk(number, one.stored_bytes)) is not None
    return b"".join(writer.finish())


def objects(*, sealed: bool) -> dict[str, bytes]:
    """Return the bytes of every object by its name."""
    master = MasterKey(MASTER) if sealed else None
    source = fixed_random("sealed" if sealed else "clear")
    sealer = Sealer(REMOTE_ID, master, random_bytes=source)
    found = {
        object_names.REMOTE_JSON: documents.encode_remote(
            remote_id=REMOTE_ID,
            master=master,
            block_size=BLOCK,
            created_ns=TIME_NS,
            identity=None if sealed else identity(),
        )
    }
    for slot, secret in secrets().items():
        if master is None:
            break
        found[object_names.slot_name(slot)] = key_slots.wrap_master_key(
            master, REMOTE_ID, slot, secret, created_ns=TIME_NS, cost=COST, random_bytes=source
        )
    found[object_names.pack_name(DATA_PACK)] = pack(sealer, DATA_PACK, DATA_RECORDS)
    found[object_names.pack_name(META_PACK)] = pack(sealer, META_PACK, META_RECORDS)
    stored = documents.RemoteManifest(
        snapshot=SNAPSHOT_FILE,
        marks=MARKS_FILE,
        packs=(META_PACK, DATA_PACK),
        writer=WRITER,
        host="..node-1",
        job="große job",
        epoch=3,
        step=12000,
        previous="ab" * 32,
    )
    found[MANIFEST] = documents.encode_manifest(sealer, MANIFEST, stored)
    digest = documents.object_digest(found[MANIFEST])
    for number, entry in enumerate(entries(digest)):
        name = object_names.log_entry_name(WRITER, number)
        found[name] = documents.encode_log_entry(sealer, WRITER, number, entry)
    retired = documents.LogRetired(nonce="0c" * 16, live=(), removed=())
    found[object_names.log_entry_name(RETIRED_WRITER, 0)] = documents.encode_log_entry(
        sealer, RETIRED_WRITER, 0, retired
    )
    condemned = StoredRound(nonce="0d" * 16, condemned=("d" + "ee" * 16,), manifests=(MANIFEST,))
    for part in ("begun", "final", "done"):
        content = StoredRound(nonce="0e" * 16) if part == "done" else condemned
        found[object_names.round_name(0, part)] = encode_round(sealer, 0, part, content)
    own = object_names.repository_prefix(OLD_REPOSITORY_ID.hex())
    found[own + object_names.REMOTE_JSON] = documents.encode_repository(
        repository_id=OLD_REPOSITORY_ID,
        master=master,
        block_size=BLOCK,
        created_ns=TIME_NS,
        identity=Identity("xxh3-128", None, OLD_SEED),
        random_bytes=source,
    )
    inner = Sealer(OLD_REPOSITORY_ID, master, random_bytes=source)
    found[own + object_names.pack_name(DATA_PACK)] = pack(inner, DATA_PACK, DATA_RECORDS[:1])
    name = object_names.status_name(STATUS_KEY.reporter)
    found[name] = STATUS_KEY.encode(sealer, name, STATUS)
    return found


GOLDEN: Final = Path(__file__).parents[1] / "format" / "golden-remote-1"
KINDS: Final = ("sealed", "clear")
OWN_IDENTITY: Final = "cs-00000b"
"""Snapshot of the repository with an identity of its own."""
GIVEN_UP: Final = "cs-00000a"
LABELS: Final = Labels(job="Lauf 7", epoch=2, step=1200)
"""Labels of the second snapshot; the first is one of files."""


def make(place: Path, work: Path, *, sealed: bool) -> None:
    """Write a golden remote into a directory."""
    objects = DirectoryObjects(str(place), make=True)
    master = MasterKey(MASTER) if sealed else None
    remote = init_remote(objects, master=master, block_size=recipe.BLOCK)
    if master is not None:
        for slot, secret in secrets().items():
            data = wrap_master_key(
                master,
                bytes.fromhex(remote.id),
                slot,
                secret,
                created_ns=TIME_NS,
                cost=COST,
            )
            objects.create(slot_name(slot), data)
    with Repository.create(work / "alpha", block_size=recipe.BLOCK, identity=remote.identity) as repository:
        with repository.writer() as writer:
            # The given-up snapshot shares some of the first one's content.
            writer.commit(_given_up_draft(writer))
        upload(repository, remote, work / "alpha-state", "alpha")
        with read_remote(remote, cache_root=work / "cache") as opened:
            give_up_snapshots(opened, resolve_snapshots(opened, [GIVEN_UP]), host="operator")
        with repository.writer() as writer:
            writer.remove_snapshots([SnapshotId(GIVEN_UP)])
        with repository.writer(pack_bytes=20_000) as writer:
            recipe.put_coded(writer)
            writer.commit(recipe.first_draft(writer))
        upload(repository, remote, work / "alpha-state", "alpha")
        with repository.writer() as writer:
            writer.commit(recipe.second_draft(writer))
            writer.set_marks(SnapshotId("cs-000002"), hold=True, reason="kept", tags=["marked"])
        upload(repository, remote, work / "alpha-state", "alpha", LABELS)
    with Repository.create(work / "old", block_size=recipe.BLOCK) as repository:
        with repository.writer() as writer:
            draft = recipe.first_draft(writer)
            writer.commit(msgspec.structs.replace(draft, id=SnapshotId(OWN_IDENTITY), host="old"))
        upload(repository, remote, work / "old-state", "old")
    with read_remote(remote, cache_root=work / "cache") as opened:
        collect_remote(opened, host="operator", policy=CollectionPolicy(young_ns=0, repack_share=0.6))


def _given_up_draft(writer: Writer) -> SnapshotDraft:
    """Return a snapshot of a block that the first one has too, and of one that is its own."""
    shared = writer.put_chunk(recipe.RAW)
    alone = writer.put_chunk(bytes(reversed(recipe.RAW)))
    files = {
        name: Entry(
            name=name,
            mode=0o100640,
            size_bytes=recipe.BLOCK,
            mtime_ns=recipe.TIME_NS,
            content=chunk,
        )
        for name, chunk in ((b"alone", alone), (b"shared", shared))
    }
    tree = writer.update_tree(b"", files)
    top = Entry(
        name=b"",
        mode=0o40755,
        content=tree.id,
        total_files=tree.total_files,
        total_bytes=tree.total_bytes,
    )
    root = RootRecord(path=b"/srv/training", entry=top)
    return SnapshotDraft(id=SnapshotId(GIVEN_UP), time_ns=recipe.TIME_NS, host="gpu-1", roots=(root,))


def upload(
    repository: Repository, remote: Remote, state: Path, host: str, labels: Labels | None = None
) -> None:
    """Upload what the remote lacks."""
    packs = Packs(f"{repository.path}/{PACKS_DIR}", bytes.fromhex(repository.id), repository.config.hash)
    state.mkdir(exist_ok=True)
    Replication(
        repository,
        packs,
        RemoteConfig(name="remote", url="file:///unused"),
        state,
        host=host,
        persist=Persistence(threading.Event()),
        labels=lambda _repository, _snapshot: labels or Labels(),
    ).catch_up(remote)
