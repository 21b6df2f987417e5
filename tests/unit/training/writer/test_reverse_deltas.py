"""States that are not the newest any more: coded in idle time, while the newest lies as it is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from support.raw_states import STATE_BLOCK, Saves, chunks_of, content_of, drifting

from ciuic.maintenance.check import check
from ciuic.maintenance.prune import prune
from ciuic.maintenance.sweep import Thresholds
from ciuic.repository import Repository
from ciuic.repository import pack_format as pf
from ciuic.repository.compression import Codec, Coded, Pace
from ciuic.repository.writing import pack_maintenance
from ciuic.training.rules import EverySteps, Latest
from ciuic.training.writer.codecs import SEAL_FROM_BYTES
from ciuic.types import SnapshotId

_BLOCK = STATE_BLOCK
DIFFERENCE = pf.FLAG_PLANES | pf.FLAG_DIFFERENCE


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=_BLOCK) as made:
        yield made


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
    assert not saves.deltas.waiting
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
    assert saves.deltas.waiting
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
    assert not saves.deltas.waiting
    assert saves.flags(made[0]) == {pf.FLAG_PLANES}
    assert content_of(repository, made[0]) == states[0]


def depths(repository: Repository, id_: SnapshotId) -> set[int]:
    return {len(repository.chunks.locate_all(chunk)) - 1 for chunk in chunks_of(repository, id_)}


def count_codings(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets an item for each chunk that is coded."""
    counted: list[int] = []
    code = pack_maintenance._coded

    def counting(content: bytes, codec: Codec) -> Coded | None:
        counted.append(len(content))
        return code(content, codec)

    monkeypatch.setattr(pack_maintenance, "_coded", counting)
    return counted


def ends_after(looks: int) -> Callable[[], Pace]:
    """Return a pace that ends the work at a look."""
    left = iter(range(looks))
    return lambda: "now" if next(left, None) is None else "patient"


def test_stopped_again_and_again_nothing_is_coded_twice(
    repository: Repository, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Work that is stopped after each chunk gets to its end, with one coding for each chunk."""
    counted = count_codings(monkeypatch)
    saves = Saves(repository)
    states = list(drifting(2, 12 * _BLOCK))
    made = [saves.save(state) for state in states]
    looks = 4
    while saves.deltas.waiting:
        looks += 1
        saves.deltas.run(ends_after(looks))
    assert counted == [_BLOCK] * 12
    assert [saves.flags(id_) for id_ in made] == [{DIFFERENCE}, {0}]
    assert [content_of(repository, id_) for id_ in made] == states
    assert not check(repository, read_data=True).damaged


def test_what_was_coded_before_its_base_went_is_not_stored(repository: Repository) -> None:
    """Between two turns the state that differences rest on may be removed and swept: they are made anew."""
    saves = Saves(repository)
    states = list(drifting(3, 12 * _BLOCK))
    made = [saves.save(state) for state in states[:2]]
    saves.deltas.run(ends_after(10))
    assert saves.deltas.waiting
    with repository.writer() as writer:
        writer.remove_snapshots([made[1]])
    prune(repository, None, thresholds=Thresholds(unused_share=0.0, pack_dead_share=0.0))
    saves.deltas.run(patient)
    assert saves.flags(made[0]) == {pf.FLAG_PLANES}
    assert content_of(repository, made[0]) == states[0]
    assert not check(repository, read_data=True).damaged


def test_a_new_process_codes_what_the_one_before_it_left(repository: Repository) -> None:
    """Runs of one save each leave the newest as it is, and the chains of the others stay short."""
    states = list(drifting(12, 3 * _BLOCK + 1000))
    made: list[SnapshotId] = []
    for state in states:
        saves = Saves(repository)
        made.append(saves.save(state))
        saves.deltas.adopt()
        saves.deltas.run(patient)
    assert [max(depths(repository, id_)) for id_ in made] == [4, 3, 2, 1, 0] * 2 + [1, 0]
    assert saves.flags(made[-1]) == {0}
    assert [content_of(repository, id_) for id_ in made] == states
    assert not check(repository, read_data=True).damaged


def test_a_killed_process_leaves_several(repository: Repository) -> None:
    """All states that an earlier process left as they are are coded; the fifth gets no base, as always."""
    states = list(drifting(6, 3 * _BLOCK))
    earlier = Saves(repository)
    made = [earlier.save(state) for state in states[:2]]
    earlier.deltas.run(patient)
    made += [earlier.save(state) for state in states[2:5]]
    saves = Saves(repository)
    made.append(saves.save(states[5]))
    saves.deltas.adopt()
    assert saves.deltas.waiting == 4
    saves.deltas.run(patient)
    assert [saves.flags(id_) for id_ in made] == [{DIFFERENCE}] * 4 + [{pf.FLAG_PLANES}, {0}]
    assert [content_of(repository, id_) for id_ in made] == states
    saves.deltas.adopt()
    assert not saves.deltas.waiting


def test_states_that_share_a_pack_are_coded_together(repository: Repository) -> None:
    """Small states are coded when their pack has nothing of the newest any more, each from the next."""
    saves = Saves(repository, seal_from_bytes=SEAL_FROM_BYTES)
    states = list(drifting(13, 6 * _BLOCK))
    made: list[SnapshotId] = []
    for state in states:
        made.append(saves.save(state))
        saves.deltas.run(patient)
        assert saves.flags(made[-1]) == {0}
        # Three make a pack: no more than these lie as they are.
        assert sum(0 in saves.flags(id_) for id_ in made) <= 3
    assert len(list((repository.path / "packs").iterdir())) < len(made)
    assert [content_of(repository, id_) for id_ in made] == states
    assert max(max(depths(repository, id_)) for id_ in made) == 4
    assert not check(repository, read_data=True).damaged
