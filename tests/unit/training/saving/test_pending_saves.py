"""Saves on their way from devices are handed over whole, in their order, or not at all."""

from __future__ import annotations

from typing import Any

import pytest

from ciuic.training.device_copy import Overlap
from ciuic.training.saving.saver import PendingSaves


class _Staged:
    """A save whose copy ends when the test says so."""

    def __init__(self, number: int, events: list[str]) -> None:
        self.number = number
        self.copying: Any = self
        self.is_done = self.breaks = False
        self.changes: list[str] = []
        self.hand_over_raises: BaseException | None = None
        self._events = events

    def settle(self) -> None:
        self._events.append(f"{self.number} settled")

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
        self._events.append(f"{self.number} handed over")

    def give_up(self) -> None:
        self._events.append(f"{self.number} given up")


@pytest.fixture
def events() -> list[str]:
    return []


@pytest.fixture
def pending(events: list[str]) -> PendingSaves:
    return PendingSaves(Overlap(), lambda number, reason: events.append(f"{number}: {reason}"))


def _add(pending: PendingSaves, events: list[str], *numbers: int) -> list[Any]:
    staged: list[Any] = [_Staged(number, events) for number in numbers]
    for one in staged:
        pending.add(one)
    return staged


def test_in_their_order(pending: PendingSaves, events: list[str]) -> None:
    """A save that has arrived waits for the one before it."""
    first, second = _add(pending, events, 1, 2)
    second.is_done = True
    pending.advance()
    assert (events, len(pending)) == ([], 2)
    first.is_done = True
    pending.advance()
    assert (events, len(pending)) == (["1 handed over", "2 handed over"], 0)


def test_a_save_of_tensors_changed_during_the_copy_fails(pending: PendingSaves, events: list[str]) -> None:
    """A save whose tensors changed during the copy fails, and the device waits for these from then on."""
    (one,) = _add(pending, events, 1)
    one.changes, one.is_done = ["model.weight"], True
    pending.advance()
    assert events == ["1 given up", "1: changed"]
    assert pending.changed
    assert pending._overlap.changed_under_copy == {"model.weight"}


def test_a_device_or_a_writer_that_fails_makes_no_snapshot(pending: PendingSaves, events: list[str]) -> None:
    """An error of the device or of the writer fails its save and no other."""
    first, second = _add(pending, events, 1, 2)
    first.breaks = second.is_done = True
    second.hand_over_raises = BrokenPipeError(32, "the writer is gone")
    assert pending.finish()
    assert events[-4:] == [
        "1 given up",
        "1: the device has failed: broken",
        "2 given up",
        "2: the writer is gone",
    ]


def test_an_interrupt_loses_the_save_and_not_the_arena(pending: PendingSaves, events: list[str]) -> None:
    """A KeyboardInterrupt during the handover releases the arena for later saves."""
    (one,) = _add(pending, events, 1)
    one.is_done, one.hand_over_raises = True, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        pending.advance()
    assert "1 given up" in events
    (other,) = _add(pending, events, 2)
    other.is_done = True
    pending.advance()
    assert events[-1] == "2 handed over"


def test_finish_waits_for_ever_or_so_long(pending: PendingSaves, events: list[str]) -> None:
    """`finish` respects its time limit, and without one waits until all saves have arrived."""
    _add(pending, events, 1)
    assert not pending.finish(0.01)
    assert pending.finish()
    assert events[-1] == "1 handed over"


def test_no_device_is_queried_while_a_graph_is_recorded(
    pending: PendingSaves, events: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is queried or waited for while a CUDA graph is recorded, not even by `finish`."""
    monkeypatch.setattr("ciuic.training.saving.saver.capturing", lambda: True)
    (one,) = _add(pending, events, 1)
    one.is_done = True
    pending.advance()
    assert not pending.finish()
    assert events == []
    pending.abandon()
    assert events == ["1: its copy from the device did not end in time"]
