"""What is removed of a trainer's snapshots."""

from __future__ import annotations

from pathlib import Path

from ciuic import SnapshotManager
from ciuic.repository import Repository
from ciuic.training import EverySteps
from ciuic.training.housekeeping import divide
from ciuic.training.messages import Rules
from ciuic.training.policies import Moment, Rule
from ciuic.training.reading import read_facts


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


class _Broken(Rule):
    def due(self, moment: Moment) -> str:
        raise RuntimeError("a mistake in the program's own rule")


def test_a_rule_that_raises_does_not_end_the_training(tmp_path: Path) -> None:
    """It is the program's own, and asked after every step."""
    with SnapshotManager(tmp_path / "s", save_when=[_Broken()]) as manager:
        manager.take({"value": {"weights": 1}})
        manager.boundary()
        assert manager.save_snapshot(wait=True) is not None
