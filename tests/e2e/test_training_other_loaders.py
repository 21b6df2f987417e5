"""Loaders of torchdata's nodes and of webdataset, resumed by the loop of the documentation."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager

SIZE, BATCHES, EPOCHS = 7, 4, 2


class _Killed(Exception):
    pass


def nodes_loader() -> Any:
    """Return a loader of nodes with a sampler of torch's, which has no state."""
    nodes = pytest.importorskip("torchdata.nodes", reason="torchdata is not installed")
    sampler = nodes.SamplerWrapper(torch.utils.data.RandomSampler(range(SIZE)))
    return nodes.Loader(nodes.Batcher(sampler, 2, drop_last=False))


def web_loader() -> Any:
    """Return webdataset's loader over a data set that draws its order."""
    webdataset = pytest.importorskip("webdataset", reason="webdataset is not installed")

    class Drawn(torch.utils.data.IterableDataset):  # type: ignore[misc]
        def __iter__(self) -> Iterator[int]:
            return iter(torch.randperm(SIZE).tolist())

    return webdataset.WebLoader(Drawn(), batch_size=2, num_workers=0)


@pytest.mark.parametrize("make", [nodes_loader, web_loader])
def test_a_killed_training_sees_each_batch_once(tmp_path: Path, make: Callable[[], Any]) -> None:
    """Within an epoch, at its end, and in the next: the batches and epochs of an undisturbed run."""
    expected = _train(make, None, None)
    assert len(expected) == BATCHES * EPOCHS
    for stop in (1, BATCHES, BATCHES + 2):
        snapshots = tmp_path / str(stop)
        with pytest.raises(_Killed):
            _train(make, snapshots, stop)
        assert _train(make, snapshots, None) == expected[stop:], stop


def _train(make: Callable[[], Any], snapshots: Path | None, stop: int | None) -> list[Any]:
    torch.manual_seed(3)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader, seen, begin = make(), [], 0
    manager = None if snapshots is None else SnapshotManager(snapshots, every_steps=stop or 1000)
    if manager is not None:
        manager.register(model=model, optimizer=optimizer, loader=loader)
        resumed = manager.resume()
        begin = 0 if resumed is None or resumed.epoch is None else resumed.epoch
    try:
        for epoch in range(begin, EPOCHS):
            for batch in loader:
                optimizer.zero_grad()
                model(torch.ones(1, 1)).sum().backward()
                optimizer.step()
                seen.append((epoch, [int(one) for one in batch]))
                if stop is not None and len(seen) > stop:
                    raise _Killed
    finally:
        if manager is not None:
            manager.wait()
            manager.close()
    return seen
