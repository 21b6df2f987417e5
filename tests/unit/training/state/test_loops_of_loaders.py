"""Loops over registered loaders: a manager changes nothing of them."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from support.late_modules import LateModule, torch

from ciuic.training.state.boundaries import Boundaries
from ciuic.training.state.data_position import Position

data: Any = LateModule("torch.utils.data")


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
