"""Tests of what a remote says, and how it comes back, when small objects are lost that nothing can be opened without."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from ciuic.errors import CiuicError, NotFound
from ciuic.remote.access import (
    LostIdentity,
    Remote,
    RemoteExists,
    add_slot,
    init_remote,
    join_repository,
    open_remote,
    repair_identity,
    repository_space,
)
from ciuic.remote.documents import LogHello, create_entry
from ciuic.remote.errors import WrongKey
from ciuic.remote.object_names import REMOTE_JSON, log_entry_name, new_hex_id, new_pack_ref, pack_name
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.pack import RemotePackWriter
from ciuic.remote.sealing.key_slots import SlotSecret, make_key_file, read_key_file
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository import Repository
from ciuic.repository.model import PackRecord
from ciuic.repository.pack_format import checksum
from ciuic.types import ChunkId

BLOCK = 1 << 16


def _put_pack(remote: Remote) -> None:
    writer = RemotePackWriter(remote.sealer, new_pack_ref("data"), capacity_bytes=BLOCK)
    writer.add(PackRecord(ChunkId(bytes(16)), 0, 4, 4, 0, checksum(b"data")), b"data")
    remote.objects.put(pack_name(writer.ref), writer.finish())


class Used:
    """A remote that a host has joined, with one entry of a log and one pack."""

    def __init__(self, place: Path, *, sealed: bool) -> None:
        self.bucket = f"lost-{uuid.uuid4().hex}"
        self.objects = MemoryObjects(self.bucket)
        master = MasterKey.generate() if sealed else None
        self.remote: Remote = init_remote(self.objects, master=master, block_size=BLOCK)
        self.secrets: list[SlotSecret] = []
        if sealed:
            make_key_file(str(place / "key"))
            self.secrets = [read_key_file(str(place / "key"))]
            add_slot(self.remote, "host", self.secrets[0])
        join_repository(place / "repository", self.remote)
        self.repository = Repository.open(place / "repository")
        writer = new_hex_id()
        hello = LogHello(nonce=new_hex_id(), host="h", repository=self.repository.id)
        create_entry(self.objects, self.remote.sealer, writer, 0, hello)
        self.entry = log_entry_name(writer, 0)
        _put_pack(self.remote)

    def repair(self, *, ids: tuple[str, ...] = (), repository: Repository | None = None) -> Remote:
        return repair_identity(
            self.objects,
            self.secrets,
            known_ids=ids,
            repository=repository or self.repository,
            block_size=BLOCK,
        )


@pytest.fixture(params=[True, False], ids=["sealed", "in clear"])
def used(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Used]:
    made = Used(tmp_path, sealed=request.param)
    yield made
    made.repository.close()
    forget_bucket(made.bucket)


def test_no_remote_is_made_over_one_that_has_lost_its_identity(used: Used) -> None:
    """Whatever one object of a remote is left, opening names what is lost and no command that destroys, and making is refused."""
    names = [info.name for info in used.objects.list("") if info.name != REMOTE_JSON]
    bodies = {name: used.objects.get(name) for name in names}
    used.objects.delete([REMOTE_JSON, *names])
    for name, body in bodies.items():
        used.objects.put(name, [body])
        with pytest.raises(LostIdentity) as lost:
            open_remote(used.objects, used.secrets)
        assert "repair-identity" in lost.value.hint
        with pytest.raises(LostIdentity):
            init_remote(used.objects, master=MasterKey.generate(), block_size=BLOCK)
        assert used.objects.info(REMOTE_JSON) is None
        used.objects.delete([name])
    used.objects.put("packs/of-somebody-else", [b"x"])
    used.objects.put("proof/left", [b"x"])
    with pytest.raises(NotFound):
        open_remote(used.objects, used.secrets)


def test_identity_comes_back_from_a_host_that_has_key_and_id(used: Used) -> None:
    """The id is that of the packs, or known to the host among wrong ones; the remote opens as it did, and its objects with it."""
    for ids, drop_packs in (((), False), ((new_hex_id(), used.remote.id), True)):
        used.objects.delete([REMOTE_JSON])
        if drop_packs:
            used.objects.delete([info.name for info in used.objects.list("packs/")])
        mended = used.repair(ids=ids)
        again = open_remote(used.objects, used.secrets)
        for one in (mended, again):
            assert (one.id, one.identity, one.stored.block_size, one.stored.sealed) == (
                used.remote.id,
                used.remote.identity,
                BLOCK,
                used.remote.stored.sealed,
            )
        assert again.sealer.open(used.entry, used.objects.get(used.entry))
    with pytest.raises(RemoteExists):
        used.repair()


def test_nothing_is_written_that_does_not_verify(used: Used, tmp_path: Path) -> None:
    """No remote.json is made with another's key or repository."""
    used.objects.delete([REMOTE_JSON])
    with (
        Repository.create(tmp_path / "other", block_size=BLOCK) as other,
        pytest.raises(CiuicError, match="shares no chunks"),
    ):
        used.repair(repository=other)
    if used.secrets:
        make_key_file(str(tmp_path / "other-key"))
        used.secrets = [read_key_file(str(tmp_path / "other-key"))]
        with pytest.raises(WrongKey):
            used.repair()
    assert used.objects.info(REMOTE_JSON) is None


def test_the_space_of_a_repository_comes_back_with_its_next_upload(used: Used, tmp_path: Path) -> None:
    """A host that opens its space makes the remote.json of it again, with which what is stored there opens."""
    with Repository.create(tmp_path / "own", block_size=BLOCK) as repository:
        space = repository_space(used.remote, repository)
        data = space.sealer.seal("w/1", b"content")
        space.objects.delete([REMOTE_JSON])
        again = repository_space(used.remote, repository)
        assert (again.id, again.identity) == (space.id, repository.identity)
        assert again.sealer.open("w/1", data) == b"content"
