"""Streams of our own on accelerators, and page-locked memory: copies of tensors to the host beside the program's computation.

Work that is queued on a stream is done in its order, at some time. A `DeviceStream` stands for one device:
our stream there, and the stream on which the program queues its work now. Its user decides which of the two
waits for the other; only `StreamEvent.wait` lets the host wait. A device without streams (Apple's) has none
of these, and its tensors are copied at once.

A device writes by itself to page-locked memory only: a copy to other memory does not run beside the program, because
the driver lets the host wait for it. An arena is locked once; where that is refused, copies pass through a small
buffer that is.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Final, Protocol

from ciuic.training.arena import Arena
from ciuic.training.format.tensors import copyable
from ciuic.training.logs import log

_BOUNCE_BYTES: Final = 32 << 20
# cudaHostRegisterPortable: page-locked for all devices.
_PORTABLE: Final = 1


# Piece of a tensor that is not contiguous: its elements are put in order on the device first, which takes
# memory there.
_AT_ONCE_BYTES: Final = 64 << 20


class StreamEvent(Protocol):
    """A position in the order of a stream."""

    def done(self) -> bool:
        """Return whether all work before it is done.

        Raises:
            RuntimeError: The device has failed.
        """

    def wait(self) -> None:
        """Let the host wait for all work before it.

        Raises:
            RuntimeError: The device has failed.
        """


class DeviceStream(Protocol):
    """A device. All methods raise RuntimeError where the device has failed or has no memory left."""

    def prepare(self, arena: Arena) -> None:
        """Do what would delay the first copy into an arena; callable from any thread."""

    def follow(self) -> None:
        """Let our stream wait for everything that the program has queued by now."""

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        """Queue on our stream a copy of ``value`` to ``target``, which is in the memory of ``arena``."""

    def mark(self) -> StreamEvent:
        """Return the current end of our stream."""

    def hold(self, mark: StreamEvent) -> None:
        """Let whatever the program queues from here on wait for ``mark``. The host does not wait."""

    def clone(self, value: Any) -> Any:
        """Return a copy on the device, queued on the program's stream."""

    def digest(self, values: Sequence[Any]) -> Any:
        """Return one number per tensor that changes when its bits do, queued on the program's stream.

        Another content may have the same number, but is unlikely to.
        """

    def unequal(self, one: Any, other: Any) -> Any:
        """Compare two results of `digest`, queued on the program's stream.

        `which` can read the result after the next `mark`.
        """

    def which(self, compared: Any) -> list[int]:
        """Return the positions at which the digests differed."""

    def capturing(self) -> bool:
        """Return whether the program records a CUDA graph: then nothing may be queried or waited for."""

    def bits(self, value: Any) -> Hashable:
        """Return the identity of the memory behind a tensor; equal for all tensors on the same memory."""

    def version(self, value: Any) -> int:
        """Return the framework's count of changes in place."""


_STREAMS: dict[object, TorchDeviceStream | None] = {}
"""Streams by device; None for a device without streams."""


def device_stream_of(value: Any) -> DeviceStream | None:
    """Return the stream of the device that holds a tensor.

    There is none on the host, and on a device without streams.
    """
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(value, torch.Tensor) or value.device.type in ("cpu", "meta"):
        return None
    device = value.device
    if device not in _STREAMS:
        _STREAMS[device] = _new_stream(torch, device)
    return _STREAMS[device]


def capturing() -> bool:
    """Return whether the program records a CUDA graph now: then nothing on a device may be read."""
    torch = sys.modules.get("torch")
    return (
        torch is not None and torch.cuda.is_initialized() and bool(torch.cuda.is_current_stream_capturing())
    )


def _new_stream(torch: Any, device: Any) -> TorchDeviceStream | None:
    module = getattr(torch, device.type, None)
    # By what the module offers and not by its name: any device with streams like torch.cuda's will do.
    # Apple's has none.
    if not all(hasattr(module, name) for name in ("Stream", "Event", "stream", "current_stream")):
        return None
    return TorchDeviceStream(torch, module, device)


class TorchDeviceStream:
    """Stream of any device type whose torch module has streams and events as torch.cuda has them."""

    def __init__(self, torch: Any, module: Any, device: Any) -> None:
        """Create our stream on a device."""
        self._torch = torch
        self._module = module
        self._device = device
        self._stream = module.Stream(device=device)
        self._bounce = _Bounce(torch)

    def prepare(self, arena: Arena) -> None:
        """Page-lock the arena."""
        pinned_by(arena, self._device)

    def follow(self) -> None:
        """Let our stream wait for the program's."""
        self._stream.wait_stream(self._module.current_stream(self._device))

    def copy(self, arena: Arena, target: Any, value: Any) -> None:
        """Queue a copy; one into memory that is not page-locked is done on return."""
        target, value = copyable(target, value.detach())
        with self._module.stream(self._stream):
            if not pinned_by(arena, self._device):
                self._bounce.copy(target, value, self.mark)
                return
            if value.is_contiguous():
                target.copy_(value, non_blocking=True)
                return
            # In rows, because a copy of other strides needs a contiguous one on the device first.
            rows = max(1, int(value.shape[0] * _AT_ONCE_BYTES // max(1, target.nbytes))) if value.dim() else 1
            for at in range(0, value.shape[0] if value.dim() else 1, rows):
                part = slice(at, at + rows) if value.dim() else ...
                target[part].copy_(value[part], non_blocking=True)

    def mark(self) -> _TorchStreamEvent:
        """Return an event at the end of our stream."""
        # Without `blocking` the host spins while it waits for a CUDA event.
        event = self._module.Event(blocking=True) if self._device.type == "cuda" else self._module.Event()
        event.record(self._stream)
        return _TorchStreamEvent(event)

    def hold(self, mark: StreamEvent) -> None:
        """Let the program's stream wait for an event."""
        assert isinstance(mark, _TorchStreamEvent)
        self._module.current_stream(self._device).wait_event(mark.event)

    def clone(self, value: Any) -> Any:
        """Return a copy on the device."""
        return value.detach().clone()

    def digest(self, values: Sequence[Any]) -> Any:
        """Return the sum of the bits of each tensor, taken as integers."""
        torch = self._torch
        with torch.no_grad():
            return torch.stack(
                [_as_integers(torch, value.detach()).sum(dtype=torch.int64) for value in values]
            )

    def unequal(self, one: Any, other: Any) -> Any:
        """Compare digests on the device, and queue the copy of the result to the host."""
        torch = self._torch
        # Computed on the program's stream, and copied to the host on ours.
        differs = one != other
        self.follow()
        # Without page-locked memory the copy still is right, but the host waits for it.
        try:
            on_host = torch.empty(differs.shape, dtype=torch.bool, device="cpu", pin_memory=True)
        except RuntimeError:
            on_host = torch.empty(differs.shape, dtype=torch.bool, device="cpu")
        with self._module.stream(self._stream):
            on_host.copy_(differs, non_blocking=True)
        return on_host, differs  # `differs` must not be freed before the copy has read it.

    def which(self, compared: Any) -> list[int]:
        """Return the positions at which the digests differed."""
        on_host, _ = compared
        return [int(at) for at in on_host.nonzero().flatten().tolist()]

    def capturing(self) -> bool:
        """Return whether the program records a graph on this kind of device now."""
        ask = getattr(self._module, "is_current_stream_capturing", None)
        return ask is not None and bool(ask())

    def bits(self, value: Any) -> Hashable:
        """Return device and address of the storage."""
        # A DTensor is saved as its local tensor.
        value = getattr(value, "_local_tensor", value)
        return value.device, value.untyped_storage().data_ptr()

    def version(self, value: Any) -> int:
        """Return torch's version counter; 0 for tensors of inference mode, which have none."""
        return 0 if value.is_inference() else int(value._version)


class _TorchStreamEvent:
    """Event of torch on our stream."""

    def __init__(self, event: Any) -> None:
        """Wrap an event that was recorded already."""
        self.event = event

    def done(self) -> bool:
        """Return whether all work before the event is done."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Let the host wait for the event."""
        self.event.synchronize()


def _as_integers(torch: Any, value: Any) -> Any:
    """Return the bits of a tensor as integers: their sum is the same in any order, unlike that of floats."""
    if value.is_complex():
        value = torch.view_as_real(value)
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return value.view(kinds[value.element_size()])


class _Bounce:
    """Two small page-locked buffers: the device fills one while the host empties the other."""

    def __init__(self, torch: Any) -> None:
        """Allocate nothing before the first copy."""
        self._torch = torch
        self._buffers: list[Any] | None = None

    def copy(self, target: Any, value: Any, mark: Callable[[], StreamEvent]) -> None:
        """Copy a tensor on the current stream; the copy is done on return.

        Args:
            target: Destination on the host.
            value: Tensor on the device.
            mark: Returns an event at the end of the current stream.
        """
        buffers = self._buffers = self._buffers or self._made()
        if not buffers or not value.is_contiguous() or value.element_size() > 8 or not value.numel():
            target.copy_(value)
            return
        torch = self._torch
        into, source = target.view(-1).view(torch.uint8), value.view(-1).view(torch.uint8)
        before: tuple[StreamEvent, Any, Any] | None = None
        for number, at in enumerate(range(0, into.numel(), _BOUNCE_BYTES)):
            here = into[at : at + _BOUNCE_BYTES]
            buffer = buffers[number % 2][: here.numel()]
            buffer.copy_(source[at : at + _BOUNCE_BYTES], non_blocking=True)
            filled = mark()
            # Empty the other buffer while the device fills this one.
            _empty(before)
            before = filled, here, buffer
        _empty(before)

    def _made(self) -> list[Any]:
        try:
            return [
                self._torch.empty(_BOUNCE_BYTES, dtype=self._torch.uint8, device="cpu", pin_memory=True)
                for _ in "ab"
            ]
        except RuntimeError:
            return []


def _empty(full: tuple[StreamEvent, Any, Any] | None) -> None:
    if full is not None:
        filled, here, buffer = full
        filled.wait()
        here.copy_(buffer)


def pinned_by(arena: Arena, device: Any) -> bool:
    """Page-lock an arena on the first call, and return whether this device can write to it by itself."""
    if arena.pinned is None:
        arena.pin(lambda address, size_bytes: _register(address, size_bytes, device))
    return bool(arena.pinned)


def _register(address: int, size_bytes: int, device: Any) -> Callable[[], None] | None:
    """Page-lock memory; return how to undo that, or None if it cannot be done."""
    # torch gives access to such a call for CUDA alone, and calls ROCm cuda too.
    if device.type != "cuda":
        return None
    code = _in_a_thread(device, "cudaHostRegister", address, size_bytes, _PORTABLE)
    if code != 0:
        log.warning(
            "ciuic: %d MiB cannot be page-locked (CUDA error %s): saves stop the training for longer",
            size_bytes >> 20,
            code,
        )
        return None

    def undo() -> None:
        _in_a_thread(device, "cudaHostUnregister", address)

    return undo


def _in_a_thread(device: Any, name: str, *arguments: int) -> int | None:
    """Call a function of the CUDA runtime in a thread of its own.

    Return its code, or None if there is no such function.
    """
    torch: Any = sys.modules["torch"]
    codes: list[int] = []

    def call() -> None:
        # A new thread begins on device 0, where the call would make a context though the program may not use
        # that device at all.
        with suppress(Exception), torch.cuda.device(device):
            codes.append(int(getattr(torch.cuda.cudart(), name)(*arguments)))

    # An error of the CUDA runtime stays with the thread in which it occurred: in the program's thread the
    # next kernel launch would raise it. Once for an arena, so the cost of a thread does not matter.
    thread = threading.Thread(target=call, name="ciuic-pin", daemon=True)
    thread.start()
    thread.join()
    return codes[0] if codes else None
