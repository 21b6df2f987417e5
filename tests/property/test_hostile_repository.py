"""A repository made by an enemy, with every checksum right: refused with words or read, and nothing outside is touched."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.hostile import craft, use_everything
from support.trees import assert_same, manifest


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """In memory where that can be: restores sync every file."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ciuic-hostile-", dir=place) as made:
        yield Path(made)


@settings(max_examples=4 * settings().max_examples)
@given(data=st.data())
def test_a_crafted_repository_is_refused_or_read(top: Path, data: st.DataObject) -> None:
    """Names with `..`, `/` and NUL, impossible numbers, modes, targets, attributes, maps and roots: list, find, verify,
    check, repair, diff, restore, prune and marking end with an answer or a CiuicError, and no restore leaves its
    destination."""
    area = Path(tempfile.mkdtemp(dir=top))
    outside = area / "outside"
    outside.mkdir()
    (outside / "file").write_bytes(b"must stay as it is")
    before = manifest(outside)
    try:
        craft(area / "repository", data.draw)
        use_everything(area / "repository", area)
        assert_same(before, manifest(outside))
        assert {entry.name for entry in area.iterdir()} <= {"repository", "outside", "target"}
    finally:
        shutil.rmtree(area)
