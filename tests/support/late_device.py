"""Simulated device that works late: a test decides when a stream's queue runs.

A copy reads its source when it runs, so a missing wait gives a snapshot with parts of another step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import numpy as np

from ciuic.training.arena import Arena

Choose = Callable[[int], int]
"""Function from a number of possibilities to the chosen index."""


class Stream:
    """FIFO queue of work."""

    def __init__(self) -> None:
        self.waiting: list[tuple[Callable[[], None], list[Mark]]] = []
        self.queued = 0
        self.ran = 0
        self._before_next: list[Mark] = []

    def add(self, work: Callable[[], None]) -> None:
        self.waiting.append((work, self._before_next))
        self._before_next = []
        self.queued += 1

    def wait_for(self, mark: Mark) -> None:
        self._before_next = [*self._before_next, mark]

    def can_run(self) -> bool:
        return bool(self.waiting) and all(mark.reached() for mark in self.waiting[0][1])

    def run_one(self) -> None:
        work, _ = self.waiting.pop(0)
        work()
        self.ran += 1


class Mark:
    def __init__(self, device: Device, stream: Stream) -> None:
        self._device = device
        self._stream = stream
        self._at = stream.queued

    def done(self) -> bool:
        if self._device.broken:
            raise RuntimeError("the device is broken")
        if self._device.goes_on:
            self._device.run_some()
        return self.reached()

    def reached(self) -> bool:
        return self._stream.ran >= self._at

    def wait(self) -> None:
        while not self.done():
            self._device.run_one(prefer=self._stream)


class Parameter:
    """Array with the interface that an optimizer needs."""

    def __init__(self, array: Any, *, requires_grad: bool) -> None:
        self.array = array
        self.requires_grad = requires_grad


_DEVICES: dict[int, tuple[Device, Any]] = {}
"""Map from the id of an array to its device and the array, which keeps the id taken.

Only the device's work may touch the memory.
"""


class Device:
    """Simulated device, and the lane on it (`ciuic.training.device_copy`)."""

    def __init__(self, choose: Choose) -> None:
        self.program, self.ours = Stream(), Stream()
        self.broken = self.full = self.records = False
        self.goes_on = False
        """True if the device works also while the program only queries its progress."""
        self.versions: Counter[int] = Counter()
        """Changes in place that the framework knows of, by the id of the array."""
        self._choose = choose

    def array(self, values: Any) -> Any:
        """Return an array in the device's memory."""
        made = np.array(values)
        _DEVICES[id(made)] = self, made
        return made

    def run_one(self, prefer: Stream | None = None) -> bool:
        """Run one piece of work; return False if there is none."""
        able = [stream for stream in (self.program, self.ours) if stream.can_run()]
        if not able:
            assert not [*self.program.waiting, *self.ours.waiting], "the streams wait for each other"
            return False
        (prefer if prefer in able and prefer else able[self._choose(len(able))]).run_one()
        return True

    def run_some(self) -> None:
        for _ in range(self._choose(8)):
            self.run_one()

    def run_all(self) -> None:
        while self.run_one():
            pass

    # -- the lane

    def prepare(self, arena: Arena) -> None: ...

    def follow(self) -> None:
        self.ours.wait_for(Mark(self, self.program))

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        self._check()
        self.ours.add(lambda: np.copyto(target, value))

    def mark(self) -> Mark:
        self._check()
        return Mark(self, self.ours)

    def hold(self, mark: Any) -> None:
        self._check()
        self.program.wait_for(mark)

    def clone(self, value: Any) -> Any:
        self._check(takes_memory=True)
        made = self.array(np.zeros_like(value))
        self.program.add(lambda: np.copyto(made, value))
        return made

    def digest(self, values: Sequence[Any]) -> Any:
        self._check(takes_memory=True)
        result: list[int] = []
        self.program.add(lambda: result.extend(hash(one.tobytes()) for one in values))
        return result

    def unequal(self, one: Any, other: Any) -> Any:
        on_device: list[bool] = []
        self.program.add(lambda: on_device.extend(a != b for a, b in zip(one, other, strict=True)))
        self.ours.wait_for(Mark(self, self.program))
        on_host: list[bool] = []
        self.ours.add(lambda: on_host.extend(on_device))
        return on_host

    def which(self, compared: Any) -> list[int]:
        assert compared, "it was read before it was there"
        return [at for at, differs in enumerate(compared) if differs]

    def capturing(self) -> bool:
        return self.records

    def bits(self, value: Any) -> Hashable:
        return id(value.array if isinstance(value, Parameter) else value)

    def version(self, value: Any) -> int:
        return self.versions[id(value)]

    def _check(self, *, takes_memory: bool = False) -> None:
        if self.broken or (takes_memory and self.full):
            raise RuntimeError("the device is broken" if self.broken else "out of memory")


def lane_of(value: Any) -> Any:
    """Return the lane, in place of `ciuic.training.device_copy.device_stream_of`."""
    return _DEVICES.get(id(value.array if isinstance(value, Parameter) else value), (None, None))[0]
