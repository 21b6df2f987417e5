"""Files of snapshots, and files as they are now, as the source of verdicts."""

from __future__ import annotations

import io
import os
import random
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.checkpoint_files import FORMATS, plain_safetensors
from support.cli_repository import FIRST_NS, SECOND_NS, store_file
from support.live_source import LiveDirectory, open_live_file
from support.small_repository import BLOCK

from ciuic.history import checkpoints, timelines
from ciuic.repository import Repository
from ciuic.repository.lookup import find
from ciuic.types import (
    FLAG_OPEN_FOR_WRITING,
    Entry,
    RootRecord,
    Snapshot,
    SnapshotDraft,
    SnapshotId,
    not_held,
)
from ciuic.verdicts.model import Verdict
from ciuic.verdicts.sources import SnapshotFile
from ciuic.verdicts.verdict import checkpoints_in


class Tracked:
    """Repository with snapshots of one tracked root, /r, which has one directory of files."""

    def __init__(self, path: Path) -> None:
        self.repository = Repository.create(path, block_size=BLOCK)
        self.count = 0

    def snapshot(self, files: dict[bytes, tuple[bytes, dict[str, Any]]], mode: Any = "tracked") -> Snapshot:
        with self.repository.writer() as writer:
            entries: dict[bytes, Entry | None] = {
                name: store_file(writer, BLOCK, name, data, **fields)
                for name, (data, fields) in files.items()
            }
            tree = writer.update_tree(b"", entries)
            root = Entry(
                name=b"",
                mode=stat.S_IFDIR | 0o755,
                content=tree.id,
                total_files=tree.total_files,
                total_bytes=tree.total_bytes,
            )
            self.count += 1
            draft = SnapshotDraft(
                id=SnapshotId.parse(f"cs-{self.count:06x}"),
                time_ns=self.at(self.count),
                host="h",
                roots=(RootRecord(path=b"/r", entry=root, mode=mode, not_held=0),),
            )
            return writer.commit(draft)

    @staticmethod
    def at(number: int) -> int:
        """Return the time of a snapshot."""
        return FIRST_NS + number * 60 * SECOND_NS

    def verdict(self, number: int = -1) -> Verdict:
        """Return the verdict on the only checkpoint of a snapshot."""
        loaded = self.repository.snapshots.load_all()[0]
        (timeline,) = timelines(loaded)
        (found,) = checkpoints(self.repository, timeline, loaded[::-1][number])
        return found.checkpoint.verdict


@pytest.fixture
def tracked(tmp_path: Path) -> Tracked:
    return Tracked(tmp_path / "repository")


def tensors(seed: int, size: int = 5000) -> bytes:
    return plain_safetensors({"a": np.random.default_rng(seed).uniform(1, 2, size).astype("f4")})


def test_ranges_and_holes_are_those_of_the_file(tracked: Tracked) -> None:
    """Every range reads what was stored, and the holes are its blocks of zeros."""
    rng = random.Random(3)
    data = rng.randbytes(BLOCK) + bytes(2 * BLOCK) + rng.randbytes(BLOCK + 17) + bytes(BLOCK * 2)
    snapshot = tracked.snapshot({b"a": (data, {})})
    source = SnapshotFile(
        tracked.repository, snapshot, find(tracked.repository, snapshot, b"/r/a"), lambda time_ns: None
    )
    for _ in range(100):
        start, length = rng.randrange(len(data) + 9), rng.randrange(3 * BLOCK)
        assert source.read(start, length) == data[start : start + length]
    assert list(source.holes(0, len(data))) == [(BLOCK, 3 * BLOCK), (5 * BLOCK, len(data))]
    assert list(source.holes(BLOCK + 5, 2 * BLOCK)) == [(BLOCK + 5, 2 * BLOCK)]


@pytest.mark.parametrize(
    ("fields", "mode", "state"),
    [
        ({}, "tracked", "GOOD"),
        ({}, "full", "GOOD"),
        ({"flags": FLAG_OPEN_FOR_WRITING}, "tracked", "UNKNOWN"),
        ({"flags": not_held(20)}, "tracked", "UNKNOWN"),
        ({}, "offline", "UNKNOWN"),
    ],
)
def test_what_the_snapshot_says_of_writers_counts(
    tracked: Tracked, fields: dict[str, Any], mode: str, state: str
) -> None:
    """A whole file is GOOD, unless a writer had it open, its content may be later, or it is unknown who wrote."""
    tracked.snapshot({b"a.safetensors": (tensors(1), fields)}, mode)
    assert tracked.verdict().state == state


def test_a_file_overwritten_in_place_is_unknown_as_long_as_it_stays(tracked: Tracked) -> None:
    """Half old, half new and no process has it open: UNKNOWN in the first snapshot and in later ones, until it is replaced."""
    old, new = tensors(1), tensors(2)
    tracked.snapshot({b"a.safetensors": (old, {"ino": 5, "ctime_ns": tracked.at(1) - 9})})
    mixed = new[: len(new) // 2] + old[len(new) // 2 :]
    ctime_ns = tracked.at(2) - 9
    for _ in range(3):
        tracked.snapshot({b"a.safetensors": (mixed, {"ino": 5, "ctime_ns": ctime_ns})})
        assert tracked.verdict().state == "UNKNOWN"
    # chmod changes the inode's time, and not the doubt.
    tracked.snapshot({b"a.safetensors": (mixed, {"ino": 5, "ctime_ns": tracked.at(5) - 9})})
    assert tracked.verdict().state == "UNKNOWN"
    tracked.snapshot({b"a.safetensors": (new, {"ino": 6, "ctime_ns": tracked.at(6) - 9})})
    assert tracked.verdict().is_good
    assert tracked.verdict(0).is_good


def test_an_archive_overwritten_in_place_is_judged_by_its_checksums(tracked: Tracked) -> None:
    """An npz that was written again in place is GOOD when all of it is new, and TORN when a part is old."""
    contents = []
    for seed in (1, 2):
        into = io.BytesIO()
        np.savez(into, a=np.random.default_rng(seed).random(1_000_000))
        contents.append(into.getvalue())
    old, new = contents
    tracked.snapshot({b"a.npz": (old, {"ino": 5, "ctime_ns": tracked.at(1) - 9})})
    tracked.snapshot({b"a.npz": (new, {"ino": 5, "ctime_ns": tracked.at(2) - 9})})
    assert tracked.verdict().is_good
    mixed = new[:6_000_000] + old[6_000_000:7_000_000] + new[7_000_000:]
    tracked.snapshot({b"a.npz": (mixed, {"ino": 5, "ctime_ns": tracked.at(3) - 9})})
    assert tracked.verdict().state == "TORN"


def test_allocated_space_is_a_hole(tracked: Tracked) -> None:
    """A file of full length whose second half was never written is UNKNOWN, and the reason names the hole."""
    whole = tensors(1, 50_000)
    tracked.snapshot({b"a.safetensors": (whole[:100_000] + bytes(len(whole) - 100_000), {})})
    verdict = tracked.verdict()
    assert verdict.state == "UNKNOWN"
    assert "hole" in verdict.reason


WHOLE = FORMATS["safetensors"].make(random.Random(1))


def test_a_file_that_is_open_for_writing_is_not_good(tmp_path: Path) -> None:
    """A whole file is GOOD once its writer has closed it."""
    path = tmp_path / "a.safetensors"
    with path.open("wb", buffering=0) as file:
        file.write(WHOLE)
        (found,) = checkpoints_in(LiveDirectory(os.fsencode(tmp_path)))
        assert found.verdict.state == "UNKNOWN"
    (found,) = checkpoints_in(LiveDirectory(os.fsencode(tmp_path)))
    assert found.verdict.is_good, found.verdict


def test_only_regular_files_are_opened(tmp_path: Path) -> None:
    """A fifo is not waited for, and a symbolic link is not followed."""
    os.mkfifo(tmp_path / "a.pt")
    (tmp_path / "b.pt").symlink_to("/etc/passwd")
    assert checkpoints_in(LiveDirectory(os.fsencode(tmp_path))) == []


def test_holes_are_those_of_the_file_system(tmp_path: Path) -> None:
    """A range that was never written is a hole, and one that was is not."""
    path = tmp_path / "a"
    with path.open("wb") as file:
        file.write(b"x" * 65536)
        file.truncate(262144)
    source = open_live_file(os.fsencode(path))
    assert source is not None
    assert list(source.holes(0, 262144)) == [(65536, 262144)]
    source.close()
