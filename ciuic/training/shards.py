"""Tensors of which each rank has a part (torch's DTensor: FSDP2, tensor parallel): which part is this rank's, and parts put in again.

A *piece* is a block of such a tensor that one rank stores, under the tensor's name and the place of its first element: `NAME@0,512`. Where
several ranks have the same block (HSDP, replicated parameters), the first of them stores it. The pieces of all ranks together are the
tensor, so any number of ranks can read it.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, Protocol

from ciuic.training.tensors import Unsaveable, describe

_THREADS: Final = 4
Like = Callable[[tuple[Any, ...]], Any]
"""Gets a path in a state; what stands there, or will stand."""
_PIECE: Final = re.compile(r"^(.*)@([0-9,]*)$", re.DOTALL)


class Whole(Protocol):
    """A tensor as a snapshot has it, to be read as far as it is needed."""

    shape: tuple[int, ...]

    def read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """A block of it. Damaged."""


def is_sharded(value: object) -> bool:
    return type(value).__name__ == "DTensor" and "torch" in sys.modules


def are_sharded(values: Iterable[object]) -> bool:
    """Whether any of these objects, modules or optimizers, has parameters of which each rank has a part."""
    return any(is_sharded(one) for value in values for one in parameters_of(value))


def parameters_of(value: Any) -> list[Any]:
    """Of a module or an optimizer; of the latter in the order in which its state counts them."""
    if isinstance(groups := getattr(value, "param_groups", None), list):
        every = [one for group in groups for one in group.get("params", ())]
        return list({id(one): one for one in every}.values())
    torch = sys.modules.get("torch")
    return list(value.parameters()) if torch is not None and isinstance(value, torch.nn.Module) else []


def outline(state: Any, path: str = "") -> Iterator[str]:
    """What must be the same on all ranks: names, shapes and dtypes of tensors of which they have parts."""
    if isinstance(state, Mapping):
        for key, one in state.items():
            yield from outline(one, f"{path}.{key}")
    elif type(state) in (list, tuple):
        for at, one in enumerate(state):
            yield from outline(one, f"{path}.{at}")
    elif is_sharded(state):
        yield f"{path} {tuple(state.shape)} {state.dtype}"


def contains_shards(state: Any) -> bool:
    if isinstance(state, Mapping):
        return any(contains_shards(one) for one in state.values())
    return any(contains_shards(one) for one in state) if type(state) in (list, tuple) else is_sharded(state)


def is_here_whole(value: Any) -> bool:
    """Whether this process has all of it."""
    return bool(value.device_mesh.size() == 1)


def piece_of(value: Any) -> tuple[tuple[int, ...], Any] | None:
    """(place of its first element, the block) that this rank is to store; None where another one does, or there is none. Unsaveable."""
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for at, placement in zip(coordinate, value.placements, strict=True):
        if placement.is_partial():
            raise Unsaveable("a DTensor of sums that are not complete: redistribute() it")
        if at and placement.is_replicate():
            return None
    offsets, local = _block(value)
    if type(local).__name__ not in ("Tensor", "Parameter"):
        raise Unsaveable(f"a DTensor whose part is a {type(local).__name__}")
    return (offsets, local) if local.numel() else None


def as_storable(block: Any) -> Any:
    """As bytes along the last dimension, where safetensors has no name for the dtype: the shape is to be known. Unsaveable."""
    if not describe(block).true_dtype:
        return block
    if not block.dim():
        raise Unsaveable(f"a DTensor of {block.dtype} without a dimension")
    import torch

    return block.contiguous().view(torch.uint8)


def piece_name(name: str, offsets: tuple[int, ...]) -> str:
    return f"{name}@{','.join(map(str, offsets))}"


def plain_name(name: str) -> str:
    """For a whole tensor: none that could be a piece's."""
    return f"{name}#" if _PIECE.match(name) else name


def parse_piece(name: str) -> tuple[str, tuple[int, ...]] | None:
    """(name of the tensor, place of its first element)."""
    match = _PIECE.match(name)
    return None if match is None else (match[1], tuple(int(one) for one in match[2].split(",") if one))


def check_optimizer(value: Any, name: str) -> None:
    """Unsaveable where it keeps something per element of a rank's part of a parameter, and not as part of a whole."""
    for one, kept in getattr(value, "state", {}).items():
        if not is_sharded(one) or is_here_whole(one) or not isinstance(kept, Mapping):
            continue
        for key, tensor in kept.items():
            if hasattr(tensor, "numel") and not is_sharded(tensor) and tensor.numel() > 1:
                raise Unsaveable(
                    f"{name}: {key} of a sharded parameter is no DTensor, so each rank's would have to be kept"
                )


def likes_of(value: Any, current: Any) -> Like:
    """What stands, or will stand, at a path of the state of this object: a DTensor tells which part this rank has."""
    parameters = parameters_of(value) if hasattr(value, "param_groups") else []

    def like(path: tuple[Any, ...]) -> Any:
        if parameters and len(path) == 3 and path[0] == "state" and path[1] in range(len(parameters)):
            return parameters[path[1]]
        found = current
        for key in path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    return like


def fitted(state: Any, like: Like, whole: type[Any]) -> Any:
    """The state with each tensor cut as its like is; where that is no DTensor, whole. ``whole``: class of those values that are `Whole`.
    Damaged."""
    with ThreadPoolExecutor(_THREADS, "ciuic-load") as pool:

        def fit(value: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, whole) or type(value).__name__ == "Tensor":
                return pool.submit(_fit, value, like(path), whole)
            return value

        begun = _mapped(state, (), fit)
        return _mapped(begun, (), lambda value, _: value.result() if isinstance(value, Future) else value)


def _mapped(value: Any, path: tuple[Any, ...], each: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    if isinstance(value, dict):
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = _mapped(one, (*path, key), each)
        return made
    if type(value) in (list, tuple):
        return type(value)(_mapped(one, (*path, at), each) for at, one in enumerate(value))
    return each(value, path)


def _fit(value: Any, like: Any, whole: type[Any]) -> Any:
    everything = (0,) * len(value.shape), tuple(value.shape)
    if not is_sharded(like) or tuple(like.shape) != tuple(value.shape):
        return value.read(*everything) if isinstance(value, whole) else value
    offsets, local = _block(like)
    if isinstance(value, whole):
        block = value.read(offsets, tuple(local.shape))
    else:
        block = value
        for dimension, (start, length) in enumerate(zip(offsets, local.shape, strict=True)):
            block = block.narrow(dimension, start if length else 0, length)
    return _sharded(block, like, local)


def _block(value: Any) -> tuple[tuple[int, ...], Any]:
    """(place, content) of this rank's part."""
    local = value._local_tensor
    shape, offsets = _place(tuple(value.shape), value.device_mesh, tuple(value.placements))
    if tuple(shape) != tuple(local.shape):
        if local.numel() or 0 not in shape:
            raise Unsaveable(f"a DTensor whose part is {tuple(local.shape)} where torch says {tuple(shape)}")
        offsets = (0,) * len(value.shape)
    return tuple(offsets), local


@lru_cache(maxsize=1 << 14)
def _place(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[Any, Any]:
    """torch takes a tenth of a millisecond for it, and a save asks for every tensor."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: tuple[Any, Any] = compute_local_shape_and_global_offset(shape, mesh, placements)
    return found


def _sharded(block: Any, like: Any, local: Any) -> Any:
    """A DTensor as ``like``, with this content. `from_local` would move it to the mesh's device."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    here = torch.empty_like(local, dtype=block.dtype, requires_grad=False)
    here.copy_(block)
    meta = TensorMeta(like.shape, like.stride(), block.dtype)
    made: Any = DTensor
    return made(here, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)
