"""A repository made by an enemy, with every checksum right: refused with words or read, and nothing outside is touched."""

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
from support.hostile import craft, use_everything
from support.trees import assert_same, manifest

from ciuic.repository import DamagedSnapshot, snapformat
from ciuic.types import Entry, Pair, RootRecord, Snapshot, SnapshotId


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
    """It is looked up where it says, so it is damage where it says something else."""
    entry = Entry(name=b"", mode=stat.S_IFDIR | 0o755)
    made = Snapshot(
        id=SnapshotId("cs-abcdef"),
        time_ns=5,
        host="h",
        roots=(RootRecord(path=b"/r", entry=entry),),
        pair=pair,
    )
    with pytest.raises(ValueError, match="other half"):
        snapformat.encode_snapshot(made, "r")
    right = snapformat.encode_snapshot(msgspec.structs.replace(made, pair=None), "r")
    stored = msgspec.msgpack.decode(right[36:])
    stored["pair"] = msgspec.to_builtins(pair)
    data = snapformat._wrap(b"CIUICSNP", msgspec.msgpack.encode(stored))
    with pytest.raises(DamagedSnapshot, match="other half"):
        snapformat.decode_snapshot("cs-abcdef", data, "r")
