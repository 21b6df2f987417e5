"""`ciuic verify` on real repositories and real directories."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
from support.cli_repository import NOISE, CliRepository
from support.cli_repository import repository as repository
from support.stored import flip


def test_verify_of_a_whole_snapshot(repository: CliRepository) -> None:
    """Verifying an undamaged snapshot exits with 0, in both depths."""
    assert repository.run("verify", "latest").exit_code == 0
    result = repository.run("verify", "latest", "--checksum")
    assert result.exit_code == 0, result.stdout
    assert "every byte is right" in result.stdout
    assert repository.run("verify", "--all", "--checksum").exit_code == 0


def test_all_and_ids_exclude_one_another(repository: CliRepository) -> None:
    """Ids together with --all, and neither, are wrong usage, with a message of their own each."""
    both = repository.run("verify", "--all", "latest")
    assert both.exit_code == 2
    assert "--all verifies every snapshot, and latest was named besides" in both.stderr
    neither = repository.run("verify")
    assert neither.exit_code == 2
    assert "give --all" in neither.stderr


@pytest.mark.parametrize("arguments", [("latest", "--checksum"), ("--all",), ("--all", "--checksum")])
def test_a_missing_index_is_no_damage(repository: CliRepository, arguments: tuple[str, ...]) -> None:
    """Without its index, a cache, a repository is whole; verify says that it is missing and who makes it again."""
    for path in repository.path.glob("index.sqlite*"):
        path.unlink()
    result = repository.run("verify", *arguments)
    assert (result.exit_code, "damaged" in result.stdout) == (0, False), result.output
    assert "the index is missing" in result.stderr
    document = json.loads(repository.run("verify", *arguments, "--json").stdout)
    assert (document["damages"], document["index_missing"]) == ([], True)
    assert repository.run("check", "--repair").exit_code == 0
    assert "index" not in repository.run("verify", *arguments).output


def test_an_index_that_was_never_completed_is_no_damage(repository: CliRepository) -> None:
    """An index that a power cut left without its tables counts as missing."""
    for path in repository.path.glob("index.sqlite*"):
        path.unlink()
    with closing(sqlite3.connect(repository.path / "index.sqlite")) as database:
        database.execute("PRAGMA journal_mode=WAL")
    (repository.path / "index.sqlite").chmod(0o600)
    result = repository.run("verify", "--all")
    assert (result.exit_code, "damaged" in result.stdout) == (0, False), result.output


def test_verify_names_path_and_snapshots(repository: CliRepository) -> None:
    """A flipped byte exits with 4 and names the path and every snapshot that shares it, and no other file."""
    second = repository.snapshot({b"ckpt": {b"a": NOISE}})
    pack = next(path for path in repository.path.rglob("*.pack") if NOISE[:1000] in path.read_bytes())
    flip(pack, pack.read_bytes().index(NOISE[:1000]) + 5)
    result = repository.run("verify", "cs-000001", "--checksum", "--json")
    assert result.exit_code == 4
    damages = [damage for damage in json.loads(result.stdout)["damages"] if damage["path"]]
    assert {damage["path"] for damage in damages} == {str(repository.root / "ckpt" / "a")}
    assert set(damages[0]["snapshots"]) == {second, "cs-000001"}
    assert (damages[0]["block"], damages[0]["offset"]) == (0, 0)
    text = repository.run("verify", "cs-000001", "--checksum")
    assert str(repository.root / "ckpt" / "a") in text.stdout
    assert second in text.stdout
    restored = repository.run("restore", "-s", "cs-000001", "-p", str(repository.root))
    assert restored.exit_code == 8
    assert "ckpt/a" in restored.stderr
    assert (repository.root / "ckpt" / "b").read_bytes() == b"bbb"
    assert not (repository.root / "ckpt" / "a").exists()


def test_damage_elsewhere_is_told_and_is_no_verdict_on_a_snapshot(repository: CliRepository) -> None:
    """A snapshot that needs nothing damaged is right (0), and what is damaged in others is named beside it."""
    noise = NOISE[::-1]
    other = repository.snapshot({b"ckpt": {b"other": noise}})
    pack = next(path for path in repository.path.rglob("*.pack") if noise[:1000] in path.read_bytes())
    flip(pack, pack.read_bytes().index(noise[:1000]) + 5)
    result = repository.run("verify", "cs-000001", "--checksum")
    assert result.exit_code == 0, result.output
    assert "cs-000001: every byte is right" in result.stdout
    assert f"elsewhere in the repository: 1 damaged place, in {other}" in result.stderr
    document = json.loads(repository.run("verify", "cs-000001", "--checksum", "--json").stdout)
    assert (document["damaged"], document["damages"]) == (False, [])
    assert [damage["snapshots"] for damage in document["elsewhere"]] == [[other]]
    assert repository.run("verify", other, "--checksum").exit_code == 4
    assert repository.run("verify", "--all", "--checksum").exit_code == 4


@pytest.mark.parametrize(
    "finder",
    [
        ("verify", "--checksum", "--max-duration", "1h"),
        ("verify", "--all", "--checksum"),
        ("check", "--read-data"),
        ("restore", "-s", "cs-000002", "--all", "-d"),
    ],
)
def test_damage_that_is_found_is_told_until_it_is_gone(
    repository: CliRepository, tmp_path: Path, finder: tuple[str, ...]
) -> None:
    """Whoever finds it: list marks the snapshot, status and doctor tell; a later look at everything that finds none ends it."""
    noise = NOISE[::-1]
    repository.snapshot({b"ckpt": {b"other": noise}})
    pack = next(path for path in repository.path.rglob("*.pack") if noise[:1000] in path.read_bytes())
    assert _told(repository) == (set(), False, False)
    flip(pack, pack.read_bytes().index(noise[:1000]) + 5)
    words = [*finder, *([str(tmp_path / "to")] if finder[0] == "restore" else [])]
    assert repository.run(*words).exit_code in (4, 8)
    assert _told(repository) == ({"cs-000002"}, True, True)
    # A snapshot that is whole says nothing of another one.
    assert repository.run("verify", "cs-000001", "--checksum").exit_code == 0
    assert _told(repository)[1:] == (True, True)
    flip(pack, pack.read_bytes().index(noise[6:1000]) - 1)
    last = finder if finder[0] != "restore" else ("verify", "cs-000002", "--checksum")
    assert repository.run(*last).exit_code == 0
    assert _told(repository) == (set(), False, False)


def _told(repository: CliRepository) -> tuple[set[str], bool, bool]:
    """Return the snapshots that list calls damaged, and whether status and doctor tell of damage."""
    listed = json.loads(repository.run("list", "--json").stdout)["snapshots"]
    damaged = {one["id"] for one in listed if one["damaged"]}
    assert damaged == {
        line.split()[0] for line in repository.run("list").stdout.splitlines() if "damaged" in line
    }
    status = json.loads(repository.run("status", "--json").stdout)
    plain = "damaged place" in repository.run("status").stdout
    assert plain is (status["damage"] is not None)
    doctor = ["damaged place" in repository.run("doctor", *how).stdout for how in ((), ("--recovery",))]
    assert doctor[0] == doctor[1]
    return damaged, plain, doctor[0]


def test_verify_wants_ids_or_all(repository: CliRepository) -> None:
    """Neither ids nor --all, or both, is wrong usage."""
    assert repository.run("verify").exit_code == 2
    assert repository.run("verify", "latest", "--all").exit_code == 2


def test_a_sample_is_told_in_percent(repository: CliRepository) -> None:
    """The share of the blocks that were read is told as it was asked for."""
    assert "and 50 % of the blocks" in repository.run("verify", "latest", "--sample", "50%").stdout
