"""Registered objects of a manager, saved with every snapshot and watched for boundaries and positions."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from typing import Any

from ciuic.training.format.shards import (
    TemplateLookup,
    are_sharded,
    contains_shards,
    parameters_of,
    template_lookup,
)
from ciuic.training.format.structure import check_values
from ciuic.training.logs import log, warn_once
from ciuic.training.state.boundaries import Boundaries, Passes
from ciuic.training.state.data_position import Position, is_plain_loader
from ciuic.training.state.rank_state import digest_of
from ciuic.training.state.stateful import copied, is_loader, is_module, state_access, state_of


class Registered:
    """Objects by name."""

    def __init__(self, boundaries: Boundaries, watch_optimizer: Callable[[Any], None]) -> None:
        """Begin without any object.

        Args:
            boundaries: Watches optimizers, their companions and loaders.
            watch_optimizer: Called with each optimizer.
        """
        self.objects: dict[str, Any] = {}
        self.position: Position | None = None
        """Position of the loader that cannot tell its own."""
        self.passes: Passes | None = None
        """Passes over the loader that tells its own position."""
        self.has_position = False
        """True if any object knows where the run is in its data."""
        self._companions: set[str] = set()
        self._taken: set[str] = set()
        """Names of the objects that are not watched."""
        self._boundaries = boundaries
        self._watch_optimizer = watch_optimizer
        self._originals: dict[str, Any] = {}
        """Objects as they were registered.

        In ``objects`` a loader without a state is replaced by its position.
        """

    def add(self, name: str, value: Any) -> None:
        """Register an object and watch it.

        Raises:
            ValueError: The name cannot be used.
            TypeError: The object has no state, or one with a value that cannot be stored.
        """
        # `values` is the object with the manager's own values (`snapshot_taker.VALUES`).
        if not name.isidentifier() or name == "values":
            raise ValueError(f"the name of an object must be an identifier other than 'values', got {name!r}")
        if name in self.objects and (self.objects[name] is value or self._originals.get(name) is value):
            return
        # An object that takes the place of another (the optimizer of another stage) is watched instead of it,
        # unless the earlier one is registered under a second name.
        before = self._originals.pop(name, None)
        if before is not None and all(one is not before for one in self._originals.values()):
            self._boundaries.forget(before)
        self._companions.discard(name)
        self.objects[name] = self._watched(name, value)
        self._originals[name] = value

    def take(self, objects: Mapping[str, Any], *, with_position: bool) -> None:
        """Register objects without watching them, in place of those that an earlier call has registered.

        Raises:
            TypeError: An object has no state.
        """
        for name, value in objects.items():
            state_access(value, name)
        for name in self._taken - objects.keys():
            del self.objects[name]
        self.objects.update(objects)
        self._taken = set(objects)
        self.has_position = self.has_position or with_position

    def states(self) -> dict[str, Any]:
        """Return the states of all objects; their tensors are the program's own, not copies."""
        return {name: state_of(value, name) for name, value in self.objects.items()}

    def templates(self) -> dict[str, TemplateLookup]:
        """Return the templates of the objects of which this rank has a part."""
        states = {name: (value, state_of(value, name)) for name, value in self.objects.items()}
        return {
            name: template_lookup(value, state)
            for name, (value, state) in states.items()
            if are_sharded([value]) or contains_shards(state)
        }

    def positions(self) -> dict[str, Any]:
        """Return the states of the positions that are counted here."""
        return {name: one.state_dict() for name, one in self.objects.items() if isinstance(one, Position)}

    def drawn_from(self) -> dict[str, Any]:
        """Return copies of the states of what the program may change for the next step before that begins: generators, positions, dicts and the like.

        Not of modules, optimizers and their companions, which belong to the step before.
        """
        return {
            name: copied(state_of(value, name))
            for name, value in self.objects.items()
            if name not in self._companions and not is_module(value) and not hasattr(value, "param_groups")
        }

    def warn_of_changes(self, earlier: Mapping[str, Any]) -> None:
        """Warn of what has changed since `drawn_from` and may belong to the step before.

        Not of generators, samplers and loaders: the program has drawn from them for the next step.
        """
        names = [
            name
            for name, state in earlier.items()
            if not _is_drawn_from(value := self.objects[name])
            and digest_of(state) != digest_of(state_of(value, name))
        ]
        if names:
            warn_once(
                f"{', '.join(names)}: changed between optimizer.step() and the next forward pass, and saved as after "
                "optimizer.step(); if the change belongs to that step, call manager.boundary() after it"
            )

    def epoch(self, given: int | None) -> int | None:
        """Return the current pass over the data, counted from 0.

        If passes are not counted, or if a loader tells its position and the program gave an epoch, return ``given``.
        """
        if self.position is not None and self.position.passes:
            return self.position.passes - 1
        if given is None and self.passes is not None and self.passes.passes:
            return self.passes.passes - 1
        return given

    def _watched(self, name: str, value: Any) -> Any:
        """Watch an object; return it, or the position that is counted for it."""
        boundaries = self._boundaries
        # An integration may have made the position itself.
        if isinstance(value, Position):
            value.watch(boundaries, name)
            self.position, self.has_position = value, True
            return value
        if is_plain_loader(value):
            self.position, self.has_position = Position(value), True
            self.position.watch(boundaries, name)
            return self.position
        # Raises for what has no state, before anything of the object is changed.
        state_access(value, name)
        _check_values(value, name)
        # FSDP1 has flat parameters: a rank's part of them is no block of any tensor of the model.
        # Within another module, compiled, or known to an optimizer alone, too: torch marks each of its parameters.
        if any(getattr(one, "_fsdp_flattened", False) for one in parameters_of(value)):
            raise TypeError(
                f"{name} has parameters of a FullyShardedDataParallel, whose parts cannot be assigned to ranks: "
                "use fully_shard (FSDP2), or ciuic.training.dcp.storage"
            )
        if hasattr(value, "param_groups"):
            boundaries.watch_optimizer(value)
            self._watch_optimizer(value)
        # A StatefulDataLoader or nodes.Loader, which has a state of its own.
        elif is_loader(value):
            passes = Passes()
            if boundaries.watch_loader(value, passes):
                self.passes, self.has_position = passes, True
        # Averages of weights are modules with `update_parameters`; schedulers and scalers are no modules.
        elif (
            hasattr(value, "update_parameters") or not hasattr(value, "forward")
        ) and boundaries.watch_companion(value):
            self._companions.add(name)
        elif is_module(value):
            boundaries.watch_module(value)
        return value


def _is_drawn_from(value: Any) -> bool:
    """Return whether a value is a generator of random numbers, or of samples."""
    has_own = any(hasattr(value, name) for name in ("bit_generator", "getstate", "get_state", "__next__"))
    # The position in a loader moves when a batch is read ahead.
    return (
        has_own
        or isinstance(value, Position)
        or (hasattr(value, "__iter__") and not isinstance(value, dict | list))
    )


def _check_values(value: Any, name: str) -> None:
    """Raise Unsaveable if the state of an object has a value that cannot be stored.

    Only where asking for the state is free of effects. A loader may start its workers for it, a Keras model
    copies its weights, and with several ranks it may be a collective call. Those are checked by the first save.
    """
    distributed = sys.modules.get("torch.distributed")
    together = distributed is not None and distributed.is_available() and distributed.is_initialized()
    if together or hasattr(value, "get_weights") or is_loader(value):
        return
    try:
        state = state_of(value, name)
    # An object may have no state before its first step; what is wrong with it the first save says.
    except Exception as error:
        log.debug("ciuic: the state of %s cannot be checked yet: %s", name, error)
        return
    check_values(state, name)
