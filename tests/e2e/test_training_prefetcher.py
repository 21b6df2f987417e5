"""Programs that fetch batches before they train with them: each batch comes once, or the log says that it may not."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch
from support.tiny_training import Optimizer

from ciuic import SnapshotManager
from ciuic.training import logs
from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.data_position import Position

BATCHES, EPOCHS = 4, 2
EXPECTED = [*range(BATCHES)] * EPOCHS


@pytest.fixture(autouse=True)
def _warned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_warned", set())


class Prefetcher:
    """The usual one: the next batch is fetched before this one is returned."""

    def __init__(self, loader: Any) -> None:
        self._batches = iter(loader)
        self._preload()

    def _preload(self) -> None:
        try:
            self._next = next(self._batches)
        except StopIteration:
            self._next = None

    def next(self) -> Any:
        batch = self._next
        self._preload()
        return batch


def ahead(loader: Any) -> Iterator[Any]:
    """Take batches from a prefetcher."""
    prefetcher = Prefetcher(loader)
    while (batch := prefetcher.next()) is not None:
        yield batch


def by_thread(loader: Any) -> Iterator[Any]:
    """Take batches from a thread that fetches them."""
    batches: queue.Queue[Any] = queue.Queue(1)
    threading.Thread(target=lambda: [batches.put(one) for one in [*loader, None]][:0], daemon=True).start()
    while (batch := batches.get()) is not None:
        yield batch


class Run:
    """One process: it takes a position at each boundary, and is killed after so many steps."""

    def __init__(self, saved: Any, *, tells: bool = False, accumulates: int = 1, torchs: bool = True) -> None:
        self.loader = torch.utils.data.DataLoader(range(BATCHES), batch_size=None)
        self.seen: list[int] = []
        self.states: dict[int, Any] = {}
        self.boundaries = Boundaries(lambda: None, self._save)
        self.position = Position(self.loader)
        self.position.watch(self.boundaries, "loader")
        self.model = torch.nn.Linear(1, 1)
        self.optimizer = (
            torch.optim.SGD(self.model.parameters(), lr=0.1) if torchs else Optimizer.__new__(Optimizer)
        )
        if not torchs:
            self.optimizer._hooks = []
        self.boundaries.watch_optimizer(self.optimizer)
        self._tells, self._accumulates, self._torchs = tells, accumulates, torchs
        if saved is not None:
            self.position.load_state_dict(saved)

    def _save(self) -> None:
        self.states[len(self.seen)] = self.position.state_dict()

    def go(self, take: Callable[[Any], Any]) -> None:
        waiting: list[int] = []
        for _ in range(self.position.epoch, EPOCHS):
            for batch in take(self.loader):
                if self._tells:
                    self.boundaries.consumed(1)
                waiting.append(int(batch))
                if self._torchs:
                    self.model(torch.ones(1, 1)).sum().backward()
                if len(waiting) == self._accumulates:
                    self.seen += waiting
                    waiting = []
                    self._step()
            if waiting:
                self.seen += waiting
                waiting = []
                self._step()

    def _step(self) -> None:
        if self._torchs:
            self.optimizer.step()
            self.optimizer.zero_grad()
        else:
            self.optimizer.announce()


def _resume_at_every_boundary(take: Callable[[Any], Any], **options: Any) -> set[int]:
    """Resume from each state that was saved; return after how many batches these are."""
    run = Run(None, **options)
    run.go(take)
    assert run.seen == EXPECTED
    for number, state in run.states.items():
        again = Run(state, **options)
        again.go(take)
        assert run.seen[:number] + again.seen == EXPECTED, (number, state)
        # And once more, from each state of the resumed run.
        for later, state_of_again in again.states.items():
            third = Run(state_of_again, **options)
            third.go(take)
            assert run.seen[:number] + again.seen[:later] + third.seen == EXPECTED, (number, later)
    return set(run.states)


@pytest.mark.parametrize("accumulates", [1, 2, 3])
def test_the_usual_prefetcher_sees_each_batch_once(
    accumulates: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Resumed at each boundary, by what the gradients tell; and the log says what was found."""
    assert len(_resume_at_every_boundary(ahead, accumulates=accumulates)) >= BATCHES // accumulates
    assert "count as read ahead" in caplog.text
    assert not [one for one in caplog.records if "not known" in one.getMessage()]


@pytest.mark.parametrize("accumulates", [1, 2, 3])
def test_a_plain_loop_sees_each_batch_once_without_a_word(
    accumulates: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Accumulated gradients are not taken for batches that are read ahead, nor is a step with the rest."""
    _resume_at_every_boundary(iter, accumulates=accumulates)
    _resume_at_every_boundary(iter, accumulates=1, torchs=False)
    assert not caplog.records


def test_a_program_that_tells_is_believed(caplog: pytest.LogCaptureFixture) -> None:
    """`consumed` makes it exact, also where gradients cannot be seen."""
    _resume_at_every_boundary(ahead, tells=True)
    _resume_at_every_boundary(ahead, tells=True, torchs=False)
    assert not caplog.records


def test_a_prefetcher_whose_gradients_cannot_be_seen_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The run is warned, and each resume from a position that is not sure."""
    run = Run(None, torchs=False)
    run.go(ahead)
    assert "a resume would not be exact" in caplog.text
    for number, state in run.states.items():
        caplog.clear()
        Run(state, torchs=False)
        assert number in (BATCHES, 2 * BATCHES) or "not resumed exactly" in caplog.text


def test_a_thread_that_fetches_is_told_of_and_is_no_boundary(caplog: pytest.LogCaptureFixture) -> None:
    """Its fetches may come in the middle of a step: nothing is saved at them."""
    run = Run(None)
    run.go(by_thread)
    assert run.seen == EXPECTED
    assert "a resume would not be exact" in caplog.text
    assert run.position.state_dict().get("unsure")


def test_a_killed_training_with_a_prefetcher(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With the manager: the batches before a snapshot and those after a resume from it are each there once."""
    seen: list[list[int]] = []
    for stop in (2, None):
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        loader = torch.utils.data.DataLoader(range(BATCHES), batch_size=None)
        seen.append([])
        with SnapshotManager(tmp_path / "snapshots", every_steps=1) as manager:
            manager.register(model=model, optimizer=optimizer, loader=loader)
            resumed = manager.resume()
            assert resumed is None or (resumed.epoch, resumed.batch) == (0, 2)
            for batch in ahead(loader):
                if len(seen[-1]) == stop:
                    break
                manager.wait()
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                seen[-1].append(int(batch))
    assert seen == [[0, 1], [2, 3]]
    assert "read ahead" in caplog.text


def test_pending_gradients_at_a_save_are_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Not gradients that a step has used, also one before the optimizer was registered, or that are zero."""
    early = torch.nn.Linear(1, 1)
    stepped = torch.optim.Adam(early.parameters())
    early(torch.ones(1, 1)).sum().backward()
    stepped.step()
    with SnapshotManager(tmp_path / "early") as manager:
        manager.register(model=early, optimizer=stepped)
        assert manager.save_snapshot(wait=True)
    assert "gradients" not in caplog.text
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with SnapshotManager(tmp_path / "snapshots") as manager:
        manager.register(model=model, optimizer=optimizer)
        for to_none in (True, False):
            model(torch.ones(1, 1)).sum().backward()
            optimizer.step()
            assert manager.save_snapshot(wait=True)
            optimizer.zero_grad(set_to_none=to_none)
            assert manager.save_snapshot(wait=True)
        assert "gradients" not in caplog.text
        # The gradients of a discriminator, to which the generator's step has added.
        other = torch.nn.Linear(1, 1)
        manager.register(other=other, second=torch.optim.SGD(other.parameters(), lr=0.1))
        model(torch.ones(1, 1)).sum().backward()
        assert manager.save_snapshot(wait=True)
        assert "gradients" not in caplog.text
        other(torch.ones(1, 1)).sum().backward()
        assert manager.save_snapshot()
        assert "a snapshot has no gradients" in caplog.text
