"""Tests of diffs of random changes against two manifests of the directories."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from hypothesis import given, settings
from support import trees
from support.restoring import take, write
from support.trees import STEPS, expected_diff, play

from ciuic.compare.diff import PathChange, diff_live, diff_snapshots
from ciuic.errors import NotFound
from ciuic.repository import Repository


def kinds_and_paths(changes: list[PathChange]) -> set[tuple[str, bytes]]:
    return {(change.kind, change.path) for change in changes}


@settings(max_examples=25)
@given(before=STEPS, after=STEPS)
def test_a_diff_equals_the_difference_of_the_manifests(
    tmp_path_factory: pytest.TempPathFactory, before: list, after: list
) -> None:
    """A diff between snapshots, backwards, or against live files equals the difference of the manifests."""
    base = tmp_path_factory.mktemp("diff")
    root = base / "root"
    root.mkdir()
    play(root, before)
    with Repository.create(base / "repository", block_size=4096) as repository:
        old_facts, old = trees.manifest(root), take(repository, root)
        play(root, after)
        new_facts = trees.manifest(root)
        wanted = expected_diff(root, old_facts, new_facts)
        live = list(diff_live(repository, old))
        new = take(repository, root)
    with Repository.open(base / "repository") as repository:
        forward = list(diff_snapshots(repository, old, new))
        backward = list(diff_snapshots(repository, new, old))
    assert kinds_and_paths(forward) == wanted
    assert kinds_and_paths(live) == wanted
    opposite = {"added": "removed", "removed": "added"}
    assert {(opposite.get(kind, kind), path) for kind, path in kinds_and_paths(backward)} == wanted
    for changes in (forward, live):
        paths = [change.path for change in changes]
        assert len(paths) == len(set(paths))
        for position, path in enumerate(paths):
            assert os.path.dirname(path) not in paths[position:], "a parent after what is below it"
    shutil.rmtree(base)


def test_details_name_each_kind_of_change(tmp_path: Path) -> None:
    """Each kind of change is named, content of equal size included, and only what changed."""
    root = tmp_path / "root"
    for name in ("content", "mode", "size"):
        write(root / name, b"12345")
        os.utime(root / name, ns=(5, 5))
    with Repository.create(tmp_path / "repository") as repository:
        old = take(repository, root)
        write(root / "content", b"54321")
        os.utime(root / "content", ns=(5, 5))
        os.chmod(root / "mode", 0o600)
        write(root / "size", b"1")
        os.utime(root / "size", ns=(5, 6))
        changes = {
            os.path.basename(change.path): set(change.details) for change in diff_live(repository, old)
        }
        assert changes == {b"content": {"content"}, b"mode": {"mode"}, b"size": {"content", "size", "mtime"}}
        one = list(diff_live(repository, old, os.fsencode(root / "mode")))
        assert [change.details for change in one] == [("mode",)]


def test_a_path_that_neither_side_has_is_an_error(tmp_path: Path) -> None:
    """A path on neither side raises NotFound: a typing error must not look like "nothing changed"."""
    root = tmp_path / "root"
    write(root / "file", b"")
    with Repository.create(tmp_path / "repository") as repository:
        old = take(repository, root)
        with pytest.raises(NotFound):
            list(diff_live(repository, old, os.fsencode(root / "nothing")))
        with pytest.raises(NotFound):
            list(diff_snapshots(repository, old, old, os.fsencode(root / "nothing")))
