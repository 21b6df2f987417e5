"""Passes over the training's loader in which nothing is trained: they are no epochs, and change nothing of the resume."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.late_modules import LateModule, torch

from ciuic.training import logs
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.data_position import Position

data: Any = LateModule("torch.utils.data")
SIZE, BATCHES, EPOCHS = 7, 4, 3
HABITS = (
    "first",
    "each",
    "within",
    "within after the step",
    "evaluation",
    "inference",
    "inference first",
    "leaves",
)


@pytest.fixture(autouse=True)
def _warned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_warned", set())


class Scheduler:
    """Called after each epoch, as `ReduceLROnPlateau` is."""

    def step(self) -> None:
        """Change nothing."""


class Run:
    """A training that has habits beside its loop; the position is saved at each boundary and after each epoch."""

    def __init__(self, habits: frozenset[str], saved: Any = None, *, own_generator: bool = False) -> None:
        torch.manual_seed(1)
        generator = torch.Generator().manual_seed(5) if own_generator else None
        self.loader = data.DataLoader(range(SIZE), batch_size=2, shuffle=True, generator=generator)
        self.seen: list[Any] = []
        self.states: dict[int, Any] = {}
        self.after_epochs: dict[int, Any] = {}
        self._model = torch.nn.Linear(1, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._scheduler = Scheduler()
        boundaries = Boundaries(lambda: None, lambda: self.states.update({len(self.seen): self.state()}))
        self.position = Position(self.loader)
        self.position.watch(boundaries, "loader")
        boundaries.watch_optimizer(self._optimizer)
        boundaries.watch_companion(self._scheduler)
        self._habits = habits
        if saved is not None:
            self.position.load_state_dict(saved["position"])
            stateful.restore_random_states(saved["random"])
        self._begins_at, self._taken = self.position.epoch, self.position.taken

    def state(self) -> Any:
        return {"position": self.position.state_dict(), "random": stateful.random_states()}

    def go(self) -> list[Any]:
        self._look("first")
        with torch.no_grad():
            self._take_all("inference first")
        for epoch in range(self._begins_at, EPOCHS):
            self._look("each")
            for number, batch in enumerate(self.loader, self._taken if epoch == self._begins_at else 0):
                self._look("within")
                self._step(batch, epoch)
                self._look("within after the step")
                if "leaves" in self._habits and number == 2:
                    break
            self._take_all("evaluation")
            with torch.no_grad():
                self._take_all("inference")
            self._scheduler.step()
            self.after_epochs[len(self.seen)] = self.state()
        return self.seen

    def _step(self, batch: Any, epoch: int) -> None:
        self._optimizer.zero_grad()
        self._model(torch.ones(1, 1)).sum().backward()
        self._optimizer.step()
        self.seen.append((epoch, batch.tolist(), torch.rand(1).item()))

    def _look(self, habit: str) -> None:
        if habit in self._habits:
            next(iter(self.loader))

    def _take_all(self, habit: str) -> None:
        if habit in self._habits:
            assert sum(map(len, self.loader)) == SIZE


@given(st.frozensets(st.sampled_from(HABITS), max_size=3), st.booleans())
def test_a_resumed_run_sees_what_the_undisturbed_one_sees(
    habits: frozenset[str], own_generator: bool
) -> None:
    """A resume from any boundary gives the same batches, epochs and random numbers, whatever else looks at the loader."""
    run = Run(habits, own_generator=own_generator)
    expected = run.go()
    assert len(expected) == EPOCHS * (3 if "leaves" in habits else BATCHES)
    for number, state in run.states.items():
        again = Run(habits, state, own_generator=own_generator)
        seen = again.go()
        # A look before the first step of a resumed run may be one before its loop: the log tells of it.
        # An epoch that was left by `break` has its last boundary where the next pass with gradients begins, and a resumed
        # program begins with the next epoch, not with an evaluation.
        is_next = number % 3 == 0 and "leaves" in habits
        is_unsure = "within" in habits or (is_next and habits & {"each", "evaluation"})
        upto = 1 if is_unsure else 3
        assert [one[:upto] for one in seen] == [one[:upto] for one in expected[number:]], number


@given(st.frozensets(st.sampled_from(HABITS), max_size=2))
def test_a_run_resumed_between_two_epochs_sees_the_same(habits: frozenset[str]) -> None:
    """A resume from any snapshot between epochs is exact once two epochs have shown which looks belong to each."""
    run = Run(habits)
    expected = run.go()
    for number, state in run.after_epochs.items():
        is_known = number > len(expected) // EPOCHS
        if is_known or "leaves" not in habits:
            seen = Run(habits, state).go()
            assert len(seen) == len(expected) - number
            upto = 1 if "within" in habits else 3
            if is_known or "each" not in habits:
                assert [one[:upto] for one in seen] == [one[:upto] for one in expected[number:]], number


def test_epochs_within_an_epoch_are_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """A loader that is trained with within another pass over it has no position that can be resumed."""
    run = Run(frozenset())
    for _ in run.loader:
        for batch in run.loader:
            run._step(batch, 0)
    assert "is iterated within another pass" in caplog.text
    assert "look = DataLoader(loader.dataset" in caplog.text


def test_a_short_pass_is_told_of_where_training_is_out_of_sight(caplog: pytest.LogCaptureFixture) -> None:
    """Without an optimizer a look counts as an epoch, and the log says so when a longer pass follows."""
    run = Run(frozenset())
    run.position.watch(Boundaries(lambda: None, lambda: None), "loader")
    next(iter(run.loader))
    for number, _ in enumerate(run.loader):
        assert ("counts as an epoch" in caplog.text) == (number > 0)
    assert run.position.passes == 2


def test_loaders_that_are_taken_together_keep_their_own_counts(caplog: pytest.LogCaptureFixture) -> None:
    """Batches of `zip` are not taken for read ahead."""
    run = Run(frozenset())
    second = data.DataLoader(range(SIZE), batch_size=2)
    boundaries = Boundaries(lambda: None, lambda: None)
    boundaries.watch_optimizer(run._optimizer)
    run.position.watch(boundaries, "loader")
    position = Position(second)
    position.watch(boundaries, "second")
    for taken, (batch, _) in enumerate(zip(run.loader, second, strict=True), 1):
        run._step(batch, 0)
        assert run.position.state_dict()["batches"] == position.state_dict()["batches"] == taken
    assert not caplog.records
