"""Retention of a trainer's snapshots by the writer process."""

from __future__ import annotations

import os
from collections import deque
from pathlib import Path

import numpy
from hypothesis import given
from hypothesis.strategies import builds, integers, lists, sets

from ciuic import SnapshotManager
from ciuic.daemon.base.repository_store import Store
from ciuic.maintenance.prune import prune
from ciuic.repository import Repository, SnapshotInfo, Walker
from ciuic.retention import RetentionPolicy
from ciuic.training import EverySeconds, EverySteps, Latest
from ciuic.training.format.reading import read_facts
from ciuic.training.policy.policies import Moment, Rule
from ciuic.training.protocol.messages import RetentionRules
from ciuic.training.writer.housekeeping import split_by_rules
from ciuic.training.writer.marks import DAMAGED
from ciuic.types import ChunkId, RootRecord, SnapshotDraft, SnapshotId


def test_a_snapshot_with_an_unreadable_step_stays(tmp_path: Path) -> None:
    """A snapshot whose step a rule needs and cannot read stays."""
    with SnapshotManager(tmp_path / "s") as manager:
        for step in (1, 2, 3):
            manager.save_snapshot(value=step, step=step, wait=True)
    with Repository.open(tmp_path / "s") as repository:
        infos = repository.snapshots.list()
        facts = {info.id: read_facts(repository, info.id) for info in infos}
    rules = RetentionRules(keep=(EverySteps(100),))
    assert split_by_rules(infos, rules, facts)[1] == [infos[1].id]
    del facts[infos[1].id]
    assert split_by_rules(infos, rules, facts)[1] == []


def test_damaged_snapshots_take_the_place_of_no_good_one(tmp_path: Path) -> None:
    """With one damaged, once verified snapshot per run, the good one that all runs resumed from stays."""
    for step in range(5):
        with SnapshotManager(tmp_path / "s", max_snapshots=2) as manager:
            state = manager.load_latest_snapshot()
            assert state is None if step == 0 else state is not None and state["step"] == 0
            save = manager.save_snapshot(value=numpy.full(1 << 18, step), step=step, wait=True)
        assert save is not None
        if step:
            _damage_own_content(tmp_path / "s", save.id)
    with SnapshotManager(tmp_path / "s", max_snapshots=2) as manager:
        assert manager.load_latest_snapshot() is not None
        for step in (5, 6):
            manager.save_snapshot(value=numpy.full(1 << 18, step), step=step, wait=True)
    with Repository.open(tmp_path / "s") as repository:
        assert [DAMAGED in info.tags for info in repository.snapshots.list()] == [False, False]


def test_a_damaged_snapshot_is_kept_like_an_undamaged_one() -> None:
    """A damaged snapshot is kept and held like any other, and does not change what stays of the good ones."""

    def dropped(*damaged: int, held: int = 0) -> list[int]:
        infos = [
            SnapshotInfo(
                id=SnapshotId(f"cs-00000{number}"),
                time_ns=number,
                size_bytes=0,
                new_bytes=0,
                files=0,
                tags=(DAMAGED,) if number in damaged else (),
                held=number == held,
            )
            for number in (5, 4, 3, 2, 1)
        ]
        return [int(id_[-1]) for id_ in split_by_rules(infos, RetentionRules(keep=(Latest(2),)), {})[1]]

    assert dropped() == [1, 2, 3]
    assert dropped(5, 4) == [1]
    assert dropped(5, 4, 3) == [3]
    assert dropped(4, 2) == [1, 2]
    assert dropped(4, 2, held=2) == [1]
    assert dropped(5, 4, 3, 2, 1) == [1, 2, 3]


@given(
    damaged=sets(integers(1, 12)),
    held=sets(integers(1, 12)),
    rules=lists(
        builds(Latest, integers(1, 6)) | builds(EverySeconds, integers(1, 6)), min_size=1, max_size=3
    ),
)
def test_damage_never_removes_a_snapshot(
    damaged: set[int], held: set[int], rules: list[Latest | EverySeconds]
) -> None:
    """Damage removes nothing: what stays without damage stays, and what stays without the damaged ones."""

    def stay(numbers: set[int], tagged: set[int]) -> set[str]:
        infos = [
            SnapshotInfo(
                id=SnapshotId(f"cs-{number:06x}"),
                time_ns=number * 10**9,
                size_bytes=0,
                new_bytes=0,
                files=0,
                tags=(DAMAGED,) if number in tagged else (),
                held=number in held,
            )
            for number in sorted(numbers, reverse=True)
        ]
        return {info.id for info in split_by_rules(infos, RetentionRules(keep=tuple(rules)), {})[0]}

    everything = set(range(1, 13))
    assert stay(everything, damaged) == stay(everything, set()) | stay(everything - damaged, set())


def _damage_own_content(save_dir: Path, id_: str) -> None:
    """Flip a bit in each chunk that only this snapshot has."""
    with Repository.open(save_dir) as repository:
        seen: set[ChunkId] = set()
        walker = Walker(repository, seen=seen)
        for other in repository.snapshots.ids():
            if other != id_:
                deque(walker.walk(repository.snapshots.load(other), on_damage=lambda *_: None), maxlen=0)
        own = [
            one.id for one in walker.walk(repository.snapshots.load(SnapshotId(id_))) if one.kind == "data"
        ]
        places = [repository.chunks.locate(chunk) for chunk in own]
    assert places
    for place in places:
        with open(save_dir / "packs" / f"{place.pack:016x}.pack", "r+b") as file:
            file.seek(place.offset + place.stored_bytes // 2)
            byte = file.read(1)[0]
            file.seek(-1, os.SEEK_CUR)
            file.write(bytes([byte ^ 4]))


def test_no_retention_but_its_own_removes_states(tmp_path: Path) -> None:
    """`ciuic prune` and a daemon with the same repository leave training states alone."""
    with SnapshotManager(tmp_path / "s") as manager:
        saves = [manager.save_snapshot(value=step, step=step, wait=True) for step in (1, 2, 3)]
    policy = RetentionPolicy(keep_within_seconds=0, keep_last=0)
    store = Store(tmp_path / "s", block_bytes=1 << 18)
    with Repository.open(tmp_path / "s") as repository:
        entry = repository.snapshots.load(repository.snapshots.ids()[0]).roots[0].entry
        with repository.writer() as writer:
            files = RootRecord(path=b"/data", entry=entry, session="00" * 16, epoch=1)
            for number in (1, 2):
                id_ = SnapshotId(f"cs-00000{number}")
                writer.commit(
                    SnapshotDraft(id=id_, time_ns=number, host="h", roots=(files,), tags=("training",))
                )
        assert store.wants_upkeep(policy, None, now_ns=10**18)
        report = prune(repository, policy, now_ns=10**18)
        assert report.removed == ["cs-000001"]
        assert set(repository.snapshots.ids()) == {
            "cs-000002",
            *(save.id for save in saves if save is not None),
        }
        assert not store.wants_upkeep(policy, None, now_ns=10**18)


class _Broken(Rule):
    def due(self, moment: Moment) -> str:
        raise RuntimeError("a mistake in the program's own rule")


def test_a_rule_that_raises_does_not_end_the_training(tmp_path: Path) -> None:
    """An exception in a rule of the program is logged and does not end the training."""
    with SnapshotManager(tmp_path / "s", save_when=[_Broken()]) as manager:
        manager.take({"value": {"weights": 1}})
        manager.boundary()
        assert manager.save_snapshot(wait=True) is not None
