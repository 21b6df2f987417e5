"""Saves on their way from devices: handed over whole, in their order, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from ciuic.training.overlap import Overlap
from ciuic.training.underway import Underway


class _Staged:
    """A save whose copy ends when the test says so."""

    def __init__(self, number: int, told: list[str]) -> None:
        self.number = number
        self.copying: Any = self
        self.is_done = self.breaks = False
        self.changes: list[str] = []
        self.hand_over_raises: BaseException | None = None
        self._told = told

    def settle(self) -> None:
        self._told.append(f"{self.number} settled")

    def done(self) -> bool:
        if self.breaks:
            raise RuntimeError("broken")
        return self.is_done

    def wait(self) -> None:
        self.is_done = True

    def changed(self) -> list[str]:
        return self.changes

    @property
    def void(self) -> str:
        return "changed" if self.changes else ""

    def hand_over(self) -> None:
        if self.hand_over_raises is not None:
            raise self.hand_over_raises
        self._told.append(f"{self.number} handed over")

    def give_up(self) -> None:
        self._told.append(f"{self.number} given up")


@pytest.fixture
def told() -> list[str]:
    return []


@pytest.fixture
def underway(told: list[str]) -> Underway:
    return Underway(Overlap(), lambda number, reason: told.append(f"{number}: {reason}"))


def _add(underway: Underway, told: list[str], *numbers: int) -> list[Any]:
    staged: list[Any] = [_Staged(number, told) for number in numbers]
    for one in staged:
        underway.add(one)
    return staged


def test_in_their_order(underway: Underway, told: list[str]) -> None:
    first, second = _add(underway, told, 1, 2)
    second.is_done = True
    underway.advance()
    assert (told, len(underway)) == ([], 2)
    first.is_done = True
    underway.advance()
    assert (told, len(underway)) == (["1 handed over", "2 handed over"], 0)


def test_what_was_changed_is_given_up_and_distrusted(underway: Underway, told: list[str]) -> None:
    (one,) = _add(underway, told, 1)
    one.changes, one.is_done = ["model.weight"], True
    underway.advance()
    assert told == ["1 given up", "1: changed"]
    assert underway.changed
    assert underway._overlap.changed_under_copy == {"model.weight"}


def test_a_device_or_a_writer_that_fails_makes_no_snapshot(underway: Underway, told: list[str]) -> None:
    first, second = _add(underway, told, 1, 2)
    first.breaks = second.is_done = True
    second.hand_over_raises = BrokenPipeError(32, "the writer is gone")
    assert underway.finish()
    assert told[-4:] == [
        "1 given up",
        "1: the device has failed: broken",
        "2 given up",
        "2: the writer is gone",
    ]


def test_an_interrupt_loses_the_save_and_not_the_arena(underway: Underway, told: list[str]) -> None:
    (one,) = _add(underway, told, 1)
    one.is_done, one.hand_over_raises = True, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        underway.advance()
    assert "1 given up" in told
    (other,) = _add(underway, told, 2)
    other.is_done = True
    underway.advance()
    assert told[-1] == "2 handed over"


def test_finish_waits_for_ever_or_so_long(underway: Underway, told: list[str]) -> None:
    _add(underway, told, 1)
    assert not underway.finish(0.01)
    assert underway.finish()
    assert told[-1] == "1 handed over"


def test_nothing_is_asked_while_a_graph_is_recorded(
    underway: Underway, told: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even by who would wait for ever."""
    monkeypatch.setattr("ciuic.training.underway.capturing", lambda: True)
    (one,) = _add(underway, told, 1)
    one.is_done = True
    underway.advance()
    assert not underway.finish()
    assert told == []
    underway.abandon()
    assert told == ["1: its copy from the device did not end in time"]
