"""Saves on their way from devices are submitted whole, in their order, or not at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ciuic.training.device_copy import Overlap
from ciuic.training.format.reading import Facts
from ciuic.training.remote.copies import RemoteCopies
from ciuic.training.results import Save, SaveCallbacks
from ciuic.training.save_pipeline import CriticalSection, GatheredState, NotStaged, SavePipeline, StagedSave
from ciuic.training.writer.client import WriterClient
from ciuic.training.writer.messages import Begin, Manifest, RetentionRules


class _Copy:
    """A copy from a device, which ends when the test says so."""

    def __init__(self, number: int, events: list[str]) -> None:
        self.number = number
        self.is_done = self.breaks = False
        self.changes: list[str] = []
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


class _Client(WriterClient):
    """A client that notes what it is given, and answers nothing."""

    def __init__(self, save_dir: Path, events: list[str]) -> None:
        super().__init__(Begin(repository=str(save_dir), root=b"/t", rules=RetentionRules(keep=())))
        self.submit_raises: BaseException | None = None
        self._events = events

    def submit(self, slot: Any, manifest: Any, at: int, *, number: int | None = None, **_: Any) -> int:
        if self.submit_raises is not None:
            error, self.submit_raises = self.submit_raises, None
            raise error
        self._events.append(f"{number} submitted")
        return number or 0

    def release(self, slot: Any) -> None:
        self._events.append("released")


class _Saves:
    """A pipeline whose states are on their way for as long as the test says."""

    def __init__(self, save_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[str] = []
        self.ends: list[str] = []
        self.client = _Client(save_dir, self.events)
        self.copies: dict[int, _Copy] = {}
        self.pipeline = SavePipeline(
            self.client,
            CriticalSection(lambda: None),
            SaveCallbacks(),
            RemoteCopies(str(save_dir), ()),
            lambda _: None,
            save_ended=self.ends.append,
        )
        monkeypatch.setattr("ciuic.training.save_pipeline.SavePipeline._copy_to_arena", self._stage)

    def _stage(self, *_: Any, **__: Any) -> StagedSave:
        copy = _Copy(self.client.next_number(), self.events)
        self.copies[copy.number] = copy
        slot, manifest = self.client.slots[0], _manifest()
        return StagedSave(copy.number, slot, manifest, 0, True, copy, None, None)  # type: ignore[arg-type]

    def add(self) -> tuple[Save | NotStaged, _Copy]:
        """Stage one save that may be copied beside the next step."""
        state = GatheredState({}, b"")
        save = self.pipeline.stage(state, Facts(), _manifest(), may_wait=False, beside=True)
        return save, self.copies[max(self.copies)]


def _manifest() -> Manifest:
    return Manifest(time_ns=1, message="", tags=(), files=[])


@pytest.fixture
def saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> _Saves:
    return _Saves(tmp_path, monkeypatch)


def test_saves_are_submitted_in_their_order(saves: _Saves) -> None:
    """A save that has arrived waits for the one before it."""
    (_, first), (_, second) = saves.add(), saves.add()
    second.is_done = True
    saves.pipeline.advance()
    assert (saves.events, saves.pipeline.pending) == ([], 2)
    first.is_done = True
    saves.pipeline.advance()
    assert (saves.events, saves.pipeline.pending) == (["1 submitted", "2 submitted"], 0)


def test_a_save_of_tensors_changed_during_the_copy_fails(
    saves: _Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A save whose tensors changed during the copy fails, and the device waits for these from then on."""
    distrusted: list[str] = []
    monkeypatch.setattr(Overlap, "distrust", lambda _, names: distrusted.extend(names))
    save, copy = saves.add()
    copy.changes, copy.is_done = ["model.weight"], True
    saves.pipeline.advance()
    assert saves.events == ["released"]
    assert isinstance(save, Save)
    assert save.error == saves.pipeline.stats.last_error == "changed"
    assert distrusted == ["model.weight"]
    assert [saves.pipeline.pop_void_copy() for _ in range(2)] == [True, False]


def test_a_device_or_a_writer_that_fails_makes_no_snapshot(saves: _Saves) -> None:
    """An error of the device or of the writer fails its save and no other."""
    added = [saves.add() for _ in range(3)]
    added[0][1].breaks = added[1][1].is_done = True
    saves.client.submit_raises = BrokenPipeError(32, "the writer is gone")
    saves.pipeline.wait(0)
    assert saves.events.count("released") == 2
    errors = [save.error for save, _ in added if isinstance(save, Save)]
    assert errors == ["the device has failed: broken", "the writer is gone", None]
    assert saves.pipeline.changed


def test_an_interrupt_loses_the_save_and_not_the_arena(saves: _Saves) -> None:
    """A KeyboardInterrupt during the hand-over releases the arena for later saves."""
    save, copy = saves.add()
    copy.is_done, saves.client.submit_raises = True, KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        saves.pipeline.advance()
    assert "released" in saves.events
    assert isinstance(save, Save)
    assert save.error == "interrupted while it was handed over"
    # The client reports it as well.
    saves.pipeline.outcome("interrupted", number=1)
    assert saves.ends == [save.error]
    _, other = saves.add()
    other.is_done = True
    saves.pipeline.advance()
    assert saves.events[-1] == "2 submitted"


def test_waiting_ends_with_the_copy_or_its_time(saves: _Saves) -> None:
    """`wait` respects its time limit; a save that may not be copied beside the next step waits for its copy."""
    save, copy = saves.add()
    assert not saves.pipeline.wait(0.01)
    assert isinstance(save, Save)
    assert not save.done
    at_once = saves.pipeline.stage(GatheredState({}, b""), Facts(), _manifest(), may_wait=False, beside=False)
    assert isinstance(at_once, Save)
    assert copy.is_done
    assert saves.events[-1] == "2 submitted"


def test_no_device_is_queried_while_a_graph_is_recorded(
    saves: _Saves, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No device is queried or waited for while a CUDA graph is recorded, not even by `close`."""
    monkeypatch.setattr("ciuic.training.save_pipeline.capturing", lambda: True)
    save, copy = saves.add()
    copy.is_done = True
    saves.pipeline.advance()
    assert not saves.pipeline.wait(0)
    assert saves.events == []
    saves.pipeline.close(0, failed=False)
    assert saves.events == []
    assert isinstance(save, Save)
    assert save.error == "its copy from the device did not end in time"
