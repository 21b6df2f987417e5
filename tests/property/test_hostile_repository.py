"""Tests of hostile repositories with valid checksums: they are refused or read, and touch nothing outside."""

from __future__ import annotations

import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.depth import by_depth
from support.hostile import craft, use_everything
from support.trees import assert_same, manifest

from ciuic.repository import DamagedSnapshot, snapshot_format
from ciuic.types import Entry, Pair, RootRecord, Snapshot, SnapshotId


@pytest.fixture(scope="module")
def top() -> Iterator[Path]:
    """Return a directory, in memory where possible: restores sync every file."""
    place = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with tempfile.TemporaryDirectory(prefix="ciuic-hostile-", dir=place) as made:
        yield Path(made)


@settings(max_examples=by_depth(2, 4) * settings().max_examples)
@given(data=st.data())
def test_a_crafted_repository_is_refused_or_read(top: Path, data: st.DataObject) -> None:
    """Every command on a crafted repository gives an answer or a CiuicError, and stays in its destination.

    Crafted are names with `..`, `/` and NUL, impossible numbers, modes, targets, attributes, maps and roots.
    The commands are list, find, verify, check, repair, diff, restore, prune and marking.
    """
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


@pytest.mark.parametrize(
    "pair",
    [
        Pair(of="training", id="../../etc/shadow"),
        Pair(of="training", id="cs-123456", repository="relative"),
        Pair(of="filesystem", id="cs-123456", repository="/x\0y"),
        Pair(of="filesystem", time_ns=-1),
    ],
)
def test_the_other_half_of_a_snapshot_is_an_id_and_a_path(pair: Pair) -> None:
    """The paired snapshot is looked up where the record says, and a mismatch there is damage."""
    entry = Entry(name=b"", mode=stat.S_IFDIR | 0o755)
    made = Snapshot(
        id=SnapshotId("cs-abcdef"),
        time_ns=5,
        host="h",
        roots=(RootRecord(path=b"/r", entry=entry),),
        pair=pair,
    )
    with pytest.raises(ValueError, match="paired snapshot"):
        snapshot_format.encode_snapshot(made, "r")
    right = snapshot_format.encode_snapshot(msgspec.structs.replace(made, pair=None), "r")
    stored = msgspec.msgpack.decode(right[36:])
    stored["pair"] = msgspec.to_builtins(pair)
    data = snapshot_format._wrap(b"CIUICSNP", msgspec.msgpack.encode(stored))
    with pytest.raises(DamagedSnapshot, match="paired snapshot"):
        snapshot_format.decode_snapshot("cs-abcdef", data, "r")
