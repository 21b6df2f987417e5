"""When earlier states are coded: by a clock that the test sets."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.raw_states import STATE_BLOCK, Saves, content_of, drifting

from ciuic.repository import Repository
from ciuic.repository.compression import Codec, Coded
from ciuic.repository.writing import pack_maintenance
from ciuic.training.writer.codecs import MAX_WAITING_WHEN_BUSY, OVERDUE, Clock, CodingTurns, Trainer
from ciuic.types import SnapshotId

PROCESSORS = 2


class Machine:
    """A clock on which only the coding of a chunk takes time, and a trainer."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._lock = threading.Lock()
        self._code = pack_maintenance._coded
        monkeypatch.setattr(pack_maintenance, "_coded", self._coded)
        self.now = self.used = 0.0
        self.pauses: list[float] = []
        self.saves_wait = self.stands_still = self.pause_ends_it = False
        clock = Clock(lambda: self.now, lambda: self.used, PROCESSORS)
        trainer = Trainer(lambda: self.saves_wait, lambda: self.stands_still, self._pause)
        self.turns = CodingTurns(trainer, clock)

    def _coded(self, content: bytes, codec: Codec) -> Coded | None:
        with self._lock:
            self.used += 0.03
            self.now += 0.03
        return self._code(content, codec)

    def _pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds
        self.saves_wait = self.saves_wait or self.pause_ends_it


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    return Machine(monkeypatch)


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[Repository]:
    with Repository.create(tmp_path / "r", block_size=STATE_BLOCK) as made:
        yield made


def raw(saves: Saves, made: list[SnapshotId]) -> list[bool]:
    return [0 in saves.flags(id_) for id_ in made]


def test_an_idle_machine_codes_all(repository: Repository, machine: Machine) -> None:
    """Only the newest state lies as it is, and nothing pauses."""
    saves = Saves(repository)
    made = [saves.save(state) for state in drifting(4, 3 * STATE_BLOCK)]
    machine.turns.run(saves.deltas, is_busy=False, size_bytes=3 * STATE_BLOCK)
    assert raw(saves, made) == [False] * 3 + [True]
    assert not machine.pauses


def test_a_busy_machine_codes_what_is_beyond_the_limit(repository: Repository, machine: Machine) -> None:
    """The newest and two more wait; others are coded, by at most one hundredth of the processors."""
    saves = Saves(repository)
    states = list(drifting(5, 12 * STATE_BLOCK))
    made: list[SnapshotId] = []
    for state in states:
        made.append(saves.save(state))
        machine.turns.run(saves.deltas, is_busy=True, size_bytes=len(state))
        assert saves.deltas.waiting <= MAX_WAITING_WHEN_BUSY
    assert raw(saves, made) == [False, False, True, True, True]
    assert len(machine.pauses) > 1
    assert machine.used <= 0.011 * PROCESSORS * machine.now
    assert [content_of(repository, id_) for id_ in made] == states


@pytest.mark.parametrize("beyond", [1, 2, 3])
def test_a_machine_that_is_behind_takes_a_larger_share(
    repository: Repository, machine: Machine, beyond: int
) -> None:
    """Each further state that waits doubles the share of the processors, from one hundredth on."""
    saves = Saves(repository)
    for state in drifting(1 + MAX_WAITING_WHEN_BUSY + beyond, 12 * STATE_BLOCK):
        saves.save(state)
    machine.pause_ends_it = True
    machine.turns.run(saves.deltas, is_busy=True, size_bytes=12 * STATE_BLOCK)
    assert machine.used / machine.now / PROCESSORS == pytest.approx((0.01, 0.02, 0.04)[beyond - 1])


@pytest.mark.parametrize("is_busy", [False, True])
def test_saves_without_a_gap_do_not_pile_up(repository: Repository, machine: Machine, is_busy: bool) -> None:
    """Where a save waits all the time, no more than the limit waits to be coded."""
    saves = Saves(repository)
    machine.saves_wait = True
    made: list[SnapshotId] = []
    most = 0
    for state in drifting(OVERDUE + 4, 3 * STATE_BLOCK):
        made.append(saves.save(state))
        most = max(most, saves.deltas.waiting)
        machine.turns.run(saves.deltas, is_busy=is_busy, size_bytes=len(state))
    assert most == OVERDUE
    assert raw(saves, made) == [False] * 4 + [True] * OVERDUE
    assert not machine.pauses


def test_a_training_that_stands_still_waits_for_none_of_this(
    repository: Repository, machine: Machine
) -> None:
    """A save that the training waits for comes before what is overdue."""
    saves = Saves(repository)
    machine.saves_wait = machine.stands_still = True
    made = [saves.save(state) for state in drifting(OVERDUE + 2, 3 * STATE_BLOCK)]
    machine.turns.run(saves.deltas, is_busy=True, size_bytes=3 * STATE_BLOCK)
    assert raw(saves, made) == [True] * len(made)
    machine.stands_still = False
    machine.turns.run(saves.deltas, is_busy=True, size_bytes=3 * STATE_BLOCK)
    assert saves.deltas.waiting == OVERDUE - 1
