"""Key files, names of slots, and repositories of hosts that join a remote."""

from __future__ import annotations

import os
import stat
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.cli_repository import CliRepository

from ciuic.errors import Busy, NotFound, NotPermitted, UsageError
from ciuic.remote.access import (
    Remote,
    RepositoryChoice,
    find_spaces,
    init_remote,
    join_repository,
    repository_spaces,
)
from ciuic.remote.documents import encode_repository
from ciuic.remote.objects.memory_objects import MemoryObjects, forget_bucket
from ciuic.remote.objects.model import ObjectInfo
from ciuic.remote.sealing.key_slots import make_key_file, read_key_file
from ciuic.remote.sealing.sealer import MasterKey
from ciuic.repository import Repository
from ciuic.repository.identity import Identity
from ciuic.repository.locks import Lock
from ciuic.repository.repository import unmake_empty
from ciuic.system.disk import Disk


@pytest.fixture
def remote() -> Iterator[Remote]:
    name = f"join-{uuid.uuid4().hex}"
    yield init_remote(MemoryObjects(name), master=MasterKey.generate(), block_size=1 << 16)
    forget_bucket(name)


class CountedListing(MemoryObjects):
    """Store that counts the objects that listings yield."""

    listed = 0

    def list(self, prefix: str, *, after: str = "") -> Iterator[ObjectInfo]:
        for info in super().list(prefix, after=after):
            self.listed += 1
            yield info


def test_spaces_are_found_without_listing_all_that_is_in_them(remote: Remote) -> None:
    """Finding the repositories of a remote does not cost a listing of all their packs; what has other names is ignored."""
    objects = CountedListing(remote.objects.url.removeprefix("memory://"))
    ids = [f"{number:032x}" for number in range(3)]
    for id_ in ids:
        data = encode_repository(
            repository_id=bytes.fromhex(id_),
            master=remote.master,
            block_size=1 << 16,
            created_ns=1,
            identity=Identity("xxh3-128", None, 1),
        )
        assert objects.create(f"repositories/{id_}/remote.json", data)
    # A space without its remote.json, and names that are none of ciuic's.
    for name in (*ids[:2], f"{9:032x}", "other"):
        for number in range(1500):
            objects.put(f"repositories/{name}/packs/data/00/{number:032x}", [b""])
    # Rounds of collections, which come before everything that shows what a space is.
    for number in range(1500):
        objects.put(f"repositories/{ids[2]}/gc/{number:010}", [b""])
    objects.put("repositories/other/remote.json", [b"{}"])
    found = repository_spaces(remote._replace(objects=objects))
    assert [one.id for one in found] == ids
    assert objects.listed < 6000
    assert find_spaces(objects) == {**dict.fromkeys(ids, True), f"{9:032x}": False}


class Died(BaseException):
    """End of a process, as a test makes it."""


class DyingDisk(Disk):
    """Disk of a process that dies before its nth removal."""

    def __init__(self, calls: int) -> None:
        self.calls = calls

    def remove_file(self, path: str) -> None:
        self.calls -= 1
        if self.calls < 0:
            raise Died
        super().remove_file(path)


def test_a_key_file_is_made_once(tmp_path: Path) -> None:
    """A new key file has mode 0600 and the key that was returned; a second one never takes its place."""
    path = tmp_path / "host.key"
    secret = make_key_file(str(path))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_key_file(str(path)).reveal() == secret.reveal()
    before = path.read_bytes()
    with pytest.raises(UsageError, match="never overwritten"):
        make_key_file(str(path))
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["host.key"]


def test_a_key_file_needs_its_directory(tmp_path: Path) -> None:
    """A missing directory is named, and a link that leads nowhere is not written through."""
    with pytest.raises(NotFound, match="no directory"):
        make_key_file(str(tmp_path / "no" / "host.key"))
    (tmp_path / "link").symlink_to(tmp_path / "target")
    with pytest.raises(UsageError):
        make_key_file(str(tmp_path / "link"))
    assert not (tmp_path / "target").exists()


def test_a_key_file_on_a_full_disk(tmp_path: Path) -> None:
    """What cannot be written leaves nothing behind."""

    class FullDisk(Disk):
        def write_at(self, fd: int, parts: object, offset: int) -> int:
            raise OSError(28, os.strerror(28))

    with pytest.raises(NotPermitted, match="No space left"):
        make_key_file(str(tmp_path / "host.key"), disk=FullDisk())
    assert list(tmp_path.iterdir()) == []


def test_a_missing_repository_is_made(remote: Remote, tmp_path: Path) -> None:
    """Where there is no repository, one with the identity and block size of the remote is made; then it shares."""
    path = tmp_path / "deep" / "repository"
    assert join_repository(path, remote) is RepositoryChoice.MADE
    with Repository.open(path) as repository:
        assert repository.identity == remote.identity
        assert repository.block_size == 1 << 16
    assert join_repository(path, remote) is RepositoryChoice.SHARES


def test_a_repository_with_anything_in_it_is_kept(remote: Remote, tmp_path: Path) -> None:
    """A snapshot, a pack without snapshots, or an unknown file: the repository stays byte for byte."""
    path = tmp_path / "repository"
    made = CliRepository(path, tmp_path)
    (path / "promised").mkdir()
    before = sorted(path.rglob("*"))
    assert join_repository(path, remote) is RepositoryChoice.OWN_IDENTITY
    assert sorted(path.rglob("*")) == before
    (path / "promised").rmdir()
    made.snapshot({b"file": b"content"})
    for name in (path / "snapshots").iterdir():
        name.unlink()
    assert any((path / "packs").iterdir())
    assert join_repository(path, remote) is RepositoryChoice.OWN_IDENTITY
    assert Repository.exists(path)


def test_an_empty_repository_is_made_anew(remote: Remote, tmp_path: Path) -> None:
    """A repository that holds nothing, with its index, gets the identity of the remote."""
    path = tmp_path / "repository"
    Repository.create(path).close()
    with Repository.open(path) as repository, repository.writer():
        # Opening a writer makes the index.
        pass
    assert join_repository(path, remote) is RepositoryChoice.REPLACED
    with Repository.open(path) as repository:
        assert repository.identity == remote.identity
        assert not repository.snapshots.names()


@pytest.mark.parametrize("calls", range(2))
def test_a_replacement_that_is_killed_is_taken_up(remote: Remote, tmp_path: Path, calls: int) -> None:
    """Killed at any removal, the directory is a whole repository or one that the next join makes."""
    path = tmp_path / "repository"
    Repository.create(path).close()
    with pytest.raises(Died):
        unmake_empty(str(path), DyingDisk(calls))
    assert join_repository(path, remote) in (RepositoryChoice.MADE, RepositoryChoice.REPLACED)
    with Repository.open(path) as repository:
        assert repository.identity == remote.identity


def test_a_repository_in_use_is_not_replaced(remote: Remote, tmp_path: Path) -> None:
    """While a writer holds the lock, an empty repository stays what it is."""
    path = tmp_path / "repository"
    Repository.create(path).close()
    lock = Lock.acquire(str(path))
    try:
        with pytest.raises(Busy):
            join_repository(path, remote)
    finally:
        lock.release()
    assert Repository.exists(path)
