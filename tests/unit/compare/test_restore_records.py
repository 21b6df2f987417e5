"""Tests of whether a safety snapshot can still undo the newest change of what was restored."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import pytest
from support.cli_repository import FIRST_NS, SECOND_NS, CliRepository

from ciuic.compare.restore_records import record_end, record_restore, undoes_newest_change
from ciuic.maintenance.prune import prune
from ciuic.repository import Repository
from ciuic.retention import RetentionPolicy
from ciuic.types import SAFETY_MESSAGE, TAG_SAFETY, SnapshotId

HOUR_NS = 3600 * SECOND_NS
SAFETY = {"tags": (TAG_SAFETY,), "message": f"{SAFETY_MESSAGE}cs-000001"}


@pytest.fixture
def repository(tmp_path: Path) -> CliRepository:
    return CliRepository(tmp_path / "repo", tmp_path / "root")


def _undoes(repository: CliRepository, safety: SnapshotId) -> bool:
    with Repository.open(repository.path) as opened:
        return undoes_newest_change(opened, opened.snapshots.list(), safety)


def _note(repository: CliRepository, safety: SnapshotId, *names: str) -> None:
    paths = [os.fsencode(repository.root / name) for name in names]
    with Repository.open(repository.path) as opened:
        record_restore(repository.path, safety, paths, opened.snapshots.names())


def test_until_the_restored_paths_change_again(repository: CliRepository) -> None:
    """A safety snapshot can undo the restore until a restored path changes again, whatever other paths do."""
    safety = repository.snapshot({b"a": {b"f": b"bad"}, b"b": b"1"}, **SAFETY)
    _note(repository, safety, "a")
    assert _undoes(repository, safety)
    repository.snapshot({b"a": {b"f": b"good"}, b"b": b"1"})
    assert _undoes(repository, safety)
    repository.snapshot({b"a": {b"f": b"good"}, b"b": b"2"})
    assert _undoes(repository, safety)
    repository.snapshot({b"a": {b"f": b"newer"}, b"b": b"2"})
    assert not _undoes(repository, safety)


def test_one_unchanged_path_of_several_is_enough(repository: CliRepository) -> None:
    """A restore of two directories of which one was changed since can be undone in part."""
    safety = repository.snapshot({b"a": b"0", b"b": b"0"}, **SAFETY)
    _note(repository, safety, "a", "b")
    repository.snapshot({b"a": b"1", b"b": b"1"})
    repository.snapshot({b"a": b"2", b"b": b"1"})
    assert _undoes(repository, safety)


def test_a_snapshot_of_half_a_restore_is_not_taken_for_a_change(repository: CliRepository) -> None:
    """A scheduled snapshot cut during the restore, which has half of it, does not count as a change."""
    safety = repository.snapshot({b"a": {b"f": b"bad", b"g": b"bad"}}, **SAFETY)
    _note(repository, safety, "a")
    repository.snapshot({b"a": {b"f": b"good", b"g": b"bad"}})
    record_end(repository.path, safety, FIRST_NS + HOUR_NS + 1)
    repository.snapshot({b"a": {b"f": b"good", b"g": b"good"}})
    repository.snapshot({b"a": {b"f": b"good", b"g": b"good"}, b"other": b"x"})
    assert _undoes(repository, safety)


def test_safety_snapshot_without_a_note_stands_for_its_roots(repository: CliRepository) -> None:
    """A safety snapshot without a readable note of its paths stands for its roots."""
    safety = repository.snapshot({b"a": b"0", b"b": b"0"}, **SAFETY)
    _note(repository, safety, "a")
    (repository.path / "restores" / safety).write_text('{"paths"')
    repository.snapshot({b"a": b"1", b"b": b"0"})
    assert _undoes(repository, safety)
    repository.snapshot({b"a": b"1", b"b": b"1"})
    assert not _undoes(repository, safety)


def test_snapshot_that_cannot_be_compared_can_undo(repository: CliRepository) -> None:
    """A snapshot that cannot be compared counts as able to undo: damage is never a reason to delete."""
    safety = repository.snapshot({b"a": b"0"}, **SAFETY)
    _note(repository, safety, "a")
    later = [repository.snapshot({b"a": b"1"}), repository.snapshot({b"a": b"2"})]
    assert not _undoes(repository, safety)
    (repository.path / "snapshots" / later[0]).write_bytes(b"torn")
    rows = [_Row(later[0], FIRST_NS + HOUR_NS), _Row(later[1], FIRST_NS + 2 * HOUR_NS)]
    with Repository.open(repository.path) as opened:
        assert undoes_newest_change(opened, rows, safety)


class _Row(NamedTuple):
    id: SnapshotId
    time_ns: int

    @property
    def order_ns(self) -> int:
        return self.time_ns


def test_prune_keeps_it_and_forgets_the_notes_of_others(repository: CliRepository) -> None:
    """Prune keeps the old safety snapshot whose path is unchanged, and deletes notes of removed ones."""
    first = repository.snapshot({b"a": b"bad", b"b": b"bad"}, **SAFETY)
    _note(repository, first, "a")
    second = repository.snapshot({b"a": b"good", b"b": b"bad"}, **SAFETY)
    _note(repository, second, "b")
    for number in range(3):
        _note(repository, repository.snapshot({b"a": b"good", b"b": b"%d" % number}, **SAFETY), "b")
    last = repository.snapshot({b"a": b"good", b"b": b"new"})
    policy = RetentionPolicy(keep_within_seconds=0, keep_last=1, keep_safety_seconds=0)
    with Repository.open(repository.path) as opened:
        report = prune(opened, policy, now_ns=FIRST_NS + 100 * 86400 * SECOND_NS)
    assert report.removed == [second]
    _note(repository, last, "a")
    assert second not in os.listdir(repository.path / "restores")
    assert first in os.listdir(repository.path / "restores")
