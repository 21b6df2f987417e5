"""Checks that integrations make before the first step: which manager to save through, and whether the state is whole.

Of FSDP, DeepSpeed, Megatron-LM and tensor parallelism each rank has a part of the state, and hooks of a framework would
save it as if it were whole. They are refused, with the way to save them.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Final

from ciuic.training.manager import SnapshotManager

ManagerOrDir = SnapshotManager | str | os.PathLike[str]


def open_manager(where: ManagerOrDir, options: dict[str, Any]) -> SnapshotManager:
    """Return the manager, opening one if a directory is given.

    Args:
        where: a manager, or a directory.
        options: arguments of `SnapshotManager`.

    Raises:
        TypeError: options are given for a manager that exists already.
    """
    if not isinstance(where, SnapshotManager):
        return SnapshotManager(where, **options)
    if options:
        raise TypeError(f"{', '.join(options)} must be set where the manager is created, not here")
    return where


_KINDS: Final = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
"""Values of Accelerate's DistributedType."""
_STRATEGIES: Final = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")
"""Names of Lightning's strategies."""


def refusal(what: str) -> NotImplementedError:
    """Return the error to raise."""
    return NotImplementedError(
        f"with {what} each rank has a part of the state, and these hooks can only save whole states: use "
        "torch.distributed.checkpoint and ciuic.training.dcp.storage.CiuicStorageWriter "
        "(docs/snapshot-manager.md, Sharded states), ciuic.integrations.deepspeed for what DeepSpeed saves, "
        "or train with DistributedDataParallel"
    )


def refuse_kind(distributed_type: object) -> None:
    """Refuse Accelerate's distributed types that shard the state.

    Raises:
        NotImplementedError: the type shards the state.
    """
    kind = str(getattr(distributed_type, "value", distributed_type))
    if kind in _KINDS:
        raise refusal(kind)


def refuse_strategy(strategy: object) -> None:
    """Refuse Lightning's strategies that shard the state.

    Raises:
        NotImplementedError: the strategy shards the state.
    """
    # By name, bases included: Lightning is two packages, each with classes of its own.
    for kind in type(strategy).__mro__:
        if kind.__name__ in _STRATEGIES:
            raise refusal(kind.__name__)


def refuse_remote(path: str | os.PathLike[str]) -> None:
    """Refuse the URL of a checkpoint: a name in an object store would lead to a repository that only this machine has.

    Raises:
        ValueError: The path is a URL.
    """
    if "://" in os.fspath(path):
        raise ValueError(
            f"the path of a checkpoint must be one of a local file system, got {os.fspath(path)}: set `dirpath` of "
            "ModelCheckpoint or `default_root_dir` of the Trainer, or save without SnapshotCheckpointIO"
        )


def refuse_sharded(model: Any) -> None:
    """Refuse a model that is sharded, whichever library did it.

    Raises:
        NotImplementedError: the model is sharded.
    """
    # Looked up, not imported: a model can be sharded only if the program has imported these.
    tensor = sys.modules.get("torch.distributed.tensor")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if tensor is not None and any(isinstance(one, tensor.DTensor) for one in model.parameters()):
        raise refusal("DTensor parameters (FSDP2, tensor parallelism)")
    if fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in model.modules()):
        raise refusal("FullyShardedDataParallel")
