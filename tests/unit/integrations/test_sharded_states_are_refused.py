"""Tests that the integrations refuse sharded states before the first step, and name the way to save them."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from support.late_modules import torch

from ciuic import SnapshotManager
from ciuic.integrations import preconditions

INSTEAD = "torch.distributed.checkpoint and ciuic.training.dcp.storage"


@pytest.fixture
def single_process_group() -> Iterator[None]:
    """Initialize torch.distributed for one process."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_model_that_is_sharded(single_process_group: None) -> None:
    """Models sharded by FSDP2, tensor parallelism or the older FSDP are refused, others are not."""
    from torch.distributed.fsdp import fully_shard

    model = torch.nn.Linear(4, 4)
    preconditions.refuse_sharded(model)
    with pytest.raises(NotImplementedError, match=INSTEAD):
        preconditions.refuse_sharded(fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,))))


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore::DeprecationWarning")
@pytest.mark.parametrize("keeps_parameters", [False, True])
def test_parameters_of_the_older_fsdp_are_refused_wherever_they_are(
    single_process_group: None, tmp_path: Path, keeps_parameters: bool
) -> None:
    """A manager refuses a FullyShardedDataParallel, also within a module, compiled, or in an optimizer alone."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    sharded = FullyShardedDataParallel(
        torch.nn.Linear(4, 4), use_orig_params=keeps_parameters, device_id=torch.device("cpu")
    )
    manager = SnapshotManager(tmp_path)
    for one in (
        sharded,
        torch.nn.Sequential(torch.nn.Linear(4, 4), sharded),
        torch.compile(sharded),
        torch.optim.Adam(sharded.parameters()),
    ):
        with pytest.raises(TypeError, match=r"one has parameters of a FullyShardedDataParallel.*fully_shard"):
            manager.register(one=one)
    manager.close()


@pytest.mark.parametrize("kind", ["FSDP", "DEEPSPEED", "MEGATRON_LM"])
def test_sharding_types_of_accelerate_are_refused(kind: str) -> None:
    """Accelerate's sharding types are refused by their DistributedType."""
    pytest.importorskip("accelerate", reason="the extra `hf` is not installed")
    from accelerate.utils import DistributedType

    from ciuic.integrations.accelerate import register

    accelerator: Any = SimpleNamespace(distributed_type=DistributedType[kind])
    manager: Any = None
    with pytest.raises(NotImplementedError, match=f"with {kind} each rank has a part.*{INSTEAD}"):
        register(manager, accelerator)
    preconditions.refuse_kind(DistributedType.MULTI_GPU)


def test_sharding_strategies_of_lightning_are_refused() -> None:
    """Sharding strategies are refused by class or base class, without the callback too."""
    pytest.importorskip("lightning.pytorch", reason="the extra `lightning` is not installed")
    from lightning.pytorch import strategies

    from ciuic.integrations.lightning_parts import calling_strategy

    for name in ("FSDPStrategy", "DeepSpeedStrategy", "ModelParallelStrategy"):
        kind = getattr(strategies, name)
        own = object.__new__(type("Own", (kind,), {}))
        with pytest.raises(NotImplementedError, match=f"with {name} each rank has a part.*{INSTEAD}"):
            preconditions.refuse_strategy(own)

    class Strategy:
        checkpoint_io, is_global_zero = None, True

        def save_checkpoint(self) -> Any:
            return calling_strategy()

    one = Strategy()
    assert one.save_checkpoint() is one
    preconditions.refuse_strategy(one)


def test_only_linux_has_what_the_manager_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """The import fails with the reason on systems other than Linux."""
    import ciuic

    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(
        ImportError, match=r"ciuic.SnapshotManager runs on Linux alone \(on Windows: in WSL 2\)"
    ):
        _ = ciuic.SnapshotManager


@pytest.mark.parametrize("path", ["s3://bucket/last.ckpt", "memory://last.ckpt", "file:///tmp/last.ckpt"])
def test_checkpoints_at_urls_are_refused(path: str) -> None:
    """The plugin refuses to save a checkpoint at a URL before it saves anything, and names the path."""
    from ciuic.integrations.lightning_parts import SnapshotIOBase

    with pytest.raises(ValueError, match=f"local file system, got {path}"):
        SnapshotIOBase.save_checkpoint(object.__new__(SnapshotIOBase), {}, path)


def test_local_paths_are_accepted(tmp_path: Path) -> None:
    """Paths of files are accepted, as text and as Path."""
    preconditions.refuse_remote(tmp_path / "a:b" / "last.ckpt")
    preconditions.refuse_remote("checkpoints/last.ckpt")
