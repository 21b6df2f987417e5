"""Copy a nested state into an arena, where tensors can stay until the writer process has read them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.distributed.tensor import DTensor

from ciuic.training.arena import Arena
from ciuic.training.dcp.part import HEADER_BYTES
from ciuic.training.device_streams import DeviceStream, device_stream_of
from ciuic.training.format.layout import OWN_FILE_BYTES, aligned

# torch views bytes as another dtype only from a multiple of its element size, which is 16 bytes at most.
_SMALL_ALIGNMENT: Final = 64
"""Alignment of tensors that will be copied once more, into the file that they share."""
CopyTensor = Callable[[torch.Tensor], torch.Tensor]
"""Function that returns a copy of a tensor on the CPU."""


def copy_state(state: Any, place: CopyTensor) -> Any:
    """Return a copy of the state. A tensor that occurs several times is copied once."""
    return _Copier(place).value(state)


def arena_bytes(state: Any) -> int:
    """Return the size of the arena in which `ArenaPlacer` has room for the state."""
    total = 0

    def count(tensor: torch.Tensor) -> torch.Tensor:
        nonlocal total
        total = _reserved(total, tensor)[1]
        return tensor

    # Sizes only: other objects need no arena, and a deep copy of them would be dropped.
    _Copier(count, objects=False).value(state)
    return total


class ArenaPlacer:
    """Copy tensors into an arena, one behind the other. The copies keep its memory alive."""

    def __init__(self, memory: memoryview, arena: Arena | None = None) -> None:
        """Begin with an empty arena.

        Args:
            memory: memory of the arena.
            arena: the arena; None if devices have to copy synchronously.
        """
        self.end = 0
        self._arena = arena
        self._lanes: list[DeviceStream] = []
        self.starts: dict[int, tuple[int, int]] = {}
        """Tensors with room for a header before them: offset and size by address."""
        self._room = torch.frombuffer(memory, dtype=torch.uint8)

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        """Copy one tensor; a copy from a device is complete after `wait`."""
        start, self.end = _reserved(self.end, tensor)
        if not tensor.numel():
            return torch.empty_like(tensor, device="cpu")
        size_bytes = tensor.numel() * tensor.element_size()
        there = self._room[start : start + size_bytes].view(tensor.dtype).view(tensor.shape)
        lane = device_stream_of(tensor) if self._arena is not None else None
        if lane is not None and self._arena is not None:
            if lane not in self._lanes:
                self._lanes.append(lane)
                # The kernels that compute the state may still be queued on the program's stream.
                lane.follow()
            lane.copy(self._arena, there, tensor)
        else:
            there.copy_(tensor.detach())
        # Only large tensors get files of their own and can stay where they are.
        if size_bytes >= OWN_FILE_BYTES:
            self.starts[there.data_ptr()] = start, size_bytes
        return there

    def wait(self) -> None:
        """Wait for copies from devices, also after an error: the memory may then be used again."""
        for lane in self._lanes:
            lane.mark().wait()


def copy_to_heap(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy outside of any arena."""
    return tensor.detach().to("cpu", copy=True)


def _reserved(end: int, tensor: torch.Tensor) -> tuple[int, int]:
    """Return start and end of the tensor in an arena that is filled up to `end`."""
    size_bytes = tensor.numel() * tensor.element_size()
    # A small one will be copied once more, into the file that they share.
    small = size_bytes < OWN_FILE_BYTES
    start = -(-end // _SMALL_ALIGNMENT) * _SMALL_ALIGNMENT if small else aligned(end) + HEADER_BYTES
    return start, start + size_bytes


class _Copier:
    """Copy of one nested state."""

    def __init__(self, place: CopyTensor, *, objects: bool = True) -> None:
        self._place = place
        self._objects = objects
        self._made: dict[int, tuple[Any, Any]] = {}

    def value(self, value: Any) -> Any:
        """Return the copy of a value."""
        if isinstance(value, torch.Tensor):
            # The original is kept with its copy: an id is unique only among objects that live.
            if id(value) not in self._made:
                self._made[id(value)] = value, self._tensor(value)
            return self._made[id(value)][1]
        if type(value) in (dict, list, tuple) or isinstance(value, dict):
            return self._container(value)
        return copy.deepcopy(value) if self._objects else value

    def _container(self, value: Any) -> Any:
        if isinstance(value, dict):
            # A copy keeps the class, and attributes such as the `_metadata` of a state_dict.
            made = copy.copy(value)
            for key, item in value.items():
                made[key] = self.value(item)
            return made
        return type(value)(self.value(item) for item in value)

    def _tensor(self, value: torch.Tensor) -> Any:
        if isinstance(value, DTensor):
            local = value._local_tensor
            # DTensor.from_local would move the copy to the mesh's device.
            made: Any = DTensor
            return made(self._tensor(local), value._spec, requires_grad=False)
        if type(value) not in (torch.Tensor, torch.nn.Parameter):
            return copy.deepcopy(value) if self._objects else value
        if value.layout is not torch.strided or value.is_quantized or value.is_meta:
            return copy.deepcopy(value) if self._objects else value
        # Plain dense tensors alone are placed in the arena; other kinds are copied by their own method above.
        return self._place(value)
