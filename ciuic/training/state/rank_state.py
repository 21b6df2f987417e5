"""State that differs from rank to rank, although every rank trains the same model.

Each rank sends its random generators, loader positions and other small registered objects; what is not equal
to rank 0's is stored for that rank. Weights, moments and schedules are the same on all ranks (DDP guarantees
that), so rank 0's are stored for all; so is the state of an object whose ``alike_on_ranks`` is true. The
buffers of modules are each rank's own, unless DDP broadcasts them.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

import xxhash

from ciuic.training.format.shards import contains_shards, is_sharded
from ciuic.training.format.structure import pack
from ciuic.training.format.tensors import ArrayBuffer
from ciuic.training.state import stateful
from ciuic.training.state.stateful import state_of

# Largest state of one object that is compared, for which it is sent to rank 0 at every save. A larger one is
# taken to be the same on every rank.
_MAX_OBJECT_BYTES: Final = 64 << 20
_BUFFERS: Final = "buffers"
_RANDOM: Final = "random"
_OBJECT: Final = "object "


class BoundaryState(NamedTuple):
    """What changes for the next step, or within an evaluation, as it was at the last boundary."""

    random: dict[str, Any]
    positions: dict[str, Any]
    """States of registered objects by name."""
    epoch: int | None


class RankState(NamedTuple):
    """State of one rank's own."""

    states: dict[str, Any]
    """Keys: ``random``.

    ``object NAME`` for each object; ``buffers``, which holds those of modules by name.
    """
    problem: str = ""
    """Why this rank cannot tell its state; empty: it can."""

    def message(self) -> dict[str, Any]:
        """Return the plain value to send to other ranks."""
        return {"states": self.states, "problem": self.problem}

    @classmethod
    def of(cls, message: Any) -> RankState:
        """Return the state that another rank has sent.

        Raises:
            ValueError: The message is something else.
        """
        try:
            states, problem = message["states"], message["problem"]
        except (TypeError, LookupError):
            states = problem = None
        # Checked in depth: any process that reaches the port of torch's store can send this.
        if (
            not isinstance(states, dict)
            or not isinstance(problem, str)
            or not all(isinstance(name, str) for name in states)
            or not isinstance(states.get(_BUFFERS, {}), dict)
        ):
            raise ValueError(f"another rank must send its own state, got {type(message).__name__}")
        return cls(states, problem)


def own_state(objects: Mapping[str, Any], at: BoundaryState | None = None) -> RankState:
    """Return the state of this rank's own, with generators and positions as of ``at``; None: as they are now.

    An error becomes its ``problem``, so that it reaches rank 0, which would otherwise wait for this rank in
    vain.
    """
    try:
        found: dict[str, Any] = {
            f"{_OBJECT}{name}": _small_state(name, value) for name, value in objects.items()
        }
        found = {name: state for name, state in found.items() if state is not None}
        if at is not None:
            earlier = {f"{_OBJECT}{name}": state for name, state in at.positions.items()}
            found |= {name: state for name, state in earlier.items() if name in found}
        found[_RANDOM] = stateful.random_states() if at is None else at.random
        buffers = {name: small_buffers(value) for name, value in objects.items() if _has_own_buffers(value)}
        found[_BUFFERS] = {name: own for name, own in buffers.items() if own}
        # Packed here as a check, where an error becomes a problem that is sent: a rank that fails while it
        # sends lets the others wait in vain.
        pack(found, "state of one rank")
        return RankState(found)
    except Exception as error:
        return RankState({}, str(error) or type(error).__name__)


def differing(everybody: list[RankState]) -> dict[str, Any]:
    """Return for each rank what is not equal to rank 0's.

    Raises:
        ValueError: A rank could not tell its state; the message names it.
    """
    for rank, one in enumerate(everybody):
        if one.problem:
            raise ValueError(f"rank {rank}: {one.problem}")
    # Compared by content, so that states that are equal on all ranks are stored once.
    first = {name: digest(state) for name, state in everybody[0].states.items()}
    return {
        str(rank): {name: state for name, state in one.states.items() if digest(state) != first.get(name)}
        for rank, one in enumerate(everybody)
        if rank
    }


def is_new(ranks: Mapping[str, Any], rank: int) -> bool:
    """Return whether there was no such rank when the snapshot was taken."""
    return rank > 0 and str(rank) not in ranks


def apply_own_state(state: dict[str, Any], ranks: Mapping[str, Any], rank: int) -> None:
    """Turn rank 0's state, as `load_latest_snapshot` returns it, into this rank's."""
    for name, value in ranks.get(str(rank), {}).items():
        if name.startswith(_OBJECT):
            state[f"{name.removeprefix(_OBJECT)}_state_dict"] = value
        elif name == _RANDOM:
            state["random_state"] = value


def load_buffers(objects: Mapping[str, Any], ranks: Mapping[str, Any], rank: int) -> None:
    """Load this rank's own buffers into modules that have rank 0's."""
    for name, buffers in ranks.get(str(rank), {}).get(_BUFFERS, {}).items():
        if name in objects:
            _put_buffers(objects[name], buffers)


def small_buffers(module: Any) -> dict[str, Any]:
    """Return the buffers of a module by path, on the host.

    {} if they are larger than `_MAX_OBJECT_BYTES` together.
    """
    own = {path: buffer for path, buffer in module.named_buffers() if not is_sharded(buffer)}
    if sum(buffer.numel() * buffer.element_size() for buffer in own.values()) > _MAX_OBJECT_BYTES:
        return {}
    return {path: buffer.detach().cpu() for path, buffer in own.items()}


def _put_buffers(module: Any, buffers: Mapping[str, Any]) -> None:
    """Copy buffers into a module."""
    for path, buffer in module.named_buffers():
        if path in buffers:
            buffer.copy_(buffers[path])


def _small_state(name: str, value: Any) -> Any:
    torch = sys.modules.get("torch")
    # Optimizers and modules are alike under DDP: comparing them would mean gathering the whole state at every
    # save.
    if getattr(value, "alike_on_ranks", False) or hasattr(value, "param_groups"):
        return None
    if torch is not None and isinstance(value, torch.nn.Module):
        return None
    state = state_of(value, name)
    # Each rank stores its own part of these (`snapshot_taker`).
    if contains_shards(state):
        return None
    size_bytes = sum(leaf.array.size_bytes for leaf in pack(state, name).leaves)
    return state if size_bytes <= _MAX_OBJECT_BYTES else None


def _has_own_buffers(value: Any) -> bool:
    """Return whether the buffers of a module differ from rank to rank.

    A DDP wrapper tells whether it broadcasts them; a module registered without its wrapper cannot.
    """
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.nn.Module)
        and not getattr(value, "broadcast_buffers", False)
    )


def digest(state: Any) -> str:
    """Return a digest of a state: equal ones have the same values, shapes and dtypes."""
    packed = pack(state, "")
    whole = xxhash.xxh3_128(repr(packed.skeleton).encode("utf-8", "surrogatepass"))
    for leaf in packed.leaves:
        room = bytearray(leaf.array.size_bytes)
        if room:
            ArrayBuffer(memoryview(room), leaf.array).fill(leaf.value)
        # dtype and shape too: the same bytes may be other numbers.
        whole.update(repr(leaf.array).encode())
        whole.update(room)
    return whole.hexdigest()
