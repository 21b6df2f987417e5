"""A nested state with its tensors copied into an arena, at places where they can stay until the writer process has read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from ciuic.training.arena import Arena
from ciuic.training.dcp_part import HEADER_BYTES
from ciuic.training.lanes import Lane, lane_of
from ciuic.training.layout import OWN_FILE_BYTES, aligned

_SMALL_ALIGNMENT: Final = 64
Place = Callable[[torch.Tensor], torch.Tensor]
"""Gets a tensor; returns a copy on the CPU."""


def copied(state: Any, place: Place) -> Any:
    """As ``state`` now, whatever becomes of it. Of a tensor that stands in it several times there is one copy."""
    return _Copier(place).value(state)


def room_for(state: Any) -> int:
    """Bytes of arena in which `InArena` has room for it."""
    total = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = _reserved(total, tensor)[1]
        return tensor

    _Copier(count, objects=False).value(state)
    return total


class InArena:
    """Places one tensor behind the other, and is done with `wait`. The copies keep ``memory`` alive."""

    def __init__(self, memory: memoryview, arena: Arena | None = None) -> None:
        """``memory``: of the arena; without one, devices have to copy at once."""
        self.end = 0
        self._arena = arena
        self._lanes: list[Lane] = []
        self.starts: dict[int, tuple[int, int]] = {}
        """Of those with room for a header before them: by address, offset and size."""
        self._room = torch.frombuffer(memory, dtype=torch.uint8)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        start, self.end = _reserved(self.end, tensor)
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        size_bytes = tensor.numel() * tensor.element_size()
        there = self._room[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)
        lane = lane_of(tensor) if self._arena is not None else None
        if lane is not None and self._arena is not None:
            if lane not in self._lanes:
                self._lanes.append(lane)
                lane.follow()
            lane.copy(self._arena, there, tensor)
        else:
            there.copy_(tensor.detach())
        if size_bytes >= OWN_FILE_BYTES:
            self.starts[there.data_ptr()] = start, size_bytes
        return there

    def wait(self) -> None:
        """For what devices still copy, also when something was raised: the memory may then be used again."""
        for lane in self._lanes:
            lane.mark().wait()


def on_heap(tensor: torch.Tensor) -> torch.Tensor:
    """For when there is no arena."""
    return tensor.detach().to("cpu", copy=True)


def _reserved(end: int, tensor: torch.Tensor) -> tuple[int, int]:
    size_bytes = tensor.numel() * tensor.element_size()
    # A small one will be copied once more, into the file that they share.
    small = size_bytes < OWN_FILE_BYTES
    start = -(-end // _SMALL_ALIGNMENT) * _SMALL_ALIGNMENT if small else aligned(end) + HEADER_BYTES
    return start, start + size_bytes


class _Copier:
    def __init__(self, place: Place, *, objects: bool = True) -> None:
        self._place = place
        self._objects = objects
        self._made: dict[int, tuple[Any, Any]] = {}

    def value(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            if id(value) not in self._made:
                self._made[id(value)] = value, self._tensor(value)
            return self._made[id(value)][1]
        if type(value) in (dict, list, tuple) or isinstance(value, dict):
            return self._container(value)
        return copy.deepcopy(value) if self._objects else value

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            made = copy.copy(value)
            for key, item in value.items():
                made[key] = self.value(item)
            return made
        return type(value)(self.value(item) for item in value)

    def _tensor(self, value: torch.Tensor) -> Any:
        if isinstance(value, DTensor):
            local = value._local_tensor
            # from_local would move it to the mesh's device.
            made: Any = DTensor
            return made(self._tensor(local), value._spec, requires_grad=False)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return copy.deepcopy(value) if self._objects else value
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return copy.deepcopy(value) if self._objects else value
        return self._place(value)
