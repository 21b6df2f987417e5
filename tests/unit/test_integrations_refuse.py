"""States in parts are refused by the integrations before the first step, by what there is to do instead."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="no CPU build of PyTorch is offered here")

from ciuic.integrations import in_parts  # noqa: E402

INSTEAD = "torch.distributed.checkpoint and ciuic.training.dcp"


@pytest.fixture
def alone() -> Iterator[None]:
    """torch.distributed, of one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_sharded(alone: None) -> None:
    """Whoever did it: FSDP2 and tensor parallelism by their parameters, the older FSDP by its modules. One that is not is let through."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    in_parts.refuse_sharded(model)
    with pytest.raises(NotImplementedError, match=INSTEAD):
        in_parts.refuse_sharded(fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,))))


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_accelerate(kind: str) -> None:
    """By its DistributedType."""
    pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
    from accelerate.utils import DistributedType

    from ciuic.integrations.accelerate import register

    accelerator: Any = SimpleNamespace(distributed_type=DistributedType[kind])
    manager: Any = None
    with pytest.raises(NotImplementedError, match=f"with {kind} each rank has a part.*{INSTEAD}"):
        register(manager, accelerator)
    in_parts.refuse_kind(DistributedType.MULTI_GPU)


def test_lightning() -> None:
    """By the strategy's class or what that is derived from; a plugin without our callback learns it at the first checkpoint."""
    pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")
    from lightning.pytorch import strategies

    from ciuic.integrations.lightning_parts import _strategy_that_calls

    for name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        kind = getattr(strategies, name)
        own = object.__new__(type("Own", (kind,), {}))
        with pytest.raises(NotImplementedError, match=f"with {name} each rank has a part.*{INSTEAD}"):
            in_parts.refuse_strategy(own)

    class Strategy:
        checkpoint_io, is_global_zero = None, True

        def save_checkpoint(self) -> Any:
            return _strategy_that_calls()

    one = Strategy()
    assert one.save_checkpoint() is one
    in_parts.refuse_strategy(one)


def test_only_linux_has_what_the_manager_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Elsewhere the import says so, by what there is to do."""
    import ciuic

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(
        ImportError, match=r"ciuic.SnapshotManager runs on Linux alone \(on Windows: in WSL 2\)"
    ):
        _ = ciuic.SnapshotManager
