"""States that are not the newest any more: coded in idle time, while the newest lies as it is."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.raw_states import chunks_of, content_of, drifting

from ciuic.maintenance.check import check
from ciuic.repository import Repository
from ciuic.repository.codecs.codec import Pace
from ciuic.repository.format import pack_format as pf
from ciuic.training.policy.retention_rules import EverySteps, Keep, Latest
from ciuic.training.protocol.messages import Manifest, ManifestFile, RetentionRules
from ciuic.training.writer.codecs import CodecChooser
from ciuic.training.writer.committing import LastCommit, commit
from ciuic.training.writer.reverse_deltas import ReverseDeltas
from ciuic.types import SnapshotId

_BLOCK = 65536
DIFFERENCE = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=_BLOCK) as made:
        yield made


class Saves:
    """Successive commits of one state and what follows them, as the writer process makes them."""

    def __init__(self, repository: Repository, keep: tuple[Keep, ...] = ()) -> None:
        self.repository = repository
        rules = RetentionRules(keep=keep)
        self.chooser = CodecChooser("auto", rules, later=True)
        self.deltas = ReverseDeltas(str(repository.path), rules)
        self.known = LastCommit()

    def save(self, content: bytes) -> SnapshotId:
        manifest = Manifest(
            time_ns=1,
            message="",
            tags=(),
            files=[ManifestFile("model/weight.safetensors", 0, len(content), 4)],
        )
        with self.repository.writer() as writer:
            chosen = self.chooser.begin(writer)
            view = memoryview(content)
            snapshot = commit(self.repository, writer, view, manifest, b"/training", self.known, chosen)
            self.chooser.done(chosen)
            self.deltas.saved(snapshot.id, chosen)
            writer.seal_packs(1)
        self.repository.close()
        return snapshot.id

    def flags(self, id_: SnapshotId) -> set[int]:
        return {self.repository.chunks.locate(chunk).flags for chunk in chunks_of(self.repository, id_)}


def patient() -> Pace:
    return "patient"


def test_the_newest_is_never_decoded(repository: Repository) -> None:
    """Each state becomes a difference once another is there; the newest lies as it is all the time."""
    saves = Saves(repository)
    states = list(drifting(4, 3 * _BLOCK + 1000))
    made: list[SnapshotId] = []
    for state in states:
        made.append(saves.save(state))
        saves.deltas.run(patient)
        assert saves.flags(made[-1]) == {0}
    assert [saves.flags(id_) for id_ in made[:-1]] == [{DIFFERENCE}] * 3
    assert [content_of(repository, id_) for id_ in made] == states
    assert not saves.deltas.is_waiting
    assert not check(repository, read_data=True).damaged


def test_what_the_newest_shares_lies_as_it_is(repository: Repository) -> None:
    """Blocks that did not change are blocks of the newest state, and are left alone."""
    saves = Saves(repository)
    first, second = drifting(2, 4 * _BLOCK)
    one = saves.save(first)
    other = saves.save(first[:_BLOCK] + second[_BLOCK:])
    saves.deltas.run(patient)
    assert saves.flags(other) == {0}
    assert saves.flags(one) == {0, DIFFERENCE}
    assert content_of(repository, one) == first


def test_a_save_ends_the_work_and_the_rest_is_done_later(repository: Repository) -> None:
    """A state whose coding a save has ended stays as it is, and is coded after that save."""
    saves = Saves(repository)
    states = list(drifting(3, 3 * _BLOCK))
    made = [saves.save(state) for state in states[:2]]
    paces: list[Pace] = ["patient", "patient"]
    saves.deltas.run(lambda: paces.pop() if paces else "now")
    assert saves.deltas.is_waiting
    assert saves.flags(made[0]) == {0}
    made.append(saves.save(states[2]))
    saves.deltas.run(patient)
    assert [saves.flags(id_) for id_ in made] == [{DIFFERENCE}, {DIFFERENCE}, {0}]
    assert [content_of(repository, id_) for id_ in made] == states


def test_rules_that_keep_single_states_rule_out_bases(repository: Repository) -> None:
    """States whose bases would outlive their snapshots become planes."""
    for keep, form in (((Latest(3),), DIFFERENCE), ((Latest(3), EverySteps(1000)), pf.FLAG_PLANES)):
        saves = Saves(repository, keep)
        made = [saves.save(state) for state in drifting(2, 3 * _BLOCK, seed=form)]
        saves.deltas.run(patient)
        assert saves.flags(made[0]) == {form}


def test_a_removed_state_is_passed_over(repository: Repository) -> None:
    """A state that retention has removed is not coded, and one whose successor is gone gets no base."""
    saves = Saves(repository)
    states = list(drifting(3, 3 * _BLOCK))
    made = [saves.save(state) for state in states]
    with repository.writer() as writer:
        writer.remove_snapshots([made[1]])
    saves.deltas.run(patient)
    assert not saves.deltas.is_waiting
    assert saves.flags(made[0]) == {pf.FLAG_PLANES}
    assert content_of(repository, made[0]) == states[0]
