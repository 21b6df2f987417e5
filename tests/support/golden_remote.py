"""Golden remotes: real buckets of two hosts, with keys that are fixed, and how they came about.

`make` writes one; it is done once for a version of the format (tests/format/make_golden_remote.py). The remote has
two snapshots of one host, and one of a host whose repository has an identity of its own. A third snapshot of the
first host was given up, and a collection deleted what it alone needed, and summed up the logs.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import msgspec
from support import golden_recipe as recipe
from support import remote_recipe as fixed

from ciuic.config import RemoteConfig
from ciuic.remote.access import Remote, init_remote
from ciuic.remote.format.names import slot_name
from ciuic.remote.objects.directory_objects import DirectoryObjects
from ciuic.remote.reading.opening import read_remote
from ciuic.remote.sealing.key_slot import wrap_master_key
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.remote.upkeep.collect import collect_remote, give_up_snapshots, resolve_snapshots
from ciuic.remote.upkeep.collector import CollectionPolicy
from ciuic.remote.upload.replication import Replication
from ciuic.remote.upload.uploader import Labels
from ciuic.repository import Repository, Writer
from ciuic.repository.new_directory import PACKS_DIR
from ciuic.repository.packs.pack_directory import Packs
from ciuic.types import Entry, RootRecord, SnapshotDraft, SnapshotId

GOLDEN: Final = Path(__file__).parents[1] / "format" / "golden-remote-1"
KINDS: Final = ("sealed", "clear")
OWN_IDENTITY: Final = "cs-00000b"
"""Snapshot of the repository with an identity of its own."""
GIVEN_UP: Final = "cs-00000a"
LABELS: Final = Labels(job="Lauf 7", epoch=2, step=1200)
"""Of the second snapshot; the first is one of files."""


def make(place: Path, work: Path, *, sealed: bool) -> None:
    """Write a golden remote into a directory."""
    objects = DirectoryObjects(str(place), make=True)
    master = MasterKey(fixed.MASTER) if sealed else None
    remote = init_remote(objects, master=master, block_size=recipe.BLOCK)
    if master is not None:
        for slot, secret in fixed.secrets().items():
            data = wrap_master_key(
                master,
                bytes.fromhex(remote.id),
                slot,
                secret,
                created_ns=fixed.TIME_NS,
                cost=fixed.COST,
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
        stop=threading.Event(),
        labels=lambda _repository, _snapshot: labels or Labels(),
    ).catch_up(remote)
