"""``ciuic restore --lazy`` as it is typed: what it prints, where it ends, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import trees
from support.restoring import take, write
from support.until import until

from ciuic.fuse_layer.system import mounts
from ciuic.repository import Repository
from ciuic.system.mountinfo import LAZY_FS_TYPE

pytestmark = pytest.mark.mount


class Place:
    """A repository with a snapshot of a directory, and the command."""

    def __init__(self, top: Path) -> None:
        self.top = top
        self.root = top / "root"
        for name in ("a", "sub/b"):
            write(self.root / name, os.urandom(9000))
        with Repository.create(top / "repository", block_size=4096) as repository:
            take(repository, self.root)
        self.config = top / "ciuic.toml"
        self.config.write_text(f'[daemon]\nruntime_dir = "{top}/run"\n')

    def ciuic(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Run the command."""
        return subprocess.run(
            [
                *("timeout", "60", sys.executable, "-m", "ciuic", "--config", self.config),
                *("--repo", self.top / "repository", *words),
            ],
            capture_output=True,
            text=True,
            check=False,
        )

    def lazily(self, *words: str | Path) -> subprocess.CompletedProcess[str]:
        """Restore the directory lazily, into ``dest``."""
        return self.ciuic(
            "restore", "--lazy", "-s", "latest", "-p", self.root, "-d", self.top / "dest", *words
        )

    def status(self) -> list[dict[str, Any]]:
        """Return what ``restore --status`` prints."""
        restores: list[dict[str, Any]] = json.loads(self.ciuic("restore", "--status", "--json").stdout)[
            "restores"
        ]
        return restores


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Place]:
    made = Place(tmp_path)
    yield made
    entry = mounts.mount_at(str(tmp_path / "dest" / "root"))
    if entry is not None and entry.fs_type == LAZY_FS_TYPE.decode():
        mounts.detach(str(tmp_path / "dest" / "root"), LAZY_FS_TYPE.decode())


def test_the_command_returns_and_the_directory_becomes_plain(place: Place) -> None:
    """It returns when the mount answers; ``--status`` says when it is complete, and then it is the same as the snapshot."""
    began = place.lazily("--json")
    assert began.returncode == 0, began.stderr
    document = json.loads(began.stdout)
    assert document["destination"] == str(place.top / "dest" / "root")
    assert (document["state"], document["files_total"]) == ("filling", 2)
    until("the end of the restore", lambda: [found["state"] for found in place.status()] == ["complete"])
    assert place.status()[0]["code"] == 0
    trees.assert_same(trees.manifest(place.root), trees.manifest(place.top / "dest" / "root"))
    assert "complete" in place.ciuic("restore", "--status").stdout


def test_in_the_foreground_it_returns_at_the_end(place: Place) -> None:
    """With ``--foreground`` the directory is plain when it returns."""
    done = place.lazily("--foreground")
    assert done.returncode == 0, done.stderr
    assert "is complete: 2 files" in done.stdout
    trees.assert_same(trees.manifest(place.root), trees.manifest(place.top / "dest" / "root"))


def test_what_does_not_go_with_it_is_refused(place: Place) -> None:
    """Options of a plain restore, a file, and a directory in use are refused with their exit codes, before anything is made."""
    assert place.lazily("--overwrite").returncode == 2
    assert place.lazily("--dry-run").returncode == 2
    assert place.lazily("-p", place.root / "sub").returncode == 2
    file = place.ciuic("restore", "--lazy", "-s", "latest", "-p", place.root / "a", "-d", place.top / "dest")
    assert (file.returncode, "is no directory" in file.stderr) == (2, True)
    assert not (place.top / "dest").exists()
    write(place.top / "dest" / "root" / "mine", b"")
    used = place.lazily()
    assert (used.returncode, "is not empty" in used.stderr, used.stdout) == (6, True, "")


def test_an_incomplete_directory_cannot_be_protected(place: Place) -> None:
    """``protect`` refuses a directory that an interrupted lazy restore has left."""
    (place.root / ".ciuic-state" / "lazy-restore").mkdir(parents=True)
    refused = place.ciuic("protect", place.root)
    assert refused.returncode == 2
    assert "restored lazily" in refused.stderr
