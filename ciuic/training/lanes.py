"""Streams of our own on accelerators: how tensors on a device are copied to the host beside what the program computes.

Everything that is queued on a stream is done in its order, at some time. A `Lane` is one device: our stream there, and the stream on
which the program queues its work now. Whoever uses it decides which of the two has to wait for the other; nothing here lets the host wait
but `Mark.wait`. What a device without streams holds (Apple's) has no lane and is copied at once.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from typing import Any, Final, Protocol

from ciuic.training.arena import Arena
from ciuic.training.pinning import Bounce, pinned_by
from ciuic.training.tensors import copyable

_AT_ONCE_BYTES: Final = 64 << 20
"""Of a tensor that is not contiguous, whose elements are put in order on the device first."""


class Mark(Protocol):
    """A place in the order of a stream."""

    def done(self) -> bool:
        """Whether all before it is. RuntimeError where the device has failed."""

    def wait(self) -> None:
        """The host waits for all before it. RuntimeError."""


class Lane(Protocol):
    """One device. RuntimeError of all of it where the device has failed, or has no memory left."""

    def prepare(self, arena: Arena) -> None:
        """What the first copy to it would take time for; from any thread."""

    def follow(self) -> None:
        """What is queued on our stream from here on comes after everything that the program has queued by now."""

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        """Queues, on our stream, a copy of ``value`` to ``target``, which is in the memory of ``arena``."""

    def mark(self) -> Mark:
        """Of our stream."""

    def hold(self, mark: Mark) -> None:
        """What the program queues from here on comes after ``mark``. The host does not wait."""

    def clone(self, value: Any) -> Any:
        """A copy on the device, queued on the program's stream."""

    def digest(self, values: Sequence[Any]) -> Any:
        """Of each a number that any change of its bits is likely to change, queued on the program's stream."""

    def unequal(self, one: Any, other: Any) -> Any:
        """Two results of `digest` compared, queued on the program's stream; on the host after the next `mark`: `which` reads it."""

    def which(self, compared: Any) -> list[int]:
        """The places at which they were not equal."""

    def capturing(self) -> bool:
        """Whether what the program queues now is not done but recorded (CUDA graphs): then nothing may be asked or waited for."""

    def bits(self, value: Any) -> Hashable:
        """The memory that ``value`` looks at; equal for all that look at the same."""

    def version(self, value: Any) -> int:
        """Counts changes in place, as far as the framework knows of them."""


_LANES: dict[object, TorchLane | None] = {}
"""By device."""


def lane_of(value: Any) -> Lane | None:
    """The lane of the device that holds it; None for what is on the host, or on a device without streams."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
        return None
    device = value.device
    if device not in _LANES:
        _LANES[device] = _lane(torch, device)
    return _LANES[device]


def capturing() -> bool:
    """Whether the program records a CUDA graph just now: nothing of a device may be read then."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
    )


def _lane(torch: Any, device: Any) -> TorchLane | None:
    module = getattr(torch, device.type, None)
    if not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return None
    return TorchLane(torch, module, device)


class TorchLane:
    """Of any device type whose module has streams and events as torch.cuda has them."""

    def __init__(self, torch: Any, module: Any, device: Any) -> None:
        self._torch = torch
        self._module = module
        self._device = device
        self._stream = module.Stream(device=device)
        self._bounce = Bounce(torch)

    def prepare(self, arena: Arena) -> None:
        pinned_by(arena, self._device)

    def follow(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        target, value = copyable(target, value.detach())
        with self._module.stream(self._stream):
            if not pinned_by(arena, self._device):
                self._bounce.copy(target, value, self.mark)
                return
            if value.is_contiguous():
                target.copy_(value, non_blocking=True)
                return
            rows = max(1, int(value.shape[0] * _AT_ONCE_BYTES // max(1, target.nbytes))) if value.dim() else 1
            for at in range(0, value.shape[0] if value.dim() else 1, rows):
                part = slice(at, at + rows) if value.dim() else ...
                target[part].copy_(value[part], non_blocking=True)

    def mark(self) -> TorchMark:
        # Else the host spins while it waits.
        event = self._module.Event(blocking=True) if self._device.type == "cuda" else self._module.Event()
        event.record(self._stream)
        return TorchMark(event)

    def hold(self, mark: Mark) -> None:
        assert isinstance(mark, TorchMark)
        self._module.current_stream(self._device).wait_event(mark.event)

    def clone(self, value: Any) -> Any:
        return value.detach().clone()

    def digest(self, values: Sequence[Any]) -> Any:
        torch = self._torch
        with torch.no_grad():
            return torch.stack([_numbers(torch, value.detach()).sum(dtype=torch.int64) for value in values])

    def unequal(self, one: Any, other: Any) -> Any:
        torch = self._torch
        differs = one != other
        self.follow()
        try:
            on_host = torch.empty(differs.shape, dtype=torch.bool, pin_memory=True)
        except RuntimeError:
            on_host = torch.empty(differs.shape, dtype=torch.bool)
        with self._module.stream(self._stream):
            on_host.copy_(differs, non_blocking=True)
        return on_host, differs  # which must not be freed before it was read

    def which(self, compared: Any) -> list[int]:
        on_host, _ = compared
        return [int(at) for at in on_host.nonzero().flatten().tolist()]

    def capturing(self) -> bool:
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def bits(self, value: Any) -> Hashable:
        value = getattr(value, "_local_tensor", value)  # of a DTensor: it is saved by that
        return value.device, value.untyped_storage().data_ptr()

    def version(self, value: Any) -> int:
        return 0 if value.is_inference() else int(value._version)


class TorchMark:
    def __init__(self, event: Any) -> None:
        self.event = event

    def done(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()


def _numbers(torch: Any, value: Any) -> Any:
    """Its bits as integers, which add up to the same in any order."""
    if value.is_complex():
        value = torch.view_as_real(value)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(kinds[value.element_size()])
