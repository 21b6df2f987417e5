"""Sharded tensors (torch's DTensor: FSDP2, tensor parallel): which block of one a rank has, and whether blocks make up the whole.

A *piece* is a block of such a tensor that one rank stores, under the tensor's name and the indices of its
first element: `NAME@0,512`. Where several ranks have the same block (HSDP, replicated parameters), the first
of them stores it. The pieces of all ranks together make up the tensor, so any number of ranks can load it:
`stored_files` reads them. Checkpoints of `torch.distributed.checkpoint` name their shards so too; for these
torch's planners decide which rank stores a shard and which overlaps a rank reads.

Names are compared without the prefixes of a module's wrappers: torch.compile adds ``_orig_mod``, and
DistributedDataParallel a leading ``module``.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import Any, Final

from ciuic.training.format.tensors import Unsaveable, describe

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


_MAX_CUT_DIMENSIONS: Final = 8
Region = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a block of a tensor."""


def is_whole(regions: Sequence[Region], shape: tuple[int, ...]) -> bool:
    """Return whether blocks make up a tensor: all lie within it, and cover each of its elements exactly once.

    Takes time linear in the number of blocks, times 2 to the number of dimensions that are cut.
    """
    if not all(is_inside(region, shape) for region in regions):
        return False
    if not prod(shape):
        return True
    # A block without elements has corners all the same.
    regions = [region for region in regions if prod(region[1])]
    if sum(prod(sizes) for _, sizes in regions) != prod(shape):
        return False
    whole: Region = ((0,) * len(shape), shape)
    cut = [
        dimension
        for dimension, size in enumerate(shape)
        if any(offsets[dimension] or sizes[dimension] != size for offsets, sizes in regions)
    ]
    # No mesh has so many dimensions; pairs then take less time than corners.
    if len(cut) > _MAX_CUT_DIMENSIONS:
        return not any(overlap(*pair) for pair in itertools.combinations(regions, 2))
    # How often each element is covered is the running sum, along each dimension, of numbers that are 1 or -1
    # at the corners of the blocks and 0 elsewhere: equal corners mean equal covers, and the reverse.
    corners: defaultdict[tuple[int, ...], int] = defaultdict(int)
    for (offsets, sizes), weight in (*((region, 1) for region in regions), (whole, -1)):
        for ends in itertools.product((False, True), repeat=len(cut)):
            corner = tuple(
                offsets[dimension] + end * sizes[dimension] for dimension, end in zip(cut, ends, strict=True)
            )
            corners[corner] += -weight if sum(ends) % 2 else weight
    return not any(corners.values())


def is_inside(region: Region, shape: tuple[int, ...]) -> bool:
    """Return whether a block lies within a tensor of this shape."""
    offsets, sizes = region
    return len(offsets) == len(sizes) == len(shape) and all(
        offset >= 0 and size >= 0 and offset + size <= whole
        for offset, size, whole in zip(offsets, sizes, shape, strict=True)
    )


def overlap(one: Region, other: Region) -> Region | None:
    """Return the block that two blocks have in common, by its offsets in the tensor; None if they have none."""
    low = tuple(map(max, one[0], other[0]))
    sizes = tuple(
        min(start + size, other_start + other_size) - first
        for start, size, other_start, other_size, first in zip(*one, *other, low, strict=True)
    )
    return (low, sizes) if all(size > 0 for size in sizes) else None


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
    offsets, local = local_block(value)
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


def piece_sizes(dtype: str, shape: tuple[int, ...], element_bytes: int) -> tuple[int, ...]:
    """Return the shape of a piece, which `as_storable` may have made bytes along the last dimension.

    Args:
        dtype: Name of its dtype in its file.
        shape: Its shape in its file.
        element_bytes: Bytes of an element of the tensor.
    """
    return (*shape[:-1], shape[-1] // element_bytes) if dtype == "U8" and shape else shape


# DOTALL: a key of a state may contain line breaks.
_PIECE: Final = re.compile(r"^(.*)@([0-9,]*)$", re.DOTALL)


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


TemplateLookup = Callable[[tuple[Any, ...]], Any]
"""Template of a state: maps a path to the value that stands, or will stand, there."""


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


def map_leaves(value: Any, each: Callable[[Any, tuple[Any, ...]], Any], path: tuple[Any, ...] = ()) -> Any:
    """Return a copy of nested dicts, lists and tuples in which ``each`` was applied to the other values and their paths."""
    if isinstance(value, dict):
        # A copy keeps the class, and attributes such as the `_metadata` of a state_dict.
        made = copy.copy(value)
        for key, one in value.items():
            made[key] = map_leaves(one, each, (*path, key))
        return made
    if type(value) in (list, tuple):
        return type(value)(map_leaves(one, each, (*path, at)) for at, one in enumerate(value))
    return each(value, path)


def narrowed(tensor: Any, offsets: Sequence[int], lengths: Sequence[int]) -> Any:
    """Return a view of a block of a tensor of torch; one without elements may begin anywhere."""
    for dimension, (start, length) in enumerate(zip(offsets, lengths, strict=True)):
        tensor = tensor.narrow(dimension, start if length else 0, length)
    return tensor


def local_block(value: Any) -> tuple[tuple[int, ...], Any]:
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


def with_local(like: Any, local: Any) -> Any:
    """Return a DTensor as ``like`` with another local tensor of the same shape."""
    spec = like._spec
    if local.dtype != like.dtype:
        spec = dataclasses.replace(spec, tensor_meta=spec.tensor_meta._replace(dtype=local.dtype))
    # Not by `from_local`, which would move the content to the device of the mesh.
    return type(like)(local, spec, requires_grad=False)
