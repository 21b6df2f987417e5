"""What of the state differs from rank to rank, although every rank trains the same model.

Random generators, the loader's position, and whatever else is registered and small: each rank gives its own, and what is not equal to
rank 0's is kept for it. Weights, moments and schedules are the same everywhere (that is what DDP is), so rank 0's do for all; but buffers
that DDP was told not to broadcast are each rank's own.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import xxhash

from ciuic.training import randomness
from ciuic.training.stateful import load_into, state_of
from ciuic.training.structure import pack
from ciuic.training.tensors import Place

_MOST_BYTES: Final = 64 << 20
"""Of one object: what is larger is taken to be the same on every rank."""
_BUFFERS: Final = "buffers"
_RANDOM: Final = "random"


class Mine(NamedTuple):
    """What one rank gives."""

    states: dict[str, Any]
    """``random``, objects by name, ``buffers`` of modules by name."""
    problem: str = ""


def mine(objects: Mapping[str, Any]) -> Mine:
    """Of this rank. What is wrong with it is told to rank 0, too, which must not wait for it in vain."""
    try:
        found: dict[str, Any] = {
            f"object {name}": _small_state(name, value) for name, value in objects.items()
        }
        found = {name: state for name, state in found.items() if state is not None}
        found[_RANDOM] = randomness.state()
        found[_BUFFERS] = {
            name: _own_buffers(value) for name, value in objects.items() if _own_buffers(value)
        }
        return Mine(found)
    except Exception as error:
        return Mine({}, str(error) or type(error).__name__)


def differing(everybody: list[Mine]) -> dict[str, Any]:
    """By rank: what is not equal to rank 0's. ValueError naming a rank that could not say."""
    for rank, one in enumerate(everybody):
        if one.problem:
            raise ValueError(f"rank {rank}: {one.problem}")
    first = {name: _digest(state) for name, state in everybody[0].states.items()}
    return {
        str(rank): {name: state for name, state in one.states.items() if _digest(state) != first.get(name)}
        for rank, one in enumerate(everybody)
        if rank
    }


def random_of(ranks: Mapping[str, Any], rank: int) -> Any:
    """The generators of this rank, if they were not rank 0's."""
    return ranks.get(str(rank), {}).get(_RANDOM)


def load(objects: Mapping[str, Any], ranks: Mapping[str, Any], rank: int) -> None:
    """Puts into the objects what was this rank's own; they have rank 0's state before."""
    own = ranks.get(str(rank), {})
    for name, value in objects.items():
        if f"object {name}" in own:
            load_into(value, own[f"object {name}"], name)
    for name, buffers in own.get(_BUFFERS, {}).items():
        module = objects.get(name)
        if module is not None:
            for path, buffer in module.named_buffers():
                if path in buffers:
                    buffer.copy_(buffers[path])


def _small_state(name: str, value: Any) -> Any:
    torch = sys.modules.get("torch")
    if hasattr(value, "param_groups") or (torch is not None and isinstance(value, torch.nn.Module)):
        return None
    state = state_of(value, name)
    size_bytes = sum(leaf.array.size_bytes for leaf in pack(state, name).leaves)
    return state if size_bytes <= _MOST_BYTES else None


def _own_buffers(value: Any) -> dict[str, Any]:
    if getattr(value, "broadcast_buffers", True) or not hasattr(value, "named_buffers"):
        return {}
    return {path: buffer.detach().cpu() for path, buffer in value.named_buffers()}


def _digest(state: Any) -> str:
    packed = pack(state, "")
    whole = xxhash.xxh3_128(repr(packed.skeleton).encode("utf-8", "surrogatepass"))
    for leaf in packed.leaves:
        room = bytearray(leaf.array.size_bytes)
        if room:
            Place(memoryview(room), leaf.array).fill(leaf.value)
        whole.update(repr(leaf.array).encode())
        whole.update(room)
    return whole.hexdigest()
