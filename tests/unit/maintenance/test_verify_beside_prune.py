"""Verification of all snapshots beside a job that removes some of them, and what they alone needed."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from support.small_repository import BLOCK, make_snapshot

from ciuic.errors import NotFound
from ciuic.maintenance import verify
from ciuic.maintenance.prune import forget, prune
from ciuic.maintenance.verify import verify_snapshots
from ciuic.repository import Repository
from ciuic.types import SnapshotId

GONE = SnapshotId("cs-00000b")


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    """A repository of three snapshots without a chunk in common."""
    with Repository.create(tmp_path / "r", block_size=BLOCK) as made:
        for number, name in enumerate(("cs-00000a", GONE, "cs-00000c")):
            with made.writer() as writer:
                make_snapshot(writer, name, {b"f": os.urandom(4 * BLOCK)}, time_ns=number + 1)
    return Repository.open(tmp_path / "r")


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize("moment", ["listed", "loaded"])
def test_what_is_removed_meanwhile_is_no_damage(
    repository: Repository, monkeypatch: pytest.MonkeyPatch, moment: str, checksum: bool
) -> None:
    """A snapshot that is removed and pruned after it was listed or loaded is no error and no damage."""

    def remove() -> None:
        with Repository.open(repository.path) as other:
            forget(other, [GONE])
            prune(other)

    name = "_load" if moment == "listed" else "_verify_snapshots"
    method = getattr(verify.Verification, name)

    def meanwhile(self: verify.Verification, *args: object, **kwargs: object) -> object:
        remove()
        return method(self, *args, **kwargs)

    monkeypatch.setattr(verify.Verification, name, meanwhile)
    result = verify_snapshots(repository, checksum=checksum)
    assert result.damages == []
    assert (GONE in result.snapshots) is (moment == "loaded")


def test_a_named_snapshot_must_be_there(repository: Repository) -> None:
    """A snapshot that somebody named and that is gone is an error."""
    forget(repository, [GONE])
    with pytest.raises(NotFound):
        verify_snapshots(repository, [GONE])
