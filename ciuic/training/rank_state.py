"""What of the state differs from rank to rank, although every rank trains the same model.

Random generators, the loader's position, and whatever else is registered and small: each rank gives its own, and what is not equal to
rank 0's is kept for it. Weights, moments and schedules are the same everywhere (that is what DDP is), so rank 0's do for all; so do those of
an object whose ``alike_on_ranks`` is true. But the buffers of modules are each rank's own, unless DDP broadcasts them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import xxhash

from ciuic.training import randomness
from ciuic.training.shards import contains_shards, is_sharded
from ciuic.training.stateful import state_of
from ciuic.training.structure import pack
from ciuic.training.tensors import Place

_MOST_BYTES: Final = 64 << 20
"""Of one object: what is larger is taken to be the same on every rank."""
_BUFFERS: Final = "buffers"
_RANDOM: Final = "random"
_OBJECT: Final = "object "


class Mine(NamedTuple):
    """What one rank gives."""

    states: dict[str, Any]
    """``random``, objects by name, ``buffers`` of modules by name."""
    problem: str = ""

    def message(self) -> dict[str, Any]:
        """The plain value that other ranks are sent."""
        return {"states": self.states, "problem": self.problem}

    @classmethod
    def of(cls, message: Any) -> Mine:
        """What another rank has sent. ValueError for anything else."""
        try:
            states, problem = message["states"], message["problem"]
        except (TypeError, LookupError):
            states = problem = None
        if (
            not isinstance(states, dict)
            or not isinstance(problem, str)
            or not all(isinstance(name, str) for name in states)
            or not isinstance(states.get(_BUFFERS, {}), dict)
        ):
            raise ValueError(
                f"another rank has sent {type(message).__name__}, expected what it has of its own"
            )
        return cls(states, problem)


def mine(objects: Mapping[str, Any]) -> Mine:
    """Of this rank. What is wrong with it is told to rank 0, too, which must not wait for it in vain."""
    try:
        found: dict[str, Any] = {
            f"{_OBJECT}{name}": _small_state(name, value) for name, value in objects.items()
        }
        found = {name: state for name, state in found.items() if state is not None}
        found[_RANDOM] = randomness.state()
        buffers = {name: small_buffers(value) for name, value in objects.items() if _has_own_buffers(value)}
        found[_BUFFERS] = {name: own for name, own in buffers.items() if own}
        # Here, where it becomes a problem that is told: a rank that fails to send lets the others wait in vain.
        pack(found, "state of one rank")
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


def is_new(ranks: Mapping[str, Any], rank: int) -> bool:
    """Whether there was no such rank when the others were saved."""
    return rank > 0 and str(rank) not in ranks


def put_own(state: dict[str, Any], ranks: Mapping[str, Any], rank: int) -> None:
    """Makes of rank 0's state, as `load_latest_snapshot` returns it, this rank's."""
    for name, value in ranks.get(str(rank), {}).items():
        if name.startswith(_OBJECT):
            state[f"{name.removeprefix(_OBJECT)}_state_dict"] = value
        elif name == _RANDOM:
            state["random_state"] = value


def load_buffers(objects: Mapping[str, Any], ranks: Mapping[str, Any], rank: int) -> None:
    """This rank's own, into modules that have rank 0's."""
    for name, buffers in ranks.get(str(rank), {}).get(_BUFFERS, {}).items():
        if name in objects:
            put_buffers(objects[name], buffers)


def small_buffers(module: Any) -> dict[str, Any]:
    """Its buffers by their paths, if they are not large."""
    own = {path: buffer for path, buffer in module.named_buffers() if not is_sharded(buffer)}
    if sum(buffer.numel() * buffer.element_size() for buffer in own.values()) > _MOST_BYTES:
        return {}
    return {path: buffer.detach().cpu() for path, buffer in own.items()}


def put_buffers(module: Any, buffers: Mapping[str, Any]) -> None:
    """In place."""
    for path, buffer in module.named_buffers():
        if path in buffers:
            buffer.copy_(buffers[path])


def _small_state(name: str, value: Any) -> Any:
    torch = sys.modules.get("torch")
    if getattr(value, "alike_on_ranks", False) or hasattr(value, "param_groups"):
        return None
    if torch is not None and isinstance(value, torch.nn.Module):
        return None
    state = state_of(value, name)
    if contains_shards(state):
        return None
    size_bytes = sum(leaf.array.size_bytes for leaf in pack(state, name).leaves)
    return state if size_bytes <= _MOST_BYTES else None


def _has_own_buffers(value: Any) -> bool:
    """A module that DDP keeps alike says so; one that is registered without its DDP around it cannot."""
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.nn.Module)
        and not getattr(value, "broadcast_buffers", False)
    )


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
