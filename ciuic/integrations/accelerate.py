"""Accelerate: everything that `prepare` and `register_for_checkpointing` know, registered with a `SnapshotManager`.

    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    accelerator.register_for_checkpointing(anything)
    manager = SnapshotManager("./snapshots", every_steps=500)
    register(manager, accelerator)
    resumed = manager.resume()

Guarantees: saves and resumes as with objects that were registered one by one: at the boundaries of steps of the optimizer (not of the batches
that are accumulated for one), at the position in the data, with the shuffled order of `prepare`'s loaders. Models are saved unwrapped, so that a
snapshot of several processes resumes on one; every process calls this, and gets its own generators and position back. Not repeated: what a data set draws from the global generators, because the loaders read one
batch ahead. Not here: DeepSpeed, FSDP and Megatron-LM, whose state is in parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from accelerate import Accelerator

from ciuic.integrations.in_parts import refuse_kind, refuse_sharded
from ciuic.training.manager import SnapshotManager
from ciuic.training.positions import Position


def register(manager: SnapshotManager, accelerator: Accelerator) -> None:
    """After the last `prepare` and `register_for_checkpointing`. NotImplementedError where the state is in parts."""
    refuse_kind(accelerator.distributed_type)
    for model in accelerator._models:
        refuse_sharded(model)
    manager.join_ranks()
    objects: dict[str, Any] = {"accelerator": _Steps(accelerator)}
    objects |= _numbered("model", [accelerator.unwrap_model(model) for model in accelerator._models])
    objects |= _numbered(
        "optimizer", [one.optimizer for one in accelerator._optimizers]
    )  # its hooks tell of its steps
    objects |= _numbered("scheduler", accelerator._schedulers)
    objects |= _numbered("custom", accelerator._custom_objects)
    if accelerator.scaler is not None:
        objects["scaler"] = accelerator.scaler
    loaders = [
        loader for loader in accelerator._dataloaders if not getattr(loader, "use_stateful_dataloader", False)
    ]
    objects |= _numbered("loader", [_Passes(loader) for loader in loaders[:1]])  # others are for evaluations
    manager.register(**objects)


def _numbered(name: str, objects: Sequence[Any]) -> dict[str, Any]:
    """``model``, ``model_1`` …"""
    return {name if not number else f"{name}_{number}": value for number, value in enumerate(objects)}


class _Steps:
    """Batches that the Accelerator has counted, by which it knows when to take a step."""

    def __init__(self, accelerator: Accelerator) -> None:
        self._accelerator = accelerator

    def state_dict(self) -> dict[str, Any]:
        return {"step": self._accelerator.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._accelerator.step = state["step"]


class _Passes(Position):
    """The loaders of Accelerate shuffle by the number of the pass."""

    def __init__(self, loader: Any) -> None:
        super().__init__(loader)
        self._loader = loader

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self._loader.set_epoch(self.epoch)
