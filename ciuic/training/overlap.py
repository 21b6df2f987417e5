"""A state on its way from devices into an arena, while the program goes on computing: what has to wait for what.

Guarantees: what `Copying` calls done and unchanged is the state at the moment in which it began, whatever the program has queued since.
The host does not wait, and a device holds no second copy of the state.

=====================================================  ==================================================================
what may change before it is read                      what is done
=====================================================  ==================================================================
nothing before its optimizer's next step: parameters   copied beside forward and backward; that step waits, on the device
that it trains, and its own state
all else (buffers, averages, what is frozen), small    cloned on the device, at most 64 MiB of it, and copied from there
all else, large                                        the program's stream waits for its copy
=====================================================  ==================================================================

That weights change by their optimizer alone is not believed but watched: the framework's counts of changes in place at every save,
and digests of their bits, of all of them in the first saves, of some in each later one. What was found changed under a copy makes that
copy void, and is waited for from then on.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from ciuic.training.arena import Arena
from ciuic.training.lanes import Lane, Mark, capturing, lane_of
from ciuic.training.tensors import Place

_CLONE_BYTES: Final = 64 << 20
"""On each device."""
_FULL_CHECKS: Final = 2
_SAMPLE: Final = 32
"""Digests cost two small kernels each."""


class Item(NamedTuple):
    """A tensor on a device and where it goes."""

    name: str
    place: Place
    value: Any
    size_bytes: int


class Overlap:
    """Which tensors of a program may be copied beside its next step."""

    def __init__(self, lane_of: Callable[[Any], Lane | None] = lane_of) -> None:
        self.lane_of = lane_of
        self.enabled = True
        """Else all is waited for, on the device."""
        self.before_step: Callable[[], None] = lambda: None
        """Called before each step of an optimizer that is watched: its weights are about to change."""
        self.changed_under_copy: set[str] = set()
        """Not to be copied beside anything any more."""
        self._optimizers: dict[int, Any] = {}
        self._stepped: set[int] = set()
        self._full_checks = _FULL_CHECKS
        self._next = 0

    def watch(self, optimizer: Any) -> None:
        """By its own hook (torch 2.0 and later); without one it is waited for."""
        register = getattr(optimizer, "register_step_pre_hook", None)
        if register is not None and id(optimizer) not in self._optimizers:
            self._optimizers[id(optimizer)] = optimizer
            register(self._before_step)

    def boundary(self) -> None:
        """A step is over. An optimizer that does not tell of the next one (its steps are replayed as a CUDA graph) is not trusted."""
        self._stepped.clear()

    def trained(self) -> set[Hashable]:
        """The memory that changes in a step that will tell, and nowhere else."""
        found: set[Hashable] = set()
        for number, optimizer in self._optimizers.items():
            if self.enabled and number in self._stepped:
                for value in _of_optimizer(optimizer):
                    lane = self.lane_of(value)
                    if lane is not None:
                        found.add(lane.bits(value))
        return found

    def checked(self, count: int) -> list[int]:
        """Of so many tensors those that are to be looked at this time."""
        if self._full_checks > 0 or count <= _SAMPLE:
            self._full_checks -= 1
            return list(range(count))
        first, self._next = self._next, (self._next + _SAMPLE) % count
        return sorted((first + at) % count for at in range(_SAMPLE))

    def distrust(self, names: Sequence[str]) -> None:
        """They were changed by something else than a step, and who knows what else was."""
        self.changed_under_copy |= set(names)
        self._full_checks = _FULL_CHECKS

    def _before_step(self, optimizer: Any, *_: object) -> None:
        if not capturing():
            self._stepped.add(id(optimizer))
        self.before_step()


class Copying:
    """One state. RuntimeError of its methods is the device's."""

    def __init__(self, arena: Arena, items: Sequence[Item], overlap: Overlap, *, beside: bool) -> None:
        """Queues the copies. ``beside``: the program may go on meanwhile as far as that is safe; else what it queues waits for all of
        it."""
        self._lanes: list[_OnLane] = []
        self._settled = False
        self._lost = ""
        trained = overlap.trained() if beside else set()
        by_lane: dict[int, tuple[Lane, list[Item]]] = {}
        for item in items:
            lane = overlap.lane_of(item.value)
            assert lane is not None
            by_lane.setdefault(id(lane), (lane, []))[1].append(item)
        try:
            for lane, on_lane in by_lane.values():
                self._lanes.append(_OnLane(lane))
                self._lanes[-1].begin(arena, on_lane, overlap, trained, beside=beside)
        except BaseException:
            # Nothing may be written there any more when the arena is used again.
            for one in self._lanes:
                with suppress(RuntimeError):
                    one.lane.mark().wait()
            raise
        if not any(one.trained for one in self._lanes):
            self.settle()

    def settle(self) -> None:
        """From here on the program may queue what changes the state. Does not fail: what cannot be made sure makes the copy void."""
        if self._settled:
            return
        self._settled = True
        for one in self._lanes:
            try:
                one.settle()
            except RuntimeError as error:
                self._lost = self._lost or str(error)

    def done(self) -> bool:
        """Whether nothing of it is under way any more. Not to be asked while a CUDA graph is recorded."""
        if not all(mark.done() for mark in self._marks()):
            return False
        # All has been read, so nothing waits for it; whether it was changed meanwhile is still to be seen.
        self.settle()
        return all(mark.done() for mark in self._marks())

    def wait(self) -> None:
        """Settles it, and the host waits."""
        self.settle()
        for mark in self._marks():
            mark.wait()

    def changed(self) -> list[str]:
        """When it is done: what was changed while it was copied."""
        return [name for one in self._lanes for name in one.changed()]

    @property
    def void(self) -> str:
        """Why it is, or ""; when it is done."""
        if self._lost:
            return f"its copy from the device is not certain: {self._lost}"
        if changed := self.changed():
            return f"{changed[0]} was changed between two steps while it was copied; from now on the device waits for what changes so"
        return ""

    def _marks(self) -> Iterator[Mark]:
        for one in self._lanes:
            yield from one.marks


class _OnLane:
    """The part of a state that is on one device."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self.marks: list[Mark] = []
        self.trained: list[Item] = []
        self._kept: list[Any] = []
        """Memory that is not to be given to somebody else before it was read."""
        self._copied: Mark | None = None
        self._versions: list[int] = []
        self._checked: list[int] = []
        self._opening: Any = None
        self._compared: Any = None
        self._changed: set[str] = set()

    def begin(
        self,
        arena: Arena,
        items: Sequence[Item],
        overlap: Overlap,
        trained: set[Hashable],
        *,
        beside: bool,
    ) -> None:
        lane = self.lane
        self._kept += [item.value for item in items]
        self.trained = [
            item
            for item in items
            if item.name not in overlap.changed_under_copy and lane.bits(item.value) in trained
        ]
        if not self._watch(overlap):
            self.trained = []
        names = {item.name for item in self.trained}
        others = [item for item in items if item.name not in names]
        clones = self._cloned(others) if beside else []
        names = {item.name for item in clones}
        lane.follow()
        rest = [item for item in others if item.name not in names]
        if rest:
            self._copy(arena, rest)
            lane.hold(self.marks[-1])
        if clones or self.trained:
            self._copy(arena, [*clones, *self.trained])
            self._copied = self.marks[-1]

    def _copy(self, arena: Arena, items: Sequence[Item]) -> None:
        for item in items:
            self.lane.copy(arena, item.place.target(item.value), item.value)
        self.marks.append(self.lane.mark())

    def _cloned(self, items: Sequence[Item]) -> list[Item]:
        """The small ones of them, as they are now."""
        clones: list[Item] = []
        left = _CLONE_BYTES
        for item in sorted(items, key=lambda item: item.size_bytes):
            left -= item.size_bytes
            if left < 0:
                break
            try:
                clones.append(item._replace(value=self.lane.clone(item.value)))
            except RuntimeError:
                break  # no memory left: waited for, then
        self._kept += [item.value for item in clones]
        return clones

    def _watch(self, overlap: Overlap) -> bool:
        """Whether it will be known if somebody changes them."""
        if not self.trained:
            return False
        self._versions = [self.lane.version(item.value) for item in self.trained]
        self._checked = overlap.checked(len(self.trained))
        try:
            self._opening = self.lane.digest([self.trained[at].value for at in self._checked])
        except RuntimeError:
            return False  # no memory left
        return True

    def settle(self) -> None:
        if self._copied is None or not self.trained:
            return
        lane = self.lane
        if lane.capturing():
            raise RuntimeError("a CUDA graph was recorded meanwhile")
        for item, version in zip(self.trained, self._versions, strict=True):
            if lane.version(item.value) != version:
                self._changed.add(item.name)
        closing = lane.digest([self.trained[at].value for at in self._checked])
        self._compared = lane.unequal(self._opening, closing)
        self.marks.append(lane.mark())
        lane.hold(self._copied)

    def changed(self) -> list[str]:
        if self._compared is not None:
            found = self.lane.which(self._compared)
            self._changed |= {self.trained[self._checked[at]].name for at in found}
        return sorted(self._changed)


def _of_optimizer(optimizer: Any) -> Iterator[Any]:
    """The tensors that its step changes: the parameters that have gradients, and what it keeps of each."""
    for group in optimizer.param_groups:
        yield from (one for one in group["params"] if getattr(one, "requires_grad", False))
    for of_one in optimizer.state.values():
        yield from of_one.values() if isinstance(of_one, dict) else ()
