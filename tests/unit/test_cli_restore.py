"""`ciuic restore` on real repositories and real directories."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from support.cli_repository import FIRST_NS, CliRepository

from ciuic.cli import safety
from ciuic.repository import Repository
from ciuic.types import FLAG_OPEN_FOR_WRITING, Entry, not_held

NOISE = os.urandom(300_000)


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    """One snapshot of root/ckpt/{a,b} and root/log; root exists and is empty."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.root.mkdir()
    made.snapshot({b"ckpt": {b"a": NOISE, b"b": b"bbb"}, b"log": b"line\n"})
    return made


def test_restore_into_a_directory(repository: CliRepository, tmp_path: Path) -> None:
    """PATH comes back as DEST/basename(PATH), DEST made, bytes and modes as they were; nothing else appears."""
    dest = tmp_path / "new" / "dest"
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root / "ckpt"), "-d", str(dest))
    assert result.exit_code == 0, result.stderr
    assert (dest / "ckpt" / "a").read_bytes() == NOISE
    assert (dest / "ckpt" / "b").stat().st_mode & 0o7777 == 0o644
    assert (dest / "ckpt" / "b").stat().st_mtime_ns == FIRST_NS
    assert sorted(path.name for path in dest.rglob("*")) == ["a", "b", "ckpt"]
    assert list(repository.root.iterdir()) == []


def test_restore_where_it_was(repository: CliRepository) -> None:
    """Without -d each path comes back to its own place; several -p are several."""
    root = repository.root
    result = repository.run(
        "restore", "-s", "latest", "-p", str(root / "ckpt" / "b"), "-p", str(root / "log")
    )
    assert result.exit_code == 0, result.stderr
    assert (root / "ckpt" / "b").read_bytes() == b"bbb"
    assert (root / "log").read_bytes() == b"line\n"
    assert not (root / "ckpt" / "a").exists()


def test_what_exists_stops_it_before_anything(repository: CliRepository) -> None:
    """Existing files are 6, all of them are listed, and nothing has been changed."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "a").write_bytes(b"mine")
    (repository.root / "log").write_bytes(b"mine, too")
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root))
    assert result.exit_code == 6
    assert str(repository.root / "ckpt" / "a") in result.stderr
    assert str(repository.root / "log") in result.stderr
    assert "--overwrite" in result.stderr
    assert (repository.root / "log").read_bytes() == b"mine, too"
    assert not (repository.root / "ckpt" / "b").exists()


def test_conflict_in_json(repository: CliRepository) -> None:
    """With --json a conflict is one document with code 6."""
    (repository.root / "log").write_bytes(b"mine")
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root), "--json")
    assert json.loads(result.stdout)["code"] == 6


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("--overwrite", b"line\n"),
        ("--overwrite=always", b"line\n"),
        ("--overwrite=if-changed", b"line\n"),
        ("--overwrite=never", b"mine"),
        ("--overwrite=if-newer", b"mine"),
    ],
)
def test_overwrite_modes(repository: CliRepository, option: str, expected: bytes) -> None:
    """Each mode does to an existing, newer file what the page says."""
    (repository.root / "log").write_bytes(b"mine")
    result = repository.run("restore", "-s", "latest", option, "-p", str(repository.root / "log"))
    assert result.exit_code == 0, result.stderr
    assert (repository.root / "log").read_bytes() == expected


def test_delete_removes_only_below_the_path(repository: CliRepository) -> None:
    """--delete takes away what the snapshot did not have below PATH, and nothing beside it."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "torn.tmp").write_bytes(b"x")
    (repository.root / "other").write_bytes(b"x")
    path = str(repository.root / "ckpt")
    result = repository.run("restore", "-s", "latest", "-p", path, "--overwrite", "--delete", "--json")
    assert result.exit_code == 0, result.stderr
    assert [item["path"] for item in json.loads(result.stdout)["removed"]] == [path + "/torn.tmp"]
    assert not (repository.root / "ckpt" / "torn.tmp").exists()
    assert (repository.root / "other").exists()


def test_delete_spares_what_is_excluded(repository: CliRepository, tmp_path: Path) -> None:
    """Excluded files are in no snapshot; --delete does not take their absence for a reason to remove them."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "keep.cache").write_bytes(b"x")
    config = tmp_path / "c.toml"
    config.write_text(f'exclude = ["*.cache"]\n[[root]]\npath = "{repository.root}"\n')
    result = repository.run(
        "--config",
        str(config),
        *(
            "restore",
            "-s",
            "latest",
            "-p",
            str(repository.root / "ckpt"),
            "--overwrite",
            "--delete",
            "--no-safety",
        ),
    )
    assert result.exit_code == 0, result.stderr
    assert (repository.root / "ckpt" / "keep.cache").exists()


def test_dry_run_changes_nothing_and_tells_the_conflicts(repository: CliRepository) -> None:
    """--dry-run lists what would be done; where the real run would stop it says so with the same code."""
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root), "--dry-run")
    assert result.exit_code == 0, result.stderr
    assert str(repository.root / "ckpt" / "a") in result.stdout
    assert list(repository.root.iterdir()) == []
    (repository.root / "log").write_bytes(b"mine")
    assert repository.run("restore", "-s", "latest", "-p", str(repository.root), "--dry-run").exit_code == 6
    assert (repository.root / "log").read_bytes() == b"mine"


def test_a_dry_run_counts_what_exists_as_a_conflict_and_not_as_a_failure(repository: CliRepository) -> None:
    """What exists is listed once, under conflicts; nothing "appeared meanwhile" and nothing failed."""
    (repository.root / "ckpt").mkdir()
    (repository.root / "ckpt" / "a").write_bytes(b"mine")
    (repository.root / "log").mkdir()
    arguments = ("restore", "-s", "latest", "-p", str(repository.root), "--dry-run")
    said = repository.run(*arguments)
    assert said.exit_code == 6
    assert "meanwhile" not in said.stderr
    assert "restored in part" not in said.stderr
    assert said.stderr.count(str(repository.root / "log")) == 1
    document = json.loads(repository.run(*arguments, "--json").stdout)
    there = [str(repository.root / "ckpt" / "a"), str(repository.root / "log")]
    assert [conflict["path"] for conflict in document["conflicts"]] == there
    assert document["failed"] == []
    assert not document["complete"]
    assert [item["path"] for item in document["items"] if item["action"] == "conflict"] == there


@pytest.mark.parametrize("below", ["", "deeper/still"])
def test_a_destination_that_is_a_file_is_said_to_be_one(
    repository: CliRepository, tmp_path: Path, below: str
) -> None:
    """-d FILE is wrong usage: the message names the file and says what -d wants."""
    file = tmp_path / "file"
    file.write_bytes(b"")
    result = repository.run(
        "restore", "-s", "latest", "-p", str(repository.root / "log"), "-d", str(file / below)
    )
    assert result.exit_code == 2
    assert f"the destination must be a directory, and {file} is a file" in result.stderr
    assert "name a directory with -d" in result.stderr


def test_files_that_are_not_held_are_named(repository: CliRepository, tmp_path: Path) -> None:
    """A file whose content may be later than the cut is restored, and named; one that was just open is not."""
    opened = Entry(name=b"", mode=stat.S_IFREG | 0o600, flags=FLAG_OPEN_FOR_WRITING, mtime_ns=FIRST_NS)
    later = msgspec.structs.replace(opened, flags=not_held(5))
    repository.snapshot({b"model.pt": later, b"log": opened}, not_held=1)
    result = repository.run(
        "restore", "-s", "latest", "-p", str(repository.root), "-d", str(tmp_path / "out")
    )
    assert result.exit_code == 0, result.stderr
    assert "1 file not held at the cut" in result.stderr
    assert "model.pt" in result.stderr
    assert "/log" not in result.stderr


def test_unknown_path_and_snapshot_are_3(repository: CliRepository) -> None:
    """What is not there is 3, and the message says what is."""
    assert repository.run("restore", "-s", "cs-ffffff", "-p", str(repository.root)).exit_code == 3
    result = repository.run("restore", "-s", "latest", "-p", str(repository.root / "chkpt"))
    assert result.exit_code == 3
    assert "ciuic show" in result.stderr


def protect(repository: CliRepository, config: Path) -> None:
    config.write_text(f'[control]\nsocket = "{config.parent}/s"\n[[root]]\npath = "{repository.root}"\n')


def test_safety_snapshot_makes_a_restore_undoable(repository: CliRepository, tmp_path: Path) -> None:
    """Over a protected root a snapshot tagged safety is taken first, and restoring from it brings back what was replaced."""
    config = tmp_path / "c.toml"
    protect(repository, config)
    (repository.root / "log").write_bytes(b"newest work")
    options = ["--config", str(config), "restore", "-p", str(repository.root / "log"), "--overwrite"]
    result = repository.run(*options, "-s", "cs-000001", "--json")
    assert result.exit_code == 0, result.stderr
    assert (repository.root / "log").read_bytes() == b"line\n"
    taken = json.loads(result.stdout)["safety_snapshot"]
    listed = json.loads(repository.run("list", "--tag", "safety", "--json").stdout)["snapshots"]
    assert [snapshot["id"] for snapshot in listed] == [taken]
    assert repository.run(*options, "-s", taken, "--no-safety").exit_code == 0
    assert (repository.root / "log").read_bytes() == b"newest work"


def test_restore_goes_on_without_a_safety_snapshot(
    repository: CliRepository, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When no safety snapshot can be taken, restore says so and brings the files back all the same."""
    monkeypatch.setattr(safety, "LOCK_WAIT_SECONDS", 0.0)
    config = tmp_path / "c.toml"
    protect(repository, config)
    with Repository.open(repository.path) as opened, opened.writer(command="another capture"):
        result = repository.run(
            "--config", str(config), "restore", "-s", "latest", "-p", str(repository.root / "log")
        )
    assert result.exit_code == 0, result.stderr
    assert "no safety snapshot" in result.stderr
    assert (repository.root / "log").read_bytes() == b"line\n"


def test_no_safety_outside_protected_roots(repository: CliRepository, tmp_path: Path) -> None:
    """Elsewhere no safety snapshot is taken, nor with --dry-run or --no-safety."""
    config = tmp_path / "c.toml"
    protect(repository, config)
    path = str(repository.root / "log")
    common = ["--config", str(config), "restore", "-s", "latest", "-p", path]
    for options in (["-d", str(tmp_path / "out")], ["--dry-run"], ["--no-safety"]):
        assert repository.run(*common, *options).exit_code == 0
    assert json.loads(repository.run("list", "--tag", "safety", "--json").stdout)["snapshots"] == []


def test_interrupted_restore_can_be_run_again(repository: CliRepository, tmp_path: Path) -> None:
    """Interrupted at its first progress, restore is 130; run again, it brings everything back and leaves no temporary files."""
    files = {b"f%04d" % number: os.urandom(3000) for number in range(400)}
    repository.snapshot({b"many": files})
    dest = tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "ciuic",
        "restore",
        "-s",
        "latest",
        "-p",
        str(repository.root / "many"),
        "-d",
        str(dest),
    ]
    environment = {**os.environ, "CIUIC_REPO": str(repository.path), "CIUIC_CONFIG": "/dev/null"}
    with subprocess.Popen(
        command, env=environment, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL
    ) as process:
        while process.poll() is None and not (dest.exists() and any(dest.rglob("f*"))):
            pass
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=60)
    assert process.returncode in (0, 130)
    assert b"Traceback" not in said
    subprocess.run([*command, "--overwrite"], env=environment, check=True, capture_output=True)
    assert {path.name.encode(): path.read_bytes() for path in (dest / "many").iterdir()} == files
