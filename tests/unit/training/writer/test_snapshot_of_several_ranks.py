"""A snapshot of which several processes store a part each, one after the other."""

from __future__ import annotations

import os
import random
import threading
from pathlib import Path

import pytest

from ciuic.errors import Busy, Damaged
from ciuic.maintenance.prune import prune
from ciuic.repository import Repository, RepositoryExists
from ciuic.training.format.stored_files import Files, top_of
from ciuic.training.remote.place import ensure_repository
from ciuic.training.writer.messages import Manifest, ManifestFile, StoredFile
from ciuic.training.writer_process import LastCommit, commit, put_files
from ciuic.types import SnapshotId


def _put(path: Path, content: dict[str, bytes]) -> list[StoredFile]:
    """Store a part as one rank does."""
    files, memory = [], b""
    for name, data in content.items():
        files.append(ManifestFile(name, len(memory), len(data)))
        memory += data
    with Repository.open(path) as repository, repository.writer() as writer:
        return put_files(
            repository,
            writer,
            memoryview(memory),
            Manifest(time_ns=1, message="", tags=(), files=list(files)),
        )


def _commit(path: Path, stored: list[StoredFile]) -> str:
    manifest = Manifest(time_ns=1, message="", tags=(), files=[ManifestFile("own.json", 0, 2)])
    manifest = type(manifest)(
        time_ns=manifest.time_ns, message="", tags=(), files=manifest.files, stored=stored
    )
    with Repository.open(path) as repository, repository.writer() as writer:
        return commit(repository, writer, memoryview(b"{}"), manifest, b"/r", LastCommit()).id


def test_parts_that_were_put_in_turn_become_one_snapshot(tmp_path: Path) -> None:
    """Parts become one snapshot with every byte of every file; before the commit there is none."""
    path = tmp_path / "repo"
    Repository.create(path, block_size=4096).close()
    noise = random.Random(1)
    content = [
        {"a/long": noise.randbytes(5_000_001), "a/zeros": bytes(100_000)},
        {"a/short": b"x", "b/long": noise.randbytes(40_960), "empty": b""},
    ]
    stored = [file for part in content for file in _put(path, part)]
    with Repository.open(path) as repository:
        assert repository.snapshots.list() == []
    id_ = _commit(path, stored)
    with Repository.open(path) as repository:
        snapshot = repository.snapshots.load(SnapshotId.parse(id_))
        files = Files(repository, top_of(snapshot.roots[0].entry, id_))
        expected = {**content[0], **content[1], "own.json": b"{}"}
        assert {name: bytes(files.read(name)) for name in files.names()} == expected


def test_claimed_parts_are_not_swept(tmp_path: Path) -> None:
    """A claim keeps parts from being swept; without one the snapshot is refused, not made with a hole."""
    path = tmp_path / "repo"
    Repository.create(path).close()
    _commit(path, [])
    with Repository.open(path) as repository:
        claim = repository.claim()
        second = repository.claim()
        stored = _put(path, {"a": random.Random(2).randbytes(300_000)})
        for one in (claim, second):
            with pytest.raises(Busy, match="several processes"):
                prune(repository)
            one.release()
        assert not prune(repository).stopped
    with pytest.raises(Damaged, match="stored content of a "):
        _commit(path, stored)
    with Repository.open(path) as repository:
        assert len(repository.snapshots.list()) == 1


def test_a_claim_ends_with_the_process_that_has_it(tmp_path: Path) -> None:
    """The kernel releases a claim when its process is killed."""
    with Repository.create(tmp_path / "repo") as repository:
        claimed_read, claimed_write = os.pipe()
        child = os.fork()
        if not child:
            repository.claim()
            os.write(claimed_write, b".")
            threading.Event().wait()
        os.read(claimed_read, 1)
        with pytest.raises(Busy):
            prune(repository)
        os.kill(child, 9)
        os.waitpid(child, 0)
        prune(repository)
        os.close(claimed_read)
        os.close(claimed_write)


def test_of_several_that_make_the_repository_one_does(tmp_path: Path) -> None:
    """Processes that create the repository at the same time end with one configuration."""
    path = tmp_path / "deep" / "repo"
    ready, failures = threading.Barrier(8), []

    def make() -> None:
        ready.wait()
        try:
            ensure_repository(path)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=make) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (path / "config").read_bytes() == (path / "config.copy").read_bytes()
    with pytest.raises(RepositoryExists):
        Repository.create(path)


def test_a_lock_that_outlived_its_directory_is_no_other_file(tmp_path: Path) -> None:
    """Where a directory was removed while a process still opened its lock, the next training begins there anew."""
    path = tmp_path / "repo"
    path.mkdir()
    (path / "lock").touch()
    ensure_repository(path)
    assert Repository.exists(path)
