"""Results that ranks send to the coordinator of a save, and the message of the snapshot."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from ciuic.training.dcp.metadata import ItemLocation
from ciuic.training.dcp.part import RankFiles
from ciuic.training.format.reading import Facts
from ciuic.training.writer.messages import StoredFile


class ItemResult(NamedTuple):
    """Result of writing one item, sent from a rank to the coordinator."""

    place: ItemLocation
    files: tuple[StoredFile, ...]
    """All files of the rank, with its first item; () with the others."""


def item_results(part: RankFiles, plan: SavePlan, files: tuple[StoredFile, ...]) -> list[WriteResult]:
    """Return torch's result of each item."""
    results = []
    for item in plan.items:
        written = ItemResult(part.places[item.index], files)
        results.append(WriteResult(item.index, item.tensor_storage_size() or 0, written))
        # Sent once, with the first item.
        files = ()
    return results


def snapshot_message(checkpoint_id: str, facts: Facts) -> str:
    """Return the message of the snapshot."""
    parts = [checkpoint_id] if checkpoint_id else []
    parts += [] if facts.epoch is None else [f"epoch {facts.epoch}"]
    parts += [] if facts.step is None else [f"step {facts.step}"]
    parts += [f"{key} {value:.4g}" for key, value in _floats(facts.metrics).items()]
    return ", ".join(parts)


def _floats(metrics: Mapping[str, float]) -> dict[str, float]:
    return {key: float(value) for key, value in metrics.items()}


def as_tensor(value: object) -> torch.Tensor:
    """Return the value as a tensor.

    Raises:
        TypeError: it is none.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError("the planner encoded a tensor as bytes, which only pickle could read")
    return value
