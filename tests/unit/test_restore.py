"""Restores between real directories through a real repository."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support import trees
from support.restoring import take

from ciuic.repository import Repository
from ciuic.restore import execute, plan_restore


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repository", block_size=4096) as made:
        yield made


@pytest.fixture
def root(tmp_path: Path) -> Path:
    made = tmp_path / "root"
    made.mkdir()
    return made


def test_everything_comes_back_elsewhere(repository: Repository, root: Path, tmp_path: Path) -> None:
    """Bytes, modes, owners, times, xattrs, ACLs, links, devices, holes, odd names and depth are as they were."""
    trees.make_everything(root)
    expected = trees.manifest(root)
    snapshot = take(repository, root)
    result = execute(plan_restore(repository, snapshot, [os.fsencode(root)], os.fsencode(tmp_path / "out")))
    assert result.complete, result.error()
    trees.assert_same(expected, trees.manifest(tmp_path / "out" / "root"))
