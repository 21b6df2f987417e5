"""State that differs from rank to rank, although every rank trains the same model.

Each rank sends its random generators, loader positions and other registered objects; what is not equal
to rank 0's is stored for that rank. Of a large object a rank sends a digest first, and the content only where that
differs. Weights, moments and schedules are the same on all ranks (DDP guarantees
that), so rank 0's are stored for all; so is the state of an object whose ``alike_on_ranks`` is true. The
buffers of modules are each rank's own, unless DDP broadcasts them.

Whether ranks do have the same weights is looked at, so that stages of a pipeline are not saved as if they were
replicas: names, shapes and dtypes, and a few elements.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, NamedTuple

import xxhash

from ciuic.training.format.shards import bare_names, contains_shards, is_sharded, parameters_of
from ciuic.training.format.structure import Leaf, pack
from ciuic.training.format.tensors import ArrayBuffer
from ciuic.training.state import stateful
from ciuic.training.state.stateful import state_of

# Largest state of one object, and of all of them, that a rank sends at every save. Of others it sends a digest.
_MAX_OBJECT_BYTES: Final = 64 << 20
_MAX_SENT_BYTES: Final = 1 << 30
# Largest sum of what ranks are asked for because its digest differs: rank 0 takes it into its memory.
_MAX_WANTED_BYTES: Final = 2 << 30
_GRAIN_BYTES: Final = 16 << 20
"""Memory for the digest of a tensor."""
_SAMPLES: Final = 16
"""Elements of an object, each of another parameter, that are compared between ranks."""
_SAMPLE_TOLERANCE: Final = 0.05
"""Relative difference of replicas that is taken for rounding, of different devices in bfloat16."""
_SAMPLE_FLOOR: Final = 1e-6
_BUFFERS: Final = "buffers"
_BUFFERS_OF: Final = "buffers "
_RANDOM: Final = "random"
_OBJECT: Final = "object "


class BoundaryState(NamedTuple):
    """Generators, positions and epoch at the last boundary, which the next step or an evaluation changes."""

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
    digests: Mapping[str, tuple[str, int]] = MappingProxyType({})
    """Digest and size of what is too large to be sent unasked: ``object NAME``, or ``buffers NAME`` of one module."""
    weights: Mapping[str, tuple[str, tuple[float, ...]]] = MappingProxyType({})
    """Digest of names, shapes and dtypes of the parameters, and some elements, by module and optimizer."""

    def message(self) -> dict[str, Any]:
        """Return the plain value to send to other ranks."""
        return {**self._asdict(), "digests": dict(self.digests), "weights": dict(self.weights)}

    @classmethod
    def of(cls, message: Any) -> RankState:
        """Return the state that another rank has sent.

        Raises:
            ValueError: The message is something else.
        """
        try:
            states, problem, digests, weights = (message[field] for field in cls._fields)
        except (TypeError, LookupError):
            states = problem = digests = weights = None
        # Checked in depth: any process that reaches the port of torch's store can send this.
        if (
            not isinstance(states, dict)
            or not isinstance(problem, str)
            or not isinstance(digests, dict)
            or not isinstance(weights, dict)
            or not all(isinstance(name, str) for name in (*states, *digests, *weights))
            or not all(isinstance(one, tuple) and [*map(type, one)] == [str, int] for one in digests.values())
            or not all(
                isinstance(one, tuple) and [*map(type, one)] == [str, tuple] for one in weights.values()
            )
            or not all(type(element) is float for _, elements in weights.values() for element in elements)
            or not isinstance(states.get(_BUFFERS, {}), dict)
        ):
            raise ValueError(f"another rank must send its own state, got {type(message).__name__}")
        return cls(states, problem, digests, weights)

    def with_wanted(self, more: RankState) -> RankState:
        """Return the state with the content that this rank was asked for."""
        states = {**self.states, _BUFFERS: {**self.states.get(_BUFFERS, {})}}
        for key, state in more.states.items():
            _put(states, key, state)
        left = {key: one for key, one in self.digests.items() if key not in more.states}
        return RankState(states, self.problem or more.problem, left, self.weights)


class TooDifferent(ValueError):
    """Error: ranks differ in more than can be saved."""


def own_state(objects: Mapping[str, Any], at: BoundaryState | None = None) -> RankState:
    """Return the state of this rank's own, with generators and positions as of ``at``; None: as they are now.

    An error becomes its ``problem``, so that it reaches rank 0, which would otherwise wait for this rank in
    vain.
    """
    try:
        found: dict[str, Any] = {
            _RANDOM: stateful.random_states() if at is None else at.random,
            _BUFFERS: {},
        }
        earlier = {} if at is None else {f"{_OBJECT}{name}": state for name, state in at.positions.items()}
        digests, left_bytes = {}, _MAX_SENT_BYTES
        for key, now in _own_states(objects):
            state = earlier.get(key, now)
            size_bytes = sum(leaf.array.size_bytes for leaf in pack(state, key).leaves)
            if size_bytes > min(_MAX_OBJECT_BYTES, left_bytes):
                digests[key] = digest_of(state), size_bytes
            else:
                left_bytes -= size_bytes
                _put(found, key, state)
        # Packed here as a check, where an error becomes a problem that is sent: a rank that fails while it
        # sends lets the others wait in vain.
        pack(found, "state of one rank")
        return RankState(found, digests=digests, weights=_weights(objects))
    except Exception as error:
        return RankState({}, str(error) or type(error).__name__)


def wanted_states(objects: Mapping[str, Any], keys: Sequence[str]) -> RankState:
    """Return what this rank is asked for, by the keys of `RankState.digests`."""
    try:
        found = {key: state for key, state in _own_states(objects, keys) if key in keys}
        pack(found, "state of one rank")
        return RankState(found)
    except Exception as error:
        return RankState({}, str(error) or type(error).__name__)


def wanted(everybody: Sequence[RankState]) -> dict[int, list[str]]:
    """Return for each rank the keys of the digests that are not those of rank 0's content.

    Raises:
        TooDifferent: The content is too large to be sent, or the ranks have different weights; the message names it.
    """
    _check_weights(everybody)
    if not any(one.digests for one in everybody):
        return {}
    first = _digests(everybody[0])
    found = {
        rank: [key for key, (digest, _) in one.digests.items() if digest != first.get(key)]
        for rank, one in enumerate(everybody)
        if rank
    }
    sizes = {(rank, key): everybody[rank].digests[key][1] for rank, keys in found.items() for key in keys}
    if sum(sizes.values()) > _MAX_WANTED_BYTES:
        (rank, key), size_bytes = max(sizes.items(), key=lambda one: one[1])
        raise TooDifferent(
            f"the ranks differ in {sum(sizes.values()) >> 20} MiB of large objects, and at most "
            f"{_MAX_WANTED_BYTES >> 20} MiB can be saved: {key.replace(' ', ' of ', 1) if key.startswith(_BUFFERS) else key} "
            f"has {size_bytes >> 20} MiB on rank {rank} and is another on rank 0. Give an object for which rank 0's state "
            "is right on all ranks the attribute alike_on_ranks = True, or register a smaller one"
        )
    return {rank: keys for rank, keys in found.items() if keys}


def differing(everybody: list[RankState]) -> dict[str, Any]:
    """Return for each rank what is not equal to rank 0's.

    Raises:
        ValueError: A rank could not tell its state; the message names it.
    """
    for rank, one in enumerate(everybody):
        if one.problem:
            raise ValueError(f"rank {rank}: {one.problem}")
    # Compared by content, so that states that are equal on all ranks are stored once.
    first = _digests(everybody[0])
    for rank, one in enumerate(everybody):
        for key, (digest, _) in one.digests.items():
            if rank and digest != first.get(key):
                raise ValueError(f"rank {rank} has not sent its {key}, which is not that of rank 0")
    return {
        str(rank): {name: state for name, state in one.states.items() if digest_of(state) != first.get(name)}
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
            for path, buffer in objects[name].named_buffers():
                if path in buffers:
                    buffer.copy_(buffers[path])


def own_buffers(module: Any) -> dict[str, Any]:
    """Return the buffers of a module by path, on the host."""
    return {path: buffer.detach().cpu() for path, buffer in module.named_buffers() if not is_sharded(buffer)}


def _weights(objects: Mapping[str, Any]) -> dict[str, tuple[str, tuple[float, ...]]]:
    torch = sys.modules.get("torch")
    found = {}
    for name, value in objects.items():
        if getattr(value, "alike_on_ranks", False):
            continue
        if torch is not None and isinstance(value, torch.nn.Module):
            named = dict(value.named_parameters())
            bare = bare_names(named)
            parameters = {bare[key]: one for key, one in named.items()}
        else:
            parameters = {str(at): one for at, one in enumerate(parameters_of(value))}
        # What is sharded is compared by `shards.outline`; a lazy parameter has no shape yet.
        lazy = () if torch is None else torch.nn.parameter.UninitializedTensorMixin
        parameters = {
            key: one for key, one in parameters.items() if not is_sharded(one) and not isinstance(one, lazy)
        }
        if parameters:
            texts = (f"{key} {tuple(one.shape)} {one.dtype}" for key, one in parameters.items())
            digest = xxhash.xxh3_128("\n".join(texts).encode("utf-8", "surrogatepass")).hexdigest()
            found[name] = digest, _sample(list(parameters.values()))
    return found


def _sample(parameters: Sequence[Any]) -> tuple[float, ...]:
    """Return an element of each of some parameters."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    readable = [
        one
        for one in parameters
        if type(one) in (torch.Tensor, torch.nn.Parameter)
        and one.is_floating_point()
        and one.numel()
        and one.device.type != "meta"
    ]
    chosen = readable[:: -(-len(readable) // _SAMPLES) or 1]
    if not chosen:
        return ()
    # Put together on the device: each transfer waits for it.
    where = chosen[0].device
    elements = [one.detach()[_middle(one)].to(where, torch.float32) for one in chosen]
    return tuple(torch.stack(elements).tolist())


def _middle(tensor: Any) -> tuple[int, ...]:
    """Return the index of an element."""
    return tuple(size // 2 for size in tensor.shape)


def _check_weights(everybody: Sequence[RankState]) -> None:
    """Raise TooDifferent if a rank has other weights than rank 0, which cannot be saved for it."""
    first = everybody[0].weights if everybody else {}
    for rank, one in enumerate(everybody):
        for name in one.weights.keys() & first.keys():
            (outline, elements), (first_outline, first_elements) = one.weights[name], first[name]
            if outline != first_outline:
                what = "parameters of other names, shapes or dtypes"
            elif _differ(elements, first_elements):
                what = "other values in its parameters"
            else:
                continue
            raise TooDifferent(
                f"{name} has {what} on rank {rank} than on rank 0, and only replicas and DTensors can be saved: "
                "save stages of a pipeline with torch.distributed.checkpoint and ciuic.training.dcp.storage, or give "
                f"{name} the attribute alike_on_ranks = True if rank 0's state is right on all ranks"
            )


def _differ(elements: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether a quarter of the elements of two ranks differ, by more than rounding."""
    different = sum(
        not math.isclose(one, other, rel_tol=_SAMPLE_TOLERANCE, abs_tol=_SAMPLE_FLOOR)
        and not (math.isnan(one) and math.isnan(other))
        for one, other in zip(elements, others, strict=False)
    )
    return 4 * different > min(len(elements), len(others))


def _own_states(objects: Mapping[str, Any], keys: Sequence[str] | None = None) -> Iterator[tuple[str, Any]]:
    """Return the states of objects and the buffers of modules by key, those of ``keys`` at least."""
    for name, value in objects.items():
        if keys is None or f"{_OBJECT}{name}" in keys:
            state = _object_state(name, value)
            if state is not None:
                yield f"{_OBJECT}{name}", state
        elif f"{_BUFFERS_OF}{name}" not in keys:
            continue
        if _has_own_buffers(value) and (buffers := own_buffers(value)):
            yield f"{_BUFFERS_OF}{name}", buffers


def _put(states: dict[str, Any], key: str, state: Any) -> None:
    """Put the state of an object, or the buffers of a module, among those of a rank."""
    if key.startswith(_BUFFERS_OF):
        states[_BUFFERS][key.removeprefix(_BUFFERS_OF)] = state
    else:
        states[key] = state


def _object_state(name: str, value: Any) -> Any:
    torch = sys.modules.get("torch")
    # Optimizers and modules are alike under DDP: comparing them would mean reading the whole state at every
    # save.
    if getattr(value, "alike_on_ranks", False) or hasattr(value, "param_groups"):
        return None
    if torch is not None and isinstance(value, torch.nn.Module):
        return None
    state = state_of(value, name)
    # Each rank stores its own part of these (`snapshot_taker`).
    return None if contains_shards(state) else state


def _has_own_buffers(value: Any) -> bool:
    """Return whether the buffers of a module differ from rank to rank.

    A DDP wrapper tells whether it broadcasts them; a module registered without its wrapper cannot.
    """
    torch = sys.modules.get("torch")
    return (
        torch is not None
        and isinstance(value, torch.nn.Module)
        and not getattr(value, "broadcast_buffers", False)
        and not getattr(value, "alike_on_ranks", False)
    )


def _digests(one: RankState) -> dict[str, str]:
    """Return the digests of a rank's states, sent or not, by name; those of buffers also by module."""
    found = {name: digest_of(state) for name, state in one.states.items()}
    found |= {f"{_BUFFERS_OF}{name}": digest_of(own) for name, own in one.states.get(_BUFFERS, {}).items()}
    return found | {key: digest for key, (digest, _) in one.digests.items()}


def digest_of(state: Any) -> str:
    """Return a digest of a state: equal ones have the same values, shapes and dtypes."""
    packed = pack(state, "")
    whole = xxhash.xxh3_128(repr(packed.skeleton).encode("utf-8", "surrogatepass"))
    for leaf in packed.leaves:
        # dtype and shape too: the same bytes may be other numbers.
        whole.update(repr(leaf.array).encode())
        for part, size_bytes in _pieces(leaf):
            room = bytearray(size_bytes)
            ArrayBuffer(memoryview(room), leaf.array).fill(part)
            whole.update(room)
    return whole.hexdigest()


def _pieces(leaf: Leaf) -> Iterator[tuple[Any, int]]:
    """Return the tensor in rows that take little memory to copy, each with its size in bytes."""
    value, size_bytes = leaf.value, leaf.array.size_bytes
    while value.ndim > 1 and value.shape[0] == 1:
        value = value[0]
    if size_bytes <= _GRAIN_BYTES:
        if size_bytes:
            yield value, size_bytes
        return
    rows = value.shape[0]
    row_bytes = size_bytes // rows
    step = max(1, _GRAIN_BYTES // row_bytes)
    for start in range(0, rows, step):
        part = value[start : start + step]
        yield part, row_bytes * part.shape[0]
