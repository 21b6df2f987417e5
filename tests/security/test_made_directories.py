"""Attacker: another user of the machine, where root makes directories and names destinations."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.restoring import take

from ciuic.repository import Repository

_OTHER = 61017


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Provide a repository with a snapshot of a file with a safetensors header."""
    root = tmp_path / "root"
    root.mkdir()
    header = b'{"t":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'
    (root / "m.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with Repository.create(tmp_path / "repository") as made:
        take(made, root)
    return tmp_path / "repository"


def _run(repository: Path, *words: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "ciuic", "--repo", str(repository), *map(str, words)]
    return subprocess.run(
        command,
        env={**os.environ, **environment},
        umask=0,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_what_root_makes_is_written_by_root_alone(tmp_path: Path, repository: Path) -> None:
    """Only root can write to caches and exports made under umask 000."""
    cache, export = tmp_path / "cache", tmp_path / "export"
    done = _run(repository, "tensors", tmp_path / "root/m.safetensors", XDG_CACHE_HOME=str(cache))
    assert done.returncode == 0, done.stderr
    export_words = ("export", "latest", export, "--as", "hf", "-p", tmp_path / "root")
    done = _run(repository, *export_words)
    assert done.returncode == 0, done.stderr
    made = [path for top in (cache, export) for path in (top, *top.rglob("*"))]
    assert len(made) > 3
    assert [path for path in made if stat.S_IMODE(path.stat().st_mode) & 0o022] == []


def test_a_mount_follows_no_link_of_another_user(tmp_path: Path, repository: Path) -> None:
    """Root mounts nothing where another user's link leads, as it restores and exports nothing there."""
    target = tmp_path / "target"
    target.mkdir()
    link = tmp_path / "link"
    link.symlink_to(target)
    os.chown(link, _OTHER, _OTHER, follow_symlinks=False)
    done = _run(repository, "mount", link)
    assert done.returncode != 0
    assert f"symbolic link of user {_OTHER}" in done.stderr
