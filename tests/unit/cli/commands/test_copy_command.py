"""`ciuic copy` on real repositories."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from support.cli_repository import CliRepository


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    return CliRepository(tmp_path / "repo", tmp_path / "root")


def test_a_copy_is_a_repository_and_is_made_again(repository: CliRepository, tmp_path: Path) -> None:
    """The copy lists and restores what the repository has; a second one copies nothing, and finds damage if asked."""
    name = repository.snapshot({b"f": os.urandom(100_000)})
    copy = tmp_path / "copy"
    made = repository.run("copy", str(copy), "--verify")
    assert made.exit_code == 0, made.output
    assert "1 snapshot; 2 packs copied" in made.stdout
    assert "every byte is right" in made.stdout
    shown = repository.run("cat", name, str(repository.root / "f"), env={"CIUIC_REPO": str(copy)})
    assert shown.stdout_bytes == repository.run("cat", name, str(repository.root / "f")).stdout_bytes
    again = json.loads(repository.run("copy", str(copy), "--json").stdout)
    assert (again["snapshots"], again["copied_packs"], again["kept_packs"]) == (1, 0, 2)
    assert again["verify"] is None
    pack = sorted((copy / "packs").iterdir())[0]
    kept = pack.stat()
    with pack.open("r+b") as file:
        file.seek(5000)
        file.write(b"\0\xff" * 20)
    os.utime(pack, ns=(kept.st_mtime_ns, kept.st_mtime_ns))
    assert repository.run("copy", str(copy), "--verify").exit_code == 4


def test_what_is_no_copy_is_refused(repository: CliRepository, tmp_path: Path) -> None:
    """A directory with other files is named and left alone; so is a place in the repository itself."""
    repository.snapshot({b"f": b"x"})
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "f").write_text("mine")
    refused = repository.run("copy", str(tmp_path / "full"))
    assert refused.exit_code == 6
    assert "neither empty nor a copy" in refused.output
    assert repository.run("copy", str(repository.path / "copy")).exit_code == 2
    assert repository.run("--repo", "s3://bucket/x", "copy", str(tmp_path / "c")).exit_code == 2
