"""`ciuic stats` on real repositories: rows, sums by root and by time, and what a set frees together."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from support.cli_repository import CliRepository
from support.stored import flip

from ciuic.repository import Repository
from ciuic.types import ChunkId, SnapshotId

MIB = 1 << 20
SHARED, OWN = os.urandom(3 * MIB), os.urandom(MIB)


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    """Make three snapshots: one with content of its own, two that share theirs."""
    made = CliRepository(tmp_path / "repo", tmp_path / "root")
    made.snapshot({b"own": OWN})
    made.snapshot({b"shared": SHARED})
    made.snapshot({b"shared": SHARED, b"empty": b""})
    return made


def document(repository: CliRepository, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(repository.run("stats", "--json", *arguments).stdout)
    return found


def test_shared_content_is_freed_by_neither_alone(repository: CliRepository) -> None:
    """Content of two snapshots is freed by neither of them alone, by both together, and by their root and day."""
    found = document(repository)
    frees = {one["id"]: one["frees_bytes"] for one in found["snapshots"]}
    assert frees["cs-000001"] > MIB
    # The directory of the earlier one may be what the later one's is stored as a difference from: then it frees nothing.
    assert frees["cs-000002"] < 10_000 > frees["cs-000003"] > 0
    assert found["together_frees_bytes"] is None
    (root,) = found["roots"]
    (day,) = found["periods"]
    assert root["frees_bytes"] == day["frees_bytes"] == found["stored_bytes"]
    assert (root["snapshots"], day["snapshots"]) == (3, 3)
    assert found["size_bytes"] == MIB + 2 * 3 * MIB
    assert found["deduplication"] == pytest.approx(7 / 4, abs=0.05)

    both = document(repository, "cs-000002", "cs-000003")
    assert [one["id"] for one in both["snapshots"]] == ["cs-000003", "cs-000002"]
    assert both["together_frees_bytes"] > 3 * MIB


def test_people_read_rows_and_sums(repository: CliRepository) -> None:
    """A table of snapshots, one by root, one by the chosen period, and the sums in words."""
    text = repository.run("stats", "--by", "month").stdout
    assert text.splitlines()[0].split() == ["ID", "TIME", "SIZE", "FREES", "ROOTS"]
    assert "2023-06  " in text
    assert "3 snapshots show 7.00 MiB, stored in 4.00 MiB: shared 1.75 times, compressed 1.0 times" in text
    together = repository.run("stats", "latest", "latest~1").stdout
    assert "forgetting all 2 of them frees 3.00 MiB" in together


def test_rows_of_one_root(repository: CliRepository) -> None:
    """With --root the rows are those of its snapshots; a root that no snapshot has leaves none."""
    root = os.fsdecode(repository.root)
    assert len(document(repository, "--root", root)["snapshots"]) == 3
    other = document(repository, "--root", "/elsewhere")
    assert (other["snapshots"], other["roots"]) == ([], [])


def test_a_snapshot_that_cannot_be_read_is_named(repository: CliRepository) -> None:
    """A damaged snapshot file is named with the code of damage, and the others are counted."""
    (repository.path / "snapshots" / "cs-000002").write_bytes(b"damaged")
    result = repository.run("stats")
    assert result.exit_code == 4
    assert "cannot be counted: cs-000002: " in result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[1:3]] == ["cs-000003", "cs-000001"]


def test_one_damaged_directory_does_not_end_the_count(repository: CliRepository) -> None:
    """The snapshot whose directory cannot be read is named (exit 4), and all that is whole is counted as before."""
    whole = document(repository)
    with Repository.open(repository.path) as opened:
        (root,) = opened.snapshots.load(SnapshotId("cs-000001")).roots
        place = opened.chunks.locate(ChunkId(root.entry.content))
        flip(Path(opened.pack_path(place.pack)), place.offset)
    result = repository.run("stats", "--json")
    assert result.exit_code == 4
    found = json.loads(result.stdout)
    (words,) = found["unread"]
    assert words.startswith("cs-000001: ")
    assert found["snapshots"][:2] == whole["snapshots"][:2]
    # What the directory names is known from there alone.
    assert found["garbage_bytes"] > MIB
    assert "cannot be counted: cs-000001: " in repository.run("stats", "cs-000003").stderr
