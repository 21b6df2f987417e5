"""What is removed of a trainer's snapshots."""

from __future__ import annotations

from pathlib import Path

from ciuic import SnapshotManager
from ciuic.daemon.store import Store
from ciuic.gc import prune
from ciuic.repository import Repository
from ciuic.retention import RetentionPolicy
from ciuic.training import EverySteps
from ciuic.training.housekeeping import divide
from ciuic.training.messages import Rules
from ciuic.training.policies import Moment, Rule
from ciuic.training.reading import read_facts
from ciuic.types import RootRecord, SnapshotDraft, SnapshotId


def test_what_cannot_be_read_is_no_reason_to_delete_it(tmp_path: Path) -> None:
    """A rule asks for the steps of snapshots, and of one they are not known: it stays."""
    with SnapshotManager(tmp_path / "s") as manager:
        for step in (1, 2, 3):
            manager.save_snapshot(value=step, step=step, wait=True)
    with Repository.open(tmp_path / "s") as repository:
        infos = repository.snapshots.list()
        facts = {info.id: read_facts(repository, info.id) for info in infos}
    rules = Rules(keep=(EverySteps(100),))
    assert divide(infos, rules, facts)[1] == [infos[1].id]
    del facts[infos[1].id]
    assert divide(infos, rules, facts)[1] == []


def test_no_retention_but_its_own_removes_states(tmp_path: Path) -> None:
    """`ciuic prune`, and the daemon whose repository it is, leave them to their training; other snapshots have their own newest."""
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
    """It is the program's own, and asked after every step."""
    with SnapshotManager(tmp_path / "s", save_when=[_Broken()]) as manager:
        manager.take({"value": {"weights": 1}})
        manager.boundary()
        assert manager.save_snapshot(wait=True) is not None
