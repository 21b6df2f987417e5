"""What a manager knows by name: what is saved with every snapshot, and what tells of boundaries and of the position in the data."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ciuic.training.boundaries import Boundaries
from ciuic.training.positions import Position, is_plain_loader
from ciuic.training.shards import Like, are_sharded, contains_shards, likes_of
from ciuic.training.stateful import state_of, way_of


class Registered:
    def __init__(self, boundaries: Boundaries, watch_optimizer: Callable[[Any], None]) -> None:
        """``watch_optimizer``: called with each."""
        self.objects: dict[str, Any] = {}
        self.position: Position | None = None
        """Of a loader that cannot tell its own."""
        self.has_position = False
        """Whether any of them knows where the run is in its data."""
        self._boundaries = boundaries
        self._watch_optimizer = watch_optimizer
        self._given: dict[str, Any] = {}
        """What was registered: for a loader that is counted its position stands in ``objects``."""

    def add(self, name: str, value: Any) -> None:
        """And watches it. ValueError; TypeError for what has no state."""
        if not name.isidentifier() or name == "values":
            raise ValueError(f"{name!r} cannot be the name of an object")
        if name in self.objects and (self.objects[name] is value or self._given.get(name) is value):
            return
        before = self._given.pop(name, None)
        if before is not None and all(one is not before for one in self._given.values()):
            self._boundaries.forget(before)  # another one takes its place
        self.objects[name] = self._known(name, value)
        self._given[name] = value

    def take(self, objects: Mapping[str, Any], *, with_position: bool) -> None:
        """Without watching anything. TypeError."""
        for name, value in objects.items():
            way_of(value, name)
        self.objects.update(objects)
        self.has_position = self.has_position or with_position

    def states(self) -> dict[str, Any]:
        """Of each, as it is; tensors are its own."""
        return {name: state_of(value, name) for name, value in self.objects.items()}

    def likes(self) -> dict[str, Like]:
        """Of objects of which this rank has a part: which."""
        states = {name: (value, state_of(value, name)) for name, value in self.objects.items()}
        return {
            name: likes_of(value, state)
            for name, (value, state) in states.items()
            if are_sharded([value]) or contains_shards(state)
        }

    def positions(self) -> dict[str, Any]:
        """The states of those that are counted here."""
        return {name: one.state_dict() for name, one in self.objects.items() if isinstance(one, Position)}

    def epoch(self, given: int | None) -> int | None:
        """The pass it is in, counted from 0, if passes are counted; else ``given``."""
        if self.position is not None and self.position.passes:
            return self.position.passes - 1
        return given

    def _known(self, name: str, value: Any) -> Any:
        """What is registered for it: the object, or the position that is counted for it."""
        boundaries = self._boundaries
        if isinstance(value, Position):
            value.tell(boundaries.asked, boundaries.ended)
            self.position, self.has_position = value, True
            return value
        if is_plain_loader(value):
            self.position, self.has_position = Position(value, boundaries.asked, boundaries.ended), True
            return self.position
        way_of(value, name)
        if type(value).__name__ == "FullyShardedDataParallel":
            raise TypeError(
                f"{name} is a FullyShardedDataParallel, of which no rank can tell its part: use fully_shard (FSDP2), or ciuic.training.dcp"
            )
        if hasattr(value, "param_groups"):
            boundaries.watch_optimizer(value)
            self._watch_optimizer(value)
        elif hasattr(value, "__iter__") and hasattr(value, "dataset"):
            self.has_position = boundaries.watch_loader(value) or self.has_position
        elif hasattr(value, "update_parameters") or not hasattr(value, "forward"):
            boundaries.watch_follower(value)
        return value
