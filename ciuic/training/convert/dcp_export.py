"""Directory that `torch.distributed.checkpoint.load` opens, cut for any number of ranks.

torch itself reads with any number of ranks whatever was written by others; the number here only says how many
files there are and how the rows of the tensors are dealt out, so that each rank finds its part in one file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

from ciuic.training.convert.destination import new_directory
from ciuic.training.convert.export_state import as_plain

# A directory with these alone may be replaced.
_PATTERNS = ("__*.distcp", ".metadata")


def write_dcp(path: Path, state: Any, ranks: int, *, overwrite: bool) -> int:
    """Write a checkpoint as ``ranks`` ranks would have written it, durably on return.

    Args:
        path: Destination.
        state: Nested dicts; `export_state.as_plain` says what becomes of values that are no tensors.
        ranks: Number of ranks, 1 or more.
        overwrite: Whether to replace a checkpoint that is there.

    Returns:
        The size of its files.

    Raises:
        DestinationExists: There is something at ``path`` that may not be replaced.
    """
    plain = as_plain(state)
    with new_directory(path, overwrite=overwrite, names=_PATTERNS) as folder:
        writer = _Writer(folder, path)
        planners = [_RankPlanner(rank, ranks) for rank in range(ranks)]
        plans = []
        for planner in planners:
            planner.set_up_planner(plain, is_coordinator=planner.rank == 0)
            writer.set_up_storage_writer(planner.rank == 0)
            plans.append(writer.prepare_local_plan(planner.create_local_plan()))
        plans, metadata = planners[0].create_global_plan(plans)
        results = []
        for planner, plan in zip(planners, writer.prepare_global_plan(plans), strict=True):
            results.append(writer.write_data(planner.finish_plan(plan), planner).value())
        writer.finish(metadata, results)
        return sum(file.stat().st_size for file in folder.iterdir())


class _Writer(FileSystemWriter):
    """Writer that records the path where the checkpoint will be, and not the temporary one."""

    def __init__(self, folder: Path, path: Path) -> None:
        super().__init__(folder)
        self._final = path

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=str(self._final), save_id=self.save_id)


class _RankPlanner(DefaultSavePlanner):
    """Planner of one rank, to which belong some rows of each tensor, and values that are no tensors on rank 0."""

    def __init__(self, rank: int, ranks: int) -> None:
        super().__init__()
        self.rank = rank
        self._ranks = ranks

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, value in self.state_dict.items():
            if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
                items += [WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO)] if not self.rank else []
            elif (item := self._item(name, value)) is not None:
                items.append(item)
        self.plan = SavePlan(items, planner_data=self.mappings)
        return self.plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state_dict[write_item.index.fqn]
        if write_item.type == WriteItemType.BYTE_IO:
            return self.transform_object(write_item, value)
        first, count = self._rows(value)
        return value.narrow(0, first, count) if value.dim() else value

    def _item(self, name: str, value: torch.Tensor) -> WriteItem | None:
        first, count = self._rows(value)
        # Rank 0 writes what cannot be cut; a rank without rows writes nothing.
        if not count and (self.rank or value.numel()):
            return None
        offsets = torch.Size([first, *[0] * (value.dim() - 1)] if value.dim() else [])
        sizes = torch.Size([count, *value.shape[1:]] if value.dim() else [])
        data = TensorWriteData(
            ChunkStorageMetadata(offsets, sizes), TensorProperties.create_from_tensor(value), value.size()
        )
        return WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data)

    def _rows(self, value: torch.Tensor) -> tuple[int, int]:
        """Return the first row of this rank and their number, as torch.chunk and FSDP deal them out."""
        if not value.dim():
            return 0, 0 if self.rank else 1
        each = -(-value.shape[0] // self._ranks)
        first = min(each * self.rank, value.shape[0])
        return first, min(each, value.shape[0] - first)
