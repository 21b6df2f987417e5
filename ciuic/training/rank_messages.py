"""Messages between the ranks of one training: values as JSON and the bytes of their tensors, in one msgpack document.

Whoever reaches the port of torch's store, or a connection between two ranks, may send what it likes. Guarantees: decoding executes
nothing and makes the kinds of values in structure.py alone; anything else is a ValueError. What `encode` accepts comes back equal, on
the host, with tensors that share no memory with what was given.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any, Final

import msgspec

from ciuic.training import structure, tensors
from ciuic.training.tensors import Array, Place

MAX_MESSAGE_BYTES: Final = 4 << 30
"""A rank's own state is megabytes. A length beyond this is not allocated: it is an error or an attack."""


class _Tensor(msgspec.Struct, array_like=True):
    """One tensor with its content."""

    name: str
    dtype: str
    """safetensors' name, as the next one."""
    shape: list[int]
    data: bytes


class _Message(msgspec.Struct, array_like=True):
    skeleton: bytes
    """JSON: integers of msgpack end at 64 bits."""
    tensors: list[_Tensor]


def encode(value: object) -> bytes:
    """The message that means ``value``. Unsaveable (a TypeError) for what structure.py does not store."""
    packed = structure.pack(value, "a message to other ranks")
    found = []
    for leaf in packed.leaves:
        room = bytearray(leaf.array.size_bytes)
        if room:
            Place(memoryview(room), leaf.array).fill(leaf.value)
        found.append(_Tensor(leaf.name, leaf.array.dtype, list(leaf.array.shape), bytes(room)))
    skeleton = json.dumps(packed.skeleton, separators=(",", ":")).encode("ascii")
    return msgspec.msgpack.encode(_Message(skeleton, found))


def decode(data: bytes | bytearray) -> Any:
    """The value of a message. ValueError for what `encode` did not write."""
    try:
        message = msgspec.msgpack.decode(data, type=_Message)
        made = _Made(message.tensors)
        with tensors.normally():
            return structure.unpack(json.loads(message.skeleton), made.tensor)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ValueError(f"a message of another rank is not as it should be: {error}") from None
    except (RuntimeError, OverflowError, TypeError, AttributeError, MemoryError, LookupError) as error:
        # What torch and NumPy say of shapes and dtypes that do not fit the content, or do not exist.
        raise ValueError(f"a message of another rank has a value that cannot be made: {error}") from None


class _Made:
    """Tensors of one message, each made once: tied ones stay tied."""

    def __init__(self, found: list[_Tensor]) -> None:
        self._found = {one.name: one for one in found}
        self._made: dict[str, Any] = {}

    def tensor(self, name: str, packed: dict[str, Any]) -> Any:
        if packed[structure.KIND] != "tensor":
            raise ValueError("a message of another rank has a tensor that is in pieces")
        if name not in self._made:
            self._made[name] = _make(self._found[name], packed)
        return self._made[name]


def _make(found: _Tensor, packed: dict[str, Any]) -> Any:
    size_bytes = tensors.count(found.shape) * tensors.dtype_bytes(found.dtype)
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
    """Every rank's bytes on rank 0 of ``group``; None on the others. RuntimeError, as all below."""
    import torch.distributed as dist

    sizes, sent, rooms = _prepare(mine, group)
    is_first = dist.get_rank(group) == 0
    views = [_view(room, group) for room in rooms] if is_first else None
    dist.gather(sent, views, group=group, group_dst=0)
    return _cut(rooms, views, sizes) if views is not None else None


def all_gather(mine: bytes, group: Any) -> list[bytearray]:
    """Every rank's bytes, on every rank of ``group``."""
    import torch.distributed as dist

    sizes, sent, rooms = _prepare(mine, group)
    views = [_view(room, group) for room in rooms]
    dist.all_gather(views, sent, group=group)
    return _cut(rooms, views, sizes)


def broadcast(mine: bytes | None, group: Any) -> bytearray:
    """The bytes of rank 0 of ``group``, which alone gives some, on every rank."""
    import torch
    import torch.distributed as dist

    size = torch.tensor([0 if mine is None else len(mine)], dtype=torch.int64, device=_device(group))
    dist.broadcast(size, group=group, group_src=0)
    room = bytearray(_checked(int(size.item())))
    if mine is not None:
        room[:] = mine
    view = _view(room, group)
    dist.broadcast(view, group=group, group_src=0)
    return _cut([room], [view], [len(room)])[0]


def _prepare(mine: bytes, group: Any) -> tuple[list[int], Any, list[bytearray]]:
    """Sizes of all, this rank's bytes with padding, and room for everybody's: collectives take tensors of one size."""
    import torch
    import torch.distributed as dist

    device, number = _device(group), dist.get_world_size(group)
    found = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(number)]
    dist.all_gather(found, torch.tensor([len(mine)], dtype=torch.int64, device=device), group=group)
    sizes = [_checked(int(size.item())) for size in found]
    longest = max(sizes)
    room = bytearray(mine)
    room.extend(bytes(longest - len(mine)))
    return sizes, _view(room, group), [bytearray(longest) for _ in range(number)]


def _checked(size_bytes: int) -> int:
    if not 0 < size_bytes <= MAX_MESSAGE_BYTES:
        raise RuntimeError(
            f"a message between ranks must have 1 to {MAX_MESSAGE_BYTES} bytes, got {size_bytes}"
        )
    return size_bytes


def _view(room: bytearray, group: Any) -> Any:
    """A tensor of these bytes: on the host their own memory, elsewhere a copy of them."""
    import torch

    return torch.frombuffer(room, dtype=torch.uint8).to(_device(group))


def _cut(rooms: list[bytearray], views: list[Any], sizes: list[int]) -> list[bytearray]:
    """The messages without their padding. Consumes ``views``."""
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
    """Where the backend of ``group`` wants its tensors."""
    import torch.distributed as dist

    backends = str(dist.get_backend(group))
    if "gloo" in backends or "mpi" in backends:
        return "cpu"
    for name, device in (("nccl", "cuda"), ("xccl", "xpu")):
        kind = getattr(sys.modules["torch"], device, None)
        if name in backends and kind is not None:
            with suppress(RuntimeError):
                return f"{device}:{kind.current_device()}"
    return "cpu"
