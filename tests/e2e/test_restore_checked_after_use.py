"""`ciuic restore --check=after`: what the command says, and how it goes on after a kill between use and check."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.cli_repository import CliRepository

from ciuic.repository import Repository
from ciuic.repository.lookup import find
from ciuic.restore.deferred_check import DeferredCheck
from ciuic.restore.unfinished import UnfinishedRestore, unfinished

# The file system is on a loop device.
pytestmark = pytest.mark.mount

_KILLED = 99


@pytest.fixture
def repository(sharing_disk: Path, tmp_path: Path) -> CliRepository:
    """Make a repository on a disk that shares extents, with one snapshot; the root is not there."""
    place = sharing_disk / tmp_path.name
    place.mkdir()
    made = CliRepository(place / "repo", place / "root")
    made.snapshot({b"ckpt": {b"a": os.urandom(20 << 20), b"b": b"bbb"}})
    return made


def _damage(repository: CliRepository) -> None:
    with Repository.open(repository.path) as opened:
        snapshot = opened.snapshots.load(opened.snapshots.resolve("latest"))
        entry = find(opened, snapshot, os.fsencode(repository.root / "ckpt/a")).entry
        blocks = -(-entry.size_bytes // opened.block_size)
        chunk = opened.block_maps.get(entry.content, entry.map_height, blocks, blocks // 2)
        place = opened.chunks.locate(chunk)
    with (repository.path / f"packs/{place.pack:016x}.pack").open("r+b") as pack:
        pack.seek(place.offset + 77)
        byte = pack.read(1)
        pack.seek(place.offset + 77)
        pack.write(bytes([byte[0] ^ 1]))


def _unfinished(repository: CliRepository) -> list[UnfinishedRestore]:
    return unfinished(Path(f"{repository.path}.state") / "ciuic" / "restores")


def test_the_command_says_when_files_are_usable_and_what_was_wrong(repository: CliRepository) -> None:
    """Usable is said on standard error; a wrong file is named, put aside and in the document, with exit code 4."""
    words = ("restore", "-s", "latest", "-p", str(repository.root / "ckpt"), "--check=after")
    result = repository.run(*words)
    assert result.exit_code == 0, result.stderr
    assert "in place and usable after" in result.stderr
    whole = (repository.root / "ckpt/a").read_bytes()
    _damage(repository)
    (repository.root / "ckpt/a").unlink()
    result = repository.run(*words, "--json", "--overwrite")
    assert result.exit_code == 4
    document = json.loads(result.stdout)
    assert (document["check"], document["code"], document["checked_behind"]) == ("after", 4, 1)
    (wrong,) = document["put_aside"]
    assert wrong["path"] == str(repository.root / "ckpt/a")
    assert not (repository.root / "ckpt/a").exists()
    assert Path(wrong["aside"]).name.startswith("a.ciuic-damaged-")
    assert Path(wrong["aside"]).read_bytes() != whole
    assert _unfinished(repository) == []
    told = repository.run(*words, "--overwrite")
    assert told.exit_code == 4
    assert f"{repository.root / 'ckpt/a'}: it was in place, and its content does not match" in told.stderr


def test_where_nothing_can_be_shared_it_says_so_with_v(repository: CliRepository, tmp_path: Path) -> None:
    """On another file system everything is checked before, and only -v tells."""
    words = ("restore", "-s", "latest", "-p", str(repository.root), "--check=after", "-d")
    quiet = repository.run(*words, str(tmp_path / "one"))
    assert (quiet.exit_code, "--check=after" in quiet.stderr) == (0, False)
    told = repository.run("-v", *words, str(tmp_path / "two"))
    assert told.exit_code == 0
    assert "--check=after: no content could be shared" in told.stderr
    assert repository.run(*words, str(tmp_path / "three"), "--lazy").exit_code == 2


@pytest.mark.parametrize("damaged", [False, True])
@pytest.mark.parametrize("path", ["ckpt", "ckpt/a"])
def test_a_kill_between_use_and_check_is_told_and_made_good(
    repository: CliRepository, path: str, damaged: bool
) -> None:
    """`status` says that a check is owed, of a directory and of a single file, and names the command that finishes it."""
    wanted = repository.root / path
    if damaged:
        _damage(repository)
    child = os.fork()
    if not child:
        DeferredCheck.run = lambda self: os._exit(_KILLED)  # type: ignore[method-assign]
        repository.run("restore", "-s", "latest", "-p", str(wanted), "--check=after")
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == _KILLED
    (owed,) = _unfinished(repository)
    assert owed.check_owed
    assert f"{wanted}: in place but not checked" in repository.run("status").stdout
    inode = (repository.root / "ckpt/a").stat().st_ino
    result = repository.run(*owed.command[1:], "--json")
    assert result.exit_code == (4 if damaged else 0), result.stderr
    assert json.loads(result.stdout)["checked_behind"] >= 1
    assert (repository.root / "ckpt/a").exists() is not damaged
    if not damaged:
        assert (repository.root / "ckpt/a").stat().st_ino == inode
    assert _unfinished(repository) == []
