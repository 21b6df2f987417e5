"""Tests of looking up paths in snapshots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.restoring import take, write

from ciuic.errors import NotFound, UsageError
from ciuic.repository import Repository
from ciuic.repository.lookup import find, normalise


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "repository") as made:
        yield made


def test_found_entries_are_complete(repository: Repository, tmp_path: Path) -> None:
    """A root, a directory, a file and one of two names are found with their attributes."""
    root = tmp_path / "root"
    write(root / "dir" / "file", b"12345")
    os.link(root / "dir" / "file", root / "other")
    os.chmod(root / "dir" / "file", 0o640)
    snapshot = take(repository, root)
    base = os.fsencode(root)
    assert find(repository, snapshot, base).entry.is_dir
    assert find(repository, snapshot, base + b"/dir//.").path == base + b"/dir"
    for name in (b"/dir/file", b"/other"):
        located = find(repository, snapshot, base + name)
        assert (located.entry.size_bytes, located.entry.mode & 0o777) == (5, 0o640)
        assert located.entry.name == os.path.basename(name)
        assert located.root.path == base


def test_each_kind_of_missing_path_has_its_own_message(repository: Repository, tmp_path: Path) -> None:
    """A missing name, a file or a link on the way, and paths outside or above the roots have own messages."""
    root = tmp_path / "root"
    write(root / "file", b"")
    (root / "link").symlink_to("real")
    write(root / "real" / "below", b"")
    snapshot = take(repository, root)
    cases = {
        root / "nothing": ("had no nothing", "ciuic show"),
        root / "file" / "below": ("was not a directory", ""),
        root / "link" / "below": ("was a symbolic link to real", f"ask for {root}/real/below"),
        tmp_path / "elsewhere": ("is not in", f"its roots are: {root}"),
        tmp_path: ("is not in", f"ask for them: {root}"),
    }
    for path, (message, hint) in cases.items():
        with pytest.raises(NotFound) as caught:
            find(repository, snapshot, os.fsencode(path))
        assert message in caught.value.message
        assert hint in caught.value.hint


def test_paths_are_normalised_or_refused() -> None:
    """Dots, doubled and trailing slashes are removed; an impossible path is wrong usage."""
    assert normalise(b"//a/./b/../c//") == b"/a/c"
    assert normalise(b"/") == b"/"
    for path in (b"a", b"", b"/a\0b"):
        with pytest.raises(UsageError):
            normalise(path)
