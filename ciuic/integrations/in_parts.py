"""States of which each rank has a part (FSDP, DeepSpeed, Megatron-LM, tensor parallelism): not to be saved through the hooks of a framework
as if they were whole. They are refused before the first step, in words that say what to do instead.
"""

from __future__ import annotations

import sys
from typing import Any, Final

_KINDS: Final = ("DEEPSPEED", "FSDP", "MEGATRON_LM")
"""As Accelerate calls them."""
_STRATEGIES: Final = ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy", "XLAFSDPStrategy")
"""As Lightning does."""


def refusal(what: str) -> NotImplementedError:
    """The error to raise."""
    return NotImplementedError(
        f"with {what} each rank has a part of the state, and these hooks save whole states alone: save it with torch.distributed.checkpoint "
        "and ciuic.training.dcp.CiuicStorageWriter (docs/snapshot-manager.md, Sharded states), or train with DistributedDataParallel"
    )


def refuse_kind(distributed_type: object) -> None:
    """NotImplementedError for those of Accelerate's DistributedType that are in parts."""
    kind = str(getattr(distributed_type, "value", distributed_type))
    if kind in _KINDS:
        raise refusal(kind)


def refuse_strategy(strategy: object) -> None:
    """NotImplementedError for those strategies of Lightning that are in parts."""
    for kind in type(strategy).__mro__:
        if kind.__name__ in _STRATEGIES:
            raise refusal(kind.__name__)


def refuse_sharded(model: Any) -> None:
    """NotImplementedError for a model that is in parts itself, whoever has done that."""
    tensor = sys.modules.get("torch.distributed.tensor")
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if tensor is not None and any(isinstance(one, tensor.DTensor) for one in model.parameters()):
        raise refusal("DTensor parameters (FSDP2, tensor parallelism)")
    if fsdp is not None and any(isinstance(one, fsdp.FullyShardedDataParallel) for one in model.modules()):
        raise refusal("FullyShardedDataParallel")
