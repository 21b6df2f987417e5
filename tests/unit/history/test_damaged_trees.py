"""Commands over many snapshots with a damaged tree in one: it is passed over and named, the rest is the answer."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.cli_repository import CliRepository, Tree
from support.stored import flip_stored

from ciuic.errors import Partial
from ciuic.repository import Repository
from ciuic.types import ChunkId, SnapshotId


def spoil(made: CliRepository, snapshot: SnapshotId, *names: bytes) -> None:
    """Flip a byte of the tree of a directory in a snapshot."""
    with Repository.open(made.path) as repository:
        (root,) = repository.snapshots.load(snapshot).roots
        tree: bytes = root.entry.content
        for name in names:
            entry = repository.trees.entry(tree, name)
            assert entry is not None
            tree = entry.content
        flip_stored(repository, ChunkId(tree))


def tree(version: bytes, **below: bytes) -> Tree:
    """Return files in two directories, of which `bad` differs from version to version."""
    return {
        b"bad": {b"in-all": version, version: b"x"},
        b"good": {b"f": version, **{os.fsencode(name): data for name, data in below.items()}},
    }


@pytest.fixture
def made(tmp_path: Path) -> CliRepository:
    """Provide three snapshots, of which the middle one has a directory that cannot be read."""
    made = CliRepository(tmp_path / "repository", Path("/r"))
    made.snapshot(tree(b"1", old=b"1"))
    middle = made.snapshot(tree(b"2", old=b"1"))
    made.snapshot(tree(b"3"))
    spoil(made, middle, b"bad")
    return made


def answer(made: CliRepository, *arguments: str) -> dict[str, object]:
    """Run a command with --json, which must end in part and name the damage once, and return its document."""
    done = made.run(*arguments, "--json")
    assert done.exit_code == Partial.exit_code, done.output
    assert done.stderr.count("cannot be read in snapshot cs-000002: ") == 1
    document: dict[str, object] = json.loads(done.stdout)
    return document


def paths(document: dict[str, object]) -> list[tuple[str, str, bool]]:
    found = document["found"]
    assert isinstance(found, list)
    return sorted((one["path"], one["snapshot"], one["deleted"]) for one in found)


def test_find_passes_over_a_damaged_directory(made: CliRepository) -> None:
    """`find` has the names of all other directories and snapshots."""
    assert paths(answer(made, "find", "*")) == [
        ("/r/bad", "cs-000003", False),
        ("/r/bad/1", "cs-000001", True),
        ("/r/bad/3", "cs-000003", False),
        ("/r/bad/in-all", "cs-000003", False),
        ("/r/good", "cs-000003", False),
        ("/r/good/f", "cs-000003", False),
        ("/r/good/old", "cs-000002", True),
    ]


def test_history_passes_over_a_damaged_directory(made: CliRepository) -> None:
    """`history` has the versions of the other snapshots; a path elsewhere is not concerned."""
    versions = answer(made, "history", "/r/bad/in-all")["versions"]
    assert isinstance(versions, list)
    assert [(one["first"], one["kind"]) for one in versions] == [
        ("cs-000003", "changed"),
        ("cs-000001", "added"),
    ]
    assert made.run("history", "/r/good/f").exit_code == 0
    assert paths(answer(made, "history", "--deleted", "/r/bad")) == [("/r/bad/1", "cs-000001", True)]


def test_what_the_newest_snapshot_lacks_is_not_known_below_its_damage(made: CliRepository) -> None:
    """A name that only an older snapshot can show is not called gone where the newest one cannot be read."""
    newest = made.snapshot(tree(b"4"))
    spoil(made, newest, b"bad")
    found = made.run("find", "in-all", "--json")
    assert found.exit_code == Partial.exit_code
    assert paths(json.loads(found.stdout)) == [("/r/bad/in-all", "cs-000003", False)]


def test_checkpoints_pass_over_a_damaged_directory(made: CliRepository) -> None:
    """`checkpoints` lists those of the other directories."""
    last = made.snapshot({b"bad": {b"5": b"x"}, b"good": {b"a.safetensors": b"12345678"}})
    spoil(made, last, b"bad")
    done = made.run("checkpoints", "--json")
    assert done.exit_code == Partial.exit_code
    assert "/r/bad cannot be read in snapshot cs-000004" in done.stderr
    assert [one["path"] for one in json.loads(done.stdout)["checkpoints"]] == ["/r/good/a.safetensors"]


def test_changed_shows_the_other_roots(tmp_path: Path) -> None:
    """`changed` names a root whose snapshots cannot be compared, and shows the others."""
    made = CliRepository(tmp_path / "repository", Path("/r"))
    made.snapshot(tree(b"1"))
    spoil(made, made.snapshot(tree(b"2")))
    other = CliRepository(made.path, Path("/s"), make=False)
    other.count = made.count
    other.snapshot(tree(b"1"))
    other.snapshot(tree(b"22"))
    done = other.run("changed", "--since", "2020-01-01", "--json")
    assert done.exit_code == Partial.exit_code
    assert "/r cannot be read in snapshot cs-000002" in done.stderr
    assert [one["root"] for one in json.loads(done.stdout)["roots"]] == ["/s"]


def test_an_unreadable_snapshot_file_is_named(made: CliRepository) -> None:
    """`find` ends in part where the file of a snapshot cannot be read, and has the others."""
    (file,) = (made.path / "snapshots").glob("*cs-000001*")
    file.write_bytes(b"rubbish")
    done = made.run("find", "f")
    assert done.exit_code == Partial.exit_code
    assert "snapshot file" in done.stderr
    assert "cs-000003" in done.stdout


def test_a_long_chain_of_directories_ends_the_search_in_it(tmp_path: Path) -> None:
    """`find` and `checkpoints` do not look below 4,096 bytes of a path, say so once, and answer with the rest."""
    chain: Tree = {b"end": b"x", b"end.npy": b"x"}
    for _ in range(60):
        chain = {b"d" * 200: chain, b"level": b"x", b"a.npy": b"x"}
    made = CliRepository(tmp_path / "repository", Path("/r"))
    made.snapshot({b"chain": chain, b"beside": {b"level": b"x"}})
    for command in (("find", "*"), ("checkpoints",)):
        done = made.run(*command, "--json")
        assert done.exit_code == Partial.exit_code, done.output
        assert done.stderr.count("more than 4,096 bytes") == 1
        paths = [one["path"] for one in next(iter(json.loads(done.stdout).values()))]
        assert 20 < len(paths) < 100
        assert max(map(len, paths)) < 4096 + 256
    assert "/r/beside/level" in [
        one["path"] for one in json.loads(made.run("find", "level", "--json").stdout)["found"]
    ]
