"""Sharded tensors (torch's DTensor: FSDP2, tensor parallel): storing the parts of ranks, and loading them.

A *piece* is a block of such a tensor that one rank stores, under the tensor's name and the indices of its
first element: `NAME@0,512`. Where several ranks have the same block (HSDP, replicated parameters), the first
of them stores it. The pieces of all ranks together make up the tensor, so any number of ranks can load it.

Names are compared without the prefixes of a module's wrappers: torch.compile adds ``_orig_mod``, and
DistributedDataParallel a leading ``module``.
"""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from typing import Any, Final, Protocol

from ciuic.training.format.tensors import Unsaveable, describe
from ciuic.training.free_resources import reader_count

_COMPILED: Final = "_orig_mod"
_PARALLEL: Final = "module"


def by_bare_name(keys: Iterable[str]) -> dict[str, str] | None:
    """Return the keys by their names without wrappers; None where two have the same."""
    bare = bare_names(keys)
    made = {name: key for key, name in bare.items()}
    return made if len(made) == len(bare) else None


def bare_names(keys: Iterable[str]) -> dict[str, str]:
    """Return the name without wrappers of each key."""
    parts = {key: [part for part in key.split(".") if part != _COMPILED] for key in keys}
    # A leading ``module`` is a wrapper's only if every key has it: an AveragedModel has ``n_averaged`` beside.
    if all(own[:1] == [_PARALLEL] for own in parts.values() if own and own != [""]):
        parts = {key: own[1:] for key, own in parts.items()}
    return {key: ".".join(own) for key, own in parts.items()}


TemplateLookup = Callable[[tuple[Any, ...]], Any]
"""Template of a state: maps a path to the value that stands, or will stand, there."""
# DOTALL: a key of a state may contain line breaks.
_PIECE: Final = re.compile(r"^(.*)@([0-9,]*)$", re.DOTALL)


class ReadableTensor(Protocol):
    """A tensor of a snapshot, of which blocks can be read."""

    shape: tuple[int, ...]

    def read(self, offsets: tuple[int, ...], sizes: tuple[int, ...]) -> Any:
        """Return a block.

        Raises:
            Damaged: The block cannot be read.
        """


def is_sharded(value: object) -> bool:
    """Return whether a value is a DTensor."""
    # By name, so that torch.distributed.tensor is not imported for programs that do not use it.
    return type(value).__name__ == "DTensor" and "torch" in sys.modules


def are_sharded(values: Iterable[object]) -> bool:
    """Return whether any of these modules or optimizers has sharded parameters."""
    return any(is_sharded(one) for value in values for one in parameters_of(value))


def parameters_of(value: Any) -> list[Any]:
    """Return the parameters of a module or an optimizer.

    Those of an optimizer come in the order in which its state counts them.
    """
    if isinstance(groups := getattr(value, "param_groups", None), list):
        every = [one for group in groups for one in group.get("params", ())]
        return list({id(one): one for one in every}.values())
    torch = sys.modules.get("torch")
    return list(value.parameters()) if torch is not None and isinstance(value, torch.nn.Module) else []


def outline(state: Any, path: str = "") -> Iterator[str]:
    """Yield what must be the same on all ranks: names, shapes and dtypes of sharded tensors."""
    if isinstance(state, Mapping):
        for key, one in state.items():
            yield from outline(one, f"{path}.{key}")
    elif type(state) in (list, tuple):
        for at, one in enumerate(state):
            yield from outline(one, f"{path}.{at}")
    elif is_sharded(state):
        yield f"{path} {tuple(state.shape)} {state.dtype}"


def contains_shards(state: Any) -> bool:
    """Return whether a state contains sharded tensors."""
    if isinstance(state, Mapping):
        return any(contains_shards(one) for one in state.values())
    return any(contains_shards(one) for one in state) if type(state) in (list, tuple) else is_sharded(state)


def is_here_whole(value: Any) -> bool:
    """Return whether this process has all of a sharded tensor."""
    return bool(value.device_mesh.size() == 1)


def piece_of(value: Any) -> tuple[tuple[int, ...], Any] | None:
    """Return the piece of a tensor that this rank stores.

    Returns:
        The indices of the first element and the block; None where another rank stores it, or this rank has no
        element.

    Raises:
        Unsaveable: The local tensor is of its own kind.
    """
    # None on a rank outside of the tensor's mesh, which has no element of it.
    coordinate = value.device_mesh.get_coordinate()
    if coordinate is None:
        return None
    for at, placement in zip(coordinate, value.placements, strict=True):
        if placement.is_partial():
            raise Unsaveable("a DTensor with partial sums: call its redistribute() first")
        # Of several ranks with the same block the first stores it.
        if at and placement.is_replicate():
            return None
    offsets, local = _block(value)
    if type(local).__name__ not in ("Tensor", "Parameter"):
        raise Unsaveable(f"a DTensor whose local tensor must be a torch.Tensor, got a {type(local).__name__}")
    return (offsets, local) if local.numel() else None


def as_storable(block: Any) -> Any:
    """Return a block as bytes along the last dimension if safetensors has no name for its dtype.

    Unlike one run of bytes this keeps the shape of the block.

    Raises:
        Unsaveable: The block has no dimension.
    """
    if not describe(block).true_dtype:
        return block
    if not block.dim():
        raise Unsaveable(f"a DTensor of {block.dtype} must have a dimension to be stored as bytes")
    import torch

    return block.contiguous().view(torch.uint8)


def piece_name(name: str, offsets: Sequence[int]) -> str:
    """Return the name under which a piece is stored."""
    return f"{name}@{','.join(map(str, offsets))}"


def plain_name(name: str) -> str:
    """Return the name under which a whole tensor is stored, which is never that of a piece."""
    return f"{name}#" if _PIECE.match(name) else name


def parse_piece(name: str) -> tuple[str, tuple[int, ...]] | None:
    """Return the name of the tensor and the indices of the first element of a piece.

    The name of a whole tensor gives None.
    """
    match = _PIECE.match(name)
    return None if match is None else (match[1], tuple(int(one) for one in match[2].split(",") if one))


def check_optimizer(value: Any, name: str) -> None:
    """Raise Unsaveable if an optimizer keeps a plain tensor for this rank's part of a parameter."""
    for one, kept in getattr(value, "state", {}).items():
        if not is_sharded(one) or is_here_whole(one) or not isinstance(kept, Mapping):
            continue
        # Tensors of one element are counts of steps, which are the same on all ranks.
        for key, tensor in kept.items():
            if hasattr(tensor, "numel") and not is_sharded(tensor) and tensor.numel() > 1:
                raise Unsaveable(
                    f"{name}: {key} of a sharded parameter must be a DTensor, got {type(tensor).__name__}: "
                    "other ranks' values would be lost"
                )


def template_lookup(value: Any, current: Any) -> TemplateLookup:
    """Return the template of the state of an object.

    Args:
        value: The object.
        current: Its state now.
    """
    parameters = parameters_of(value) if hasattr(value, "param_groups") else []
    # The saved model may have been compiled and this one not, or the other way round.
    keys = list(current) if isinstance(current, dict) else []
    renamed = (by_bare_name(keys) or {}) if all(isinstance(key, str) for key in keys) else {}

    def template(path: tuple[Any, ...]) -> Any:
        # An optimizer that has not stepped has no state yet; its moments will be sharded as their parameters
        # are. The path is `state`, the number of the parameter, the name of the moment.
        if parameters and len(path) == 3 and path[0] == "state" and path[1] in range(len(parameters)):
            return parameters[path[1]]
        found = current
        if keys and path and isinstance(path[0], str) and path[0] not in current:
            path = (renamed.get(bare_names(path[:1])[path[0]], path[0]), *path[1:])
        for key in path:
            try:
                found = found[key]
            except (KeyError, IndexError, TypeError):
                return None
        return found

    return template


def cut_to_templates(state: Any, template: TemplateLookup, whole: type[Any]) -> Any:
    """Cut each tensor of a state to this rank's part.

    Args:
        state: State with whole tensors.
        template: Template; where it has no DTensor the tensor stays whole.
        whole: Class of the values in ``state`` that are `ReadableTensor`.

    Raises:
        Damaged: A tensor cannot be read.
    """
    # Two passes: the first begins to read all tensors, the second collects them.
    with ThreadPoolExecutor(reader_count(), "ciuic-load") as pool:

        def fit(value: Any, path: tuple[Any, ...]) -> Any:
            if isinstance(value, whole) or type(value).__name__ == "Tensor":
                return pool.submit(_cut_to_template, value, template(path), whole)
            return value

        begun = _map_leaves(state, (), fit)
        return _map_leaves(begun, (), lambda value, _: value.result() if isinstance(value, Future) else value)


def _map_leaves(value: Any, path: tuple[Any, ...], each: Callable[[Any, tuple[Any, ...]], Any]) -> Any:
    if isinstance(value, dict):
        # A copy keeps the class, and attributes such as the `_metadata` of a state_dict.
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = _map_leaves(one, (*path, key), each)
        return made
    if type(value) in (list, tuple):
        return type(value)(_map_leaves(one, (*path, at), each) for at, one in enumerate(value))
    return each(value, path)


def _cut_to_template(value: Any, like: Any, whole: type[Any]) -> Any:
    everything = (0,) * len(value.shape), tuple(value.shape)
    if not is_sharded(like) or tuple(like.shape) != tuple(value.shape):
        return value.read(*everything) if isinstance(value, whole) else value
    offsets, local = _block(like)
    if isinstance(value, whole):
        block = value.read(offsets, tuple(local.shape))
    else:
        block = narrowed(value, offsets, local.shape)
    return _sharded(block, like, local)


def narrowed(tensor: Any, offsets: Sequence[int], lengths: Sequence[int]) -> Any:
    """Return a view of a block of a tensor of torch; one without elements may begin anywhere."""
    for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, start if length else 0, length)
    return tensor


def _block(value: Any) -> tuple[tuple[int, ...], Any]:
    """Return the indices of the first element, and the content, of this rank's part."""
    local = value._local_tensor
    shape, offsets = _local_extent(tuple(value.shape), value.device_mesh, tuple(value.placements))
    # A rank without elements may have another empty shape than torch computes; its offsets do not matter.
    if tuple(shape) != tuple(local.shape):
        if local.numel() or 0 not in shape:
            raise Unsaveable(f"a DTensor whose local shape must be {tuple(shape)}, got {tuple(local.shape)}")
        offsets = (0,) * len(value.shape)
    return tuple(offsets), local


# Cached, because torch takes a tenth of a millisecond, and a save asks for every tensor.
@lru_cache(maxsize=1 << 14)
def _local_extent(shape: tuple[int, ...], mesh: Any, placements: tuple[Any, ...]) -> tuple[Any, Any]:
    """Return shape and offsets of this rank's part."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: tuple[Any, Any] = compute_local_shape_and_global_offset(shape, mesh, placements)
    return found


def _sharded(block: Any, like: Any, local: Any) -> Any:
    """Return a DTensor as ``like`` with another content."""
    import torch
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

    here = torch.empty_like(local, dtype=block.dtype, requires_grad=False)
    here.copy_(block)
    meta = TensorMeta(like.shape, like.stride(), block.dtype)
    made: Any = DTensor
    # Not by `from_local`, which would move the content to the device of the mesh.
    return made(here, DTensorSpec(like.device_mesh, like.placements, tensor_meta=meta), requires_grad=False)
