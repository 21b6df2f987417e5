"""Loops over registered loaders: a manager changes nothing of them, and a resumed run sees what the undisturbed one sees."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import pytest
from support.late_modules import LateModule, torch

from ciuic.training import logs
from ciuic.training.state import stateful
from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.data_position import Position

data: Any = LateModule("torch.utils.data")
STEPS = 12


@pytest.fixture(autouse=True)
def _warned_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logs, "_warned", set())


class Run:
    """A training with two loaders, whose state is taken at each boundary; without positions nothing is watched."""

    def __init__(self, *, is_watched: bool = True, saved: Any = None) -> None:
        torch.manual_seed(1)
        self.loaders = [data.DataLoader(range(size), batch_size=1, shuffle=True) for size in (3, 4)]
        self.seen: list[Any] = []
        self.states: dict[int, Any] = {}
        self._model = torch.nn.Linear(1, 1)
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self.first, self.taken, self.positions = 0, 0, []
        if not is_watched:
            return
        boundaries = Boundaries(lambda: None, self._save)
        for loader in self.loaders:
            self.positions.append(Position(loader))
            self.positions[-1].watch(boundaries, "loader")
        boundaries.watch_optimizer(self._optimizer)
        if saved is not None:
            for one, state in zip(self.positions, saved["positions"], strict=True):
                one.load_state_dict(state)
            stateful.restore_random_states(saved["random"])
            self.first, self.taken = self.positions[0].epoch, self.positions[0].taken
            self.seen = list(saved["seen"])

    def _save(self) -> None:
        self.states[len(self.seen)] = {
            "positions": [one.state_dict() for one in self.positions],
            "random": stateful.random_states(),
            "seen": list(self.seen),
        }

    def step(self, *batches: Any, ahead: Callable[[], None] = lambda: None) -> None:
        drawn = torch.rand(1).item()
        loss = self._model(torch.ones(1, 1)).sum()
        ahead()
        self._optimizer.zero_grad()
        loss.backward()
        self.seen.append((*(int(one) for one in batches), drawn))
        self._optimizer.step()


def together(run: Run, at: tuple[int, int], stop: int | None = None) -> None:
    for epoch in range(run.first, 3):
        upto = None if stop is None else stop - (run.taken if epoch == run.first else 0)
        for batches in islice(zip(*(run.loaders[one] for one in at), strict=False), upto):
            run.step(*batches)


def ahead(run: Run, number: int) -> None:
    def endless() -> Iterator[Any]:
        while True:
            yield from run.loaders[0]

    batches = endless()
    waiting = list(islice(batches, number))
    while len(run.seen) < STEPS:
        run.step(waiting.pop(0), ahead=lambda: waiting.append(next(batches)))


def evaluated_within(run: Run) -> None:
    for _ in range(run.first, 3):
        for batch in run.loaders[0]:
            run.step(batch)
            if len(run.seen) % 2:
                with torch.no_grad():
                    list(islice(run.loaders[0], 2))
                    torch.rand(1)


def evaluated_after_break(run: Run) -> None:
    for epoch in range(run.first, 3):
        for batch in islice(run.loaders[0], 2 - (run.taken if epoch == run.first else 0)):
            run.step(batch)
        with torch.no_grad():
            list(run.loaders[0])


LOOPS: dict[str, Callable[[Run], None]] = {
    "zip": lambda run: together(run, (0, 1)),
    "zip, the longer first": lambda run: together(run, (1, 0)),
    "zip, left": lambda run: together(run, (0, 1), 2),
    "read ahead": lambda run: ahead(run, 1),
    "two read ahead": lambda run: ahead(run, 2),
    "evaluated within": evaluated_within,
    "evaluated after break": evaluated_after_break,
}


@pytest.mark.parametrize("kind", LOOPS)
def test_a_loop_is_not_changed_and_continues(kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """Batches and draws are those of the run without a manager, also after a resume from each boundary."""
    loop = LOOPS[kind]
    plain = Run(is_watched=False)
    loop(plain)
    run = Run()
    loop(run)
    assert run.seen == plain.seen
    assert len(run.states) >= len(plain.seen) - 1
    for number, state in run.states.items():
        again = Run(saved=state)
        loop(again)
        assert again.seen == plain.seen, number
    assert [one for one in caplog.messages if "read ahead" not in one] == []


def test_an_error_of_a_batch_ends_no_pass() -> None:
    """A program that skips a batch that cannot be read gets the others, as without a manager."""

    def collate(batch: list[int]) -> int:
        if batch == [1]:
            raise RuntimeError("damaged")
        return batch[0]

    loader = data.DataLoader(range(3), batch_size=1, collate_fn=collate)
    Position(loader)
    batches = iter(loader)
    assert len(batches) == 3
    assert next(batches) == 0
    with pytest.raises(RuntimeError, match="damaged"):
        next(batches)
    assert list(batches) == [2]


def test_an_evaluation_with_gradients_after_break_is_told_of(caplog: pytest.LogCaptureFixture) -> None:
    """The snapshot of the last step is taken before it, and a resumed run goes on behind it."""
    run = Run()
    for _ in range(2):
        for batch in islice(run.loaders[0], 2):
            run.step(batch)
        list(run.loaders[0])
    assert "evaluate under torch.no_grad()" in caplog.text


def test_boundaries_that_are_collected_within_a_step_do_not_end_it() -> None:
    """The garbage collector may take those of an earlier manager while torch goes through its hooks."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    gone: list[Any] = []

    def collect(*_: object) -> None:
        gone.clear()
        gc.collect()

    hook = register_optimizer_step_post_hook(collect)
    try:
        gone.append(Boundaries(lambda: None, lambda: None))
        torch.optim.SGD(torch.nn.Linear(1, 1).parameters(), lr=0.1).step()
    finally:
        hook.remove()
    assert not gone
