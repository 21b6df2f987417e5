"""Messages between the ranks of one training: JSON and the bytes of tensors in a msgpack document.

Any process that reaches the port of torch's store, or a connection between two ranks, can send anything.
Guarantees: decoding executes nothing and creates only the kinds of values in structure.py; anything else is a
ValueError. What `encode` accepts comes back equal, on the host, with tensors that share no memory with the
original.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, Final

import msgspec

from ciuic.training.format import structure, tensors
from ciuic.training.format.tensors import Array, ArrayBuffer

MAX_MESSAGE_BYTES: Final = 4 << 30
"""Largest message that is received.

A rank's own state is megabytes: a larger length is an error or an attack, and is not allocated.
"""


class _Tensor(msgspec.Struct, array_like=True):
    """A tensor with its content."""

    name: str
    dtype: str
    """Name of the dtype in safetensors."""
    shape: list[int]
    data: bytes


class _Message(msgspec.Struct, array_like=True):
    skeleton: bytes
    """JSON, because integers of msgpack end at 64 bits."""
    tensors: list[_Tensor]


def encode(value: object) -> bytes:
    """Return the message for a value.

    Raises:
        Unsaveable: structure.py does not store the value (a TypeError).
    """
    packed = structure.pack(value, "a message to other ranks")
    found = []
    for leaf in packed.leaves:
        # A copy on the host: the message must not change while the training goes on.
        room = bytearray(leaf.array.size_bytes)
        if room:
            ArrayBuffer(memoryview(room), leaf.array).fill(leaf.value)
        found.append(_Tensor(leaf.name, leaf.array.dtype, list(leaf.array.shape), bytes(room)))
    skeleton = json.dumps(packed.skeleton, separators=(",", ":")).encode("ascii")
    return msgspec.msgpack.encode(_Message(skeleton, found))


def decode(data: bytes | bytearray) -> Any:
    """Return the value of a message.

    Raises:
        ValueError: `encode` did not write the message.
    """
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        made = _Made(message.tensors)
        # Tensors that are created in torch's inference mode cannot be changed by the training later.
        with tensors.outside_inference_mode():
            return structure.unpack(json.loads(message.skeleton), made.tensor)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a message of another rank is malformed: {error}") from None
    except (RuntimeError, OverflowError, TypeError, AttributeError, MemoryError, LookupError) as error:
        # torch and NumPy raise these for shapes and dtypes that do not fit the content, or do not exist.
        raise ValueError(f"a message of another rank has a value that cannot be made: {error}") from None


class _Made:
    """Tensors of one message, each created once, so that tied tensors stay tied."""

    def __init__(self, found: list[_Tensor]) -> None:
        self._found = {one.name: one for one in found}
        self._made: dict[str, Any] = {}

    def tensor(self, name: str, packed: dict[str, Any]) -> Any:
        # A rank sends what it has itself, of which nothing is in pieces.
        if packed[structure.KIND] != "tensor":
            raise ValueError("a message of another rank has a tensor that is in pieces")
        if name not in self._made:
            self._made[name] = _make(self._found[name], packed)
        return self._made[name]


def _make(found: _Tensor, packed: dict[str, Any]) -> Any:
    size_bytes = tensors.count(found.shape) * tensors.dtype_bytes(found.dtype)
    # Two negative sizes have a positive product.
    if size_bytes != len(found.data) or any(size < 0 for size in found.shape):
        raise ValueError(f"the tensor {found.name!r} has {len(found.data)} bytes, expected {size_bytes}")
    owner, room = tensors.empty_buffer(size_bytes)
    room[:] = found.data
    framework: tensors.Framework = "numpy" if packed.get("of") == "numpy" else "torch"
    true_shape = tuple(packed.get("shape", ()))
    array = Array(
        framework, found.dtype, tuple(found.shape), size_bytes, str(packed.get("dtype", "")), true_shape
    )
    return tensors.from_buffer(owner, 0, array)


# --- over process groups of torch.distributed


def gather(mine: bytes, group: Any) -> list[bytearray] | None:
    """Return the bytes of every rank, on rank 0 of ``group``; None on the others.

    Raises:
        RuntimeError: A rank is gone, or a length is impossible.
    """
    import torch.distributed as dist

    sizes, sent, rooms = _prepare(mine, group)
    is_first = dist.get_rank(group) == 0
    views = [_as_tensor(room, group) for room in rooms] if is_first else None
    # `group_dst` (torch 2.6): rank 0 of the group, which need not be rank 0 of the program.
    dist.gather(sent, views, group=group, group_dst=0)
    return _without_padding(rooms, views, sizes) if views is not None else None


def all_gather(mine: bytes, group: Any) -> list[bytearray]:
    """Return the bytes of every rank, on every rank of ``group``.

    Raises:
        RuntimeError: A rank is gone, or a length is impossible.
    """
    import torch.distributed as dist

    sizes, sent, rooms = _prepare(mine, group)
    views = [_as_tensor(room, group) for room in rooms]
    dist.all_gather(views, sent, group=group)
    return _without_padding(rooms, views, sizes)


def broadcast(mine: bytes | None, group: Any) -> bytearray:
    """Return the bytes of rank 0 of ``group``, on every rank.

    Args:
        mine: The bytes on rank 0, None on the others.
        group: Process group.

    Raises:
        RuntimeError: A rank is gone, or a length is impossible.
    """
    import torch
    import torch.distributed as dist

    # The length first, because the receivers have to give a tensor of the right size.
    size = torch.tensor([0 if mine is None else len(mine)], dtype=torch.int64, device=_device(group))
    dist.broadcast(size, group=group, group_src=0)
    # Checked before it is allocated: the length came from another process.
    room = bytearray(_checked(int(size.item())))
    if mine is not None:
        room[:] = mine
    view = _as_tensor(room, group)
    dist.broadcast(view, group=group, group_src=0)
    return _without_padding([room], [view], [len(room)])[0]


def _prepare(mine: bytes, group: Any) -> tuple[list[int], Any, list[bytearray]]:
    """Return the sizes of all messages, this rank's padded bytes, and a buffer for each rank."""
    import torch
    import torch.distributed as dist

    device, number = _device(group), dist.get_world_size(group)
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(number)]
    dist.all_gather(found, torch.tensor([len(mine)], dtype=torch.int64, device=device), group=group)
    sizes = [_checked(int(size.item())) for size in found]
    longest = max(sizes)
    room = bytearray(mine)
    # Collectives take tensors of one size only.
    room.extend(bytes(longest - len(mine)))
    return sizes, _as_tensor(room, group), [bytearray(longest) for _ in range(number)]


def _checked(size_bytes: int) -> int:
    if not 0 < size_bytes <= MAX_MESSAGE_BYTES:
        raise RuntimeError(
            f"a message between ranks must have 1 to {MAX_MESSAGE_BYTES} bytes, got {size_bytes}"
        )
    return size_bytes


def _as_tensor(room: bytearray, group: Any) -> Any:
    """Return the bytes as a tensor: the same memory on the host, a copy on a device."""
    import torch

    return torch.frombuffer(room, dtype=torch.uint8).to(_device(group))


def _without_padding(rooms: list[bytearray], views: list[Any], sizes: list[int]) -> list[bytearray]:
    """Return the messages without their padding. Consumes ``views``."""
    import torch

    for room, view in zip(rooms, views, strict=True):
        if view.device.type != "cpu":
            torch.frombuffer(room, dtype=torch.uint8).copy_(view)
    views.clear()
    found = []
    for room, size in zip(rooms, sizes, strict=True):
        found.append(room if len(room) == size else room[:size])
    return found


def _device(group: Any) -> str:
    """Return the device on which the backend of ``group`` takes tensors."""
    import torch.distributed as dist

    backends = str(dist.get_backend(group))
    # A group with several backends ("cpu:gloo,cuda:nccl") can do the host, which needs no copy.
    if "gloo" in backends or "mpi" in backends:
        return "cpu"
    # These backends take tensors on their devices alone.
    for name, device in (("nccl", "cuda"), ("xccl", "xpu")):
        kind = getattr(sys.modules["torch"], device, None)
        if name in backends and kind is not None:
            with suppress(RuntimeError):
                return f"{device}:{kind.current_device()}"
    return "cpu"
